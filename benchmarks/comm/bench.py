"""``bench comm``: time and bytes of collectives over gloo or NCCL between processes of this machine.

Columns (also the keys of the rows in ``--json``):

* ``op``, ``dtype``; ``numel``: elements of the whole tensor (output of a gather, input of a scatter), a multiple of ``ranks``.
* ``ranks``, ``nodes``, ``link``: number of processes; number of nodes that share out the processes in blocks; network between the
  nodes. On ``loopback`` there is one node. With ``--link`` there is one node per rank, or as many as ``--nodes`` says.
* ``variant``: ``plain``: the collective of torch.distributed. ``raw``: our schedule with the codec raw. ``coded``: our
  schedule, compressed. ``auto``: the fastest of these three, which calls before the timed ones find out.
* ``time_us``: median over the repeats of the slowest rank's time, in microseconds. The variants take turns.
* ``algbw``, ``busbw``: algorithm and bus bandwidth as in nccl-tests, in GB/s (1e9 bytes per second). algbw is the size of the whole
  tensor / ``time_us``. busbw is algbw x (n-1)/n for all_gather, reduce_scatter and all_to_all, x 2(n-1)/n for all_reduce, x 1 for
  broadcast, with n ranks. Both count logical bytes: a coded row can show more than the link carries.
* ``logical_bytes``: bytes that a rank sends under a bandwidth-optimal schedule without compression.
* ``wire_bytes``: bytes that the busiest rank sent, headers included. The bytes of gloo's own schedules cannot be seen from
  outside: the plain row has ``logical_bytes`` in both columns, and so has ``auto`` where gloo is fastest. The source of a broadcast
  sends one frame to each other rank.
* ``wrong``: elements, summed over ranks, whose bits differ from the plain result; the most of any repeat. Nccl-tests calls it
  #wrong. In sums one NaN is as good as another: the payload of a NaN is not defined there.

``--backend nccl`` takes CUDA tensors and NCCL groups. A rank has the GPU of its number; where there are more ranks than GPUs, ranks share
them, over sockets, with variables of NCCL that the output names: right results, and times that say nothing about a network. With ``--link``
all ranks talk over sockets and the shaped network, also where GPUs could reach each other. ``--op all`` is
the operations that ds_zipccl has a schedule for there, and ``auto`` is not a variant. The differences in the columns:

* ``time_us``: a measurement is the mean of ``--iterations`` calls in stream order, by events of the device. The host does not wait between
  the calls, unless a call itself waits.
* ``ratio``: ``logical_bytes / wire_bytes``. ``host_waits``: times that the host waits for the device in a call.
* ``wrong``: with more than two ranks our sums are compared with fp32 sums in the order of the ranks, because NCCL promises no order.

``--link LINK`` is ``RATE[,DELAY[~JITTER]][,LOSS]``, such as ``1gbit``, ``1gbit,20ms``, ``1gbit,0.1%`` or ``1gbit,20ms~2ms,0.1%``.
DELAY is the time from node to node, half of a round trip. JITTER makes the delay of a packet differ by so much either way, and packets
overtake each other. LOSS is a share of the packets. It needs root, and ``pip install ds-zipccl[bench]`` for pyroute2.

Every rank has one thread. The exit status is 1 if any element is wrong.
"""

from __future__ import annotations

import argparse
import itertools

