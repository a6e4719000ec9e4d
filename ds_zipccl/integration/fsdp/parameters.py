"""The parameters of one FSDP2 model: their bases, and when ranks agree on them anew.

Gathers of parameters from bases follow the rules of :class:`ds_zipccl.comm.Keeper`: ranks agree, copy, and compare again. FSDP2 has
no function for a change of parameters, and a program may write to them between any two passes. So an agreement precedes the first gather
of every forward pass and of every pass that gathers ahead of it. A write between passes is found by that agreement, and the parameter is
gathered by messages. A write within a pass that has copied the parameter raises CommError on all ranks, before the optimizer step.

A pass is told by gathers alone, which are calls of all ranks: outside of backward passes, a gather begins one if it follows a gather of a
backward pass, or if its module has gathered in the pass before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import Keeper, Kept, Part
from ds_zipccl.comm.request import in_backward_pass
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration.zero import gathers
from ds_zipccl.integration.zero.gathers import Gathered

_REMEDY = "write to parameters between an optimizer step and the next forward pass"


class Unit(NamedTuple):
    """A module of ``fully_shard``: its name, torch's parameter group of it, and the group over which its shards are gathered."""

    name: str
    param_group: Any
    group: dist.ProcessGroup


class _Parameter(NamedTuple):
    sharded: Any  # torch's FSDPParam
    kept: Kept


class Parameters:
    """The parameters of a model. All methods are called on all ranks, in program order.

    ``model``: a weak reference. ``said``: a sentence about the memory of bases; "" where there is nothing to say.

    Raises:
        CommError: the memory that ``zero3_base`` host or device asks for cannot be had.
    """

    def __init__(
        self, units: Sequence[Unit], model: torch.nn.Module, config: ZipcclConfig, device: torch.device
    ) -> None:
        self.model = weakref.ref(model)
        names = {id(param): name for name, param in model.named_parameters()}
        keepers: dict[dist.ProcessGroup, Keeper] = {}
        self._of: dict[str, list[_Parameter]] = {}
        wanted: list[Gathered] = []
        for unit in units:
            if unit.group not in keepers:
                keepers[unit.group] = Keeper(unit.group, config, _REMEDY)
                keepers[unit.group].steps = False  # passes bracket the copies, not the steps of an engine: see above
            keeper = keepers[unit.group]
            found = [_parameter(sharded, names, keeper) for sharded in unit.param_group.fsdp_params]
            self._of[unit.name] = found
            wanted += [_gathered(unit, one) for one in found]
        self._keepers = list(keepers.values())
        trains = any(one.trained for one in wanted)
        self._bases, self.said = gathers.hold_bases(wanted, config, device, trains=trains)
        self._gathered: set[str] = set()  # in this pass, outside of backward passes
        self._backward = False  # the last gather was one of a backward pass

    def parts(self, name: str, shard: torch.Tensor) -> Sequence[Part]:
        """Return the parameters of a gather of a module, whose own shards lie end to end in ``shard``, as parts of it; nothing if none of
        them has a base that fits. Does not block."""
        found = self._of[name]
        numels = [_numel(one.sharded) for one in found]
        if sum(numels) != shard.numel() or tensors.is_traced(type(shard)):
            return ()
        parts = [gathers.part_of(one.kept, numel, shard.dtype) for one, numel in zip(found, numels, strict=True)]
        if all(part.kept is None for part in parts):
            return ()
        self._begin_gather(name)
        return parts

    def _begin_gather(self, name: str) -> None:
        backward = in_backward_pass()
        if not backward:
            if self._backward or name in self._gathered:
                self._gathered.clear()
                for keeper in self._keepers:
                    keeper.refresh()
            self._gathered.add(name)
        self._backward = backward

    def begin_step(self, changed: Collection[int]) -> None:
        """Note that an optimizer step begins.

        Args:
            changed: ``id()`` of each parameter of the optimizer.

        Raises:
            CommError: a parameter of this model was written to while ranks copied its base, and the step changes others. All ranks raise.
        """
        if self._among(changed):
            for keeper in self._keepers:
                keeper.check()

    def end_step(self, changed: Collection[int]) -> bool:
        """Note that the step has ended, and return whether it has changed parameters of this model."""
        mine = self._among(changed)
        for one in mine:
            one.kept.forget()
        return bool(mine)

    def _among(self, changed: Collection[int]) -> list[_Parameter]:
        return [one for some in self._of.values() for one in some if id(one.sharded.sharded_param) in changed]


def _numel(sharded: Any) -> int:
    """Return the elements of the shard that FSDP2 gathers, which is padded to equal sizes on all ranks."""
    return int(sharded._sharded_param_data.numel())


def _parameter(sharded: Any, names: Mapping[int, str], keeper: Keeper) -> _Parameter:
    name = names.get(id(sharded.sharded_param), sharded._module_info.param_name)
    return _Parameter(sharded, Kept(name, lambda: sharded._sharded_param_data, keeper))


def _gathered(unit: Unit, one: _Parameter) -> Gathered:
    param = one.sharded.sharded_param
    dtype = unit.param_group.mp_policy.param_dtype or param.dtype
    return Gathered(unit.group, _numel(one.sharded), dtype, param.requires_grad, False, one.kept.hold)
