"""Models of FSDP2 whose communication is coded: :func:`apply` and :func:`remove`; the optimizer steps of these models."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.config import SECTION, ZipcclConfig
from ds_zipccl.integration import start_up
from ds_zipccl.integration.fsdp.collectives import AllGather, ReduceScatter
from ds_zipccl.integration.fsdp.parameters import Parameters, Unit
from ds_zipccl.integration.job import Job, of_process
from ds_zipccl.telemetry import table

_Model = TypeVar("_Model", bound=torch.nn.Module)

#: The first torch whose FSDP2 takes collectives of its user.
FIRST_TORCH = "2.9"
#: Classes of torch's own collectives; a program may have put others in their place.
_TORCHS_OWN = ("DefaultAllGather", "DefaultReduceScatter")
_EXACT = "collectives of FSDP2 have no lossy codecs"
_UNRECORDED = 'checkpoints of FSDP2 have no place for an order of sums, and "reduction": "fp32" has ours'


class _Process:
    """What the models of this process share: the job; the units that have reduced gradients since the last step; the optimizer whose steps
    are logged."""

    def __init__(self) -> None:
        self.job = of_process()
        self.reduced: set[Unit] = set()
        self._models: WeakSet[Parameters] = WeakSet()
        self._logged: Any = None  # a handle of torch
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._steps = 0

    def add(self, model: Parameters) -> None:
        """Log the optimizer steps of a model from now on."""
        self._models.add(model)
        self._logged = self._logged or register_optimizer_step_post_hook(self._log)

    def reduces(self, unit: Unit) -> None:
        """Note that the gradients of a module are about to be summed. The second time that a module does, a step of all ranks has ended:
        that follows from collectives alone, where an optimizer's step is an event of one rank. A collective then.

        Raises:
            CommError: see :func:`ds_zipccl.comm.engine.end_step`.
        """
        if unit in self.reduced:
            self.reduced.clear()
            comm_engine.end_step(self)
        self.reduced.add(unit)

    def _log(self, optimizer: Optimizer, *_: Any) -> None:
        """Log the steps of the first optimizer: a program may have several, also one for each parameter. Sends nothing."""
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._steps += 1
        if self._steps == 1:
            self.job.tell(line for parameters in self._models for line in _late(parameters.model()))
        config, log = self.job.config, self.job.step_log
        if log is not None:
            log.write(self._steps, [float(group["lr"]) for group in optimizer.param_groups])
        if config is not None and config.log_interval and not self._steps % config.log_interval and not dist.get_rank():
            table.show(f"after {self._steps} steps")


_process: _Process | None = None


def apply(model: _Model, section: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> _Model:
    """Code the gathers and the reduce-scatters of a model of ``fully_shard``, and return it. A collective of all ranks; blocks.

    Call it after ``fully_shard`` of all modules, and after the parameters that do not train are frozen. What the model computes stays the
    same, bit for bit. Rank 0 prints what is coded, and names what stays plain.

    Args:
        section: the keys of the ``"zipccl"`` section; or the path of a JSON file with the section, or with a section of this name; None:
            defaults. ``"enabled"`` is true unless the section says otherwise. The environment variable ``DS_ZIPCCL`` precedes it.

    Raises:
        ConfigError: the section is invalid, or differs between ranks, or from the section that this process uses.
        CommError: the memory that ``"zero3_base"`` host or device asks for cannot be had.
        RuntimeError: this torch has no FSDP2 that takes collectives.
        ValueError: no module of the model is one of ``fully_shard``.
    """
    global _process
    modules = dict(_modules(model))
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module of fully_shard; call fully_shard(model) first")
    process = _process = _process or _Process()
    if process.job is not (job := of_process()):  # the survivors of a failure count with the processes that join them
        process.job, process.reduced = job, set()
    said: list[str] = []
    units = [unit for name, module in modules.items() if (unit := _unit(name, module, said)) is not None]
    device = next((unit.param_group.device for unit in units), torch.device("cpu"))
    config = _start(process.job, section, device)
    if config is None:
        return model
    process.job.tell(said)
    parameters = Parameters(units, model, config, device)
    if parameters.said:
        process.job.tell([f"FSDP2, zero3_base {config.zero3_base}: {parameters.said}"])
    for unit in units:
        module, torchs = modules[unit.name], unit.param_group
        module.set_custom_all_gather(AllGather(unit, process.job, torchs._all_gather_comm, parameters))
        module.set_custom_reduce_scatter(ReduceScatter(unit, process.job, torchs._reduce_scatter_comm, process.reduces))
    process.add(parameters)
    return model


def remove(model: _Model) -> _Model:
    """Undo :func:`apply`: the model communicates as torch does, and the memory of its bases is free. Call on all ranks."""
    for _, module in _modules(model):
        for torchs in _param_groups(module):
            if isinstance(torchs._all_gather_comm, AllGather):
                torchs._all_gather_comm.parameters.free()
                module.set_custom_all_gather(torchs._all_gather_comm.plain)
            if isinstance(torchs._reduce_scatter_comm, ReduceScatter):
                module.set_custom_reduce_scatter(torchs._reduce_scatter_comm.plain)
    return model


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of ``fully_shard`` with their names; of those that were sharded together the first.

    Raises:
        RuntimeError: torch is too old.
    """
    kind: Any = getattr(torch_fsdp, "FSDPModule", object)
    if not hasattr(kind, "set_custom_all_gather"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather and set_custom_reduce_scatter; "
            f"install torch {FIRST_TORCH} or later"
        )
    states = set()
    for name, module in model.named_modules():
        if isinstance(module, kind) and (state := id(module._get_fsdp_state())) not in states:
            states.add(state)
            yield name, module


