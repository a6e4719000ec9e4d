"""The lossy functions of the numba backend; their kernels are imported, and numba with them, at the first call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.numba.scaled_backend import NumbaScaled
from ds_zipccl.kernels.numba.words import WORDS, array
from ds_zipccl.kernels.rounded_rows import RoundedRows
from ds_zipccl.kernels.sums import add


class NumbaLossy(NumbaScaled, RoundedRows):
    """:class:`ds_zipccl.kernels.LossyBackend` over the reference kernels."""

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import rounded

        exponent_bits, mantissa_bits, _ = WORDS[words.dtype]
        rounded.round_words(array(words), mantissa, exponent_bits, mantissa_bits, array(out))

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        from ds_zipccl.kernels.numba import encode, layout, rounded

        sizes = []
        for words, out in zip(segments, outs, strict=True):
            kept = tensors.empty(words.numel(), words.dtype)
            self.round_words(words, mantissa, kept)
            bits, data, room = WORDS[words.dtype][:2], array(kept), out.numpy()
            size = untrimmed = int(encode.encode(data, data[:0], layout.CASCADE, True, *bits, block, room))
            if words.dtype != torch.float32:
                untrimmed = int(rounded.untrimmed_bytes(room, len(data), *bits, block))
            sizes.append((size, untrimmed))
        return sizes

    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import decode

        data = array(words)
        status = decode.decode(payload.numpy(), data[:0], True, *WORDS[words.dtype][:2], block, data)
        if status:
            raise FrameError(status, "the payload contradicts itself")

    def decode_rounded_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype)
        self.decode_rounded(payload, block, values)
        add(values, sums)
