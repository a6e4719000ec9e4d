"""Agreements on parameters that are gathered again and again, ahead of their gathers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import engine
from ds_zipccl.comm.bases.state import GATHER, GatheredParameter
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.group_state import group_state, resolve_group
from ds_zipccl.comm.ops.all_gather import request_shards
from ds_zipccl.comm.request import CallOptions
from ds_zipccl.config import DEFAULT, ZipcclConfig


def agree_sizes(
    parameters: Iterable[tuple[GatheredParameter, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> int:
    """Agree on the sizes of the frames of parameters that have none, for gathers with ``parameters``. A collective; the host waits once.

    Nothing happens where a gather of all these parameters would not be coded in the order of streams, or where all of them have sizes.

    Args:
        parameters: with the own shards, flat, contiguous, all on one device, in an order that is equal on all ranks.

    Returns:
        The number of parameters that got sizes.

    Raises:
        CommError: a rank has refused a frame of an earlier operation, or did not come within the group's timeout. All ranks raise.
    """
    state = group_state(group)
    if state is None:
        return 0
    found: dict[torch.dtype, list[tuple[GatheredParameter, torch.Tensor]]] = {}
    for one, words in parameters:
        found.setdefault(one.dtype or words.dtype, []).append((one, words))
    coded: list[tuple[GatheredParameter, torch.Tensor]] = []
    codec: str = config.codec
    for dtype, some in found.items():
        like = tensors.empty(0, dtype, some[0][1].device)
        # decided on, not executed
        request = request_shards(GATHER, [like], [like], group, False, CallOptions(config, role))
        request.numel = sum(words.numel() for _, words in some) * state.size
        decision = decide(request).decision
        if decision.on_device and decision.codec != "raw":
            codec = decision.codec
            coded += some
    if not coded:
        return 0
    chosen = engine.engine_of(state, coded[0][1].device.type)
    return chosen.agree_ahead(coded, resolve_group(group), config, role, codec)
