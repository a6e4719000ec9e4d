"""What ZeRO knows of a collective and its call does not say: which parameters a gather is of, and who owns which part of a sum.

DeepSpeed's own methods stay as they are; they are watched, and what they were given is remembered until the call comes.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.delta.shared_base import BaseSlot
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.ops.reduce_to_owners import Owners
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission

# ---- buckets of gradients, ZeRO-1 and ZeRO-2 -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """What is about to be all-reduced over ``group``, and whose its parts are."""

    group: dist.ProcessGroup
    owned: Owners

    def fits(self, tensor: torch.Tensor, op: Any, group: Any, later: bool) -> bool:
        """Whether an all-reduce with these arguments is the one."""
        same = group is self.group and sum(numel for numel, _ in self.owned) == tensor.numel()
        return same and op == dist.ReduceOp.SUM and not later


#: For the next all-reduce only.
_bucket: ContextVar[_Bucket | None] = ContextVar("ds_zipccl_bucket", default=None)


def watch_buckets(optimizer: Any) -> None:
    """Look on when ``DeepSpeedZeroOptimizer`` reduces a bucket. Repeating it does nothing.

    ``allreduce_and_copy_with_multiple_ranks`` all-reduces its tensors laid end to end, a copy of them (cast to the communication dtype
    if need be), and then reads of the sums those whose ``bucket_ranks`` have this rank: it adds them to this rank's partition and copies
    them back. A bucket of a single tensor is no copy but the gradient itself: there ranks that do not own it keep their own gradient
    instead of the sum, as they do in every bucket of several tensors, so that nothing in DeepSpeed may count on it. Everything but the
    all-reduce is DeepSpeed's own code.

    Left alone, so that all ranks get the sums, and counted by :func:`ds_zipccl.telemetry.counters.record_whole`: ``reduce_scatter`` false,
    ``contiguous_gradients`` false and the BF16 optimizer, which reduce by other methods and copy all of it back (the norm of the BF16
    optimizer's gradients is over all of them); and ZenFlow, which looks at gradients in ways of its own. Not concerned:
    ``use_multi_rank_bucket_allreduce`` false, which reduces to owners already.
    """
    name = "allreduce_and_copy_with_multiple_ranks"
    original = getattr(optimizer, name, None)
    if original is None or hasattr(original, "ds_zipccl"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        group, owners = given.get("process_group"), given.get("bucket_ranks")
        bucket = None
        if owners is not None and not getattr(self, "zenflow", False):
            sizes = [tensor.numel() for tensor in given["small_bucket"]]
            sets = [ranks if isinstance(ranks, frozenset) else frozenset((ranks,)) for ranks in owners]
            bucket = _Bucket(self.dp_process_group if group is None else group, list(zip(sizes, sets, strict=True)))
        token = _bucket.set(bucket)
        try:
            return original(self, *args, **kwargs)
        finally:
            _bucket.reset(token)

    method.ds_zipccl = True  # type: ignore[attr-defined]
    setattr(optimizer, name, method)


def owned(tensor: torch.Tensor, op: Any, group: Any, later: bool) -> tuple[Owners | None, str]:
    """Whose the parts of what is all-reduced are, where nobody else needs their sums; else None, and why."""
    bucket = _bucket.get()
    _bucket.set(None)
    if bucket is None or not bucket.fits(tensor, op, group, later):
        return None, "the owners of the bucket are not known"
    return bucket.owned, ""


# ---- gathers of parameters, ZeRO-3 -----------------------------------------------------------------------------------

#: The parameters that are being asked for and have not been gathered yet, in DeepSpeed's order.
_wanted: ContextVar[list[Any] | None] = ContextVar("ds_zipccl_wanted", default=None)
#: Attribute of a parameter: a weak reference to its BaseSlot. DeepSpeed does not let go of parameters when their
#: engine is gone, and this memory is larger than they are.
_KEPT = "ds_zipccl_kept"


def _gathered_dtype(param: Any, shard: torch.Tensor) -> torch.dtype:
    """What a shard is gathered as; DeepSpeed's own function, where there is one, knows of autocast."""
    return shard.dtype


def watch_gathers(module: ModuleType) -> None:
    """Look on when parameters that ``deepspeed.zero.Init`` partitions are asked for. Repeating it does nothing.

    DeepSpeed lays the shards of several parameters end to end and gathers them into new memory. ``module`` is
    ``deepspeed.runtime.zero.partition_parameters``.
    """
    global _gathered_dtype
    _gathered_dtype = getattr(module, "get_allgather_dtype", _gathered_dtype)
    init = module.Init
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


def keep(parameters: Iterable[Any], config: ZipcclConfig, device: torch.device) -> tuple[list[BaseSlot], str]:
    """Memory for what is gathered of the parameters that ZeRO-3 frees after use. A collective of all groups that share them.

    Returns:
        The memory, in use as long as the caller holds it, and what was done, for the user.

    Raises:
        CommError: see :func:`ds_zipccl.comm.allocate_bases`.
    """
    groups: dict[dist.ProcessGroup, list[Any]] = {}
    for param in parameters:
        if hasattr(param, "ds_id") and not param.ds_persist:
            groups.setdefault(param.ds_process_group, []).append(param)
    everything: list[BaseSlot] = []
    never = {
        "delta": config.delta == "off",
        "codec": config.codec == "raw",
        "mode": config.mode_of("zero_param") == "never",
    }
    if any(never.values()):
        return [], f"not used, as nothing would be a difference: see {', '.join(key for key in never if never[key])}"
    skipped = ""
    for group, params in groups.items():
        state = group_state(group)
        if state is None or state.size == 1:
            continue
        backend = state.backend(device.type)
        if device.type not in admission.DELTA_DEVICES or backend not in admission.CODED_BACKENDS[device.type]:
            skipped = f"; no differences on {device.type} over {backend} yet"
            continue
        shards = [(param.ds_tensor.ds_numel, _gathered_dtype(param, param.ds_tensor)) for param in params]
        for param, kept in zip(params, comm.allocate_bases(shards, config.zero3_base, group, device), strict=True):
            setattr(param, _KEPT, weakref.ref(kept))
            everything.append(kept)
    nbytes, mates = (
        sum(kept.memory.nbytes for kept in everything),
        max((len(kept.mates) for kept in everything), default=1),
    )
    where = f"shared by the {mates} ranks of a node" if mates > 1 else "on every rank"
    return everything, f"{nbytes / 1e6:.1f} MB, {where}{skipped}"


def base_of(output: torch.Tensor, group: dist.ProcessGroup | None) -> comm.SharedBase | None:
    """What was gathered last of the parameters that are now gathered into ``output``; None where they are not known."""
    wanted, state = _wanted.get(), group_state(group)
    if not wanted or state is None:
        return None
    numel = output.numel() // state.size
    mine = [param for param in wanted if _fits(param, output.dtype, group)]
    if sum(param.ds_tensor.ds_numel for param in mine) != numel:
        mine = mine[:1]  # they come one after the other
    if sum(param.ds_tensor.ds_numel for param in mine) != numel:
        return None
    wanted[:] = [param for param in wanted if all(param is not one for one in mine)]
    return comm.SharedBase([kept for param in mine if (kept := _kept(param))])


def _kept(param: Any) -> BaseSlot | None:
    reference = getattr(param, _KEPT, None)
    return None if reference is None else reference()


def _fits(param: Any, dtype: torch.dtype, group: dist.ProcessGroup | None) -> bool:
    kept = _kept(param)
    return kept is not None and param.ds_process_group is group and kept.memory.dtype == dtype
