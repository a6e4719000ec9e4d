"""Low-rank payloads (FORMAT.md 2.12) in numba; see :mod:`.layout`. The caller's thread must keep denormals."""

from __future__ import annotations

import numpy as np

from ds_zipccl.kernels.numba.layout import jit, kernel_cache

#: Sums of a scalar product.
LANES = 16
#: The part of its length that a column must have left where the columns in front of it are taken out.
SPANNED = 2.0**-30

with kernel_cache():

    @jit
    def multiply(p, q, out):
        """P times the transpose of Q, float32: sums over k ascending, each product and each sum rounded."""
        rank = p.shape[1]
        for i in range(len(p)):
            for j in range(len(q)):
                total = p[i, 0] * q[j, 0]
                for k in range(1, rank):
                    total = total + p[i, k] * q[j, k]
                out[i, j] = total

    @jit
    def _scalar_product(a, b):
        lanes = np.zeros(LANES, dtype=np.float64)
        for i in range(len(a)):
            lanes[i % LANES] += a[i] * b[i]
        half = LANES // 2
        while half:
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
            half //= 2
        return lanes[0]

    @jit
    def orthonormalize(columns):
        """Orthonormal columns (float32) in place: modified Gram-Schmidt, twice, in float64."""
        rows, rank = columns.shape
        wide = np.empty((rank, rows), dtype=np.float64)
        lengths = np.empty(rank, dtype=np.float64)
        for j in range(rank):
            for i in range(rows):
                wide[j, i] = columns[i, j]
            lengths[j] = np.sqrt(_scalar_product(wide[j], wide[j]))
        for j in range(rank):
            for turn in range(2 * j):
                earlier = turn % j
                part = _scalar_product(wide[earlier], wide[j])
                for i in range(rows):
                    wide[j, i] -= part * wide[earlier, i]
            length = np.sqrt(_scalar_product(wide[j], wide[j]))
            spanned = length <= lengths[j] * SPANNED
            for i in range(rows):
                wide[j, i] = 0.0 if spanned else wide[j, i] / length
        for j in range(rank):
            for i in range(rows):
                columns[i, j] = wide[j, i]
