"""The codec of FORMAT.md 2.10, written from the document alone and slow on purpose: float32 arithmetic of numpy, an operation at a time."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import from_format
import numpy as np
from from_format import demand, header_at

E4M3, INT = 1, 2
#: Values of the codes 0 to 126 of float8_e4m3fn.
VALUES = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)])


@dataclass(frozen=True)
class Settings:
    kind: int = E4M3
    bits: int = 8
    group: int = 128
    hadamard: bool = False

    @property
    def m(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def h(self) -> int:
        return self.group.bit_length() - 1 if self.hadamard else 0

    @property
    def scale_bytes(self) -> int:
        return self.kind


# --- numbers


def widened(words: list[int], dtype: int) -> np.ndarray:
    if dtype == 1:
        return (np.array(words, dtype=np.uint32) << 16).view(np.float32)
    if dtype == 2:
        return np.array(words, dtype=np.uint16).view(np.float16).astype(np.float32)
    return np.array(words, dtype=np.uint32).view(np.float32)


def narrowed(values: np.ndarray, dtype: int) -> list[int]:
    if dtype == 1:
        bits = values.view(np.uint32).astype(np.int64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).tolist()
    if dtype == 2:
        with np.errstate(over="ignore"):
            words = values.astype(np.float16).view(np.uint16)
        return [int(word) - int(word & 0x7FFF == 0x7C00) for word in words]
    return values.view(np.uint32).tolist()


def hadamard(v: np.ndarray) -> np.ndarray:
    """H v, stride by stride."""
    stride = 1
    while stride < len(v):
        pairs = v.reshape(-1, 2, stride)
        v = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).reshape(-1)
        stride *= 2
    return v


# --- a group


def scale_of(y: np.ndarray, s: Settings) -> int | None:
    """None: the group stays as it is."""
    if not np.isfinite(y).all():
        return None
    largest = np.abs(y).max()
    if s.kind == E4M3:
        scale = 0
        while scale < 300 and (scale == 0 or float(largest) > 448 * 2.0 ** (scale - 127)):
            scale += 1
        if float(largest) <= 448 * 2.0**-127:
            scale = 0
        return scale if scale <= 246 - s.h else None
    scale = (int((largest / np.float32(s.m)).view(np.uint32)) + 0xFFFF) >> 16
    return scale if scale >> 7 <= 255 - s.bits - s.h else None


def codes_of(y: np.ndarray, scale: int, s: Settings) -> bytes:
    if s.kind == E4M3:
        exact = np.abs(y).astype(np.float64) * 2.0 ** (127 - scale)
        above = np.searchsorted(VALUES, exact).clip(1, 126)
        low, high = exact - VALUES[above - 1], VALUES[above] - exact
        code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
        return (code + 128 * np.signbit(y)).astype(np.uint8).tobytes()
    number = np.rint(y / (np.array([scale << 16], dtype=np.uint32).view(np.float32)))
    code = (number.clip(-s.m, s.m) + s.m).astype(np.uint8)
    return b"".join(np.packbits(code >> p & 1, bitorder="little").tobytes() for p in range(s.bits))


def values_of(scale: int, codes: bytes, s: Settings) -> np.ndarray:
    data = np.frombuffer(codes, np.uint8)
    if s.kind == E4M3:
        demand(bool((data & 127 != 127).all()), "no number")
        numbers = np.where(data & 128, -1.0, 1.0) * VALUES[data & 127]
        v = (numbers * 2.0 ** (scale - 127)).astype(np.float32)
    else:
        planes = np.unpackbits(data.reshape(s.bits, -1), axis=1, bitorder="little").astype(int)
        numbers = sum(plane << p for p, plane in enumerate(planes))
        demand(bool((numbers <= 2 * s.m).all()), "above 2m")
        v = (numbers - s.m).astype(np.float32) * np.array([scale << 16], dtype=np.uint32).view(np.float32)
    if s.hadamard:
        v = hadamard(v) * np.float32(2.0**-s.h)
    return v


# --- frames


def _groups(values: np.ndarray, s: Settings) -> list[np.ndarray]:
    padded = np.concatenate((values, np.zeros(-len(values) % s.group, dtype=np.float32)))
    with np.errstate(all="ignore"):
        return [hadamard(group) if s.hadamard else group for group in padded.reshape(-1, s.group)]


def project(words: list[int], dtype: int, s: Settings) -> list[int]:
    """The decoded values of these words."""
    out: list[int] = []
    for at, y in enumerate(_groups(widened(words, dtype), s)):
        here = words[at * s.group : (at + 1) * s.group]
        scale = scale_of(y, s)
        if scale is None:
            out += here
        elif not scale:
            out += [0] * len(here)
        else:
            out += narrowed(values_of(scale, codes_of(y, scale, s), s), dtype)[: len(here)]
    return out


def payload_of(words: list[int], dtype: int, s: Settings, block: int) -> tuple[bytes, int] | None:
    """The scaled payload and the block of its header; None where a group stays as it is."""
    groups = _groups(widened(words, dtype), s)
    scales = [scale_of(y, s) for y in groups]
    if None in scales:
        return None
    codes = b"".join(codes_of(y, scale, s) for y, scale in zip(groups, scales, strict=True) if scale)
    front = b"".join(scale.to_bytes(s.scale_bytes, "little") for scale in scales)
    front += bytes(-len(front) % 16)
    staged = b""
    if s.kind == E4M3 and codes:
        staged = from_format.encode_payload(list(codes), 13, block, "cascade")
    use = bool(staged) and 100 * (16 + len(front) + len(staged)) <= 97 * (16 + len(front) + len(codes))
    body = staged if use else codes
    fields = struct.pack("<4BIQ", s.kind, s.bits, s.group.bit_length() - 1, s.hadamard | 2 * use, 0, len(body))
    return fields + front + body, block if use else 0


def encode(
    words: list[int], dtype: int, s: Settings, block: int, shape: tuple[int, ...] | None, checksum: bool
) -> bytes:
    """The frame of these words."""
    item = 4 if dtype == 3 else 2
    found = payload_of(words, dtype, s, block)
    if found is not None and len(found[0]) < item * len(words):
        return from_format.framed(found[0], 4, dtype, found[1] or 1, shape, checksum, len(words))
    kept = project(words, dtype, s)
    payloads = {0: b"".join(word.to_bytes(item, "little") for word in kept)}
    payloads[1] = from_format.encode_payload(kept, dtype, block, "cascade")
    codec = min(payloads, key=lambda codec: len(payloads[codec]))
    return from_format.framed(payloads[codec], codec, dtype, block if codec else 1, shape, checksum, len(words))


def decode(frame: bytes) -> list[int]:
    """The words of a flat scaled frame without a checksum."""
    h = header_at(frame)
    dtype, numel, log2 = h.dtype, h.numel, h.log2
    demand(h.codec == 4 and h.size == len(frame) and dtype in (1, 2, 3), "no scaled frame")
    kind, bits, group_log2, flags, zeros, code_bytes = struct.unpack_from("<4BIQ", frame, 32)
    demand(kind in (E4M3, INT) and bits in ((8,) if kind == E4M3 else (8, 6, 4)), "kind and bits")
    demand(5 <= group_log2 <= 9 and flags < (4 if kind == E4M3 else 2) and not zeros, "group, flags and zeros")
    staged = flags >> 1
    demand(bool(staged) == bool(log2), "blocks and stage 2")
    s = Settings(kind, bits, 1 << group_log2, bool(flags & 1))
    groups = -(-numel // s.group)
    at = 48 + -(-groups * s.scale_bytes // 16) * 16
    demand(at + code_bytes == h.size, "size")
    width = s.scale_bytes
    scales = [int.from_bytes(frame[48 + width * i : 48 + width * (i + 1)], "little") for i in range(groups)]
    limit = 246 - s.h if kind == E4M3 else (256 - bits - s.h << 7) - 1
    demand(all(scale <= limit for scale in scales), "a scale")
    coded, codes = sum(scale > 0 for scale in scales), frame[at:]
    if staged:
        codes = bytes(from_format.decode_payload(codes, coded * s.group, 13, 1 << log2))
    each = s.group * bits // 8
    demand(len(codes) == coded * each, "bytes of codes")
    words: list[int] = []
    for scale in scales:
        if scale:
            words += narrowed(values_of(scale, codes[:each], s), dtype)
            codes = codes[each:]
        else:
            words += [0] * s.group
    return words[:numel]
