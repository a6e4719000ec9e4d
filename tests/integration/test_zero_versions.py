"""Versions of ZeRO-3's parameters without engines: which parameters take part, and what ends versions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl import comm
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.comm.host.cached import CachedParameter
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hook_points, hooks  # noqa: F401  the table of points
from ds_zipccl.integration.zero import gathers
from ds_zipccl.integration.zero import versions as zero_versions

ON = ZipcclConfig(enabled=True, nccl="on")
GPU = torch.device("cuda")
WORLD, EXPERTS, PLAIN, ALONE = ("a group of 4", "a group of 2", "a group of gloo", "a group of one")
RANKS = {WORLD: 4, EXPERTS: 2, PLAIN: 4, ALONE: 1}


class DeepSpeedZeroOptimizer_Stage3:
    """A stand-in with the name of DeepSpeed's class."""

    def __init__(self, *trained: Any) -> None:
        self.fp16_groups = [list(trained)]
        self.asked: list[Any] = []

    def step(self) -> str:
        trained = [vars(param) for param in self.fp16_groups[0] if param.ds_process_group != PLAIN]
        self.asked.append([param["ds_zipccl_state"].version for param in trained])
        return "stepped"

    def load_state_dict(self, state: Any, strict: bool = True) -> tuple[Any, bool]:
        return state, strict

    def set_full_hp_param(self, value: Any, param: Any, optim_state_key: Any = None) -> Any:
        return optim_state_key


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """A stand-in for the subclass whose step is its own; processes in the background change its copies, not the shards."""

    def step(self) -> str:
        return super().step.__wrapped__(self)  # type: ignore[attr-defined, no-any-return]


class Background(DeepSpeedZeroOptimizer_Stage3):
    """An optimizer that steps while the model runs."""


class Init:
    def _partition(self, param_list: Any, force: bool = False, has_been_updated: bool = False) -> bool:
        return has_been_updated

    def _convert_to_deepspeed_param(self, param: Any) -> None:
        param.all_gather_coalesced = list


class GatheredParameters:
    def __init__(self, params: Any) -> None:
        self.params, self.enabled = params, bool(params)

    def __enter__(self) -> str:
        return "gathered"


class Param(SimpleNamespace):
    """A parameter, to which there are weak references."""


def param(number: int, group: Any = WORLD, stays: bool = False, **shard: Any) -> Any:
    """``shard``: its dtype, its device, and its place if it is on disk."""
    given = {"dtype": torch.bfloat16, "device": "cuda", "final_location": None, **shard}
    given["device"] = torch.device(given["device"])
    made = {"ds_id": number, "ds_process_group": group, "ds_persist": stays, "requires_grad": True}
    made["ds_tensor"] = SimpleNamespace(ds_numel=8, detach=lambda: torch.zeros(8), **given)
    return Param(**made, ds_status=SimpleNamespace(name="NOT_AVAILABLE"))


