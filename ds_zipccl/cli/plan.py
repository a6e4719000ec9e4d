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
* --zero3-base auto: ZeRO-3 copies frozen parameters out of a base, which sends no values. At every copy each rank compares its shard; on
  gloo ranks ask each other then, on NCCL they agree once per step. host or device: trained parameters go as differences too. Only the
  first gather of a step finds changes ("parameters, first"); those of the backward pass and of further micro-batches ("parameters, again")
  are copies.
* --gradients CODEC: gradients by a lossy codec, at the speed of exponents. Bits and errors are expectations; bench codec measures.

Columns (also the keys of the rows in --json):

* variant: plain: NCCL's rings over all n GPUs, which bring (n-1)/n of the bytes into every node; on gloo the GPUs with the same place in
  all nodes exchange, and traffic inside nodes is free. coded: as the job chooses, in mode auto the fastest of coded and plain schedules.
* how: plain, coded, differences, copies (of a base) or lossy. calls: operations per step.
* wire_gb: 1e9 bytes that a GPU sends between nodes per step. ms: their time. speedup: plain ms / ms.

Where autoep_size (--expert-parallel) shares experts out, only the ranks with the same ones move their parameters, and --tokens adds the
exchanges of each layer: 2 forward and 2 backward of all its tokens, with even routing, without those that checkpointing repeats.
Not predicted: overlap between operations, congestion, the memory and time that coding takes from computing, traffic of pipelines.

NCCL groups: without --ds-config sums are coded, as with "nccl": "on". No network of GPUs has run these schedules yet: sums and gathers in
two levels. --gpu-profile has the speed of the codec. With several networks only totals are shown; --json has all rows, and the variant
owners: ZeRO-1 and ZeRO-2 with gradients to their owners only, plain.

--tflops and --tokens add the computing of a GPU, with the parameters that a token uses, and a table of whole steps. Coding during hidden
communication delays computing by the time of its kernels. Columns: ms: communication; codec_ms: kernels of the codec; computing_ms:
without delays; step_ms: all; exposed: share of the step in which GPUs only communicate; tflops: of one GPU over the step; step_speedup:
plain step_ms / step_ms. --json has the points of --plot as "scaling".

plan --clusters compares the model with published runs of ZeRO-3 on 384 GPUs, and fits two parameters. measured, predicted: TFLOPs of a
GPU; off: the error; unseen: that of a fit to the other figures; fewer: published TFLOPs of ZeRO++; bytes_alone, bytes_off: the prediction
from fewer bytes alone. The exit status is 1 beyond 10%. plan --validate measures link and codec between ranks of this machine, predicts
the rows of bench comm and measures them; ideal_ms: of a bandwidth-optimal schedule. The exit status is 1 beyond 20% for raw or coded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ds_zipccl.benchmarks import clusters, data
from ds_zipccl.benchmarks.codec import lossy as lossy_trial
from ds_zipccl.benchmarks.comm import validate
from ds_zipccl.benchmarks.links import link
from ds_zipccl.cli import ToolError, tables
from ds_zipccl.cli.planning import model, operations, rows, schedules, speeds, user_job
from ds_zipccl.cli.planning.operations import CHANGED, COPIED, LOSSY
from ds_zipccl.cli.planning.schedules import OWNERS, Coding, DeviceSchedules, HostSchedules, Row, about_lossy, codings
from ds_zipccl.cli.tables import Column
from ds_zipccl.policy.cost_model import DELTA_RATIO

