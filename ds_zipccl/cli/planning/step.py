"""The step that ``plan`` and the doctor predict: its operations, their schedules, and their times by the cost model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ds_zipccl.cli import ToolError
from ds_zipccl.cli.planning import speeds
from ds_zipccl.cli.planning.speeds import Points, Speeds
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.policy.cost_model import LinkProfile, against_base, predict
from ds_zipccl.policy.lossy_sizes import expected

#: DeepSpeed's defaults, in elements: reduce_bucket_size and allgather_bucket_size; stage3_prefetch_bucket_size;
#: stage3_max_live_parameters and stage3_max_reuse_distance.
BUCKET, PREFETCH, LIVE = 500_000_000, 50_000_000, 1_000_000_000
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
GRADIENTS, TOTAL = "gradients", "total"
FROZEN = ("frozen, forward", "frozen, backward")
#: Codings: of values alone; against the values of the last gather, which have changed since; copies of a base of values that have not, for
#: which nothing is sent; of rounded values.
EXPONENTS, CHANGED, COPIED, LOSSY = "exponents", "changed", "copied", "lossy"
PLAIN, CODED = "plain", "coded"
#: Coding of a line -> the word of the column ``how``.
HOW = {EXPONENTS: CODED, CHANGED: "differences", COPIED: "copies", LOSSY: LOSSY}
#: Keys of the section that are options of ``plan``: values, the default first.
SWITCHES = {
    "owner_only": ("auto", "off"),
    "delta": ("auto", "off"),
    "zero3_base": ("auto", "off", "host", "device"),
}
#: A time that is shorter by less than the first factor is no gain (seed: the error of the model); the second names a further key.
GAIN, WORTH = 1.02, 1.1
#: Agreements on the copies of a step: before the first one, and before the optimizer step (how-it-works.md).
_AGREEMENTS = 2
#: Keys of the rows that the total row adds up.
SUMMED = ("calls", "wire_gb", "ms", "exponents_ms")


@dataclass(frozen=True)
class StepTraffic:
    """One line of a step: ``part`` of the parameters moves ``times`` times by ``op``, in operations of ``bucket`` elements at most.

    ``coded_op``: operation of the coded variants, ``op`` if empty. ``coding``: of the coded variants. ``slower``: factor on the
    predicted time of ``coded_op``. ``agreements``: of all ranks on the copies of this line and of later ones.
    """

    what: str
    op: str
    bucket: int
    times: int
    coded_op: str = ""
    coding: str = EXPONENTS
    slower: float = 1.0
    part: float = 1.0
    agreements: int = 0


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

    codec: str
    ranks: int
    tensor: float = 1.0
    crossing: float = 1.0


def step(
    args: argparse.Namespace, traffics: list[StepTraffic], codings: dict[str, Coding], plain_schedule: str = "plain"
) -> Iterator[dict[str, Any]]:
    """Two rows of each line of a step on gloo groups, uncoded and coded; columns as in ``plan --help``.

    ``plain_schedule``: the schedule of the uncoded operations, one of :data:`ds_zipccl.policy.cost_model.VARIANTS`.
    """
    itemsize = ITEMSIZE[args.dtype]
    exponents = codings[EXPONENTS]
    for line in traffics:
        nbytes = round(line.part * args.params) * itemsize
        operations = sizes(nbytes, line.bucket * itemsize if args.bucket is None else args.bucket)
        calls = line.times * sum(count for _, count in operations)
        plain = math.nan
        for variant in (PLAIN, CODED):
            uncoded = variant == PLAIN
            op = line.op if uncoded else line.coded_op or line.op
            # Gathers of large frozen weights run side by side; gloo then takes no longer than a ring (measured with LoRA on shaped links).
            usual = PLAIN if line.what in FROZEN else plain_schedule
            schedule = _schedule(args, op, usual if uncoded else CODED)
            coding = Coding(exponents.profile, 1.0) if uncoded else codings[line.coding]
            times = line.times * (1.0 if uncoded else line.slower)
            ratio: float | None = coding.ratio
            sent = TRAFFIC[op].plain(schedule.ranks) * schedule.crossing * schedule.tensor / coding.ratio
            ms = exponents_ms = times * _ms(op, operations, schedule, coding)
            if not uncoded and line.coding == COPIED:
                ms, sent, ratio = _copies_ms(line, args, calls, nbytes, coding.profile), 0.0, None
            elif not uncoded:
                exponents_ms = times * _ms(op, operations, schedule, exponents)
            plain = ms if uncoded else plain
            yield {
                "what": line.what,
                "op": op,
                "calls": calls,
                "variant": variant,
                "how": PLAIN if uncoded else HOW[line.coding],
                "ratio": ratio,
                "wire_gb": line.times * sent * nbytes / 1e9,
                "ms": ms,
                "exponents_ms": exponents_ms,
                "speedup": plain / ms,
            }


def chosen(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of :func:`step` as mode "auto" chooses: the coded row of a line is the fastest schedule, and ``how`` names it. Copies and
    lossy lines are not chosen by times. Then totals."""
    totals: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for row in rows:
        if row["variant"] == PLAIN:
            plain = row
        elif row["how"] not in (HOW[COPIED], LOSSY):
            if row["exponents_ms"] < row["ms"]:
                row |= {"how": CODED, "ms": row["exponents_ms"]}
            if plain["ms"] < row["ms"]:
                row |= {key: plain[key] for key in ("op", "how", "ratio", "wire_gb", "ms")}
            row["speedup"] = plain["ms"] / row["ms"]
        yield row
        total = totals.setdefault(
            row["variant"], row | {"what": TOTAL, "op": "", "how": "", "ratio": None} | dict.fromkeys(SUMMED, 0)
        )
        for key in SUMMED:
            total[key] += row[key]
    for total in totals.values():
        yield total | {"speedup": totals[PLAIN]["ms"] / total["ms"]}


