"""Low-rank frames (FORMAT.md 2.12): the payload, two factors as nested frames in place of their product."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent, memory
from ds_zipccl.codecs.exponent import LITERALS
from ds_zipccl.codecs.memory import Nested
from ds_zipccl.codecs.spec import LOSSY_DTYPES, PayloadSpec, any_size
from ds_zipccl.frame import HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header, pad16

#: n, m, r, zero
_FIELDS = struct.Struct("<4I")
#: Sums of factors stay below it, with room for their roundings.
_LIMIT = 2.0**127


def bounded(p: torch.Tensor, q: torch.Tensor) -> bool:
    """Return whether all values of two factors are finite, and no sum of their product leaves float32."""
    return p.shape[1] * _largest(p) * _largest(q) < _LIMIT


def _largest(factor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(factor, float("inf"))) if factor.numel() else 0.0


# --- encoding


def payload_bound(rows: int, columns: int, rank: int, block: int) -> int:
    """Bytes of the longest payload of factors with ``rank`` columns."""
    sizes = (pad16(HEADER_BYTES + _factor_bound(count * rank, block)) for count in (rows, columns))
    return _FIELDS.size + sum(sizes)


def _factor_bound(numel: int, block: int) -> int:
    return max(exponent.payload_bound(numel, torch.float32, block), 4 * numel)


def encode(p: torch.Tensor, q: torch.Tensor, block: int, out: torch.Tensor, route: str) -> int:
    """Write the payload of contiguous factors (float32, [n, r] and [m, r]) to ``out``, flat uint8; return its bytes; blocks."""
    fields = _FIELDS.pack(len(p), len(q), p.shape[1], 0)
    out[: _FIELDS.size].copy_(tensors.of_buffer(bytearray(fields)))
    at = _FIELDS.size
    for factor in (p, q):
        coded = exponent.encode_lossless(factor.reshape(-1), block, out[at + HEADER_BYTES :], route)
        header = Header(coded.frame_id, torch.float32, factor.numel(), HEADER_BYTES + coded.size, coded.block)
        at = memory.finish_nested(header, out, at)
    return at


# --- decoding


@dataclass(frozen=True)
class _Parsed:
    """The parts of a payload, proven; the factors have ``rank`` columns."""

    rows: int
    columns: int
    rank: int
    p: Nested
    q: Nested


def _refuse(code: FrameErrorCode, reason: str) -> NoReturn:
    raise FrameError(code, f"a low-rank payload {reason}")


def _parse(payload: torch.Tensor, numel: int) -> _Parsed:
    """Every part of a payload of ``numel`` elements.

    Raises:
        FrameError: they contradict each other.
    """
    fields = payload[: _FIELDS.size].cpu().numpy().tobytes()
    if len(fields) < _FIELDS.size:
        _refuse(FrameErrorCode.SIZE, f"of {len(fields)} bytes, its fields alone have {_FIELDS.size}")
    rows, columns, rank, zero = _FIELDS.unpack(fields)
    if zero:
        _refuse(FrameErrorCode.RESERVED, "with a reserved field that is not zero")
    if rows * columns != numel:
        _refuse(FrameErrorCode.BLOCK, f"of {rows} by {columns} elements in a frame of {numel}")
    if not 1 <= rank <= min(rows, columns) or rank * (rows + columns) > numel:
        _refuse(FrameErrorCode.BLOCK, f"of rank {rank} for {rows} by {columns} elements")
    p = _factor(payload, _FIELDS.size, rows * rank)
    q = _factor(payload, pad16(p.end), columns * rank)
    if pad16(q.end) != payload.numel():
        _refuse(FrameErrorCode.SIZE, f"of {payload.numel()} bytes, whose parts have {pad16(q.end)}")
    if any(bool(payload[one.end : pad16(one.end)].any()) for one in (p, q)):
        _refuse(FrameErrorCode.RESERVED, "with padding that is not zero")
    return _Parsed(rows, columns, rank, p, q)


def _factor(payload: torch.Tensor, at: int, numel: int) -> Nested:
    header = memory.nested_header(payload, at, FrameErrorCode.RESERVED)
    if header.codec not in LITERALS or header.dtype != torch.float32:
        kind = f"{header.codec.name} frame of {header.dtype}"
        _refuse(
            FrameErrorCode.CODEC, f"with a {kind}, wanted {' or '.join(one.name for one in LITERALS)} of torch.float32"
        )
    if header.numel != numel:
        _refuse(FrameErrorCode.SIZE, f"with a factor of {header.numel} elements, wanted {numel}")
    return memory.nested_part(payload, at, header, LITERALS[header.codec])


def _prove(payload: torch.Tensor, header: Header) -> None:
    _parse(payload, header.numel)


def _factors(payload: torch.Tensor, numel: int, route: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of a payload of ``numel`` elements.

    Raises:
        FrameError: the payload contradicts itself, or a value of the product might not be finite.
    """
    parsed = _parse(payload, numel)
    found = []
    for part, size in ((parsed.p, parsed.rows), (parsed.q, parsed.columns)):
        values = tensors.empty(size * parsed.rank, torch.float32, payload.device)
        part.spec.decode(part.payload, None, part.block, values, route)
        found.append(values.view(size, parsed.rank))
    p, q = found
    if not bounded(p, q):
        _refuse(FrameErrorCode.BLOCK, "whose factors, or sums of their products, are not finite")
    return p, q


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    found = kernels.lossy_route(route, words.device.type, "multiply")
    found.multiply(*_factors(payload, words.numel(), route), words)


def _decode_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    found = kernels.lossy_route(route, sums.device.type, "multiply_add")
    found.multiply_add(*_factors(payload, sums.numel(), route), dtype, sums)


def _payload_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    return _FIELDS.size + 2 * HEADER_BYTES


LOWRANK = PayloadSpec(
    name="lowrank",
    frame_id=CodecId.LOWRANK,
    dtypes=LOSSY_DTYPES,
    payload_bound=any_size,
    payload_floor=_payload_floor,
    prove=_prove,
    decode=_decode,
    decode_add=_decode_add,
)
