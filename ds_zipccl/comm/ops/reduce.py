"""reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm.execution import run
from ds_zipccl.comm.group_state import group_rank, is_member, resolve_group
from ds_zipccl.comm.reduction_order import Sum
from ds_zipccl.comm.request import CallOptions, Options, Request


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.reduce``: the sum goes in place to global rank ``dst`` or group rank ``group_dst``. Other ranks keep their
    tensors."""
    if not is_member(group):
        return dist.reduce(tensor, dst, op, group, async_op)
    root = group_rank(group, dst, group_dst)
    root_globally = dist.get_global_rank(resolve_group(group), root)
    inputs, outputs = ([tensor], []) if dist.get_rank(group) != root else ([], [tensor])
    call, numel = CallOptions(**options), tensor.numel()

    def plain(given: Sequence[torch.Tensor], written: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.reduce([*given, *written][0], root_globally, op, group, later)

    return run(
        Request("reduce", inputs, outputs, group, async_op, call, plain=plain, numel=numel, sum=Sum(op), root=root)
    )
