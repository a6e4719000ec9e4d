"""Epochs of ZeRO-3's parameters, for gathers with agreed sizes: what changes shards, and when ranks agree on sizes anew.

Every change that DeepSpeed has a function for is a call of all ranks of the parameter's group. Such a call ends the epochs of its
parameters. An optimizer step is followed by an agreement, so that no later gather waits. A change behind our back, by a write to
``param.ds_tensor``, is noticed where a frame does not fit: then all ranks stop before the next step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ds_zipccl import comm
from ds_zipccl.comm.device.agreed import Agreed
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import zero_gathers

#: Attribute of a parameter: its agreed sizes. DeepSpeed's parameters have attributes of their engine too.
_AGREED = "ds_zipccl_agreed"
#: Attribute of an optimizer, and of each of its parameters: the epochs of all of them.
_EPOCHS = "ds_zipccl_epochs"
#: Classes, by name, that change parameters in ways that are known here. Their subclasses may step in the background.
_KNOWN = ("DeepSpeedZeroOptimizer_Stage3", "DeepSpeedZeRoOffload")


class Epochs:
    """The parameters of one engine, all of them in the order of their numbers, which is the same on all ranks, by partition group."""

    def __init__(self, parameters: Sequence[Any], config: ZipcclConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        groups: dict[Any, list[Any]] = {}
        for param in parameters:
            groups.setdefault(param.ds_process_group, []).append(param)
        # The largest first: its ranks learn of failures in smaller groups at once.
        self._groups = sorted(groups.items(), key=lambda item: -item[1][0].ds_zero_partition_world_size)

    def forget(self) -> None:
        """End the epochs of all parameters."""
        for _, params in self._groups:
            forget(params)

    def check(self, among: Sequence[Any] | None = None) -> None:
        """Raise CommError if a frame was refused. A collective of every group that has gathered by agreed sizes.

        ``among``: only groups of these parameters; None: of all.
        """
        groups = None if among is None else {param.ds_process_group for param in among}
        for group, _ in self._groups:
            if groups is None or group in groups:
                comm.check_frames(self._device, group, config=self._config)

    def agree(self) -> None:
        """Agree on the sizes of parameters that have none and whose shards can be read now. A collective; a host wait for each group."""
        for group, params in self._groups:
            ready = [param for param in params if self._ready(param)]
            shards = [(getattr(param, _AGREED), param.ds_tensor.detach().view(-1)) for param in ready]
            comm.agree_sizes(shards, group, config=self._config)

    def _ready(self, param: Any) -> bool:
        """Return whether the words that the next gather sends are on the device now. Equal on all ranks.

        A parameter that stays gathered is gathered once a step, within the step.
        """
        shard = param.ds_tensor
        on_device = shard.device.type == self._device.type and shard.final_location != "nvme"
        return on_device and not param.ds_persist


def begin(optimizer: Any, named: Iterable[tuple[str, Any]], config: ZipcclConfig, device: torch.device) -> None:
    """Begin the epochs of an engine's parameters whose groups are in the order of streams, and agree on sizes. A collective.

    Args:
        optimizer: of ZeRO-3. For an optimizer that may change parameters in the background nothing happens.
        named: all parameters of the engine with their names.
    """
    named = list(named)
    for _, param in named:
        _drop(param)  # what an earlier engine of the module has left
    known = type(optimizer).__name__ in _KNOWN and not getattr(optimizer, "zenflow", False)
    if not known or config.nccl == "off":
        return
    found = []
    for name, param in named:
        members = group_state(param.ds_process_group) if hasattr(param, "ds_id") else None
        if members is not None and members.size > 1 and members.streams(device.type):
            dtype = zero_gathers.gathered_dtype(param)
            setattr(param, _AGREED, Agreed(name, param.ds_tensor.ds_numel, dtype))
            found.append(param)
    if found:
        epochs = Epochs(sorted(found, key=lambda param: int(param.ds_id)), config, device)
        for one in (optimizer, *found):
            setattr(one, _EPOCHS, epochs)
        epochs.agree()


def _drop(param: Any) -> None:
    for name in (_AGREED, _EPOCHS):
        vars(param).pop(name, None)


def agreed_of(params: Sequence[Any]) -> Sequence[Agreed]:
    """Return the agreed sizes of the parameters of a gather, or nothing if one of them takes no part."""
    found = [one for param in params if (one := getattr(param, _AGREED, None)) is not None]
    return found if len(found) == len(params) else ()


def forget(params: Iterable[Any]) -> None:
    """End the epochs of parameters. All ranks of their groups call."""
    for param in params:
        agreed = getattr(param, _AGREED, None)
        if agreed is not None:
            agreed.forget()


@contextlib.contextmanager
def changing(optimizer: Any) -> Iterator[None]:
    """Surround a change of any of an optimizer's parameters, during which parameters may be gathered; then agree anew. A collective."""
    epochs = getattr(optimizer, _EPOCHS, None)
    if epochs is None:
        yield
        return
    epochs.forget()
    yield
    epochs.forget()
    epochs.agree()


