"""Differences of words and the CHANGE block (FORMAT.md 2.3, 2.4) in numba; see :mod:`.layout`. Words and base have one dtype."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import BLOCK, MAX_BLOCK, OK, itemsize_of, jit, kernel_cache

LEVELS = 6
#: Elements that share a bit of the group map, by the flags' value.
GROUPS = np.array([1, 4, 8, 16], dtype=np.int64)

with kernel_cache():

    @jit
    def _order(word, exponent, mantissa):
        """A word as a number in the order of the floats; a byte as it is."""
        sign = np.int64(1) << (exponent + mantissa)
        if exponent == 0:
            return np.int64(word)
        return 2 * sign - 1 - word if word & sign else word | sign

    @jit
    def difference(word, base, exponent, mantissa):
        """Return |D| of a word and its base, and whether D is negative."""
        sign = np.int64(1) << (8 * itemsize_of(exponent, mantissa) - 1)
        change = _order(np.int64(word), exponent, mantissa) - _order(np.int64(base), exponent, mantissa) & 2 * sign - 1
        return (2 * sign - change, 1) if change >= sign else (change, 0)

    @jit
    def moved(base, change, exponent, mantissa):
        """Return the word of which D is ``change``."""
        sign = np.int64(1) << (8 * itemsize_of(exponent, mantissa) - 1)
        order = _order(np.int64(base), exponent, mantissa) + change & 2 * sign - 1
        if exponent == 0:
            return order
        return order - sign if order & sign else 2 * sign - 1 - order

    @jit
    def escaped(data, at, itemsize):
        """Return the word that lies at byte ``at``."""
        word = np.int64(0)
        for byte in range(itemsize):
            word |= np.int64(data[at + byte]) << 8 * byte
        return word

    @jit
    def _shifts(base, top, exponent, mantissa, shifts):
        """Write k of each element to ``shifts``."""
        for i in range(len(base)):
            e = np.int64(base[i]) >> mantissa & (1 << exponent) - 1
            shifts[i] = min(max(top - e, 0), mantissa + 1) if e else 0

    @jit
    def _changes(words, base, exponent, mantissa, sizes, negative):
        """Write |D| and its sign for each element; return whether a word differs from its base."""
        changed = False
        for i in range(len(words)):
            sizes[i], negative[i] = difference(words[i], base[i], exponent, mantissa)
            changed |= sizes[i] != 0
        return changed

    @jit
    def _top(sizes, base, exponent, mantissa):
        """Return the scale of a block's changes (FORMAT.md section 3)."""
        total = count = np.int64(0)
        for i in range(len(base)):
            if sizes[i]:
                log2 = 0
                while log2 <= mantissa and sizes[i] >> (log2 + 1):
                    log2 += 1
                total += (np.int64(base[i]) >> mantissa & (1 << exponent) - 1) + log2
                count += 1
        bias = 16 if mantissa == 23 else 4 if mantissa == 10 else 0
        return min(np.int64(255), (8 * total + bias * count) // (8 * count))

    @jit
    def _mark(levels, group, marked):
        """Mark the elements of groups in which some q >= 1; return their number."""
        n = len(levels)
        count = 0
        for start in range(0, n, group):
            end = min(start + group, n)
            some = False
            for i in range(start, end):
                some |= levels[i] > 0
            for i in range(start, end):
                marked[i] = some
            count += (end - start) * some
        return count

    @jit
    def _plan(sizes, shifts, itemsize, marked):
        """Return the flags of the group size with the fewest bits (FORMAT.md section 3), and the bytes of the tail with these shifts."""
        n = len(sizes)
        levels = sizes >> shifts
        flags, bits = 0, n
        for choice in range(1, len(GROUPS)):
            grouped = (n + GROUPS[choice] - 1) // GROUPS[choice] + _mark(levels, GROUPS[choice], marked)
            if grouped < bits:
                flags, bits = choice, grouped
        escapes = 0
        for i in range(n):
            bits += min(levels[i], LEVELS - 1) + (levels[i] >= 1 or shifts[i] >= 1) + shifts[i]
            escapes += levels[i] >= LEVELS
        return flags, 1 + (bits + 7) // 8 + escapes * itemsize

    @jit
    def _put(tail, bit, value):
        tail[bit >> 3] |= value << (bit & 7)
        return bit + 1

    @jit
    def encode_change(words, base, exponent, mantissa, tail):
        """Code ``words`` as CHANGE to ``tail`` (8 bytes per element and 64 more, zeroed). Returns top and the bytes of the tail."""
        n = len(words)
        sizes = np.empty(n, dtype=np.int64)
        negative = np.empty(n, dtype=np.uint8)
        if not _changes(words, base, exponent, mantissa, sizes, negative):
            return np.int64(0), 0
        itemsize = itemsize_of(exponent, mantissa)
        top = _top(sizes, base, exponent, mantissa) if exponent else np.int64(0)
        shifts = np.empty(n, dtype=np.int64)
        marked = np.empty(n, dtype=np.bool_)
        _shifts(base, top, exponent, mantissa, shifts)
        flags, size = _plan(sizes, shifts, itemsize, marked)
        unscaled = np.zeros(n, dtype=np.int64)
        plain_flags, plain_size = _plan(sizes, unscaled, itemsize, marked)
        if plain_size < size:
            top, shifts, flags = np.int64(0), unscaled, plain_flags
        levels = sizes >> shifts
        group = GROUPS[flags]
        tail[0] = flags
        bit = 8
        _mark(levels, group, marked)
        if flags:
            for start in range(0, n, group):
                bit = _put(tail, bit, np.uint8(marked[start]))
        else:
            marked[:] = True
        for i in range(n):
            if marked[i]:
                bit = _put(tail, bit, np.uint8(levels[i] >= 1))
        for level in range(2, LEVELS + 1):
            for i in range(n):
                if levels[i] >= level - 1:
                    bit = _put(tail, bit, np.uint8(levels[i] >= level))
        for i in range(n):
            if levels[i] >= 1 or shifts[i] >= 1:
                bit = _put(tail, bit, negative[i])
        for p in range(mantissa + 1):
            for i in range(n):
                if shifts[i] > p:
                    bit = _put(tail, bit, np.uint8(sizes[i] >> p & 1))
        at = (bit + 7) // 8
        for i in range(n):
            if levels[i] >= LEVELS:
                for byte in range(itemsize):
                    tail[at] = np.int64(words[i]) >> 8 * byte & 255
                    at += 1
        return top, at

    @jit
    def _get(tail, bit):
        return np.int64(tail[bit >> 3] >> (bit & 7) & 1)

    @jit
    def decode_change(tail, base, top, exponent, mantissa, words):
        """Decode a CHANGE ``tail`` to ``words``, which may be ``base`` itself. Returns OK or BLOCK."""
        n = len(words)
        if not len(tail):
            words[:] = base
            return OK
        flags = np.int64(tail[0])
        if flags >= len(GROUPS):
            return BLOCK
        end = 8 * len(tail)
        bit = 8
        group = GROUPS[flags]
        levels = np.zeros(MAX_BLOCK, dtype=np.int64)
        if flags:
            groups = (n + group - 1) // group
            if bit + groups > end:
                return BLOCK
            for i in range(n):
                levels[i] = _get(tail, bit + i // group) - 1
            bit += groups
        # An element of an unmarked group has level -1. An element with bit one goes on to the next level.
        for level in range(LEVELS):
            for i in range(n):
                if levels[i] == level:
                    if bit == end:
                        return BLOCK
                    levels[i] += _get(tail, bit)
                    bit += 1
        shifts = np.empty(n, dtype=np.int64)
        _shifts(base, top, exponent, mantissa, shifts)
        signed = lows = escapes = 0
        for i in range(n):
            levels[i] = max(levels[i], 0)
            signed += levels[i] >= 1 or shifts[i] >= 1
            lows += shifts[i]
            escapes += levels[i] >= LEVELS
        low, at = bit + signed, (bit + signed + lows + 7) // 8
        itemsize = itemsize_of(exponent, mantissa)
        if at + escapes * itemsize != len(tail):
            return BLOCK
        sizes = levels[:n] << shifts
        for p in range(mantissa + 1):
            for i in range(n):
                if shifts[i] > p:
                    sizes[i] |= _get(tail, low) << p
                    low += 1
        for i in range(n):
            change = sizes[i]
            if levels[i] >= 1 or shifts[i] >= 1:
                change = -change if _get(tail, bit) else change
                bit += 1
            word = moved(base[i], change, exponent, mantissa)
            if levels[i] >= LEVELS:
                word = escaped(tail, at, itemsize)
                at += itemsize
            words[i] = word
        return OK
