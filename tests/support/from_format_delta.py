"""Differences for from_format.py: FORMAT.md 2.3 to 2.5 and the choice of a chunk's form in section 3, read slowly."""

from __future__ import annotations

import struct

import numpy as np

GROUPS = (1, 4, 8, 16)


class Contradiction(ValueError):
    """Something that section 4 tells a decoder to reject in the payload."""


def demand(condition: bool, complaint: str) -> None:
    if not condition:
        raise Contradiction(complaint)


def width(e_bits: int, m_bits: int) -> int:
    """Bits of a word. Bytes are the words without an exponent and a mantissa."""
    return 1 + e_bits + m_bits if m_bits else 8


def _order(word: int, bits: int) -> int:
    if bits == 8:
        return word
    sign = 1 << (bits - 1)
    return ~word & (2 * sign - 1) if word & sign else word | sign


def _moved(base: int, change: int, bits: int) -> int:
    """The word at this D from its base."""
    order = (_order(base, bits) + change) % (1 << bits)
    if bits == 8:
        return order
    sign = 1 << (bits - 1)
    return order - sign if order >= sign else 2 * sign - 1 - order


def _k(base: int, t: int, e_bits: int, m_bits: int) -> int:
    e = base >> m_bits & ((1 << e_bits) - 1)
    return min(max(t - e, 0), m_bits + 1) if e else 0


