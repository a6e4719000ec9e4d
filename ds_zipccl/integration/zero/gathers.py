"""Parameters of gathers, for ZeRO-3: the call of a gather into new memory does not tell its parameters. Their bases and their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import comm, devices
from ds_zipccl.comm import GatheredParameter, topology
from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm.bases import host_memory
from ds_zipccl.comm.bases.shared import BaseSlot, choose_fitting, held_share, node_refused
from ds_zipccl.comm.group_state import group_nodes, group_size, group_state, resolve_group, state_of
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hints, hook_points
from ds_zipccl.policy import admission
from ds_zipccl.telemetry import counters

#: Attribute of a parameter: its :class:`ds_zipccl.comm.GatheredParameter`, see :mod:`.versions`.
STATE = "ds_zipccl_state"
#: Attribute of an optimizer, and of each of its parameters: the versions of all of them.
VERSIONS = "ds_zipccl_versions"
#: With ``zero3_base`` auto: the part of the available memory that bases take without a limit of the user (admission: the rest is for the
#: program, which may grow), and the part that stays free whatever the limit is.
AUTO_PART, LEFT_PART = 4, 8
#: Optimizer steps of an engine before its bases take memory of devices (limit: the first one makes the optimizer's state, the second one
#: has the peak of the activations beside it).
STEPS_BEFORE = 2
#: Trained parameters that are less than this part of all are not named in the start-up line (default, not tuned: adapters gain nothing).
NAMED_PART = 20


#: DeepSpeed's own function for :func:`gathered_dtype`, if there is one: it knows autocast.
_dtype_of: Callable[[Any, torch.Tensor], torch.dtype] | None = None


def gathered_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which the parameter's shards are gathered."""
    return param.ds_tensor.dtype if _dtype_of is None else _dtype_of(param, param.ds_tensor)


def learn_dtype(module: ModuleType) -> None:
    """Take DeepSpeed's function for :func:`gathered_dtype` from ``deepspeed.runtime.zero.partition_parameters``."""
    global _dtype_of
    _dtype_of = hook_points.fitting("get_allgather_dtype", module) or _dtype_of


