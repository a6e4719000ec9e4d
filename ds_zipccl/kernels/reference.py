"""Exponent payload in numba, one element at a time: the readable reference of FORMAT.md section 2, and the fallback without a compiler.

Words are numpy uint16 or uint32 arrays, payloads uint8 arrays. A float type is ``(E, M)``: exponent and mantissa bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numba
import numpy as np

from ds_zipccl.op_builder.cache import cache_root

FILL, RAW, CASCADE, SPARSE = range(4)
OK, INDEX, BLOCK = 0, 11, 12  # FrameErrorCode
CHUNK_BLOCKS = 32
TIERS = 4
ZERO_RANK, NO_RANK = 11, 12
TOP_BIAS = 23
TAIL_BITS = 13
K_OF_RANK = np.array([2, 3, 4, 1, 5, 6, 7, 8, 9, 0, 10], dtype=np.int64)
RANK_OF_K = np.full(256, NO_RANK, dtype=np.int64)
RANK_OF_K[K_OF_RANK] = np.arange(len(K_OF_RANK))


@contextlib.contextmanager
def _kernel_cache() -> Iterator[None]:
    """Let numba keep compiled code in our cache folder, not inside the installed package."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or str(cache_root() / "numba")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


_jit = numba.njit(nogil=True, cache=True)