def watch_partitions(init: Any, gathered: Any) -> None:
    """Let partitions of changed parameters, such as those of ``GatheredParameters``, and conversions to partitioned parameters end epochs.
    Where a program gets gathered parameters to read or to save, all their frames were accepted.

    Repeating the call does nothing.

    Args:
        init: ``deepspeed.zero.Init``.
        gathered: ``deepspeed.zero.GatheredParameters``.
    """

    def partition(original: Callable[..., Any], self: Any, param_list: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("has_been_updated", args[1] if len(args) > 1 else False):
            forget(param_list)
        return original(self, param_list, *args, **kwargs)

    def convert(original: Callable[..., Any], self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        _drop(param)
        return original(self, param, *args, **kwargs)

    def enter(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for params in _by_epochs(self.params if self.enabled else ()):
            getattr(params[0], _EPOCHS).check(params)
        return result

    _surround(gathered, "__enter__", enter)
    _surround(init, "_partition", partition)
    _surround(init, "_convert_to_deepspeed_param", convert)


def _by_epochs(params: Iterable[Any]) -> Iterable[Sequence[Any]]:
    """Return the parameters that have epochs, by engine."""
    found: dict[int, list[Any]] = {}
    for param in params:
        if hasattr(param, _EPOCHS):
            found.setdefault(id(getattr(param, _EPOCHS)), []).append(param)
    return found.values()


def watch_optimizer(kind: Any) -> None:
    """Let the methods of ZeRO-3's optimizer that change parameters end epochs. Repeating the call does nothing.

    Args:
        kind: ``DeepSpeedZeroOptimizer_Stage3``.
    """

    def step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        epochs = getattr(self, _EPOCHS, None)
        if epochs is None:
            return original(self, *args, **kwargs)
        epochs.check()
        trained = [param for group in self.fp16_groups for param in group]
        forget(trained)  # the step itself gathers parameters that stay gathered
        result = original(self, *args, **kwargs)
        forget(trained)
        epochs.agree()
        return result

    def load(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with changing(self):
            return original(self, *args, **kwargs)

    def set_param(
        original: Callable[..., Any], self: Any, value: Any, param: Any, optim_state_key: Any = None, **kwargs: Any
    ) -> Any:
        # The optimizer's copy has 32 bits. A shard of 16 bits changes with the next step; one of 32 bits is that copy.
        if optim_state_key is None and param.ds_tensor.dtype is torch.float32:
            forget([param])
        return original(self, value, param, optim_state_key, **kwargs)

    _surround(kind, "step", step)
    _surround(kind, "load_state_dict", load)
    # set_local_hp_param is no call of all ranks: it counts as a write to the shard.
    _surround(kind, "set_full_hp_param", set_param)


def _surround(kind: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``around`` be called in place of a method, with the method as its first argument. Not every DeepSpeed has every method."""
    original = getattr(kind, name, None)
    if original is None or hasattr(original, "ds_zipccl_epochs"):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    method.ds_zipccl_epochs = True  # type: ignore[attr-defined]
    setattr(kind, name, method)
