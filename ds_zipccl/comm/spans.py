"""Spans of elements of a flat message, as slices."""

from __future__ import annotations

from collections.abc import Sequence


def cut(numel: int, chunk: int, ranks: int) -> list[slice]:
    """Return the slice of each rank in a message of ``numel`` elements, ``chunk`` elements each. The last slices may be short or empty."""
    return [slice(min(rank * chunk, numel), min((rank + 1) * chunk, numel)) for rank in range(ranks)]


def within(spans: Sequence[slice], begin: int, end: int) -> list[slice]:
    """Return the places of elements ``begin`` to ``end`` of ``spans`` laid end to end. Elements beyond the last span are ignored."""
    found, before = [], 0
    for span in spans:
        first = max(span.start, span.start + begin - before)
        last = min(span.stop, span.start + end - before)
        if first < last:
            found.append(slice(first, last))
        before += span.stop - span.start
    return found


def common(spans: Sequence[slice], part: slice) -> list[slice]:
    """Return the elements of ``part`` that lie in one of ``spans``."""
    return [
        slice(max(span.start, part.start), min(span.stop, part.stop))
        for span in spans
        if span.start < part.stop and part.start < span.stop
    ]


def length(span: slice) -> int:
    """Return the number of elements of a span."""
    return int(span.stop - span.start)
