"""The order and the accuracy of sums.

``match`` adds in the tensor's own dtype, rounding at every step, in the order of gloo's rings: the elements of chunk ``c`` of
``n`` are summed as ``((x[c-1] + x[c-2]) + ...) + x[c]``, indices mod n. Chunks are cut by gloo's segment sizes, which differ
between its all-reduce and its reduce. ``fp32`` adds in fp32 in rank order and rounds once. Which payload a NaN sum carries is
left open for fp16 and fp32, by the hardware as well; bf16 sums make it 0x7fc0, as gloo's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ds_zipccl.comm.buffers import Lease
from ds_zipccl.kernels.sums import settle_nans

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


class Reduction:
    """SUM or AVG over ``ranks`` contributions. ``kind`` is "match" or "fp32"."""

    def __init__(self, kind: str, op: str, ranks: int) -> None:
        self._fp32 = kind == "fp32"
        self._average = op == "AVG"
        self._ranks = ranks

    def fold(self, contributions: Contributions, out: torch.Tensor, begin: int, chunk: int) -> None:
        """Write the sum of all contributions into flat ``out``; :meth:`finish` is still to come.

        Args:
            contributions: where one order serves all of ``out``, they are taken and added in that order, one at a time.
            out: may be the own contribution's memory, and shares none with others'.
            begin, chunk: first element of ``out`` in the message, and the size of the message's chunks, in elements.
        """
        if not out.numel():
            return
        lease = Lease()
        pieces = list(self._pieces(begin, begin + out.numel(), chunk))
        first, second, *others = pieces[0][1]
        if second == contributions.rank:  # the first two commute, and what is here already can be added to
            first, second = second, first
        in_place = len(pieces) == 1 and first == contributions.rank and not self._fp32
        total = out if in_place else lease.like(out, torch.float32 if self._fp32 else out.dtype)
        if len(pieces) == 1:
            taken = contributions.take(first, lease.like(out, out.dtype) if self._fp32 else total)
            if taken.data_ptr() != total.data_ptr():
                total.copy_(taken)
            for rank in (second, *others):
                contributions.add(rank, total)
        else:
            taken = [contributions.take(rank, lease.like(out, out.dtype)) for rank in range(self._ranks)]
            for piece, (first, *others) in pieces:
                part = total[piece].copy_(taken[first][piece])
                for rank in others:
                    part.add_(taken[rank][piece])
        if self._fp32 and self._average:
            total.div_(self._ranks)
        if total is not out:
            out.copy_(total)
        lease.release()
        settle_nans(out)

    def finish(self, out: torch.Tensor) -> None:
        """Divide for AVG, as gloo does after everything else ("fp32" has done it before rounding)."""
        if self._average and not self._fp32:
            out.div_(self._ranks)

    def _pieces(self, begin: int, end: int, chunk: int) -> Iterator[tuple[slice, Sequence[int]]]:
        """Parts of [begin, end), relative to ``begin``, with the order of ranks in which each is summed."""
        if self._fp32:
            yield slice(0, end - begin), range(self._ranks)
            return
        for c in range(begin // chunk, (end - 1) // chunk + 1):
            order = [(c - 1 - step) % self._ranks for step in range(self._ranks)]
            yield slice(max(c * chunk, begin) - begin, min((c + 1) * chunk, end) - begin), order
