"""Versions of ZeRO-3's parameters, for gathers with agreed sizes and gathers from bases: what changes shards, and when ranks agree anew.

Every change that DeepSpeed has a function for is a call of all ranks of the parameter's group. Such a call ends the versions of its
parameters. In groups in the order of streams an optimizer step is followed by an agreement on sizes, so that no later gather waits. A
change behind our back, by a write to ``param.ds_tensor``, is noticed where a frame does not fit: then all ranks stop before the next step.

Groups that exchange messages need no versions: their gathers ask, see the module of their engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ds_zipccl import comm
from ds_zipccl.comm.group_state import GroupState, group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hook_points
from ds_zipccl.integration.zero import gathers
from ds_zipccl.integration.zero.gathers import STATE, VERSIONS
from ds_zipccl.policy import admission

#: Classes, by name, that change parameters in ways that are known here. Other subclasses may change them in the background; SuperOffload's
#: processes change the optimizer's own copies, and its step the shards.
_KNOWN = ("DeepSpeedZeroOptimizer_Stage3", "SuperOffloadOptimizer_Stage3", "DeepSpeedZeRoOffload")
#: Partition group -> its state, and its parameters with their names, in the order of their numbers, which is the same on all ranks.
_Groups = dict[Any, tuple[GroupState, list[tuple[str, Any]]]]


class Versions:
    """The parameters of one engine."""

    def __init__(self, named: _Groups, config: ZipcclConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.parameters = [param for _, some in named.values() for _, param in some]
        self._groups: list[tuple[Any, list[Any]]] = []  # in the order of streams
        # The largest first: its ranks learn of failures in smaller groups at once.
        for group, (members, some) in sorted(named.items(), key=lambda item: -item[1][0].size):
            if members.streams(device.type):
                self._groups.append((group, [param for _, param in some]))
            for name, param in some:
                setattr(param, VERSIONS, self)
                shape = param.ds_tensor.ds_numel, gathers.gathered_dtype(param)
                setattr(param, STATE, comm.parameter(group, device.type, name, *shape, trained=param.requires_grad))

    def check_frames(self, among: Iterable[Any] | None = None) -> None:
        """Raise CommError if a frame was refused. A collective of every group of these parameters (None: of all) that has gathered by
        agreed sizes."""
        groups = None if among is None else {param.ds_process_group for param in among}
        for group, _ in self._groups:
            if groups is None or group in groups:
                comm.check_frames(self._device, group, config=self._config)

    def agree(self) -> None:
        """Agree on the sizes of parameters that have none and whose words that the next gather sends are on the device now. A collective; a
        host wait for each group."""
        for group, params in self._groups:
            # one that stays gathered is gathered once a step, within the step
            freed = [(param.ds_tensor, getattr(param, STATE)) for param in params if not param.ds_persist]
            here = [one for one in freed if one[0].device.type == self._device.type and one[0].final_location != "nvme"]
            comm.agree_sizes([(state, shard.detach().view(-1)) for shard, state in here], group, config=self._config)


def begin(optimizer: Any, named: Iterable[tuple[str, Any]], config: ZipcclConfig, device: torch.device) -> None:
    """Begin the versions of an engine's parameters, and agree on sizes in groups in the order of streams. A collective.

    Args:
        optimizer: of ZeRO-3. Where it may change parameters in the background, or a DeepSpeed lacks a function whose changes must be
            learned, parameters of groups in the order of streams have no versions.
        named: all parameters of the engine with their names.
    """
    named = list(named)
    for _, param in named:
        _drop(param)  # what an earlier engine of the module has left
    follows = type(optimizer).__name__ in _KNOWN and not getattr(optimizer, "zenflow", False)
    if follows and hasattr(optimizer, "step"):
        for method in ("step", "load_state_dict", "set_full_hp_param"):  # SuperOffload has a step of its own
            hook_points.surround(f"DeepSpeedZeroOptimizer_Stage3.{method}", type(optimizer))
    follows = follows and not hook_points.lacking("versions")
    found: _Groups = {}
    partitioned = [(name, param) for name, param in named if hasattr(param, "ds_id")]
    for name, param in sorted(partitioned, key=lambda one: int(one[1].ds_id)):
        members = group_state(param.ds_process_group)
        if members is None or members.size == 1:
            continue
        if members.streams(device.type):
            takes_part = config.nccl != "off" and follows
        else:
            takes_part = bool(admission.difference_dtypes(device.type, members.backend(device.type)))
        if takes_part:
            found.setdefault(param.ds_process_group, (members, []))[1].append((name, param))
    if found:
        versions = Versions(found, config, device)
        for one in (optimizer, _offload(optimizer)):
            setattr(one, VERSIONS, versions)
        versions.agree()


def end(optimizer: Any) -> None:
    """End the versions of an engine's parameters for good, before their bases go. All ranks call."""
    if (versions := getattr(optimizer, VERSIONS, None)) is None:
        return
    for one in {optimizer, _offload(optimizer)}:
        vars(one).pop(VERSIONS, None)
    for param in versions.parameters:
        if getattr(param, VERSIONS, None) is versions:  # a later engine may have begun others
            _drop(param)


def _offload(optimizer: Any) -> Any:
    """Return the object of ZeRO-3 that fetches parameters; it stands for the optimizer where nothing is trained."""
    return getattr(optimizer, "parameter_offload", optimizer)


def _drop(param: Any) -> None:
    for name in (STATE, VERSIONS):
        vars(param).pop(name, None)


@contextlib.contextmanager
def changing(optimizer: Any, *, step: bool = False) -> Iterator[None]:
    """Surround a change of any of an optimizer's parameters, or a step, which changes those that it trains and comes after a check; then
    agree anew. Parameters may be gathered meanwhile: a step gathers those that stay gathered. A collective."""
    if (versions := getattr(optimizer, VERSIONS, None)) is None:
        yield
        return
    changed = versions.parameters
    if step:
        versions.check_frames()
        changed = [param for group in optimizer.fp16_groups for param in group]
    gathers.forget(changed)
    yield
    gathers.forget(changed)
    versions.agree()


def convert(original: Callable[..., Any], init: Any, param: Any) -> None:
    """Surround the conversion of a parameter to a partitioned one."""
    _drop(param)
    original(init, param)
    param.all_gather_coalesced = functools.partial(gathers.gather_coalesced, param.all_gather_coalesced)


def enter_gathered(original: Callable[..., Any], gathered: Any) -> Any:
    """Surround ``GatheredParameters.__enter__``. Where a program gathers parameters to read or to save, all their frames were accepted. One
    rank alone may enter with parameters that are there already."""
    params = [one for one in (gathered.params if gathered.enabled else ()) if one.ds_status.name == "NOT_AVAILABLE"]
    result = original(gathered)
    for versions in gathers.versions_of(params):
        versions.check_frames(params)
    return result


def step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround a step of ZeRO-3's optimizer, which changes parameters."""
    with changing(optimizer, step=True):
        return original(optimizer, *args, **kwargs)


def load(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround a load of the optimizer's state."""
    with changing(optimizer):
        return original(optimizer, *args, **kwargs)


def set_param(
    original: Callable[..., Any], optimizer: Any, value: Any, param: Any, optim_state_key: Any = None, **kwargs: Any
) -> Any:
    """Surround a write to a parameter. The optimizer's copy has 32 bits: a shard of 16 bits changes with the next step, and one of 32 bits
    is that copy."""
    if optim_state_key is None and param.ds_tensor.dtype is torch.float32:
        gathers.forget([param])
    return original(optimizer, value, param, optim_state_key, **kwargs)
