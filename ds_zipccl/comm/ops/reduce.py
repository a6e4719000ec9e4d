"""reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.execution import execute
from ds_zipccl.comm.group_state import group_rank, is_member, resolve_group
from ds_zipccl.comm.host.sums import reduce_scatter
from ds_zipccl.comm.reduction_order import Reduction
from ds_zipccl.comm.request import Request, lossy_here, set_sum
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec


@dataclass(frozen=True, slots=True)
class _ToRoot:
    """A reduce-scatter in which the root's shard is the whole message."""

    root: int  # group rank
    reduction: Reduction

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        flat = [*inputs, *outputs][0]
        chunk = ctx.transport.ring_chunk("reduce", flat.numel(), flat.element_size())
        shards = [flat if rank == self.root else flat[:0] for rank in range(ctx.size)]
        reduce_scatter(ctx, shards, shards[ctx.rank], self.reduction, slice(0, flat.numel()), chunk)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.reduce``: the sum goes in place to global rank ``dst`` or group rank ``group_dst``. Other ranks keep their
    tensors."""
    if not is_member(group):
        return dist.reduce(tensor, dst, op, group, async_op)
    root = group_rank(group, dst, group_dst)
    root_globally = dist.get_global_rank(resolve_group(group), root)
    adds = dist.get_rank(group) == root
    lossy = lossy_here(lossy, (tensor.dtype, tensor.device), group, "reduce", role)
    request = Request(
        "reduce",
        [] if adds else [tensor],
        [tensor] if adds else [],
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.reduce([*inputs, *outputs][0], root_globally, op, group, later),
        numel=tensor.numel(),
        sent=tensor.numel() * (not adds),
        uncompressed_call=uncompressed_call,
        lossy=lossy,
        memory_order=True,
    )
    reduction = set_sum(request, op).reduction
    return execute(decide(request), request, _ToRoot(root, reduction))
