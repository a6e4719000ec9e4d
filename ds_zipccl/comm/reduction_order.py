"""The order and the accuracy of sums.

``match`` adds in the tensor's own dtype, rounding at every step, in the order of a ring backend: the elements of chunk ``c`` of ``n`` are
summed as ``((x[c-1] + x[c-2]) + ...) + x[c]``, indices mod n. The transport knows the size of a chunk. ``fp32`` adds in fp32 in rank order
and rounds once. The payload of a NaN sum is left open for fp16 and fp32, by the hardware as well; bf16 sums make it 0x7fc0, as gloo does.
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
    """The tensors that the ranks of a group add to a sum: flat, of the sum's size and dtype, each asked for once.

    ``own`` is the contribution of ``rank``, which is here already.
    """

    rank: int
    own: torch.Tensor

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        """The contribution: ``into``, filled, or another tensor."""
        ...

    def add(self, rank: int, sums: torch.Tensor) -> None:
        """Add the contribution to ``sums``, of its dtype or float32."""
        ...

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the result of :meth:`take`, or a part of it, to ``sums`` of its dtype."""
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
        """Write the sum of all contributions into flat ``out``; :meth:`finish` is still to come.

        Args:
            contributions: where one order serves all of ``out``, they are taken and added in that order, one at a time.
            out: may be the own contribution's memory, and shares none with the other contributions.
            spans, chunk: the places of ``out`` in the message, laid end to end, and the size of the message's chunks, in elements.
            flushing_ranks: whether each rank flushes denormals when it adds its contribution; empty: none does.
        """
        if not out.numel():
            return
        buffers = PooledBuffers()
        flushes = flushing_ranks or [False] * self._ranks
        parts = self._parts(spans, chunk, alike=len(set(flushes)) == 1)
        first, second, *others = parts[0][1]
        adder = second
        if second == contributions.rank:  # the first two commute, and what is here already can be added to
            first, second = second, first
        in_place = len(parts) == 1 and first == contributions.rank and not self._fp32
        total = out if in_place else buffers.empty(out.numel(), torch.float32 if self._fp32 else out.dtype, out.device)
        if len(parts) == 1:
            start = contributions.take(
                first, buffers.empty(out.numel(), out.dtype, out.device) if self._fp32 else total
            )
            if start.data_ptr() != total.data_ptr():
                total.copy_(start)
            for rank, adds in ((second, adder), *zip(others, others)):
                with flushing(flushes[adds]):
                    contributions.add(rank, total)
        else:
            taken = [
                contributions.take(rank, buffers.empty(out.numel(), out.dtype, out.device))
                for rank in range(self._ranks)
            ]
            for span, (first, *others) in parts:
                part = total[span].copy_(taken[first][span])
                for rank in others:
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
        """Divide for AVG, as gloo does after everything else on each rank ("fp32" has done it before rounding)."""
        if self._average and not self._fp32:
            with flushing(flushes):
                divide(out, self._ranks)

    def _parts(self, spans: Sequence[slice], chunk: int, alike: bool) -> list[tuple[slice, Sequence[int]]]:
        """Parts of ``spans`` laid end to end, as long as can be, with the order of ranks in which each is summed. ``alike``: all ranks add
        in the same way."""
        if self._fp32 or (self._ranks == 2 and alike):  # the sum of two does not depend on the order
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
    """Return the arithmetic that the config asks for, and how near it comes to the plain backend's."""
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
    if op in names:  # RedOpType itself, which is what torch.distributed.ReduceOp.SUM is
        return names[op]
    return next((name for member, name in names.items() if op == member), "unknown")
