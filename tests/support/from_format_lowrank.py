"""Low-rank frames, written from FORMAT.md 2.12 alone and slow on purpose: float32 arithmetic of numpy, an operation at a time."""

from __future__ import annotations

import math
import struct

import from_format
import numpy as np
from from_format import demand, header_at
from from_format_scaled import narrowed

FP32 = 3


def product(p: np.ndarray, q: np.ndarray, dtype: int) -> list[int]:
    """The words of the product of two factors (float32)."""
    total = p[:, :1] * q[:, 0]
    for k in range(1, p.shape[1]):
        total = total + p[:, k : k + 1] * q[:, k]
    assert total.dtype == np.float32
    return narrowed(total.reshape(-1), dtype)


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """Columns made orthonormal as the power iteration does: modified Gram-Schmidt, twice, in float64. It is no part of a frame; all ranks
    must get the same bits."""
    rank = columns.shape[1]
    wide = columns.T.astype(np.float64)
    lengths = [math.sqrt(_scalar_product(column, column)) for column in wide]
    for j in range(rank):
        for earlier in (*wide[:j], *wide[:j]):
            wide[j] -= _scalar_product(earlier, wide[j]) * earlier
        length = math.sqrt(_scalar_product(wide[j], wide[j]))
        wide[j] = 0.0 if length <= lengths[j] * 2.0**-30 else wide[j] / length
    return np.ascontiguousarray(wide.T.astype(np.float32))


def _scalar_product(a: np.ndarray, b: np.ndarray) -> float:
    """The sum of the products of 16 lanes, added pairwise at last."""
    lanes = np.zeros(16)
    for at in range(0, len(a), 16):
        products = a[at : at + 16] * b[at : at + 16]
        lanes[: len(products)] += products
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def decode(frame: bytes) -> tuple[int, tuple[int, ...] | None, list[int]]:
    """dtype id, shape, and words of a valid low-rank frame."""
    h = header_at(frame)
    demand((*h[:3], h.log2) == (b"ZCCL", 2, 5, 0) and h.dtype in (1, 2, 3), "a frame of another kind")
    at = 32 + -(-8 * h.ndim // 16) * 16
    n, m, r, zero = struct.unpack_from("<4I", frame, at)
    demand(zero == 0 and n * m == h.numel and 1 <= r <= min(n, m) and r * (n + m) <= h.numel, "fields")
    p, at = _factor(frame, at + 16, n, r)
    q, at = _factor(frame, at, m, r)
    demand(at == h.size, "the payload ends with Q")
    largest = r * float(np.abs(p).max()) * float(np.abs(q).max())
    demand(math.isfinite(largest) and largest < 2.0**127, "a sum may leave float32")
    return h.dtype, struct.unpack_from(f"<{h.ndim}Q", frame, 32) if h.flags & 2 else None, product(p, q, h.dtype)


def _factor(frame: bytes, at: int, rows: int, r: int) -> tuple[np.ndarray, int]:
    h = header_at(frame, at)
    demand(h.codec in (0, 1) and (h.dtype, h.flags, h.numel) == (FP32, 0, rows * r), "a nested frame of another kind")
    whole = frame[at : at + h.size]
    words = list(struct.unpack(f"<{h.numel}I", whole[32:])) if h.codec == 0 else from_format.decode(whole)[2]
    end = at + -(-h.size // 16) * 16
    demand(not any(frame[at + h.size : end]), "padding")
    return np.array(words, dtype=np.uint32).view(np.float32).reshape(rows, r), end
