"""Cases of ``bench comm`` and ``plan --validate``: what is measured, and the processes that measure it (:mod:`.comm_trial`)."""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ds_zipccl.bench import ToolError, data, link

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

#: variant -> settings of ds_zipccl.comm; None: torch.distributed's own collective
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "raw": {"mode": "always", "min_bytes": 0, "codec": "raw"},
    "coded": {"mode": "always", "min_bytes": 0},
    "auto": {"mode": "auto"},
}
GOODBYE_S = 60  # seconds for the processes to end after their last row


@dataclass(frozen=True)
class Op:
    """One collective. ``call(module, output, input, **more)`` works on torch.distributed and on ds_zipccl.comm alike.

    ``inputs``, ``outputs``: elements of a rank's buffers over those of the tensor, from the number of ranks; in place where
    ``outputs`` is None. ``sent``: the same ratio for what a bandwidth-optimal uncoded schedule sends.
    """

    call: Callable[..., Any]
    inputs: Callable[[int], Fraction]
    outputs: Callable[[int], Fraction] | None
    sent: Callable[[int], Fraction]
    sums: bool = False


def _whole(ranks: int) -> Fraction:
    return Fraction(1)


def _shard(ranks: int) -> Fraction:
    return Fraction(1, ranks)


def _others(ranks: int) -> Fraction:
    return Fraction(ranks - 1, ranks)


OPS: dict[str, Op] = {
    "all_gather": Op(lambda m, out, x, **more: m.all_gather_into_tensor(out, x, **more), _shard, _whole, _others),
    "reduce_scatter": Op(
        lambda m, out, x, **more: m.reduce_scatter_tensor(out, x, **more), _whole, _shard, _others, sums=True
    ),
    "all_reduce": Op(
        lambda m, out, x, **more: m.all_reduce(out, **more), _whole, None, lambda n: 2 * _others(n), sums=True
    ),
    "all_to_all": Op(lambda m, out, x, **more: m.all_to_all_single(out, x, **more), _whole, _whole, _others),
    "broadcast": Op(lambda m, out, x, **more: m.broadcast(out, 0, **more), _whole, None, _whole),
}


@dataclass(frozen=True)
class Case:
    """Rows to be measured: one for each variant."""

    op: str
    dtype: str
    numel: int
    data: data.Spec
    repeats: int
    timeout: float  # seconds
    variants: tuple[str, ...] = ("plain", "raw", "coded")


@dataclass(frozen=True)
class Calibration:
    """One row to be measured: the :class:`ds_zipccl.policy.cost_model.LinkProfile` of the ranks, as :meth:`to_json` gives it."""

    timeout: float  # seconds


def check(args: argparse.Namespace) -> None:
    """Refuse options that make no sense.

    Raises:
        ToolError: says which.
    """
    if args.repeats < 1 or args.timeout <= 0:
        raise ToolError("--repeats must be at least 1, --timeout above 0")
    if min(args.ranks) < 2:
        raise ToolError(f"--ranks must be at least 2, got {min(args.ranks)}: one rank has nobody to send to")
    if min(args.numel) < max(args.ranks):
        raise ToolError(f"--numel must be at least the number of ranks, got {min(args.numel)} for {max(args.ranks)}")
    link.check(args.link, args.ranks, args.nodes)
    for dtype in args.dtype:
        if not args.data.has(dtype):
            raise ToolError(f"{args.data.name} exists in {', '.join(data.DATA[args.data.name].dtypes)}, not in {dtype}")


def launch(ranks: int, cases: list[Case | Calibration], network: link.Link | None) -> Iterator[dict[str, Any]]:
    """Start the processes, give their rows as they come, and leave none behind.

    Raises:
        ToolError: a process failed, or no row came for as long as a case may take.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    from ds_zipccl.bench.comm_trial import take_part

    # The store lives here, on a port that the system chose: no other program can take it in between.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=cases[0].timeout), wait_for_workers=False)
    results = get_context("spawn").Queue()
    context = spawn(take_part, (ranks, network, store.port, cases, results), nprocs=ranks, join=False)
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
    """Whether all processes have ended well, after waiting until one ends.

    Raises:
        ToolError: one failed; the others are killed.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        return bool(context.join(timeout=timeout))
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise ToolError(f"a rank failed: {str(error).strip()}") from error
