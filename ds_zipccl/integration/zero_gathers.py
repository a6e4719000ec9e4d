"""Parameters of gathers, for ZeRO-3: the call of a gather into new memory does not tell its parameters. Their bases."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.delta.shared_base import BaseSlot
from ds_zipccl.comm.device.agreed import Agreed
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission

#: Parameters that DeepSpeed has asked for and not gathered yet, in its order.
_wanted: ContextVar[list[Any] | None] = ContextVar("ds_zipccl_wanted", default=None)
#: Attribute of a parameter: a weak reference to its base. DeepSpeed keeps parameters after their engine is gone, and a base is larger than
#: the parameter's own memory.
_BASE = "ds_zipccl_base"


def _gathered_dtype(param: Any, shard: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a shard is gathered. DeepSpeed's own function, if there is one, replaces this one: it knows autocast."""
    return shard.dtype


def gathered_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which the parameter's shards are gathered."""
    return _gathered_dtype(param, param.ds_tensor)


def watch_gathers(module: ModuleType) -> None:
    """Note the parameters that DeepSpeed asks for before each gather. Repeating the call does nothing.

    DeepSpeed lays the shards of several parameters end to end and gathers them into new memory, or gathers one after the other.

    Args:
        module: ``deepspeed.runtime.zero.partition_parameters``.
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
            with _wanting(sorted(params, key=lambda one: one.ds_id)):
                return gather(params, *args, **kwargs)

        param.all_gather_coalesced = all_gather_coalesced

    one_by_one = init._all_gather

    @functools.wraps(one_by_one)
    def _all_gather(self: Any, param_list: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        params = list(param_list)
        with _wanting([param for param in params if param.ds_status.name == "NOT_AVAILABLE"]):
            return one_by_one(self, params, *args, **kwargs)

    init._all_gather = _all_gather
    _convert_to_deepspeed_param.ds_zipccl = True  # type: ignore[attr-defined]
    init._convert_to_deepspeed_param = _convert_to_deepspeed_param


@contextlib.contextmanager
def _wanting(params: list[Any]) -> Iterator[None]:
    token = _wanted.set(params)
    try:
        yield
    finally:
        _wanted.reset(token)


def allocate_bases(
    parameters: Iterable[Any],
    config: ZipcclConfig,
    device: torch.device,
    agreed_of: Callable[[Sequence[Any]], Sequence[Agreed]] = lambda params: (),
) -> tuple[list[BaseSlot], str]:
    """Allocate a base for each parameter that ZeRO-3 frees after use. A collective of all groups of these parameters; blocks.

    Args:
        agreed_of: returns the agreed sizes of parameters, or nothing if one of them has none. In groups in the order of streams bases are
            held with the sizes.

    Returns:
        The bases, which live as long as the caller holds the list, and a sentence for the user.

    Raises:
        CommError: see :func:`ds_zipccl.comm.allocate_bases`.
    """
    never = {
        "delta": config.delta == "off",
        "codec": config.codec == "raw",
        "mode": config.mode_of("zero_param") == "never",
    }
    if any(never.values()):
        reasons = ", ".join(key for key, holds in never.items() if holds)
        return [], f"not used, as no gather would send differences: see {reasons}"
    groups: dict[dist.ProcessGroup, list[Any]] = {}
    for param in parameters:
        if hasattr(param, "ds_id") and not param.ds_persist:
            groups.setdefault(param.ds_process_group, []).append(param)
    bases: list[BaseSlot] = []
    skipped = ""
    for group, params in groups.items():
        members = group_state(group)
        if members is None or members.size == 1:
            continue
        backend = members.backend(device.type)
        streams = members.streams(device.type)
        agreed = agreed_of(params) if streams else ()
        if not admission.has_differences(device.type, backend) or (streams and not agreed):
            off = ": nccl is off" if config.nccl == "off" else ": no sizes are agreed on with this optimizer"
            skipped = f"; no differences on {device.type} over {backend}{off if streams else ' yet'}"
            continue
        shards = [(param.ds_tensor.ds_numel, gathered_dtype(param)) for param in params]
        found = comm.allocate_bases(shards, config.zero3_base, group, device)
        for param, base in zip(params, found, strict=True):
            setattr(param, _BASE, weakref.ref(base))
        for one, base in zip(agreed, found, strict=False):  # as many, or none
            one.hold(base)
        bases += found
    nbytes = sum(base.memory.nbytes for base in bases)
    mates = max((len(base.mates) for base in bases), default=1)
    where = f"shared by the {mates} ranks of a node" if mates > 1 else "on every rank"
    return bases, f"{nbytes / 1e6:.1f} MB, {where}{skipped}"


def take_parameters(output: torch.Tensor, group: dist.ProcessGroup | None) -> Sequence[Any]:
    """Return the parameters of a gather into ``output``, in the order of their shards; none if they are not known.

    Args:
        output: ``[ranks * numel]``, the shards of the parameters of each rank end to end.
    """
    wanted, members = _wanted.get(), group_state(group)
    if not wanted or members is None:
        return ()
    numel = output.numel() // members.size
    gathered = [param for param in wanted if param.ds_process_group is group and gathered_dtype(param) == output.dtype]
    if _shard_numel(gathered) != numel:
        gathered = gathered[:1]  # one gather per parameter
    if _shard_numel(gathered) != numel:
        return ()
    taken = {id(param) for param in gathered}
    wanted[:] = [param for param in wanted if id(param) not in taken]
    return gathered


def is_secondary(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether the parameters that are awaited are gathered from secondary shards over ``group``, in the order of streams.

    Such groups are inside a node (``zero_hpz_partition_size``). The host need not wait there for sizes.
    """
    wanted, members = _wanted.get(), group_state(group)
    if not wanted or members is None or not members.streams(device.type):
        return False
    return wanted[0].ds_secondary_tensor is not None and wanted[0].ds_zero_param_process_group is group


def base_of(params: Sequence[Any], dtype: torch.dtype) -> comm.SharedBase | None:
    """Return the base of a gather of these parameters in a dtype, None if one of them has none."""
    bases = [base for param in params if (base := _base(param)) is not None and base.memory.dtype == dtype]
    return comm.SharedBase(bases) if bases and len(bases) == len(params) else None


def _shard_numel(params: Iterable[Any]) -> int:
    return sum(param.ds_tensor.ds_numel for param in params)


def _base(param: Any) -> BaseSlot | None:
    reference = getattr(param, _BASE, None)
    return None if reference is None else reference()
