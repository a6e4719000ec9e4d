"""The codec ``round`` (FORMAT.md 2.9): words rounded on their own grid, then coded without further loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent
from ds_zipccl.codecs.exponent import CASCADE
from ds_zipccl.codecs.raw import RAW
from ds_zipccl.codecs.spec import CodecSpec, Coded, LossySpec, PayloadSpec
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import Round

_TABLE_BYTES = 4  # per block


def payload_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is zero: index and tables."""
    return exponent.index_and_tables(numel, _TABLE_BYTES, block)


def payload_bound(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is as large as raw, with all paddings."""
    return exponent.raw_bound(numel, dtype.itemsize, _TABLE_BYTES, block)


def _project(codec: Round, words: torch.Tensor, out: torch.Tensor, route: str) -> None:
    kernels.lossy_route(route, words.device.type, "round_words").round_words(words, codec.mantissa, out)


def _encode(
    codec: Round, segments: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], route: str
) -> list[Coded]:
    for words in segments:
        exponent.check_bound(words, payload_bound(words.numel(), words.dtype, block), exponent.MAX_PAYLOAD)
    if not segments:
        return []
    kernel = kernels.lossy_route(route, segments[0].device.type, "encode_rounded")
    own = CodecId.EXPONENT if segments[0].dtype == torch.float32 else CodecId.ROUNDED
    found = []
    for words, out, sizes in zip(
        segments, outs, kernel.encode_rounded(segments, codec.mantissa, block, outs), strict=True
    ):
        size, untrimmed = sizes
        if min(sizes) >= words.nbytes:
            found.append(_lossless(codec, RAW, words, 0, out, route))
        elif untrimmed <= size and own is CodecId.ROUNDED:
            found.append(_lossless(codec, CASCADE, words, block, out, route))
        else:
            found.append(Coded(own, block, size))
    return found


def _lossless(codec: Round, spec: CodecSpec, words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> Coded:
    """Write the lossless payload of the rounded words."""
    kept = tensors.empty(words.numel(), words.dtype, words.device)
    _project(codec, words, kept, route)
    return Coded(spec.frame_id, block, spec.encode([kept], (), block, [out], route)[0])


def rounded_spec(codec: Round) -> LossySpec:
    """The entry of ``codec``."""
    return LossySpec(
        codec=codec,
        block=exponent.block_size,
        payload_bound=payload_bound,
        encode=partial(_encode, codec),
        project=partial(_project, codec),
    )


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    kernels.lossy_route(route, words.device.type, "decode_rounded").decode_rounded(payload, block, words)


def _decode_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    kernel = kernels.lossy_route(route, sums.device.type, "decode_rounded_add")
    kernel.decode_rounded_add(payload, block, dtype, sums)


ROUNDED = PayloadSpec(
    name="rounded",
    frame_id=CodecId.ROUNDED,
    dtypes=(torch.bfloat16, torch.float16),
    needs_base=False,
    payload_bound=payload_bound,
    payload_floor=payload_floor,
    decode=_decode,
    decode_add=_decode_add,
)
