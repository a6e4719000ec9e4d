"""broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_rank, is_member, resolve_group
from ds_zipccl.comm.request import CallOptions, ExactOptions, Request, is_small


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    **options: Unpack[ExactOptions],
) -> Any:
    """``torch.distributed.broadcast``: every rank's ``tensor`` becomes that of global rank ``src`` or group rank ``group_src``."""
    if not is_member(group):
        return dist.broadcast(tensor, src, group, async_op)
    call = CallOptions(**options)
    if src is not None and is_small(tensor, call.config):
        sent = tensor.nbytes if src == dist.get_rank() else 0
        return pass_small("broadcast", call, sent, group, lambda: dist.broadcast(tensor, src, group, async_op))
    root = group_rank(group, src, group_src)
    root_globally = dist.get_global_rank(resolve_group(group), root)
    inputs, outputs = ([tensor], []) if dist.get_rank(group) == root else ([], [tensor])

    def plain(given: Sequence[torch.Tensor], written: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.broadcast([*given, *written][0], root_globally, group, later)

    return run(
        Request("broadcast", inputs, outputs, group, async_op, call, plain=plain, numel=tensor.numel(), root=root)
    )
