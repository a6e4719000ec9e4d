"""CHANGE blocks for from_format.py: FORMAT.md 2.3, read slowly."""

from __future__ import annotations

import numpy as np

GROUPS = (1, 4, 8, 16)


class Contradiction(ValueError):
    """Something that section 4 tells a decoder to reject in the payload."""


def _order(word: int, bits: int) -> int:
    sign = 1 << (bits - 1)
    return ~word & (2 * sign - 1) if word & sign else word | sign


def _k(base: int, t: int, e_bits: int, m_bits: int) -> int:
    e = base >> m_bits & ((1 << e_bits) - 1)
    return min(max(t - e, 0), m_bits + 1) if e else 0


def decode_change(tail: bytes, base: list[int], t: int, e_bits: int, m_bits: int) -> list[int]:
    """The words of a block."""
    if not tail:
        return list(base)
    if tail[0] > 3:
        raise Contradiction("unknown flags")
    n, bits, g = len(base), 1 + e_bits + m_bits, GROUPS[tail[0]]
    stream = iter(np.unpackbits(np.frombuffer(tail[1:], np.uint8), bitorder="little").tolist())
    used = 0

    def plane(members: list[int]) -> dict[int, int]:
        nonlocal used
        used += len(members)
        if used > 8 * len(tail) - 8:
            raise Contradiction("a plane ends after the tail")
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
    if at + len(members) * bits // 8 != len(tail):
        raise Contradiction("the tail is not used up exactly")
    sign, words = 1 << (bits - 1), []
    for i in range(n):
        order = (_order(base[i], bits) + (-size[i] if negative.get(i) else size[i])) % (2 * sign)
        words.append(order - sign if order >= sign else 2 * sign - 1 - order)
    for place, i in enumerate(members):
        words[i] = int.from_bytes(tail[at + place * bits // 8 : at + (place + 1) * bits // 8], "little")
    return words


def _changes(words: list[int], base: list[int], bits: int) -> tuple[list[int], list[int]]:
    """|D| and 1 where D is negative."""
    change = [(_order(w, bits) - _order(b, bits)) % (1 << bits) for w, b in zip(words, base, strict=True)]
    negative = [int(d >> (bits - 1)) for d in change]
    return [(1 << bits) - d if minus else d for d, minus in zip(change, negative, strict=True)], negative


def encode_tail(words: list[int], base: list[int], t: int, e_bits: int, m_bits: int) -> bytes:
    """The tail with this top."""
    n, bits = len(words), 1 + e_bits + m_bits
    size, negative = _changes(words, base, bits)
    k = [_k(b, t, e_bits, m_bits) for b in base]
    q = [d >> shift for d, shift in zip(size, k, strict=True)]
    options = []
    for flags, g in enumerate(GROUPS):
        groups = [int(any(level >= 1 for level in q[at : at + g])) for at in range(0, n, g)] if g > 1 else []
        live = [i for i in range(n) if g == 1 or groups[i // g]]
        options.append((len(groups) + len(live), flags, groups + [int(q[i] >= 1) for i in live]))
    _, flags, stream = min(options)
    for level in range(2, 7):
        stream += [int(value >= level) for value in q if value >= level - 1]
    stream += [negative[i] for i in range(n) if q[i] or k[i]]
    for p in range(m_bits + 1):
        stream += [size[i] >> p & 1 for i in range(n) if k[i] > p]
    escaped = b"".join(w.to_bytes(bits // 8, "little") for w, level in zip(words, q, strict=True) if level >= 6)
    return bytes([flags]) + np.packbits(np.array(stream, np.uint8), bitorder="little").tobytes() + escaped


def encode_change(words: list[int], base: list[int], e_bits: int, m_bits: int) -> tuple[int, bytes]:
    """Top and tail; some word is not the base's."""
    size, _ = _changes(words, base, 1 + e_bits + m_bits)
    exponents = [b >> m_bits & ((1 << e_bits) - 1) for b in base]
    lengths = [e + min(d.bit_length() - 1, m_bits + 1) for e, d in zip(exponents, size, strict=True) if d]
    bias = {7: 0, 10: 4, 23: 16}[m_bits]
    mean = min(255, (8 * sum(lengths) + bias * len(lengths)) // (8 * len(lengths)))
    tails = {t: encode_tail(words, base, t, e_bits, m_bits) for t in (mean, 0)}
    t = 0 if len(tails[0]) < len(tails[mean]) else mean
    return t, tails[t]
