"""A base for gathers into new memory, such as ZeRO-3's: a copy of what was gathered, one for each rank, or one for all ranks of a node."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import stats
from ds_zipccl.comm import topology
from ds_zipccl.comm.buffers import Lease
from ds_zipccl.comm.exchange import Link
from ds_zipccl.comm.rounds import posting
from ds_zipccl.comm.work import CommError

#: Where the ranks of a node find each other's memory (admission: a file system in memory).
SHARED = Path("/dev/shm")
TOKEN_BYTES = 16
#: Shards begin at multiples of this many bytes (seed: a cache line).
ALIGNMENT = 64
#: Round after those of the gather itself.
_DONE = 3

#: Memory that :func:`keep` has given, while somebody uses it, and its bytes.
_pools: list[tuple[StorageWeakRef, int]] = []


@dataclass(slots=True, eq=False, weakref_slot=True)
class Kept:
    """What was gathered of one tensor: ``memory`` is ``[ranks, numel]``, the same for all ranks in ``mates``, this one among them.

    ``filled``: some gather has left it there.
    """

    memory: torch.Tensor
    mates: Sequence[int]
    filled: bool = False


class Stored:
    """A :class:`ds_zipccl.comm.Base` for a gather of several tensors laid end to end, each of which has its own :class:`Kept`.

    No two gathers in flight may be of the same tensor: the result would be right, but not much of it a difference.
    """

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._kept = kept

    def begin(self, link: Link, places: Sequence[torch.Tensor], lease: Lease) -> torch.Tensor | None:
        """See :class:`ds_zipccl.comm.Base`."""
        if not all(kept.filled for kept in self._kept):
            return None
        last = lease.like(places[link.rank], places[link.rank].dtype)
        for rank, place in enumerate(places):
            for part, memory in self._parts(last if rank == link.rank else place, rank):
                part.copy_(memory)
        return last

    def end(self, link: Link, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """See :class:`ds_zipccl.comm.Base`. Each rank of a node writes some of the shards: all of them have read what stood there, as they
        have told its hash. None goes on before all are written."""
        mates = self._kept[0].mates
        for rank, place in enumerate(places):
            writer = rank if rank in mates else mates[rank % len(mates)]
            if writer == link.rank:
                for part, memory in self._parts(place, rank):
                    memory.copy_(part)
        for kept in self._kept:
            kept.filled = True
        others = [mate for mate in mates if mate != link.rank]
        word = torch.zeros(1, dtype=torch.uint8)
        with posting(link, _DONE, ours=True) as exchange:
            for mate in others:
                exchange.expect(mate, word)
            for mate in others:
                exchange.send(word, mate)
            for mate in others:
                exchange.receive(mate, word)

    def _parts(self, shard: torch.Tensor, rank: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """The shard of a rank, tensor by tensor, each with the memory of it."""
        sizes = [kept.memory.shape[1] for kept in self._kept]
        return [(part, kept.memory[rank]) for part, kept in zip(shard.split(sizes), self._kept, strict=True)]


def keep(
    shards: Sequence[tuple[int, torch.dtype]], kind: str, group: dist.ProcessGroup, device: torch.device | str = "cpu"
) -> list[Kept]:
    """Memory for what is gathered of several tensors, whose shards have so many elements on every rank of the group.

    A collective: every rank calls it with the same shards and kind. Takes ``ranks * numel * itemsize`` bytes a tensor, rounded up.

    Args:
        kind: "host": memory of the host, one copy for all ranks of a node. "device": memory of ``device``, a copy for each rank.

    Raises:
        CommError: some node has no room for it, or its ranks cannot share memory.
    """
    if not shards:
        return []
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mates: Sequence[int] = [rank]
    if kind == "host":
        device = "cpu"
        mates = next(node for node in topology.by_node(group, topology.find(group)) if rank in node)
    sizes = [-(-ranks * numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT for numel, dtype in shards]
    total = sum(sizes)
    pool = _shared(total, mates, group) if kind == "host" else torch.empty(total, dtype=torch.uint8, device=device)
    _pools.append((StorageWeakRef(pool.untyped_storage()), total))
    _pools[:] = [(pool, size) for pool, size in _pools if not pool.expired()]
    stats.record_memory("copies of gathered parameters", sum(size for _, size in _pools))
    found = []
    for (numel, dtype), part in zip(shards, pool.split(sizes), strict=True):
        memory = part[: ranks * numel * dtype.itemsize].view(dtype).view(ranks, numel)
        found.append(Kept(memory, mates))
    return found


def _shared(nbytes: int, mates: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Memory that all ranks in ``mates`` see. It has a name only until all have it: nothing is left behind whatever happens to them."""
    token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
    tokens = [torch.empty_like(token) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tokens, token, group)
    file = SHARED / f"ds_zipccl-{bytes(tokens[mates[0]].tolist()).hex()}"
    leads = dist.get_rank(group) == mates[0]
    try:
        with _agreeing(nbytes, group):
            if leads:
                _reserve(file, nbytes)
        with _agreeing(nbytes, group):
            memory = _map(file, nbytes)
    finally:
        if leads:
            file.unlink(missing_ok=True)
    return memory


@contextmanager
def _agreeing(nbytes: int, group: dist.ProcessGroup) -> Iterator[None]:
    """All ranks go on together, or none does."""
    problem = ""
    try:
        yield
    except OSError as error:
        problem = str(error)
    good = torch.tensor([not problem], dtype=torch.uint8)
    dist.all_reduce(good, dist.ReduceOp.MIN, group)
    if not good:
        raise CommError(
            f"{nbytes / 1e6:.1f} MB of memory shared by the ranks of a node cannot be had: "
            f"{problem or 'another rank has the reason'}; "
            f'make {SHARED} larger (docker run --shm-size), or set "zero3_base" to "device" or "off"'
        )


def _reserve(file: Path, nbytes: int) -> None:
    """Make the file with all its room, so that no later write can fail."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def _map(file: Path, nbytes: int) -> torch.Tensor:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_size, found.st_uid) != (nbytes, os.geteuid()):
            raise OSError(f"{file} has {found.st_size} bytes of user {found.st_uid}, wanted {nbytes} of our own")
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
