"""Versions of ZeRO-3's parameters without engines: which parameters take part, and what ends versions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_zipccl import comm
from ds_zipccl.comm import Keeper
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.bases.state import Way
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hook_points, hooks  # noqa: F401  the table of points
from ds_zipccl.integration.zero import gathers
from ds_zipccl.integration.zero import versions as zero_versions

ON = ZipcclConfig(enabled=True, nccl="on")
GPU = torch.device("cuda")
WORLD, EXPERTS, PLAIN, ALONE = ("a group of 4", "a group of 2", "a group of gloo", "a group of one")
#: Way of a parameter with a base -> what its next gather does.
AFTER = {Way.COPY: "copy", Way.DELTA: "agree", Way.FULL: "send"}
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

    set_local_hp_param = set_full_hp_param


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """A stand-in for the subclass whose step is its own; processes in the background change its copies, not the shards."""

    def step(self) -> str:
        return super().step.__wrapped__(self)  # type: ignore[attr-defined, no-any-return]


class Background(DeepSpeedZeroOptimizer_Stage3):
    """An optimizer that steps while the model runs."""


class DeepSpeedZeRoOffload:
    """The part of ZeRO-3 that fetches the parameters of modules."""

    def pre_sub_module_forward_function(self, sub_module: Any) -> None:
        pass


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
    made = {"ds_id": number, "ds_process_group": group, "ds_persist": stays}
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
        monkeypatch.setattr(gathers, "_dtype_of", lambda param, shard: torch.bfloat16)

    def _agree(self, parameters: Any, group: Any, config: Any) -> int:
        missing = [one for one, _ in parameters if one._kind is None]
        for one in missing:
            one._agreed("a kind", [100])
        self.agreed.append((group, [one.name for one in missing]))
        return len(missing)

    def _state(self, group: Any) -> Any:
        backend = "gloo" if group is PLAIN else "nccl"
        return SimpleNamespace(
            size=RANKS[group], streams=lambda device: group is not PLAIN, backend=lambda device: backend
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    for owner, classes in (
        ("stage3", (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeRoOffload)),
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
    assert [gathers.agreed_of([one])[0].name for one in later.values()] == ["p10", "p11", "p13"]
    assert all(gathers.agreed_of([one]) == () for one in others)
    assert gathers.agreed_of([first, others[0]]) == (), "all or none"
    assert gathers.agreed_of([first])[0].dtype is torch.bfloat16
    assert [one.numel for one in gathers.agreed_of([first, second])] == [8, 8]


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


def test_changes_end_versions(ranks: Ranks) -> None:
    first, second = param(1), param(2, dtype=torch.float32)
    optimizer = DeepSpeedZeroOptimizer_Stage3(first, second)
    begin(optimizer, first, second)

    def ended(change: Any) -> list[int]:
        found = [one.ds_id for one in (first, second) if not live(one)]
        assert found == []
        change()
        found = [one.ds_id for one in (first, second) if not live(one)]
        for one in (first, second):
            one.ds_zipccl_state._agreed("a kind", [100])
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
    assert gathers.agreed_of([first]) == ()


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
    assert gathers.agreed_of([one]) == () and not ranks.agreed
    one.ds_zipccl_state = SimpleNamespace(version=3, forget=lambda: pytest.fail("no version to end"))
    assert Background(one).step() == optimizer.step() == "stepped" and not ranks.checked


@pytest.fixture
def kept(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Parameters of a gloo group on CPUs, of which the first and the second have bases, and whose versions have begun."""
    params = [param(number, PLAIN, device="cpu") for number in range(3)]
    slots = [BaseSlot(torch.zeros(4, 8, dtype=torch.bfloat16), [0], serial) for serial in range(2)]
    for one, slot in zip(params, slots, strict=False):
        one.slot = weakref.ref(slot)
    monkeypatch.setattr(Keeper, "check", lambda keeper: ranks.checked.append([one.name for one in keeper.parameters]))
    yield params
    del slots


def starts(optimizer: Any, params: Any) -> None:
    named = [(f"p{one.ds_id}", one) for one in params]
    zero_versions.begin(optimizer, named, replace(ON, nccl="off"), torch.device("cpu"))
    for one in params:
        if state := getattr(one, "ds_zipccl_state", None):
            assert state.slot() is None, "an earlier engine's"
            if hasattr(one, "slot"):
                state.hold(one.slot())
            state.prove()


def test_parameters_with_bases_are_parts_of_gathers(ranks: Ranks, kept: list[Any]) -> None:
    """Also where nccl is off; not without a base of the dtype of the gather, nor with a shard on disk."""
    on_disk = param(7, PLAIN, device="cpu", final_location="nvme")
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    starts(optimizer, [*kept, on_disk])
    first, _, third = kept
    assert gathers.parts_of(kept, torch.bfloat16) == [*((8, one.ds_zipccl_state) for one in kept[:2]), (8, None)]
    assert gathers.parts_of(kept, torch.float32) == gathers.parts_of([third, on_disk], torch.bfloat16) == ()
    first.ds_tensor.ds_numel = 9
    assert gathers.parts_of([first], torch.bfloat16) == ()
    zero_versions.end(optimizer)
    assert gathers.parts_of(kept, torch.bfloat16) == () and not hasattr(optimizer, "ds_zipccl_versions")
    zero_versions.end(optimizer), zero_versions.end(None)


