"""Cases of ``bench comm`` and ``plan --validate``, and the processes that measure them: started, watched, and none left behind."""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.links import link
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.benchmarks.links.namespaces import Network
from ds_zipccl.cli import ToolError
from ds_zipccl.ops import TRAFFIC

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

GOODBYE_S = 60  # seconds for the processes to end after their last row


@dataclass(frozen=True)
class Case:
    """One operation of :data:`ds_zipccl.ops.TRAFFIC` on one tensor: a row for each variant.

    ``numel``: elements of the whole tensor, a multiple of the number of ranks. ``timeout``: seconds. ``iterations``: calls in one
    measurement, whose mean counts.
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
    """One row: the :class:`ds_zipccl.policy.cost_model.LinkProfile` of the ranks, as its :meth:`to_json` gives it."""

    timeout: float  # seconds


def elements(numel: int, share: Callable[[int], float], ranks: int) -> int:
    """Elements in a ``share`` of ``numel`` elements; exact, because ``numel`` is a multiple of ``ranks``.

    A share is a whole number over ``ranks``. As a float it is off by less than 1e-15 of itself, which rounding takes away.
    """
    return round(numel * share(ranks))


def bandwidths(op: str, nbytes: int, ranks: int, seconds: float) -> dict[str, float]:
    """``algbw`` and ``busbw`` in 1e9 bytes a second, as nccl-tests defines them.

    Args:
        nbytes: bytes of the whole tensor.
        seconds: time of one operation.
    """
    algbw = nbytes / seconds / 1e9
    return {"algbw": algbw, "busbw": algbw * TRAFFIC[op].plain(ranks)}


def check(args: argparse.Namespace) -> None:
    """Check options before anything is measured.

    Raises:
        ToolError: an option makes no sense; names the option and the rule.
    """
    if args.repeats < 1 or args.timeout <= 0:
        raise ToolError(f"--repeats must be at least 1 and --timeout above 0, got {args.repeats} and {args.timeout:g}")
    if min(args.ranks) < 2:
        raise ToolError(f"--ranks must be at least 2, got {min(args.ranks)}: one rank has nobody to send to")
    if min(args.numel) < max(args.ranks):
        raise ToolError(f"--numel must be at least the number of ranks, got {min(args.numel)} for {max(args.ranks)}")
    link.check(args.link, args.ranks, args.nodes)
    for dtype in args.dtype:
        if not args.data.has(dtype):
            raise ToolError(f"{args.data.name} exists in {', '.join(data.DATA[args.data.name].dtypes)}, not in {dtype}")


def launch(
    ranks: int, cases: list[Case | Calibration], network: Network | None, backend: Backend = BACKENDS["gloo"]
) -> Iterator[dict[str, Any]]:
    """Start the processes, give their rows as they come, and leave no process behind.

    Raises:
        ToolError: a process failed, or no row came for as long as a case may take.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    from ds_zipccl.benchmarks.comm.trial import take_part

    # The store lives in this process, on a port that the system chose: no other program can take the port in between.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=cases[0].timeout), wait_for_workers=False)
    results = get_context("spawn").Queue()
    context = spawn(take_part, (ranks, network, store.port, cases, results, backend), nprocs=ranks, join=False)
    try:
        for _ in range(rows_of(cases)):
            yield _next(results, context, cases[0].timeout)
        deadline = time.monotonic() + GOODBYE_S
        while not _ended(context, timeout=1):
            if time.monotonic() > deadline:
                raise ToolError(f"all rows are there, but the processes do not end within {GOODBYE_S} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def rows_of(cases: list[Case | Calibration]) -> int:
    """Number of rows that :func:`launch` gives."""
    return sum(len(case.variants) if isinstance(case, Case) else 1 for case in cases)


def _next(results: Any, context: ProcessContext, timeout: float) -> dict[str, Any]:
    """The next row; blocks for ``timeout`` seconds at most.

    Raises:
        ToolError: a process failed, or no row came.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            row: dict[str, Any] = results.get(timeout=0.2)
            return row
        except queue.Empty:
            _ended(context, timeout=0)
    raise ToolError(
        f"no result for {timeout:g} s; all processes are killed. A larger --timeout, or a smaller --numel, may help"
    )


def _ended(context: ProcessContext, timeout: float) -> bool:
    """Whether all processes have ended well; waits up to ``timeout`` seconds until one ends.

    Raises:
        ToolError: a process failed; torch kills the remaining ones.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        return bool(context.join(timeout=timeout))
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise ToolError(f"a rank failed: {str(error).strip()}") from error
