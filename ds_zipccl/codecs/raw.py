"""The raw codec: the tensor's bytes as they are (FORMAT.md 1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.frame import DTYPE_IDS, CodecId


class RawCodec:
    """See :class:`ds_zipccl.codecs.Codec`."""

    ID = CodecId.RAW
    DTYPES = tuple(DTYPE_IDS)

    def block(self, wanted: int) -> int:
        return 0

    def payload_bound(self, numel: int, dtype: torch.dtype, block: int) -> int:
        return numel * dtype.itemsize

    payload_floor = payload_bound

    def encode(
        self, segments: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], route: str
    ) -> list[int]:
        for words, out in zip(segments, outs, strict=True):
            data = words.view(torch.uint8)
            out[: data.numel()].copy_(data)
        return [words.numel() * words.itemsize for words in segments]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None:
        words.view(torch.uint8).copy_(payload)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
        values = tensors.empty(sums.numel(), dtype, sums.device)  # of its own: a payload may lie at any address
        self.decode(payload, block, values, route)
        kernels.add(values, sums, route)
