"""Low-rank factors of matrices, and their frames (FORMAT.md 2.12).

A matrix M of n rows and m columns is replaced by P times the transpose of Q, P of n rows and Q of m rows with r columns each: one power
iteration, warm-started by the Q before (PowerSGD, Vogels et al. 2019). Who sends a frame takes :func:`round_factors` and
:func:`product` for the values that arrive.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent, memory
from ds_zipccl.codecs.exponent import LITERALS
from ds_zipccl.codecs.memory import Nested
from ds_zipccl.codecs.spec import LOSSY_DTYPES, Coded, any_size, lossy_format
from ds_zipccl.frame import HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header, pad16
from ds_zipccl.lossy import Round

#: Mantissa bits of sent factors: an error of 0.7%, where leaving out the other directions costs a half.
FACTOR_BITS = 5
#: n, m, r, zero
_FIELDS = struct.Struct("<4I")
#: Sums of factors stay below it, with room for their roundings.
_LIMIT = 2.0**127


def factor_rank(rows: int, columns: int, rank: int) -> int:
    """Return the columns of the factors of a matrix, at most ``rank``; 0 where factors have half as many values as the matrix or more."""
    fits = min(rank, rows, columns)
    return fits if 2 * fits * (rows + columns) < rows * columns else 0


def first_factor(columns: int, rank: int, seed: int) -> torch.Tensor:
    """Return the Q to begin with: float32 [columns, rank], normal numbers that follow from the arguments alone."""
    numbers = np.random.default_rng(seed).standard_normal((columns, rank), dtype=np.float32)
    return tensors.of_buffer(numbers.reshape(-1)).view(torch.float32).view(columns, rank)


def orthonormalize(columns: torch.Tensor, *, route: str = "auto") -> None:
    """Make the columns of a contiguous float32 CPU tensor [n, r] orthonormal, in place; blocks. All kernel backends give the same bits.

    A column that the columns in front of it span becomes zeros: see :meth:`ds_zipccl.kernels.LossyBackend.orthonormalize`. The columns must
    be finite; otherwise they are undefined afterwards.

    Raises:
        ValueError: another tensor.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        _matrix("columns", columns)
        kernels.lossy_route(route, columns.device.type, "orthonormalize").orthonormalize(columns)


def basis(q: torch.Tensor, *, route: str = "auto") -> torch.Tensor:
    """Orthonormal columns to begin a power iteration with: orth(q) as a new tensor, of the shape of ``q``; blocks.

    Zero columns of orth(q), as a matrix of zeros or of low rank leaves them in Q, give way to normal numbers: nothing would ever return to
    them. The result follows from ``q`` alone, bit for bit.

    Raises:
        ValueError: ``q`` is not a contiguous float32 tensor of two dimensions.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        _matrix("q", q)
        found = q.detach().clone()
        orthonormalize(found, route=route)
        if not bool(found.any(dim=0).all()):
            found = revived(found)
            orthonormalize(found, route=route)
        return found


def revived(q: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``q``, float32 [m, r], whose columns of zeros, as gradients of zeros or of low rank leave them, are numbers again:
    those of :func:`first_factor`."""
    empty = ~q.any(dim=0)
    found = q.clone()
    if bool(empty.any()):
        found[:, empty] = first_factor(q.shape[0], q.shape[1], seed=0)[:, empty]
    return found


