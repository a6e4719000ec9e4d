"""The cases of tests/gpu/driver.cu as a file: words, their frames, and sums of frames, made on the CPU.

    python tests/gpu/golden_cases.py FILE [--large | --few | --bf16]

The frames of tests/golden that kernels write, tensors of several chunks, and sums. ``--large`` adds tensors that fill a GPU; ``--few``
leaves most cases out, ``--bf16`` those of other dtypes. The file has the eight bytes of :data:`MAGIC` and the number of cases (u64); then
for each case :data:`HEAD` and its parts, each behind its size (u64).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import corpus
import numpy as np
import torch
from test_golden import FOLDER, TENSORS

from ds_zipccl import frame as framing
from ds_zipccl.codecs import compress, region_hash
from ds_zipccl.kernels.cuda import jobs

MAGIC = b"ZCCASES1"
#: Name, kind, dtype of the format, bytes of a word, block, code, number of parts, log2 of an element's words, zero, number of words, hash
#: of the words.
HEAD = struct.Struct("<48s8I3Q")
FRAME, SUM = 0, 1
CODES = {"cascade": 0, "wide": 1, "delta": 2}


@dataclass
class Case:
    """One case: a frame (words, frame, base of a delta frame) or a sum (rounded, in fp32, frames and words of the summands)."""

    name: str
    kind: int
    dtype: torch.dtype
    block: int
    code: str
    numel: int
    parts: list[bytes] = field(repr=False)
    hash: tuple[int, int] = (0, 0)

    def packed(self) -> bytes:
        """The case as the driver reads it."""
        words = jobs.words_of(self.dtype, self.code == "delta")
        dtype = framing.DTYPE_IDS[self.dtype]
        numbers = (dtype, words.itemsize, self.block, CODES[self.code], len(self.parts), words.element_log2, 0)
        head = HEAD.pack(self.name.encode(), self.kind, *numbers, self.numel * words.per_element, *self.hash)
        return head + b"".join(struct.pack("<Q", len(part)) + part for part in self.parts)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def of_frame(name: str, tensor: torch.Tensor, frame: bytes, code: str, base: torch.Tensor | None = None) -> Case:
    """The case of a flat frame without a checksum."""
    block = 1 << frame[9]
    parts = [raw(tensor), frame] + ([] if base is None else [raw(base)])
    first, second = struct.unpack("<2Q", region_hash(tensor.view(torch.uint8)))
    return Case(name, FRAME, tensor.dtype, block, code, tensor.numel(), parts, (first, second))


def golden() -> Iterator[Case]:
    """The files of tests/golden that the kernels write: flat, coded, without a checksum."""
    for name, (tensor, arguments) in TENSORS.items():
        if arguments.get("shaped", True) or arguments.get("codec") == "raw":
            continue
        code = str(arguments.get("codec", "cascade"))
        base = arguments.get("base")
        assert base is None or isinstance(base, torch.Tensor)
        yield of_frame(name, tensor, (FOLDER / f"{name}.bin").read_bytes(), code, base)


def coded(name: str, tensor: torch.Tensor, code: str, block: int, base: torch.Tensor | None = None) -> Case:
    """The case of a tensor that the CPU's kernels code."""
    frame = compress(tensor, code, block=block, base=base, shaped=False, checksum=False)
    return of_frame(name, tensor, raw(frame), code, base)


