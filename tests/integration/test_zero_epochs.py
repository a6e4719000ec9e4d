"""Epochs of ZeRO-3's parameters without engines: which parameters take part, and what ends epochs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl import comm
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import zero_epochs, zero_gathers

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
        self.asked.append([param.ds_zipccl_agreed.version for param in self.fp16_groups[0]])
        return "stepped"

    def load_state_dict(self, state: Any, strict: bool = True) -> tuple[Any, bool]:
        return state, strict

    def set_full_hp_param(self, value: Any, param: Any, optim_state_key: Any = None) -> Any:
        return optim_state_key

    set_local_hp_param = set_full_hp_param


class Background(DeepSpeedZeroOptimizer_Stage3):
    """An optimizer that steps while the model runs."""


class Init:
    def _partition(self, param_list: Any, force: bool = False, has_been_updated: bool = False) -> bool:
        return has_been_updated

    def _convert_to_deepspeed_param(self, param: Any) -> None:
        pass


class GatheredParameters:
    def __init__(self, params: Any) -> None:
        self.params, self.enabled = params, bool(params)

    def __enter__(self) -> str:
        return "gathered"


def param(
    number: int,
    group: Any = WORLD,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    place: str | None = None,
    stays: bool = False,
) -> Any:
    shard = SimpleNamespace(
        ds_numel=8,
        dtype=dtype,
        device=torch.device(device),
        final_location=place,
        detach=lambda: torch.zeros(8),
    )
    made = {"ds_id": number, "ds_process_group": group, "ds_persist": stays, "ds_tensor": shard}
    return SimpleNamespace(**made, ds_zero_partition_world_size=RANKS[group])


class Ranks:
    """The collectives, which note what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agreed: list[tuple[Any, list[str]]] = []
        self.checked: list[Any] = []
        monkeypatch.setattr(comm, "agree_sizes", self._agree)
        monkeypatch.setattr(comm, "check_frames", lambda device, group, config: self.checked.append(group))
        monkeypatch.setattr(zero_epochs, "group_state", self._state)
        monkeypatch.setattr(zero_gathers, "_gathered_dtype", lambda param, shard: torch.bfloat16)

    def _agree(self, parameters: Any, group: Any, config: Any) -> int:
        missing = [one for one, _ in parameters if one._kind is None]
        for one in missing:
            one._agreed("a kind", [100])
        self.agreed.append((group, [one.name for one in missing]))
        return len(missing)

    def _state(self, group: Any) -> Any:
        return SimpleNamespace(size=RANKS[group], streams=lambda device: group is not PLAIN)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    zero_epochs.watch_optimizer(DeepSpeedZeroOptimizer_Stage3)
    zero_epochs.watch_partitions(Init, GatheredParameters)
    return Ranks(monkeypatch)


def begin(optimizer: Any, *params: Any, config: ZipcclConfig = ON) -> None:
    zero_epochs.begin(optimizer, [(f"p{one.ds_id}", one) for one in params], config, GPU)


def live(one: Any) -> bool:
    return one.ds_zipccl_agreed._kind is not None


def test_all_parameters_whose_shards_are_at_hand_agree_at_once(ranks: Ranks) -> None:
    """By group, the largest first, in the order of their numbers; others agree when they are gathered."""
    later = {
        "offloaded": param(10, device="cpu"),
        "on disk": param(11, place="nvme"),
        "stays gathered": param(13, stays=True),
    }
    second, first, expert = param(2), param(1), param(0, EXPERTS)
    others = [param(20, PLAIN), param(21, ALONE), SimpleNamespace(ds_id=22)]
    named = [second, expert, *later.values(), first, *others[:2]]
    begin(DeepSpeedZeroOptimizer_Stage3(), *named)
    assert ranks.agreed == [(WORLD, ["p1", "p2"]), (EXPERTS, ["p0"])]
    assert [zero_epochs.agreed_of([one])[0].name for one in later.values()] == ["p10", "p11", "p13"]
    assert all(zero_epochs.agreed_of([one]) == () for one in others)
    assert zero_epochs.agreed_of([first, others[0]]) == (), "all or none"
    assert zero_epochs.agreed_of([first])[0].dtype is torch.bfloat16
    assert [one.numel for one in zero_epochs.agreed_of([first, second])] == [8, 8]


