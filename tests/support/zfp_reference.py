"""Streams of the reference library of ZFP, made with its Python package: ``python tests/support/zfp_reference.py`` writes
tests/golden/zfp_reference.bin anew, where zfpy and numpy are installed (zfpy 1.0.1 made the committed bytes). The tests need neither.

The file is records, in little-endian order: u32 rate, u32 n, u64 bytes of the stream, u32 1 if the words are an input of the coder, 12 zero
bytes; then n float32 words, the stream, and the n float32 words that the library decodes it to. Other streams are random, for the decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from places import TESTS

PATH = TESTS / "golden" / "zfp_reference.bin"
_HEAD = struct.Struct("<IIQI12x")
RATES = (3, 4, 5, 8, 11, 12, 16, 17, 24, 32)
LENGTHS = (1, 2, 3, 4, 5, 8, 35)


@dataclass(frozen=True)
class Record:
    """A stream, the input that it was made of, and the values that the library decodes it to."""

    rate: int
    #: float32; None for a stream of random bytes.
    values: np.ndarray | None
    stream: bytes
    decoded: np.ndarray


def records() -> Iterator[Record]:
    """Give the committed records."""
    data, at = PATH.read_bytes(), 0
    while at < len(data):
        rate, n, size, coded = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        values = np.frombuffer(data, np.float32, n, at)
        stream = data[at + 4 * n : at + 4 * n + size]
        at += 8 * n + size
        yield Record(rate, values if coded else None, stream, np.frombuffer(data, np.float32, n, at - 4 * n))


def _textures(rng: np.random.Generator, n: int) -> Iterator[np.ndarray]:
    bell = rng.standard_normal(n)
    yield bell
    yield bell * np.exp(3 * rng.standard_normal(n))  # heavy tails
    yield bell * (rng.random(n) < 0.2)  # sparse, with zeros of both signs
    yield np.ldexp(bell, rng.integers(-90, 100, n))
    if n > 30:
        yield np.zeros(n)
        yield np.cumsum(bell)  # smooth
        yield np.ldexp(rng.uniform(1, 2, n), 127) * rng.choice((-1, 1), n) * (1 - 2.0**-24)
        yield np.ldexp(bell, -94)


def _make() -> Iterator[bytes]:
    import zfpy

    rng = np.random.default_rng(6)
    cases = [(rate, n) for rate in RATES for n in (LENGTHS if rate == 8 else LENGTHS[2::4])]
    for rate, n in cases:
        for values in _textures(rng, n):
            given = values.astype(np.float32)
            stream = zfpy.compress_numpy(given, rate=rate, write_header=False)
            yield _record(rate, given, stream, 1)
        size = 8 * -(-4 * rate * -(-n // 4) // 64)
        bits = rng.integers(0, 2, 8 * size, dtype=np.uint8)
        for block in range(-(-n // 4)):  # exponents for which the library's scale is a normal float
            at = 4 * rate * block
            bits[at] = 1
            bits[at + 1 : at + 9] = np.unpackbits(np.uint8(rng.integers(70, 220)), bitorder="little")
            if block % 2:  # many zeros: more planes
                bits[at + 9 : at + 4 * rate] &= rng.integers(0, 2, 4 * rate - 9, dtype=np.uint8)
        yield _record(rate, np.zeros(n, np.float32), np.packbits(bits, bitorder="little").tobytes(), 0)


def _record(rate: int, values: np.ndarray, stream: bytes, coded: int) -> bytes:
    import zfpy

    decoded = zfpy._decompress(stream, zfpy.type_float, values.shape, rate=rate)
    head = _HEAD.pack(rate, len(values), len(stream), coded)
    return head + values.tobytes() + stream + decoded.astype(np.float32).tobytes()


if __name__ == "__main__":
    PATH.write_bytes(b"".join(_make()))
