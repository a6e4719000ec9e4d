"""The raw codec: the bytes of the tensor (FORMAT.md 1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.spec import CodecSpec
from ds_zipccl.frame import DTYPE_IDS, CodecId


def _block(wanted: int) -> int:
    return 0


def _payload_bytes(numel: int, dtype: torch.dtype, block: int) -> int:
    return numel * dtype.itemsize


def _encode(
    segments: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    block: int,
    outs: Sequence[torch.Tensor],
    route: str,
) -> list[int]:
    for words, out in zip(segments, outs, strict=True):
        out[: words.nbytes].copy_(words.view(torch.uint8))
    return [words.nbytes for words in segments]


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    words.view(torch.uint8).copy_(payload)


def _decode_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    values = tensors.empty(sums.numel(), dtype, sums.device)  # a copy, because a payload may lie at any address
    _decode(payload, None, block, values, route)
    kernels.adder(route, sums.device.type)(values, sums)


RAW = CodecSpec(
    name="raw",
    frame_id=CodecId.RAW,
    dtypes=tuple(DTYPE_IDS),
    lossless=True,
    stateful=False,
    needs_base=False,
    block=_block,
    payload_bound=_payload_bytes,
    payload_floor=_payload_bytes,
    encode=_encode,
    decode=_decode,
    decode_add=_decode_add,
)
