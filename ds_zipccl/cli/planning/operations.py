"""The operations of a training step of ZeRO, as DeepSpeed issues them: ``plan``, ``doctor`` and the comparisons predict their times."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_zipccl.config import ZipcclConfig

#: DeepSpeed's defaults, in elements: reduce_bucket_size and allgather_bucket_size; stage3_prefetch_bucket_size;
#: stage3_max_live_parameters and stage3_max_reuse_distance.
BUCKET, PREFETCH, LIVE = 500_000_000, 50_000_000, 1_000_000_000
#: A stage3_prefetch_bucket_size with a third of the gathers (default, not tuned: 0.4 GB of bf16 parameters are gathered ahead).
WIDE_PREFETCH = 200_000_000
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
GRADIENTS, EXCHANGES, TOTAL = "gradients", "exchanges of experts", "total"
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
    "zero3_base": ("auto", "off", "host", "node", "device"),
}
USUAL = {key: choices[0] for key, choices in SWITCHES.items()}


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


#: Options that the files of a job fill in where the command line does not -> their values without files. ``section``: that of the job.
DEFAULTS: dict[str, Any] = {"zero": 3, "dtype": "bfloat16", "accumulation": 1, "live": LIVE, "round_robin": False}
DEFAULTS |= {"expert_parallel": 1, "moe": None, "gradients": None, "backend": "nccl"}
DEFAULTS |= USUAL | {"buckets": Buckets(), "section": ZipcclConfig(enabled=True)}


def default_config(args: argparse.Namespace) -> argparse.Namespace:
    """Return ``args`` with the default of every key of the section."""
    return argparse.Namespace(**vars(args) | USUAL | {"section": ZipcclConfig(enabled=True)})


def role_of(line: StepTraffic) -> str:
    """Return the role of the messages of a line."""
    return {GRADIENTS: "zero_grad", EXCHANGES: "ep"}.get(line.what, "zero_param")


def mode_of(args: argparse.Namespace, line: StepTraffic) -> str:
    """Return the mode of a line by the section of the job."""
    section: ZipcclConfig = args.section
    return section.mode_of(role_of(line)) if section.enabled and not is_small(args, line) else "never"


def is_small(args: argparse.Namespace, line: StepTraffic) -> bool:
    """Return whether the section of the job leaves the messages of a line plain because of their size. Copies send none."""
    section: ZipcclConfig = args.section
    sent = args.backend == "nccl" and line.coding != COPIED
    least = max(section.min_bytes, section.nccl_min_bytes if sent else 0)
    return max((nbytes for nbytes, _ in operations(args, line)), default=0) < least


def proposals(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield ``args`` with keys that often pay, where the user has made no choice: buckets that all ranks own; bases of trained parameters,
    and with them larger gathers."""
    if args.zero < 3 and args.owner_only == "auto" and not args.round_robin:
        yield argparse.Namespace(**vars(args) | {"round_robin": True})
    if args.zero == 3 and args.zero3_base == args.delta == "auto":
        wider = replace(args.buckets, prefetch=max(args.buckets.prefetch, WIDE_PREFETCH))
        for kind in ("node", "host")[args.gpus_per_node == 1 :]:
            for buckets in dict.fromkeys((args.buckets, wider)):
                yield argparse.Namespace(**vars(args) | {"zero3_base": kind, "buckets": buckets})


def trained(args: argparse.Namespace) -> float:
    """Return the part of the parameters that is trained."""
    return 1.0 if args.trainable is None else float(args.trainable / args.params)