def words(kind: corpus.Float, numel: int, block: int, seed: int) -> np.ndarray:
    """Words in which every block has a texture of its own; those of many are a few, repeated, with other signs."""
    few = corpus.mixed(min(numel, 1 << 16), kind, block, seed)
    turns = -(-numel // max(1, len(few)))
    return np.concatenate([few ^ kind.word(kind.sign * (turn % 2)) for turn in range(turns)])[:numel]


def summed(name: str, kind: corpus.Float, numel: int, block: int, count: int) -> Case:
    """The sum of ``count`` frames: added in fp32 in their order, rounded once. One frame is raw."""
    frames, words, total = [], [], torch.empty(0)
    for rank in range(count):
        values = torch.from_numpy(corpus.hashes(numel, rank + 1).astype(np.int64) % 4096 - 2048).float()
        values = torch.where(values % 13 == 0, -0.0, values * 2.0 ** (rank % 7 - 9))
        values[: block // 2] = -0.0
        tensor = values.to(kind.dtype)
        codec = "raw" if rank == 1 else "wide" if rank % 2 else "cascade"
        blocks = {} if codec == "raw" else {"block": block}
        frames.append(raw(compress(tensor, codec, shaped=False, checksum=False, **blocks)))
        words.append(raw(tensor))
        total = total + tensor.float() if rank else tensor.float()
    return Case(
        name, SUM, kind.dtype, block, "cascade", numel, [raw(total.to(kind.dtype)), raw(total), *frames, *words]
    )


def small() -> Iterator[Case]:
    """For the emulation and for sanitizers: each kernel, whole and partial blocks, several chunks."""
    yield from golden()
    for name, kind in corpus.FLOATS.items():
        for code in corpus.CODES:
            yield coded(f"{name}_{code}_chunks_128", corpus.tensor(words(kind, 3 * 2048 + 77, 128, 1), kind), code, 128)
            yield coded(
                f"{name}_{code}_chunks_1024", corpus.tensor(words(kind, 16384 + 1029, 1024, 2), kind), code, 1024
            )
        yield coded(f"{name}_empty", torch.empty(0, dtype=kind.dtype), "cascade", 1024)
        yield coded(f"{name}_one", corpus.tensor(words(kind, 1, 128, 3), kind), "cascade", 128)
    for name, kind in corpus.SUMMED.items():
        yield _change(f"{name}_delta_chunks", kind, 2 * 16384 + 300, 1024)
        yield summed(f"{name}_sum_3", kind, 3 * 2048 + 99, 128, 3)
        yield summed(f"{name}_sum_8", kind, 16384 + 700, 1024, 8)
    for dtype in (*corpus.SUMMED.values(), torch.uint8, torch.int64):
        for percent in (0, 1, 10):
            yield _few(dtype if isinstance(dtype, torch.dtype) else dtype.dtype, percent, 16384 + 700)
    for count in (48, 53):  # as many as a list has, and more
        yield summed(f"bf16_sum_{count}", corpus.BF16, 1200, 256, count)


def large() -> Iterator[Case]:
    """For a GPU: many more chunks than run at a time."""
    for name, kind in corpus.FLOATS.items():
        count = (9 if kind.dtype.itemsize < 4 else 4) * 1_000_000 + 1
        for code in corpus.CODES:
            yield coded(f"{name}_{code}_large", corpus.tensor(words(kind, count, 1024, 4), kind), code, 1024)
    yield coded(
        "bf16_cascade_large_128", corpus.tensor(words(corpus.BF16, 5_000_001, 128, 5), corpus.BF16), "cascade", 128
    )
    for name, kind in corpus.SUMMED.items():
        yield _change(f"{name}_delta_large", kind, 5_000_001, 1024)
        yield summed(f"{name}_sum_8_large", kind, 2_000_001, 1024, 8)
    for dtype in (torch.bfloat16, torch.uint8):
        for percent in (0, 1, 10):
            yield _few(dtype, percent, 5_000_001)


def _few(dtype: torch.dtype, percent: int, words: int) -> Case:
    """Words of which few change, by up to seven units: chunks that are SAME or LIST."""
    draw = torch.Generator().manual_seed(percent)
    size = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}.get(dtype, torch.uint8)
    numel = words // (dtype.itemsize // size.itemsize)
    high = 1 << 7 * size.itemsize
    base = torch.randint(0, high, (numel * dtype.itemsize // size.itemsize,), generator=draw).to(size)
    units = torch.randint(1, 8, base.shape, generator=draw) * (torch.rand(base.shape, generator=draw) < percent / 100)
    name = f"{str(dtype).removeprefix('torch.')}_delta_{percent}_percent_{words}"
    return coded(name, (base + units.to(size)).view(dtype), "delta", 1024, base.view(dtype))


def _change(name: str, kind: corpus.Float, numel: int, block: int) -> Case:
    new = words(kind, numel, block, 6)
    few = min(numel, 1 << 16)
    old = np.concatenate([corpus.before(new[:few], kind, block, 7), new[few:]])
    return coded(name, corpus.tensor(new, kind), "delta", block, corpus.tensor(old, kind))


def write(path: Path, cases: Sequence[Case]) -> None:
    """Write the file."""
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<Q", len(cases)))
        for case in cases:
            file.write(case.packed())


def main(path: str, *options: str) -> int:
    known = ("--large", "--few", "--bf16")
    assert not options or (len(options) == 1 and options[0] in known), f"got {options}; the options are {known}"
    cases = [*small(), *(large() if "--large" in options else ())]
    if "--few" in options:
        cases = cases[::9]
    if "--bf16" in options:
        cases = [case for case in cases if case.dtype is torch.bfloat16]
    write(Path(path), cases)
    print(f"{len(cases)} cases, {Path(path).stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
