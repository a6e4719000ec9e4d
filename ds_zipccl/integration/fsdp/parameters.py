"""The parameters of one FSDP2 model: their bases, and the states of those of a module's gather.

A program may write to parameters between any two gathers, and FSDP2 has no function for it: each gather asks all ranks whether its shards
have changed. Nothing here follows passes, modes or optimizers, which differ between ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import GatheredParameter
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration.zero import gathers
from ds_zipccl.integration.zero.gathers import Gathered
from ds_zipccl.policy import admission


class Unit(NamedTuple):
    """A module of ``fully_shard``: its name, torch's parameter group of it, and the group over which its shards are gathered."""

    name: str
    param_group: Any
    group: dist.ProcessGroup


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
        self._of: dict[str, list[GatheredParameter]] = {}  # none in the order of streams: versions need DeepSpeed
        wanted: list[Gathered] = []
        for unit in units:
            states = self._of[unit.name] = []
            members, kind = group_state(unit.group), device.type
            asks = members is not None and bool(
                not members.streams(kind) and admission.difference_dtypes(kind, members.backend(kind))
            )
            for sharded in unit.param_group.fsdp_params:
                one = _gathered(unit, sharded)
                if asks:
                    name = names.get(id(sharded.sharded_param), sharded._module_info.param_name)
                    state = comm.parameter(unit.group, device.type, name, one.numel, one.dtype, trained=one.trained)
                    states.append(state)
                    one = one._replace(state=state)
                wanted.append(one)
        trains = any(one.trained for one in wanted)
        self._bases, self.said = gathers.hold_bases(wanted, config, device, trains=trains)

    def of(self, name: str, shard: torch.Tensor) -> Sequence[GatheredParameter]:
        """Return the parameters of a gather of a module, whose own shards lie end to end in ``shard``; nothing if these are others."""
        found = self._of[name]
        return found if sum(one.numel for one in found) == shard.numel() else ()

    def free(self) -> None:
        """Give the memory of the bases back; gathers go without."""
        for base in self._bases:
            base.free()


def _numel(sharded: Any) -> int:
    """Return the elements of the shard that FSDP2 gathers, which is padded to equal sizes on all ranks."""
    return int(sharded._sharded_param_data.numel())


def _gathered(unit: Unit, sharded: Any) -> Gathered:
    param = sharded.sharded_param
    dtype = unit.param_group.mp_policy.param_dtype or param.dtype
    return Gathered(unit.group, _numel(sharded), dtype, param.requires_grad, None)
