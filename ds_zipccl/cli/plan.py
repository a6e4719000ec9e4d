"""``plan``: predicted time of the communication of a training step, plain and compressed, before any machine is rented.

    plan --ds-config ds_config.json --model config.json --adapter adapter_config.json --gpus 16 --network 10gbit-tcp/node
    plan --params 7e9 --trainable 20e6 --gpus 16 --gpus-per-node 8 --network 10gbit-tcp/node

The last line is the answer: seconds of communication of a plain step, with the default config, with the section of --ds-config, and with
keys that gain more. Options on the command line precede the files of the job. An adapter beside the model counts if --adapter names it.
Of the section count enabled, mode, roles, reduction, nccl, min_bytes, nccl_min_bytes, zero3_base_mib and the keys that are options here.
Without gradient_accumulation_steps the micro-batches of a step follow from the batch sizes and --gpus, as in DeepSpeed. Buckets that are
"auto" have the sizes that Trainer and Accelerate fill in for the width of --model.

--network is the speed between nodes, each way. -tcp is for NCCL over TCP, whose collectives reach 85% of it; by RDMA they reach 95%.
--trainable is for LoRA and partial fine-tuning: only these parameters have gradients, and ZeRO-3 copies the frozen rest out of a base.

The model (formulas: ds_zipccl/policy/cost_model.py): in every micro-batch ZeRO-3 gathers the parameters forward and backward and scatters
the gradients. ZeRO-2 all-reduces the gradients in every micro-batch, ZeRO-1 once per step; both gather the parameters once per step.
Operations have the sizes of --ds-config, else DeepSpeed's. These keys change more than the coding:

* --owner-only auto: ZeRO-1 and ZeRO-2 send gradients to their owners only, by a reduce_scatter with half the bytes of the all_reduce.
  A bucket that is much smaller than the model has few owners, which take up to twice as long to receive the sums; ms includes that.
* --delta auto: ZeRO-1 and ZeRO-2 gather parameters as differences from the last step. The ratio (4 for bf16) is that of the peak learning
  rate. It grows to between 10 and 70 as the rate decays: --delta-ratio.
* --zero3-base auto: ZeRO-3 copies frozen parameters out of a base, which sends no values between nodes: from the host, or from the GPUs of
  the node where they are faster. host, node or device: trained parameters go as differences too. Only the first gather of a step finds
  changes ("parameters, first"); those of the backward pass and of further micro-batches ("parameters, again") are copies.

Columns (also the keys of the rows in --json):

* variant: plain: NCCL's rings over all n GPUs, which bring (n-1)/n of the bytes into every node. coded: as the job chooses, in mode auto
  the fastest of coded and plain schedules. node: coded, with "zero3_base": "node", in total.
* how: plain, coded, differences or copies (of a base). calls: operations per step. ms: their time. between_gb: GB that a node sends to
  other nodes. speedup: plain ms / ms.

Where autoep_size (--expert-parallel) shares experts out, only the ranks with the same ones move their parameters, and --tokens adds the
exchanges of each layer: 2 forward and 2 backward of all its tokens, with even routing, without those that checkpointing repeats.
Not predicted: overlap between operations, congestion, the memory and time that coding takes from computing, traffic of pipelines.

Groups are NCCL's. No network of GPUs has run these schedules yet: sums and gathers in two levels. --gpu-profile has the speed of the
codec. With several networks only totals are shown; --json has all rows.

--tflops and --tokens add the computing of a GPU, with the parameters that a token uses, and a table of whole steps. Coding during hidden
communication delays computing by the time of its kernels (assumed). Columns: ms: communication; codec_ms: kernels of the codec;
computing_ms: without delays; step_ms: all; exposed: share of the step in which GPUs only communicate; tflops: of one GPU over the step;
step_speedup: plain step_ms / step_ms. --json has the points of --plot as "scaling".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ds_zipccl.cli.planning import model, operations, rows, speeds, user_job
from ds_zipccl.cli.planning.schedules import DeviceSchedules, Row
from ds_zipccl.policy.cost_model import DELTA_RATIO
from ds_zipccl.tools import ToolError, data, tables
from ds_zipccl.tools.tables import Column

COLUMNS: tuple[Column, ...] = (Column("network", width=17), Column("what", width=20), Column("op", width=14))
COLUMNS += (Column("calls", ",d", 7), Column("variant", width=7), Column("how", width=11))
COLUMNS += (Column("ms", ".1f", 10), Column("between_gb", ".2f"), Column("speedup", ".2f"))
#: Meaning of the options that are keys of the section, as in operations.SWITCHES.
_ABOUT = ("ZeRO-1/2: gradients to their owners only", "parameters as differences", "ZeRO-3: place of the base")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    option = parser.add_argument
    config = "DeepSpeed config of the job, for the options from --zero on; options on the command line precede it"
    option("--ds-config", metavar="FILE", help=config)
    model.add_arguments(parser)
    option("--zero", type=int, choices=(1, 2, 3), help="ZeRO stage (3)")
    option("--gpus", type=tables.count(1e7), metavar="N", help="number of GPUs")
    option("--gpus-per-node", type=tables.count(1e4), default=8, metavar="N", help="GPUs per node (8)")
    option("--expert-parallel", type=tables.count(1e6), metavar="N", help="ranks that share experts out (1)")
    option(
        "--network", nargs="*", type=speeds.network, metavar="NET",
        help="speed of the network: [CARDSx]RATE[-tcp]/node, all network cards of a node together, or RATE[-tcp]/gpu, the part of one GPU; "
        "several, and no value: " + " ".join(speeds.NETWORKS),
    )  # fmt: skip
    option("--ratio", type=tables.positive, metavar="R", help="ratio of the coding (measured on normal values)")
    for (key, choices), about in zip(operations.SWITCHES.items(), _ABOUT, strict=True):
        option(f"--{key.replace('_', '-')}", choices=choices, help=f"{about} ({choices[0]})")
    number, kept = tables.count(1e15), "stage3_max_live_parameters and, on top, those of the last module (1e9)"
    about = f"ZeRO-3: parameters kept from the forward pass for the backward pass: {kept}"
    option("--live", type=lambda t: 0 if t == "0" else number(t), metavar="P", help=about)
    spread = "ZeRO-1/2: round_robin_gradients is true, so that all ranks own equal parts of every bucket"
    option("--round-robin", action="store_const", const=True, help=spread)
    option("--delta-ratio", type=float, metavar="R", help=f"ratio of differences (bf16: {DELTA_RATIO:g})")
    option("--accumulation", type=tables.count(1e6), metavar="K", help="micro-batches per step (1)")
    option("--dtype", type=data.dtype, metavar="T", help="bf16 fp16 fp32 (bf16)")
    option("--bucket", type=tables.count(1e15), metavar="BYTES", help="bytes of every operation (DeepSpeed's defaults)")
    option("--json", metavar="FILE", help="write the rows here too")
    option(
        "--gpu-profile", metavar="NAME",
        help=f"{' '.join(speeds.ASSUMED)}, or a file of bench codec --device cuda --json "
        "(docs/results/cuda.json where it has the dtype, else assumed-1.0)",
    )  # fmt: skip
    rows.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``plan``; always 0."""
    args = _with_files(args)
    _check(args)
    work = rows.computing(args)
    if args.plot:
        from ds_zipccl.tools import plots  # before the model: matplotlib may be missing

    codec = speeds.device_codec(args.gpu_profile, args.dtype)
    tables.say("model of NCCL groups: no network of GPUs has run these schedules yet")
    tables.say(f"codec: {codec.about}")
    networks = args.network or [speeds.network(text) for text in speeds.NETWORKS]
    groups = [DeviceSchedules.modelled(args, each, codec) for each in networks]
    # "Computed" is the word of the documentation for figures of a model.
    more: dict[str, Any] = {"codec": codec._asdict(), "made": "Computed"}
    planned = [row for each in groups for row in rows.step(each)]
    shown = (row for row in planned if len(groups) == 1 or row["what"] == operations.TOTAL)
    tables.show(COLUMNS, shown)
    for remark in _remarks(args):
        tables.say(remark)
    if work is not None:
        tables.say()
        more["steps"] = tables.show(rows.WHOLE_COLUMNS, rows.whole_steps(args, planned, work))
    more["answers"] = [rows.answer(each, work) for each in groups]
    for line in more["answers"]:
        tables.say(line)
    if work is not None and args.plot:
        more["scaling"] = list(_scaling(args, groups, work))
        plots.scaling(args.plot, more["scaling"])
    if args.json:
        tables.write_json(args.json, planned, args.command, **more)
    return 0


