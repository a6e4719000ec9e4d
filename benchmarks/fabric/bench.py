"""``--fabric 2x8@100gbit`` trains a real DeepSpeed engine as rank 0 of NODESxGPUS over a network that is modelled.

There is one process, and its peers do not exist. DeepSpeed, our schedules and their order on streams are real;
collectives, kernels of the codec and copies take the seconds of ``plan``'s model, in plain runs too. The model has the
parameters of --layers layers of Llama 7B and no arithmetic; with --tflops and --tokens its passes take the time of
their products. So a row says what an engine makes of a network, and nothing about bits. Variant ``coded`` is the
default section, as after first steps and a trial that have found coding right and faster. Streams are a clock, so that
steps take equal times on every machine; with ``--backend nccl`` they are those of a GPU. Options: --workload (zero1,
zero2, zero3, lora), --variants (plain, coded), --steps, --set, --json. Columns, of the last step:

* ``fabric``: nodes x GPUs of a node @ speed of a node's network cards, as --network of ``plan``, without "/node".
* ``step_ms``: modelled, communication alone without --tflops. ``wire_ms``: modelled, of all collectives.
* ``plan_ms``: communication of a step by ``plan`` for this config. ``of_plan``: step_ms / plan_ms, without --tflops.
* ``between_gb``: GB that a node sends to others in a step. ``collectives``: of a step, those of schedules included.
* ``gather_us``, ``sum_us``: measured: median microseconds of this machine's Python in a call of DeepSpeed for a gather,
  or a sum of gradients. A GPU adds its launches. On CPUs the work between calls has emptied the caches, which a GPU's
  does not: :mod:`ds_zipccl.benchmarks.comm.host_time` has the times of warm ones.
* ``speedup``: step_ms of plain / step_ms.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_zipccl.benchmarks.comm.variants import settings
from ds_zipccl.cli import plan
from ds_zipccl.cli.planning import model, rows, speeds, user_job
from ds_zipccl.cli.planning.operations import LIVE, TOTAL
from ds_zipccl.cli.planning.schedules import DeviceSchedules
from ds_zipccl.policy.cost_model import DeviceProfile
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    from ds_zipccl.benchmarks.fabric.job import Job

#: Trains a job, whose text follows.
COMMAND = (sys.executable, "-m", "ds_zipccl.benchmarks.fabric.job")
#: Workload -> ZeRO stage, and whether only adapters are trained.
WORKLOADS = {"zero1": (1, False), "zero2": (2, False), "zero3": (3, False), "lora": (3, True)}
#: Section of the variants: the default, as after first steps and a trial that have found coding right and faster.
SECTIONS: dict[str, dict[str, Any] | None] = {"plain": None, "coded": {"enabled": True, "nccl": "on"}}
COLUMNS = (
    Column("workload", width=8),
    Column("fabric", width=16),
    Column("variant", width=7),
    *tables.alike("step_ms wire_ms plan_ms", ".1f", 9),
    Column("of_plan", ".3f"),
    Column("between_gb", ".3f"),
    Column("collectives", "d"),
    *tables.alike("gather_us sum_us", ".0f"),
    Column("speedup", ".2f"),
)
#: Lets a process keep the memory that it frees, as a GPU's allocator does: to give it back takes milliseconds of a call.
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
#: Layers of Llama 7B; parameters of a layer in LoRA's adapters, and all others.
_LAYERS, _ADAPTERS, _LAYER = 32, 2 * 2 * 16 * 4096, 4 * 4096**2 + 3 * 4096 * 11008


class Fabric(NamedTuple):
    """``text`` as the user typed it."""

    text: str
    nodes: int
    each: int
    network: speeds.Network


def parse(text: str) -> Fabric:
    """``NODESxGPUS@[CARDSx]RATE[-tcp]`` (argparse type).

    Raises:
        ArgumentTypeError: the text is no fabric of two nodes or more.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(.+)", text.lower())
    if match is None or int(match[1]) < 2:
        wanted = "NODESxGPUS@RATE with two nodes or more: 2x8@100gbit, 4x8@25gbit-tcp, 8x8@8x400gbit"
        raise argparse.ArgumentTypeError(f"{text!r} is no fabric; write {wanted}")
    return Fabric(text, int(match[1]), int(match[2]), speeds.network(f"{match[3].removesuffix('/node')}/node"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the fabric."""
    option = parser.add_argument
    about = "modelled networks, NODESxGPUS@[CARDSx]RATE[-tcp]; more is in the text above"
    option("--fabric", nargs="+", type=parse, default=[], metavar="FABRIC", help=about)
    option("--layers", type=int, default=8, metavar="N", help="with --fabric: layers of Llama 7B (default: 8)")
    option("--tflops", type=tables.positive, metavar="T", help="with --fabric: 1e12 operations per second of a GPU")
    option("--tokens", type=tables.count(1e9), metavar="K", help="with --fabric and --tflops: of a micro-batch")


def main(args: argparse.Namespace) -> int:
    """Run ``bench train --fabric``; 0.

    Raises:
        ToolError: an option is not for the fabric, or a run failed.
    """
    if unknown := sorted({*args.workload} - {*WORKLOADS}) + sorted({*args.variants} - {*SECTIONS}):
        has = f"workloads {', '.join(WORKLOADS)} and variants {', '.join(SECTIONS)}"
        raise ToolError(f"--fabric has {has}, got {', '.join(unknown)}")
    if (args.tflops is None) != (args.tokens is None):
        raise ToolError(f"computing wants --tflops and --tokens, got {args.tflops} and {args.tokens}")
    table, found = tables.Table(COLUMNS), []
    codec = speeds.device_codec(None, "bfloat16")
    tables.say(f"modelled: network, kernels of the codec ({codec.about}) and copies; measured: microseconds of Python")
    for workload in args.workload:
        for fabric in args.fabric:
            network = fabric.network.reach * fabric.network.rate
            profile = DeviceProfile(network, encode=codec.encode, decode=codec.decode)
            plain = None
            for variant in dict.fromkeys(("plain", *args.variants)):
                tables.complain(f"# {workload}, {fabric.text}, {variant}")
                job = _job(workload, variant, fabric, profile, args)
                row = {"workload": workload, "fabric": fabric.text, "variant": variant}
                row |= _row(run(job, args.timeout)[-1], planned(job), bool(args.tflops))
                plain = plain or row
                found.append(row | {"speedup": plain["step_ms"] / row["step_ms"]})
                table.add(found[-1])
                if args.json:
                    more = {"layers": args.layers, "codec": codec._asdict(), "made": "Computed"}
                    tables.write_json(args.json, found, args.command, **more)
    return 0


def _job(workload: str, variant: str, fabric: Fabric, profile: DeviceProfile, args: argparse.Namespace) -> Job:
    from ds_zipccl.benchmarks.fabric.job import Job  # imports torch, which `bench train --help` does not need

    stage, lora = WORKLOADS[workload]
    section, zero = SECTIONS[variant], {"stage": stage}
    if lora:
        zero |= {"stage3_param_persistence_threshold": 10 * 4096}  # as Trainer fills it in for "auto"
    elif stage == 3:  # as large a part of the model as of all layers; with less than 1e9 there are no bases
        kept = "stage3_max_live_parameters", "stage3_max_reuse_distance"
        zero |= dict.fromkeys(kept, LIVE * args.layers // _LAYERS)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": zero,
        "zipccl": {"enabled": False} if section is None else section | settings(args.set, variant, section),
    }
    device = "cuda" if args.backend == "nccl" else "cpu"
    where = fabric.nodes, fabric.each, asdict(profile), config
    return Job(*where, args.layers, args.steps, lora, args.tflops or 0.0, args.tokens or 0.0, device)


def run(job: Job, timeout: float) -> list[dict[str, Any]]:
    """Train in a new process, and return the rows of its steps. Blocks for ``timeout`` seconds at most.

    Raises:
        ToolError: the process failed; the message ends with the last lines of its output.
    """
    command = [*COMMAND, job.text()]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ZIPCCL"} | _KEPT
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"the training took longer than {timeout:.0f} s; see --timeout") from error
    lines = done.stdout.splitlines()
    if done.returncode:
        raise ToolError(
            f"the training ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    steps: list[dict[str, Any]] = next(json.loads(line) for line in reversed(lines) if line.startswith('[{"step_ms"'))
    return steps


def planned(job: Job) -> dict[str, Any]:
    """Return the row of ``plan`` for the communication of a step of a job: all operations, plain or as it chooses."""
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    ranks, params = job.nodes * job.each, job.layers * (_LAYER + job.lora * _ADAPTERS)
    words = f"--params {params} --gpus {ranks} --gpus-per-node {job.each} --network 1gbit/node"
    words += f" --trainable {job.layers * _ADAPTERS}" if job.lora else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(job.config))
        known = user_job.read(str(path), ranks).options() | {"gradients": None}
    args = model.fill(parser.parse_args(words.split()), **known)
    variant = "coded" if args.section.enabled else "plain"
    found = rows.step(DeviceSchedules(args, DeviceProfile(**job.profile)))
    return next(row for row in found if (row["what"], row["variant"]) == (TOTAL, variant))


def _row(step: dict[str, Any], plan_row: dict[str, Any], computing: bool) -> dict[str, Any]:
    """Return the columns of a step."""
    sums = [step["calls"].get(name, [0, None]) for name in ("reduce_scatter_tensor", "all_reduce")]
    return {
        **{key: step[key] for key in ("step_ms", "wire_ms", "between_gb", "collectives", "calls")},
        "plan_ms": plan_row["ms"],
        "of_plan": None if computing else step["step_ms"] / plan_row["ms"],
        "gather_us": step["calls"].get("all_gather_into_tensor", [0, None])[1],
        "sum_us": max(sums, key=lambda one: one[1] or 0.0)[1],
    }
