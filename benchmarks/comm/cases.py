"""Cases of ``bench comm``, with sizes and bandwidths."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ds_zipccl.benchmarks.links.backends import BACKENDS
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.tools import ToolError, data, link


@dataclass(frozen=True)
class Case:
    """One operation of :data:`ds_zipccl.ops.TRAFFIC` on one tensor: a row for each variant.

    ``numel``: elements of the whole tensor, a multiple of the number of ranks. ``timeout``: seconds. ``iterations``:
    calls per measurement, which is their mean.
    """

    op: str
    dtype: str
    numel: int
    data: data.Spec
    repeats: int
    timeout: float
    variants: tuple[str, ...] = ("plain", "raw", "coded")
    iterations: int = 1


@dataclass(frozen=True)
class Calibration:
    """One row: the :class:`ds_zipccl.policy.cost_model.LinkProfile` of the ranks in the form of :meth:`to_json`."""

    timeout: float  # seconds


def elements(numel: int, share: Callable[[int], float], ranks: int) -> int:
    """Elements in a ``share`` of ``numel`` elements; exact, because ``numel`` is a multiple of ``ranks``.

    A share is a whole number / ``ranks``. Rounding removes the relative error of its float, less than 1e-15.
    """
    return round(numel * share(ranks))


def bandwidths(op: str, nbytes: int, ranks: int, seconds: float) -> dict[str, float]:
    """``algbw`` and ``busbw`` of nccl-tests in 1e9 bytes per second.

    Args:
        nbytes: bytes of the whole tensor.
        seconds: time of one operation.
    """
    algbw = nbytes / seconds / 1e9
    return {"algbw": algbw, "busbw": algbw * TRAFFIC[op].plain(ranks)}


def check(args: argparse.Namespace) -> None:
    """Check the options before the first measurement.

    Raises:
        ToolError: an option breaks a rule; names both.
    """
    if args.repeats < 1 or args.timeout <= 0:
        raise ToolError(f"--repeats must be at least 1 and --timeout above 0, got {args.repeats} and {args.timeout:g}")
    if min(args.ranks) < 2:
        raise ToolError(f"--ranks must be at least 2, got {min(args.ranks)}: one rank has no peer to send to")
    if min(args.numel) < max(args.ranks):
        raise ToolError(f"--numel must be at least the number of ranks, got {min(args.numel)} for {max(args.ranks)}")
    link.check(args.link, args.ranks, args.nodes, bool(BACKENDS[args.backend].nodes))
    for dtype in args.dtype:
        if not args.data.has(dtype):
            raise ToolError(f"{args.data.name} exists in {', '.join(data.DATA[args.data.name].dtypes)}, not in {dtype}")
