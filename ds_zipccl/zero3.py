"""Which parameters a ZeRO-3 gather is of, and the memory for what was gathered of them (``zero3_base``).

DeepSpeed lays the shards of several parameters end to end and gathers them into new memory; the call does not say which they are. So we
look on where parameters are asked for, and tell by the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, policy
from ds_zipccl.comm.members import known

#: The parameters that are being asked for and have not been gathered yet, in DeepSpeed's order.
_wanted: ContextVar[list[Any] | None] = ContextVar("ds_zipccl_wanted", default=None)
#: Attribute of a parameter: its :class:`ds_zipccl.comm.stored.Kept`.
_KEPT = "ds_zipccl_kept"


def watch(init: Any) -> None:
    """Look on when parameters that ``deepspeed.zero.Init`` partitions are asked for. Repeating it does nothing."""
    original = init._convert_to_deepspeed_param
    if hasattr(original, "ds_zipccl"):
        return

    @functools.wraps(original)
    def _convert_to_deepspeed_param(self: Any, param: Any) -> None:
        original(self, param)
        gather = param.all_gather_coalesced

        @functools.wraps(gather)
        def all_gather_coalesced(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            token = _wanted.set(sorted(params, key=lambda one: one.ds_id))
            try:
                return gather(params, *args, **kwargs)
            finally:
                _wanted.reset(token)

        param.all_gather_coalesced = all_gather_coalesced

    _convert_to_deepspeed_param.ds_zipccl = True  # type: ignore[attr-defined]
    init._convert_to_deepspeed_param = _convert_to_deepspeed_param


def keep(parameters: Iterable[Any], kind: str, device: torch.device) -> str:
    """Memory for the parameters that ZeRO-3 frees after use. A collective of all groups that this rank shares them with.

    Returns:
        What was done, for the user.

    Raises:
        CommError: see :func:`ds_zipccl.comm.keep`.
    """
    groups: dict[dist.ProcessGroup, list[Any]] = {}
    for param in parameters:
        if hasattr(param, "ds_id") and not param.ds_persist:
            groups.setdefault(param.ds_process_group, []).append(param)
    nbytes, mates, skipped = 0, 1, ""
    for group, params in groups.items():
        members = known(group)
        if members is None or members.size == 1:
            continue
        backend = members.backend(device.type)
        if device.type not in policy.DELTA_DEVICES or backend not in policy.CODED_BACKENDS[device.type]:
            skipped = f"; no differences on {device.type} over {backend} yet"
            continue
        shards = [(param.ds_tensor.ds_numel, param.ds_tensor.dtype) for param in params]
        for param, kept in zip(params, comm.keep(shards, kind, group, device), strict=True):
            setattr(param, _KEPT, kept)
            nbytes, mates = nbytes + kept.memory.nbytes, len(kept.mates)
    return f"{nbytes / 1e6:.1f} MB, {f'shared by the {mates} ranks of a node' if mates > 1 else 'on every rank'}{skipped}"


def base_of(output: torch.Tensor, group: dist.ProcessGroup | None) -> comm.Stored | None:
    """What was gathered last of the parameters that are now gathered into ``output``; None where they are not known."""
    wanted = _wanted.get() or []
    mine = [param for param in wanted if _fits(param, output.dtype, group)]
    numel = output.numel() // max(1, known(group).size)
    if len(mine) > 1 and sum(param.ds_tensor.ds_numel for param in mine) != numel:
        mine = mine[:1]  # one after the other
    if not mine or sum(param.ds_tensor.ds_numel for param in mine) != numel:
        return None
    wanted[:] = [param for param in wanted if all(param is not one for one in mine)]
    return comm.Stored([getattr(param, _KEPT) for param in mine])


def _fits(param: Any, dtype: torch.dtype, group: dist.ProcessGroup | None) -> bool:
    kept = getattr(param, _KEPT, None)
    return kept is not None and param.ds_process_group is group and kept.memory.dtype == dtype
