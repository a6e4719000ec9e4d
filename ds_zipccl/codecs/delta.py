"""The delta codec (FORMAT.md 2.3): words against a base that sender and receiver both hold."""

from __future__ import annotations

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs.exponent import ExponentCodec
from ds_zipccl.frame import CodecId


class DeltaCodec(ExponentCodec):
    """Block sizes and bounds are those of the exponent codec, whose modes it falls back to. Words and base are flat contiguous
    tensors of one device, dtype and number of elements; calls block."""

    ID = CodecId.DELTA
    DTYPES = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self) -> None:
        super().__init__("cascade")

    def encode_against(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor, route: str) -> int:
        """Encode to ``out`` (uint8, payload_bound() bytes); returns the payload's bytes."""
        self.check_size(words, block)
        return kernels.route(route, words.device.type).encode_delta(words, base, block, out)

    def decode_against(
        self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor, route: str
    ) -> None:
        """Decode to ``words``, which may be ``base`` itself; raises FrameError."""
        kernels.route(route, words.device.type).decode_delta(payload, base, block, words)