def _ms(op: str, operations: list[tuple[int, int]], schedule: Schedule, coding: Coding) -> float:
    """Milliseconds of operations, each (bytes, count)."""
    local = _slowed(coding.profile, schedule.crossing)
    return 1e3 * sum(
        count * predict(op, schedule.codec, size * schedule.tensor, schedule.ranks, local, coding.ratio)
        for size, count in operations
    )


def _copies_ms(line: StepTraffic, args: argparse.Namespace, calls: int, nbytes: int, profile: LinkProfile) -> float:
    """Milliseconds of gathers of ``nbytes`` each that copy a base, whose own shard is compared at each copy and at each agreement."""
    shard: float = nbytes / args.gpus
    comparing = shard / profile.encode
    seconds = calls * profile.call + line.times * (nbytes / profile.copy + comparing)
    return 1e3 * (seconds + line.agreements * (profile.alpha + comparing))


def default_config(args: argparse.Namespace) -> argparse.Namespace:
    """Return ``args`` with the default of every key of the section."""
    defaults = {key: choices[0] for key, choices in SWITCHES.items()}
    return argparse.Namespace(**vars(args) | defaults | {"gradients": None})


def host_base(args: argparse.Namespace) -> argparse.Namespace | None:
    """Return ``args`` with the base that pays in full fine-tuning, or None where it is no choice or the user has made one."""
    if args.zero != 3 or args.zero3_base != "auto" or args.delta != "auto":
        return None
    return argparse.Namespace(**vars(args) | {"zero3_base": "host"})


def answer(
    where: str, plain: float, default: float, others: Iterable[tuple[argparse.Namespace, float]], nccl: bool = False
) -> str:
    """Return the answer for a user in one sentence.

    Args:
        where: the network.
        plain: milliseconds of communication of an uncoded step.
        default: the same with the default config.
        others: options of ``plan``, those of the user first, and milliseconds with their keys in the config.
        nccl: the groups are NCCL's, which the default config does not code.
    """

    def takes(ms: float) -> str:
        return f"{ms / 1e3:.3g} s ({plain / ms:.3g} times less)" if plain > GAIN * ms else "as long"

    parts = [f"communication takes {plain / 1e3:.3g} s a step uncoded", f"with the default config {takes(default)}"]
    if nccl:
        parts[1] += " (NCCL groups pass uncoded)"
    best = default
    for number, (args, ms) in enumerate(others):
        keys = ['"nccl": "on"'] if nccl else []
        keys += [
            f'"{key}": "{getattr(args, key)}"' for key, (usual, *_) in SWITCHES.items() if getattr(args, key) != usual
        ]
        keys += [f"gradients by {args.gradients}"] if args.gradients is not None else []
        if keys and (not number or best > WORTH * ms):
            parts.append(f"with {' and '.join(keys)} {takes(ms)}")
            best = min(best, ms)
    return f"answer, {where}: {', '.join(parts)}"


def trained(args: argparse.Namespace) -> float:
    """Return the part of the parameters that is trained."""
    return 1.0 if args.trainable is None else float(args.trainable / args.params)


def traffic(args: argparse.Namespace, buckets: Buckets | None = None) -> list[StepTraffic]:
    """Return the lines of a step; gradients are coded lossily where ``args`` name a codec for them. ``buckets``: DeepSpeed's defaults if
    None, with ``args.live`` elements kept."""
    lines = [line for line in _traffic(args, buckets or Buckets(kept=args.live)) if line.part > 0]
    coding = EXPONENTS if args.gradients is None else LOSSY
    return [replace(line, coding=coding) if line.what == GRADIENTS else line for line in lines]