def test_events_end_versions_of_bases(ranks: Ranks, kept: list[Any]) -> None:
    trained, frozen, _ = kept
    optimizer = DeepSpeedZeroOptimizer_Stage3(trained)
    starts(optimizer, kept)
    one, two = trained.ds_zipccl_state, frozen.ds_zipccl_state

    def after(event: Callable[[], Any]) -> list[str]:
        """What a gather of either parameter does."""
        one.prove(), two.prove()
        event()
        return [AFTER[each.way] for each in (one, two)]

    assert after(optimizer.step) == ["send", "agree"] and ranks.checked == [["p0", "p1", "p2"]]
    assert after(lambda: optimizer.load_state_dict("state")) == ["send", "send"]
    assert after(lambda: Init()._partition([frozen], has_been_updated=True)) == ["copy", "send"]
    assert after(lambda: Init()._partition([frozen])) == ["copy", "copy"]
    assert after(GatheredParameters([frozen]).__enter__) == ["copy", "agree"]
    assert after(GatheredParameters([]).__enter__) == ["copy", "copy"]
    frozen.ds_status.name = "AVAILABLE"
    assert after(GatheredParameters([frozen]).__enter__) == ["copy", "copy"], "nothing is gathered"


class Block(nn.Module):
    """A module that is hooked as DeepSpeed hooks modules, and gathers parameters in its calls."""

    def __init__(self, offload: Any, gather: Callable[[], str], *blocks: Block) -> None:
        super().__init__()
        self.blocks, self.gather, self.said = nn.ModuleList(blocks), gather, [""]
        self.register_forward_pre_hook(lambda *call: offload.pre_sub_module_forward_function(self))

    def forward(self, inside: Callable[[], Any] = lambda: None) -> str:
        self.said.append(self.gather())
        inside()
        for block in self.blocks:
            block()
        return self.said[-1]


def test_passes_of_evaluation_agree_and_others_do_not(ranks: Ranks, kept: list[Any]) -> None:
    """Once a pass, at its first gather, whatever is called; a training pass agrees after an evaluation, but in an open step."""
    optimizer, offload = DeepSpeedZeroOptimizer_Stage3(), DeepSpeedZeRoOffload()
    optimizer.parameter_offload = offload  # type: ignore[attr-defined]
    starts(optimizer, kept)
    one = kept[0].ds_zipccl_state

    def gather() -> str:
        found = ""
        if gathers.parts_of(kept, torch.bfloat16):
            found, _ = AFTER[one.way], one.prove()
        return found

    inner = Block(offload, gather)
    model = Block(offload, gather, inner, inner)
    silent = Block(offload, lambda: "nothing")
    model.train()

    def evaluation(module: Any = model, **call: Any) -> list[str]:
        with torch.no_grad():
            return [module(**call), *inner.said[-2:]]

    assert [model(), model()] == ["agree", "copy"], "nothing was proven by a pass before"
    optimizer.step()
    one.prove()
    assert gather() == "copy" and one.keeper.steps is False
    assert [model(), model()] == ["agree", "copy"] and one.keeper.steps
    assert evaluation() == evaluation() == ["agree", "copy", "copy"] and not one.keeper.steps
    assert model() == "copy" and one.keeper.steps, "an open step"
    optimizer.step()
    assert evaluation(inner) == ["agree", "copy", "agree"] and evaluation(inner)[0] == "agree", "a part of the model"
    silent.eval()()
    assert model() == "agree" and model() == "copy", "the last gather was one of an evaluation"
    silent()
    assert model() == "copy", "nothing was gathered in that evaluation"
    assert model(inside=lambda: evaluation(inner)) == "copy" and inner.said[-3:] == ["copy"] * 3, (
        "a part without gradients"
    )
    with torch.inference_mode():
        assert [model(), model()] == ["agree", "agree"]
    model.eval()
    assert [model(), model()] == ["agree", "agree"], "with gradients"
    with pytest.raises(ZeroDivisionError):
        model(inside=lambda: 1 / 0)
    assert inner() == "agree" and inner() == "agree", "after an error"
    words = torch.ones(1, requires_grad=True)
    again: list[str] = []
    words.register_hook(lambda grad: again.append(inner()))
    words.sum().backward()
    assert again == ["copy"], "a part that is repeated in a backward pass"
    zero_versions.end(optimizer)
    assert not hasattr(offload, "ds_zipccl_versions") and not inner._forward_hooks and not model._forward_hooks


def test_a_save_agrees_once(ranks: Ranks, kept: list[Any]) -> None:
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    starts(optimizer, kept)
    one, two = (param.ds_zipccl_state for param in kept[:2])
    with zero_versions.saving(optimizer), zero_versions.saving(None):
        assert one.way is two.way is Way.DELTA
        one.prove(), two.prove()
        GatheredParameters(kept).__enter__()
        assert one.way is two.way is Way.COPY
    GatheredParameters(kept).__enter__()
    assert one.way is two.way is Way.DELTA


def test_a_later_engine_of_a_module_begins_anew(ranks: Ranks, kept: list[Any]) -> None:
    """The end of an earlier engine changes nothing then."""
    first, second = DeepSpeedZeroOptimizer_Stage3(), DeepSpeedZeroOptimizer_Stage3()
    starts(first, kept)
    before = kept[0].ds_zipccl_state
    starts(second, kept)
    zero_versions.end(first)
    assert kept[0].ds_zipccl_state is not before and kept[0].ds_zipccl_state.way is Way.COPY
    Init()._convert_to_deepspeed_param(kept[0])
    assert gathers.parts_of(kept[:1], torch.bfloat16) == ()