def _late(model: torch.nn.Module | None) -> Iterator[str]:
    """Yield a line for each module that communicates and was sharded after :func:`apply`."""
    for name, module in [] if model is None else _modules(model):
        if _unit(name, module, []) is not None:
            yield f"FSDP2: {name or 'the root'} stays plain: fully_shard came after fsdp.apply; call fsdp.apply last"


def _param_groups(module: Any) -> list[Any]:
    """Return torch's parameter groups of a module."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 has the list, earlier ones have one or None
    return list(filter(None, [state._fsdp_param_group])) if several is None else list(several)


def _unit(name: str, module: Any, said: list[str]) -> Unit | None:
    """Return the module as a unit; None where its communication stays plain, with a line in ``said``. A module without parameters, or whose
    shards are on one rank, has none."""
    groups, who = _param_groups(module), f"FSDP2: {name or 'the root'}"
    if len(groups) > 1:
        said.append(
            f"{who} stays plain: it has {len(groups)} groups of parameters, and torch takes collectives for one"
        )
    if len(groups) != 1:
        return None
    (torchs,) = groups
    own = [type(one).__name__ for one in (torchs._all_gather_comm, torchs._reduce_scatter_comm)]
    if not set(own) <= set(_TORCHS_OWN):
        ours = isinstance(torchs._all_gather_comm, AllGather)
        plain = f"{who} stays plain: it has collectives already, {' and '.join(own)}"
        said.append("FSDP2: an earlier fsdp.apply has coded modules of this model" if ours else plain)
        return None
    if getattr(torchs.mesh_info, "replicate_process_group", None) is not None:
        said.append("FSDP2: all-reduces between replicas stay plain: torch takes no collective for them")
    group = getattr(torchs.mesh_info, "shard_process_group", None)
    return Unit(name, torchs, group) if group is not None and group_size(group) > 1 else None


def _start(job: Job, section: Any, device: torch.device) -> ZipcclConfig | None:
    """Agree on the section, and switch coding on at the first call; None: coding is off. A collective; blocks."""
    if start_up.accept(job, _read(section, job.section is not None), device) and job.config is not None:
        start_up.begin(job, job.config, device, dict.fromkeys(job.config.lossy_roles, _EXACT), _UNRECORDED)
    return job.config


def _read(section: Any, running: bool) -> Any:
    """Return the section of an argument of :func:`apply`; None: the one that this process uses."""
    if section is None:
        return None if running else {"enabled": True}
    if not isinstance(section, Mapping):
        section = json.loads(Path(section).read_text())
    found = section.get(SECTION, section) if isinstance(section, Mapping) else section
    return {"enabled": True, **found} if isinstance(found, Mapping) else found