def _traffic(args: argparse.Namespace, buckets: Buckets) -> Iterator[StepTraffic]:
    micro, part = args.accumulation, trained(args)
    if args.zero < 3:
        owners, slower = ("reduce_scatter", _crowding(args, buckets)) if args.owner_only == "auto" else ("", 1.0)
        times = micro if args.zero == 2 else 1
        coding = CHANGED if args.delta == "auto" else EXPONENTS
        yield StepTraffic(GRADIENTS, "all_reduce", buckets.reduce, times, coded_op=owners, slower=slower, part=part)
        yield StepTraffic("parameters", "all_gather", buckets.gather, 1, coding=coding, part=part)
        return
    again = 1 - min(1.0, buckets.kept / args.params)
    keeps = args.zero3_base if args.delta == "auto" else "off"
    frozen = COPIED if keeps != "off" else EXPONENTS
    gather = StepTraffic("", "all_gather", buckets.prefetch, micro)
    yield replace(gather, what=FROZEN[0], coding=frozen, part=1 - part, agreements=_AGREEMENTS)
    yield replace(gather, what=FROZEN[1], coding=frozen, part=(1 - part) * again)
    if keeps in ("auto", "off"):
        yield replace(gather, what="parameters, forward", part=part)
        yield replace(gather, what="parameters, backward", part=part * again)
    else:
        times = 2 * micro - 1
        left = part * (micro * (1 + again) - 1) / times
        yield replace(gather, what="parameters, first", times=1, coding=CHANGED, part=part)
        yield replace(gather, what="parameters, again", times=times, coding=COPIED, part=left, agreements=_AGREEMENTS)
    yield StepTraffic(GRADIENTS, "reduce_scatter", buckets.reduce, micro, part=part)


def base_memory(args: argparse.Namespace) -> Iterator[str]:
    """Yield a line about the memory of ``zero3_base``, where ZeRO-3 may keep parameters."""
    if args.zero < 3 or args.zero3_base == "off" or args.delta == "off":
        return
    frozen = args.params * (1 - trained(args))
    kept = frozen if args.zero3_base == "auto" else args.params
    size = f"{kept * ITEMSIZE[args.dtype] / 1e9:.4g} GB"
    auto = f"memory: zero3_base auto keeps {frozen:.4g} frozen parameters: {size} of every node, at most a quarter of its free memory"
    yield {
        "auto": auto
        if frozen
        else "memory: zero3_base auto keeps frozen parameters; all are trained here, see --trainable",
        "host": f"memory: zero3_base host takes {size} of every node",
        "device": f"memory: zero3_base device takes {size} of every GPU",
    }[args.zero3_base]


def _crowding(args: argparse.Namespace, buckets: Buckets) -> float:
    """Factor on the time of a reduce-scatter whose sums go on to the few owners of a bucket; 1 if all ranks own equally much."""
    elements = buckets.reduce if args.bucket is None else args.bucket / ITEMSIZE[args.dtype]
    owners = args.gpus * (1.0 if args.round_robin else min(1.0, elements / (args.params * trained(args))))
    return 1.0 if owners >= args.gpus - 1 else 1.0 + 1.0 / max(1.0, owners)


def differences(args: argparse.Namespace, profile: LinkProfile) -> Coding:
    """The coding against a base: at measured speeds, or with ``--profile`` at those of exponents."""
    speed = (profile.encode, profile.decode) if args.profile else speeds.measured_differences()
    copies = 2 if args.zero == 3 else 0  # ZeRO-1 and ZeRO-2 gather onto the base itself
    return Coding(against_base(profile, *speed, copies), args.delta_ratio or speeds.delta_ratio(args.dtype))


def copies(args: argparse.Namespace, profile: LinkProfile) -> Coding:
    """The coding of gathers out of a base: ``copy`` is their speed and ``encode`` that of comparisons, measured or with ``--profile`` those
    of the profile."""
    if args.profile:
        return Coding(profile, 1.0)
    copy, compare = speeds.measured_copies()
    return Coding(replace(profile, copy=copy, encode=compare), 1.0)


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


def _schedule(args: argparse.Namespace, op: str, codec: str) -> Schedule:
    """The schedule of a job: uncoded operations and coded gathers go by nodes, the GPUs with the same place in all nodes together; the
    sums of ours, with the bits of gloo's, from each GPU to each other one."""
    gpus, per_node = args.gpus, args.gpus_per_node
    if codec == CODED and TRAFFIC[op].sums:
        return Schedule(codec, gpus, crossing=(gpus - per_node) / (gpus - 1))
    return Schedule(codec, gpus // per_node, tensor=1 / per_node)


def _slowed(profile: LinkProfile, crossing: float) -> LinkProfile:
    """The profile if only the part ``crossing`` of the bytes uses the link, and the rest is free."""
    return replace(profile, transfer=tuple((size / crossing, seconds) for size, seconds in profile.transfer))


def sizes(total: int, bucket: int) -> list[tuple[int, int]]:
    """(bytes, count) of the operations that move ``total`` bytes."""
    return [(size, count) for size, count in ((bucket, total // bucket), (total % bucket, 1)) if size and count]


def points(args: argparse.Namespace, found: Speeds) -> Points:
    """Seconds of a message by its bytes: ``latency + bytes / rate`` of a GPU, or the points of the profile."""
    if not args.network:
        return found.profile.transfer
    rate, latency = args.network[0].of_gpu(args.gpus_per_node), args.latency / 1e6
    return tuple((size, latency + size / rate) for size in (1.0, 1e9))
