"""``plan``: predicted time of the communication of a training step, plain and compressed, before any machine is rented.

    plan --params 70e9 --zero 3 --gpus 1024 --gpus-per-node 8 --link 400gbit

The model (formulas: ds_zipccl/policy/cost_model.py): in every micro-batch ZeRO-3 gathers the parameters forward and backward and
scatters the gradients. ZeRO-2 all-reduces the gradients in every micro-batch, ZeRO-1 once a step, and both gather the parameters once a
step. Operations have DeepSpeed's default sizes: 5e8 elements, and 5e7 for the gathers of ZeRO-3.

The coded variants do more than exponent coding, by keys of the section in ds_config.json:

* --owner-only auto: ZeRO-1 and ZeRO-2 send gradients to their owners only, by a reduce_scatter with half the bytes of the all_reduce.
  If a bucket is much smaller than the model, few ranks own it and take up to twice as long to receive the sums: ms includes that.
  With --round-robin (round_robin_gradients of DeepSpeed) all ranks own equal parts.
* --delta auto: ZeRO-1 and ZeRO-2 gather parameters as differences from the parameters of the last step. The ratio (4 for bf16) is
  that of the peak learning rate. It grows to between 10 and 70 as the rate decays: --delta-ratio.
* --zero3-base auto: ZeRO-3 keeps frozen parameters, and this plan has none; it prints the memory that they would take.
* --gradients CODEC: gradients by a lossy codec ("lossy" in ds_config.json). Bits and errors are expectations for dense gradients, which
  analyze --lossy measures on real ones. The speed is taken to be that of exponents. Sums by our schedules round once, all-reduces twice.
* --zero3-base host or device: ZeRO-3 gathers differences too. Only the first gather of a step finds changes ("parameters, first"). The
  gathers of the backward pass and of further micro-batches ("parameters, again") cost a few bits per block.

--link is the rate at which one GPU can send and receive between nodes at the same time: its share of the node's network cards.

Columns (also the keys of the rows in --json):

* variant: plain: uncompressed, by nodes: the GPUs with the same place in all nodes exchange, and traffic inside nodes is free. This
  estimate of NCCL's rings is optimistic. "coded, flat": every GPU sends to every other GPU; the part (gpus - gpus_per_node) /
  (gpus - 1) of its bytes leaves the node. "coded, by nodes": the schedule of plain, compressed between nodes; this release has it for
  gathers, and for sums with "reduction": "fp32". With one GPU per node both are the same: coded.
* calls: operations per step. wire_gb: 1e9 bytes that a GPU sends between nodes per step. ms: their time. speedup: plain ms / ms.
* only in --json: ratio: of the coding. exponents_ms: the time without differences.

Speeds come from this machine's CPU, or from --profile FILE. A profile has no speeds of differences: they are then planned as fast as
exponents and without hashes, which flatters them (on CPUs they take several times as long). Without --profile they are measured, with
the hashes that prove equal bases on all ranks. The copies of --zero3-base, out of the base and back, are included.

Left out: overlap with computing and between operations, congestion, the memory and time that coding takes from computing, other
traffic (scalars, MoE, pipeline), the exchange of hashes, and latency that grows with the number of ranks.

All of this is for gloo groups. plan --network predicts NCCL groups on GPUs, which are coded with "nccl": "on" (formulas:
ds_zipccl/policy/device_rules.py). It is a model: no GPU has run these schedules yet. --network names all network cards of a node, of which
collectives reach 95% by RDMA and 85% by TCP. Variants: plain: NCCL's rings. owners: ZeRO-1 and ZeRO-2 with gradients to their owners only,
uncoded. coded: as a job chooses its schedules: sums in two levels where that is faster, gathers coded where that is faster, how says which
lines are. The speed of the codec is assumed until docs/results/cuda.json has a measured one. With several networks only totals are shown;
--json has all rows. speedup is that of the communication alone.

A step is sped up less than its communication. --tflops and --tokens add the computing of a GPU, and a table of whole steps. --overlap is
the share of the computing during which communication goes on. Coding during hidden communication delays computing by as long as its
kernels run. --path slows a node's network down by a second way that every byte takes, --hop lets an operation take longer with every node.
Columns: ms: communication; codec_ms: kernels of the codec; computing_ms: without delays; step_ms: all; exposed: share of the step in which
GPUs only communicate; tflops: of one GPU over the step; step_speedup: plain step_ms / step_ms. --plot draws step_ms by network and
number of GPUs, from two nodes to --gpus; --json has these points as "scaling".

plan --clusters holds that model against runs of ZeRO-3 on 384 GPUs that others published. It prints the two fitted parameters. Columns:
figure, size of the model, links (network cards of a node), tokens: the run; measured: published TFLOPs of a GPU; predicted, off: those of
the model, and their error; unseen: the error if both parameters are fitted to the other figures; exposed: as above; fewer: published TFLOPs
of ZeRO++, which sends a quarter of the bytes; bytes_alone, bytes_off: the prediction from fewer bytes alone, and its error. The exit status
is 1 if a fitted cell is off by more than 10%.

plan --validate measures link and codec between ranks of this machine, predicts the rows of bench comm and measures them in the same
processes. Its columns: measured_ms; predicted_ms: for plain of gloo's own schedules, as far as they are known; off: predicted /
measured; ideal_ms: prediction for a bandwidth-optimal schedule. The exit status is 1 if raw or coded is off by more than 20%.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ds_zipccl.bench import (
    ToolError,
    clusters,
    data,
    device_plan,
    link,
    lossy_trial,
    speeds,
    tables,
    validate,
    whole_step,
)
from ds_zipccl.bench.step_plan import (
    EXPONENTS,
    GRADIENTS,
    ITEMSIZE,
    LOSSY,
    Coding,
    base_memory,
    differences,
    lossy,
    points,
    step,
    traffic,
)
from ds_zipccl.bench.tables import Column
from ds_zipccl.policy.cost_model import DELTA_RATIO

COLUMNS = (
    Column("what", width=20),
    Column("op", width=14),
    Column("calls", ",d", 7),
    Column("variant", width=15),
    Column("wire_gb", ".2f", 9),
    Column("ms", ".1f", 10),
    Column("speedup", ".2f"),
)

#: Remark on lines for which another way is faster than the one that they show.
INSTEAD = {
    "plain": 'coding does not pay for {}: "auto" would pass',
    "exponents": 'differences take longer than exponents for {}: "auto" would take these',
}
#: Options named like keys of the config: name, values with the default first, meaning.
SWITCHES = (
    ("owner-only", ("auto", "off"), "ZeRO-1/2: gradients to their owners only"),
    ("delta", ("auto", "off"), "parameters as differences"),
    ("zero3-base", ("auto", "off", "host", "device"), "place of the base for differences of ZeRO-3"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    parser.add_argument("--params", type=_count, metavar="P", help="parameters of the model, such as 70e9")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (3)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs per node (8)")
    parser.add_argument(
        "--link",
        nargs="+",
        type=link.parse,
        metavar="LINK",
        help="rate of one GPU, such as 400gbit; with --validate: network between the ranks",
    )
    parser.add_argument("--latency", type=float, default=10, metavar="US", help="microseconds of a small message (10)")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="file of plan --validate --json or bench codec --json with the speeds (this CPU)",
    )
    parser.add_argument("--ratio", type=float, metavar="R", help="ratio of the coding (measured on normal values)")
    for key, choices, about in SWITCHES:
        parser.add_argument(f"--{key}", choices=choices, default=choices[0], help=f"{about} ({choices[0]})")
    spread = "ZeRO-1/2: round_robin_gradients is true, so that all ranks own equal parts of every bucket"
    parser.add_argument("--round-robin", action="store_true", help=spread)
    parser.add_argument("--delta-ratio", type=float, metavar="R", help=f"ratio of differences (bf16: {DELTA_RATIO:g})")
    parser.add_argument(
        "--gradients",
        type=partial(lossy_trial.named, ()),
        metavar="CODEC",
        help="gradients by a lossy codec, such as round:3 (names and settings as in bench codec) (lossless)",
    )
    parser.add_argument("--accumulation", type=int, default=1, metavar="K", help="micro-batches per step (1)")
    parser.add_argument("--dtype", type=data.dtype, default="bfloat16", metavar="T", help="bf16 fp16 fp32 (bf16)")
    parser.add_argument(
        "--bucket", type=_count, metavar="BYTES", help="bytes of every operation (DeepSpeed's defaults)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    device_plan.add_arguments(parser)
    parser.add_argument(
        "--clusters",
        action="store_true",
        help="compare the model of whole steps with published runs; of other options only --json counts",
    )
    validate.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``plan``; 0, or with ``--validate`` 1 if the model is off."""
    if args.validate:
        return validate.main(args)
    if args.clusters:
        return clusters.main(args)
    _check(args)
    if args.network is not None:
        return device_plan.main(args)
    if not args.profile:
        tables.complain("# measuring this machine's CPU; the first time this builds kernels, which takes a while")
    found = speeds.read(args.profile, args.dtype) if args.profile else speeds.measured(args.dtype)
    if args.ratio:
        found = replace(found, ratio=args.ratio, about=f"{found.about}, overruled by --ratio")
    traffics = traffic(args)
    codings = {EXPONENTS: Coding(replace(found.profile, transfer=points(args, found)), found.ratio)}
    profile = codings[EXPONENTS].profile
    tables.say(f"speeds: {found.about}")
    tables.say(f"        {_about(codings[EXPONENTS], 'add')}")
    if args.gradients is not None:
        codings[LOSSY], about = lossy(args, codings[EXPONENTS])
        tables.say(f"        lossy gradients: {about}")
    kinds = {line.coding for line in traffics} - {EXPONENTS, LOSSY}
    if kinds:
        codings |= differences(args, profile)
        for kind in sorted(kinds):
            tables.say(f"        {kind} parameters: {_about(codings[kind])}")
        if args.profile:
            tables.say(
                f"        {args.profile} has no speeds of differences: planned as fast as exponents, which flatters them"
            )
    for line in base_memory(args):
        tables.say(line)
    whence = f"--link {args.link[0]}" if args.link else f"measured in {args.profile}"
    tables.say(f"link:   {8 * profile.bandwidth / 1e9:.4g} Gbit/s of one GPU, {whence}\n")
    rows = list(step(args, traffics, codings))
    table = tables.Table(COLUMNS)
    for row in rows:
        table.add(row)
    for line in _losses(rows, args.gradients is not None):
        tables.say(line)
    if args.json:
        more = {"profile": profile.to_json(), "ratio": found.ratio, "speeds": found.about}
        if args.gradients is not None:
            more["gradients"] = str(args.gradients)
        for kind in kinds:
            coding = codings[kind]
            more[kind] = {"encode": coding.profile.encode, "decode": coding.profile.decode, "ratio": coding.ratio}
        tables.write_json(args.json, rows, args.command, **more)
    return 0


