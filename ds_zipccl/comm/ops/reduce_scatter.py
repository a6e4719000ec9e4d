"""reduce_scatter_tensor, reduce_scatter."""

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
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.execution import execute, is_small, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.host.repeats.exchange import summed_shards
from ds_zipccl.comm.host.repeats.memory import is_again
from ds_zipccl.comm.host.sums import reduce_scatter as scatter_sums
from ds_zipccl.comm.reduction_order import Reduction
from ds_zipccl.comm.request import Request, lossy_here, set_sum
from ds_zipccl.comm.spans import cut
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec


@dataclass(frozen=True, slots=True)
class _EqualShards:
    """A reduce-scatter of one input, which consists of equal shards."""

    reduction: Reduction
    nodes: Sequence[Sequence[int]]

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole,), (out,) = inputs, outputs
        chunk = ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
        span = slice(ctx.rank * out.numel(), (ctx.rank + 1) * out.numel())
        scatter_sums(ctx, whole.split([out.numel()] * ctx.size), out, self.reduction, span, chunk)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole,), (out,) = inputs, outputs
        parts = [Part((whole, span)) for span in cut(whole.numel(), out.numel(), ctx.size)]
        _enqueue(ctx, parts, out, self.reduction, self.nodes)


@dataclass(frozen=True, slots=True)
class _ListedShards:
    """A reduce-scatter of a list. Each input is a message by itself, because gloo all-reduces each tensor of the list by itself."""

    reduction: Reduction
    nodes: Sequence[Sequence[int]]

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (out,) = outputs
        chunk = ctx.transport.ring_chunk("all_reduce", out.numel(), out.element_size())
        scatter_sums(ctx, inputs, out, self.reduction, slice(0, out.numel()), chunk)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (out,) = outputs
        parts = [Part((shard, slice(0, shard.numel()))) for shard in inputs]
        _enqueue(ctx, parts, out, self.reduction, self.nodes)


def _enqueue(
    ctx: DeviceContext, parts: list[Part], out: torch.Tensor, reduction: Reduction, nodes: Sequence[Sequence[int]]
) -> None:
    place = Part((out, slice(0, out.numel())))
    sums.reduce_scatter(ctx, levels_of(ctx, nodes), parts, place, reduction.divisor)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.reduce_scatter_tensor``: the output of rank r is the sum of shard r of all inputs.

    The output may be the own shard of the input.
    """
    if is_small(input, config):
        call = uncompressed_call or (lambda: dist.reduce_scatter_tensor(output, input, op, group, async_op))
        return pass_small("reduce_scatter_tensor", role, sent_to_peers(input.nbytes, group), call)
    ranks = group_size(group)
    lossy = lossy_here(lossy, (input.dtype, input.device), group, "reduce_scatter_tensor", role)
    wrong = output.numel() * ranks != input.numel()
    problem = f"input must have {ranks} times {output.numel()} elements of output, got {input.numel()}"
    request = Request(
        "reduce_scatter_tensor",
        [input],
        [output],
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.reduce_scatter_tensor(outputs[0], inputs[0], op, group, later),
        numel=input.numel(),
        sent=input.numel() * (ranks - 1) / ranks,
        uncompressed_call=uncompressed_call,
        problem=problem if wrong else "",
        lossy=lossy,
        flat=True,
        again=is_again(config, role),
        places=lambda ctx: [summed_shards(ctx, [output.numel()] * ctx.size, output.element_size())],
    )
    reduction, _, nodes = set_sum(request, op)
    return execute(decide(request), request, _EqualShards(reduction, nodes))


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.reduce_scatter``: the output of rank r is the sum of ``input_list[r]`` of all ranks. Sizes may differ."""
    ranks, rank = group_size(group), dist.get_rank(group)
    lossy = lossy_here(lossy, (output.dtype, output.device), group, "reduce_scatter", role)
    sizes = [tensor.numel() for tensor in input_list]
    wrong = len(sizes) != ranks or sizes[rank] != output.numel()
    problem = f"input_list must have {ranks} tensors, the one of this rank of {output.numel()} elements, got {sizes}"
    request = Request(
        "reduce_scatter",
        input_list,
        [output],
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.reduce_scatter(outputs[0], list(inputs), op, group, later),
        numel=sum(sizes),
        sent=sum(sizes) * (ranks - 1) / ranks,
        uncompressed_call=uncompressed_call,
        problem=problem if wrong else "",
        again=is_again(config, role),
        places=lambda ctx: [summed_shards(ctx, sizes, output.element_size())],
        lossy=lossy,
    )
    reduction, _, nodes = set_sum(request, op)
    return execute(decide(request), request, _ListedShards(reduction, nodes))
