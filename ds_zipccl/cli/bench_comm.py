"""``bench comm``: time and bytes of collectives over gloo between processes of this machine.

Columns (also the keys of the rows in ``--json``):

* ``op``, ``dtype``; ``numel``: elements of the whole tensor (output of a gather, input of a scatter), a multiple of ``ranks``.
* ``ranks``, ``nodes``, ``link``: processes, the nodes that share them out in blocks, and what joins the nodes: loopback (one node),
  or with ``--link RATE`` a network of that rate, shaped by token buckets (:mod:`ds_zipccl.bench.link`; needs root and iproute2).
  Every rank is a node of its own unless ``--nodes`` says otherwise.
* ``variant``: ``plain``, torch.distributed's own collective; ``raw``, our schedule with uncoded frames; ``coded``, with coded
  ones; ``auto``, whichever of them ds_zipccl has found to be fastest, in calls before.
* ``time_us``: median over the repeats of the slowest rank's time, in microseconds. The variants take turns.
* ``logical_bytes``: what a rank sends under a bandwidth-optimal schedule without coding.
* ``wire_bytes``: what the busiest rank really sent, headers included. Which bytes gloo's own schedules move is not visible from
  here: the plain row carries ``logical_bytes`` in both, and so does ``auto`` where it passes.
  A broadcast's source sends one frame to each other rank.
* ``wrong``: elements, summed over ranks, whose bits differ from the plain result; the most of any repeat. In sums
  one NaN is as good as another: their payload is not defined.

Every rank has one thread.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from ds_zipccl.bench import data, link, tables
from ds_zipccl.bench.comm_cases import OPS, VARIANTS, Calibration, Case, check, launch, rows_of
from ds_zipccl.bench.tables import Column

if TYPE_CHECKING:
    pass

COLUMNS = (
    Column("op", width=14),
    Column("dtype", width=8),
    Column("numel", ",d", 11),
    Column("ranks", "d"),
    Column("nodes", "d"),
    Column("link", width=8),
    Column("variant"),
    Column("time_us", ".0f", 9),
    Column("logical_bytes", ",d", 12),
    Column("wire_bytes", ",d", 12),
    Column("wrong", "d"),
)


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
