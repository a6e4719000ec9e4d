"""reduce_scatter_tensor, reduce_scatter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.reduction_order import Sum
from ds_zipccl.comm.request import CallOptions, Options, Request, is_small


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.reduce_scatter_tensor``: the output of rank r is the sum of shard r of all inputs.

    The output may be the own shard of the input.
    """
    call = CallOptions(**options)
    if is_small(input, call.config):
        plain = partial(dist.reduce_scatter_tensor, output, input, op, group, async_op)
        return pass_small("reduce_scatter_tensor", call, input.nbytes, group, plain)
    ranks = group_size(group)
    wrong = output.numel() * ranks != input.numel()
    problem = f"input must have {ranks} times {output.numel()} elements of output, got {input.numel()}"
    request = Request(
        "reduce_scatter_tensor",
        [input],
        [output],
        group,
        async_op,
        call,
        plain=lambda inputs, outputs, later: dist.reduce_scatter_tensor(outputs[0], inputs[0], op, group, later),
        numel=input.numel(),
        problem=problem if wrong else "",
        sum=Sum(op),
    )
    return run(request)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.reduce_scatter``: the output of rank r is the sum of ``input_list[r]`` of all ranks. Sizes may differ."""
    ranks, rank = group_size(group), dist.get_rank(group)
    sizes = [tensor.numel() for tensor in input_list]
    wrong = len(sizes) != ranks or sizes[rank] != output.numel()
    problem = f"input_list must have {ranks} tensors, the one of this rank of {output.numel()} elements, got {sizes}"
    request = Request(
        "reduce_scatter",
        input_list,
        [output],
        group,
        async_op,
        CallOptions(**options),
        plain=lambda inputs, outputs, later: dist.reduce_scatter(outputs[0], list(inputs), op, group, later),
        numel=sum(sizes),
        problem=problem if wrong else "",
        sum=Sum(op),
    )
    return run(request)
