"""Rounding of words to fewer mantissa bits, and the size of rounded words without their trims; see :mod:`.layout`."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import (
    CASCADE,
    CHUNK_BLOCKS,
    RAW,
    SPARSE,
    TAIL_BITS,
    WIDE,
    body_bytes,
    itemsize_of,
    jit,
    kernel_cache,
    pad16,
    parts_bytes,
    table_bytes,
)

with kernel_cache():

    @jit
    def round_words(words, kept, exponent, mantissa, out):
        """Round ``words`` to ``kept`` mantissa bits (FORMAT.md 2.9) to ``out``, which may be ``words``."""
        cut = mantissa - kept
        low = (1 << cut) - 1
        field = ((1 << exponent) - 1) << mantissa
        for i in range(len(words)):
            w = np.int64(words[i])
            if w & field != field:
                w = (w + (low >> 1) + (w >> cut & 1)) & ~low
                if w & field == field:
                    w -= low + 1
            out[i] = w

    @jit
    def untrimmed_bytes(payload, numel, exponent, mantissa, block):
        """Bytes that a rounded payload would have if its blocks had no trims, and RAW blocks stayed RAW."""
        itemsize = itemsize_of(exponent, mantissa)
        chunk_size = block * CHUNK_BLOCKS
        chunks = (numel + chunk_size - 1) // chunk_size
        total = pad16(4 * chunks)
        at = total
        for chunk in range(chunks):
            words = min(chunk_size, numel - chunk * chunk_size)
            blocks = (words + block - 1) // block
            body = at + table_bytes(blocks, True)
            tail = body
            for b in range(blocks):
                mode = payload[at + blocks + 2 * b + 1] >> (TAIL_BITS - 8)
                n = min(block, words - b * block)
                tail += body_bytes(mode, n, np.int64(payload[at + 3 * blocks + b]), mantissa, itemsize)
            bodies = tails = np.int64(0)
            for b in range(blocks):
                high = np.int64(payload[at + blocks + 2 * b + 1])
                mode = high >> (TAIL_BITS - 8)
                tail_bytes = np.int64(payload[at + blocks + 2 * b]) | (high & (1 << (TAIL_BITS - 8)) - 1) << 8
                trim = np.int64(payload[at + 3 * blocks + b])
                n = min(block, words - b * block)
                size, rest = body_bytes(mode, n, 0, mantissa, itemsize), tail_bytes
                if mode == SPARSE:
                    others = n
                    for i in range(n):
                        others -= payload[tail + 1 + (i >> 3)] >> (i & 7) & 1
                    rest += parts_bytes(others, 1 + mantissa) - parts_bytes(others, 1 + mantissa - trim)
                raw = body_bytes(RAW, n, 0, mantissa, itemsize)
                if mode in (CASCADE, SPARSE, WIDE) and size + rest >= raw:
                    size, rest = raw, np.int64(0)
                bodies += size
                tails += rest
                tail += tail_bytes
            total += table_bytes(blocks, False) + bodies + pad16(tails)
            at = pad16(tail)
        return total
