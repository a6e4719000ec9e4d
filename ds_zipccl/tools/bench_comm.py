"""``bench comm``: time and bytes of collectives over gloo between processes of this machine.

Columns (also the keys of the rows in ``--json``):

* ``op``, ``dtype``; ``numel``: elements of the whole tensor (output of a gather, input of a scatter), a multiple of ``ranks``.
* ``ranks``, ``nodes``, ``link``: processes, the nodes that share them out in blocks, and what joins the nodes: loopback (one node),
  or with ``--link RATE`` a network of that rate, shaped by token buckets (:mod:`ds_zipccl.tools.link`; needs root and iproute2).
  Every rank is a node of its own unless ``--nodes`` says otherwise.
* ``variant``: ``plain``, torch.distributed's own collective; ``raw``, our schedule with uncoded frames; ``coded``, with coded
  ones; ``auto``, whichever of them ds_zipccl has found to be fastest, in calls before.
* ``time_us``: median over the repeats of the slowest rank's time, in microseconds. The variants take turns.
* ``raw_bytes``: what a rank sends under a bandwidth-optimal schedule without coding.
* ``wire_bytes``: what the busiest rank really sent, headers included. Which bytes gloo's own schedules move is not visible from
  here: the plain row carries ``raw_bytes`` in both, and so does ``auto`` where it passes.
  A broadcast's source sends one frame to each other rank.
* ``wrong``: elements, summed over ranks, whose bits differ from the plain result; the most of any repeat. In sums
  one NaN is as good as another: their payload is not defined.

Every rank has one thread.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ds_zipccl.tools import ToolError, data, link, tables
from ds_zipccl.tools.tables import Column

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
COLUMNS = (
    Column("op", width=14),
    Column("dtype", width=8),
    Column("numel", ",d", 11),
    Column("ranks", "d"),
    Column("nodes", "d"),
    Column("link", width=8),
    Column("variant"),
    Column("time_us", ".0f", 9),
    Column("raw_bytes", ",d", 12),
    Column("wire_bytes", ",d", 12),
    Column("wrong", "d"),
)


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
    """One row to be measured: the :class:`ds_zipccl.costs.Profile` of the ranks, as :meth:`to_json` gives it."""

    timeout: float  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench comm``."""
    sizes, spec = [1 << 20, 1 << 23], data.Spec("normal")
    parser.add_argument(
        "--op", nargs="+", choices=[*OPS, "all"], default=["all"], metavar="O", help=f"{', '.join(OPS)} (all)"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N", help="processes (2)")
    link.add_arguments(parser)
    parser.add_argument("--numel", nargs="+", type=data.numel, default=sizes, metavar="N", help="elements (1M 8M)")
    parser.add_argument(
        "--dtype", nargs="+", type=data.dtype, default=["bfloat16"], metavar="T", help="bf16 fp16 fp32 (bf16)"
    )
    parser.add_argument("--data", type=data.spec, default=spec, metavar="D", help="data set, see below (normal)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["plain", "raw", "coded"], metavar="V",
        help=f"{', '.join(VARIANTS)} (plain raw coded)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="seconds for one case, then all is killed (300)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench comm``; 1 if any result differs from the plain one, else 0."""
    check(args)
    names = list(OPS) if "all" in args.op else args.op
    table, rows = tables.Table(COLUMNS), []
    for ranks, rate in itertools.product(args.ranks, args.link):
        cases: list[Case | Calibration] = [
            Case(op, dtype, numel - numel % ranks, args.data, args.repeats, args.timeout, tuple(args.variants))
            for op in names
            for dtype in args.dtype
            for numel in args.numel
        ]
        with link.joined(rate, ranks, args.nodes) as network:
            name = f"bench comm, {ranks} ranks, {network or link.LOOPBACK}"
            for row in tables.progress(launch(ranks, cases, network), name, rows_of(cases)):
                rows.append(row)
                table.add(row)
    if args.json:
        tables.write_json(args.json, rows, args.command, data=str(args.data), repeats=args.repeats)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements differ from what the plain collectives gave")
    return 1 if wrong else 0


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

    from ds_zipccl.tools.comm_trial import take_part

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