def _with_files(args: argparse.Namespace) -> argparse.Namespace:
    """Print the job and the model that files describe, and return the options with their values."""
    known: dict[str, Any] = {}
    if args.ds_config:
        from ds_zipccl.cli.planning import job as job_plan  # imports torch, which `plan --help` does not need
        from ds_zipccl.integration import bypassed

        job = user_job.read(args.ds_config, args.gpus, args.model and model.read(args.model).hidden)
        if reason := job_plan.unpredicted(job, "cpu", "gloo"):
            raise ToolError(f"{args.ds_config}: {reason}")
        known = job.options() | {"gradients": None}  # on NCCL lossy roles are not planned
    args = model.fill(args, **known)
    if args.about:
        tables.say(f"model: {args.about}")
    if args.ds_config:
        tables.say(f"job:   {args.ds_config}: ZeRO-{args.zero}, {args.dtype}, accumulation {args.accumulation}")
        for note in (*job.notes, *bypassed.lines(bypassed.Facts(job.content))):
            tables.say(f"       {note}")
    return args


def _remarks(args: argparse.Namespace) -> Iterator[str]:
    yield from operations.base_memory(args)
    if args.expert_parallel > 1 and not (args.moe and args.tokens):
        lacks = "their exchanges of tokens are not predicted without --tokens"
        yield f"experts: {lacks if args.moe else 'all count on every rank; --model without --params tells them apart'}"
    if args.tflops is None:
        yield "these are times of communication alone; --tflops and --tokens add computing, and a step is sped up less"


