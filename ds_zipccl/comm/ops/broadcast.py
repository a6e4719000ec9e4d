"""broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_rank, is_member, resolve_group
from ds_zipccl.comm.request import Request, is_small
from ds_zipccl.config import DEFAULT, ZipcclConfig


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.broadcast``: every rank's ``tensor`` becomes that of global rank ``src`` or group rank ``group_src``."""
    if not is_member(group):
        return dist.broadcast(tensor, src, group, async_op)
    if src is not None and is_small(tensor, config):
        call = uncompressed_call or (lambda: dist.broadcast(tensor, src, group, async_op))
        return pass_small("broadcast", role, tensor.nbytes if src == dist.get_rank() else 0, call)
    root = group_rank(group, src, group_src)
    root_globally = dist.get_global_rank(resolve_group(group), root)
    sends = dist.get_rank(group) == root
    request = Request(
        "broadcast",
        [tensor] if sends else [],
        [] if sends else [tensor],
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.broadcast([*inputs, *outputs][0], root_globally, group, later),
        numel=tensor.numel(),
        sent=tensor.numel() * sends,
        uncompressed_call=uncompressed_call,
        memory_order=True,
        root=root,
    )
    return run(request)
