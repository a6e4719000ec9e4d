"""Sums of matrices by PowerSGD (Vogels et al. 2019): two factors of each matrix are summed in the place of the matrix.

Of rank w, M_w is the matrix plus the error E_w that rank w kept; Q is a factor that all ranks share.

    P = sum over w of M_w Q             P = orth(P)             R = sum over w of M_w^T P
    sum of the matrices = P R^T         E_w = M_w - P R^T / N   the next Q = R

The errors of all ranks add up to exactly that part of the sum that did not arrive, whatever factor the inputs have been scaled by before.
P and R are sums with the same bits on all ranks, and all further steps have a fixed order of operations: so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import lowrank
from ds_zipccl.comm.lossy.squared_error import sum_of_squares

#: Sums a flat contiguous tensor over all ranks, in place, with the same bits on all ranks.
ExactSum = Callable[[torch.Tensor], None]


@dataclass
class Matrix:
    """A matrix in a flat tensor, and its state.

    ``start``: index of the first element. ``error``: fp32 [rows, columns], None for zeros. ``factor``: fp32 [columns, rank], with the same
    bits on all ranks. ``keeps``: whether the error is kept.

    After a sum, ``arrived`` tells whether the matrix went as factors. ``squared_error``: of the part of this rank's matrix outside of the
    common directions, of this rank's matrix, of the kept error, and of this rank's matrix without the former error.
    """

    start: int
    rows: int
    columns: int
    factor: torch.Tensor
    error: torch.Tensor | None = None
    keeps: bool = True
    arrived: bool = field(default=False, init=False)
    squared_error: tuple[float, float, float, float] = field(default=(0.0, 0.0, 0.0, 0.0), init=False)

    @property
    def end(self) -> int:
        """Index of the element behind the last one."""
        return self.start + self.rows * self.columns


def low_rank_sum(flat: torch.Tensor, matrices: Sequence[Matrix], ranks: int, exact_sum: ExactSum, route: str) -> None:
    """Sum ``flat`` over all ranks, in place: the matrices by their factors, everything else exactly. A collective; blocks.

    A matrix with a value that is not finite on any rank, or with a sum beyond the range of float16, goes exactly, on all ranks; its error
    is dropped, its factor stays.

    Args:
        flat: contiguous CPU tensor of bfloat16, float16 or float32, of one size on all ranks.
        matrices: in the order of their places, which do not overlap; the same on all ranks except for errors. Their state is renewed.
        ranks: number of ranks.
        exact_sum: the sum over all ranks.
        route: kernels to use.

    Raises:
        RouteUnavailable: no kernels of the factors here.
    """
    with tensors.undisturbed(), torch.no_grad():
        wide = [_with_error(flat, one) for one in matrices]
        whole, lefts, bad = _buffers([(one.rows, one.factor.shape[1]) for one in matrices], len(matrices))
        for number, (matrix, words, p) in enumerate(zip(matrices, wide, lefts, strict=True)):
            torch.mm(words, matrix.factor, out=p)
            if not bool(p.isfinite().all()):  # so is a product with a matrix that is not finite
                p.zero_()
                bad[number] = 1
        exact_sum(whole)
        whole, rights, _ = _buffers([tuple(one.factor.shape) for one in matrices], 0)
        for number, (matrix, words, p, q) in enumerate(zip(matrices, wide, lefts, rights, strict=True)):
            matrix.arrived = not bool(bad[number]) and bool(p.isfinite().all())
            if matrix.arrived:
                lowrank.orthonormalize(p, route=route)
                torch.mm(words.t(), p, out=q)
                own = sum_of_squares(words)
                matrix.squared_error = (max(0.0, own - sum_of_squares(q)), own, 0.0, 0.0)
        exact_sum(whole)
        for matrix, p, q in zip(matrices, lefts, rights, strict=True):
            matrix.arrived = matrix.arrived and lowrank.bounded(p, q) and _in_range(p, q, flat.dtype, route)
        _sum_others(flat, matrices, exact_sum)
        for matrix, words, p, q in zip(matrices, wide, lefts, rights, strict=True):
            _deliver(flat, matrix, words, (p, q), ranks, route)


def _buffers(shapes: Sequence[tuple[int, ...]], extra: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return a flat tensor of fp32 zeros, which one call sums, and its parts: one of each shape, and ``extra`` elements behind them."""
    sizes = [rows * columns for rows, columns in shapes]
    whole = tensors.filled(sum(sizes) + extra, 0.0, torch.float32)
    *parts, rest = whole.split([*sizes, extra])
    return whole, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], rest


def _with_error(flat: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return this rank's matrix plus its error, fp32 [rows, columns]; not memory of ``flat``."""
    own = flat[matrix.start : matrix.end].view(matrix.rows, matrix.columns)
    return own.to(torch.float32, copy=True) if matrix.error is None else own.float() + matrix.error


def _in_range(p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype, route: str) -> bool:
    """Return whether no value of the product reaches the largest number of float16, to which the kernels take all that is larger: the
    overflow check of a loss scaler must see the infinity of the exact sum."""
    largest = torch.finfo(torch.float16).max
    if dtype != torch.float16 or p.shape[1] * float(p.abs().amax()) * float(q.abs().amax()) < largest:
        return True
    values = lowrank.product(p, q, tensors.empty(len(p) * len(q), dtype, p.device), route=route)
    return bool((values.abs() < largest).all())


def _sum_others(flat: torch.Tensor, matrices: Sequence[Matrix], exact_sum: ExactSum) -> None:
    """Sum those elements exactly that do not go as factors, in one call."""
    gone, places = 0, []
    for matrix in matrices:
        if matrix.arrived:
            places.append(slice(gone, matrix.start))
            gone = matrix.end
    parts = [flat[place] for place in (*places, slice(gone, flat.numel())) if place.start != place.stop]
    if len(parts) == 1:
        exact_sum(parts[0])
    elif parts:
        whole = torch.cat(parts)
        exact_sum(whole)
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed)


def _deliver(
    flat: torch.Tensor,
    matrix: Matrix,
    words: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    ranks: int,
    route: str,
) -> None:
    """Write the sum of a matrix to its place, and renew the state."""
    if not matrix.arrived:
        matrix.error = None
        return
    place = flat[matrix.start : matrix.end].view(matrix.rows, matrix.columns)
    given = sum_of_squares(place.float())
    lowrank.product(*factors, place, route=route)
    matrix.factor = lowrank.revived(factors[1])
    matrix.error = words.sub_(place.float(), alpha=1 / ranks) if matrix.keeps else None
    kept = sum_of_squares(matrix.error) if matrix.error is not None else 0.0
    matrix.squared_error = (*matrix.squared_error[:2], kept, given)
