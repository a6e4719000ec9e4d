"""all_reduce, all_reduce_coalesced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device import sums
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.levels import levels_of
from ds_zipccl.comm.execution import execute, is_small, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.reduction_order import Reduction, arithmetic
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.schedules.gather import open_gather
from ds_zipccl.comm.schedules.pipeline import Fragments, run_pipeline
from ds_zipccl.comm.schedules.reduce_scatter import open_adder
from ds_zipccl.comm.shadow_check import Plain
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig


@dataclass(frozen=True, slots=True)
class ReduceScatterGather:
    """Each rank sums a shard of the tensors laid end to end, and gathers each fragment of the sum as soon as it is ready."""

    reduction: Reduction
    nodes: Sequence[Sequence[int]]

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        chunk = ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
        slices = cut(whole.numel(), chunk, ctx.size)
        shards = Fragments(ctx, [whole[part] for part in slices], exchanges=2)
        places = [Fragments(ctx, [whole[part]], exchanges=2) for part in slices]
        no_bases = Fragments(ctx, [])
        with (
            open_adder(ctx, shards, self.reduction, [slices[ctx.rank]], chunk) as adder,
            open_gather(ctx, len(adder.stages), places) as gathering,
        ):

            def add(step: int) -> None:
                gathering.expect(step)
                adder.take(shards.at(step)[ctx.rank])
                gathering.send(places[ctx.rank], no_bases, step)

            run_pipeline(shards.steps, *adder.stages, add, *gathering.stages)
        adder.finish(whole)
        if len(outputs) > 1:
            for flat, part in zip(outputs, whole.split([flat.numel() for flat in outputs]), strict=True):
                flat.copy_(part)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        sums.all_reduce(ctx, levels_of(ctx, self.nodes), outputs, self.reduction.divisor)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_reduce``: in place, the same bits on every rank."""
    if is_small(tensor, config):
        call = uncompressed_call or (lambda: dist.all_reduce(tensor, op, group, async_op))
        return pass_small("all_reduce", role, 2 * sent_to_peers(tensor.nbytes, group), call)

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.all_reduce(outputs[0], op, group, later)

    return _all_reduce("all_reduce", [tensor], op, group, async_op, config, role, plain, uncompressed_call)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_reduce_coalesced``: one all-reduce over the tensors laid end to end, in place."""

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handle = dist.all_reduce_coalesced(list(outputs), op, group, later)
        return JoinedWork("all_reduce_coalesced", [handle], outputs) if handle is not None else None

    return _all_reduce("all_reduce_coalesced", tensors, op, group, async_op, config, role, plain, uncompressed_call)


def _all_reduce(
    name: str,
    tensors: Sequence[torch.Tensor],
    op: Any,
    group: dist.ProcessGroup | None,
    async_op: bool,
    config: ZipcclConfig,
    role: str,
    plain: Plain,
    uncompressed_call: Callable[[], Any] | None,
) -> Any:
    ranks = group_size(group)
    numel = sum(tensor.numel() for tensor in tensors)
    reduction, tolerance, nodes = arithmetic(tensors[0].device.type if tensors else "", op, group, config, role)
    request = Request(
        name,
        [],
        tensors,
        group,
        async_op,
        config,
        role,
        plain=plain,
        numel=numel,
        sent=2 * numel * (ranks - 1) / ranks,
        uncompressed_call=uncompressed_call,
        reduce_op=op,
        tolerance=tolerance,
        nodes=nodes,
        plain_sums=reduction.plain,
        memory_order=name == "all_reduce",  # the plain all-reduce of several tensors lays copies end to end
    )
    return execute(decide(request), request, ReduceScatterGather(reduction, nodes))
