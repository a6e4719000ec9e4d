"""Rows and answers of ``plan``: the operations of a step with their schedules, their totals, and whole steps with computing."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ds_zipccl.cli.planning.operations import CODED, PLAIN, TOTAL, USUAL, default_config, operations, proposals
from ds_zipccl.cli.planning.schedules import DeviceSchedules, Row, groups
from ds_zipccl.policy.cost_model import HOP_S, STEP_S
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

#: A time that is shorter by less than the first factor is no gain (seed: the error of the model); the second names a further key.
GAIN, WORTH = 1.02, 1.1
#: Keys of the rows that the total row adds up.
SUMMED = ("calls", "ms", "codec_ms", "between_gb")
#: Variant of a job with ``"zero3_base": "node"``.
NODE = "node"


def step(found: DeviceSchedules) -> Iterator[dict[str, Any]]:
    """Yield the rows of a step, one for each line and variant, columns as in ``plan --help``. Then totals; the last is that of the job."""
    totals: dict[str, dict[str, Any]] = {}
    for word, group, line in ((word, group, line) for word, group, lines in groups(found) for line in lines):
        calls = line.times * sum(count for _, count in operations(group.args, line))
        chosen = group.chosen(line)
        for variant, times in chosen.items():
            what = (word + line.what).replace("experts, parameters, ", "experts, ")
            row = {"network": found.network, "what": what, "op": "", "calls": calls, "variant": variant} | times
            yield row | {"speedup": chosen[PLAIN]["ms"] / row["ms"]}
            empty = {"what": TOTAL, "op": "", "how": ""} | dict.fromkeys(SUMMED, 0)
            total = totals.setdefault(variant, row | empty)
            for key in SUMMED:
                total[key] += row[key]
    for total in totals.values():
        yield total | {"speedup": totals[PLAIN]["ms"] / total["ms"]}
    if found.args.zero == 3 and found.args.zero3_base == found.args.delta == "auto" and found.topology.levels:
        kept = step(replace(found, args=argparse.Namespace(**vars(found.args) | {"zero3_base": NODE})))
        yield next(row for row in kept if (row["what"], row["variant"]) == (TOTAL, CODED)) | {"variant": NODE}


def answer(found: DeviceSchedules, work: Computing | None = None) -> str:
    """Return the answer for a user in one sentence. ``work``: of whole steps."""
    args = found.args
    kinds = ("enabled", "mode", "roles", "reduction", "min_bytes", "zero3_base_mib", "nccl", "nccl_min_bytes")

    def takes(ms: float) -> str:
        return f"{ms / 1e3:.3g} s ({plain / ms:.3g} times less)" if plain > GAIN * ms else "as long"

    def total(options: argparse.Namespace, variant: str = CODED) -> dict[str, Any]:
        rows = step(replace(found, args=options))
        return next(row for row in rows if (row["what"], row["variant"]) == (TOTAL, variant))

    ends = [total(args, PLAIN), total(usual := default_config(args))]
    plain, best = (float(row["ms"]) for row in ends)
    parts = [f"plain communication takes {plain / 1e3:.3g} s a step", f"with the default config {takes(best)}"]
    for options in (args, *proposals(args)):
        ms = total(options)["ms"]
        values = {key: (getattr(options.section, key), getattr(usual.section, key)) for key in kinds}
        values |= {key: (getattr(options, key), value) for key, value in USUAL.items()}
        values["round_robin_gradients"] = options.round_robin, args.round_robin
        values["stage3_prefetch_bucket_size"] = options.buckets.prefetch, args.buckets.prefetch
        keys = [f'"{key}": {json.dumps(value)}' for key, (value, other) in values.items() if value != other]
        if keys and (options is args or best > WORTH * ms):
            parts.append(f"with {' and '.join(keys)} {takes(ms)}")
            best = min(best, ms)
    if work is not None:
        plain, best = (row["step_ms"] for row in whole_steps(args, ends, work))
        parts[-1] += f"; a whole step takes {plain / 1e3:.3g} s, with the default config {takes(best)}"
    return f"answer, {found.network}: {', '.join(parts)}"


# ---- whole steps ---------------------------------------------------------------------------------------

#: Floating point operations for a parameter and a token: 2 forward, 4 backward, and 2 where activations are computed again.
FLOPS = 8.0
#: Seconds that computing loses for a second of the codec's kernels beside it (assumed: both want all multiprocessors; the step "beside" of
#: `make gpu PART=1` measures it).
LOST = 1.0


@dataclass(frozen=True)
class Computing:
    """The computing of one GPU.

    ``tflops``: 1e12 operations per second that the GPU reaches while it computes. ``tokens``: those of one GPU in a micro-batch. ``flops``:
    operations for a parameter and a token. ``overlap``: share of the computing, 0 to 1, during which communication goes on.
    """

    tflops: float
    tokens: float
    flops: float = FLOPS
    overlap: float = 0.0

    def operations(self, params: float, micro: int) -> float:
        """Return the operations of one GPU in a step of ``micro`` micro-batches."""
        return self.flops * params * self.tokens * micro

    def seconds(self, params: float, micro: int) -> float:
        """Return the seconds that one GPU computes in a step of ``micro`` micro-batches."""
        return self.operations(params, micro) / (1e12 * self.tflops)


class StepTime(NamedTuple):
    """Seconds of a step, which add up: ``computing``; ``delayed``, by which the codec slows computing down; ``exposed`` communication."""

    computing: float
    delayed: float
    exposed: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)

    @property
    def share(self) -> float:
        """The share of the step in which GPUs only communicate."""
        return self.exposed / self.total


def step_time(computing: float, communication: float, coding: float, overlap: float) -> StepTime:
    """Return the time of a step.

    Args:
        computing: seconds.
        communication: seconds of all operations, one after the other; coding that the wire does not hide is part of them.
        coding: seconds that the kernels of the codec take of a GPU.
        overlap: share of the computing during which communication goes on.

    Communication is hidden up to ``overlap`` of the computing. Coding that runs during hidden communication takes :data:`LOST` times its
    time from computing.
    """
    hidden = min(communication, overlap * computing)
    delayed = LOST * coding * hidden / communication if communication else 0.0
    return StepTime(computing, delayed, communication - hidden)


_STEP_TIMES = tables.alike("ms codec_ms computing_ms step_ms", ".1f", 10)
_REACHED = (Column("exposed", ".0%"), Column("tflops", ".1f"), Column("step_speedup", ".2f"))
WHOLE_COLUMNS = (Column("network", width=17), Column("variant", width=7), *_STEP_TIMES, *_REACHED)
#: Option of ``plan`` for whole steps -> its type, its default, its placeholder and its meaning.
OPTIONS: dict[str, tuple[Any, Any, str, str]] = {
    "hop": (
        float, None, "US", f"microseconds that a collective takes more for every further node ({1e6 * HOP_S:g}, and {1e6 * STEP_S:g} for "
        "every further GPU of a node)"
    ),
    "tflops": (tables.positive, None, "T", "1e12 operations per second of a GPU that computes: adds the time of the whole step"),
    "tokens": (tables.count(1e9), None, "K", "tokens of a GPU in a micro-batch; goes with --tflops, or with experts that ranks share out"),
    "flops": (tables.positive, FLOPS, "F", f"operations for a parameter and a token ({FLOPS:g}; 6 where activations are kept)"),
    "overlap": (float, 0.0, "S", "share of the computing that hides communication (0)"),
    "plot": (str, None, "PNG", "draw the time of a step for up to --gpus GPUs (needs matplotlib)"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan`` for whole steps."""
    for name, (kind, default, metavar, about) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=about)


