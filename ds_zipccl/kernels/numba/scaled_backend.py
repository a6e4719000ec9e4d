"""The functions of the numba backend for scaled payloads."""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.protocol import ScaledCodec
from ds_zipccl.kernels.sums import add, flushing, round_to
from ds_zipccl.lossy import Int


class NumbaScaled:
    """A part of :class:`ds_zipccl.kernels.LossyBackend` over the reference kernels."""

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        from ds_zipccl.kernels.numba import scaled

        with flushing(False):
            coded = scaled.encode(words.float().numpy(), *_settings(codec), scales.numpy(), codes.numpy())
        return None if coded == scaled.STAYS else int(coded)

    def decode_scaled(self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import scaled

        values = tensors.empty(words.numel(), torch.float32)
        with flushing(False):
            status = scaled.decode(scales.numpy(), codes.numpy(), *_settings(codec), values.numpy())
            round_to(values, words)
        if status:
            raise FrameError(status, "the payload contradicts itself")

    def decode_scaled_add(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        values = tensors.empty(sums.numel(), dtype)
        self.decode_scaled(scales, codes, codec, values)
        add(values, sums)

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        from ds_zipccl.kernels.numba import scaled

        values = tensors.empty(words.numel(), torch.float32)
        stays = tensors.empty(-(-words.numel() // codec.group), torch.uint8)
        with flushing(False):
            scaled.project(words.float().numpy(), *_settings(codec), values.numpy(), stays.numpy())
            kept = stays.bool().repeat_interleave(codec.group)[: words.numel()]
            rounded = tensors.empty(words.numel(), words.dtype)
            round_to(values.masked_fill_(kept, 0.0), rounded)
        # Bit by bit, because a conversion may change a NaN.
        integer = {2: torch.int16, 4: torch.int32}[words.itemsize]
        out.view(integer).copy_(torch.where(kept, words.view(integer), rounded.view(integer)))


def _settings(codec: ScaledCodec) -> tuple[int, bool, int, bool]:
    return codec.group, isinstance(codec, Int), codec.bits if isinstance(codec, Int) else 8, codec.hadamard
