"""Rows that repeat earlier rows, and predictions of scaled rows (FORMAT.md 2.6) in numba; see :mod:`.layout`."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import jit, kernel_cache

#: Samples of a row, of 8 bytes each.
_SAMPLES = 8
#: Earlier rows with the samples of a row, and other bytes, after which the whole row is hashed.
_PATIENCE = 4
_LANES = 32
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SHIFT = np.uint64(29)

with kernel_cache():

    @jit
    def _mixed(state, value):
        state = (state ^ np.uint64(value)) * _PRIME
        return state ^ state >> _SHIFT

    @jit
    def _sample(row, i):
        """Where sample i of a row begins; a short row has one sample, all of it."""
        return i * (len(row) - 8) // (_SAMPLES - 1)

    @jit
    def _hash_of_samples(row):
        if len(row) <= 8 * _SAMPLES:
            return _hash_of_all(row)
        state = _PRIME
        for i in range(_SAMPLES):
            at = _sample(row, i)
            for byte in range(8):
                state = _mixed(state, row[at + byte])
        return state

    @jit
    def _hash_of_all(row):
        state = _PRIME
        for i in range(len(row)):
            state = _mixed(state, row[i])
        return state

    @jit
    def _same_samples(a, b):
        if len(a) <= 8 * _SAMPLES:
            return _same(a, b)
        for i in range(_SAMPLES):
            at = _sample(a, i)
            if not _same(a[at : at + 8], b[at : at + 8]):
                return False
        return True

    @jit
    def _same(a, b):
        return np.array_equal(a, b)

    @jit
    def find_rows(data, row_bytes, first, sources, table):
        """See :meth:`ds_zipccl.kernels.KernelBackend.find_rows`.

        The table is open: a row looks from the place of its hash on for its equal or an empty place. Equal rows take the same way, so a row
        always meets the first row with its bytes. Rows with equal samples and different bytes would make the ways long; after a few of
        them a row goes on from the place of a hash of all its bytes, and so does every row that equals it.
        """
        mask = np.uint64(len(table) - 1)
        repeats = 0
        for i in range(len(sources)):
            number = first + i
            row = data[number * row_bytes : (number + 1) * row_bytes]
            place = _hash_of_samples(row) & mask
            alike = 0
            sources[i] = number
            while table[place]:
                other = table[place] - 1
                found = data[other * row_bytes : (other + 1) * row_bytes]
                place = place + np.uint64(1) & mask
                if _same_samples(row, found):
                    if _same(row, found):
                        sources[i] = other
                        repeats += 1
                        break
                    alike += 1
                    if alike == _PATIENCE:
                        place = _hash_of_all(row) & mask
            if sources[i] == number:
                table[place] = number + 1
        return repeats

    @jit
    def row_factors(values, width, rows, sources, factors):
        """See :meth:`ds_zipccl.kernels.KernelBackend.row_factors`; ``values``: the words as float32."""
        products = np.empty(_LANES, dtype=np.float64)
        squares = np.empty(_LANES, dtype=np.float64)
        for i in range(len(rows)):
            a = values[sources[i] * width : (sources[i] + 1) * width]
            b = values[rows[i] * width : (rows[i] + 1) * width]
            products[:] = 0.0
            squares[:] = 0.0
            for j in range(width):
                x, y = np.float64(a[j]), np.float64(b[j])
                products[j % _LANES] += x * y
                squares[j % _LANES] += x * x
            product, square = products[0], squares[0]
            for lane in range(1, _LANES):
                product += products[lane]
                square += squares[lane]
            factor = np.float32(product / square) if square > 0.0 else np.float32(0.0)
            size = abs(factor)
            normal = size >= np.float32(2.0**-126) and size < np.float32(np.inf)
            factors[i] = factor if normal else np.float32(0.0)

    @jit
    def predict(word, factor, exponent, mantissa):
        """The prediction from a word by the bits of a factor; all numbers are int64."""
        top = (1 << exponent) - 1
        sign = ((word >> (exponent + mantissa)) ^ factor >> 31) << (exponent + mantissa)
        e = word >> mantissa & top
        if e == 0:
            return sign
        if e == top:
            return word
        product = (1 << mantissa | word & (1 << mantissa) - 1) * (1 << 23 | factor & (1 << 23) - 1)
        e += (factor >> 23 & 255) - 127
        shift = 23
        if product >= 1 << (mantissa + 24):
            e, shift = e + 1, 24
        number = product >> shift
        rest, half = product & (1 << shift) - 1, 1 << (shift - 1)
        if rest > half or (rest == half and number & 1):
            number += 1
        if number == 2 << mantissa:
            e, number = e + 1, number >> 1
        if e < 1:
            return sign
        if e >= top:
            return sign | top << mantissa
        return sign | e << mantissa | number - (1 << mantissa)

    @jit
    def predict_rows(words, width, sources, factors, exponent, mantissa, out):
        """See :meth:`ds_zipccl.kernels.KernelBackend.predict_rows`; ``factors``: their bits."""
        for i in range(len(sources)):
            factor = np.int64(factors[i])
            for j in range(width):
                word = np.int64(words[sources[i] * width + j])
                out[i * width + j] = predict(word, factor, exponent, mantissa)
