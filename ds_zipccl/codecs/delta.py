"""The delta codec (FORMAT.md 2.3): words against a base that sender and receiver both hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import exponent
from ds_zipccl.codecs.spec import CodecSpec
from ds_zipccl.frame import CodecId


def _encode(
    segments: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    block: int,
    outs: Sequence[torch.Tensor],
    route: str,
) -> list[int]:
    sizes = []
    for words, base, out in zip(segments, bases, outs, strict=True):
        exponent.check_size(words, block)
        sizes.append(kernels.route(route, words.device.type).encode_delta(words, base, block, out))
    return sizes


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    assert base is not None  # CodecSpec.needs_base
    kernels.route(route, words.device.type).decode_delta(payload, base, block, words)


DELTA = CodecSpec(
    name="delta",
    frame_id=CodecId.DELTA,
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    lossless=True,
    stateful=False,
    needs_base=True,
    # A block that CHANGE does not make smaller is coded as by CASCADE, so the sizes are those of an exponent payload.
    block=exponent.block_size,
    payload_bound=exponent.payload_bound,
    payload_floor=exponent.payload_floor,
    encode=_encode,
    decode=_decode,
    decode_add=None,
)
