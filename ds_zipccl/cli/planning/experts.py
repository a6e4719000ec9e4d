"""A step of a mixture of experts whose ranks share the experts out, as with ``autoep_size`` of DeepSpeed's AutoEP: the ranks of each line.

As many ranks as ``args.expert_parallel``, one after the other, hold the experts of a layer once. They exchange tokens. The ranks that hold
the same experts, one of each such group, move the parameters of experts; all ranks move the others. ``args.moe`` is the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ds_zipccl.cli import ToolError
from ds_zipccl.cli.planning.operations import EXCHANGES, StepTraffic
from ds_zipccl.cli.planning.schedules import DeviceSchedules, HostSchedules

Schedules = HostSchedules | DeviceSchedules
#: Exchanges of a layer and micro-batch: tokens go to the experts and back, their gradients too.
_EXCHANGES = 4


def groups(found: Schedules) -> Iterator[tuple[str, Schedules, list[StepTraffic]]]:
    """Yield the lines of a step, with their schedules among their ranks and the word for their parameters. ``found``: among all ranks."""
    args, shared = found.args, found.args.expert_parallel
    if not shares(args):
        yield "", found, found.lines()
        return
    each, routed = args.gpus_per_node, args.moe.routed
    others, own = args.params - routed, routed // shared

    def of(params: int, trainable: float | None, gpus: int, per_node: int) -> Schedules:
        live = round(args.live * params / (others + own))  # DeepSpeed counts all parameters that are gathered
        more = {"params": params, "trainable": trainable, "live": live, "gpus": gpus, "gpus_per_node": per_node}
        return found.among(argparse.Namespace(**vars(args) | more))

    trained = None if args.trainable is None else min(args.trainable, others)  # LoRA adapts no experts
    dense = of(others, trained, args.gpus, each)
    yield "", dense, dense.lines()
    if shared < args.gpus:
        trained = None if trained is None else (args.trainable - trained) / shared
        same = of(own, trained, args.gpus // shared, max(1, each // shared))
        yield "experts, ", same, same.lines()
    if exchanged(args) and (shared > each or isinstance(found, DeviceSchedules)):  # inside nodes hosts exchange for free
        tokens = args.tokens * args.moe.experts[1] * args.moe.hidden
        layers = of(tokens * _EXCHANGES * len(args.moe.sparse), None, shared, min(shared, each))
        vars(layers.args).update(bucket=None)
        yield "", layers, [StepTraffic(EXCHANGES, "all_to_all", tokens, args.accumulation)]


def shares(args: argparse.Namespace) -> bool:
    """Return whether the ranks share experts out whose sizes are known."""
    return args.expert_parallel > 1 and args.moe is not None


def exchanged(args: argparse.Namespace) -> bool:
    """Return whether exchanges of experts are predicted."""
    return shares(args) and args.tokens is not None


def held(args: argparse.Namespace) -> argparse.Namespace:
    """Return ``args`` with the parameters that a base keeps: those of a GPU on a device, otherwise those of a node."""
    if not shares(args):
        return args
    copies = 1 if args.zero3_base == "device" else min(args.expert_parallel, args.gpus_per_node)
    left = args.moe.routed * (args.expert_parallel - copies) // args.expert_parallel
    return argparse.Namespace(**vars(args) | {"params": args.params - left})


def check(args: argparse.Namespace) -> None:
    """Refuse ranks that cannot share the experts out, or not equally in all nodes.

    Raises:
        ToolError: they are such ranks.
    """
    shared, each = args.expert_parallel, args.gpus_per_node
    number = args.moe.experts[0] if args.moe else shared
    if number % shared or args.gpus % shared or (each % shared and shared % each):
        wanted = f"a divisor of {number} experts and of {args.gpus} GPUs, and a part or a multiple of a node of {each}"
        raise ToolError(f"autoep_size (--expert-parallel) is {shared}, wanted is {wanted}")


def remarks(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is not predicted of the experts."""
    if args.expert_parallel > 1 and not shares(args):
        yield "experts: all parameters count on every rank: --model without --params tells those of experts"
    elif shares(args) and not exchanged(args):
        yield "experts: their exchanges of tokens are not predicted without --tokens, the tokens of a GPU in a micro-batch"
