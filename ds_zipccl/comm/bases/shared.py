"""The memory of bases for gathers into new memory, such as ZeRO-3's: a copy of the gathered tensor for each rank, for all ranks of a node
in host memory, or spread over the devices of a node."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import devices, tensors
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases import host_memory
from ds_zipccl.comm.group_state import group_nodes, group_state
from ds_zipccl.comm.topology import Levels
from ds_zipccl.comm.work import CommError, Work
from ds_zipccl.telemetry import counters

#: Shards begin at multiples of this many bytes (seed: a cache line).
ALIGNMENT = 64
#: Elements that are converted at a time to compare a shard of another dtype (default, not tuned).
_CHUNK = 1 << 20
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

#: The memory in use that :func:`allocate_bases` has allocated, with its bytes and the number of ranks that share it, 0 for that of devices.
_pools: list[tuple[StorageWeakRef, int, int]] = []
counters.count_memory("copies of gathered parameters", lambda: sum(size for _, size, _ in _alive()))


def _alive() -> list[tuple[StorageWeakRef, int, int]]:
    return [one for one in _pools if not one[0].expired()]


def held_share() -> int:
    """Return this rank's part of the host memory in use: the bytes divided by the number of ranks that share them."""
    return sum(size // node_ranks for _, size, node_ranks in _alive() if node_ranks)


@dataclass(eq=False)
class BaseSlot:
    """Memory for the shards of one tensor. ``memory`` is ``[ranks, numel]``; all ranks in ``node_ranks``, this rank included, share it.

    ``levels``: of a slot of kind "node", None for the other kinds. ``memory`` then is ``[nodes, numel]`` on this rank's device, the shards
    of ``levels.peers``: the devices of a node have all shards together, each device its own rank's and those of its peers on other nodes.
    ``filled``: the slot holds the result of a gather. ``serial``: the slot's number in the group, equal on all ranks. ``shared``: some
    ranks of the group share memory; equal on all ranks. ``asked``: the number of gathers that were asked to fill the slot, equal on all
    ranks at the same point of the program. ``version``: the number of the gather that has filled the slot. ``freed``: see :meth:`free`.
    """

    memory: torch.Tensor
    node_ranks: Sequence[int]
    serial: int
    filled: bool = False
    shared: bool = False
    asked: int = 0
    version: int = 0
    freed: bool = False
    levels: Levels | None = None
    _gather: weakref.ref[Work] | None = None

    def fits(self, ranks: int, numel: int, dtype: torch.dtype) -> bool:
        """Return whether the slot is for a gather over so many ranks of shards of ``numel`` elements. Equal on all ranks."""
        rows = ranks if self.levels is None else len(self.levels.nodes)
        return self.memory.dtype is dtype and self.memory.shape == (rows, numel)

    def own(self, rank: int) -> torch.Tensor:
        """Return the shard of this rank, whose number in the group is ``rank``."""
        return self.memory[rank if self.levels is None else self.levels.node]

    def read_by(self, work: Work | None) -> None:
        """Note the last gather that reads or fills the slot; None: it has ended. The handle's tensors are not kept alive."""
        self._gather = None if work is None else weakref.ref(work)

    def in_flight(self) -> Work | None:
        """Return the last gather that reads or fills the slot, None if it has ended; a handle that is gone has."""
        return None if self._gather is None else self._gather()

    def free(self) -> None:
        """Give the memory back, once a gather in flight has ended; no later one has this base. All ranks of the group call, once no work on
        a device reads it. Does not block."""
        self.freed, self.filled = True, False
        if (work := self.in_flight()) is not None:
            work.get_future().add_done_callback(lambda _: self._drop())
        else:
            self._drop()

    def _drop(self) -> None:
        self.memory = tensors.empty(0, self.memory.dtype).view(0, 0)


class _Serials:
    """The numbers of a group's slots."""

    def __init__(self) -> None:
        self.left = itertools.count()


@tensors.undisturbed()
def allocate_bases(
    shards: Sequence[tuple[int, torch.dtype]], kind: str, group: dist.ProcessGroup, device: torch.device | str = "cpu"
) -> list[BaseSlot]:
    """Return memory for the gathered contents of several tensors, one slot for each tensor.

    A collective: every rank calls with the same shards and kind, and blocks. Takes ``ranks * numel * itemsize`` bytes per tensor, rounded
    up; ``nodes * numel * itemsize`` with kind "node".

    Args:
        shards: (elements, dtype) of each tensor's shard, equal on every rank of the group.
        kind: "host": memory of the host, one copy for all ranks of a node; its pages are locked if ``device`` is another one. "device":
            memory of ``device``, a copy for each rank. "node": memory of ``device``, a part of one copy on each rank of a node;
            :func:`node_refused` has no reason against it.
        device: the device of the gathers.

    Raises:
        CommError: some node has no room for the memory, or its ranks cannot share memory.
    """
    if not shards:
        return []
    state = group_state(group)
    assert state is not None  # every rank of the group calls
    ranks, rank, serials = state.size, state.rank, state.of(_Serials).left
    nodes = _nodes(group) if kind == "host" else [[one] for one in range(ranks)]
    device = torch.device(device)
    node_ranks = next(node for node in nodes if rank in node)
    shared = len(nodes) < ranks
    levels = Levels.of(group_nodes(group), rank, ranks) if kind == "node" else None
    rows = ranks if levels is None else len(levels.nodes)
    sizes = _sizes(shards, rows)
    pool = _shared(sum(sizes), node_ranks, group, kind, device)
    _pools[:] = [*_alive(), (StorageWeakRef(pool.untyped_storage()), sum(sizes), len(node_ranks) * (kind == "host"))]
    found = []
    for (numel, dtype), part in zip(shards, pool.split(sizes), strict=True):
        memory = part[: rows * numel * dtype.itemsize].view(dtype).view(rows, numel)
        found.append(BaseSlot(memory, node_ranks, next(serials), shared=shared, levels=levels))
    return found


def node_refused(group: dist.ProcessGroup) -> str:
    """Return why the devices of a node cannot keep a copy together for gathers of a group; "" if they can. Equal on all ranks."""
    nodes = group_nodes(group)
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(nodes) < 2:
        return "all its ranks are in one node, and nothing is sent between nodes"
    if len(sizes) > 1:
        return f"its nodes have {sizes[0]} to {sizes[-1]} ranks, and a copy is spread over equally many"
    if sizes == [1]:
        return "it has one rank per node, on which a whole copy would lie"
    if not topology.is_grid(nodes):
        return "its ranks lie on its nodes in no regular order"
    return ""


@tensors.undisturbed()
def choose_fitting(
    shards: Sequence[tuple[int, torch.dtype]],
    share: int,
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
    kind: str = "host",
) -> tuple[list[int], int]:
    """Choose the tensors to which :func:`allocate_bases` gives memory of a kind: the largest first, as many as fit.

    A collective: every rank calls with the same shards, and blocks.

    Args:
        share: bytes by which this rank may make the memory of its node, or of its device, smaller. For host memory the ranks of a node
            bring their shares together. The poorest node or device counts.
        kind: "host" or "node".

    Returns:
        The numbers of the chosen tensors, ascending, and the bytes that the group may take on a node, or on a device; equal on all ranks.
    """
    rank = dist.get_rank(group)
    together = len(next(node for node in _nodes(group) if rank in node)) if kind == "host" else 1
    left = limit = _least(max(0, share) * together, group, torch.device(device))
    rows = dist.get_world_size(group) if kind == "host" else len(group_nodes(group))
    sizes, chosen = _sizes(shards, rows), []
    for number in sorted(range(len(shards)), key=lambda number: -sizes[number]):
        if sizes[number] <= left:
            left -= sizes[number]
            chosen.append(number)
    return sorted(chosen), limit


def _nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks that share host memory. A collective; blocks."""
    return topology.by_node(group, topology.find(group, host_memory.place()))


def _sizes(shards: Sequence[tuple[int, torch.dtype]], ranks: int) -> list[int]:
    """Return the bytes of each tensor's memory."""
    return [-(-ranks * numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT for numel, dtype in shards]


def _shared(
    nbytes: int, node_ranks: Sequence[int], group: dist.ProcessGroup, kind: str, device: torch.device
) -> torch.Tensor:
    """Return memory of a kind that all ranks in ``node_ranks`` share. A collective of the group. An error leaves nothing behind."""
    leads, several, address = dist.get_rank(group) == node_ranks[0], len(node_ranks) > 1, ""
    with ExitStack() as opened:
        with _agreeing(nbytes, group, device):
            if kind == "host" and leads and nbytes > (available := host_memory.available()):
                raise OSError(f"this node has {available / 1e6:.1f} MB available")
            if several and leads:
                descriptor, found = host_memory.create(nbytes)
                opened.callback(os.close, descriptor)
                address = found.packed()
        told = topology.tell(group, address) if kind == "host" else {}
        with _agreeing(nbytes, group, device):
            if several and not leads:
                address = told[dist.get_global_rank(group, node_ranks[0])]
                descriptor = host_memory.open_shared(host_memory.Address.unpacked(address), nbytes)
                opened.callback(os.close, descriptor)
        with _agreeing(nbytes, group, device):
            if several or (kind == "host" and device.type != "cpu"):
                mapping = _Mapping(descriptor if several else -1, nbytes)
                memory = tensors.of_buffer(mapping)
                mapping.unlock = devices.lock_pages(memory, device)
            else:
                memory = tensors.empty(nbytes, torch.uint8, device)
    return memory


def _least(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the least number of all ranks. A collective, of tensors on CPUs or else on ``device``; blocks."""
    state = group_state(group)
    wire = tensors.CPU if state is not None and state.backend("cpu") else device
    least = tensors.of_numbers([number], torch.int64).to(wire)
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return int(least.cpu())


class _Mapping(mmap.mmap):
    """Mapped memory whose pages may be locked for a device."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


@contextmanager
def _agreeing(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Run the body on all ranks, and raise CommError on all ranks if it fails on one. A collective; blocks."""
    problem = ""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # of the file system, torch and mmap
        problem = str(error)
    if not _least(not problem, group, device):
        raise CommError(
            f"{nbytes / 1e6:.1f} MB of memory for gathered parameters cannot be had: "
            f"{problem or 'another rank has the reason'}; "
            'give the node more memory, or set another "zero3_base"'
        )


def copy_others(words: torch.Tensor, rows: torch.Tensor, own: int) -> None:
    """Copy all rows of a base to those of an output, except for row ``own``, which the caller has. Work of the current stream."""
    for some in (slice(own), slice(own + 1, None)):
        if len(rows[some]):
            rows[some].copy_(words[some])


def same_bits(shard: torch.Tensor, row: torch.Tensor) -> bool:
    """Return whether a flat shard, in the dtype of a row of a base, has the row's bits. Ends at the first difference; makes no copy."""
    if shard.numel() != row.numel():
        return False
    shard = shard.detach()
    if shard.dtype is row.dtype and shard.device == row.device and shard.is_contiguous():
        return int(_memcmp(shard.data_ptr(), row.data_ptr(), row.nbytes)) == 0
    pairs = zip(shard.split(_CHUNK), row.split(_CHUNK), strict=True)
    return all(same_bits(part.to(words).contiguous(), words) for part, words in pairs)
