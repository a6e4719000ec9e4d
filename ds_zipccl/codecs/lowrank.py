"""Low-rank factors of matrices, and their frames (FORMAT.md 2.12).

A matrix M of n rows and m columns is replaced by P times the transpose of Q, P of n rows and Q of m rows with r columns each: one power
iteration, warm-started by the Q before (PowerSGD, Vogels et al. 2019). Who sends a frame takes :func:`round_factors` and
:func:`product` for the values that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import api, exponent, factors, memory
from ds_zipccl.codecs.spec import LOSSY_DTYPES, Coded
from ds_zipccl.frame import CodecId, Header
from ds_zipccl.lossy import Round

#: Mantissa bits of sent factors: an error of 0.7%, where leaving out the other directions costs a half.
FACTOR_BITS = 5


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
    """Factors rounded to :data:`FACTOR_BITS` mantissa bits, as frames should carry them: new tensors; blocks."""
    codec = Round(FACTOR_BITS)
    return api.project(p, codec, route=route), api.project(q, codec, route=route)


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
        return factors.bounded(p.detach(), q.detach())


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
    lossless = api.compress_bound(rows * columns, dtype, ndim=ndim, block=block)
    return max(framing.payload_offset(ndim) + factors.payload_bound(rows, columns, rank, block), lossless)


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
        coded = Coded(CodecId.LOWRANK, 0, factors.encode(p.detach(), q.detach(), block, buffer[at:], route))
        if coded.size >= numel * dtype.itemsize:
            values = product(p, q, tensors.empty(numel, dtype, p.device), route=route)
            coded = exponent.encode_lossless(values, block, buffer[at:], route)
        size, kind = at + coded.size, framing.CHECKSUM if checksum else None
        memory.write_header(Header(coded.frame_id, dtype, numel, size, coded.block, dims, kind), buffer)
        return buffer[:size].clone() if out is None else buffer[:size]


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
    if not factors.bounded(p.detach(), q.detach()):
        raise ValueError("factors, and the sums of their products, must be finite; send the matrix itself")