class Ranks:
    """The collectives, which note what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agreed: list[tuple[Any, list[str]]] = []
        self.checked: list[Any] = []
        monkeypatch.setattr(comm, "agree_sizes", self._agree)
        monkeypatch.setattr(comm, "check_frames", lambda device, group, config: self.checked.append(group))
        monkeypatch.setattr(zero_versions, "group_state", self._state)
        monkeypatch.setattr(comm, "parameter", self._parameter)
        monkeypatch.setattr(gathers, "_dtype_of", lambda param, shard: torch.bfloat16)

    def _agree(self, parameters: Any, group: Any, config: Any) -> int:
        missing = [one for one, _ in parameters if one._kind is None]
        for one in missing:
            one._agreed("a kind", [100])
        self.agreed.append((group, [one.name for one in missing]))
        return len(missing)

    def _parameter(self, group: Any, device: str, *shape: Any, trained: bool) -> Any:
        return CachedParameter(*shape, trained=trained) if group is PLAIN else Agreed(*shape)

    def _state(self, group: Any) -> Any:
        backend = "gloo" if group is PLAIN else "nccl"
        return SimpleNamespace(
            size=RANKS[group], streams=lambda device: group is not PLAIN, backend=lambda device: backend
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    for owner, classes in (
        ("stage3", (DeepSpeedZeroOptimizer_Stage3,)),
        ("partition_parameters", (Init, GatheredParameters)),
    ):
        module = SimpleNamespace(**{one.__name__: one for one in classes})
        hook_points.adopt(module, f"deepspeed.runtime.zero.{owner}")
    return Ranks(monkeypatch)


def begin(optimizer: Any, *params: Any, config: ZipcclConfig = ON) -> None:
    zero_versions.begin(optimizer, [(f"p{one.ds_id}", one) for one in params], config, GPU)


def live(one: Any) -> bool:
    return one.ds_zipccl_state._kind is not None


def test_all_parameters_whose_shards_are_at_hand_agree_at_once(ranks: Ranks) -> None:
    """By group, the largest first, in the order of their numbers; others agree when they are gathered."""
    later = {
        "offloaded": param(10, device="cpu"),
        "on disk": param(11, final_location="nvme"),
        "stays gathered": param(13, stays=True),
    }
    second, first, expert = param(2), param(1), param(0, EXPERTS)
    others = [param(20, PLAIN), param(21, ALONE), SimpleNamespace(ds_id=22)]
    named = [second, expert, *later.values(), first, *others[:2]]
    begin(DeepSpeedZeroOptimizer_Stage3(), *named)
    assert ranks.agreed == [(WORLD, ["p1", "p2"]), (EXPERTS, ["p0"])]
    assert [gathers.parameters_of([one])[0].name for one in later.values()] == ["p10", "p11", "p13"]
    assert all(gathers.parameters_of([one]) == () for one in others)
    assert gathers.parameters_of([first, others[1]]) == (), "all or none"
    assert gathers.parameters_of([first])[0].dtype is torch.bfloat16
    assert [one.numel for one in gathers.parameters_of([first, second])] == [8, 8]


@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer_Stage3, SuperOffloadOptimizer_Stage3])
def test_a_step_ends_the_versions_of_what_it_trains(ranks: Ranks, kind: type[DeepSpeedZeroOptimizer_Stage3]) -> None:
    trained, frozen = param(1), param(2)
    optimizer = kind(trained)
    begin(optimizer, trained, frozen)
    ranks.agreed.clear()
    during: list[bool] = []
    optimizer.asked = SimpleNamespace(append=lambda versions: during.append(live(trained)))  # type: ignore[assignment]
    version = frozen.ds_zipccl_state.version
    assert optimizer.step() == "stepped"
    assert during == [False] and ranks.checked == [WORLD] and ranks.agreed == [(WORLD, ["p1"])]
    assert frozen.ds_zipccl_state.version == version


def test_gathered_parameters_are_checked_before_a_program_reads_them(ranks: Ranks) -> None:
    one, expert, unknown = param(1), param(2, EXPERTS), param(3, PLAIN)
    begin(DeepSpeedZeroOptimizer_Stage3(one), one, expert, unknown)
    for params, groups in (([expert], [EXPERTS]), ([expert, one], [WORLD, EXPERTS]), ([unknown], []), ([], [])):
        assert GatheredParameters(params).__enter__() == "gathered"
        assert ranks.checked == groups
        ranks.checked.clear()
    one.ds_status.name = "AVAILABLE"
    assert GatheredParameters([one]).__enter__() == "gathered" and not ranks.checked, "nothing is gathered"


@pytest.mark.parametrize("why", ["in the background", "off", "no other rank"])
def test_nothing_happens(ranks: Ranks, why: str) -> None:
    one = param(1, ALONE if why.startswith("no") else WORLD)
    optimizer = Background(one) if why == "in the background" else DeepSpeedZeroOptimizer_Stage3(one)
    begin(optimizer, one, config=replace(ON, nccl="off") if why == "off" else ON)
    assert gathers.parameters_of([one]) == () and not ranks.agreed
    one.ds_zipccl_state = SimpleNamespace(version=3, forget=lambda: pytest.fail("no version to end"))
    assert Background(one).step() == optimizer.step() == "stepped" and not ranks.checked


@pytest.fixture
def cached(ranks: Ranks) -> list[Any]:
    """Parameters of a gloo group on CPUs, of which the first and the second get bases."""
    return [param(number, PLAIN, device="cpu") for number in range(3)]


def starts(optimizer: Any, params: Any) -> None:
    named = [(f"p{one.ds_id}", one) for one in params]
    zero_versions.begin(optimizer, named, replace(ON, nccl="off"), torch.device("cpu"))
    for one in params:
        if state := getattr(one, "ds_zipccl_state", None):
            assert state.slot() is None, "an earlier engine's"
            if one.ds_id < 2:
                state.hold(BaseSlot(torch.zeros(4, 8, dtype=torch.bfloat16), [0], one.ds_id))


@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer_Stage3, Background])
def test_parameters_of_gathers_that_ask(ranks: Ranks, cached: list[Any], kind: Any) -> None:
    """Also where nccl is off, whoever the optimizer is, and with shards on disk: the gather compares the shard that it gets."""
    on_disk = param(7, PLAIN, device="cpu", final_location="nvme")
    optimizer = kind()
    starts(optimizer, [*cached, on_disk])
    assert gathers.parameters_of([*cached, on_disk]) == [one.ds_zipccl_state for one in (*cached, on_disk)]
    cached[0].ds_tensor.ds_numel = 9
    assert gathers.parameters_of(cached) == ()
    zero_versions.end(optimizer)
    assert gathers.parameters_of(cached) == () and not hasattr(optimizer, "ds_zipccl_versions")
    zero_versions.end(optimizer), zero_versions.end(None)


def test_a_later_engine_of_a_module_begins_anew(ranks: Ranks, cached: list[Any]) -> None:
    """The end of an earlier engine changes nothing then."""
    first, second = DeepSpeedZeroOptimizer_Stage3(), DeepSpeedZeroOptimizer_Stage3()
    starts(first, cached)
    before = cached[0].ds_zipccl_state
    starts(second, cached)
    zero_versions.end(first)
    assert cached[0].ds_zipccl_state is not before and cached[0].ds_zipccl_state.slot() is not None
    Init()._convert_to_deepspeed_param(cached[0])
    assert gathers.parameters_of(cached[:1]) == ()