def power_step(matrix: torch.Tensor, q: torch.Tensor, *, route: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a matrix by one power iteration from ``q``: Q = orth(q), P = orth(M Q), Q = M^T P; blocks.

    The products are torch's, so that factors may differ between machines and numbers of threads; frames carry the factors. orth of ``q`` is
    :func:`basis`.

    Args:
        matrix: finite float32 [n, m], contiguous.
        q: float32 [m, r], contiguous: the Q of the step before, or :func:`first_factor`. It stays as it is.

    Returns:
        P [n, r], with orthonormal columns or zeros, and Q [m, r], both float32.

    Raises:
        ValueError: other tensors.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        _matrix("matrix", matrix)
        _matrix("q", q)
        if matrix.shape[1] != len(q):
            raise ValueError(f"a matrix of {tuple(matrix.shape)} needs a q of {matrix.shape[1]} rows, got {len(q)}")
        p = matrix.detach() @ basis(q, route=route)
        orthonormalize(p, route=route)
        return p, matrix.detach().t() @ p


def round_factors(p: torch.Tensor, q: torch.Tensor, *, route: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Factors, contiguous float32, rounded to :data:`FACTOR_BITS` mantissa bits, as frames should carry them: new tensors; blocks."""
    with tensors.undisturbed():
        _matrix("p", p)
        _matrix("q", q)
        by = partial(exponent.project_rounded, Round(FACTOR_BITS))
        p, q = (exponent.projected(by, memory.flat_view(one), route).view(one.shape) for one in (p, q))
        return p, q


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor, *, route: str = "auto") -> torch.Tensor:
    """Write P times the transpose of Q to ``out``, bit for bit as a frame of the factors decodes; blocks.

    Every value is a sum over the columns of the factors in their order, each product and each sum rounded to float32, then rounded to the
    dtype of ``out``.

    Args:
        p, q: float32, contiguous, [n, r] and [m, r], :func:`bounded`.
        out: contiguous tensor of bfloat16, float16 or float32 with n times m elements.

    Returns:
        ``out``.

    Raises:
        ValueError: other tensors, or factors that are not bounded.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        _pair(p, q)
        memory.admit("out", out)
        if out.dtype not in LOSSY_DTYPES or out.numel() != len(p) * len(q) or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous tensor of {len(p) * len(q)} elements of {', '.join(map(str, LOSSY_DTYPES))}, "
                f"got {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}"
            )
        flat = memory.flat_view(out)
        memory.keep_apart([memory.span(flat)], [memory.span(memory.flat_view(one)) for one in (p, q)])
        memory.note_write(out)
        kernels.lossy_route(route, out.device.type, "multiply").multiply(p.detach(), q.detach(), flat)
        return out


def bounded(p: torch.Tensor, q: torch.Tensor) -> bool:
    """Return whether factors have a frame: all values are finite, and no sum of their product is beyond float32."""
    with tensors.undisturbed():
        return p.shape[1] * _largest(p.detach()) * _largest(q.detach()) < _LIMIT


def _largest(factor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(factor, float("inf"))) if factor.numel() else 0.0


def compress_factors_bound(
    rows: int,
    columns: int,
    rank: int,
    dtype: torch.dtype,
    *,
    ndim: int | None = None,
    block: int = 1024,
) -> int:
    """Largest frame of factors with ``rank`` columns of a matrix, in bytes; ``ndim`` None is a flat frame."""
    lossless = exponent.payload_bound(rows * columns, dtype, exponent.block_size(block))
    sizes = (exponent.payload_bound(count * rank, torch.float32, block) for count in (rows, columns))
    nested = _FIELDS.size + sum(pad16(HEADER_BYTES + size) for size in sizes)
    return framing.payload_offset(ndim) + max(nested, lossless)


def compress_factors(
    p: torch.Tensor,
    q: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    block: int = 1024,
    checksum: bool = True,
    route: str = "auto",
) -> torch.Tensor:
    """Code two factors as a frame that decodes to their :func:`product` of ``dtype``; blocks.

    The factors arrive bit for bit, so callers round them first. The frame is a lossless one of the product where the factors would take
    as many bytes as its words.

    Args:
        p, q: float32 CPU tensors, contiguous, [n, r] and [m, r], :func:`bounded`, with r from 1 to the smaller of n and m and
            r (n + m) at most n m.
        dtype: bfloat16, float16 or float32.
        out: 1-D contiguous uint8 buffer of at least :func:`compress_factors_bound` bytes; the frame is written to its start.
        shape: the shape of the decoded tensor, n times m elements; None: it is flat.
        block: as for :func:`ds_zipccl.codecs.compress`, of the factors.
        checksum: as for :func:`ds_zipccl.codecs.compress`.

    Returns:
        1-D uint8 tensor: a view of ``out``, or a new tensor of the frame's size.

    Raises:
        ValueError: other tensors; a rank, dtype, shape or block that is not possible; factors that are not bounded; a buffer that does not
            fit or overlaps a factor.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        _pair(p, q)
        rows, columns, rank = len(p), len(q), p.shape[1]
        if dtype not in LOSSY_DTYPES:
            raise ValueError(f"low-rank frames hold {', '.join(map(str, LOSSY_DTYPES))}, got {dtype}")
        if not 1 <= rank <= min(rows, columns) or rank * (rows + columns) > rows * columns or max(rows, columns) >> 32:
            raise ValueError(f"factors of rank {rank} for {rows} by {columns} elements; send the matrix itself")
        dims = None if shape is None else tuple(shape)
        if dims is not None and (
            min(dims, default=0) < 0 or torch.Size(dims).numel() != rows * columns or len(dims) > framing.MAX_DIMS
        ):
            raise ValueError(f"a shape of {rows * columns} elements is wanted, got {dims}")
        ndim = None if dims is None else len(dims)
        bound = compress_factors_bound(rows, columns, rank, dtype, ndim=ndim, block=exponent.block_size(block))
        buffer = memory.frame_buffer(out, bound, p.device, (p, q))
        at, numel = framing.payload_offset(ndim), rows * columns
        coded = Coded(CodecId.LOWRANK, 0, _encode(p.detach(), q.detach(), block, buffer[at:], route))
        if coded.size >= numel * dtype.itemsize:
            values = product(p, q, tensors.empty(numel, dtype, p.device), route=route)
            coded = exponent.encode_lossless(values, block, buffer[at:], route)
        size, kind = at + coded.size, framing.CHECKSUM if checksum else None
        frame = memory.write_header(Header(coded.frame_id, dtype, numel, size, coded.block, dims, kind), buffer)
        return frame.clone() if out is None else frame


def _matrix(name: str, tensor: torch.Tensor) -> None:
    memory.admit(name, tensor)
    if tensor.dtype != torch.float32 or tensor.dim() != 2 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous float32 tensor of two dimensions, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _pair(p: torch.Tensor, q: torch.Tensor) -> None:
    """Accept factors that have a product."""
    _matrix("p", p)
    _matrix("q", q)
    if p.shape[1] != q.shape[1] or not p.shape[1] or p.device != q.device:
        raise ValueError(
            f"factors have equally many columns, one or more, got {tuple(p.shape)} on {p.device} and {tuple(q.shape)} on {q.device}"
        )
    if not bounded(p, q):
        raise ValueError("factors, and the sums of their products, must be finite; send the matrix itself")


# --- the payload: two factors as nested frames in place of their product


def _encode(p: torch.Tensor, q: torch.Tensor, block: int, out: torch.Tensor, route: str) -> int:
    """Write the payload of contiguous factors (float32, [n, r] and [m, r]) to ``out``, flat uint8; return its bytes; blocks."""
    fields = _FIELDS.pack(len(p), len(q), p.shape[1], 0)
    out[: _FIELDS.size].copy_(tensors.of_buffer(bytearray(fields)))
    at = _FIELDS.size
    for factor in (p, q):
        coded = exponent.encode_lossless(factor.reshape(-1), block, out[at + HEADER_BYTES :], route)
        header = Header(coded.frame_id, torch.float32, factor.numel(), HEADER_BYTES + coded.size, coded.block)
        at = memory.finish_nested(header, out, at)
    return at


def _refuse(code: FrameErrorCode, reason: str) -> NoReturn:
    raise FrameError(code, f"a low-rank payload {reason}")


def _parse(payload: torch.Tensor, numel: int) -> tuple[int, tuple[tuple[int, Nested], tuple[int, Nested]]]:
    """The rank of a payload of ``numel`` elements, and the rows and the nested frame of each factor, proven.

    Raises:
        FrameError: they contradict each other.
    """
    rows, columns, rank, zero = _FIELDS.unpack(payload[: _FIELDS.size].cpu().numpy().tobytes())
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
    return rank, ((rows, p), (columns, q))


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


def _factors(payload: torch.Tensor, numel: int, route: str) -> tuple[torch.Tensor, ...]:
    """The two factors of a payload of ``numel`` elements.

    Raises:
        FrameError: the payload contradicts itself, or a value of the product might not be finite.
    """
    rank, parts = _parse(payload, numel)
    found = []
    for rows, part in parts:
        values = tensors.empty(rows * rank, torch.float32, payload.device)
        part.spec.decode(part.payload, None, part.block, values, route)
        found.append(values.view(rows, rank))
    if not bounded(*found):
        _refuse(FrameErrorCode.BLOCK, "whose factors, or sums of their products, are not finite")
    return tuple(found)


LOWRANK = lossy_format(
    lambda payload, numel, block, route: ("multiply", _factors(payload, numel, route)),
    name="lowrank",
    frame_id=CodecId.LOWRANK,
    payload_bound=any_size,
    payload_floor=lambda numel, dtype, block: _FIELDS.size + 2 * HEADER_BYTES,
    prove=lambda payload, header: _parse(payload, header.numel),
)
