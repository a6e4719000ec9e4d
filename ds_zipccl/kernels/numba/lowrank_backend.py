"""Low-rank payloads of the numba backend; its kernels are imported, and numba with them, at the first call."""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.sums import add, flushing, round_to


class NumbaLowRank:
    """A part of :class:`ds_zipccl.kernels.LossyBackend` over the reference kernels."""

    def multiply(self, p: torch.Tensor, q: torch.Tensor, words: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import lowrank

        values = tensors.empty(words.numel(), torch.float32)
        with flushing(False):
            lowrank.multiply(p.numpy(), q.numpy(), values.view(len(p), len(q)).numpy())
            round_to(values, words)

    def multiply_add(self, p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype)
        self.multiply(p, q, values)
        add(values, sums)

    def orthonormalize(self, columns: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import lowrank

        with flushing(False):
            lowrank.orthonormalize(columns.numpy())