def computing(args: argparse.Namespace) -> Computing | None:
    """Return the computing that the options describe, or None where they leave it out.

    Raises:
        ToolError: an option is out of range, or lacks another option.
    """
    if not 0 <= (args.hop or 0) < math.inf:
        raise ToolError(f"--hop must be at least 0, got {args.hop:g}")
    if not 0 <= args.overlap <= 1:
        raise ToolError(f"--overlap is wanted from 0 to 1, got {args.overlap:g}")
    if args.tflops is None and (args.tokens is None or args.moe) and args.plot is None:
        return None
    if args.tflops is None or args.tokens is None:
        alone = "--tokens alone is for experts of --model that ranks share out: expert_parallel with autoep_size"
        raise ToolError(f"the time of a step wants --tflops and --tokens, got {args.tflops} and {args.tokens}; {alone}")
    return Computing(args.tflops, args.tokens, args.flops, args.overlap)


def whole_steps(args: argparse.Namespace, communication: Sequence[Row], work: Computing) -> Iterator[Row]:
    """The totals of ``communication`` with the time of the whole step, columns as in ``plan --help``. ``communication``: the rows of
    ``args.gpus`` GPUs, plain ones first."""
    busy = work.seconds(args.active, args.accumulation)
    plain: dict[str, float] = {}
    for row in communication:
        if row["what"] == TOTAL:
            time = step_time(busy, row["ms"] / 1e3, row["codec_ms"] / 1e3, work.overlap)
            plain.setdefault(row["network"], time.total)
            reached = work.operations(args.active, args.accumulation) / time.total / 1e12
            row |= {"gpus": args.gpus, "computing_ms": 1e3 * busy, "step_ms": 1e3 * time.total, "exposed": time.share}
            yield row | {"tflops": reached, "step_speedup": plain[row["network"]] / time.total}


def counts(args: argparse.Namespace) -> list[int]:
    """Numbers of GPUs of the picture: two nodes, four, eight and so on, and all."""
    each, nodes = args.gpus_per_node, args.gpus // args.gpus_per_node
    counts = sorted({2**power for power in range(1, nodes.bit_length())} | {nodes})
    return [each * count for count in counts if not each * count % args.expert_parallel]
