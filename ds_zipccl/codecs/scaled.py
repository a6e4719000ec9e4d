"""The codecs ``taco_fp8`` and ``int`` (FORMAT.md 2.10): groups of values with a scale each."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent
from ds_zipccl.codecs.exponent import CASCADE
from ds_zipccl.codecs.spec import Coded, Tensors, any_size, lossy_format
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, pad16
from ds_zipccl.kernels.protocol import ScaledCodec, group_bytes, scale_dtype
from ds_zipccl.lossy import GROUPS, Int, TacoFp8

#: kind, bits, group_log2, flags, zeros, code_bytes
FIELDS = struct.Struct("<4BIQ")
E4M3, INT = 1, 2
_HADAMARD, _STAGE_2 = 1, 2
#: Of the payload's bytes without stage 2, in percent: with stage 2 it has at most so many.
_WORTH = 97


def _codes_at(codec: ScaledCodec, numel: int) -> int:
    """Where the codes begin in a payload of ``numel`` elements."""
    return FIELDS.size + pad16(_groups(numel, codec.group) * scale_dtype(codec).itemsize)


def _groups(numel: int, group: int) -> int:
    return -(-numel // group)


# --- encoding


def payload_bound(codec: ScaledCodec, numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a scaled payload with the longest stage 2, or of a lossless one."""
    codes = _groups(numel, codec.group) * codec.group
    scaled = _codes_at(codec, numel) + exponent.payload_bound(codes, torch.float8_e4m3fn, block)
    return max(scaled, exponent.payload_bound(numel, dtype, block))


def project(codec: ScaledCodec, words: torch.Tensor, out: torch.Tensor, route: str) -> None:
    kernels.lossy_route(route, words.device.type, "project_scaled").project_scaled(words, codec, out)


def encode(codec: ScaledCodec, segments: Tensors, block: int, outs: Tensors, route: str) -> list[Coded]:
    for words in segments:
        exponent.check_bound(words, payload_bound(codec, words.numel(), words.dtype, block), exponent.MAX_PAYLOAD)
    lossy = partial(project, codec)
    return [
        _scaled(codec, words, block, out, route)
        or exponent.encode_lossless(exponent.projected(lossy, words, route), block, out, route)
        for words, out in zip(segments, outs, strict=True)
    ]