def _about(coding: Coding, *more: str) -> str:
    named = ", ".join(f"{name} {getattr(coding.profile, name) / 1e9:.1f}" for name in ("encode", "decode", *more))
    return f"{named} GB/s; ratio {coding.ratio:.3f}"


def _losses(rows: list[dict[str, Any]], lossy: bool) -> Iterator[str]:
    """Remarks on lines for which compression or differences do not pay. ``lossy``: gradients have a lossy codec, and no way back."""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        lines = [row for row in rows if row["variant"] == variant and row["op"]]
        if lossy and any(row["what"] == GRADIENTS and _fastest(row) == "plain" for row in lines):
            yield f'{variant}: lossy gradients take longer than plain ones, and "auto" does not pass them: take the codec out'
        lines = [row for row in lines if not lossy or row["what"] != GRADIENTS]
        for fastest, text in INSTEAD.items():
            lost = ", ".join(f"{row['what']} ({row['op']})" for row in lines if _fastest(row) == fastest)
            if lost:
                yield f"{variant}: {text.format(lost)}"


def _fastest(row: dict[str, Any]) -> str:
    times = {"shown": row["ms"], "exponents": row["exponents_ms"], "plain": row["speedup"] * row["ms"]}
    return min(times, key=times.__getitem__)


def _check(args: argparse.Namespace) -> None:
    if args.params is None or args.gpus is None:
        raise ToolError("wanted are --params and --gpus, or --validate, or --clusters")
    if args.network is None:
        whole_step.refuse(args)
        _check_link(args)
    elif args.gradients is not None:
        raise ToolError(
            "--gradients is for gloo groups: NCCL groups pass lossy roles exact, so that --network takes none"
        )
    if args.gpus_per_node < 1 or args.gpus % args.gpus_per_node or args.gpus < 2 * args.gpus_per_node:
        got = f"{args.gpus} GPUs, {args.gpus_per_node} a node"
        raise ToolError(
            f"wanted are at least two nodes with equally many GPUs, got {got}; inside a node nothing is planned"
        )
    if args.dtype not in ITEMSIZE:
        raise ToolError(f"--dtype is one of {', '.join(ITEMSIZE)}, got {args.dtype}")
    if args.accumulation < 1:
        raise ToolError(f"--accumulation must be at least 1, got {args.accumulation}")
    if args.zero3_base in ("host", "device") and (args.zero != 3 or args.delta == "off"):
        raise ToolError(
            f"--zero3-base {args.zero3_base} is for differences of ZeRO-3: it wants --zero 3 and --delta auto"
        )
    if args.delta_ratio is not None and not 1 <= args.delta_ratio < math.inf:
        raise ToolError(f"--delta-ratio must be at least 1, got {args.delta_ratio}")
    if not 0 < args.latency < math.inf or not (args.ratio is None or 0 < args.ratio < math.inf):
        raise ToolError(f"--latency and --ratio must be above 0, got {args.latency} and {args.ratio}")


def _check_link(args: argparse.Namespace) -> None:
    if args.gpu_profile:
        raise ToolError(f"--gpu-profile {args.gpu_profile} is for GPUs on NCCL groups: it wants --network")
    if not (args.link or args.profile) or len(args.link or [0]) != 1 or args.link == [None]:
        raise ToolError("wanted is one --link RATE between nodes such as 400gbit, or a --profile with the rate of one")
    if args.link and not args.link[0].rate_only:
        raise ToolError(f"plan reckons with a rate alone, got --link {args.link[0]}: put its delay into --latency US")
    if args.link is None and not speeds.read(args.profile, args.dtype).link:
        raise ToolError(f"{args.profile} has no rate of the link: add --link RATE")


def _count(text: str) -> int:
    """A number of at least 1, such as 70e9 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1; write 70e9 or 500000000")
    return int(value)