with _kernel_cache():

    @_jit
    def _pad16(x):
        return (x + 15) // 16 * 16

    @_jit
    def _get_bit(data, bit):
        return data[bit >> 3] >> (bit & 7) & 1

    @_jit
    def _put_bit(data, bit, value):
        data[bit >> 3] |= np.uint8(value << (bit & 7))

    @_jit
    def _first_part_bytes(m, r):
        return r // 8 * m + (r % 8 + 2) * ((m + 7) // 8)

    @_jit
    def _body_bytes(mode, n, trim, mantissa, itemsize):
        if mode == RAW:
            return _pad16(n * itemsize)
        if mode == CASCADE:
            return _pad16(_first_part_bytes(n, 1 + mantissa - trim))
        return 0

    @_jit
    def _rank(e, top):
        rank = RANK_OF_K[(top + 1 - e) & 255]
        return ZERO_RANK if rank == NO_RANK and e == 0 else rank

    @_jit
    def _encode_elements(words, top, trim, exponent, mantissa, first, second):
        """FORMAT.md 2.1; ``first`` and ``second`` are zeroed. Returns the bytes of the second part."""
        m = len(words)
        r = 1 + mantissa - trim
        plane = (m + 7) // 8
        bit_planes = r // 8 * m
        tier1 = bit_planes + r % 8 * plane
        for i in range(m):
            w = np.int64(words[i])
            v = (w >> (exponent + mantissa) << mantissa | w & ((1 << mantissa) - 1)) >> trim
            for byte in range(r // 8):
                first[byte * m + i] = v >> 8 * byte & 255
            for p in range(r % 8):
                _put_bit(first, 8 * (bit_planes + p * plane) + i, v >> (r // 8 * 8 + p) & 1)
            code = min(_rank(w >> mantissa & ((1 << exponent) - 1), top), 3)
            _put_bit(first, 8 * tier1 + i, code & 1)
            _put_bit(first, 8 * (tier1 + plane) + i, code >> 1)
        start = 0  # bit where the tier starts
        for tier in range(1, TIERS):
            entries = 0
            for i in range(m):
                entries += _rank(np.int64(words[i]) >> mantissa & ((1 << exponent) - 1), top) >= 3 * tier
            at = start
            for i in range(m):
                rank = _rank(np.int64(words[i]) >> mantissa & ((1 << exponent) - 1), top)
                if rank >= 3 * tier:
                    code = min(rank - 3 * tier, 3)
                    _put_bit(second, at, code & 1)
                    _put_bit(second, at + entries, code >> 1)
                    at += 1
            start += 2 * entries
        end = (start + 7) // 8
        for i in range(m):
            e = np.int64(words[i]) >> mantissa & ((1 << exponent) - 1)
            if _rank(e, top) == NO_RANK:
                second[end] = e
                end += 1
        return end

    @_jit
    def _encode_sparse(words, top, trim, exponent, mantissa, tail):
        """FORMAT.md 2.2; ``tail`` is zeroed. Returns the bytes of the tail."""
        n = len(words)
        others = np.empty_like(words)
        m = 0
        zeros = 0
        signs = 8 * (1 + (n + 7) // 8)
        magnitude = (1 << (exponent + mantissa)) - 1
        for i in range(n):
            w = np.int64(words[i])
            if w & magnitude:
                others[m] = words[i]
                m += 1
            else:
                _put_bit(tail, 8 + i, 1)
                if w:
                    tail[0] = 1
                    _put_bit(tail, signs + zeros, 1)
                zeros += 1
        at = 1 + (n + 7) // 8 + ((zeros + 7) // 8 if tail[0] else 0)
        first = at + _first_part_bytes(m, 1 + mantissa - trim)
        return first + _encode_elements(others[:m], top, trim, exponent, mantissa, tail[at:first], tail[first:])

    @_jit
    def _encode_block(words, exponent, mantissa, body, tail):
        """FORMAT.md section 3; ``body`` and ``tail`` are zeroed. Returns mode, top, trim, body bytes, tail bytes."""
        n = len(words)
        itemsize = (1 + exponent + mantissa) // 8
        magnitude = (1 << (exponent + mantissa)) - 1
        differs = any_bit = total = zeros = largest = np.int64(0)
        for i in range(n):
            w = np.int64(words[i])
            differs |= w ^ np.int64(words[0])
            any_bit |= w
            zeros += w & magnitude == 0
            total += w >> mantissa & ((1 << exponent) - 1)
            largest = max(largest, w >> mantissa & ((1 << exponent) - 1))
        if differs == 0:
            tail_bytes = itemsize if any_bit else 0
            for byte in range(tail_bytes):
                tail[byte] = any_bit >> 8 * byte & 255
            return FILL, 0, 0, 0, tail_bytes
        count = n - zeros
        top = min(largest, (8 * total + TOP_BIAS * count) // (8 * max(count, 1)))
        trim = 0
        if itemsize == 4:
            while trim < mantissa and any_bit >> trim & 1 == 0:
                trim += 1
        if 16 * zeros >= n:
            mode, body_bytes = SPARSE, 0
            tail_bytes = _encode_sparse(words, top, trim, exponent, mantissa, tail)
        else:
            mode, body_bytes = CASCADE, _body_bytes(CASCADE, n, trim, mantissa, itemsize)
            tail_bytes = _encode_elements(words, top, trim, exponent, mantissa, body, tail)
        raw = _body_bytes(RAW, n, 0, mantissa, itemsize)
        if body_bytes + tail_bytes < raw:
            return mode, top, trim, body_bytes, tail_bytes
        body[: n * itemsize] = words.view(np.uint8)
        body[n * itemsize : raw] = 0
        return RAW, 0, 0, raw, 0

    @_jit
    def encode(words, exponent, mantissa, block, out):
        """Encode ``words`` to ``out`` (payload_bound() bytes). Returns the payload's bytes."""
        itemsize = (1 + exponent + mantissa) // 8
        chunk_size = block * CHUNK_BLOCKS
        chunks = (len(words) + chunk_size - 1) // chunk_size
        at = _pad16(4 * chunks)
        out[:at] = 0
        tails = np.empty(CHUNK_BLOCKS * block * itemsize, dtype=np.uint8)
        tail = np.empty(8 * block + 16, dtype=np.uint8)
        for chunk in range(chunks):
            for byte in range(4):
                out[4 * chunk + byte] = at // 16 >> 8 * byte & 255
            part = words[chunk * chunk_size : (chunk + 1) * chunk_size]
            blocks = (len(part) + block - 1) // block
            table = at
            at += _pad16(blocks * (4 if itemsize == 4 else 3))
            out[table:at] = 0
            tails_end = 0
            for b in range(blocks):
                here = part[b * block : (b + 1) * block]
                # 16 bytes more than RAW takes: coded elements of a very short block can be longer, before they lose against it
                body = out[at : at + _pad16(len(here) * itemsize) + 16]
                body[:] = 0
                tail[:] = 0
                mode, top, trim, body_bytes, tail_bytes = _encode_block(here, exponent, mantissa, body, tail)
                out[table + b] = top
                out[table + blocks + 2 * b] = tail_bytes & 255
                out[table + blocks + 2 * b + 1] = mode << (TAIL_BITS - 8) | tail_bytes >> 8
                if itemsize == 4:
                    out[table + 3 * blocks + b] = trim
                tails[tails_end : tails_end + tail_bytes] = tail[:tail_bytes]
                tails_end += tail_bytes
                at += body_bytes
            out[at : at + tails_end] = tails[:tails_end]
            out[at + tails_end : at + _pad16(tails_end)] = 0
            at += _pad16(tails_end)
        return at

    @_jit
    def _decode_elements(first, second, top, trim, exponent, mantissa, words):
        """FORMAT.md 2.1: fills ``words``; ``second`` must be used up exactly."""
        m = len(words)
        r = 1 + mantissa - trim
        plane = (m + 7) // 8
        bit_planes = r // 8 * m
        tier1 = bit_planes + r % 8 * plane
        ranks = np.zeros(m, dtype=np.int64)
        left = 0
        for i in range(m):
            ranks[i] = _get_bit(first, 8 * tier1 + i) + 2 * _get_bit(first, 8 * (tier1 + plane) + i)
            left += ranks[i] == 3
        start = 0
        for tier in range(1, TIERS):
            if start + 2 * left > 8 * len(second):
                return BLOCK
            at, entries, left = start, left, 0
            for i in range(m):
                if ranks[i] == 3 * tier:
                    ranks[i] += _get_bit(second, at) + 2 * _get_bit(second, at + entries)
                    left += ranks[i] == 3 * tier + 3
                    at += 1
            start += 2 * entries
        raw = (start + 7) // 8
        if raw + left != len(second):
            return BLOCK
        for i in range(m):
            v = np.int64(0)
            for byte in range(r // 8):
                v |= np.int64(first[byte * m + i]) << 8 * byte
            for p in range(r % 8):
                v |= np.int64(_get_bit(first, 8 * (bit_planes + p * plane) + i)) << (r // 8 * 8 + p)
            v <<= trim
            if ranks[i] == NO_RANK:
                e = np.int64(second[raw])
                raw += 1
            elif ranks[i] == ZERO_RANK:
                e = np.int64(0)
            else:
                e = np.int64(top) + 1 - K_OF_RANK[ranks[i]]
            e &= (1 << exponent) - 1
            words[i] = v >> mantissa << (exponent + mantissa) | e << mantissa | v & ((1 << mantissa) - 1)
        return OK

    @_jit
    def _decode_sparse(tail, top, trim, exponent, mantissa, words):
        """FORMAT.md 2.2."""
        n = len(words)
        plane = (n + 7) // 8
        if len(tail) < 1 + plane or tail[0] > 1:
            return BLOCK
        zeros = 0
        for i in range(n):
            zeros += _get_bit(tail, 8 + i)
        at = 1 + plane + ((zeros + 7) // 8 if tail[0] else 0)
        first = at + _first_part_bytes(n - zeros, 1 + mantissa - trim)
        if first > len(tail):
            return BLOCK
        others = np.empty(n - zeros, dtype=words.dtype)
        status = _decode_elements(tail[at:first], tail[first:], top, trim, exponent, mantissa, others)
        if status != OK:
            return status
        zero = other = 0
        for i in range(n):
            if _get_bit(tail, 8 + i):
                sign = np.int64(_get_bit(tail, 8 * (1 + plane) + zero)) if tail[0] else 0
                words[i] = sign << (exponent + mantissa)
                zero += 1
            else:
                words[i] = others[other]
                other += 1
        return OK

    @_jit
    def _decode_chunk(chunk, words, exponent, mantissa, block):
        itemsize = (1 + exponent + mantissa) // 8
        blocks = (len(words) + block - 1) // block
        body = _pad16(blocks * (4 if itemsize == 4 else 3))
        if body > len(chunk):
            return BLOCK
        tail = body
        for b in range(blocks):
            mode = chunk[blocks + 2 * b + 1] >> (TAIL_BITS - 8)
            trim = np.int64(chunk[3 * blocks + b]) if itemsize == 4 else 0
            if mode > SPARSE or trim > mantissa:
                return BLOCK
            tail += _body_bytes(mode, min(block, len(words) - b * block), trim, mantissa, itemsize)
        for b in range(blocks):
            high = np.int64(chunk[blocks + 2 * b + 1])
            mode = high >> (TAIL_BITS - 8)
            tail_bytes = np.int64(chunk[blocks + 2 * b]) | (high & ((1 << (TAIL_BITS - 8)) - 1)) << 8
            trim = np.int64(chunk[3 * blocks + b]) if itemsize == 4 else 0
            top = np.int64(chunk[b])
            here = words[b * block : (b + 1) * block]
            body_bytes = _body_bytes(mode, len(here), trim, mantissa, itemsize)
            if tail + tail_bytes > len(chunk):
                return BLOCK
            first, second = chunk[body : body + body_bytes], chunk[tail : tail + tail_bytes]
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
            elif mode == CASCADE:
                status = _decode_elements(first, second, top, trim, exponent, mantissa, here)
            else:
                status = _decode_sparse(second, top, trim, exponent, mantissa, here)
            if status != OK:
                return status
            body += body_bytes
            tail += tail_bytes
        return OK if _pad16(tail) == len(chunk) else BLOCK

    @_jit
    def _offset(payload, chunk):
        value = np.int64(0)
        for byte in range(4):
            value |= np.int64(payload[4 * chunk + byte]) << 8 * byte
        return 16 * value

    @_jit
    def decode(payload, exponent, mantissa, block, words):
        """Decode ``payload`` to ``words``. Returns 0 or a FrameErrorCode; the words are then undefined."""
        chunk_size = block * CHUNK_BLOCKS
        chunks = (len(words) + chunk_size - 1) // chunk_size
        at = _pad16(4 * chunks)
        if at > len(payload):
            return INDEX
        for chunk in range(chunks):
            end = _offset(payload, chunk + 1) if chunk + 1 < chunks else len(payload)
            if _offset(payload, chunk) != at or end < at or end > len(payload):
                return INDEX
            part = words[chunk * chunk_size : (chunk + 1) * chunk_size]
            status = _decode_chunk(payload[at:end], part, exponent, mantissa, block)
            if status != OK:
                return status
            at = end
        return OK if at == len(payload) else INDEX
