"""The order and the accuracy of sums.

``match`` adds in the tensor's own dtype, rounding at every step, in the order of a ring backend: the elements of chunk ``c`` of ``n`` are
summed as ``((x[c-1] + x[c-2]) + ...) + x[c]``, indices mod n. The transport knows the size of a chunk. ``fp32`` adds in fp32 in rank order
and rounds once. On several nodes with several ranks each, the same number of ranks on all nodes, ``fp32`` adds in two levels: the ranks of
a node in fp32 in rank order, rounded once; then the sums of the nodes in fp32 in the order of their first ranks, rounded once. Averages
divide before the first rounding, so that the sum of a node does not overflow where the average would not. ``plain`` leaves the sum to the
backend. The payload of a NaN sum is undefined for fp16 and fp32, as in the hardware. A NaN sum of bf16 is 0x7fc0, as in gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl.comm import topology
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.group_state import GroupState, group_nodes, group_state, resolve_group, state_of
from ds_zipccl.comm.shadow_check import Tolerance
from ds_zipccl.comm.spans import length
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.sums import add, divide, flushing, settle_nans
from ds_zipccl.policy.settled import DTYPES, Sums


class Received:
    """The tensors that the ranks of a group add to a sum: flat, of the sum's size and dtype. Each is asked for once.

    ``own`` is the contribution of this rank, ``rank``; those of its peers arrive in frames of ``exchange``.
    """

    def __init__(self, rank: int, exchange: Any, own: torch.Tensor) -> None:
        self._exchange, self.rank, self.own = exchange, rank, own

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        """Return the contribution of ``rank``: in ``into``, or in another tensor. Blocks until the contribution has arrived."""
        found: torch.Tensor = self.own if rank == self.rank else self._exchange.recv(rank, into)
        return found

    def add(self, rank: int, sums: torch.Tensor) -> None:
        """Add the contribution of ``rank`` to ``sums``, of the contribution's dtype or float32. Blocks as :meth:`take`."""
        if rank == self.rank:
            self._exchange.add(self.own, sums)
        else:
            self._exchange.recv_add(rank, self.own.dtype, sums)

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``taken``, a result of :meth:`take` or a part of one, to ``sums`` of the same dtype."""
        self._exchange.add(taken, sums)


class Reduction:
    """SUM or AVG over ``ranks`` contributions. ``kind`` is "match", "fp32" or "plain": the backend's own sum, which nothing here adds."""

    def __init__(self, kind: str, op: str, ranks: int) -> None:
        self.fp32, self.plain = kind == "fp32", kind == "plain"
        self.op, self._average = op, op == "AVG"
        self._ranks = ranks

    @property
    def divisor(self) -> int:
        """The number by which a sum is divided: the ranks for AVG, 1 for SUM."""
        return self._ranks if self._average else 1

    def fold(
        self,
        contributions: Received,
        out: torch.Tensor,
        spans: Sequence[slice],
        chunk: int,
        flushing_ranks: Sequence[bool] = (),
    ) -> None:
        """Write the sum of all contributions into flat ``out``. The caller then calls :meth:`finish`. Blocks until all have arrived.

        Args:
            contributions: where all of ``out`` has one order, contributions are taken and added in that order, one at a time.
            out: may be the memory of the own contribution, and shares no memory with the other contributions.
            spans, chunk: the places of ``out`` in the message, laid end to end, and the size of the message's chunks, in elements.
            flushing_ranks: for each rank, whether adding its contribution flushes denormals; empty: no rank flushes.
        """
        if not out.numel():
            return
        flushes = flushing_ranks or [False] * self._ranks
        if self.fp32:
            add_in_fp32(contributions, range(self._ranks), out, flushes, self.divisor)
            return
        buffers = PooledBuffers()
        parts = self._parts(spans, chunk, alike=len(set(flushes)) == 1)
        in_place = len(parts) == 1 and contributions.rank in parts[0][1][:2]
        total = out if in_place else buffers.empty(out.numel(), out.dtype)
        if len(parts) == 1:
            _add_in_order(contributions, parts[0][1], total, total, flushes)
        else:
            taken = [contributions.take(rank, buffers.empty(out.numel(), out.dtype)) for rank in range(self._ranks)]
            for span, (first, *rest) in parts:
                part = total[span].copy_(taken[first][span])
                for rank in rest:
                    with flushing(flushes[rank]):
                        contributions.add_taken(taken[rank][span], part)
        if total is not out:
            out.copy_(total)
        buffers.release()

    def finish(self, out: torch.Tensor, flushes: bool = False) -> None:
        """Divide ``out`` for AVG, as each rank of gloo does after the sum. ("fp32" has divided before rounding.)"""
        if self._average and not self.fp32:
            with flushing(flushes):
                divide(out, self._ranks)

    def _parts(self, spans: Sequence[slice], chunk: int, alike: bool) -> list[tuple[slice, Sequence[int]]]:
        """Return the longest parts of ``spans``, laid end to end, that each have one order of ranks, with that order. ``alike``: all ranks
        treat denormals in the same way."""
        if self._ranks == 2 and alike:  # the sum of two contributions does not depend on the order
            return [(slice(0, sum(map(length, spans))), range(self._ranks))]
        parts: list[tuple[slice, Sequence[int]]] = []
        at, last = 0, -1
        for span in spans:
            for c in range(span.start // chunk, (span.stop - 1) // chunk + 1):
                end = at + min((c + 1) * chunk, span.stop) - max(c * chunk, span.start)
                if c == last:
                    parts[-1] = (slice(parts[-1][0].start, end), parts[-1][1])
                else:
                    order = [(c - 1 - step) % self._ranks for step in range(self._ranks)]
                    parts.append((slice(at, end), order))
                at, last = end, c
        return parts


def add_in_fp32(
    contributions: Received,
    ranks: Sequence[int],
    out: torch.Tensor,
    flushes: Mapping[int, bool] | Sequence[bool],
    divisor: int = 1,
) -> None:
    """Add the contributions of ``ranks`` in fp32 in this order, divide by ``divisor``, and round once, into flat ``out``. Blocks until all
    have arrived. ``out`` may be the memory of the own contribution. ``flushes[r]``: whether adding the contribution of rank r flushes
    denormals."""
    buffers = PooledBuffers()
    total = buffers.empty(out.numel(), torch.float32, out.device)
    _add_in_order(contributions, ranks, total, buffers.empty(out.numel(), out.dtype, out.device), flushes)
    if divisor > 1:
        divide(total, divisor)
    out.copy_(total)
    settle_nans(out)
    buffers.release()


def on_host(contributions: Sequence[torch.Tensor], nodes: Sequence[Sequence[int]], divisor: int = 1) -> torch.Tensor:
    """Return the sum of flat tensors in host memory, one of each rank, in the order of ``fp32``, divided by ``divisor``. Blocks. Denormals
    count, whatever this thread does with them. ``nodes``: the ranks of each node."""

    def added(some: Sequence[torch.Tensor], by: int) -> torch.Tensor:
        total = some[0].to(torch.float32, copy=True)
        with flushing(False):
            for one in some[1:]:
                add(one, total)
            if by > 1:
                divide(total, by)
        rounded = total.to(some[0].dtype)
        settle_nans(rounded)
        return rounded

    if not (topology.levels(nodes) and topology.ascending(nodes)):
        return added(contributions, divisor)
    return added([added([contributions[rank] for rank in ranks], divisor) for ranks in nodes], 1)


def _add_in_order(
    contributions: Received,
    ranks: Sequence[int],
    total: torch.Tensor,
    buffer: torch.Tensor,
    flushes: Mapping[int, bool] | Sequence[bool],
) -> None:
    """Add the contributions of ``ranks`` in this order into ``total``. The first one may be taken into ``buffer``, of its dtype."""
    first, second, *rest = ranks
    adder = second
    if second == contributions.rank:  # the first two commute, and the own contribution can be added to in place
        first, second = second, first
    start = contributions.take(first, buffer)
    if start.data_ptr() != total.data_ptr():
        total.copy_(start)
    for rank, adds in ((second, adder), *zip(rest, rest)):
        with flushing(flushes[adds]):
            contributions.add(rank, total)


class Owned(NamedTuple):
    """The slices of a sum that each rank owns, in elements in memory order; whether no element has two owners."""

    spans: Sequence[Sequence[slice]] = ()
    disjoint: bool = True


class Sum(NamedTuple):
    """A sum: torch's reduce op, and its owners where it has some; then, as :func:`arithmetic` finds them, its order and type; the tolerance
    of its results against the plain backend's; and the ranks of each node where the sum goes in two levels, otherwise nothing."""

    op: Any = None
    owned: Owned = Owned()
    reduction: Reduction = Reduction("fp32", "", -1)
    tolerance: Tolerance = "bits"
    nodes: Sequence[Sequence[int]] = ()


#: Of operations that do not add.
NO_SUM = Sum()


def arithmetic(
    tensor: torch.Tensor | None,
    summed: Sum,
    group: dist.ProcessGroup | None,
    config: ZipcclConfig,
    role: str,
    numel: int | None,
    lossy: bool = False,
) -> Sum:
    """Return a sum of ``numel`` elements of tensors like ``tensor`` with the arithmetic that the config asks for. It depends on the group,
    its nodes, dtype and size and the config, never on a time or a value. A ``lossy`` sum is in fp32, whatever the config says; in stream
    order in two levels, where there are some.
    """
    state = group_state(group)
    if state is None:
        return summed  # never used
    op, nodes = reduce_op_name(summed.op), group_nodes(resolve_group(group))
    device = "" if tensor is None else tensor.device.type
    if lossy:
        levels = state.streams(device) and topology.levels(nodes) and topology.ascending(nodes)
        return Sum(summed.op, summed.owned, Reduction("fp32", op, state.size), "lossy", nodes if levels else ())
    if tensor is not None and state.streams(device):
        nbytes, dtype = None if numel is None else numel * tensor.itemsize, str(tensor.dtype).removeprefix("torch.")
        settled = state_of(None).device_sums or Sums(DTYPES if config.nccl == "on" else ())
        ours = settled.ours(role, dtype, nbytes)
        return Sum(summed.op, summed.owned, *_in_stream_order(state, op, nodes, config, role, ours))
    reduction, tolerance = _exactness(config.reduction, state.backend(device), op, state.size)
    levels = reduction.fp32 and topology.levels(nodes)
    return Sum(summed.op, summed.owned, reduction, tolerance, nodes if levels else ())


@functools.lru_cache
def _exactness(kind: str, backend: str, op: str, ranks: int) -> tuple[Reduction, Tolerance]:
    if kind == "auto":
        kind = "match" if backend in TRANSPORTS else "fp32"
    exact = kind == "match" or (ranks == 2 and op == "SUM")
    return Reduction(kind, op, ranks), "nan" if exact else "rounding"


def _in_stream_order(
    state: GroupState, op: str, nodes: Sequence[Sequence[int]], config: ZipcclConfig, role: str, ours: bool
) -> tuple[Reduction, Tolerance, Sequence[Sequence[int]]]:
    """Return the arithmetic on a group in stream order, whose backend promises no order. ``ours``: the sum is where ``reduction`` is
    auto."""
    kind: str = config.reduction
    mode, levels = config.mode_of(role), topology.levels(nodes) and topology.ascending(nodes)
    exact = state.size == 2 and op == "SUM"  # one order; before an average NCCL multiplies
    several = len(nodes) > 1
    if (kind == "match" and exact) or (kind == "auto" and ours):
        kind = "fp32"
    suits = levels or (several and all(len(ranks) == 1 for ranks in nodes))
    if kind == "fp32" and mode == "auto" and not suits and not (several and config.reduction == "fp32"):
        kind = "plain"  # in one level ours would send more than the backend's
    reduction = Reduction(kind if kind == "fp32" else "plain", op, state.size)
    return reduction, "nan" if exact else "rounding", nodes if levels and reduction.fp32 else ()


@functools.cache
def _names() -> dict[Any, str]:
    return {member: name for name, member in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_op_name(op: Any) -> str:
    """Return the name of a reduce op as in ``torch.distributed.ReduceOp``."""
    names = _names()
    if op in names:  # RedOpType itself, the type of torch.distributed.ReduceOp.SUM
        return names[op]
    return next((name for member, name in names.items() if op == member), "unknown")