from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.comm.cases import Calibration, Case, check
from ds_zipccl.benchmarks.comm.launch import launch, rows_of
from ds_zipccl.benchmarks.comm.variants import VARIANTS
from ds_zipccl.benchmarks.links import link, namespaces
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.cli import ToolError, tables
from ds_zipccl.cli.tables import Column
from ds_zipccl.ops import TRAFFIC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench comm``."""
    sizes, spec = [1 << 20, 1 << 23], data.Spec("normal")
    option = parser.add_argument
    option(
        "--op", nargs="+", choices=[*TRAFFIC, "all"], default=["all"], metavar="O", help=f"{', '.join(TRAFFIC)} (all)"
    )
    option("--backend", choices=BACKENDS, default="gloo", help="gloo: CPU tensors; nccl: CUDA tensors (gloo)")
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="number of processes (2)")
    link.add_arguments(parser)
    option("--numel", nargs="+", type=data.numel, default=sizes, metavar="N", help="elements (1M 8M)")
    option("--dtype", nargs="+", type=data.dtype, default=["bfloat16"], metavar="T", help="bf16 fp16 fp32 (bf16)")
    option("--data", type=data.spec, default=spec, metavar="D", help="data set, see below (normal)")
    named = f"{', '.join(VARIANTS)} (plain raw coded)"
    option("--variants", nargs="+", choices=VARIANTS, default=["plain", "raw", "coded"], metavar="V", help=named)
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--iterations", type=int, default=10, metavar="I", help="with nccl: calls in one timing (10)")
    option("--timeout", type=float, default=300, metavar="S", help="seconds for one case, then all is killed (300)")
    option("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench comm``; 1 if any result differs from the plain one, else 0."""
    check(args)
    backend = BACKENDS[args.backend]
    names = _operations(args, backend)
    for line in backend.lines(args.ranks, any(args.link)):
        tables.say(line)
    iterations = args.iterations if backend.streams else 1
    table, rows = tables.Table(_columns(args, backend)), []
    for ranks, spec in itertools.product(args.ranks, args.link):
        cases: list[Case | Calibration] = [
            Case(
                op,
                dtype,
                numel - numel % ranks,
                args.data,
                args.repeats,
                args.timeout,
                tuple(args.variants),
                iterations,
            )
            for op in names
            for dtype in args.dtype
            for numel in args.numel
        ]
        with namespaces.joined(spec, ranks, args.nodes) as network:
            label = f"bench comm, {ranks} ranks, {link.name(spec)}"
            for row in tables.progress(launch(ranks, cases, network, backend), label, rows_of(cases)):
                rows.append(row)
                table.add(row)
    if args.json:
        about = {"data": str(args.data), "repeats": args.repeats, "iterations": iterations}
        tables.write_json(args.json, rows, args.command, **about, **backend.about(max(args.ranks), any(args.link)))
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements differ from the results of the plain collectives")
    return 1 if wrong else 0


def _operations(args: argparse.Namespace, backend: Backend) -> list[str]:
    """The kinds of operations to measure.

    Raises:
        ToolError: the backend cannot be used here, or the options ask for something that it does not have.
    """
    backend.check()
    coded = [op for op in TRAFFIC if backend.codes(op)]
    if "all" in args.op:
        args.op = coded
    if others := [op for op in args.op if op not in coded]:
        raise ToolError(
            f"--op {others[0]} passes plain on {args.backend} groups, so that there is nothing to compare; it has {', '.join(coded)}"
        )
    if backend.streams and "auto" in args.variants:
        raise ToolError(
            "--variants auto chooses by whole optimizer steps on NCCL groups, and no call shows it; take bench train --backend nccl"
        )
    if args.iterations < 1:
        raise ToolError(f"--iterations must be at least 1, got {args.iterations}")
    return list(args.op)


def _columns(args: argparse.Namespace, backend: Backend) -> tuple[Column, ...]:
    more = (Column("ratio", ".3f", 6), Column("host_waits", ".1f")) if backend.streams else ()
    return (
        Column("op", width=14),
        Column("dtype", width=8),
        Column("numel", ",d", 11),
        *tables.alike("ranks nodes", "d"),
        Column("link", width=max(len(link.name(spec)) for spec in args.link)),
        Column("variant"),
        Column("time_us", ".0f", 9),
        *tables.alike("algbw busbw", ".2f", 6),
        *tables.alike("logical_bytes wire_bytes", ",d", 12),
        *more,
        Column("wrong", "d"),
    )
