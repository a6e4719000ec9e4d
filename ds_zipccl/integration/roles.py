"""Role of a DeepSpeed collective, told from its name and its group."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.integration import hints

P2P = ("send", "recv", "isend", "irecv")
#: Operations by which ZeRO gathers parameters: with torch 1.13 and later it gathers no lists.
_GATHERS = ("all_gather_into_tensor", "all_gather_coalesced")
#: Attribute of a layer that holds a group -> role of the group: AutoTP's and Domino's layers, Ulysses' attention.
_OF_LAYERS = {"mp_group": "tp", "TP_group": "tp", "tp_group": "tp", "spg": "sp"}
#: Method of an ``mpu`` -> role of the group that it returns, more exact names first: Ulysses' ``mpu`` calls its sequence group model
#: parallel too.
_OF_MPU = {
    "get_tensor_model_parallel_group": "tp",
    "get_slice_parallel_group": "tp",
    "get_sequence_parallel_group": "sp",
    "get_pipe_parallel_group": "pp",
    "get_pipeline_model_parallel_group": "pp",
    "get_data_parallel_group": "dp",
    "get_sequence_data_parallel_group": "dp",
}
_ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def role_of(name: str, group: Any, with_zero: bool, learned: Mapping[Any, str] | None = None) -> str:
    """Return the role of the operation ``name`` over ``group``, one of :data:`ds_zipccl.config.ROLES`.

    Args:
        with_zero: some engine of this process uses ZeRO.
        learned: groups of the model's layers -> their roles, as :func:`groups_of` returns them.
    """
    if name in P2P:
        return "pp"
    kind = "" if group is None else _kind(group, learned or {})
    if kind not in ("", "dp"):
        return kind
    if name.startswith("all_to_all") and not kind:
        return "ep" if group is None else "sp"
    if role := hints.current().role:
        return role
    if name in ("broadcast", "all_gather", "gather", "scatter") or not with_zero:
        return "dp"
    return "zero_param" if name in _GATHERS else "zero_grad"


def model_parallel_role(group: Any, learned: Mapping[Any, str]) -> str:
    """Return the role of a tensor- or sequence-parallel group, ``tp`` or ``sp``; an empty string for any other group.

    A group that DeepSpeed does not know counts as the group of an ``mpu`` with the same ranks: beside the grid of a pipeline, Megatron
    makes groups of its own.
    """
    if not isinstance(group, dist.ProcessGroup):
        return ""
    kind = _kind(group, learned)
    if not kind and group is not dist.group.WORLD:
        ranks = dist.get_process_group_ranks(group)
        named = ((known, role) for known, role in _named_by_mpu() if isinstance(known, dist.ProcessGroup))
        kind = next((role for known, role in named if dist.get_process_group_ranks(known) == ranks), "")
    return kind if kind in ("tp", "sp") else ""


def _kind(group: Any, learned: Mapping[Any, str]) -> str:
    """Return the role that a group has whatever is sent over it, ``dp`` for a group of data, or an empty string."""
    groups = importlib.import_module("deepspeed.utils.groups")
    if group is groups._TENSOR_MODEL_PARALLEL_GROUP:
        return "tp"
    if group in learned:
        return learned[group]
    if group in groups._EXPERT_PARALLEL_GROUP.values():
        return "ep"
    data = (groups._WORLD_GROUP, *groups._EXPERT_DATA_PARALLEL_GROUP.values(), *groups._ALL_TO_ALL_GROUP.values())
    if group in data:
        return "dp"
    ulysses = sys.modules.get(_ULYSSES)
    if group is getattr(ulysses, "_SEQUENCE_PARALLEL_GROUP", None):
        return "sp"
    return next((role for known, role in _named_by_mpu() if known is group), "")


def _named_by_mpu() -> Iterator[tuple[Any, str]]:
    """Yield the groups that DeepSpeed's ``mpu`` names, and their roles; the first role of a group counts."""
    mpu = importlib.import_module("deepspeed.utils.groups").mpu
    if mpu is None:
        return
    tensor = None
    for name, role in _OF_MPU.items():
        group = _asked(mpu, name)
        if group is not None:
            tensor = group if tensor is None and role == "tp" else tensor
            yield group, role
    # The group of the whole model: tensor parallel, or that of a pipeline whose stages are not split further.
    whole = _asked(mpu, "get_model_parallel_group")
    if whole is not None:
        yield whole, "pp" if tensor is not None and tensor.size() == 1 else "tp"


def _asked(mpu: Any, name: str) -> Any:
    """Return the answer of the ``mpu``'s method ``name``; None if there is none, or no such group yet, for which Megatron's raise."""
    method = getattr(mpu, name, None)
    if method is None:
        return None
    try:
        return method()
    except Exception:  # an mpu may raise anything, and DeepSpeed by itself would not have called the method
        return None


def groups_of(model: torch.nn.Module) -> dict[dist.ProcessGroup, str]:
    """Return the groups that the model's layers hold, and their roles; those of a pipeline's tied weights have the role ``pp``.

    The default group is never among them: it is the group of one engine's tensors and of the next engine's data.
    """
    held = [(vars(layer).get(name), role) for layer in model.modules() for name, role in _OF_LAYERS.items()]
    tied = getattr(model, "tied_comms", None)
    held += [(one.get("group"), "pp") for one in tied.values()] if isinstance(tied, dict) else []
    own = [(group, role) for group, role in held if isinstance(group, dist.ProcessGroup)]
    return {group: role for group, role in own if group is not dist.group.WORLD}