def decode_change(tail: bytes, base: list[int], t: int, e_bits: int, m_bits: int) -> list[int]:
    """The words of a block."""
    if not tail:
        return list(base)
    demand(tail[0] <= 3, "unknown flags")
    n, bits, g = len(base), width(e_bits, m_bits), GROUPS[tail[0]]
    stream = iter(np.unpackbits(np.frombuffer(tail[1:], np.uint8), bitorder="little").tolist())
    used = 0

    def plane(members: list[int]) -> dict[int, int]:
        nonlocal used
        used += len(members)
        demand(used <= 8 * len(tail) - 8, "a plane ends after the tail")
        return {i: next(stream) for i in members}

    marked = plane(list(range(-(-n // g)))) if g > 1 else dict.fromkeys(range(n), 1)
    q = [0] * n
    members = [i for i in range(n) if marked[i // g]]
    for level in range(1, 7):
        members = [i for i, bit in plane(members).items() if bit]
        for i in members:
            q[i] = level
    k = [_k(b, t, e_bits, m_bits) for b in base]
    negative = plane([i for i in range(n) if q[i] or k[i]])
    size = [q[i] << k[i] for i in range(n)]
    for p in range(m_bits + 1):
        for i, bit in plane([i for i in range(n) if k[i] > p]).items():
            size[i] |= bit << p
    at = 1 + -(-used // 8)
    demand(at + len(members) * bits // 8 == len(tail), "the tail is not used up exactly")
    words = [_moved(base[i], -size[i] if negative.get(i) else size[i], bits) for i in range(n)]
    for place, i in enumerate(members):
        words[i] = int.from_bytes(tail[at + place * bits // 8 : at + (place + 1) * bits // 8], "little")
    return words


def _changes(words: list[int], base: list[int], bits: int) -> tuple[list[int], list[int]]:
    """|D| and 1 where D is negative."""
    change = [(_order(w, bits) - _order(b, bits)) % (1 << bits) for w, b in zip(words, base, strict=True)]
    negative = [int(d >> (bits - 1)) for d in change]
    return [(1 << bits) - d if minus else d for d, minus in zip(change, negative, strict=True)], negative


def _grouped(q: list[int]) -> tuple[int, int, list[int]]:
    """Number of bits of groups and level 1, flags, and these bits, for the best size of the groups."""
    options = []
    for flags, g in enumerate(GROUPS):
        groups = [int(any(level >= 1 for level in q[at : at + g])) for at in range(0, len(q), g)] if g > 1 else []
        live = [i for i in range(len(q)) if g == 1 or groups[i // g]]
        options.append((len(groups) + len(live), flags, groups + [int(q[i] >= 1) for i in live]))
    return min(options)


def encode_tail(words: list[int], base: list[int], t: int, e_bits: int, m_bits: int) -> bytes:
    """The tail with this top."""
    n, bits = len(words), width(e_bits, m_bits)
    size, negative = _changes(words, base, bits)
    k = [_k(b, t, e_bits, m_bits) for b in base]
    q = [d >> shift for d, shift in zip(size, k, strict=True)]
    _, flags, stream = _grouped(q)
    for level in range(2, 7):
        stream += [int(value >= level) for value in q if value >= level - 1]
    stream += [negative[i] for i in range(n) if q[i] or k[i]]
    for p in range(m_bits + 1):
        stream += [size[i] >> p & 1 for i in range(n) if k[i] > p]
    escaped = b"".join(w.to_bytes(bits // 8, "little") for w, level in zip(words, q, strict=True) if level >= 6)
    return bytes([flags]) + np.packbits(np.array(stream, np.uint8), bitorder="little").tobytes() + escaped


def encode_change(words: list[int], base: list[int], e_bits: int, m_bits: int) -> tuple[int, bytes]:
    """Top and tail; some word is not the base's."""
    if not m_bits:
        return 0, encode_tail(words, base, 0, e_bits, m_bits)
    size, _ = _changes(words, base, width(e_bits, m_bits))
    exponents = [b >> m_bits & ((1 << e_bits) - 1) for b in base]
    lengths = [e + min(d.bit_length() - 1, m_bits + 1) for e, d in zip(exponents, size, strict=True) if d]
    bias = {7: 0, 10: 4, 23: 16}[m_bits]
    mean = min(255, (8 * sum(lengths) + bias * len(lengths)) // (8 * len(lengths)))
    tails = {t: encode_tail(words, base, t, e_bits, m_bits) for t in (mean, 0)}
    t = 0 if len(tails[0]) < len(tails[mean]) else mean
    return t, tails[t]


# --- LIST


def decode_list(chunk: bytes, base: list[int], e_bits: int, m_bits: int) -> list[int]:
    """The words of a chunk."""
    bits = width(e_bits, m_bits)
    demand(len(chunk) % 16 == 0, "an end between multiples of 16")
    demand(len(chunk) >= 1 and 1 <= chunk[0] <= 6, "no or too many levels")
    levels = chunk[0]
    at = 1 + 3 * levels
    demand(at <= len(chunk), "no room for the sets")
    sets = list(struct.iter_unpack("<HB", chunk[1:at]))
    limit = len(base) // 4
    for m, r in sets:
        demand(1 <= m <= limit, "a level with too few or too many words")
        demand(r <= 13, "a parameter of more than 13")
        limit = m
    item = bits // 8
    escaped = sets[5][0] if levels == 6 else 0
    words = [int.from_bytes(chunk[at + i * item : at + (i + 1) * item], "little") for i in range(escaped)]
    at += escaped * item
    demand(at <= len(chunk), "no room for the words")
    stream = np.unpackbits(np.frombuffer(chunk[at:], np.uint8), bitorder="little")
    lows, used = [], 0
    for m, r in sets:
        demand(used + m * r <= len(stream), "the low bits end after the chunk")
        lows.append(stream[used : used + m * r].reshape(m, r).astype(int) @ (1 << np.arange(r)))
        used += m * r
    demand(used + sets[0][0] <= len(stream), "the signs end after the chunk")
    negative = stream[used : used + sets[0][0]].tolist()
    ones = np.flatnonzero(stream[used + sets[0][0] :])
    demand(len(ones) == sum(m for m, _ in sets), "other ones than words")
    highs = np.diff(ones, prepend=-1) - 1

    size = [0] * len(base)
    members, first = list(range(len(base))), 0
    for level, ((m, r), low) in enumerate(zip(sets, lows, strict=True), 1):
        gaps = (highs[first : first + m] << r) + low
        first += m
        places = np.cumsum(gaps + 1) - 1
        demand(int(places[-1]) < len(members), "a place outside the set")
        members = [members[place] for place in places]
        for i in members:
            size[i] = level
    signs = dict(zip([i for i, level in enumerate(size) if level], negative, strict=True))
    found = [_moved(b, -size[i] if signs.get(i) else size[i], bits) for i, b in enumerate(base)]
    for i, word in zip(members if levels == 6 else [], words, strict=True):
        found[i] = word
    return found


def _rice(gaps: list[int]) -> tuple[int, int]:
    """Number of bits, and the parameter."""
    return min((len(gaps) * (1 + r) + sum(gap >> r for gap in gaps), r) for r in range(14))


def _levels(size: list[int]) -> list[list[int]]:
    """The gaps of each level that is not empty."""
    found, members = [], list(range(len(size)))
    for level in range(1, 7):
        places = [place for place, i in enumerate(members) if size[i] >= level]
        if not places:
            break
        found.append([place - before - 1 for before, place in zip([-1, *places], places, strict=False)])
        members = [members[place] for place in places]
    return found


def encode_list(words: list[int], base: list[int], e_bits: int, m_bits: int) -> bytes:
    """The chunk as a LIST, with its padding; some word is not the base's, and at most a quarter are not."""
    bits = width(e_bits, m_bits)
    size, negative = _changes(words, base, bits)
    levels = [(gaps, _rice(gaps)[1]) for gaps in _levels(size)]
    head = bytes([len(levels)]) + b"".join(struct.pack("<HB", len(gaps), r) for gaps, r in levels)
    head += b"".join(w.to_bytes(bits // 8, "little") for w, d in zip(words, size, strict=True) if d >= 6)
    stream = [gap >> p & 1 for gaps, r in levels for gap in gaps for p in range(r)]
    stream += [minus for minus, d in zip(negative, size, strict=True) if d]
    for gaps, r in levels:
        for gap in gaps:
            stream += [0] * (gap >> r) + [1]
    chunk = head + np.packbits(np.array(stream, np.uint8), bitorder="little").tobytes()
    return chunk + bytes(-len(chunk) % 16)


def form_of(words: list[int], base: list[int], block: int, e_bits: int, m_bits: int) -> str:
    """SAME, TABLE, LIST, or "shorter": the shorter of TABLE and LIST."""
    n = len(words)
    size, _ = _changes(words, base, width(e_bits, m_bits))
    m = sum(d > 0 for d in size)
    if m == 0:
        return "SAME"
    if 4 * m > n:
        return "TABLE"
    bits_of_places = _rice(_levels(size)[0])[0]
    grouped = 0
    for at in range(0, n, block):
        here = size[at : at + block]
        grouped += 24 + (8 + _grouped(here)[0] if any(here) else 0)
    if bits_of_places > grouped:
        return "TABLE"
    escaped = sum(d >= 6 for d in size)
    return "LIST" if 8 * m <= n and 4 * escaped <= m else "shorter"
