"""Sums in torch, for what has no kernel that decodes and adds in one pass."""

from __future__ import annotations

import torch


def add(sums: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` to ``sums``, of the same dtype (each sum is rounded to it) or float32. NaN sums of bfloat16 are 0x7fc0."""
    sums.add_(values)
    settle_nans(sums)


def settle_nans(sums: torch.Tensor) -> None:
    """Make NaNs of bfloat16 0x7fc0: torch's vector units give another NaN than c10 and gloo."""
    if sums.dtype == torch.bfloat16 and bool(
        sums.sum().isnan()
    ):  # or of infinities; a sum is four times faster than to look
        sums.masked_fill_(sums.isnan(), torch.nan)
