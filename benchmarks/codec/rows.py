"""``bench codec --codec rows``: row frames, compared with memcpy and with ordinary frames of the same fragments."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.codec import sets
from ds_zipccl.benchmarks.codec.trial import IDLE_S, accepted, calls_of, seconds_of, spoil, usable_routes, wrong_of
from ds_zipccl.tools import ToolError
from ds_zipccl.tools.tables import Column, alike

if TYPE_CHECKING:
    import torch

CODEC = "rows"
WIDTHS = (256, 1024, 4096)
#: Timed steps; "plain" means ordinary frames.
_STEPS = ("memcpy", "plain_encode", "encode", "plain_decode", "decode")
COLUMNS = (
    Column("route", width=6),
    Column("dtype", width=8),
    Column("data", width=14),
    Column("width", ",d", 6),
    Column("numel", ",d", 10),
    Column("fragments", "d"),
    Column("ratio", ".3f", 7),
    Column("plain_ratio", ".3f"),
    *(Column(f"{name}_gbps", ".2f") for name in (*_STEPS[1:], "memcpy")),
    *alike("encode_plain decode_plain encode_memcpy decode_memcpy", ".3f"),
    Column("wrong", "d"),
)


class RowTrial:
    """A segment in fragments, coded twice: as ordinary frames, and as row frames where these are smaller.

    A decoder of a row frame has the fragments before it. ``sources``: source rows of scaled copies, or None.
    """

    def __init__(
        self, words: torch.Tensor, width: int, sources: torch.Tensor | None, fragment: int, route: str, block: int
    ) -> None:
        import torch

        from ds_zipccl import codecs

        self._words, self._width, self._sources, self._route, self._block = words, width, sources, route, block
        starts = range(0, words.numel(), fragment)
        self._spans = [(start, min(start + fragment, words.numel())) for start in starts]
        bounds = [codecs.compress_bound(end - start, words.dtype, block=block) for start, end in self._spans]
        self._outs = {name: [torch.empty(bound, dtype=torch.uint8) for bound in bounds] for name in ("rows", "plain")}
        self._frames = dict(self._outs)
        self.back = torch.empty_like(words)

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return len(self._spans)

    def coded_bytes(self, name: str) -> int:
        """Bytes of all frames of the kind ``name``: "rows" or "plain"."""
        return sum(frame.numel() for frame in self._frames[name])

    def plain_encode(self) -> None:
        self._frames["plain"] = [self._plain(start, end, out) for (start, end), out in self._places("plain")]

    def encode(self) -> None:
        from ds_zipccl import codecs

        segment = codecs.RowSegment(self._words, self._width, block=self._block, route=self._route)
        segment.scale_by(self._sources)
        frames = []
        for (start, end), out in self._places("rows"):
            frame = segment.frame(start, end, out)
            frames.append(self._plain(start, end, out) if frame is None else frame)
        self._frames["rows"] = frames

    def plain_decode(self) -> None:
        from ds_zipccl import codecs

        for (start, end), frame in zip(self._spans, self._frames["plain"], strict=True):
            codecs.decompress(frame, self.back[start:end], route=self._route)

    def decode(self) -> None:
        from ds_zipccl import codecs

        for (start, end), frame in zip(self._spans, self._frames["rows"], strict=True):
            codecs.decompress(frame, self.back[start:end], earlier=self.back[:start], route=self._route)

    def _places(self, name: str) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        return zip(self._spans, self._outs[name], strict=True)

    def _plain(self, start: int, end: int, out: torch.Tensor) -> torch.Tensor:
        from ds_zipccl import codecs

        words = self._words[start:end]
        return codecs.compress(words, shaped=False, checksum=False, block=self._block, out=out, route=self._route)


@dataclass(frozen=True)
class Case:
    """A tensor to measure. ``dtype``: torch name."""

    rows: sets.RowSet
    width: int
    dtype: str
    numel: int


def cases(args: argparse.Namespace) -> list[Case]:
    """The tensors of ``--data``, ``--width``, ``--dtype`` and ``--numel``.

    Raises:
        ToolError: a data set has no rows that repeat or scale earlier ones, or a width is below 1.
    """
    named = args.data or sets.usual_rows()
    for spec in named:
        if not isinstance(spec, sets.RowSet):
            raise ToolError(f"{spec.name!r} has no repeated or scaled rows; known: {', '.join(sets.ROWS)}")
    if min(args.width) < 1:
        raise ToolError(f"--width must be at least 1, got {min(args.width)}")
    return [
        Case(rows, width, dtype, numel)
        for numel in args.numel
        for dtype in args.dtype
        for width in args.width
        for rows in named
    ]


def rows(args: argparse.Namespace, found: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each case and route; the tensor of a case is made once."""
    for case in found:
        words, sources = case.rows.make(case.numel, case.width, case.dtype)
        for route in usable_routes(args.route):
            yield _row(case, words, sources if case.rows.name == "scaled" else None, route, args)


