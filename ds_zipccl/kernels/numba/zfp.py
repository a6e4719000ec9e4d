"""The reference of ZFP in one dimension at a fixed rate (FORMAT.md 2.11); see :mod:`.layout`.

Integers alone: no rounding mode and no flushed denormal changes a bit. A float type is ``(E, M)`` as in :mod:`.layout`. A block is four
values; its code is a string of at most 128 bits, as two words of 64.
"""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import jit, kernel_cache

BLOCK_VALUES = 4
#: Bits of the flag and the exponent, which a block of zeros does not have.
HEAD_BITS = 9
PLANES = 32
_MASK = np.int64(0xFFFFFFFF)
_NEGABINARY = np.int64(0xAAAAAAAA)
_MAX_FP32 = np.int64(0x7F7FFFFF)

with kernel_cache():

    @jit
    def _widen(word, exponent, mantissa):
        """A word of a float type as the word of the same fp32 value."""
        w = np.int64(word)
        sign = (w >> (exponent + mantissa)) << 31
        magnitude = w & ((1 << (exponent + mantissa)) - 1)
        if exponent == 8:
            return sign | magnitude << (23 - mantissa)
        e = magnitude >> mantissa
        if e == (1 << exponent) - 1:
            return sign | 255 << 23 | (magnitude << (23 - mantissa) & 0x7FFFFF)
        if e:
            return sign | (magnitude << (23 - mantissa)) + ((128 - (1 << (exponent - 1))) << 23)
        if magnitude == 0:
            return sign
        e = 129 - (1 << (exponent - 1))
        while magnitude >> mantissa == 0:
            magnitude <<= 1
            e -= 1
        return sign | e << 23 | (magnitude << (23 - mantissa) & 0x7FFFFF)

    @jit
    def _shift_right(number, bits):
        """A number of at most 32 bits over a power of two, to nearest, ties to even."""
        if bits > 33:
            return np.int64(0)
        return number + (1 << (bits - 1)) - 1 + (number >> bits & 1) >> bits

    @jit
    def _narrow(word, exponent, mantissa):
        """The word of a finite fp32 value rounded to a float type; beyond its largest finite value: that value."""
        sign = (word >> 31) << (exponent + mantissa)
        magnitude = word & 0x7FFFFFFF
        if exponent == 8:
            rounded = _shift_right(magnitude, 23 - mantissa) if mantissa < 23 else magnitude
        else:
            least = 129 - (1 << (exponent - 1))  # fp32 exponent of the smallest normal value
            e = magnitude >> 23
            if e >= least:
                rounded = _shift_right(magnitude - ((least - 1) << 23), 23 - mantissa)
            elif e == 0:
                rounded = np.int64(0)
            else:
                rounded = _shift_right(magnitude & 0x7FFFFF | 0x800000, 23 - mantissa + least - e)
        return sign | min(rounded, ((1 << exponent) - 1 << mantissa) - 1)

    @jit
    def _signed(number):
        """The low 32 bits as a two's complement number."""
        return ((number + (1 << 31)) & _MASK) - (1 << 31)

    @jit
    def _lift(q):
        """The transform of four numbers, in place."""
        x, y, z, w = q
        x = _signed(x + w) >> 1
        w = _signed(w - x)
        z = _signed(z + y) >> 1
        y = _signed(y - z)
        x = _signed(x + z) >> 1
        z = _signed(z - x)
        w = _signed(w + y) >> 1
        y = _signed(y - w)
        w = _signed(w + (y >> 1))
        y = _signed(y - (w >> 1))
        q[0], q[1], q[2], q[3] = x, y, z, w

    @jit
    def _inverse_lift(q):
        x, y, z, w = q
        y = _signed(y + (w >> 1))
        w = _signed(w - (y >> 1))
        y = _signed(y + w)
        w = _signed(_signed(w << 1) - y)
        z = _signed(z + x)
        x = _signed(_signed(x << 1) - z)
        y = _signed(y + z)
        z = _signed(_signed(z << 1) - y)
        w = _signed(w + x)
        x = _signed(_signed(x << 1) - w)
        q[0], q[1], q[2], q[3] = x, y, z, w

    @jit
    def _put(code, at, bit):
        code[at >> 6] |= np.uint64(bit) << np.uint64(at & 63)
        return at + 1

    @jit
    def _get(code, at):
        return np.int64(code[at >> 6] >> np.uint64(at & 63) & np.uint64(1))

    @jit
    def _encode_planes(u, code, limit):
        """Bit planes of four negabinary numbers to ``code``, from bit HEAD_BITS to ``limit``."""
        at, n = HEAD_BITS, 0
        for k in range(PLANES - 1, -1, -1):
            if at == limit:
                return
            plane = np.int64(0)
            for i in range(BLOCK_VALUES):
                plane |= (u[i] >> k & 1) << i
            for _ in range(min(n, limit - at)):
                at = _put(code, at, plane & 1)
                plane >>= 1
            while n < BLOCK_VALUES and at < limit:
                at = _put(code, at, plane != 0)
                if plane == 0:
                    break
                while n < BLOCK_VALUES - 1 and at < limit:
                    at = _put(code, at, plane & 1)
                    if plane & 1:
                        break
                    plane >>= 1
                    n += 1
                plane >>= 1
                n += 1

    @jit
    def _decode_planes(code, limit, u):
        u[:] = 0
        at, n = HEAD_BITS, 0
        for k in range(PLANES - 1, -1, -1):
            if at == limit:
                return
            plane = np.int64(0)
            for i in range(min(n, limit - at)):
                plane |= _get(code, at) << i
                at += 1
            while n < BLOCK_VALUES and at < limit:
                at += 1
                if not _get(code, at - 1):
                    break
                while n < BLOCK_VALUES - 1 and at < limit:
                    at += 1
                    if _get(code, at - 1):
                        break
                    n += 1
                plane |= 1 << n
                n += 1
            for i in range(BLOCK_VALUES):
                u[i] |= (plane >> i & 1) << k

    @jit
    def _gather(words, at, exponent, mantissa, block):
        """The four values of the block that begins at element ``at``, as fp32 words; returns whether they are finite."""
        count = min(len(words) - at, BLOCK_VALUES)
        for i in range(count):
            block[i] = _widen(words[at + i], exponent, mantissa)
        for i in range(count, BLOCK_VALUES):
            block[i] = block[1] if count == 2 and i == 2 else block[0]
        finite = True
        for i in range(BLOCK_VALUES):
            finite &= block[i] >> 23 & 255 != 255
        return finite

    @jit
    def _encode_block(block, rate, code, q):
        """The code of four finite values."""
        code[:] = 0
        top, some = np.int64(0), np.int64(0)
        for i in range(BLOCK_VALUES):
            top = max(top, block[i] >> 23 & 255)
            some |= block[i] & 0x7FFFFFFF
        if some == 0:
            return
        code[0] = np.uint64(1 | (top + 1) << 1)
        for i in range(BLOCK_VALUES):
            e = block[i] >> 23 & 255
            significand = block[i] & 0x7FFFFF | (0x800000 if e else 0)
            shift = max(e, 1) + 6 - top
            q[i] = significand << shift if shift >= 0 else significand >> min(-shift, 63)
            if block[i] >> 31:
                q[i] = -q[i]
        _lift(q)
        for i in range(BLOCK_VALUES):
            q[i] = ((q[i] + _NEGABINARY) & _MASK) ^ _NEGABINARY
        _encode_planes(q, code, BLOCK_VALUES * rate)

    @jit
    def _decode_block(code, rate, block, q):
        """The four values of a code, as fp32 words; every code has some."""
        head = np.int64(code[0] & np.uint64((1 << HEAD_BITS) - 1))
        block[:] = 0
        if head & 1 == 0:
            return
        _decode_planes(code, BLOCK_VALUES * rate, q)
        for i in range(BLOCK_VALUES):
            q[i] = _signed((q[i] ^ _NEGABINARY) - _NEGABINARY)
        _inverse_lift(q)
        for i in range(BLOCK_VALUES):
            number = abs(q[i])
            if number == 0:
                continue
            last = 0  # place of the highest one
            while number >> (last + 1):
                last += 1
            field = last + (head >> 1) - 30  # exponent field of the value, before it is rounded
            shift = max(last - 23, 8 - (head >> 1))
            rounded = _shift_right(number, shift) if shift > 0 else number << -shift
            rounded += (max(field, 1) - 1) << 23
            block[i] = min(rounded, _MAX_FP32) | (1 << 31 if q[i] < 0 else 0)

    @jit
    def _spread(block, exponent, mantissa, words, at):
        for i in range(min(len(words) - at, BLOCK_VALUES)):
            words[at + i] = _narrow(block[i], exponent, mantissa)

    @jit
    def encode(words, exponent, mantissa, rate, out):
        """The codes of ``words`` to ``out`` (uint64). Returns whether all words are finite; if not, ``out`` is undefined."""
        out[:] = 0
        code = np.zeros(2, dtype=np.uint64)
        block = np.zeros(BLOCK_VALUES, dtype=np.int64)
        q = np.zeros(BLOCK_VALUES, dtype=np.int64)
        bit = 0
        for at in range(0, len(words), BLOCK_VALUES):
            if not _gather(words, at, exponent, mantissa, block):
                return False
            _encode_block(block, rate, code, q)
            for i in range(BLOCK_VALUES * rate):
                out[bit >> 6] |= (code[i >> 6] >> np.uint64(i & 63) & np.uint64(1)) << np.uint64(bit & 63)
                bit += 1
        return True

    @jit
    def decode(codes, exponent, mantissa, rate, words):
        """The words of ``codes`` (uint64), which are as many as the words need."""
        code = np.zeros(2, dtype=np.uint64)
        block = np.zeros(BLOCK_VALUES, dtype=np.int64)
        q = np.zeros(BLOCK_VALUES, dtype=np.int64)
        bit = 0
        for at in range(0, len(words), BLOCK_VALUES):
            code[:] = 0
            for i in range(BLOCK_VALUES * rate):
                code[i >> 6] |= (codes[bit >> 6] >> np.uint64(bit & 63) & np.uint64(1)) << np.uint64(i & 63)
                bit += 1
            _decode_block(code, rate, block, q)
            _spread(block, exponent, mantissa, words, at)

    @jit
    def project(words, exponent, mantissa, rate, out):
        """The words that a frame of ``words`` decodes to; a block with a NaN or an infinity is copied. ``out`` may be ``words``."""
        code = np.zeros(2, dtype=np.uint64)
        block = np.zeros(BLOCK_VALUES, dtype=np.int64)
        q = np.zeros(BLOCK_VALUES, dtype=np.int64)
        for at in range(0, len(words), BLOCK_VALUES):
            if _gather(words, at, exponent, mantissa, block):
                _encode_block(block, rate, code, q)
                _decode_block(code, rate, block, q)
                _spread(block, exponent, mantissa, out, at)
            else:
                out[at : at + BLOCK_VALUES] = words[at : at + BLOCK_VALUES]
