"""The order and the accuracy of sums.

``match`` adds in the tensor's own dtype, rounding at every step, in the order of gloo's rings: the elements of chunk ``c`` of
``n`` are summed as ``((x[c-1] + x[c-2]) + ...) + x[c]``, indices mod n. Chunks are cut by gloo's segment sizes, which differ
between its all-reduce and its reduce. ``fp32`` adds in fp32 in rank order and rounds once. Which payload a NaN sum carries is
left open for fp16 and fp32, by the hardware as well; bf16 sums make it 0x7fc0, as gloo's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.kernels.sums import divide, flushing, settle_nans

#: gloo's largest segment, in bytes (admission: part of its rings' geometry).
_SEGMENT_BYTES = 1 << 20


def _ceil(count: int, unit: int) -> int:
    return (count + unit - 1) // unit


def _up(count: int, unit: int) -> int:
    return _ceil(count, unit) * unit


def all_reduce_chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Elements in a chunk of gloo's ring all-reduce and reduce-scatter."""
    total = numel * itemsize
    segments = _up(max(_ceil(total, _SEGMENT_BYTES), 2 * ranks), ranks)
    segment = _up(_ceil(total, segments), itemsize)
    return segments // ranks * segment // itemsize


def reduce_chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Elements in a chunk of gloo's ring reduce."""
    total = numel * itemsize
    segment = _up(max(1, min(_ceil(total, 2 * ranks), _SEGMENT_BYTES)), itemsize)
    segments = _up(max(_ceil(total, segment), 2 * ranks), ranks)
    return segments // ranks * segment // itemsize


def cut(numel: int, chunk: int, ranks: int) -> list[slice]:
    """The chunk of each rank, in a message of ``numel`` elements; the last ones may be short or empty."""
    return [slice(min(rank * chunk, numel), min((rank + 1) * chunk, numel)) for rank in range(ranks)]


def within(spans: Sequence[slice], begin: int, end: int) -> list[slice]:
    """Where the elements from ``begin`` to ``end`` of ``spans``, laid end to end, lie; beyond the end there are none."""
    found, before = [], 0
    for span in spans:
        first = max(span.start, span.start + begin - before)
        last = min(span.stop, span.start + end - before)
        if first < last:
            found.append(slice(first, last))
        before += span.stop - span.start
    return found


class Contributions(Protocol):
    """What every rank of the group adds to a sum; flat tensors of the sum's size and dtype, each asked for once.

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
        """Add what :meth:`take` has given, or a part of it, to ``sums`` of its dtype."""
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
            out: may be the own contribution's memory, and shares none with others'.
            spans, chunk: what ``out`` is of the message, laid end to end, and the size of the message's chunks, in elements.
            flushing_ranks: whether each rank flushes denormals when it adds its contribution; empty: none does.
        """
        if not out.numel():
            return
        lease = Lease()
        flushes = flushing_ranks or [False] * self._ranks
        pieces = self._pieces(spans, chunk, alike=len(set(flushes)) == 1)
        first, second, *others = pieces[0][1]
        adder = second
        if second == contributions.rank:  # the first two commute, and what is here already can be added to
            first, second = second, first
        in_place = len(pieces) == 1 and first == contributions.rank and not self._fp32
        total = out if in_place else lease.like(out, torch.float32 if self._fp32 else out.dtype)
        if len(pieces) == 1:
            start = contributions.take(first, lease.like(out, out.dtype) if self._fp32 else total)
            if start.data_ptr() != total.data_ptr():
                total.copy_(start)
            for rank, adds in ((second, adder), *zip(others, others)):
                with flushing(flushes[adds]):
                    contributions.add(rank, total)
        else:
            taken = [contributions.take(rank, lease.like(out, out.dtype)) for rank in range(self._ranks)]
            for piece, (first, *others) in pieces:
                part = total[piece].copy_(taken[first][piece])
                for rank in others:
                    with flushing(flushes[rank]):
                        contributions.add_taken(taken[rank][piece], part)
        if self._fp32 and self._average:
            divide(total, self._ranks)
        if total is not out:
            out.copy_(total)
        if self._fp32:
            settle_nans(out)
        lease.release()

    def finish(self, out: torch.Tensor, flushes: bool = False) -> None:
        """Divide for AVG, as gloo does after everything else on each rank ("fp32" has done it before rounding)."""
        if self._average and not self._fp32:
            with flushing(flushes):
                divide(out, self._ranks)

    def _pieces(self, spans: Sequence[slice], chunk: int, alike: bool) -> list[tuple[slice, Sequence[int]]]:
        """Parts of ``spans`` laid end to end, as long as can be, with the order of ranks in which each is summed. ``alike``: all ranks add
        in the same way."""
        if self._fp32 or (self._ranks == 2 and alike):  # the sum of two does not depend on the order
            return [(slice(0, sum(span.stop - span.start for span in spans)), range(self._ranks))]
        pieces: list[tuple[slice, Sequence[int]]] = []
        at, last = 0, -1
        for span in spans:
            for c in range(span.start // chunk, (span.stop - 1) // chunk + 1):
                end = at + min((c + 1) * chunk, span.stop) - max(c * chunk, span.start)
                if c == last:
                    pieces[-1] = (slice(pieces[-1][0].start, end), pieces[-1][1])
                else:
                    order = [(c - 1 - step) % self._ranks for step in range(self._ranks)]
                    pieces.append((slice(at, end), order))
                at, last = end, c
        return pieces
