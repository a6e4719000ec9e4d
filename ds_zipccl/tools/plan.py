"""``plan``: how long the communication of a training step takes, plain and coded, before anything is rented.

    plan --params 70e9 --zero 3 --gpus 1024 --gpus-per-node 8 --link 400gbit

The model (ds_zipccl/costs.py has the formulas): ZeRO-3 gathers the parameters forward and backward and scatters the gradients in
every micro-batch; ZeRO-2 all-reduces the gradients in every micro-batch, ZeRO-1 once a step, and both gather the parameters once.
Operations have DeepSpeed's default sizes: 5e8 elements, and 5e7 for the gathers of ZeRO-3.

--link is what one GPU can send and receive between nodes, both at once: its share of the node's network cards. Columns:

* variant: plain, uncoded by nodes: GPUs of one place in all nodes exchange, and what moves inside nodes is free, as near to NCCL's
  rings as an optimist gets. coded, flat: every GPU sends to every other, so that the part (gpus - gpus_per_node) / (gpus - 1) of
  what it sends leaves the node. coded, by nodes: the plain one's schedule, coded between nodes; this release has it for gathers, not
  for sums. With one GPU a node the two are one: coded.
* calls: operations a step. wire_gb: 1e9 bytes that a GPU sends between nodes in a step. ms: their time. speedup: plain ms / ms.

Left out: overlap with compute and with each other, congestion, the memory and time that coding takes from compute, other traffic
(scalars, MoE, pipeline), and the latency of many ranks beyond --latency for every message. NCCL groups pass through uncoded in this
release: for them the table says what coding would give.

plan --validate measures link and codec between ranks of this machine, predicts what bench comm then measures in the same processes,
and has status 1 where our schedules are off by more than 20%. off: predicted / measured; plain is predicted as gloo's own schedules,
as far as they are known; ideal_ms: what a bandwidth-optimal one would take.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_zipccl.costs import Profile, predict
from ds_zipccl.tools import ToolError, data, link, speeds, tables, validate
from ds_zipccl.tools.bench_comm import OPS
from ds_zipccl.tools.speeds import Points, Speeds
from ds_zipccl.tools.tables import Column

#: DeepSpeed's defaults, in elements: reduce_bucket_size and allgather_bucket_size; stage3_prefetch_bucket_size.
BUCKET, PREFETCH = 500_000_000, 50_000_000
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
TOTAL = "total"
COLUMNS = (
    Column("what", width=20),
    Column("op", width=14),
    Column("calls", ",d", 7),
    Column("variant", width=15),
    Column("wire_gb", ".2f", 9),
    Column("ms", ".1f", 10),
    Column("speedup", ".2f"),
)


@dataclass(frozen=True)
class Traffic:
    """One line of a step: ``times`` it moves all parameters by ``op``, in operations of ``bucket`` elements at most."""

    what: str
    op: str
    bucket: int
    times: int


@dataclass(frozen=True)
class Schedule:
    """How an operation runs: on ``ranks`` ranks, on the part ``tensor`` of it; ``crossing`` of what a rank sends leaves its node."""

    variant: str
    codec: str
    ranks: int
    tensor: float
    crossing: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    parser.add_argument("--params", type=_count, metavar="P", help="parameters of the model, such as 70e9")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (3)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
    parser.add_argument("--link", nargs="+", type=link.rate, metavar="RATE", help="of one GPU: 400gbit; see above")
    parser.add_argument("--latency", type=float, default=10, metavar="US", help="microseconds of a small message (10)")
    parser.add_argument(
        "--profile", metavar="FILE", help="speeds: from plan --validate --json or bench codec --json (this CPU)"
    )
    parser.add_argument("--ratio", type=float, metavar="R", help="of the coding (measured on normal values)")
    parser.add_argument("--accumulation", type=int, default=1, metavar="K", help="micro-batches a step (1)")
    parser.add_argument("--dtype", type=data.dtype, default="bfloat16", metavar="T", help="bf16 fp16 fp32 (bf16)")
    parser.add_argument(
        "--bucket", type=_count, metavar="BYTES", help="bytes of every operation (DeepSpeed's defaults)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    validate.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``plan``; 0, or with ``--validate`` 1 if the model is off."""
    if args.validate:
        return validate.main(args)
    _check(args)
    found = speeds.read(args.profile, args.dtype) if args.profile else speeds.measured(args.dtype)
    if args.ratio:
        found = replace(found, ratio=args.ratio, about=f"{found.about}, overruled by --ratio")
    profile = replace(found.profile, transfer=_points(args, found))
    rows = list(step(args, profile, found.ratio))
    tables.say(f"speeds: {found.about}")
    coding = ", ".join(f"{name} {getattr(profile, name) / 1e9:.1f}" for name in ("encode", "decode", "add"))
    tables.say(f"        {coding} GB/s; ratio {found.ratio:.3f}")
    whence = f"--link {args.link[0]}" if args.link else f"measured in {args.profile}"
    tables.say(f"link:   {8 * profile.bandwidth / 1e9:.4g} Gbit/s of one GPU, {whence}\n")
    table = tables.Table(COLUMNS)
    for row in rows:
        table.add(row)
    for line in _losses(rows):
        tables.say(line)
    if args.json:
        more = {"profile": profile.to_json(), "ratio": found.ratio, "speeds": found.about}
        tables.write_json(args.json, rows, args.command, **more)
    return 0


