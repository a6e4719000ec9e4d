"""The order and the accuracy of sums.

``match`` adds in the tensor's own dtype, rounding at every step, in the order of a ring backend: the elements of chunk ``c`` of ``n`` are
summed as ``((x[c-1] + x[c-2]) + ...) + x[c]``, indices mod n. The transport knows the size of a chunk. ``fp32`` adds in fp32 in rank order
and rounds once. The payload of a NaN sum is undefined for fp16 and fp32, as in the hardware. A NaN sum of bf16 is 0x7fc0, as in gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.shadow_check import Tolerance
from ds_zipccl.comm.spans import length
from ds_zipccl.comm.transport import documented_sums
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.sums import divide, flushing, settle_nans


class Contributions(Protocol):
    """The tensors that the ranks of a group add to a sum: flat, of the sum's size and dtype. Each is asked for once.

    ``own`` is the contribution of this rank, ``rank``, and needs no receive.
    """

    rank: int
    own: torch.Tensor

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        """Return the contribution of ``rank``: in ``into``, or in another tensor. Blocks until the contribution has arrived."""
        ...

    def add(self, rank: int, sums: torch.Tensor) -> None:
        """Add the contribution of ``rank`` to ``sums``, of the contribution's dtype or float32. Blocks as :meth:`take`."""
        ...

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``taken``, a result of :meth:`take` or a part of one, to ``sums`` of the same dtype."""
        ...


class Reduction:
    """SUM or AVG over ``ranks`` contributions. ``kind`` is "match" or "fp32"."""

    def __init__(self, kind: str, op: str, ranks: int) -> None:
        self._fp32 = kind == "fp32"
        self._average = op == "AVG"
        self._ranks = ranks

    def fold(
        self,
        contributions: Contributions,
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
        buffers = PooledBuffers()
        flushes = flushing_ranks or [False] * self._ranks
        parts = self._parts(spans, chunk, alike=len(set(flushes)) == 1)
        first, second, *rest = parts[0][1]
        adder = second
        if second == contributions.rank:  # the first two commute, and the own contribution can be added to in place
            first, second = second, first
        in_place = len(parts) == 1 and first == contributions.rank and not self._fp32
        total = out if in_place else buffers.empty(out.numel(), torch.float32 if self._fp32 else out.dtype, out.device)
        if len(parts) == 1:
            start = contributions.take(
                first, buffers.empty(out.numel(), out.dtype, out.device) if self._fp32 else total
            )
            if start.data_ptr() != total.data_ptr():
                total.copy_(start)
            for rank, adds in ((second, adder), *zip(rest, rest)):
                with flushing(flushes[adds]):
                    contributions.add(rank, total)
        else:
            taken = [
                contributions.take(rank, buffers.empty(out.numel(), out.dtype, out.device))
                for rank in range(self._ranks)
            ]
            for span, (first, *rest) in parts:
                part = total[span].copy_(taken[first][span])
                for rank in rest:
                    with flushing(flushes[rank]):
                        contributions.add_taken(taken[rank][span], part)
        if self._fp32 and self._average:
            divide(total, self._ranks)
        if total is not out:
            out.copy_(total)
        if self._fp32:
            settle_nans(out)
        buffers.release()

    def finish(self, out: torch.Tensor, flushes: bool = False) -> None:
        """Divide ``out`` for AVG, as each rank of gloo does after the sum. ("fp32" has divided before rounding.)"""
        if self._average and not self._fp32:
            with flushing(flushes):
                divide(out, self._ranks)

    def _parts(self, spans: Sequence[slice], chunk: int, alike: bool) -> list[tuple[slice, Sequence[int]]]:
        """Return the longest parts of ``spans``, laid end to end, that each have one order of ranks, with that order. ``alike``: all ranks
        treat denormals in the same way."""
        if self._fp32 or (self._ranks == 2 and alike):  # the sum of two contributions does not depend on the order
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


def arithmetic(
    device: str, op: Any, group: dist.ProcessGroup | None, config: ZipcclConfig
) -> tuple[Reduction, Tolerance]:
    """Return the reduction that the config asks for, and the tolerance of its results against the plain backend's."""
    state = group_state(group)
    if state is None:
        return Reduction("fp32", "", -1), "nan"  # never used
    return _exactness(config.reduction, state.backend(device), reduce_op_name(op), state.size)


@functools.lru_cache
def _exactness(kind: str, backend: str, op: str, ranks: int) -> tuple[Reduction, Tolerance]:
    if kind == "auto":
        kind = "match" if documented_sums(backend) else "fp32"
    exact = kind == "match" or (ranks == 2 and op == "SUM")
    return Reduction(kind, op, ranks), "nan" if exact else "rounding"


@functools.cache
def _names() -> dict[Any, str]:
    return {member: name for name, member in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_op_name(op: Any) -> str:
    """Return the name of a reduce op as in ``torch.distributed.ReduceOp``."""
    names = _names()
    if op in names:  # RedOpType itself, the type of torch.distributed.ReduceOp.SUM
        return names[op]
    return next((name for member, name in names.items() if op == member), "unknown")
