"""Words of the self-test: made with integers alone, so the same on every machine, and memory with guards for what kernels write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.protocol import raw_bound

Bytes = npt.NDArray[np.uint8]
#: Of each dtype: its name in those of kernels, exponent bits, mantissa bits, numpy's word.
FLOATS: dict[torch.dtype, tuple[str, int, int, Any]] = {
    torch.bfloat16: ("bf16", 8, 7, np.uint16),
    torch.float16: ("fp16", 5, 10, np.uint16),
    torch.float32: ("fp32", 8, 23, np.uint32),
    torch.float8_e4m3fn: ("e4m3", 4, 3, np.uint8),
    torch.float8_e5m2: ("e5m2", 5, 2, np.uint8),
}
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {dtype: name for dtype, (name, *_) in FLOATS.items()} | {torch.uint8: "u8"}
TEXTURES = ("mixed", "normal", "zeros", "one fill word", "NaN, infinity, denormals", "incompressible")
#: Elements of most inputs: a chunk of blocks of 1,024, and one more.
NUMEL = 16385
#: Texture, elements, and offset in elements from a multiple of 16 bytes. The first one is the input of short tests.
GIVEN = (
    ("mixed", NUMEL, 1),
    ("normal", NUMEL, 0),
    ("zeros", NUMEL, 1),
    ("one fill word", NUMEL, 0),
    ("NaN, infinity, denormals", NUMEL, 1),
    ("incompressible", NUMEL, 0),
    ("mixed", NUMEL - 1, 0),
    ("normal", 1023, 1),
    ("NaN, infinity, denormals", 1, 1),
    ("zeros", 0, 0),
)
#: Elements of the one input of many chunks.
LARGE = 5 * (NUMEL - 1) + 1
_NUMEL = NUMEL + 15  # so that each row begins at a multiple of 16 bytes
GUARD = 0x5C
#: Words of a block of most payloads.
BLOCK = 1024
_GUARDS = 64


class Input(NamedTuple):
    """Words at an offset of ``offset`` elements from an aligned address, and a base from which some of them have changed."""

    number: int
    label: str
    words: torch.Tensor
    base: torch.Tensor
    offset: int


@functools.cache
def _draws() -> npt.NDArray[np.uint64]:
    """u64 of splitmix64, one for each element."""
    with np.errstate(over="ignore"):
        z = np.arange(1, _NUMEL + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        draws: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return draws


@functools.cache
def _field(shift: int, bits: int) -> npt.NDArray[np.int64]:
    """Bits of the draws as numbers."""
    field: npt.NDArray[np.int64] = (_draws() >> np.uint64(shift)).astype(np.int64) & ((1 << bits) - 1)
    return field


def _textures(dtype: torch.dtype) -> npt.NDArray[Any]:
    """A row of words for each of :data:`TEXTURES`."""
    _, exponent, mantissa, word = FLOATS.get(dtype, ("", 4, 3, np.uint8))
    drawn, low = _draws().astype(word), word((1 << mantissa) - 1)
    sign, most = word(1 << (exponent + mantissa)), (1 << exponent) - 1
    middle = 1 << (exponent - 1)

    def with_exponents(words: npt.NDArray[Any], exponents: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = words & (sign | low) | (
            np.minimum(np.maximum(exponents, 0), most) << mantissa
        ).astype(word)
        return found

    normal = with_exponents(drawn, np.maximum(middle - _field(40, 2) * _field(42, 2) + (_field(44, 3) == 0), 1))
    zeros, fill = np.zeros(_NUMEL, word), np.full(_NUMEL, normal[1], word)
    special = with_exponents(np.where(_field(46, 1), drawn, drawn & ~low), _field(47, 1) * most)
    sparse = np.where(_field(48, 2), drawn & sign, normal)
    spread = with_exponents(drawn, middle - _field(50, 2) - _field(52, 2) - _field(54, 3))
    trimmed = normal & ~word(low >> (mantissa // 2))
    several = normal, sparse, special, spread, zeros, trimmed, fill, drawn
    mixed = np.concatenate([several[at // BLOCK % len(several)][at : at + BLOCK] for at in range(0, _NUMEL, BLOCK)])
    return np.stack((mixed, normal, zeros, fill, special, drawn))


def _changes(word: Any) -> npt.NDArray[Any]:
    """A row of bits by which base and words differ: few, many, one, and all."""
    few = np.where(_field(20, 5) == 0, 1 + 2 * (_field(25, 3) == 0), 0)
    one = np.zeros(_NUMEL, np.int64)
    one[_NUMEL // 2] = 1
    return np.stack((few, _field(30, 3), one, _field(0, 60))).astype(word)


@functools.cache
def _on(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The textures of a dtype, and their bases, on a device."""
    rows = _textures(dtype)
    changes = _changes(rows.dtype.type)
    bases = rows ^ changes[np.arange(len(rows)) % len(changes)]
    words, base = (tensors.of_buffer(bytearray(array.tobytes())).view(dtype) for array in (rows, bases))
    return tuple(one.view(len(rows), _NUMEL).clone().to(device) for one in (words, base))  # type: ignore[return-value]