def step(args: argparse.Namespace, profile: Profile, ratio: float) -> Iterator[dict[str, Any]]:
    """Rows of a step, and their totals."""
    itemsize = ITEMSIZE[args.dtype]
    totals: dict[str, dict[str, Any]] = {}
    for traffic in _traffic(args):
        operations = _sizes(args.params * itemsize, traffic.bucket * itemsize if args.bucket is None else args.bucket)
        plain = math.nan
        for schedule in _schedules(args.gpus, args.gpus_per_node):
            local = _slowed(profile, schedule.crossing)
            once = sum(
                count * predict(traffic.op, schedule.codec, size * schedule.tensor, schedule.ranks, local, ratio)
                for size, count in operations
            )
            sent = float(OPS[traffic.op].sent(schedule.ranks)) * schedule.crossing * schedule.tensor
            sent *= args.params * itemsize / (ratio if schedule.codec == "coded" else 1)
            ms = 1e3 * once * traffic.times
            plain = ms if schedule.codec == "plain" else plain
            row = {
                "what": traffic.what,
                "op": traffic.op,
                "calls": traffic.times * sum(count for _, count in operations),
                "variant": schedule.variant,
                "wire_gb": traffic.times * sent / 1e9,
                "ms": ms,
                "speedup": plain / ms,
            }
            yield row
            total = totals.setdefault(
                schedule.variant, row | {"what": TOTAL, "op": "", "calls": 0, "wire_gb": 0.0, "ms": 0.0}
            )
            for key in ("calls", "wire_gb", "ms"):
                total[key] += row[key]
    for total in totals.values():
        yield total | {"speedup": totals["plain"]["ms"] / total["ms"]}


def _traffic(args: argparse.Namespace) -> list[Traffic]:
    micro = args.accumulation
    if args.zero == 3:
        return [
            Traffic("parameters, forward", "all_gather", PREFETCH, micro),
            Traffic("parameters, backward", "all_gather", PREFETCH, micro),
            Traffic("gradients", "reduce_scatter", BUCKET, micro),
        ]
    return [
        Traffic("gradients", "all_reduce", BUCKET, micro if args.zero == 2 else 1),
        Traffic("parameters", "all_gather", BUCKET, 1),
    ]


def _schedules(gpus: int, per_node: int) -> list[Schedule]:
    nodes = gpus // per_node
    plain = Schedule("plain", "plain", nodes, 1 / per_node, 1.0)
    if per_node == 1:
        return [plain, replace(plain, variant="coded", codec="coded")]
    flat = Schedule("coded, flat", "coded", gpus, 1.0, (gpus - per_node) / (gpus - 1))
    return [plain, flat, replace(plain, variant="coded, by nodes", codec="coded")]


def _slowed(profile: Profile, crossing: float) -> Profile:
    """The profile where only a part of the bytes crosses the link, and the rest is free."""
    return replace(profile, transfer=tuple((size / crossing, seconds) for size, seconds in profile.transfer))


def _sizes(total: int, bucket: int) -> list[tuple[int, int]]:
    """(bytes, how many) of the operations that move ``total`` bytes."""
    return [(size, count) for size, count in ((bucket, total // bucket), (total % bucket, 1)) if size and count]


def _points(args: argparse.Namespace, found: Speeds) -> Points:
    """The line ``latency + bytes / rate``, or what the profile measured."""
    if not args.link:
        return found.profile.transfer
    rate, latency = link.bits_per_second(args.link[0]) / 8, args.latency / 1e6
    return tuple((size, latency + size / rate) for size in (1.0, 1e9))


def _losses(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What does not pay, in words."""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        lost = [
            f"{row['what']} ({row['op']})"
            for row in rows
            if row["variant"] == variant and row["speedup"] < 1 and row["op"]
        ]
        if lost:
            yield f'{variant}: coding does not pay for {", ".join(lost)}: "auto" would pass'


def _check(args: argparse.Namespace) -> None:
    if args.params is None or args.gpus is None:
        raise ToolError("wanted are --params and --gpus, or --validate")
    if not (args.link or args.profile) or len(args.link or [0]) != 1 or args.link == [""]:
        raise ToolError("wanted is one --link RATE between nodes such as 400gbit, or the --profile of one")
    if args.link is None and not speeds.read(args.profile, args.dtype).link:
        raise ToolError(f"{args.profile} does not say how fast the link is: add --link RATE")
    if args.gpus_per_node < 1 or args.gpus % args.gpus_per_node or args.gpus < 2 * args.gpus_per_node:
        got = f"{args.gpus} GPUs, {args.gpus_per_node} a node"
        raise ToolError(
            f"wanted are at least two nodes with equally many GPUs, got {got}; inside a node nothing is planned"
        )
    if args.dtype not in ITEMSIZE:
        raise ToolError(f"--dtype is one of {', '.join(ITEMSIZE)}, got {args.dtype}")
    if args.accumulation < 1:
        raise ToolError(f"--accumulation must be at least 1, got {args.accumulation}")
    if not 0 < args.latency < math.inf or not (args.ratio is None or 0 < args.ratio < math.inf):
        raise ToolError(f"--latency and --ratio must be above 0, got {args.latency} and {args.ratio}")


def _count(text: str) -> int:
    """A number of at least 1, such as 70e9 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1; write 70e9 or 500000000")
    return int(value)
