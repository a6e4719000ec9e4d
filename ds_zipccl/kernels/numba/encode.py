"""Encoder of exponent payloads in numba; see :mod:`.layout`."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import (
    ABOVE,
    CASCADE,
    CASCADE_BIAS,
    CHUNK_BLOCKS,
    CODE_OF_K,
    FALLBACK_BIAS,
    FILL,
    LOW_BITS,
    MAX_BLOCK,
    RAW,
    SPARSE,
    TAIL_BITS,
    TIER1_BITS,
    TIERS,
    WIDE,
    WIDE_BIAS,
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

_GATHER = np.uint64(0x0102040810204080)  # brings the low bits of eight bytes together in the top byte

with kernel_cache():

    @jit
    def _put_plane(values, m, bit, plane):
        """Bit ``bit`` of each of m bytes (padded with zeros to a multiple of 8) as a plane."""
        eights = values.view(np.uint64)
        for i in range(plane_bytes(m)):
            plane[i] = np.uint8((eights[i] >> np.uint64(bit) & LOW_BITS) * _GATHER >> np.uint64(56))

    @jit
    def _code(mode, tier, exponents, m, top, codes, escapes):
        """Codes of m exponents in a tier; those that escape go to ``escapes``, which may be ``exponents``. Returns how many."""
        table = CODE_OF_K[mode, tier]
        escape = (1 << TIER1_BITS[mode]) - 1 if tier == 0 else 3
        zero = ZERO_CODE if tier == TIERS - 1 else escape
        count = 0
        for i in range(m):
            e = exponents[i]
            code = table[(top + ABOVE - e) & 255]
            if code == escape and e == 0:
                code = zero
            codes[i] = code
            escapes[count] = e
            count += code == escape
        codes[m : m + 7] = 0
        return count

    @jit
    def _put_parts(values, m, r, first):
        """Planes of m sign-and-mantissa values of r bits (FORMAT.md 2.1, point 1)."""
        for byte in range(r // 8):
            for i in range(m):
                first[byte * m + i] = values[i] >> 8 * byte & 255
        if r % 8:
            rest = np.zeros(MAX_BLOCK + 8, dtype=np.uint8)
            for i in range(m):
                rest[i] = values[i] >> r // 8 * 8
            plane = plane_bytes(m)
            for p in range(r % 8):
                at = r // 8 * m + p * plane
                _put_plane(rest, m, p, first[at : at + plane])

    @jit
    def _encode_elements(mode, exponents, m, top, tier1, second, codes):
        """FORMAT.md 2.1, points 2 and 3; uses up ``exponents``. Returns the bytes of the second part, which is zeroed."""
        left = _code(mode, 0, exponents, m, top, codes, exponents)
        plane = plane_bytes(m)
        for p in range(TIER1_BITS[mode]):
            _put_plane(codes, m, p, tier1[p * plane : (p + 1) * plane])
        bit = 0
        for tier in range(1, TIERS):
            count = left
            left = _code(mode, tier, exponents, count, top, codes, exponents)
            for p in range(2):
                for i in range(count):
                    second[bit >> 3] |= (codes[i] >> p & 1) << (bit & 7)
                    bit += 1
        end = (bit + 7) // 8
        second[end : end + left] = exponents[:left]
        return end + left

    @jit
    def _sign_mantissa(words, exponent, mantissa, trim, values):
        for i in range(len(words)):
            w = np.int64(words[i])
            values[i] = (w >> exponent & 1 << mantissa | w & (1 << mantissa) - 1) >> trim

    @jit
    def _encode_sparse(words, exponents, values, top, r, exponent, mantissa, tail, codes):
        """FORMAT.md 2.2; ``tail`` is zeroed. Returns the bytes of the tail."""
        n = len(words)
        signs = 1 + plane_bytes(n)
        m = zeros = 0
        for i in range(n):
            w = np.int64(words[i])
            if w & (1 << (exponent + mantissa)) - 1:
                exponents[m] = exponents[i]
                values[m] = values[i]
                m += 1
            else:
                tail[1 + (i >> 3)] |= 1 << (i & 7)
                if w:
                    tail[0] = 1
                    tail[signs + (zeros >> 3)] |= 1 << (zeros & 7)
                zeros += 1
        at = signs + (plane_bytes(zeros) if tail[0] else 0)
        tier1 = at + parts_bytes(m, r)
        second = tier1 + TIER1_BITS[SPARSE] * plane_bytes(m)
        _put_parts(values, m, r, tail[at:tier1])
        return second + _encode_elements(CASCADE, exponents, m, top, tail[tier1:second], tail[second:], codes)

    @jit
    def _encode_block(words, wanted, trims, exponent, mantissa, body, tail, exponents, codes, values):
        """FORMAT.md section 3; ``tail`` is zeroed, the last three are scratch. Returns mode, top, trim, body bytes, tail bytes."""
        n = len(words)
        itemsize = itemsize_of(exponent, mantissa)
        zeros = total = largest = np.int64(0)
        differs = any_bit = words[0] ^ words[0]
        for i in range(n):
            w = words[i]
            differs |= w ^ words[0]
            any_bit |= w
            e = np.int64(w) >> mantissa & (1 << exponent) - 1
            exponents[i] = e
            total += e
            largest = max(largest, e)
            zeros += np.int64(w) & (1 << (exponent + mantissa)) - 1 == 0
        if differs == 0:
            tail_bytes = itemsize if any_bit else 0
            for byte in range(tail_bytes):
                tail[byte] = np.int64(any_bit) >> 8 * byte & 255
            return FILL, 0, 0, 0, tail_bytes
        count = n - zeros
        mode = SPARSE if 16 * zeros >= n else wanted
        bias = WIDE_BIAS if mode == WIDE else CASCADE_BIAS
        top = min(largest, (8 * total + bias * count) // (8 * max(count, 1)))
        trim = 0
        if trims:
            while trim < mantissa and np.int64(any_bit) >> trim & 1 == 0:
                trim += 1
        r = 1 + mantissa - trim
        _sign_mantissa(words, exponent, mantissa, trim, values)
        if mode == SPARSE:
            size = 0
            tail_bytes = _encode_sparse(words, exponents, values, top, r, exponent, mantissa, tail, codes)
        else:
            if mode == CASCADE:
                escaped = 0
                for i in range(n):
                    escaped += CODE_OF_K[CASCADE, 0][(top + ABOVE - exponents[i]) & 255] == 3
                if 8 * escaped > 3 * n:
                    mode, top = WIDE, min(largest, (8 * total + FALLBACK_BIAS * count) // (8 * max(count, 1)))
            first = parts_bytes(n, r)
            size = body_bytes(mode, n, trim, mantissa, itemsize)
            _put_parts(values, n, r, body)
            body[first:size] = 0
            tail_bytes = _encode_elements(mode, exponents, n, top, body[first:], tail, codes)
        raw = body_bytes(RAW, n, 0, mantissa, itemsize)
        if size + tail_bytes < raw:
            return mode, top, trim, size, tail_bytes
        body[: n * itemsize] = words.view(np.uint8)
        body[n * itemsize : raw] = 0
        return RAW, 0, 0, raw, 0

    @jit
    def _encode_chunk(words, wanted, trims, exponent, mantissa, block, out):
        """Encode a chunk to the start of ``out``. Returns its bytes."""
        itemsize = itemsize_of(exponent, mantissa)
        tails = np.empty(CHUNK_BLOCKS * block * itemsize, dtype=np.uint8)
        tail = np.zeros(8 * block + 64, dtype=np.uint8)
        exponents = np.empty(MAX_BLOCK + 8, dtype=np.uint8)
        codes = np.empty(MAX_BLOCK + 8, dtype=np.uint8)
        values = np.empty(MAX_BLOCK, dtype=np.uint32)
        # 64 bytes more than RAW takes: coded elements of a very short block can be longer, before they lose against it
        body = np.empty(4 * MAX_BLOCK + 64, dtype=np.uint8)
        blocks = (len(words) + block - 1) // block
        at = table_bytes(blocks, trims)
        out[:at] = 0
        tails_end = 0
        for b in range(blocks):
            here = words[b * block : (b + 1) * block]
            mode, top, trim, size, tail_bytes = _encode_block(
                here, wanted, trims, exponent, mantissa, body, tail, exponents, codes, values
            )
            out[b] = top
            out[blocks + 2 * b] = tail_bytes & 255
            out[blocks + 2 * b + 1] = mode << (TAIL_BITS - 8) | tail_bytes >> 8
            if trims:
                out[3 * blocks + b] = trim
            out[at : at + size] = body[:size]
            tails[tails_end : tails_end + tail_bytes] = tail[:tail_bytes]
            tail[:] = 0
            tails_end += tail_bytes
            at += size
        out[at : at + tails_end] = tails[:tails_end]
        out[at + tails_end : at + pad16(tails_end)] = 0
        return at + pad16(tails_end)

    @jit
    def encode(words, wanted, trims, exponent, mantissa, block, out):
        """Encode ``words`` in mode ``wanted``, CASCADE or WIDE, to ``out`` (payload_bound() bytes). Returns the payload's bytes.

        ``trims``: the tables have the trim of each block.
        """
        chunk_size = block * CHUNK_BLOCKS
        chunks = (len(words) + chunk_size - 1) // chunk_size
        at = pad16(4 * chunks)
        out[:at] = 0
        for chunk in range(chunks):
            for byte in range(4):
                out[4 * chunk + byte] = at // 16 >> 8 * byte & 255
            part = words[chunk * chunk_size : (chunk + 1) * chunk_size]
            at += _encode_chunk(part, wanted, trims, exponent, mantissa, block, out[at:])
        return at
