"""Low-rank payloads of the C++ route (csrc/cpu/lossy/lowrank.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import DTYPE_IDS

#: kZipcclTile of csrc/cpu/level.h.
_TILE = 32


class NativeLowRank:
    """A part of :class:`ds_zipccl.kernels.LossyRoute`; :class:`ds_zipccl.kernels.cpp.backend.NativeRoute` has it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u64, i32, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
        factors: list[Any] = [pointer, pointer, u64, u32, u64, u64, i32]
        self._multiply = library.zipccl_multiply
        self._multiply.argtypes, self._multiply.restype = [*factors, pointer, i32], None
        self._multiply_add = library.zipccl_multiply_add
        self._multiply_add.argtypes, self._multiply_add.restype = [*factors, pointer, i32, i32], None
        self._orthonormalize = library.zipccl_orthonormalize
        self._orthonormalize.argtypes, self._orthonormalize.restype = [pointer, u64, u32, pointer], None

    def multiply(self, p: torch.Tensor, q: torch.Tensor, words: torch.Tensor) -> None:
        columns = _columns(q)
        self._multiply(
            p.data_ptr(), columns.data_ptr(), columns.shape[1], p.shape[1], len(p), len(q), DTYPE_IDS[words.dtype],
            words.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def multiply_add(self, p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor) -> None:
        columns = _columns(q)
        self._multiply_add(
            p.data_ptr(), columns.data_ptr(), columns.shape[1], p.shape[1], len(p), len(q), DTYPE_IDS[dtype],
            sums.data_ptr(), sums.dtype != dtype, torch.get_num_threads(),
        )  # fmt: skip

    def orthonormalize(self, columns: torch.Tensor) -> None:
        rows, rank = columns.shape
        room = tensors.empty(rank * (rows + 1), torch.float64)
        self._orthonormalize(columns.data_ptr(), rows, rank, room.data_ptr())


def _columns(q: torch.Tensor) -> torch.Tensor:
    """The transpose of ``q``, its rows as long as kernels read them."""
    size, rank = q.shape
    stride = -(-size // _TILE) * _TILE
    columns = tensors.filled(rank * stride, 0.0, torch.float32).view(rank, stride)
    columns[:, :size].copy_(q.t())
    return columns
