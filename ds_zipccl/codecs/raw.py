"""The raw codec: the tensor's bytes as they are (FORMAT.md 1.2)."""

from __future__ import annotations

import torch

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

    def encode(self, words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> int:
        data = words.view(torch.uint8)
        out[: data.numel()].copy_(data)
        return data.numel()

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None:
        words.view(torch.uint8).copy_(payload)