def _scaling(args: argparse.Namespace, groups: Iterable[DeviceSchedules], work: rows.Computing) -> Iterator[Row]:
    """The whole steps of fewer GPUs, for the picture."""
    for gpus in rows.counts(args):
        fewer = argparse.Namespace(**vars(args) | {"gpus": gpus})
        for each in groups:
            yield from rows.whole_steps(fewer, list(rows.step(replace(each, args=fewer))), work)


def _check(args: argparse.Namespace) -> None:
    needed = {"--gpus": args.gpus, "--params or --model": args.params}
    needed["--network, such as --network 8x100gbit/node"] = args.network
    if missing := [option for option, value in needed.items() if value is None]:
        raise ToolError(f"missing: {' and '.join(missing)}")
    if args.gpus % args.gpus_per_node or args.gpus < 2 * args.gpus_per_node:
        got = f"{args.gpus} GPUs, {args.gpus_per_node} a node"
        raise ToolError(f"wanted are two nodes or more with equally many GPUs, got {got}; one node is not planned")
    each, shared, number = args.gpus_per_node, args.expert_parallel, args.moe.experts[0] if args.moe else 0
    if number % shared or args.gpus % shared or (each % shared and shared % each):
        raise ToolError(f"autoep_size is {shared}, wanted is a divisor of experts and GPUs, part or multiple of a node")
    if args.dtype not in operations.ITEMSIZE:
        raise ToolError(f"--dtype is one of {', '.join(operations.ITEMSIZE)}, got {args.dtype}")
    if args.zero3_base not in ("auto", "off") and (args.zero != 3 or args.delta == "off"):
        raise ToolError(f"--zero3-base {args.zero3_base} is for differences of ZeRO-3: add --zero 3 and --delta auto")
    if args.delta_ratio is not None and not 1 <= args.delta_ratio < math.inf:
        raise ToolError(f"--delta-ratio must be at least 1, got {args.delta_ratio}")
