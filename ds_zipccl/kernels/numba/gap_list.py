"""The LIST chunk (FORMAT.md 2.5) and the choice between the three forms of a chunk (section 3) in numba; see :mod:`.layout`."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.delta import GROUPS, LEVELS, difference, escaped, moved
from ds_zipccl.kernels.numba.layout import BLOCK, OK, itemsize_of, jit, kernel_cache, pad16

#: The form of a chunk: known at once, or for the encoder to try.
SAME, TABLE, LIST, SHORTER = range(4)
MAX_R = 13
#: Bits of a block's entry in a table, and of the flags of a CHANGE tail.
_ENTRY_BITS, _FLAG_BITS = 24, 8
#: uint64 that are compared at once.
_EIGHTS = 16
_LOWEST_BIT = np.array([0] + [(byte & -byte).bit_length() - 1 for byte in range(1, 256)], dtype=np.int64)

with kernel_cache():

    @jit
    def _find(words, base, start, stop, places, count):
        """Add the places from ``start`` to ``stop`` at which the words differ, until ``places`` is full. Returns their number."""
        for i in range(start, stop):
            if words[i] != base[i] and count < len(places):
                places[count] = i
                count += 1
        return count

    @jit
    def find_changes(words, base, places):
        """Write the places of the words that differ from their base, until ``places`` is full. Returns their number.

        The words may lie at any address: a processor that numba compiles for reads a uint64 anywhere.
        """
        per_eight = 8 // words.itemsize
        whole = len(words) // per_eight * per_eight
        left, right = words[:whole].view(np.uint64), base[:whole].view(np.uint64)
        count = 0
        for start in range(0, len(left), _EIGHTS):
            stop = min(start + _EIGHTS, len(left))
            differs = np.uint64(0)
            for i in range(start, stop):
                differs |= left[i] ^ right[i]
            if differs:
                count = _find(words, base, start * per_eight, stop * per_eight, places, count)
                if count == len(places):
                    return count
        return _find(words, base, whole, len(words), places, count)

    @jit
    def _best_r(gaps, total):
        """Return Rice's parameter with the fewest bits for ``gaps``, whose sum is ``total``, and the bits."""
        m = len(gaps)
        best, fewest = 0, m + total
        for r in range(1, MAX_R + 1):
            if m * (1 + r) >= fewest:
                break  # the low bits alone are as many, and more with each r
            bits = m * (1 + r)
            for i in range(m):
                bits += gaps[i] >> r
            if bits < fewest:
                best, fewest = r, bits
        return best, fewest

    @jit
    def _bits_of_a_block(places, start, n):
        """Return the fewest bits of groups and level 1 of a block of n words from ``start`` on (FORMAT.md 2.4, t = 0)."""
        fewest = n
        for choice in range(1, len(GROUPS)):
            group = GROUPS[choice]
            bits = (n + group - 1) // group
            last = -1
            for i in range(len(places)):
                at = (places[i] - start) // group
                if at != last:
                    bits += min(group, n - at * group)
                    last = at
            fewest = min(fewest, bits)
        return fewest

    @jit
    def _table_bits(places, n, block):
        """Return G of FORMAT.md section 3."""
        bits = first = 0
        for start in range(0, n, block):
            end = first
            while end < len(places) and places[end] < start + block:
                end += 1
            bits += _ENTRY_BITS
            if end > first:
                bits += _FLAG_BITS + _bits_of_a_block(places[first:end], start, min(block, n - start))
            first = end
        return bits

    @jit
    def plan_list(words, base, exponent, mantissa, block, places, sizes, negative, gaps, counts, params):
        """Choose the form of a chunk (FORMAT.md section 3).

        Where the form is LIST or SHORTER, ``sizes`` and ``negative`` have |D| and its sign of the words at ``places``, ``gaps`` the
        gaps of all levels one after another, ``counts`` and ``params`` m and r of each level.

        Returns:
            The form, SHORTER where the bytes decide; and the bytes of the LIST with its padding.
        """
        n = len(words)
        m = find_changes(words, base, places[: n // 4 + 1])
        if m == 0:
            return SAME, 0
        if 4 * m > n:
            return TABLE, 0
        for i in range(m):
            at = places[i]
            sizes[i], negative[i] = difference(words[at], base[at], exponent, mantissa)
        size = 1
        bits = m  # the signs
        filled = 0
        counts[:] = 0
        for level in range(LEVELS):
            count = last = rank = 0
            for i in range(m):
                if sizes[i] > level:
                    place = rank if level else places[i]
                    gaps[filled + count] = place - last
                    last = place + 1
                    count += 1
                rank += sizes[i] >= level
            if not count:
                break
            counts[level] = count
            here = gaps[filled : filled + count]
            params[level], fewest = _best_r(here, last - count)
            if level == 0 and fewest > _table_bits(places[:m], n, block):
                return TABLE, 0
            bits += fewest
            size += 3
            filled += count
        escapes = counts[LEVELS - 1]
        size = pad16(size + escapes * itemsize_of(exponent, mantissa) + (bits + 7) // 8)
        return LIST if 8 * m <= n and 4 * escapes <= m else SHORTER, size

    @jit
    def write_list(words, itemsize, places, sizes, negative, gaps, counts, params, chunk):
        """Write the LIST that plan_list has laid out to ``chunk``, which has its bytes."""
        chunk[:] = 0
        m = counts[0]
        levels = total = 0
        at = 1
        while levels < LEVELS and counts[levels]:
            chunk[at] = counts[levels] & 255
            chunk[at + 1] = counts[levels] >> 8
            chunk[at + 2] = params[levels]
            at += 3
            total += counts[levels]
            levels += 1
        chunk[0] = levels
        if counts[LEVELS - 1]:
            for i in range(m):
                if sizes[i] >= LEVELS:
                    for byte in range(itemsize):
                        chunk[at] = np.int64(words[places[i]]) >> 8 * byte & 255
                        at += 1
        bit = 8 * at
        filled = 0
        for level in range(levels):
            r = params[level]
            for i in range(filled, filled + counts[level]):
                low = (gaps[i] & (1 << r) - 1) << (bit & 7)
                byte = bit >> 3
                bit += r
                while low:
                    chunk[byte] |= low & 255
                    low >>= 8
                    byte += 1
            filled += counts[level]
        for i in range(m):
            chunk[bit >> 3] |= negative[i] << (bit & 7)
            bit += 1
        filled = 0
        for level in range(levels):
            for i in range(filled, filled + counts[level]):
                bit += gaps[i] >> params[level]
                chunk[bit >> 3] |= 1 << (bit & 7)
                bit += 1
            filled += counts[level]

    @jit
    def _low_bits(chunk, bit, r):
        """The r bits from ``bit`` on, lowest first; r is at most 13."""
        value = np.int64(0)
        shift = 0
        byte = bit >> 3
        while shift < r + (bit & 7):
            value |= np.int64(chunk[byte]) << shift
            byte += 1
            shift += 8
        return value >> (bit & 7) & (1 << r) - 1

    @jit
    def _find_ones(chunk, bit, ones):
        """Write the places of the ones from ``bit`` to the end of ``chunk``, counted from ``bit``. Returns whether they fill ``ones``."""
        found = 0
        for byte in range(bit >> 3, len(chunk)):
            left = np.int64(chunk[byte])
            if byte == bit >> 3:
                left = left >> (bit & 7) << (bit & 7)
            while left:
                if found == len(ones):
                    return False
                ones[found] = 8 * byte + _LOWEST_BIT[left] - bit
                found += 1
                left &= left - 1
        return found == len(ones)

    @jit
    def _read_sets(chunk, n, counts, params):
        """Read m and r of each level. Returns the number of levels; 0 if one of them cannot be."""
        levels = np.int64(chunk[0]) if len(chunk) else 0
        if len(chunk) % 16 or not 1 <= levels <= LEVELS or 1 + 3 * levels > len(chunk):
            return 0
        most = n // 4
        for level in range(levels):
            at = 1 + 3 * level
            m, r = np.int64(chunk[at]) | np.int64(chunk[at + 1]) << 8, np.int64(chunk[at + 2])
            if not 1 <= m <= most or r > MAX_R:
                return 0
            counts[level], params[level] = m, r
            most = m
        return levels

    @jit
    def decode_list(chunk, base, exponent, mantissa, words):
        """Decode a LIST ``chunk`` to ``words``, which may be ``base`` itself. Returns OK or BLOCK."""
        n = len(words)
        itemsize = itemsize_of(exponent, mantissa)
        counts = np.zeros(LEVELS, dtype=np.int64)
        params = np.zeros(LEVELS, dtype=np.int64)
        levels = _read_sets(chunk, n, counts, params)
        if not levels:
            return BLOCK
        m = counts[0]
        escape = 1 + 3 * levels
        low = 8 * (escape + counts[LEVELS - 1] * itemsize)
        sign = low + (counts * params).sum()
        rest = sign + m
        if rest > 8 * len(chunk):
            return BLOCK
        ones = np.empty(counts.sum(), dtype=np.int64)
        if not _find_ones(chunk, rest, ones):
            return BLOCK
        # Each word of a level is known by its number among those of level 1, in ``ranks``.
        places = np.empty(m, dtype=np.int64)
        ranks = np.arange(m)
        sizes = np.ones(m, dtype=np.int64)
        one = end = 0
        for level in range(levels):
            r, among = params[level], counts[level - 1] if level else n
            place = -1
            for i in range(counts[level]):
                zeros = ones[one] - end
                place += 1 + (zeros << r | _low_bits(chunk, low, r))
                if place >= among:
                    return BLOCK
                low += r
                end = ones[one] + 1
                one += 1
                if level:
                    ranks[i] = ranks[place]
                    sizes[ranks[i]] = level + 1
                else:
                    places[i] = place
        words[:] = base
        for i in range(m):
            at = places[i]
            negative = chunk[sign + i >> 3] >> (sign + i & 7) & 1
            if sizes[i] < LEVELS:
                words[at] = moved(base[at], -sizes[i] if negative else sizes[i], exponent, mantissa)
            else:
                words[at] = escaped(chunk, escape, itemsize)
                escape += itemsize
        return OK
