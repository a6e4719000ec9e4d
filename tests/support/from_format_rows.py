"""Rows for from_format.py: FORMAT.md 2.6 to 2.8 and their part of section 3, read slowly. Words are unsigned integers."""

from __future__ import annotations

import struct
from fractions import Fraction

import from_format
import from_format_rounded
from from_format import demand, framed, header_at
from from_format_delta import Contradiction as Contradiction

RAW, EXPONENT, DELTA, ROUNDED, ROWS = 0, 1, 2, 3, 7
#: dtype id -> bytes of an element.
ITEMS = dict(enumerate((2, 2, 4, 8, 1, 1, 2, 4, 8, 1, 8, 16, 1, 1, 2, 4, 8), 1))
#: A row of a frame -> the row of its source, counted from the same row on.
Sources = dict[int, int]


def _up16(count: int) -> int:
    return -(-count // 16) * 16


def _to_bytes(words: list[int], dtype: int) -> bytes:
    return b"".join(word.to_bytes(ITEMS[dtype], "little") for word in words)


def _to_words(data: bytes, dtype: int) -> list[int]:
    item = ITEMS[dtype]
    return [int.from_bytes(data[at : at + item], "little") for at in range(0, len(data), item)]


# --- prediction


def _fraction(sign: int, exponent: int, mantissa: int, bias: int, m_bits: int) -> Fraction:
    size = Fraction(2) ** (exponent - bias) * (1 + Fraction(mantissa, 1 << m_bits))
    return -size if sign else size


def predict(word: int, factor: int, e_bits: int, m_bits: int) -> int:
    """The prediction from a word by the bits of a factor: the product as a fraction, rounded once."""
    sign_bit, mask, top = 1 << (e_bits + m_bits), (1 << m_bits) - 1, (1 << e_bits) - 1
    bias = top >> 1
    sign = (word >> (e_bits + m_bits)) ^ (factor >> 31)
    e = word >> m_bits & top
    if e == 0:
        return sign * sign_bit
    if e == top:
        return word
    product = _fraction(0, e, word & mask, bias, m_bits) * _fraction(
        0, factor >> 23 & 255, factor & (1 << 23) - 1, 127, 23
    )
    exponent = 0
    while product >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while product < Fraction(2) ** exponent:
        exponent -= 1
    number = round(product / Fraction(2) ** (exponent - m_bits))  # of two equally near, the even one
    if number == 2 << m_bits:
        number, exponent = 1 << m_bits, exponent + 1
    if exponent + bias < 1:
        return sign * sign_bit
    if exponent + bias >= top:
        return sign * sign_bit | top << m_bits
    return sign * sign_bit | (exponent + bias) << m_bits | number & mask


# --- frames


def _nested(data: bytes, at: int, dtype: int, numel: int, codecs: tuple[int, ...]) -> tuple[bytes, int]:
    """The frame at ``at``, and where its padding ends."""
    demand(at + 32 <= len(data), "no room for a nested header")
    h = header_at(data, at)
    plain = (b"ZCCL", 2, 0, 0, 0, 0, 0)
    demand((*h[:2], h.flags, h.ndim, *h[7:10]) == plain, "no flat frame without a checksum")
    demand(h.codec in codecs and (h.dtype, h.numel) == (dtype, numel), "a nested frame of another kind")
    demand(32 <= h.size <= len(data) - at, "a nested frame that does not end in the payload")
    return data[at : at + h.size], at + _up16(h.size)


def decode(frame: bytes, history: list[int]) -> list[int]:
    """The words of a flat row frame without a checksum; ``history``: all words of the segment in front of it."""
    h = header_at(frame)
    dtype, numel = h.dtype, h.numel
    demand(h.codec == ROWS and h.size == len(frame), "no row frame")
    payload = frame[32:]
    width, head, repeats, scaled, repeat_bits, scaled_bits = struct.unpack_from("<4I2B", payload)
    demand(width >= 1 and head < width and head <= numel and not any(payload[18:32]), "width, head or zeros")
    rows = (numel - head) // width
    demand(rows <= 1 << 30 and repeats + scaled <= rows and max(repeat_bits, scaled_bits) <= 32, "too many")
    demand(not scaled or dtype in (1, 2, 3), "scaled rows of no float")
    length = rows + (rows - repeats if scaled else 0) + repeats * repeat_bits + scaled * scaled_bits
    at = 32 + _up16(-(-length // 8))
    demand(at <= len(payload), "no room for the map")
    stream = int.from_bytes(payload[32:at], "little")

    def take(bits: int) -> int:
        nonlocal stream
        value = stream & ((1 << bits) - 1)
        stream >>= bits
        return value

    repeated = [row for row in range(rows) if take(1)]
    others = [row for row in range(rows) if row not in set(repeated)]
    scaled_rows = [row for row in others if take(1)] if scaled else []
    demand((len(repeated), len(scaled_rows)) == (repeats, scaled), "the map counts otherwise")
    repeat_of = {row: row - 1 - take(repeat_bits) for row in repeated}
    scaled_of = {row: row - 1 - take(scaled_bits) for row in scaled_rows}
    literal = [row for row in others if row not in scaled_of]
    first = len(history) + head  # of row 0, in the segment
    for source in (*repeat_of.values(), *scaled_of.values()):
        demand(first + source * width >= 0 and source >= -(1 << 30), "a source in front of the history")
    demand(all(source < 0 or source not in repeat_of for source in repeat_of.values()), "a repeat of a repeat")
    demand(all(source < 0 or source in literal for source in scaled_of.values()), "a prediction from no literal row")
    factors = struct.unpack_from(f"<{scaled}I", payload, at)
    demand(all(0 < factor >> 23 & 255 < 255 for factor in factors), "a factor that is not normal")
    at += _up16(4 * scaled)
    inner, at = _nested(payload, at, dtype, numel - (repeats + scaled) * width, (RAW, EXPONENT, ROUNDED))
    kept = _to_words(inner[32:], dtype) if inner[5] == RAW else from_format.decode(inner)[2]
    segment = history + [0] * numel

    def row_of(row: int) -> list[int]:
        return segment[first + row * width : first + (row + 1) * width]

    def put(row: int, words: list[int]) -> None:
        segment[first + row * width : first + (row + 1) * width] = words

    tail = (numel - head) % width
    segment[len(history) : first] = kept[:head]
    for place, row in enumerate(literal):
        put(row, kept[head + place * width : head + (place + 1) * width])
    segment[len(segment) - tail :] = kept[len(kept) - tail :]
    if scaled:
        e_bits, m_bits = from_format.FIELDS[dtype]
        base = [
            predict(word, factor, e_bits, m_bits)
            for (row, source), factor in zip(scaled_of.items(), factors, strict=True)
            for word in row_of(source)
        ]
        inner, at = _nested(payload, at, dtype, scaled * width, (DELTA,))
        words = from_format.decode(inner, base)[2]
        for place, row in enumerate(scaled_of):
            put(row, words[place * width : (place + 1) * width])
    demand(at == len(payload), "bytes behind the last part")
    for row, source in repeat_of.items():
        put(row, row_of(source))
    return segment[len(history) :]


def repeats_of(segment: list[int], width: int) -> Sources:
    """For each row of a segment that has an equal row in front of it, the first such row."""
    found: dict[tuple[int, ...], int] = {}
    sources = {}
    for row in range(len(segment) // width):
        first = found.setdefault(tuple(segment[row * width : (row + 1) * width]), row)
        if first != row:
            sources[row] = first
    return sources


def encode(
    segment: list[int], begin: int, end: int, width: int, dtype: int, block: int, code: str,
    scaled: dict[int, tuple[int, int]], rounded: int = 0,
) -> bytes:  # fmt: skip
    """The row frame of elements ``begin`` to ``end`` of a segment whose rows begin at element 0.

    Args:
        code: of the literals: "cascade", "wide", or "raw".
        scaled: row of the segment -> its source, and the bits of its factor.
        rounded: bits to which literals are rounded, 0 for none.
    """
    first, last = -(-begin // width), end // width
    head = first * width - begin
    repeat_of = {row: source for row, source in repeats_of(segment, width).items() if first <= row < last}
    scaled_of = {row: source for row, (source, _) in scaled.items() if first <= row < last}
    others = [row for row in range(first, last) if row not in repeat_of]
    bits = [int(row in repeat_of) for row in range(first, last)]
    if scaled_of:
        bits += [int(row in scaled_of) for row in others]
    numbers = []
    for sources in (repeat_of, scaled_of):
        distances = [row - source - 1 for row, source in sorted(sources.items())]
        numbers.append(max((distance.bit_length() for distance in distances), default=0))
        bits += [distance >> bit & 1 for distance in distances for bit in range(numbers[-1])]
    packed = sum(bit << place for place, bit in enumerate(bits)).to_bytes(_up16(-(-len(bits) // 8)), "little")
    factors = b"".join(struct.pack("<I", scaled[row][1]) for row in sorted(scaled_of))
    payload = struct.pack("<4I2B14x", width, head, len(repeat_of), len(scaled_of), *numbers) + packed
    payload += factors + bytes(-len(factors) % 16)
    whole = [segment[row * width : (row + 1) * width] for row in range(first, last)]
    kept = segment[begin : first * width]
    kept += [word for row in others if row not in scaled_of for word in whole[row - first]]
    kept += segment[last * width : end]
    if rounded:
        kept = [from_format_rounded.round_word(word, rounded, *from_format.FIELDS[dtype]) for word in kept]
    if rounded and code != "raw" and dtype != 3:
        inner = from_format.encode_payload(kept, dtype, block, "cascade", rounded=True)
        inner = framed(inner, ROUNDED, dtype, block, None, False, len(kept))
    elif code == "raw":
        inner = framed(_to_bytes(kept, dtype), RAW, dtype, 1, None, False, len(kept))
    else:
        inner = from_format.encode(kept, dtype, block, None, False, code)
    payload += inner + bytes(-len(inner) % 16)
    if scaled_of:
        e_bits, m_bits = from_format.FIELDS[dtype]
        words = [word for row in sorted(scaled_of) for word in whole[row - first]]
        base = [
            predict(word, scaled[row][1], e_bits, m_bits)
            for row in sorted(scaled_of)
            for word in segment[scaled[row][0] * width : (scaled[row][0] + 1) * width]
        ]
        payload += from_format.encode(words, dtype, block, None, False, base=base)
    return framed(payload, ROWS, dtype, 1, None, False, end - begin)
