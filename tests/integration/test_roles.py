"""The role of a call, from its name and its group."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl.config import ROLES
from ds_zipccl.integration import roles

OTHER, TENSOR, SEQUENCE, EXPERT, DATA, PIPE = (object() for _ in range(6))
ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """DeepSpeed's module of groups, with an expert group and a group of expert data alone."""
    found = SimpleNamespace(
        _TENSOR_MODEL_PARALLEL_GROUP=None, _EXPERT_PARALLEL_GROUP={"ep": EXPERT}, _EXPERT_DATA_PARALLEL_GROUP={"ep": DATA},
        _ALL_TO_ALL_GROUP={}, _WORLD_GROUP=None, mpu=None,
    )  # fmt: skip
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


@pytest.mark.parametrize("name", [name for name in WITH_ZERO if name not in roles.P2P])
def test_groups_whose_role_is_that_of_all_calls(groups: SimpleNamespace, name: str) -> None:
    """Expert groups agree on capacities too; a group of data has the roles of data, whatever is sent over it."""
    assert roles.role_of(name, EXPERT, True) == "ep"
    of_data = WITH_ZERO[name].replace("sp", "zero_grad")
    assert roles.role_of(name, DATA, True) == of_data and roles.role_of(name, DATA, False) == "dp"
    groups._ALL_TO_ALL_GROUP["local_0"] = groups._WORLD_GROUP = OTHER
    assert roles.role_of(name, OTHER, True) == of_data
    for role in ("tp", "sp", "pp"):
        assert roles.role_of(name, OTHER, True, {OTHER: role}) == role


def test_the_default_group_is_nobodys(groups: SimpleNamespace) -> None:
    """None, the default group, is not the group of a kind of which DeepSpeed knows no group."""
    assert roles.role_of("all_reduce", None, True, {None: "tp"}) == "zero_grad"
    assert roles.role_of("all_reduce", OTHER, True, {TENSOR: "tp"}) == "zero_grad"
    groups.mpu = Named(model=None, sequence=None)
    assert roles.role_of("all_reduce", None, True) == "zero_grad"


class Named:
    """An mpu whose groups have the attributes' names."""

    def __init__(self, **groups: object) -> None:
        for name, group in groups.items():
            setattr(self, f"get_{name}_parallel_group", lambda group=group: group)


def test_the_tensor_group_of_an_mpu(groups: SimpleNamespace) -> None:
    """Beside it counts that of DeepSpeed."""
    for name in ("tensor_model", "model", "slice"):
        groups.mpu = Named(**{name: TENSOR})
        for call, role in (("all_reduce", "tp"), ("all_to_all", "tp"), ("isend", "pp")):  # sends are of pipelines
            assert roles.role_of(call, TENSOR, True) == role, (name, call)
        assert roles.role_of("all_reduce", OTHER, True) == "zero_grad", name
    groups._TENSOR_MODEL_PARALLEL_GROUP = TENSOR
    groups.mpu = Named(tensor_model=OTHER, data=DATA)
    assert roles.role_of("all_gather", TENSOR, True) == roles.role_of("all_gather", OTHER, True) == "tp"
    assert roles.role_of("all_gather", DATA, True) == "dp"


def test_the_more_exact_name_of_an_mpu_counts(groups: SimpleNamespace) -> None:
    """Ulysses' mpu calls its sequence group model parallel too; a pipeline's grid has a group of the whole model."""
    groups.mpu = Named(sequence=SEQUENCE, model=SEQUENCE)
    assert roles.role_of("all_to_all_single", SEQUENCE, True) == "sp"
    for ranks, role in ((1, "pp"), (2, "tp")):
        tensor = SimpleNamespace(size=lambda ranks=ranks: ranks)
        groups.mpu = Named(slice=tensor, model=OTHER, pipe=PIPE, data=TENSOR)
        assert [roles.role_of("all_reduce", group, True) for group in (OTHER, PIPE)] == [role, "pp"]
        assert roles.role_of("all_to_all_single", TENSOR, True) == "zero_grad"
        assert roles.role_of("broadcast", TENSOR, True) == "dp"


def test_an_mpu_that_is_not_ready(groups: SimpleNamespace) -> None:
    """Megatron's accessors raise before its groups are made."""

    def unready() -> object:
        raise AssertionError("tensor model parallel group is not initialized")

    groups.mpu = SimpleNamespace(get_tensor_model_parallel_group=unready, get_sequence_parallel_group=unready)
    assert roles.role_of("all_reduce", OTHER, True) == "zero_grad"


def test_sequence_groups(groups: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence group is that of an mpu, or that of Ulysses."""
    monkeypatch.setitem(sys.modules, ULYSSES, SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=SEQUENCE))
    assert roles.role_of("all_gather", SEQUENCE, True) == "sp" and roles.role_of("all_gather", OTHER, True) == "dp"
    groups.mpu = Named(sequence=OTHER)
    assert roles.role_of("all_gather", OTHER, True) == roles.role_of("all_gather", SEQUENCE, True) == "sp"


def layers(rank: int, ranks: int) -> list[bool]:
    """Search layers that hold groups under the known names, and layers with other values or names."""
    held = {name: dist.new_group([0]) for name in roles._OF_LAYERS}
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(len(held) + 3)))
    for layer, (name, group) in zip(model, held.items(), strict=False):
        setattr(layer, name, group)
    model[-1].mp_group, model[-2].group, model[-3].tp_group = "none", dist.new_group([0]), dist.group.WORLD
    model.tied_comms = {"ends": {"group": dist.new_group([0]), "ranks": [0]}}
    found = roles.groups_of(model)
    tied = found.pop(model.tied_comms["ends"]["group"])
    model.tied_comms = "no table of groups"
    again = roles.groups_of(model)
    return [tied == "pp", found == again == {held[name]: role for name, role in roles._OF_LAYERS.items()}]


def test_groups_of_layers() -> None:
    assert runner.run(layers, 1) == [[True] * 2]
    assert set(roles._OF_LAYERS) == {"mp_group", "TP_group", "tp_group", "spg"}


def twins(rank: int, ranks: int) -> list[str]:
    """Ask for groups with the ranks of groups that an mpu names."""
    pair, alone = [dist.new_group([0, 1]) for _ in range(3)], [dist.new_group([one]) for one in (0, 1)]
    module = roles.importlib.import_module("deepspeed.utils.groups")
    asked = (*pair, alone[rank], dist.group.WORLD, None, dist.GroupMember.NON_GROUP_MEMBER)
    found = []
    module.mpu = Named(tensor_model=pair[0], data=alone[rank])
    found.append(" ".join(roles.model_parallel_role(group, {}) or "-" for group in asked))
    module.mpu = Named(tensor_model=alone[rank], sequence=pair[0], data=pair[1])
    found.append(" ".join(roles.model_parallel_role(group, {}) or "-" for group in asked))
    module.mpu = Named(data=pair[0], tensor_model=dist.group.WORLD)
    found.append(" ".join(roles.model_parallel_role(group, {pair[1]: "sp"}) or "-" for group in asked))
    return found


def test_groups_with_the_ranks_of_a_tensor_group() -> None:
    """The groups of data count first where a group is known, and the default group only by itself."""
    first = "tp tp tp - - - -"
    second = "sp - sp tp - - -"
    third = "- sp tp - tp - -"
    assert runner.run(twins, 2) == [[first, second, third]] * 2
