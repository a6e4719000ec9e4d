"""The hash of a region in numba (FORMAT.md section 5); see :mod:`.reference`."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.reference import jit, kernel_cache

_KEYS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

with kernel_cache():

    @jit
    def _mix(z):
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    @jit
    def _term(x, key):
        return ((x + key) & _LOW) * (((x >> _HALF) + (key >> _HALF)) & _LOW)

    @jit
    def region_hash(data):
        """The two halves of the hash of a uint8 array."""
        size = np.uint64(len(data))
        first = second = key = other = np.uint64(0)
        for at in range(0, len(data), 8):
            x = np.uint64(0)
            for byte in range(min(8, len(data) - at)):
                x |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
            key += _KEYS[0]
            other += _KEYS[1]
            first += _term(x, key)
            second += _term(x, other)
        first = _mix(first + _mix(size + np.uint64(1)))
        return first, _mix(second + _mix(size + first))
