"""Sums in torch, for what has no kernel that decodes and adds in one pass."""

from __future__ import annotations

import torch


def add(sums: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` to ``sums``, of the same dtype (each sum is rounded to it) or float32. NaN sums of bfloat16 are 0x7fc0."""
    sums.add_(values)
    if sums.dtype == torch.bfloat16 and sums.numel() and bool(sums.amax().isnan()):
        sums.masked_fill_(sums.isnan(), torch.nan)  # torch's vector units give another NaN than c10 and gloo
