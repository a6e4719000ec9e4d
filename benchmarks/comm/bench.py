"""``bench comm``: time and bytes of collectives over gloo or NCCL between processes of this machine.

Columns (also the keys of the rows in ``--json``):

* ``op``, ``dtype``; ``numel``: elements of the whole tensor (output of a gather, input of a scatter), a multiple of ``ranks``.
* ``ranks``, ``nodes``, ``link``: number of processes; number of nodes, which hold consecutive ranks; network between
  the nodes. ``loopback`` has one node. ``--link`` has one node per rank, or the number of ``--nodes``.
* ``variant``: ``plain``: the collective of torch.distributed. ``raw``: the schedule of ds_zipccl, uncompressed.
  ``coded``: the same, compressed. ``auto``: the one of these three that the measured link favors.
* ``time_us``: median over the repeats of the slowest rank's time, in microseconds. The variants are timed in turn.
* ``algbw``, ``busbw``: algorithm and bus bandwidth as in nccl-tests, in GB/s (1e9 bytes per second). algbw is the size of the whole
  tensor / ``time_us``. busbw is algbw x (n-1)/n for all_gather, reduce_scatter and all_to_all, x 2(n-1)/n for all_reduce, x 1 for
  broadcast, with n ranks. Both count logical bytes: a coded row can show more than the link carries.
* ``logical_bytes``: bytes that a rank sends under a bandwidth-optimal schedule without compression.
* ``wire_bytes``: bytes that the busiest rank sent, headers included. gloo does not report the bytes of its schedules:
  the plain row repeats ``logical_bytes``, and so does ``auto`` where gloo is fastest. A broadcast sends n-1 frames.
* ``wrong``: elements, summed over ranks, whose bits differ from the plain result (#wrong of nccl-tests); the most of
  any repeat. In sums every NaN equals every other NaN, because the payload of their NaN is undefined.

``--backend nccl`` takes CUDA tensors and NCCL groups. Rank i has GPU i. If ranks outnumber GPUs, ranks share GPUs and
communicate over sockets, with the NCCL variables that the output names; their times then say nothing about a network.
With ``--link`` all ranks communicate over sockets and the shaped network. ``--op all`` means the operations for which
ds_zipccl has a schedule on NCCL groups, and ``auto`` is not a variant. The columns differ:

* ``time_us``: a measurement is the mean of ``--iterations`` calls in stream order, timed by CUDA events. The host does
  not wait between the calls, unless a call itself waits.
* ``ratio``: ``logical_bytes / wire_bytes``. ``host_waits``: how often the host waits for the device per call.
* ``wrong``: with more than two ranks, raw and coded sums are compared with fp32 sums in rank order, because NCCL
  promises no order.

``--backend slots`` runs the schedules of NCCL groups on CPUs: gloo carries the collectives, the C++ kernels code and
decode. ``--nodes M`` needs no link then; each rank takes itself to be in one of M nodes. Bytes and waits are those of
a cluster, times are not. Columns as with nccl, and:

* ``between_bytes``: bytes that a node sends to other nodes per call, if all its ranks send as rank 0 does. A
  collective of the backend counts as one ring. Sums are compared with the documented order: in fp32 inside a node,
  rounded once, then in the order of the nodes.

``--link LINK`` is ``RATE[,DELAY[~JITTER]][,LOSS]``, such as ``1gbit``, ``1gbit,20ms``, ``1gbit,0.1%`` or
``1gbit,20ms~2ms,0.1%``. DELAY is the one-way time between nodes. JITTER is the greatest deviation of a packet's delay
from DELAY; packets may overtake each other. LOSS is a share of the packets. It needs root and pyroute2.

Every rank has one thread. The exit status is 1 if any element is wrong.
"""

from __future__ import annotations

import argparse
import itertools

from ds_zipccl.benchmarks.comm.cases import Calibration, Case, check
from ds_zipccl.benchmarks.comm.launch import launch, rows_of
from ds_zipccl.benchmarks.comm.variants import VARIANTS
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.tools import ToolError, data, link, namespaces, tables
from ds_zipccl.tools.tables import Column


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench comm``."""
    sizes, spec = [1 << 20, 1 << 23], data.Spec("normal")
    option = parser.add_argument
    option(
        "--op", nargs="+", choices=[*TRAFFIC, "all"], default=["all"], metavar="O", help=f"{', '.join(TRAFFIC)} (all)"
    )
    option(
        "--backend",
        choices=BACKENDS,
        default="gloo",
        help="gloo: CPU tensors; nccl: CUDA tensors; slots: NCCL's schedules on CPUs (gloo)",
    )
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="number of processes (2)")
    link.add_arguments(parser)
    option("--numel", nargs="+", type=data.numel, default=sizes, metavar="N", help="elements (1M 8M)")
    option("--dtype", nargs="+", type=data.dtype, default=["bfloat16"], metavar="T", help="bf16 fp16 fp32 (bf16)")
    option("--data", type=data.spec, default=spec, metavar="D", help="data set, see below (normal)")
    named = f"{', '.join(VARIANTS)} (plain raw coded)"
    option("--variants", nargs="+", choices=VARIANTS, default=["plain", "raw", "coded"], metavar="V", help=named)
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--iterations", type=int, default=10, metavar="I", help="with nccl: calls per timing (10)")
    option("--timeout", type=float, default=300, metavar="S", help="seconds per case before all ranks are killed (300)")
    option("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench comm``; 1 if any result differs from the plain one, else 0."""
    check(args)
    backend = BACKENDS[args.backend].on(args.nodes)
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
    """The operations to measure.

    Raises:
        ToolError: the backend does not work here, or an option names an operation or variant that it lacks.
    """
    backend.check()
    coded = [op for op in TRAFFIC if backend.codes(op)]
    if "all" in args.op:
        args.op = coded
    if others := [op for op in args.op if op not in coded]:
        raise ToolError(
            f"--op {others[0]} passes plain on {args.backend} groups: nothing to compare; take {', '.join(coded)}"
        )
    if backend.streams and "auto" in args.variants:
        raise ToolError(
            "--variants auto chooses by optimizer steps on NCCL groups, not by calls; take bench train --backend nccl"
        )
    if args.iterations < 1:
        raise ToolError(f"--iterations must be at least 1, got {args.iterations}")
    return list(args.op)


def _columns(args: argparse.Namespace, backend: Backend) -> tuple[Column, ...]:
    more: tuple[Column, ...] = (Column("ratio", ".3f", 6), Column("host_waits", ".1f")) if backend.streams else ()
    more += (Column("between_bytes", ",d", 13),) if backend.nodes else ()
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
