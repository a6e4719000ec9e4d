"""The codec ``zfp`` (FORMAT.md 2.11): the published stream of ZFP in one dimension, at a fixed rate."""

from __future__ import annotations

import struct
from functools import partial

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent
from ds_zipccl.codecs.spec import Coded, Tensors, lossy_format
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode
from ds_zipccl.lossy import Zfp

#: Rates of a payload, in bits of a value.
_LEAST_RATE, _MOST_RATE = 3, 32
_BLOCK_VALUES = 4
_FIELDS = struct.Struct("<I12x")


def payload_bytes(numel: int, rate: int) -> int:
    """Bytes of a payload."""
    blocks = -(-numel // _BLOCK_VALUES)
    return _FIELDS.size + 8 * -(-_BLOCK_VALUES * rate * blocks // 64)


def payload_bound(codec: Zfp, numel: int, dtype: torch.dtype, block: int) -> int:
    return max(payload_bytes(numel, codec.rate), exponent.payload_bound(numel, dtype, block))


def project(codec: Zfp, words: torch.Tensor, out: torch.Tensor, route: str) -> None:
    kernels.lossy_route(route, words.device.type, "project_zfp").project_zfp(words, codec.rate, out)


def encode(codec: Zfp, segments: Tensors, block: int, outs: Tensors, route: str) -> list[Coded]:
    return [_encode_one(codec, words, block, out, route) for words, out in zip(segments, outs, strict=True)]


def _encode_one(codec: Zfp, words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> Coded:
    size = payload_bytes(words.numel(), codec.rate)
    if size < words.nbytes:
        kernel = kernels.lossy_route(route, words.device.type, "encode_zfp")
        if kernel.encode_zfp(words, codec.rate, out[_FIELDS.size : size]):
            fields = bytearray(_FIELDS.pack(codec.rate))
            out[: _FIELDS.size].copy_(tensors.of_buffer(fields))
            return Coded(CodecId.ZFP1, 0, size)
    kept = exponent.projected(partial(project, codec), words, route)
    return exponent.encode_lossless(kept, block, out, route)


def _rate(payload: torch.Tensor, numel: int) -> int:
    """The rate of a payload that holds ``numel`` elements.

    Raises:
        FrameError: it holds another number of them, or its fields are wrong.
    """
    fields = payload[: _FIELDS.size].cpu().numpy().tobytes()
    (rate,) = _FIELDS.unpack(fields)
    if any(fields[4:]):
        raise FrameError(FrameErrorCode.RESERVED, "a reserved field of the payload is not zero")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise FrameError(FrameErrorCode.BLOCK, f"a rate of {rate} bits, possible are {_LEAST_RATE} to {_MOST_RATE}")
    if payload.numel() != payload_bytes(numel, rate):
        raise FrameError(
            FrameErrorCode.SIZE,
            f"{payload.numel()} bytes of payload for {numel} elements of {rate} bits, wanted {payload_bytes(numel, rate)}",
        )
    return int(rate)


ZFP1 = lossy_format(
    lambda payload, numel, block, route: ("decode_zfp", (payload[_FIELDS.size :], _rate(payload, numel))),
    name="zfp1",
    frame_id=CodecId.ZFP1,
    payload_bound=lambda numel, dtype, block: payload_bytes(numel, _MOST_RATE),
    payload_floor=lambda numel, dtype, block: payload_bytes(numel, _LEAST_RATE),
    prove=lambda payload, header: _rate(payload, header.numel),
)
