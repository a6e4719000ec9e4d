"""all_reduce, all_reduce_coalesced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.reduction_order import Sum
from ds_zipccl.comm.request import CallOptions, Options, Request, is_small
from ds_zipccl.comm.shadow_check import Plain
from ds_zipccl.comm.work import JoinedWork


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.all_reduce``: in place, the same bits on every rank."""
    call = CallOptions(**options)
    if is_small(tensor, call.config):
        return pass_small(
            "all_reduce", call, tensor.nbytes, group, lambda: dist.all_reduce(tensor, op, group, async_op)
        )

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.all_reduce(outputs[0], op, group, later)

    return _all_reduce("all_reduce", [tensor], op, group, async_op, call, plain)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.all_reduce_coalesced``: one all-reduce over the tensors laid end to end, in place."""

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handle = dist.all_reduce_coalesced(list(outputs), op, group, later)
        return JoinedWork("all_reduce_coalesced", [handle], outputs) if handle is not None else None

    return _all_reduce("all_reduce_coalesced", tensors, op, group, async_op, CallOptions(**options), plain)


def _all_reduce(
    name: str,
    tensors: Sequence[torch.Tensor],
    op: Any,
    group: dist.ProcessGroup | None,
    async_op: bool,
    call: CallOptions,
    plain: Plain,
) -> Any:
    numel = sum(tensor.numel() for tensor in tensors)
    return run(Request(name, [], tensors, group, async_op, call, plain=plain, numel=numel, sum=Sum(op)))
