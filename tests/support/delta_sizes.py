"""Bytes that a block of a delta frame takes in each way an encoder may choose, by FORMAT.md's formulas: nothing is coded."""

from __future__ import annotations

import corpus
import numpy as np
from from_format import CASCADE, NAMED, PLANES, WIDE

#: Eighths of a binade from the mean size of the changes to their scale, by mantissa bits.
CHANGE_BIAS = {7: 0, 10: 4, 23: 16}


def _up(count: int, unit: int) -> int:
    return -(-count // unit)


def _pad16(size: int) -> int:
    return 16 * _up(size, 16)


def _exponents(words: np.ndarray, kind: corpus.Float) -> np.ndarray:
    return words.astype(np.int64) >> kind.mantissa & kind.largest_exponent


def _order(words: np.ndarray, kind: corpus.Float) -> np.ndarray:
    words_64 = words.astype(np.int64)
    return np.where(words_64 & kind.sign, 2 * kind.sign - 1 - words_64, words_64 | kind.sign)


def tails(words: np.ndarray, base: np.ndarray, kind: corpus.Float) -> list[tuple[int, int]]:
    """(t, bytes) of the tails that CHANGE may have, the mean's first; one for each t and group size. Some word is not the base's."""
    change = (_order(words, kind) - _order(base, kind)) % (2 * kind.sign)
    size = np.where(change >= kind.sign, 2 * kind.sign - change, change)
    e = _exponents(base, kind)
    logs = [min(int(d).bit_length() - 1, kind.mantissa + 1) for d in size if d]
    mean = (8 * (int(e[size > 0].sum()) + sum(logs)) + CHANGE_BIAS[kind.mantissa] * len(logs)) // (8 * len(logs))
    found = []
    for t in (min(255, mean), 0):
        k = np.where(e == 0, 0, np.clip(t - e, 0, kind.mantissa + 1))
        q = size >> k
        rest = int(np.minimum(q, 5).sum() + ((q >= 1) | (k >= 1)).sum() + k.sum())
        for g in (1, 4, 8, 16):
            groups = [q[at : at + g] for at in range(0, len(q), g)]
            first = len(q) if g == 1 else len(groups) + sum(len(group) for group in groups if group.any())
            words_bytes = int((q >= 6).sum()) * words.itemsize
            found.append((t, 1 + _up(first + rest, 8) + words_bytes))
    return found


def _elements(mode: int, e: np.ndarray, t: int) -> tuple[int, int]:
    """Bytes of the second part of elements with these exponents, and how many escape tier 1."""
    left, bits, escapes = e, 0, 0
    for tier, names in enumerate(NAMED[mode]):
        bits += 2 * len(left) if tier else 0
        left = left[~np.isin((t + 3 - left) % 256, [name for name in names if name != "zero"])]
        if "zero" in names:
            left = left[left != 0]
        escapes = escapes if tier else len(left)
    return _up(bits, 8) + len(left), escapes


def alone(words: np.ndarray, kind: corpus.Float) -> int:
    """Body with its padding and tail without a base. The words are not all equal."""
    n, others = len(words), words[words.astype(np.int64) % kind.sign != 0]
    e, raw = _exponents(others, kind), _pad16(n * words.itemsize)
    z = 0
    while kind is corpus.FP32 and z < kind.mantissa and not (words >> words.dtype.type(z) & 1).any():
        z += 1

    def top(bias: int) -> int:
        return min(int(e.max()), (8 * int(e.sum()) + bias * len(e)) // (8 * len(e))) if len(e) else 0

    def first(mode: int, m: int) -> int:
        r = 1 + kind.mantissa - z
        return r // 8 * m + (r % 8 + PLANES[mode]) * _up(m, 8)

    if 16 * (n - len(others)) >= n:
        zeros = words[words.astype(np.int64) % kind.sign == 0]
        size = 1 + _up(n, 8) + (_up(len(zeros), 8) if zeros.any() else 0)
        return min(raw, size + first(CASCADE, len(others)) + _elements(CASCADE, e, top(23))[0])
    every, mode, bias = _exponents(words, kind), CASCADE, 23
    if 8 * _elements(CASCADE, every, top(23))[1] > 3 * n:
        mode, bias = WIDE, 28
    return min(raw, _pad16(first(mode, n)) + _elements(mode, every, top(bias))[0])
