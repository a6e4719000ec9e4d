"""The hash of a region (FORMAT.md section 5) in numba."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import jit, kernel_cache

_WORDS = 128  # of a block
_STEP = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

with kernel_cache():

    @jit
    def _mix(z):
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    @jit
    def region_hash(data, first, second):
        """The two halves of the hash of a uint8 array, with a key of two uint64."""
        size = len(data)
        keys = np.empty((2, _WORDS), dtype=np.uint64)
        for half in range(2):
            for i in range(_WORDS):
                keys[half, i] = _mix(np.uint64(_WORDS * half + i + 1) * _STEP + (second if half else first))
        block = np.empty(8 * _WORDS, dtype=np.uint8)
        words = block.view(np.uint64)
        totals = keys[:, 0] + np.uint64(size)
        for at in range(0, size, 8 * _WORDS):
            here = min(8 * _WORDS, size - at)
            block[:here] = data[at : at + here]
            block[here:] = 0
            for half in range(2):
                total = np.uint64(at // (8 * _WORDS) + 1) * _STEP
                for i in range(_WORDS):
                    x, key = words[i], keys[half, i]
                    total += ((x + key) & _LOW) * (((x >> _HALF) + (key >> _HALF)) & _LOW)
                totals[half] += _mix(total)
        return _mix(totals[0]), _mix(totals[1])
