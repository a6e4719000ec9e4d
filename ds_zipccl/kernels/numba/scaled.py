"""Scaled payloads (FORMAT.md 2.10) in numba; see :mod:`.layout`. Values are float32; the caller's thread must keep denormals."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import BLOCK, OK, jit, kernel_cache

#: In the place of a scale: the group stays as it is.
STAYS = -1
_SIGN, _MAGNITUDE, _MANTISSA, _INFINITY = 0x80000000, 0x7FFFFFFF, 0x7FFFFF, 0x7F800000
_LEAST_NORMAL = 121 << 23  # 2^-6 as the bits of a float
_NO_NUMBER = 0x7F  # code of a NaN, without its sign
#: Values of the codes without a sign.
_VALUES = np.array(
    [code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(128)], dtype=np.float32
)

with kernel_cache():

    @jit
    def _hadamard(values):
        """H v in place."""
        stride = 1
        while stride < len(values):
            for i in range(len(values)):
                if not i & stride:
                    a, b = values[i], values[i + stride]
                    values[i], values[i + stride] = a + b, a - b
            stride *= 2

    @jit
    def _scale(values, integers, bits, reach):
        """The scale of a group, STAYS where it has none. ``reach``: log2 by which the inverse transform may raise a value."""
        words = values.view(np.uint32)
        at = 0
        for i in range(len(values)):
            if words[i] & _MAGNITUDE > words[at] & _MAGNITUDE:
                at = i
        largest = np.int64(words[at]) & _MAGNITUDE
        if largest >= _INFINITY:
            return STAYS
        if not integers:
            scale = max(0, (largest >> 23) - 8 + (1 if largest & _MANTISSA > 0x600000 else 0))
            return scale if scale <= 246 - reach else STAYS
        quotient = np.empty(1, dtype=np.float32)
        quotient[0] = abs(values[at]) / np.float32((1 << (bits - 1)) - 1)
        scale = (np.int64(quotient.view(np.uint32)[0]) + 0xFFFF) >> 16
        return scale if scale >> 7 <= 255 - bits - reach else STAYS

    @jit
    def _float_of(word):
        """The float with these bits."""
        one = np.empty(1, dtype=np.uint32)
        one[0] = word
        return one.view(np.float32)[0]

    @jit
    def _put_e4m3(values, scale, codes):
        factor = _float_of((254 - scale) << 23)
        scaled = values * factor
        words = scaled.view(np.uint32)
        for i in range(len(values)):
            word = np.int64(words[i])
            size = word & _MAGNITUDE
            if size >= _LEAST_NORMAL:
                code = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960
            else:
                code = np.int64(np.rint(abs(scaled[i]) * np.float32(512.0)))
            codes[i] = code | (word & _SIGN) >> 24

    @jit
    def _put_integers(values, scale, bits, codes):
        factor = _float_of(scale << 16)
        most = (1 << (bits - 1)) - 1
        codes[:] = 0
        plane = len(values) // 8
        for i in range(len(values)):
            number = np.int64(np.rint(values[i] / factor))
            code = min(max(number, -most), most) + most
            for p in range(bits):
                codes[p * plane + (i >> 3)] |= (code >> p & 1) << (i & 7)

    @jit
    def _get_e4m3(codes, scale, values):
        factor = _float_of(scale << 23)
        status = OK
        for i in range(len(values)):
            size = np.int64(codes[i]) & 0x7F
            if size == _NO_NUMBER:
                status = BLOCK
            values[i] = (-_VALUES[size] if codes[i] >> 7 else _VALUES[size]) * factor
        return status

    @jit
    def _get_integers(codes, scale, bits, values):
        factor = _float_of(scale << 16)
        most = (1 << (bits - 1)) - 1
        plane = len(values) // 8
        status = OK
        for i in range(len(values)):
            code = np.int64(0)
            for p in range(bits):
                code |= np.int64(codes[p * plane + (i >> 3)] >> (i & 7) & 1) << p
            if code > 2 * most:
                status = BLOCK
            values[i] = np.float32(code - most) * factor
        return status

    @jit
    def _encode_group(values, integers, bits, hadamard, codes):
        """Scale and codes of a group, whose ``values`` are used up."""
        if hadamard:
            _hadamard(values)
        scale = _scale(values, integers, bits, _log2(len(values)) if hadamard else 0)
        if scale > 0 and integers:
            _put_integers(values, scale, bits, codes)
        elif scale > 0:
            _put_e4m3(values, scale, codes)
        return scale

    @jit
    def _decode_group(scale, codes, integers, bits, hadamard, values):
        """The values of a group whose scale is not zero."""
        status = _get_integers(codes, scale, bits, values) if integers else _get_e4m3(codes, scale, values)
        if hadamard:
            _hadamard(values)
            values *= _float_of((127 - _log2(len(values))) << 23)
        return status

    @jit
    def _log2(size):
        log2 = 0
        while 1 << log2 < size:
            log2 += 1
        return log2

    @jit
    def encode(values, group, integers, bits, hadamard, scales, codes):
        """Scales and codes of ``values`` (float32). Returns the number of groups with codes, STAYS where a group stays as it is."""
        size = group * bits // 8
        coded = 0
        padded = np.empty(group, dtype=np.float32)
        spare = np.empty(size, dtype=np.uint8)  # of a group without codes
        for number in range(len(scales)):
            here = values[number * group : (number + 1) * group]
            padded[: len(here)] = here
            padded[len(here) :] = 0
            scale = _encode_group(padded, integers, bits, hadamard, spare)
            if scale == STAYS:
                return STAYS
            scales[number] = scale
            if scale:
                codes[coded * size : (coded + 1) * size] = spare
                coded += 1
        return coded

    @jit
    def decode(scales, codes, group, integers, bits, hadamard, values):
        """Values of proven scales and of as many codes as they have. Returns 0 or a FrameErrorCode."""
        size = group * bits // 8
        at = 0
        status = OK
        whole = np.empty(group, dtype=np.float32)
        for number in range(len(scales)):
            here = values[number * group : (number + 1) * group]
            scale = np.int64(scales[number])
            if not scale:
                here[:] = 0
                continue
            found = _decode_group(scale, codes[at : at + size], integers, bits, hadamard, whole)
            status = max(status, found)
            here[:] = whole[: len(here)]
            at += size
        return status

    @jit
    def project(values, group, integers, bits, hadamard, out, stays):
        """Decoded values of ``values``; ``stays`` (uint8) is 1 for each group that stays as it is, whose part of ``out`` is left alone."""
        codes = np.empty(group * bits // 8, dtype=np.uint8)
        whole = np.empty(group, dtype=np.float32)
        for number in range(len(stays)):
            here = values[number * group : (number + 1) * group]
            to = out[number * group : (number + 1) * group]
            whole[: len(here)] = here
            whole[len(here) :] = 0
            scale = _encode_group(whole, integers, bits, hadamard, codes)
            stays[number] = scale == STAYS
            if scale > 0:
                _decode_group(scale, codes, integers, bits, hadamard, whole)
                to[:] = whole[: len(here)]
            elif scale == 0:
                to[:] = 0
