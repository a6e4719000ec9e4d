"""ZFP1 frames, written from FORMAT.md 2.11 alone and slow on purpose: values are fractions, bits are lists."""

from __future__ import annotations

import struct
from fractions import Fraction

from from_format import FIELDS, framed, header_at

FLIP = 0xAAAAAAAA


def _value(word: int, dtype: int) -> tuple[int, Fraction] | None:
    """Sign and magnitude of a word; None where it is not finite."""
    e_bits, m_bits = FIELDS[dtype]
    e, mantissa = word >> m_bits & ((1 << e_bits) - 1), word & ((1 << m_bits) - 1)
    if e == (1 << e_bits) - 1:
        return None
    bias = (1 << (e_bits - 1)) - 1
    whole = mantissa + (1 << m_bits if e else 0)
    return word >> (e_bits + m_bits), Fraction(whole) * Fraction(2) ** (max(e, 1) - bias - m_bits)


def _rounded(magnitude: Fraction, dtype: int) -> int:
    """The bits, without a sign, of the nearest number of a type, ties to even; at most the largest finite one."""
    e_bits, m_bits = FIELDS[dtype]
    bias = (1 << (e_bits - 1)) - 1
    if not magnitude:
        return 0
    last, size = (1 << e_bits) - 2, magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    for e in range(
        min(max(1, bias + size - 1), last), last + 1
    ):  # its binade; the first one has the subnormal numbers too
        unit = Fraction(2) ** (e - bias - m_bits)
        if magnitude < unit * (2 << m_bits) or e == last:
            whole = round(magnitude / unit)  # Python rounds ties to even
            return min(whole + ((e - 1) << m_bits), ((1 << e_bits) - 1 << m_bits) - 1)
    raise AssertionError


def _fp32(word: int, dtype: int) -> int | None:
    """The float32 word of the value of a word."""
    value = _value(word, dtype)
    return None if value is None else value[0] << 31 | _rounded(value[1], 3)


def _word(fp32: int, dtype: int) -> int:
    sign, magnitude = _value(fp32, 3) or (0, Fraction(0))
    return sign << sum(FIELDS[dtype]) | _rounded(magnitude, dtype)


def _number(q: int) -> int:
    """q as a number with a sign."""
    q %= 1 << 32
    return q - (1 << 32) if q >> 31 else q


def _half(q: int) -> int:
    return _number(q) // 2


def _forward(q: list[int]) -> list[int]:
    x, y, z, w = q
    x = _half(x + w)
    w = w - x
    z = _half(z + y)
    y = y - z
    x = _half(x + z)
    z = z - x
    w = _half(w + y)
    y = y - w
    w = w + _half(y)
    y = y - _half(w)
    return [x, y, z, w]


def _backward(q: list[int]) -> list[int]:
    x, y, z, w = q
    y = y + _half(w)
    w = w - _half(y)
    y = y + w
    w = 2 * w - y
    z = z + x
    x = 2 * x - z
    y = y + z
    z = 2 * z - y
    w = w + x
    x = 2 * x - w
    return [x, y, z, w]


def _block_bits(values: list[int], rate: int) -> list[int]:
    """4 R bits of four float32 words."""
    if not any(word % (1 << 31) for word in values):
        return [0] * (4 * rate)
    fields = [word >> 23 & 255 for word in values]
    top = max(fields)
    q = []
    for word, e in zip(values, fields, strict=True):
        m = word % (1 << 23) + ((1 << 23) if e else 0)
        magnitude = int(m * Fraction(2) ** (max(e, 1) + 6 - top))
        q.append(-magnitude if word >> 31 else magnitude)
    u = [((each + FLIP) % (1 << 32)) ^ FLIP for each in _forward(q)]
    bits = [1] + [(top + 1) >> i & 1 for i in range(8)]
    n = 0
    for k in range(31, -1, -1):
        plane = [number >> k & 1 for number in u]
        bits += plane[:n]
        while n < 4:
            bits.append(int(any(plane[n:])))
            if not bits[-1]:
                break
            while n < 3:
                bits.append(plane[n])
                if bits[-1]:
                    break
                n += 1
            n += 1
    return (bits + [0] * (4 * rate))[: 4 * rate]


def _block_values(bits: list[int]) -> list[int]:
    if not bits[0]:
        return [0] * 4
    h, rest, n = sum(bit << i for i, bit in enumerate(bits[1:9])), iter(bits[9:]), 0
    u = [0] * 4
    for k in range(31, -1, -1):
        for i in range(n):
            u[i] |= next(rest, 0) << k
        while n < 4 and next(rest, 0):
            while n < 3 and next(rest, 1) == 0:
                n += 1
            u[n] |= 1 << k
            n += 1
    values = []
    for q in _backward([(each ^ FLIP) - FLIP for each in u]):
        number = _number(q)
        bits_of = _rounded(abs(number) * Fraction(2) ** (h - 157), 3)
        values.append(bits_of | (1 << 31 if number < 0 else 0))
    return values


def _blocks(words: list[int], dtype: int) -> list[list[int | None]]:
    """float32 words of the blocks, the last one filled up."""
    values = [_fp32(word, dtype) for word in words]
    blocks = [values[at : at + 4] for at in range(0, len(values), 4)]
    if blocks:
        a, *others = blocks[-1]
        blocks[-1] = {0: [a] * 4, 1: [a, *others, *others, a], 2: [a, *others, a]}.get(len(others), blocks[-1])
    return blocks


def encode(words: list[int], dtype: int, rate: int) -> bytes | None:
    """The flat ZFP1 frame of words, without a checksum; None where another frame stands for it."""
    item = sum(FIELDS[dtype], 1) // 8
    blocks = _blocks(words, dtype)
    size = 16 + -(-4 * rate * len(blocks) // 64) * 8
    if any(value is None for block in blocks for value in block) or size >= item * len(words):
        return None
    bits = [bit for block in blocks for bit in _block_bits([value or 0 for value in block], rate)]
    codes = sum(bit << i for i, bit in enumerate(bits)).to_bytes(size - 16, "little")
    return frame_of(codes, dtype, rate, len(words))


def frame_of(codes: bytes, dtype: int, rate: int, numel: int) -> bytes:
    """The flat ZFP1 frame of codes."""
    return framed(struct.pack("<I12x", rate) + codes, 6, dtype, 1, None, False, numel)


def decode(frame: bytes) -> list[int]:
    """The words of a flat ZFP1 frame without a checksum."""
    h = header_at(frame)
    assert h[:3] == (b"ZCCL", 2, 6) and not any(h[4:10])
    (rate,) = struct.unpack_from("<I", frame, 32)
    codes = int.from_bytes(frame[48 : h.size], "little")
    words = []
    for block in range(-(-h.numel // 4)):
        code = codes >> 4 * rate * block
        words += [_word(value, h.dtype) for value in _block_values([code >> i & 1 for i in range(4 * rate)])]
    return words[: h.numel]


def project(words: list[int], dtype: int, rate: int) -> list[int]:
    """The words that the frame of words by this rate decodes to, whatever frame it is."""
    projected: list[int] = []
    for at, block in zip(range(0, len(words), 4), _blocks(words, dtype), strict=True):
        values = [value for value in block if value is not None]
        if len(values) == 4:
            projected += [_word(value, dtype) for value in _block_values(_block_bits(values, rate))]
        else:
            projected += [*words[at : at + 4], *[0] * 4][:4]
    return projected[: len(words)]