def traffic(args: argparse.Namespace) -> list[StepTraffic]:
    """Return the lines of a step; gradients are coded lossily where ``args`` name a codec for them."""
    lines = [line for line in _traffic(args, replace(args.buckets, kept=args.live)) if line.part > 0]
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
    gather = StepTraffic("", "all_gather", buckets.prefetch, micro)
    held = 0.0 if keeps == "off" else _held(args)
    for coding, frozen in ((COPIED, (1 - part) * held), (EXPONENTS, (1 - part) * (1 - held))):
        yield replace(gather, what=FROZEN[0], coding=coding, part=frozen)
        yield replace(gather, what=FROZEN[1], coding=coding, part=frozen * again)
    if keeps in ("auto", "off"):
        yield replace(gather, what="parameters, forward", part=part)
        yield replace(gather, what="parameters, backward", part=part * again)
    else:
        times = 2 * micro - 1
        left = part * (micro * (1 + again) - 1) / times
        yield replace(gather, what="parameters, first", times=1, coding=CHANGED, part=part)
        yield replace(gather, what="parameters, again", times=times, coding=COPIED, part=left)
    yield StepTraffic(GRADIENTS, "reduce_scatter", buckets.reduce, micro, part=part)


def _held(args: argparse.Namespace) -> float:
    """Return the part of the frozen parameters whose bases fit into ``zero3_base_mib``; the memory that a node has is not known."""
    limit, frozen = args.section.zero3_base_mib << 20, args.params * (1 - trained(args)) * ITEMSIZE[args.dtype]
    return min(1.0, limit / frozen) if limit and frozen and args.zero3_base == "auto" else 1.0


def base_memory(args: argparse.Namespace) -> Iterator[str]:
    """Yield a line about the memory of ``zero3_base``, where ZeRO-3 may keep parameters."""
    if args.zero < 3 or args.zero3_base == "off" or args.delta == "off":
        return
    shared, copies = args.expert_parallel, 1 if args.zero3_base == "device" else args.gpus_per_node
    elsewhere = args.moe.routed * max(0, shared - copies) / shared if args.moe else 0
    frozen = args.params * (1 - trained(args)) - elsewhere
    kept = frozen if args.zero3_base == "auto" else args.params - elsewhere
    size = f"{kept * ITEMSIZE[args.dtype] / 1e9:.4g} GB"
    host = f"{size} of the host's memory on each node, once for all its GPUs"
    spread = f"{kept * ITEMSIZE[args.dtype] / args.gpus_per_node / 1e9:.4g} GB of each GPU, once for all GPUs of a node"
    told = {
        "node": f"takes {spread}",
        "host": f"takes {host}; a job with less stops at its start",
        "device": f"takes {size} of each GPU",
    }
    told["auto"] = "keeps frozen parameters; all are trained here, see --trainable"
    if frozen > 0:
        mib = args.section.zero3_base_mib
        where = f"{host}, or in {spread}" if args.gpus_per_node > 1 else host
        most = f"zero3_base_mib ({mib} MiB)" if mib else "a quarter of what is free there"
        told["auto"] = f"keeps {frozen:.4g} frozen parameters in {where}, as far as {most} allows; the rest is sent"
    yield f"memory: zero3_base {args.zero3_base} {told[args.zero3_base]}"


def _crowding(args: argparse.Namespace, buckets: Buckets) -> float:
    """Factor on the time of a reduce-scatter whose sums go on to the few owners of a bucket; 1 if all ranks own equally much."""
    elements = buckets.reduce if args.bucket is None else args.bucket / ITEMSIZE[args.dtype]
    owners = args.gpus * (1.0 if args.round_robin else min(1.0, elements / max(1.0, args.params * trained(args))))
    return 1.0 if owners >= args.gpus - 1 else 1.0 + 1.0 / max(1.0, owners)


def operations(args: argparse.Namespace, line: StepTraffic) -> list[tuple[int, int]]:
    """Return (bytes, count) of the operations that move the elements of a line once."""
    itemsize = ITEMSIZE[args.dtype]
    total = round(line.part * args.params) * itemsize
    bucket = line.bucket * itemsize if args.bucket is None else args.bucket
    return [(size, count) for size, count in ((bucket, total // bucket), (total % bucket, 1)) if size and count]
