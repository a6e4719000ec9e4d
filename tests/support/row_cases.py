"""Segments, and one frame of each: for golden frames, and to damage (:mod:`mutations`)."""

from __future__ import annotations

from dataclasses import dataclass

import corpus
import numpy as np
import torch

from ds_zipccl import codecs
from ds_zipccl.codecs import RowSegment
from ds_zipccl.lossy import Round


@dataclass(frozen=True)
class RowCase:
    """The row frame of elements ``begin`` to ``end`` of a segment."""

    words: torch.Tensor
    width: int
    begin: int
    end: int
    candidates: torch.Tensor | None = None
    codec: str = "cascade"
    block: int = 128
    raw_below: int = 0
    rounded: int = 0

    def frame(self, route: str = "auto") -> torch.Tensor:
        """The frame; an AssertionError where an ordinary frame would be sent."""
        segment = RowSegment(
            self.words, self.width, block=self.block, raw_below=self.raw_below, rounded=self.rounded, route=route
        )
        segment.scale_by(self.candidates)
        codec, numel = Round(self.rounded) if self.rounded else self.codec, self.end - self.begin
        bound = codecs.compress_bound(numel, self.words.dtype, codec, lossy=bool(self.rounded), block=self.block)
        frame = segment.frame(self.begin, self.end, torch.empty(bound, dtype=torch.uint8), self.codec)
        assert frame is not None
        return frame

    @property
    def part(self) -> torch.Tensor:
        """The elements of the frame as they arrive."""
        return self.arriving[self.begin : self.end]

    @property
    def arriving(self) -> torch.Tensor:
        """The segment as it arrives."""
        return codecs.project(self.words, Round(self.rounded)) if self.rounded else self.words

    def decode(self, frame: torch.Tensor, route: str = "auto") -> torch.Tensor:
        """The elements of a frame behind the history of this one."""
        memory = self.arriving[: self.end].clone()
        memory.view(torch.uint8)[self.begin * memory.itemsize :] = 0x5A
        out = memory[self.begin :]
        return codecs.decompress(frame, out, earlier=memory[: self.begin], route=route)


def drawn(count: int, pool: int, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """Rows drawn from a pool, and for each the first one of the same number."""
    chosen = (corpus.hashes(count, seed) % np.uint64(pool)).astype(np.int64)
    first: dict[int, int] = {}
    return chosen, torch.tensor([first.setdefault(int(row), at) for at, row in enumerate(chosen)], dtype=torch.int32)


def first_of_equals(data: np.ndarray, row_bytes: int) -> list[int]:
    """For each row of bytes the number of the first equal one."""
    first: dict[bytes, int] = {}
    rows = (data[at : at + row_bytes].tobytes() for at in range(0, len(data) - row_bytes + 1, row_bytes))
    return [first.setdefault(row, number) for number, row in enumerate(rows)]


def repeated(dtype: torch.dtype, width: int, count: int, pool: int, seed: int) -> torch.Tensor:
    """A segment of rows drawn from a pool of rows of every texture, with a tail."""
    kind = {kind.dtype: kind for kind in corpus.FLOATS.values()}.get(dtype, corpus.E5M2)
    words = corpus.mixed(pool * width * dtype.itemsize // kind.dtype.itemsize, kind, 128, seed)
    rows = (
        corpus.tensor(words, kind).view(torch.uint8).view(pool, -1)[drawn(count, pool, seed)[0]]
    )  # torch 2.6 indexes no float8
    return torch.cat([rows.reshape(-1), rows[0, : width // 3 * dtype.itemsize]]).view(dtype)


def scaled(kind: corpus.Float, width: int, count: int, pool: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment of rows that are copies of a pool's rows by factors, rounded, a few of them without one, and the candidates."""
    chosen, candidates = drawn(count, pool, seed)
    rows = corpus.tensor(corpus.bell(pool * width, kind, seed), kind).float().view(pool, width)[chosen]
    factors = torch.from_numpy((1 + corpus.hashes(count, seed + 1) % np.uint64(1000)).astype(np.float32)) / 300
    factors[::3] *= -1
    words = (rows * factors[:, None]).to(kind.dtype)
    words[5::9] = words[4::9][: len(words[5::9])]  # repeats too
    words[7, : width // 2] = float("nan")
    return words.reshape(-1), candidates


def _rows(name: str, dtype: torch.dtype, **more: object) -> dict[str, RowCase]:
    words = repeated(dtype, 40, 60, 25, 3)
    begin, end = 517, 2201
    return {
        f"rows_{name}": RowCase(words, 40, begin, end, **more),
        f"rows_{name}_first": RowCase(words, 40, 0, 900, **more),
    }


def _scaled(name: str, kind: corpus.Float, width: int) -> dict[str, RowCase]:
    words, candidates = scaled(kind, width, 40, 12, width)
    return {f"rows_{name}_scaled_{width}": RowCase(words, width, 3 * width + 1, 38 * width - 1, candidates)}


#: name -> case. Frames with repeats in front of them and in them, a head, a tail, scaled rows, of several widths and dtypes.
CASES: dict[str, RowCase] = {
    **{key: case for name, kind in corpus.FLOATS.items() for key, case in _rows(name, kind.dtype).items()},
    **{
        key: case
        for name, kind in corpus.SUMMED.items()
        for width in (33, 64)
        for key, case in _scaled(name, kind, width).items()
    },
    **_rows("int8", torch.int8),
    **_rows("complex128", torch.complex128),
    "rows_bf16_wide": RowCase(repeated(torch.bfloat16, 130, 12, 5, 1), 130, 0, 12 * 130 + 43, codec="wide", block=1024),
    "rows_bf16_raw": RowCase(repeated(torch.bfloat16, 24, 40, 9, 2), 24, 100, 900, raw_below=1 << 20),
    **{
        f"rows_{name}_rounded": RowCase(repeated(kind.dtype, 40, 60, 25, 3), 40, 517, 2201, rounded=3)
        for name, kind in corpus.SUMMED.items()
    },
    "rows_bf16_rounded_first": RowCase(
        repeated(torch.bfloat16, 130, 12, 5, 1), 130, 0, 12 * 130 + 43, block=1024, rounded=6
    ),
    "rows_fp16_rounded_raw": RowCase(repeated(torch.float16, 24, 40, 9, 2), 24, 100, 900, raw_below=1 << 20, rounded=2),
}
