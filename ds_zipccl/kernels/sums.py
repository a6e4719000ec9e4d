"""Sums in torch, for devices and backends without a kernel that adds, and the denormal switch of threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_zipccl import tensors

_LEAST = math.ulp(0.0)
#: Elements that torch adds in the calling thread (admission: its pool takes over at 32768). Each thread has a switch that flushes
#: denormals; a thread of torch's pool keeps the switch of its start.
_SERIAL = 16384


def flushes_here() -> bool:
    """Return whether this thread takes denormals for zero."""
    return _LEAST == 0.0  # a comparison by the processor, under the thread's switch


@contextmanager
def flushing(on: bool) -> Iterator[None]:
    """Let this thread, and the threads that it starts, flush denormals or keep them."""
    before = flushes_here()
    if before != on:
        torch.set_flush_denormal(on)
    try:
        yield
    finally:
        if before != on:
            torch.set_flush_denormal(before)


def add(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Add flat ``values`` to flat ``sums``, of their dtype (each sum is rounded to it) or float32; a bfloat16 NaN becomes 0x7fc0."""
    for part, more in zip(_serially(sums), _serially(values), strict=True):
        part.add_(more)
    settle_nans(sums)


def divide(sums: torch.Tensor, count: int) -> None:
    """Divide flat ``sums`` by ``count``; each quotient is rounded to their dtype."""
    # on a device by a tensor: torch multiplies by the inverse of a number there, which has another rounding
    by = count if sums.device.type == "cpu" else tensors.filled(1, count, sums.dtype, sums.device)
    for part in _serially(sums):
        part.div_(by)


def settle_nans(sums: torch.Tensor) -> None:
    """Make NaNs of bfloat16 0x7fc0: torch's vector units give another NaN than c10 and gloo."""
    # On a CPU a sum is four times faster than a search; opposite infinities give NaN too, which costs time only. Another device is not
    # asked: the answer would make the host wait.
    if sums.dtype == torch.bfloat16 and (sums.device.type != "cpu" or bool(sums.sum().isnan())):
        sums.masked_fill_(sums.isnan(), torch.nan)


def _serially(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(_SERIAL) if flat.device.type == "cpu" else (flat,)