_COMMON: tuple[Column, ...] = (Column("what", width=20), Column("op", width=14), Column("calls", ",d", 7))
_COMMON += (Column("variant", width=7), Column("how", width=11))
_TIMES = (Column("ms", ".1f", 10), Column("speedup", ".2f"))
HOST_COLUMNS = (*_COMMON, Column("wire_gb", ".2f", 9), *_TIMES)
DEVICE_COLUMNS = (Column("network", width=17), *_COMMON, *_TIMES)
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
    option("--backend", choices=("nccl", "gloo"), default="nccl", help="backend of the groups: gloo on CPUs (nccl)")
    option(
        "--network", nargs="*", type=speeds.network, metavar="NET",
        help="speed of the network: [CARDSx]RATE[-tcp]/node, all network cards of a node together, or RATE[-tcp]/gpu, the part of one GPU; "
        "on NCCL several, and no value: " + " ".join(speeds.NETWORKS),
    )  # fmt: skip
    option("--link", nargs="+", type=link.parse, metavar="LINK", help="with --validate: network between the ranks")
    option("--latency", type=tables.positive, default=10, metavar="US", help="microseconds of a small message (10)")
    about = "file of plan --validate --json or bench codec --json with the speeds (this CPU)"
    option("--profile", metavar="FILE", help=about)
    option("--ratio", type=tables.positive, metavar="R", help="ratio of the coding (measured on normal values)")
    for (key, choices), about in zip(operations.SWITCHES.items(), _ABOUT, strict=True):
        option(f"--{key.replace('_', '-')}", choices=choices, help=f"{about} ({choices[0]})")
    number, kept = tables.count(1e15), "stage3_max_live_parameters and, on top, those of the last module (1e9)"
    about = f"ZeRO-3: parameters kept from the forward pass for the backward pass: {kept}"
    option("--live", type=lambda t: 0 if t == "0" else number(t), metavar="P", help=about)
    spread = "ZeRO-1/2: round_robin_gradients is true, so that all ranks own equal parts of every bucket"
    option("--round-robin", action="store_const", const=True, help=spread)
    option("--delta-ratio", type=float, metavar="R", help=f"ratio of differences (bf16: {DELTA_RATIO:g})")
    about = "gradients by a lossy codec, such as round:3 (names and settings as in bench codec) (lossless)"
    option("--gradients", type=partial(lossy_trial.named, ()), metavar="CODEC", help=about)
    option("--accumulation", type=tables.count(1e6), metavar="K", help="micro-batches per step (1)")
    option("--dtype", type=data.dtype, metavar="T", help="bf16 fp16 fp32 (bf16)")
    option("--bucket", type=tables.count(1e15), metavar="BYTES", help="bytes of every operation (DeepSpeed's defaults)")
    option("--json", metavar="FILE", help="write the rows here too")
    option(
        "--gpu-profile", metavar="NAME",
        help=f"with --backend nccl: {' '.join(speeds.ASSUMED)}, or a file of bench codec --device cuda --json "
        "(docs/results/cuda.json where it has the dtype, else assumed-1.0)",
    )  # fmt: skip
    rows.add_arguments(parser)
    about = "compare the model of whole steps with published runs; of other options only --json counts"
    option("--clusters", action="store_true", help=about)
    validate.add_arguments(parser)


#: The groups of a job on each network, by its name; columns of the table; further keys of ``--json``.
_Groups = tuple[dict[str, schedules.Schedules], Sequence[Column], dict[str, Any]]


def main(args: argparse.Namespace) -> int:
    """Run ``plan``; 0, or with ``--validate`` 1 if the model is off."""
    if args.validate:
        return validate.main(args)
    args = _with_files(args)
    if args.clusters:
        return clusters.main(args)
    _check(args)
    nccl = args.backend == "nccl"
    work = rows.computing(args) if nccl else None
    if args.plot:
        from ds_zipccl.benchmarks import plots  # before the model: matplotlib may be missing

    groups, columns, more = _on_nccl(args) if nccl else _on_gloo(args)
    planned = [row for each in groups.values() for row in rows.step(each)]
    shown = (row for row in planned if len(groups) == 1 or row["what"] == operations.TOTAL)
    tables.show(columns, (row for row in shown if row["variant"] != OWNERS))
    for remark in _remarks(args, planned):
        tables.say(remark)
    if work is not None:
        tables.say()
        more["steps"] = tables.show(rows.WHOLE_COLUMNS, rows.whole_steps(args, planned, work))
    more["answers"] = [rows.answer(where, each, work) for where, each in groups.items()]
    for line in more["answers"]:
        tables.say(line)
    if work is not None and args.plot:
        more["scaling"] = list(_scaling(args, groups.values(), work))
        plots.scaling(args.plot, more["scaling"])
    if args.json:
        tables.write_json(args.json, planned, args.command, **more)
    return 0


