"""Sums of squared errors and values, of which the figures of error are made. All calls block."""

from __future__ import annotations

import torch

from ds_zipccl import kernels

#: Elements whose error is summed at a time (seed: temporaries of so many stay in the cache).
_PART = 1 << 16


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of floating-point ``values`` of any shape, added in fp64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def squared_error(flat: torch.Tensor, values: torch.Tensor, route: str) -> tuple[float, float]:
    """Return the sum of the squares of ``values`` - ``flat``, and of those of ``flat``, over the finite elements of ``flat``, added in
    fp64."""
    if fused := kernels.compiled(route, flat.device.type):
        return fused.squared_error(flat, values)
    of_error = of_values = 0.0
    for sent, arrived in zip(flat.split(_PART), values.split(_PART), strict=True):
        wide = sent.float()
        sums = [sum_of_squares(arrived.float() - wide), sum_of_squares(wide)]
        if not sum(sums) < float("inf"):  # also NaN
            bad = ~sent.isfinite()
            both = arrived.double() - sent.double(), sent.double()
            sums = [sum_of_squares(one.masked_fill_(bad, 0.0)) for one in both]
        of_error, of_values = of_error + sums[0], of_values + sums[1]
    return of_error, of_values