def _scaled(codec: ScaledCodec, words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> Coded | None:
    """Write the scaled payload; None where a group stays as it is, or the payload would not be smaller than the words."""
    numel, device = words.numel(), words.device
    at = _codes_at(codec, numel)
    if at >= words.nbytes:
        return None
    scales = tensors.empty(_groups(numel, codec.group), scale_dtype(codec), device)
    codes = tensors.empty(len(scales) * group_bytes(codec), torch.uint8, device)
    coded, size = len(scales), 0
    fused = kernels.compiled(route, device.type)
    if fused and isinstance(codec, TacoFp8):
        staged = fused.encode_scaled_staged(words, codec, block, scales, codes, out[at:])
        if staged is None:
            return None
        size = at + staged if staged else 0
    if not size:
        kernel = kernels.lossy_route(route, device.type, "encode_scaled")
        found = kernel.encode_scaled(words, codec, scales, codes)
        if found is None:
            return None
        coded = found
    codes = codes[: coded * group_bytes(codec)]
    plain, flags = at + codes.numel(), _HADAMARD if codec.hadamard else 0
    if coded and not size and isinstance(codec, TacoFp8):
        size = at + CASCADE.encode([codes.view(torch.float8_e4m3fn)], (), block, [out[at:]], route)[0]
    if size and 100 * size <= _WORTH * plain:
        flags |= _STAGE_2
    else:
        size, block = plain, 0
    if size >= words.nbytes:
        return None
    if not flags & _STAGE_2:
        out[at:size].copy_(codes)
    kind = INT if isinstance(codec, Int) else E4M3
    fields = FIELDS.pack(kind, codec.bits, codec.group.bit_length() - 1, flags, 0, size - at)
    out[: FIELDS.size].copy_(tensors.of_buffer(bytearray(fields)))
    end = FIELDS.size + scales.nbytes
    out[FIELDS.size : end].copy_(scales.view(torch.uint8))
    out[end:at].zero_()
    return Coded(CodecId.SCALED, block, size)


# --- decoding


@dataclass(frozen=True)
class _Parsed:
    """The parts of a payload, proven; ``codes`` are an exponent payload if ``staged``."""

    codec: ScaledCodec
    scales: torch.Tensor
    coded: int
    codes: torch.Tensor
    staged: bool


def _refuse(code: FrameErrorCode, reason: str) -> NoReturn:
    raise FrameError(code, f"a scaled payload {reason}")


def _parse(payload: torch.Tensor, numel: int, block: int) -> _Parsed:
    """Every part of a payload, proven except for the codes themselves; ``block``: of the header."""
    kind, bits, log2, flags, zeros, code_bytes = FIELDS.unpack(payload[: FIELDS.size].cpu().numpy().tobytes())
    staged = bool(flags & _STAGE_2)
    if flags & ~(_HADAMARD | (_STAGE_2 if kind == E4M3 else 0)) or zeros or staged != bool(block):
        _refuse(FrameErrorCode.RESERVED, f"with flags {flags}, zeros {zeros} and blocks of {block}")
    if kind not in (E4M3, INT) or bits not in ((8,) if kind == E4M3 else Int.wanted["bits"]) or 1 << log2 not in GROUPS:
        _refuse(FrameErrorCode.BLOCK, f"of kind {kind}, {bits} bits and groups of 2^{log2}")
    hadamard = bool(flags & _HADAMARD)
    codec = TacoFp8(1 << log2, hadamard) if kind == E4M3 else Int(bits, 1 << log2, hadamard)
    at = _codes_at(codec, numel)
    if at + code_bytes != payload.numel():
        _refuse(FrameErrorCode.SIZE, f"of {payload.numel()} bytes, its fields say {at + code_bytes}")
    end = FIELDS.size + _groups(numel, codec.group) * scale_dtype(codec).itemsize
    scales = payload[FIELDS.size : end].clone()  # at an address where words may be
    reach = log2 if hadamard else 0
    if kind == INT:
        scales = scales.view(torch.int16)
    if numel:
        least, largest = map(int, torch.aminmax(scales))
        if least < 0 or largest > ((256 - bits - reach << 7) - 1 if kind == INT else 246 - reach):
            _refuse(FrameErrorCode.BLOCK, f"with scales from {least} to {largest}")
    coded = int(torch.count_nonzero(scales))
    if staged:
        words = coded * codec.group
        floor, bound = (
            of(words, torch.float8_e4m3fn, block) for of in (exponent.payload_floor, exponent.payload_bound)
        )
    else:
        floor = bound = coded * group_bytes(codec)
    if not floor <= code_bytes <= bound:
        _refuse(FrameErrorCode.SIZE, f"with {code_bytes} bytes of codes of {coded} groups: {floor} to {bound} fit")
    return _Parsed(codec, scales, coded, payload[at:], staged)


def _codes(parsed: _Parsed, block: int, route: str) -> torch.Tensor:
    """The codes of a payload (uint8)."""
    if not parsed.staged:
        return parsed.codes
    codes = tensors.empty(parsed.coded * parsed.codec.group, torch.float8_e4m3fn, parsed.codes.device)
    kernels.route(route, codes.device.type).decode(parsed.codes, block, codes)
    return codes.view(torch.uint8)


def _kernel_call(payload: torch.Tensor, numel: int, block: int, route: str) -> tuple[str, tuple[Any, ...]]:
    parsed = _parse(payload, numel, block)
    if parsed.staged and kernels.compiled(route, payload.device.type):
        return "decode_scaled_staged", (parsed.scales, parsed.codes, block, parsed.codec)
    return "decode_scaled", (parsed.scales, _codes(parsed, block, route), parsed.codec)


SCALED = lossy_format(
    _kernel_call,
    name="scaled",
    frame_id=CodecId.SCALED,
    payload_bound=any_size,
    payload_floor=lambda numel, dtype, block: FIELDS.size + pad16(_groups(numel, GROUPS[-1])),
    prove=lambda payload, header: _parse(payload, header.numel, header.block),
)