def _with_files(args: argparse.Namespace) -> argparse.Namespace:
    """Print the job and the model that files describe, and return the options with their values."""
    known: dict[str, Any] = {}
    if args.ds_config:
        from ds_zipccl.cli.planning import job as job_plan  # imports torch, which `plan --help` does not need
        from ds_zipccl.comm.reduction_order import match_refused
        from ds_zipccl.integration import bypassed

        job = user_job.read(args.ds_config, args.gpus, args.model and model.read(args.model).hidden)
        refused = match_refused(job.config, args.gpus or 0) if args.backend == "nccl" else ""
        if reason := job_plan.unpredicted(job, "cpu", "gloo") or refused:
            raise ToolError(f"{args.ds_config}: {reason}")
        known = job.options() | ({"gradients": None} if args.backend == "nccl" else {})
    args = model.fill(args, **known)
    if args.about:
        tables.say(f"model: {args.about}")
    if args.ds_config:
        tables.say(f"job:   {args.ds_config}: ZeRO-{args.zero}, {args.dtype}, accumulation {args.accumulation}")
        for note in (*job.notes, *bypassed.lines(bypassed.Facts(job.content))):
            tables.say(f"       {note}")
    return args


def _on_gloo(args: argparse.Namespace) -> _Groups:
    """Print the speeds of hosts, and return the groups on gloo."""
    if not args.profile:
        tables.complain("# measuring this machine's CPU; the first time this builds kernels, which takes a while")
    found = speeds.read(args.profile, args.dtype) if args.profile else speeds.measured(args.dtype)
    if args.ratio:
        found = replace(found, ratio=args.ratio, about=f"{found.about}, overruled by --ratio")
    profile = found.profile
    if args.network:
        profile = replace(profile, transfer=args.network[0].points(args.gpus_per_node, args.latency / 1e6))
    exponents = Coding(profile, found.ratio)
    tables.say(f"speeds: {found.about}")
    tables.say(f"        {_about(exponents, 'add')}")
    if args.gradients is not None:
        tables.say(f"        lossy gradients: {about_lossy(args, exponents)}")
    if args.delta == "auto" and not args.profile and (lacking := speeds.no_differences()):
        args.delta = "off"
        tables.say(f"        delta is off: {lacking}")
    wanted = [*([LOSSY] if args.gradients is not None else []), CHANGED, COPIED]
    coded = codings(args, exponents, wanted)
    used = {line.coding for line in operations.traffic(args)}
    if CHANGED in used:
        tables.say(f"        changed parameters: {_about(coded[CHANGED])}")
    if COPIED in used:
        tables.say(f"        copies of a base: {coded[COPIED].profile.copy / 1e9:.1f} GB/s")
    if args.profile and used & {CHANGED, COPIED}:
        tables.say(f"        {args.profile} has no speeds of differences and copies: planned as fast as exponents")
    where = args.network[0].text if args.network else args.profile
    tables.say(f"network: {where}, gloo: {8 * profile.bandwidth / 1e9:.4g} Gbit/s of one GPU\n")
    changed = coded[CHANGED]
    more: dict[str, Any] = {"profile": profile.to_json(), "ratio": found.ratio, "speeds": found.about, "answers": []}
    if args.gradients is not None:
        more["gradients"] = str(args.gradients)
    more[CHANGED] = {"encode": changed.profile.encode, "decode": changed.profile.decode, "ratio": changed.ratio}
    return {where: HostSchedules(args, coded)}, HOST_COLUMNS, more


def _on_nccl(args: argparse.Namespace) -> _Groups:
    """Print the speeds of devices, and return the NCCL groups on every network."""
    networks = args.network or [speeds.network(text) for text in speeds.NETWORKS]
    codec = speeds.device_codec(args.gpu_profile, args.dtype)
    tables.say("model of NCCL groups: no network of GPUs has run these schedules yet")
    tables.say(f"codec: {codec.about}")
    found = ((each.text, DeviceSchedules.modelled(args, each, codec)) for each in networks)
    # "Computed" is the word of the documentation for figures of a model.
    return dict(found), DEVICE_COLUMNS, {"codec": codec._asdict(), "made": "Computed"}