def count(args: argparse.Namespace, found: list[Case]) -> int:
    """Number of rows that :func:`rows` yields."""
    return len(found) * len(usable_routes(args.route))


def _row(
    case: Case, words: torch.Tensor, sources: torch.Tensor | None, route: str, args: argparse.Namespace
) -> dict[str, Any]:
    from ds_zipccl.policy import wire

    fragment = wire.fragment_numel(words.numel(), words.itemsize, 2, STAGING_BYTES)
    trial = RowTrial(words, case.width, sources, fragment, route, args.block)
    row: dict[str, Any] = {"route": route, "dtype": case.dtype, "data": str(case.rows), "width": case.width}
    row |= {"numel": case.numel, "fragments": trial.fragments, "ratio": None, "plain_ratio": None}
    about = f"{route} {case.dtype} {case.rows}"
    speeds, wrong = accepted(about, case.numel, partial(_measure, words, trial, args.repeats))
    if speeds:
        row["ratio"] = words.nbytes / trial.coded_bytes("rows")
        row["plain_ratio"] = words.nbytes / trial.coded_bytes("plain")
    row |= {f"{name}_gbps": speeds.get(name) for name in (*_STEPS[1:], "memcpy")}
    for name, by in (("encode", "plain"), ("decode", "plain"), ("encode", "memcpy"), ("decode", "memcpy")):
        other = f"plain_{name}" if by == "plain" else by
        row[f"{name}_{by}"] = speeds[name] / speeds[other] if speeds else None
    return row | {"wrong": wrong}


#: Staging memory from which the size of fragments follows: the default of ``staging_mib``.
STAGING_BYTES = 64 << 20


def _measure(words: torch.Tensor, trial: RowTrial, repeats: int) -> tuple[dict[str, float], int]:
    """Speed of each step in GB/s, medians of timings in turn, and most wrong elements after any decoding."""
    import torch

    raw = words.view(torch.uint8)
    copied = torch.empty_like(raw)
    steps: dict[str, Callable[[], object]] = {name: getattr(trial, name) for name in _STEPS[1:]}
    steps["memcpy"] = lambda: copied.copy_(raw)
    wrong = 0
    for name in _STEPS:  # untimed: builds kernels and touches pages
        steps[name]()
    calls = {name: calls_of(steps[name]) for name in _STEPS}
    times: dict[str, list[float]] = {name: [] for name in _STEPS}
    for _ in range(repeats):
        for name in _STEPS:
            spoil(trial.back, words)
            if torch.get_num_threads() > 1:
                time.sleep(IDLE_S)
            times[name].append(seconds_of(steps[name], calls[name]))
            if name.endswith("decode"):
                wrong = max(wrong, wrong_of(trial.back, words))
    return {name: words.nbytes / statistics.median(found) / 1e9 for name, found in times.items()}, wrong
