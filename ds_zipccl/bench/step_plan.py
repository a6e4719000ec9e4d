"""The step that ``plan`` predicts: its operations, their schedules, and their times by the cost model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ds_zipccl.bench import ToolError, speeds
from ds_zipccl.bench.speeds import Points, Speeds
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.policy.cost_model import UNCHANGED_RATIO, LinkProfile, against_base, predict
from ds_zipccl.policy.lossy_sizes import expected

#: DeepSpeed's defaults, in elements: reduce_bucket_size and allgather_bucket_size; stage3_prefetch_bucket_size;
#: stage3_max_live_parameters and stage3_max_reuse_distance.
BUCKET, PREFETCH, LIVE = 500_000_000, 50_000_000, 1_000_000_000
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
GRADIENTS, TOTAL = "gradients", "total"
#: Codings: of values alone; against the values of the last gather, which have changed since; which have not; of rounded values.
EXPONENTS, CHANGED, UNCHANGED, LOSSY = "exponents", "changed", "unchanged", "lossy"
#: Keys of the rows that the total row adds up.
SUMMED = ("calls", "wire_gb", "ms", "exponents_ms")


@dataclass(frozen=True)
class StepTraffic:
    """One line of a step: ``part`` of the parameters moves ``times`` times by ``op``, in operations of ``bucket`` elements at most.

    ``coded_op``: operation of the coded variants, ``op`` if empty. ``coding``: of the coded variants. ``slower``: factor on the
    predicted time of ``coded_op``.
    """

    what: str
    op: str
    bucket: int
    times: int
    coded_op: str = ""
    coding: str = EXPONENTS
    slower: float = 1.0
    part: float = 1.0


@dataclass(frozen=True)
class Buckets:
    """Elements of an operation at most: of the reductions of gradients, of the gathers of ZeRO-1 and ZeRO-2, of those of ZeRO-3.

    ``kept``: elements that ZeRO-3 keeps from the forward pass for the backward pass, and does not gather again.
    """

    reduce: int = BUCKET
    gather: int = BUCKET
    prefetch: int = PREFETCH
    kept: int = 0


class Coding(NamedTuple):
    """Speeds of codec and link, and the ratio."""

    profile: LinkProfile
    ratio: float


@dataclass(frozen=True)
class Schedule:
    """How an operation runs. ``tensor``: part of the tensor that ``ranks`` ranks share. ``crossing``: part of the sent bytes that
    leaves the node."""

    variant: str
    codec: str
    ranks: int
    tensor: float
    crossing: float


def step(
    args: argparse.Namespace, traffics: list[StepTraffic], codings: dict[str, Coding], plain_schedule: str = "plain"
) -> Iterator[dict[str, Any]]:
    """Rows of a step, columns as in ``plan --help``, and their totals.

    ``plain_schedule``: the schedule of the uncoded operations, one of :data:`ds_zipccl.policy.cost_model.VARIANTS`.
    """
    itemsize = ITEMSIZE[args.dtype]
    exponents = codings[EXPONENTS]
    totals: dict[str, dict[str, Any]] = {}
    for line in traffics:
        nbytes = round(line.part * args.params) * itemsize
        operations = sizes(nbytes, line.bucket * itemsize if args.bucket is None else args.bucket)
        plain = math.nan
        for schedule in _schedules(args.gpus, args.gpus_per_node, plain_schedule):
            uncoded = schedule.codec == plain_schedule
            op = line.op if uncoded else line.coded_op or line.op
            coding = Coding(exponents.profile, 1.0) if uncoded else codings[line.coding]
            sent = TRAFFIC[op].plain(schedule.ranks) * schedule.crossing * schedule.tensor / coding.ratio
            times = line.times * (1.0 if uncoded else line.slower)
            ms = times * _ms(op, operations, schedule, coding)
            plain = ms if uncoded else plain
            row = {
                "what": line.what,
                "op": op,
                "calls": line.times * sum(count for _, count in operations),
                "variant": schedule.variant,
                "ratio": coding.ratio,
                "wire_gb": line.times * sent * nbytes / 1e9,
                "ms": ms,
                "exponents_ms": times * _ms(op, operations, schedule, exponents),
                "speedup": plain / ms,
            }
            yield row
            total = totals.setdefault(
                schedule.variant, row | {"what": TOTAL, "op": "", "ratio": None} | dict.fromkeys(SUMMED, 0)
            )
            for key in SUMMED:
                total[key] += row[key]
    for total in totals.values():
        yield total | {"speedup": totals["plain"]["ms"] / total["ms"]}


def _ms(op: str, operations: list[tuple[int, int]], schedule: Schedule, coding: Coding) -> float:
    """Milliseconds of operations, each (bytes, count)."""
    local = _slowed(coding.profile, schedule.crossing)
    return 1e3 * sum(
        count * predict(op, schedule.codec, size * schedule.tensor, schedule.ranks, local, coding.ratio)
        for size, count in operations
    )


def traffic(args: argparse.Namespace, buckets: Buckets = Buckets()) -> list[StepTraffic]:
    """Return the lines of a step; gradients are coded lossily where ``args`` name a codec for them."""
    coding = EXPONENTS if args.gradients is None else LOSSY
    return [replace(line, coding=coding) if line.what == GRADIENTS else line for line in _traffic(args, buckets)]


def _traffic(args: argparse.Namespace, buckets: Buckets) -> list[StepTraffic]:
    micro = args.accumulation
    if args.zero < 3:
        owners, slower = ("reduce_scatter", _crowding(args, buckets)) if args.owner_only == "auto" else ("", 1.0)
        times = micro if args.zero == 2 else 1
        return [
            StepTraffic(GRADIENTS, "all_reduce", buckets.reduce, times, coded_op=owners, slower=slower),
            StepTraffic(
                "parameters", "all_gather", buckets.gather, 1, coding=CHANGED if args.delta == "auto" else EXPONENTS
            ),
        ]
    gradients = StepTraffic(GRADIENTS, "reduce_scatter", buckets.reduce, micro)
    again = 1 - min(1.0, buckets.kept / args.params)
    if args.zero3_base in ("auto", "off") or args.delta == "off":
        lines = [
            StepTraffic("parameters, forward", "all_gather", buckets.prefetch, micro),
            StepTraffic("parameters, backward", "all_gather", buckets.prefetch, micro, part=again),
        ]
    else:
        times = 2 * micro - 1
        part = (micro * (1 + again) - 1) / times
        lines = [
            StepTraffic("parameters, first", "all_gather", buckets.prefetch, 1, coding=CHANGED),
            StepTraffic("parameters, again", "all_gather", buckets.prefetch, times, coding=UNCHANGED, part=part),
        ]
    return [*(line for line in lines if line.part > 0), gradients]


def base_memory(args: argparse.Namespace) -> Iterator[str]:
    """Yield a line about the memory of ``zero3_base``, where ZeRO-3 may keep parameters."""
    if args.zero < 3 or args.zero3_base == "off" or args.delta == "off":
        return
    size = f"{args.params * ITEMSIZE[args.dtype] / 1e9:.4g} GB"
    yield {
        "auto": f"memory: zero3_base auto keeps nothing of trained parameters; all {args.params:.4g}, if frozen, take {size} of every node",
        "host": f"memory: zero3_base host takes {size} of every node",
        "device": f"memory: zero3_base device takes {size} of every GPU",
    }[args.zero3_base]


def _crowding(args: argparse.Namespace, buckets: Buckets) -> float:
    """Factor on the time of a reduce-scatter whose sums go on to the few owners of a bucket; 1 if all ranks own equally much."""
    elements = buckets.reduce if args.bucket is None else args.bucket / ITEMSIZE[args.dtype]
    owners = args.gpus * (1.0 if args.round_robin else min(1.0, elements / args.params))
    return 1.0 if owners >= args.gpus - 1 else 1.0 + 1.0 / max(1.0, owners)


def differences(args: argparse.Namespace, profile: LinkProfile) -> dict[str, Coding]:
    """Codings against a base: at measured speeds, or with ``--profile`` at those of exponents."""
    speed = (profile.encode, profile.decode)
    changed, unchanged = (speed, speed) if args.profile else speeds.measured_differences()
    copies = 2 if args.zero == 3 else 0  # ZeRO-1 and ZeRO-2 gather onto the base itself
    return {
        CHANGED: Coding(against_base(profile, *changed, copies), args.delta_ratio or speeds.delta_ratio(args.dtype)),
        UNCHANGED: Coding(against_base(profile, *unchanged, copies), UNCHANGED_RATIO),
    }


def lossy(args: argparse.Namespace, exponents: Coding) -> tuple[Coding, str]:
    """Return the coding of gradients by the codec that ``args`` name, at the speed of exponents, and a line about it."""
    bits = 8 * ITEMSIZE[args.dtype]
    lossless = bits / exponents.ratio
    found = expected(args.gradients, args.dtype, lossless)
    if found.bits >= lossless:
        raise ToolError(
            f"{args.gradients} takes {found.bits:.2f} bits a value, without loss it is {lossless:.2f}: leave --gradients out"
        )
    about = f"{args.gradients}: {found.bits:.2f} bits a value instead of {lossless:.2f}, relative L2 error {found.error:.3g}"
    return Coding(exponents.profile, bits / found.bits), f"{about} a rounding; as fast as exponents"


def _schedules(gpus: int, per_node: int, plain_schedule: str) -> list[Schedule]:
    nodes = gpus // per_node
    plain = Schedule("plain", plain_schedule, nodes, 1 / per_node, 1.0)
    if per_node == 1:
        return [plain, replace(plain, variant="coded", codec="coded")]
    flat = Schedule("coded, flat", "coded", gpus, 1.0, (gpus - per_node) / (gpus - 1))
    return [plain, flat, replace(plain, variant="coded, by nodes", codec="coded")]


def _slowed(profile: LinkProfile, crossing: float) -> LinkProfile:
    """The profile if only the part ``crossing`` of the bytes uses the link, and the rest is free."""
    return replace(profile, transfer=tuple((size / crossing, seconds) for size, seconds in profile.transfer))


def sizes(total: int, bucket: int) -> list[tuple[int, int]]:
    """(bytes, count) of the operations that move ``total`` bytes."""
    return [(size, count) for size, count in ((bucket, total // bucket), (total % bucket, 1)) if size and count]


def points(args: argparse.Namespace, found: Speeds) -> Points:
    """Seconds of a message by its bytes: ``latency + bytes / rate``, or the points of the profile."""
    if not args.link:
        return found.profile.transfer
    rate, latency = args.link[0].rate / 8, args.latency / 1e6
    return tuple((size, latency + size / rate) for size in (1.0, 1e9))