def test_a_step_ends_the_epochs_of_what_it_trains(ranks: Ranks) -> None:
    trained, frozen = param(1), param(2)
    optimizer = DeepSpeedZeroOptimizer_Stage3(trained)
    begin(optimizer, trained, frozen)
    ranks.agreed.clear()
    during: list[bool] = []
    optimizer.asked = SimpleNamespace(append=lambda versions: during.append(live(trained)))  # type: ignore[assignment]
    version = frozen.ds_zipccl_agreed.version
    assert optimizer.step() == "stepped"
    assert during == [False] and ranks.checked == [WORLD] and ranks.agreed == [(WORLD, ["p1"])]
    assert frozen.ds_zipccl_agreed.version == version


def test_a_refused_frame_stops_the_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = param(1)
    optimizer = DeepSpeedZeroOptimizer_Stage3(trained)
    begin(optimizer, trained)

    def refused(*call: Any, **more: Any) -> None:
        raise comm.CommError("as planted")

    monkeypatch.setattr(comm, "check_frames", refused)
    with pytest.raises(comm.CommError, match="as planted"):
        optimizer.step()
    assert optimizer.asked == [] and live(trained)


def test_changes_end_epochs(ranks: Ranks) -> None:
    first, second = param(1), param(2, dtype=torch.float32)
    optimizer = DeepSpeedZeroOptimizer_Stage3(first, second)
    begin(optimizer, first, second)

    def ended(change: Any) -> list[int]:
        found = [one.ds_id for one in (first, second) if not live(one)]
        assert found == []
        change()
        found = [one.ds_id for one in (first, second) if not live(one)]
        for one in (first, second):
            one.ds_zipccl_agreed._agreed("a kind", [100])
        return found

    assert ended(lambda: Init()._partition([first, second], has_been_updated=True)) == [1, 2]
    assert ended(lambda: Init()._partition([second], False, True)) == [2]
    assert ended(lambda: Init()._partition([first, second])) == []
    assert ended(lambda: optimizer.set_full_hp_param(0, second)) == [2], "32 bits: the optimizer's own copy"
    assert ended(lambda: optimizer.set_local_hp_param(0, second)) == [], "no call of all ranks"
    for set_param in (optimizer.set_full_hp_param, optimizer.set_local_hp_param):
        assert ended(lambda set_param=set_param: set_param(0, first)) == [], "16 bits: with the next step"
        assert ended(lambda set_param=set_param: set_param(0, second, "exp_avg")) == []
    assert ended(lambda: optimizer.load_state_dict("state", strict=False)) == [], "they have agreed anew"
    assert ranks.agreed[-1] == (WORLD, ["p1", "p2"])
    Init()._convert_to_deepspeed_param(first)
    assert zero_epochs.agreed_of([first]) == ()


def test_gathered_parameters_are_checked_before_a_program_reads_them(ranks: Ranks) -> None:
    one, expert, unknown = param(1), param(2, EXPERTS), param(3, PLAIN)
    begin(DeepSpeedZeroOptimizer_Stage3(one), one, expert, unknown)
    for params, groups in (([expert], [EXPERTS]), ([expert, one], [WORLD, EXPERTS]), ([unknown], []), ([], [])):
        assert GatheredParameters(params).__enter__() == "gathered"
        assert ranks.checked == groups
        ranks.checked.clear()


@pytest.mark.parametrize("why", ["in the background", "off", "no group in the order of streams"])
def test_nothing_happens(ranks: Ranks, why: str) -> None:
    one = param(1, PLAIN if why.startswith("no") else WORLD)
    optimizer = Background(one) if why == "in the background" else DeepSpeedZeroOptimizer_Stage3(one)
    begin(optimizer, one, config=replace(ON, nccl="off") if why == "off" else ON)
    assert zero_epochs.agreed_of([one]) == () and not ranks.agreed
    one.ds_zipccl_agreed = SimpleNamespace(version=3, forget=lambda: pytest.fail("no epoch to end"))
    assert Background(one).step() == optimizer.step() == "stepped" and not ranks.checked
