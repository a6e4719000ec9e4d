"""``bench comm``: time and bytes of collectives over gloo between processes of this machine.

Columns (also the keys of the rows in ``--json``):

* ``op``, ``dtype``; ``numel``: elements of the whole tensor (output of a gather, input of a scatter), a multiple of ``ranks``.
* ``ranks``, ``nodes``, ``link``: number of processes; number of nodes that share out the processes in blocks; network between the
  nodes. On ``loopback`` there is one node. With ``--link`` there is one node per rank, or as many as ``--nodes`` says.
* ``variant``: ``plain``: the collective of torch.distributed. ``raw``: our schedule, uncompressed. ``coded``: our schedule,
  compressed. ``auto``: the fastest of these three, which calls before the timed ones find out.
* ``time_us``: median over the repeats of the slowest rank's time, in microseconds. The variants take turns.
* ``algbw``, ``busbw``: algorithm and bus bandwidth as in nccl-tests, in GB/s (1e9 bytes a second). algbw is the size of the whole
  tensor / ``time_us``. busbw is algbw x (n-1)/n for all_gather, reduce_scatter and all_to_all, x 2(n-1)/n for all_reduce, x 1 for
  broadcast, with n ranks. Both count uncompressed bytes: a compressed row can show more than the link carries.
* ``logical_bytes``: bytes that a rank sends under a bandwidth-optimal schedule without compression.
* ``wire_bytes``: bytes that the busiest rank sent, headers included. The bytes of gloo's own schedules cannot be seen from
  outside: the plain row has ``logical_bytes`` in both columns, and so has ``auto`` where gloo is fastest. The source of a broadcast
  sends one frame to each other rank.
* ``wrong``: elements, summed over ranks, whose bits differ from the plain result; the most of any repeat. Nccl-tests calls it
  #wrong. In sums one NaN is as good as another: the payload of a NaN is not defined there.

``--link LINK`` is ``RATE[,DELAY[~JITTER]][,LOSS]``, such as ``1gbit``, ``1gbit,20ms``, ``1gbit,0.1%`` or ``1gbit,20ms~2ms,0.1%``.
DELAY is the time from node to node, half of a round trip. JITTER makes the delay of a packet differ by so much either way, and packets
overtake each other. LOSS is a share of the packets. It needs root, and ``pip install ds-zipccl[bench]`` for pyroute2.

Every rank has one thread. The exit status is 1 if any element is wrong.
"""

from __future__ import annotations

import argparse
import itertools

from ds_zipccl.bench import data, link, namespaces, tables
from ds_zipccl.bench.comm_cases import Calibration, Case, check
from ds_zipccl.bench.comm_launch import launch, rows_of
from ds_zipccl.bench.tables import Column
from ds_zipccl.bench.variants import VARIANTS
from ds_zipccl.ops import TRAFFIC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench comm``."""
    sizes, spec = [1 << 20, 1 << 23], data.Spec("normal")
    option = parser.add_argument
    option(
        "--op", nargs="+", choices=[*TRAFFIC, "all"], default=["all"], metavar="O", help=f"{', '.join(TRAFFIC)} (all)"
    )
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="number of processes (2)")
    link.add_arguments(parser)
    option("--numel", nargs="+", type=data.numel, default=sizes, metavar="N", help="elements (1M 8M)")
    option("--dtype", nargs="+", type=data.dtype, default=["bfloat16"], metavar="T", help="bf16 fp16 fp32 (bf16)")
    option("--data", type=data.spec, default=spec, metavar="D", help="data set, see below (normal)")
    named = f"{', '.join(VARIANTS)} (plain raw coded)"
    option("--variants", nargs="+", choices=VARIANTS, default=["plain", "raw", "coded"], metavar="V", help=named)
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--timeout", type=float, default=300, metavar="S", help="seconds for one case, then all is killed (300)")
    option("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench comm``; 1 if any result differs from the plain one, else 0."""
    check(args)
    names = list(TRAFFIC) if "all" in args.op else args.op
    table, rows = tables.Table(_columns(args)), []
    for ranks, spec in itertools.product(args.ranks, args.link):
        cases: list[Case | Calibration] = [
            Case(op, dtype, numel - numel % ranks, args.data, args.repeats, args.timeout, tuple(args.variants))
            for op in names
            for dtype in args.dtype
            for numel in args.numel
        ]
        with namespaces.joined(spec, ranks, args.nodes) as network:
            label = f"bench comm, {ranks} ranks, {link.name(spec)}"
            for row in tables.progress(launch(ranks, cases, network), label, rows_of(cases)):
                rows.append(row)
                table.add(row)
    if args.json:
        tables.write_json(args.json, rows, args.command, data=str(args.data), repeats=args.repeats)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements differ from the results of the plain collectives")
    return 1 if wrong else 0


def _columns(args: argparse.Namespace) -> tuple[Column, ...]:
    return (
        Column("op", width=14),
        Column("dtype", width=8),
        Column("numel", ",d", 11),
        Column("ranks", "d"),
        Column("nodes", "d"),
        Column("link", width=max(len(link.name(spec)) for spec in args.link)),
        Column("variant"),
        Column("time_us", ".0f", 9),
        Column("algbw", ".2f", 6),
        Column("busbw", ".2f", 6),
        Column("logical_bytes", ",d", 12),
        Column("wire_bytes", ",d", 12),
        Column("wrong", "d"),
    )