def _about(coding: Coding, *more: str) -> str:
    named = ", ".join(f"{name} {getattr(coding.profile, name) / 1e9:.1f}" for name in ("encode", "decode", *more))
    return f"{named} GB/s; ratio {coding.ratio:.3f}"


def _remarks(args: argparse.Namespace, planned: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from operations.base_memory(args)
    if args.expert_parallel > 1 and not (args.moe and args.tokens):
        lacks = "their exchanges of tokens are not predicted without --tokens"
        yield f"experts: {lacks if args.moe else 'all count on every rank; --model without --params tells them apart'}"
    if args.backend == "gloo":
        slow = any(row["what"] == operations.GRADIENTS and row["speedup"] < 1 for row in planned)
        if args.gradients is not None and slow:
            yield 'lossy gradients take longer than plain ones, and "auto" does not pass them: take the codec out'
        return
    if args.tflops is None:
        yield "these are times of communication alone; --tflops and --tokens add computing, and a step is sped up less"


def _scaling(args: argparse.Namespace, groups: Iterable[schedules.Schedules], work: rows.Computing) -> Iterator[Row]:
    """The whole steps of fewer GPUs, for the picture."""
    for gpus in rows.counts(args):
        fewer = argparse.Namespace(**vars(args) | {"gpus": gpus})
        for each in groups:
            yield from rows.whole_steps(fewer, list(rows.step(replace(each, args=fewer))), work)


def _check(args: argparse.Namespace) -> None:
    needed = {"--gpus": args.gpus, "--params or --model": args.params}
    if missing := [option for option, value in needed.items() if value is None]:
        raise ToolError(f"missing: {' and '.join(missing)}; or ask for --validate or --clusters")
    if args.link:
        rate = link.name(args.link[0]).partition(",")[0]
        networks = f"--network {rate}/gpu, or {rate}/node for all GPUs of a node together; a delay is --latency US"
        raise ToolError(f"--link is for --validate: write --backend gloo {networks}")
    if args.backend == "gloo":
        rows.refuse(args)
        _check_gloo(args)
    elif args.network is None or args.profile:
        wanted = "--network, such as --network 8x100gbit/node, and --gpu-profile has the codec's speeds"
        raise ToolError(f"NCCL groups want {wanted}; --profile is for --backend gloo")
    elif args.gradients is not None:
        raise ToolError("--gradients is for --backend gloo: NCCL groups pass lossy roles exact")
    if args.gpus % args.gpus_per_node or args.gpus < 2 * args.gpus_per_node:
        got = f"{args.gpus} GPUs, {args.gpus_per_node} a node"
        raise ToolError(f"wanted are two nodes or more with equally many GPUs, got {got}; one node is not planned")
    each, shared, number = args.gpus_per_node, args.expert_parallel, args.moe.experts[0] if args.moe else 0
    if number % shared or args.gpus % shared or (each % shared and shared % each):
        raise ToolError(f"autoep_size is {shared}, wanted is a divisor of experts and GPUs, part or multiple of a node")
    if args.dtype not in operations.ITEMSIZE:
        raise ToolError(f"--dtype is one of {', '.join(operations.ITEMSIZE)}, got {args.dtype}")
    if args.zero3_base in ("host", "device") and (args.zero != 3 or args.delta == "off"):
        raise ToolError(f"--zero3-base {args.zero3_base} is for differences of ZeRO-3: add --zero 3 and --delta auto")
    if args.delta_ratio is not None and not 1 <= args.delta_ratio < math.inf:
        raise ToolError(f"--delta-ratio must be at least 1, got {args.delta_ratio}")
    if args.latency > 1e9:
        raise ToolError(f"--latency must be at most 1e9, got {args.latency:g}")


def _check_gloo(args: argparse.Namespace) -> None:
    if args.gpu_profile:
        raise ToolError(f"--gpu-profile {args.gpu_profile} is for --backend nccl; --profile has the speeds of a CPU")
    if not (args.network or args.profile) or len(args.network or [0]) != 1:
        raise ToolError("wanted is one --network such as 10gbit/node, or a --profile with the rate of a link")
    if not args.network and not speeds.read(args.profile, args.dtype).link:
        raise ToolError(f"{args.profile} has no rate of the link: add --network")
