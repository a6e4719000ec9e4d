"""The role of a call, from its name and its group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl.config import ROLES
from ds_zipccl.integration import roles

OTHER, TENSOR, SEQUENCE, EXPERT = (object() for _ in range(4))
ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """DeepSpeed's module of groups, without any group of a kind but the expert group."""
    found = SimpleNamespace(_TENSOR_MODEL_PARALLEL_GROUP=None, _EXPERT_PARALLEL_GROUP={"ep": EXPERT}, mpu=None)
    monkeypatch.setattr(roles, "importlib", SimpleNamespace(import_module=lambda name: found))
    monkeypatch.delitem(sys.modules, ULYSSES, raising=False)
    return found


#: name -> role in the data parallel group with ZeRO; without ZeRO the roles of ZeRO are "dp".
WITH_ZERO = {
    **dict.fromkeys(roles.P2P, "pp"),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "sp"),
    **dict.fromkeys(("broadcast", "all_gather", "gather", "scatter"), "dp"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_coalesced"), "zero_param"),
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"), "zero_grad"),
    "inference_all_reduce": "zero_grad",
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_ZERO)
def test_every_call_in_a_group_of_no_name(groups: SimpleNamespace, name: str) -> None:
    role = WITH_ZERO[name]
    assert roles.role_of(name, OTHER, True) == role and role in ROLES
    assert roles.role_of(name, OTHER, False) == ("dp" if role.startswith("zero") else role)
    in_the_default_group = "ep" if role == "sp" else role
    assert roles.role_of(name, None, True) == in_the_default_group


def test_the_default_group_is_nobodys(groups: SimpleNamespace) -> None:
    """None, the default group, is not the group of a kind of which DeepSpeed knows no group."""
    assert roles.role_of("all_reduce", None, True, [None]) == "zero_grad"
    assert roles.role_of("all_reduce", OTHER, True, [TENSOR]) == "zero_grad"
    assert roles.role_of("all_reduce", TENSOR, True, [OTHER, TENSOR]) == "tp", "a group of the model's layers"
    groups.mpu = SimpleNamespace(get_model_parallel_group=lambda: None, get_sequence_parallel_group=lambda: None)
    assert roles.role_of("all_reduce", None, True) == "zero_grad"


MPUS: dict[str, Callable[[], object]] = {
    "get_tensor_model_parallel_group": lambda: TENSOR,
    "get_model_parallel_group": lambda: TENSOR,
    "get_slice_parallel_group": lambda: TENSOR,
}


@pytest.mark.parametrize("name", MPUS)
def test_the_tensor_group_of_an_mpu(groups: SimpleNamespace, name: str) -> None:
    groups.mpu = SimpleNamespace(**{name: MPUS[name]})
    assert roles.role_of("all_reduce", TENSOR, True) == "tp" and roles.role_of("all_reduce", OTHER, True) == "zero_grad"
    assert roles.role_of("isend", TENSOR, True) == "pp", "sends are of pipelines whatever their group"
    assert roles.role_of("all_to_all", TENSOR, True) == "tp"


def test_an_mpu_that_is_not_ready(groups: SimpleNamespace) -> None:
    """Megatron's accessors raise before its groups are made."""

    def unready() -> object:
        raise AssertionError("tensor model parallel group is not initialized")

    groups.mpu = SimpleNamespace(get_tensor_model_parallel_group=unready, get_sequence_parallel_group=unready)
    assert roles.role_of("all_reduce", OTHER, True) == "zero_grad"


def test_sequence_groups(groups: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence group is that of an mpu, else that of Ulysses."""
    monkeypatch.setitem(sys.modules, ULYSSES, SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=SEQUENCE))
    assert roles.role_of("all_gather", SEQUENCE, True) == "sp" and roles.role_of("all_gather", OTHER, True) == "dp"
    groups.mpu = SimpleNamespace(get_sequence_parallel_group=lambda: OTHER)
    assert roles.role_of("all_gather", OTHER, True) == "sp" and roles.role_of("all_gather", SEQUENCE, True) == "dp"


def layers(rank: int, ranks: int) -> list[bool]:
    """Search layers that hold groups under the known names, and layers with other values or names."""
    held = [dist.new_group([0]) for _ in roles._TENSOR_GROUPS]
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(len(held) + 2)))
    for layer, name, group in zip(model, roles._TENSOR_GROUPS, held, strict=False):
        setattr(layer, name, group)
    model[-1].mp_group, model[-2].group = "none", dist.new_group([0])
    found = roles.tensor_groups(model)
    return [len(found) == 3, *(any(group is one for one in found) for group in held)]


def test_groups_of_layers() -> None:
    assert runner.run(layers, 1) == [[True] * 4]
    assert set(roles._TENSOR_GROUPS) == {"mp_group", "TP_group", "tp_group"}
