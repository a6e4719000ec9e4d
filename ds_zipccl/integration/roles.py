"""Role of a DeepSpeed collective, told from its name and its group."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from typing import Any

import torch

P2P = ("send", "recv", "isend", "irecv")
#: Operations by which ZeRO gathers parameters: with torch 1.13 and later it gathers no lists.
_GATHERS = ("all_gather_into_tensor", "all_gather_coalesced")
#: Attributes of DeepSpeed's tensor-parallel layers (AutoTP, Domino) that hold their group.
_TENSOR_GROUPS = ("mp_group", "TP_group", "tp_group")


def role_of(name: str, group: Any, with_zero: bool, tensor_groups: Collection[Any] = ()) -> str:
    """Return the role of the operation ``name`` over ``group``, one of :data:`ds_zipccl.config.ROLES`.

    Args:
        with_zero: some engine of this process uses ZeRO.
        tensor_groups: groups of the model's tensor-parallel layers, beside those of DeepSpeed and of an ``mpu``.
    """
    if name in P2P:
        return "pp"
    if group is not None and (group is _tensor_group() or group in tensor_groups):
        return "tp"
    groups = importlib.import_module("deepspeed.utils.groups")
    if name.startswith("all_to_all"):
        return "ep" if group is None or group in groups._EXPERT_PARALLEL_GROUP.values() else "sp"
    if group is not None and group is _sequence_group():
        return "sp"
    if name in ("broadcast", "all_gather", "gather", "scatter") or not with_zero:
        return "dp"
    return "zero_param" if name in _GATHERS else "zero_grad"


def _tensor_group() -> Any:
    """Return the tensor-parallel group of DeepSpeed or of a Megatron-like ``mpu``; None if there is none."""
    groups = importlib.import_module("deepspeed.utils.groups")
    if groups._TENSOR_MODEL_PARALLEL_GROUP is not None or groups.mpu is None:
        return groups._TENSOR_MODEL_PARALLEL_GROUP
    names = ("get_tensor_model_parallel_group", "get_model_parallel_group", "get_slice_parallel_group")
    return next((_asked(name) for name in names if hasattr(groups.mpu, name)), None)


def _asked(name: str) -> Any:
    """Return the answer of the ``mpu``'s method ``name``; None if the ``mpu`` raises because it has no such group yet, as Megatron's do."""
    try:
        return getattr(importlib.import_module("deepspeed.utils.groups").mpu, name)()
    except Exception:  # an mpu may raise anything, and DeepSpeed by itself would not have called the method
        return None


def _sequence_group() -> Any:
    """Return the sequence-parallel group of an ``mpu`` or of DeepSpeed's Ulysses; None if there is none."""
    ulysses = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    return _asked("get_sequence_parallel_group") or getattr(ulysses, "_SEQUENCE_PARALLEL_GROUP", None)


def tensor_groups(model: torch.nn.Module) -> list[torch.distributed.ProcessGroup]:
    """Return the groups of the model's tensor-parallel layers, each once."""
    found = [vars(layer).get(name) for layer in model.modules() for name in _TENSOR_GROUPS]
    return list({group for group in found if isinstance(group, torch.distributed.ProcessGroup)})
