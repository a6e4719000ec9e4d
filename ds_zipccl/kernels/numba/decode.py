"""Decoder of exponent payloads in numba; see :mod:`.layout`. No byte is read before it is proven to lie in the payload."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import (
    ABOVE,
    BLOCK,
    CASCADE,
    CHUNK_BLOCKS,
    FILL,
    INDEX,
    K_OF_CODE,
    LOW_BITS,
    MAX_BLOCK,
    OK,
    RAW,
    SPARSE,
    TAIL_BITS,
    TIER1_BITS,
    TIERS,
    WIDE,
    ZERO_CODE,
    body_bytes,
    itemsize_of,
    jit,
    kernel_cache,
    pad16,
    parts_bytes,
    plane_bytes,
    table_bytes,
)

_PICK = np.uint64(0x8040201008040201)  # from eight copies of a byte its bit i in byte i
_CARRY = np.uint64(0x7F7F7F7F7F7F7F7F)

with kernel_cache():

    @jit
    def _add_plane(plane, m, bit, values):
        """Set bit ``bit`` of each of m bytes from a plane; bytes up to a multiple of 8 may change."""
        eights = values.view(np.uint64)
        for i in range(plane_bytes(m)):
            picked = np.uint64(plane[i]) * LOW_BITS & _PICK
            eights[i] |= (picked + _CARRY >> np.uint64(7) & LOW_BITS) << np.uint64(bit)

    @jit
    def _decode_elements(mode, tier1, second, m, top, exponents):
        """FORMAT.md 2.1, points 2 and 3: fills ``exponents``; ``second`` must be used up exactly."""
        codes = np.zeros((TIERS, MAX_BLOCK + 8), dtype=np.uint8)
        counts = np.zeros(TIERS + 1, dtype=np.int64)
        counts[0] = m
        plane = plane_bytes(m)
        for p in range(TIER1_BITS[mode]):
            _add_plane(tier1[p * plane : (p + 1) * plane], m, p, codes[0])
        bit = 0
        for tier in range(TIERS):
            if tier:
                if bit + 2 * counts[tier] > 8 * len(second):
                    return BLOCK
                for p in range(2):
                    for i in range(counts[tier]):
                        codes[tier, i] |= (second[bit >> 3] >> (bit & 7) & 1) << p
                        bit += 1
            escape = 3 if tier else (1 << TIER1_BITS[mode]) - 1
            for i in range(counts[tier]):
                counts[tier + 1] += codes[tier, i] == escape
        end = (bit + 7) // 8
        if end + counts[TIERS] != len(second):
            return BLOCK
        lists = np.empty((2, MAX_BLOCK + 1), dtype=np.uint8)
        escapes = lists[TIERS % 2]
        escapes[: counts[TIERS]] = second[end:]
        values = np.empty(8, dtype=np.uint8)
        for tier in range(TIERS - 1, -1, -1):
            escape = 3 if tier else (1 << TIER1_BITS[mode]) - 1
            for code in range(escape):
                values[code] = (top + ABOVE - K_OF_CODE[mode, tier, code]) & 255
            if tier == TIERS - 1:
                values[ZERO_CODE] = 0
            into = lists[tier % 2] if tier else exponents
            at = 0
            for i in range(counts[tier]):
                code = codes[tier, i]
                into[i] = escapes[at] if code == escape else values[code]
                at += code == escape
            escapes = into
        return OK

    @jit
    def _join(first, exponents, r, trim, exponent, mantissa, words):
        m = len(words)
        values = np.zeros(MAX_BLOCK + 8, dtype=np.uint32)
        if r % 8:
            rest = np.zeros(MAX_BLOCK + 8, dtype=np.uint8)
            plane = plane_bytes(m)
            for p in range(r % 8):
                at = r // 8 * m + p * plane
                _add_plane(first[at : at + plane], m, p, rest)
            for i in range(m):
                values[i] = np.uint32(rest[i]) << np.uint32(r // 8 * 8)
        for byte in range(r // 8):
            for i in range(m):
                values[i] |= np.uint32(first[byte * m + i]) << np.uint32(8 * byte)
        for i in range(m):
            v = np.int64(values[i]) << trim
            e = np.int64(exponents[i]) & (1 << exponent) - 1
            words[i] = v >> mantissa << (exponent + mantissa) | e << mantissa | v & (1 << mantissa) - 1

    @jit
    def _decode_sparse(tail, top, trim, exponent, mantissa, words):
        """FORMAT.md 2.2."""
        n = len(words)
        plane = plane_bytes(n)
        if len(tail) < 1 + plane or tail[0] > 1:
            return BLOCK
        zeros = 0
        for i in range(n):
            zeros += tail[1 + (i >> 3)] >> (i & 7) & 1
        m = n - zeros
        r = 1 + mantissa - trim
        at = 1 + plane + (plane_bytes(zeros) if tail[0] else 0)
        tier1 = at + parts_bytes(m, r)
        second = tier1 + TIER1_BITS[SPARSE] * plane_bytes(m)
        if second > len(tail):
            return BLOCK
        exponents = np.empty(MAX_BLOCK + 8, dtype=np.uint8)
        status = _decode_elements(CASCADE, tail[tier1:second], tail[second:], m, top, exponents)
        if status != OK:
            return status
        others = np.empty(m, dtype=words.dtype)
        _join(tail[at:tier1], exponents, r, trim, exponent, mantissa, others)
        zero = other = 0
        for i in range(n):
            if tail[1 + (i >> 3)] >> (i & 7) & 1:
                sign = np.int64(tail[1 + plane + (zero >> 3)] >> (zero & 7) & 1) if tail[0] else 0
                words[i] = sign << (exponent + mantissa)
                zero += 1
            else:
                words[i] = others[other]
                other += 1
        return OK

    @jit
    def _decode_chunk(chunk, words, trims, exponent, mantissa, block):
        itemsize = itemsize_of(exponent, mantissa)
        blocks = (len(words) + block - 1) // block
        body = table_bytes(blocks, trims)
        if body > len(chunk):
            return BLOCK
        exponents = np.empty(MAX_BLOCK + 8, dtype=np.uint8)
        tail = body
        for b in range(blocks):
            mode = chunk[blocks + 2 * b + 1] >> (TAIL_BITS - 8)
            trim = np.int64(chunk[3 * blocks + b]) if trims else 0
            if mode > WIDE or trim > mantissa:
                return BLOCK
            tail += body_bytes(mode, min(block, len(words) - b * block), trim, mantissa, itemsize)
        for b in range(blocks):
            high = np.int64(chunk[blocks + 2 * b + 1])
            mode = high >> (TAIL_BITS - 8)
            tail_bytes = np.int64(chunk[blocks + 2 * b]) | (high & (1 << (TAIL_BITS - 8)) - 1) << 8
            trim = np.int64(chunk[3 * blocks + b]) if trims else 0
            top = np.int64(chunk[b])
            here = words[b * block : (b + 1) * block]
            size = body_bytes(mode, len(here), trim, mantissa, itemsize)
            if tail + tail_bytes > len(chunk):
                return BLOCK
            first, second = chunk[body : body + size], chunk[tail : tail + tail_bytes]
            status = OK
            if mode == FILL:
                if tail_bytes != 0 and tail_bytes != itemsize:
                    return BLOCK
                word = np.int64(0)
                for byte in range(tail_bytes):
                    word |= np.int64(second[byte]) << 8 * byte
                here[:] = word
            elif mode == RAW:
                if tail_bytes:
                    return BLOCK
                here.view(np.uint8)[:] = first[: len(here) * itemsize]
            elif mode == SPARSE:
                status = _decode_sparse(second, top, trim, exponent, mantissa, here)
            else:
                r = 1 + mantissa - trim
                tier1 = first[parts_bytes(len(here), r) :]
                status = _decode_elements(mode, tier1, second, len(here), top, exponents)
                _join(first, exponents, r, trim, exponent, mantissa, here)
            if status != OK:
                return status
            body += size
            tail += tail_bytes
        return OK if pad16(tail) == len(chunk) else BLOCK

    @jit
    def _entry(payload, chunk):
        value = np.int64(0)
        for byte in range(4):
            value |= np.int64(payload[4 * chunk + byte]) << 8 * byte
        return value

    @jit
    def decode(payload, trims, exponent, mantissa, block, words):
        """Decode ``payload`` to ``words``. Returns 0 or a FrameErrorCode; the words are then undefined.

        ``trims``: the tables have the trim of each block.
        """
        chunk_size = block * CHUNK_BLOCKS
        chunks = (len(words) + chunk_size - 1) // chunk_size
        at = pad16(4 * chunks)
        if at > len(payload):
            return INDEX
        for chunk in range(chunks):
            end = 16 * _entry(payload, chunk + 1) if chunk + 1 < chunks else len(payload)
            if 16 * _entry(payload, chunk) != at or end < at or end > len(payload):
                return INDEX
            here = words[chunk * chunk_size : (chunk + 1) * chunk_size]
            status = _decode_chunk(payload[at:end], here, trims, exponent, mantissa, block)
            if status != OK:
                return status
            at = end
        return OK if at == len(payload) else INDEX
