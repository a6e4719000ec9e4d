"""ZFP of the numba route; its kernels are imported, and numba with them, at the first call."""

from __future__ import annotations

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.numba.words import WORDS, array
from ds_zipccl.kernels.sums import add


class NumbaZfp:
    """ZFP of :class:`ds_zipccl.kernels.LossyRoute` over the reference kernels."""

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import zfp

        zfp.project(array(words), *WORDS[words.dtype][:2], rate, array(out))

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        from ds_zipccl.kernels.numba import zfp

        made = np.empty(codes.numel() // 8, dtype=np.uint64)
        finite = bool(zfp.encode(array(words), *WORDS[words.dtype][:2], rate, made))
        codes.numpy()[:] = made.view(np.uint8)
        return finite

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import zfp

        zfp.decode(codes.numpy().copy().view(np.uint64), *WORDS[words.dtype][:2], rate, array(words))

    def decode_zfp_add(self, codes: torch.Tensor, rate: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype)
        self.decode_zfp(codes, rate, values)
        add(values, sums)