def inputs(dtype: torch.dtype, device: torch.device, short: bool = False) -> list[Input]:
    """The inputs of a dtype, those of :data:`GIVEN`; ``short``: the first one."""
    words, bases = _on(dtype, device)
    found = []
    for number, (texture, numel, offset) in enumerate(GIVEN[: 1 if short else None]):
        row, part = TEXTURES.index(texture), slice(offset, offset + numel)
        label = f"{numel:,} words ({texture}) at offset {offset}"
        found.append(Input(number, label, words[row, part], bases[row, part], offset))
    return found


def forget() -> None:
    """Free the memory of all inputs."""
    for made in (_on, _field, _draws):
        made.cache_clear()


def large(device: torch.device) -> list[Input]:
    """One input of many chunks, as bfloat16."""
    words, bases = (row[0].repeat(-(-LARGE // _NUMEL))[:LARGE] for row in _on(torch.bfloat16, device))
    return [Input(len(GIVEN), f"{LARGE:,} words (mixed) at offset 0", words, bases, 0)]


def bound(numel: int, itemsize: int, block: int) -> int:
    """Bytes of a payload at most, of any code."""
    return raw_bound(numel, itemsize, 4, block)


def raw(words: torch.Tensor) -> Bytes:
    return cast(Bytes, words.cpu().view(torch.uint8).numpy())


class Outputs:
    """Memory of bytes :data:`GUARD` in which kernels write an output for each of their cases, with guards around each of them."""

    def __init__(self, sizes: Sequence[int], device: torch.device, offsets: Sequence[int] = ()) -> None:
        self.places: list[slice] = []
        at = _GUARDS
        for size, offset in zip(sizes, offsets or [0] * len(sizes), strict=True):
            self.places.append(slice(at + offset, at + offset + size))
            at = -(-(at + offset + size) // 16) * 16 + _GUARDS
        self.memory = tensors.filled(at, GUARD, torch.uint8, device)

    def views(self, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
        return [self.memory[place].view(dtype) for place in self.places]

    def read(self) -> tuple[list[Bytes], int | None]:
        """Return the bytes of each output, and the number of the output beside which a kernel has written; None where all guards are
        intact."""
        memory = self.memory.cpu().numpy()
        found = [memory[place].copy() for place in self.places]
        around = memory.copy()
        for place in self.places:
            around[place] = GUARD
        wrong = np.flatnonzero(around != GUARD)
        if not len(wrong):
            return found, None
        begins = [place.start - _GUARDS // 2 for place in self.places]
        return found, max(0, int(np.searchsorted(begins, wrong[0], "right")) - 1)