def gather_coalesced(original: Callable[..., Any], params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Note the parameters that the method ``all_gather_coalesced`` of a parameter gathers. DeepSpeed lays the shards of several parameters
    end to end and gathers them into new memory, or gathers one after the other."""
    params = list(params)
    with hints.hinting(parameters={one.ds_id: one for one in sorted(params, key=lambda one: one.ds_id)}):
        return original(params, *args, **kwargs)


def gather_single(original: Callable[..., Any], init: Any, param_list: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Note the parameters that ``Init._all_gather`` gathers, one after the other; wait for all gathers where it returns no handles. Up to
    0.19.7 DeepSpeed waits for the last one alone, and gathers over gloo end in any order."""
    params, started = list(param_list), list[Any]()
    awaited = {one.ds_id: one for one in params if one.ds_status.name == "NOT_AVAILABLE"}
    with hints.hinting(parameters=awaited, started=started):
        handle = original(init, params, *args, **kwargs)
    for one in started if handle is None else ():
        one.wait()
    return handle


def partition(original: Callable[..., Any], init: Any, param_list: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a partition of changed parameters, such as one of ``GatheredParameters``, end their versions."""
    if kwargs.get("has_been_updated", args[1] if len(args) > 1 else False):
        forget(param_list)
    return original(init, param_list, *args, **kwargs)


class Gathered(NamedTuple):
    """A parameter that is gathered again and again, by its shards of ``numel`` elements in a dtype. ``trained``: optimizer steps change it.
    ``state``: holds its base; None: it cannot have one."""

    group: dist.ProcessGroup
    numel: int
    dtype: torch.dtype
    trained: bool
    state: GatheredParameter | None


class Waiting:
    """Parameters of an engine whose bases take memory of devices, once :data:`STEPS_BEFORE` optimizer steps have shown how much is left."""

    def __init__(self) -> None:
        self.parameters: list[Gathered] = []
        self._steps = 0

    def end_step(self, config: ZipcclConfig, device: torch.device) -> tuple[list[BaseSlot], str]:
        """Note that an optimizer step of the engine has ended; see :func:`hold_bases`. A collective of all groups of the parameters at one
        step, of all ranks at the same place of the program."""
        self._steps += 1
        if not self.parameters or self._steps < STEPS_BEFORE:
            return [], ""
        parameters, self.parameters = self.parameters, []
        return hold_bases(parameters, config, device, trains=True, on_devices=True)


def allocate_bases(
    parameters: Iterable[Any],
    config: ZipcclConfig,
    device: torch.device,
    *,
    trains: bool = True,
    waiting: Waiting | None = None,
) -> tuple[list[BaseSlot], str]:
    """Allocate a base for each parameter that ZeRO-3 frees after use, see :func:`hold_bases`; with ``zero3_base`` auto not for parameters
    on disk."""
    found = []
    for param in parameters:
        if hasattr(param, "ds_id") and not param.ds_persist and group_size(param.ds_process_group) > 1:
            on_disk = getattr(param.ds_tensor, "final_location", None) == "nvme"  # whose users have no memory to spare
            if not (config.zero3_base == "auto" and on_disk):
                found.append(_gathered(param, trains))
    return hold_bases(found, config, device, trains=trains, waiting=waiting)


def _gathered(param: Any, trains: bool) -> Gathered:
    dtype, state = gathered_dtype(param), getattr(param, STATE, None)
    return Gathered(param.ds_process_group, param.ds_tensor.ds_numel, dtype, trains and param.requires_grad, state)


def hold_bases(
    gathered: Sequence[Gathered],
    config: ZipcclConfig,
    device: torch.device,
    *,
    trains: bool,
    on_devices: bool = False,
    waiting: Waiting | None = None,
) -> tuple[list[BaseSlot], str]:
    """Allocate a base for each parameter; with ``zero3_base`` auto for those of them that are frozen and fit, in host memory or spread over
    the devices of a node, whichever is faster. A whole copy on each device would be the memory that sharding avoids. In groups in the order
    of streams bases are held with the agreed sizes of the parameters. A collective of all groups of these parameters; blocks.

    Args:
        trains: there is an optimizer; otherwise all parameters are frozen.
        on_devices: with ``zero3_base`` auto, memory of devices may be taken now.
        waiting: gets the parameters for which memory of devices may be taken later; None: nothing is taken there later.

    Returns:
        The bases, which live as long as the caller holds the list, and a sentence for the user; "" where there is nothing to say.

    Raises:
        CommError: see :func:`ds_zipccl.comm.allocate_bases`; not with ``zero3_base`` auto.
    """
    auto, useless = config.zero3_base == "auto", _never_differs(config)
    groups: dict[dist.ProcessGroup, list[Gathered]] = {}
    for one in gathered:
        groups.setdefault(one.group, []).append(one)
    further = ""
    if auto:
        frozen = {group: _frozen(params) for group, params in groups.items()}
        held = {id(one) for some in frozen.values() for one in some}
        trained = [[one for one in params if id(one) not in held] for params in groups.values()]
        if gain := _further(max(trained, key=_nbytes, default=[]), gathered, config, device, waiting is not None):
            further = f"; {gain}"
            counters.record_choice(
                "zero_param", "all_gather_into_tensor", "zero3_base", gain
            )  # for the table at the end
        groups = {group: some for group, some in frozen.items() if some}
    if auto and not groups:
        return [], f"none: no gathered parameter is frozen now{further}" if gathered else ""
    if useless and not auto:
        return [], f"not used, as {useless}"
    host = _HostShare(config) if auto else None
    bases: list[BaseSlot] = []
    reasons: list[str] = []
    later: list[Gathered] = []
    for params in groups.values():
        some, kinds, reason = _usable(params, config, device, trains, on_devices or waiting is not None)
        reasons.append(reason)
        if some and kinds[0] == "node" and waiting is not None and auto:
            later += some
        elif some:
            found, said = _allocated(some, kinds, config, device, host)
            bases += found
            reasons += said
    if waiting is not None:
        waiting.parameters += later
    reasons = list(filter(None, reasons))
    if not auto:
        return bases, "; ".join([_size(bases), *reasons[-1:]])
    wanted = [one for params in groups.values() for one in params]
    why = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
    if later and not bases:
        after = f"after {STEPS_BEFORE} steps, in the memory that the devices of a node have left, for {len(later)} frozen parameters"
        return [], f"{after}{why}{further}"
    if not bases:
        return [], f"nothing for {len(wanted)} frozen parameters of {_nbytes(wanted) / 1e6:.1f} MB{why}{further}"
    count = f"{len(wanted)}" if len(bases) == len(wanted) else f"{len(bases)} of {len(wanted)}"
    return bases, f"{_size(bases)}, for {count} frozen parameters{why}{further}"


def _nbytes(params: Iterable[Gathered]) -> int:
    """Return the bytes of parameters when they are gathered."""
    return sum(group_size(one.group) * one.numel * one.dtype.itemsize for one in params)


def _further(
    trained: Sequence[Gathered], gathered: Sequence[Gathered], config: ZipcclConfig, device: torch.device, on_devices: bool
) -> str:  # fmt: skip
    """Return what a base of the trained parameters of one group would gain and take, "" where that is nothing, is not known, or is little
    of what is ``gathered``."""
    some, kinds, _ = _usable(trained, config, device, True, on_devices) if trained else ([], [], "")
    nbytes = _nbytes(some)
    if not kinds or nbytes * NAMED_PART < _nbytes(gathered):
        return ""
    group, kind, gained = some[0].group, kinds[0], ""
    members = state_of(group)
    if members.streams(device.type):
        seconds = comm_engine.engine_of(members, device.type).saved_by_bases(kind, nbytes, group, device.type)
        if seconds <= 0:
            return ""
        gained = f", which saves {seconds:.2g} s in each"
    share, whose = (len(group_nodes(group)[0]), "device") if kind == "node" else (1, "node")
    size = f"{nbytes / 1e6 / share:.1f} MB of each {whose}'s memory"
    return f'"{kind}" keeps trained ones too in {size}: backward passes and further micro-batches gather without a message{gained}'


def _allocated(
    params: Sequence[Gathered],
    kinds: Sequence[str],
    config: ZipcclConfig,
    device: torch.device,
    host: _HostShare | None,
) -> tuple[list[BaseSlot], list[str]]:
    """Give bases of the first of ``kinds`` for which there is memory to the parameters of one group. Return the bases, and why parameters
    have none, or another kind. ``host``: with ``zero3_base`` auto the memory that the host has left for bases."""
    group, reasons = params[0].group, []
    for kind in kinds:
        some = list(params)
        if host is not None:
            share = host.left() if kind == "host" else _device_share(config, device)
            chosen, limit = choose_fitting([(one.numel, one.dtype) for one in some], share, group, device, kind)
            if len(chosen) < len(some):
                where = "node" if kind == "host" else "device"
                reasons.append(f"{limit / 1e6:.1f} MB are allowed on a {where}, see zero3_base_mib")
            some = [some[number] for number in chosen]
        try:
            found = comm.allocate_bases([(one.numel, one.dtype) for one in some], kind, group, device)
        except comm.CommError as error:  # on all ranks of the group
            if host is None:
                raise
            reasons.append(str(error))
            continue
        if found:
            for one, base in zip(some, found, strict=True):
                assert one.state is not None  # only usable parameters have one
                one.state.hold(base)
            return found, reasons
    return [], reasons


def _frozen(params: Sequence[Gathered]) -> list[Gathered]:
    """Return the parameters of one group that no rank trains: a rank may have frozen more of them. A collective; blocks."""
    told = topology.tell(params[0].group, "".join("ft"[one.trained] for one in params)).values()
    return [one for one, marks in zip(params, zip(*told, strict=True), strict=True) if "t" not in marks]


class _HostShare:
    """The part of this rank in the host memory that bases may take. A limit of the user counts bases of earlier calls too."""

    def __init__(self, config: ZipcclConfig) -> None:
        self._share, self._before = _share(config), 0 if config.zero3_base_mib else held_share()

    def left(self) -> int:
        """Return the bytes that are left now."""
        return self._share - (held_share() - self._before)


def _device_share(config: ZipcclConfig, device: torch.device) -> int:
    """Return the bytes that bases may take of the memory of this rank's device now."""
    free = devices.free_memory(device)
    if free is None:
        return _share(config)
    return _allowed(free, (config.zero3_base_mib << 20) // _ranks_of_node())


def _share(config: ZipcclConfig) -> int:
    """Return the bytes that the bases of this rank may take: the part of this rank in the limit of its node."""
    return _allowed(host_memory.available(), config.zero3_base_mib << 20) // _ranks_of_node()


def _allowed(available: int, limit: int) -> int:
    """Return the bytes that bases may take of those that are available. ``limit``: of the user; 0: none."""
    return min(limit, available - available // LEFT_PART) if limit else available // AUTO_PART


def _ranks_of_node() -> int:
    nodes, rank = group_nodes(resolve_group(None)), dist.get_rank()
    return next((len(node) for node in nodes if rank in node), group_size(None))


def _never_differs(config: ZipcclConfig) -> str:
    """Return why the config lets no gather of parameters send differences; "" if it does not."""
    never = {
        "delta": config.delta == "off",
        "codec": config.codec == "raw",
        "mode": config.mode_of("zero_param") == "never",
    }
    reasons = ", ".join(key for key, holds in never.items() if holds)
    return f"no gather would send differences: see {reasons}" if reasons else ""


def _usable(
    params: Sequence[Gathered], config: ZipcclConfig, device: torch.device, trains: bool, on_devices: bool
) -> tuple[list[Gathered], Sequence[str], str]:
    """Return the parameters of one group whose gathers would use a base, the kinds of bases that they may have, the best first, and why
    gathers of other parameters would use none; "" if there are none. ``on_devices``: memory of devices may be taken with "auto".

    A base in host memory is faster to read than gloo on any link, also inside a node. On groups in the order of streams measured speeds
    decide: where moves pass for as long as the job runs, such as inside a node, nothing would read a base, and a network may be faster than
    the bus to host memory.
    """
    group = params[0].group
    members = state_of(group)
    backend, streams, off = members.backend(device.type), members.streams(device.type), config.nccl == "off"
    where = f"on {device.type} over {backend}"
    dtypes = admission.difference_dtypes(device.type, backend)
    reason = _never_differs(config)
    if not reason and config.zero3_base == "node":
        refused = node_refused(group) if streams else "its ranks share host memory"
        reason = f'no group {where} keeps parameters by node, as {refused}: set "host"' if refused else ""
    if not reason and not dtypes:
        reason = f"no differences {where}{': nccl is off' if streams and off else ''}"
    if not reason and any(one.state is None for one in params):
        reason = f"no differences {where}: {'nccl is off' if off else 'no sizes are agreed on with this optimizer'}"
    auto = config.zero3_base == "auto"
    kinds: Sequence[str] = ("host",) if auto else (config.zero3_base,)
    if not reason and streams and auto and config.mode_of("zero_param") == "auto":
        passes = comm_engine.never_coded("all_gather_into_tensor", group, device.type)
        found = comm_engine.engine_of(members, device.type).kinds_of_bases(group, device.type)
        kinds = [kind for kind in found if kind != "node" or (on_devices and not node_refused(group))]
        if passes is not None:
            reason = f"gathers {where} pass: {passes.value}"
        elif not kinds:
            reason = f"the network is faster than the memory of bases {where}"
    if reason:
        return [], kinds, reason
    some = [one for one in params if one.dtype in dtypes]
    if some and streams and auto and not trains:
        return [], kinds, "no optimizer step checks copies of bases there"
    others = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in params if one.dtype not in dtypes)
    return some, kinds, f"no differences of {', '.join(others)} {where}" if others else ""


def _size(bases: Sequence[BaseSlot]) -> str:
    nbytes = sum(base.memory.nbytes for base in bases)
    if bases and bases[0].levels is not None:
        return (
            f"{nbytes / 1e6:.1f} MB on every rank, one copy for the {len(bases[0].levels.node_ranks)} ranks of a node"
        )
    node_ranks = max((len(base.node_ranks) for base in bases), default=1)
    where = f"shared by the {node_ranks} ranks of a node" if node_ranks > 1 else "on every rank"
    return f"{nbytes / 1e6:.1f} MB, {where}"


def take_parameters(output: torch.Tensor, group: dist.ProcessGroup | None) -> Sequence[Any]:
    """Return the parameters of a gather into ``output``, in the order of their shards; none if they are not known.

    Args:
        output: ``[ranks * numel]``, the shards of the parameters of each rank end to end.
    """
    wanted, members = hints.current().parameters, group_state(group)
    if not wanted or members is None:
        return ()
    awaited = [param for param in wanted.values() if param.ds_process_group is group]
    gathered = [param for param in awaited if gathered_dtype(param) == output.dtype]
    for some in (gathered, gathered[:1]):  # one gather of all, or one per parameter
        if sum(param.ds_tensor.ds_numel for param in some) == output.numel() // members.size:
            for param in some:
                del wanted[param.ds_id]
            return some
    return ()


def is_secondary(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether the parameters that are awaited are gathered from secondary shards over ``group``, in the order of streams.

    Such groups are inside a node (``zero_hpz_partition_size``). The host need not wait there for sizes.
    """
    wanted, members = hints.current().parameters, group_state(group)
    if not wanted or members is None or not members.streams(device.type):
        return False
    first = next(iter(wanted.values()))
    return first.ds_secondary_tensor is not None and first.ds_zero_param_process_group is group


def parameters_of(params: Sequence[Any]) -> Sequence[GatheredParameter]:
    """Return the states of the parameters of a gather, or nothing if one of them has none, or has other shards than its state."""
    found = [getattr(param, STATE, None) for param in params]
    fitting = [one for one, param in zip(found, params, strict=True) if one and one.numel == param.ds_tensor.ds_numel]
    return fitting if len(fitting) == len(params) else ()


def forget(params: Iterable[Any]) -> None:
    """End the versions of parameters. All ranks of their groups call."""
    for param in params:
        if (state := getattr(param, STATE, None)) is not None:
            state.forget()


def versions_of(params: Iterable[Any]) -> list[Any]:
    """Return the versions of the engines of parameters, those of each engine once. Some parameters have none."""
    return list(dict.fromkeys(getattr(param, VERSIONS) for param in params if hasattr(param, VERSIONS)))
