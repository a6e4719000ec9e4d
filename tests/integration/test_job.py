"""The job of a process: sections that it accepts, facts that engines tell, and the calls that depend on these facts."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import deepspeed.comm.comm
import pytest
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.config import ConfigError, ZipcclConfig
from ds_zipccl.integration import backend, hints, hooks, job
from ds_zipccl.integration.job import Job

DATA = object()  # a group
OWNED = [(600, frozenset({0})), (400, frozenset({1, 2}))]
UNKNOWN = "the owners of the bucket are not known"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one rank, with no section installed."""
    monkeypatch.setattr(job.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(job.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(job, "_installed", None)
    monkeypatch.delenv("DS_ZIPCCL", raising=False)


# ---- sections ----------------------------------------------------------------------------------------------------------


def test_a_section_is_accepted_once(one_rank: None) -> None:
    this = Job()
    assert this.accept(None) is None and this.section is None
    config = this.accept({"enabled": True, "block": 256})
    assert config == ZipcclConfig(enabled=True, block=256) and this.section == '{"block": 256, "enabled": true}'
    assert this.accept({"block": 256, "enabled": True}) is None, "the same section of another engine"
    assert this.accept(None) is None, "an engine without a section"
    with pytest.raises(ConfigError, match=r"already runs with .* give them the same section"):
        this.accept({"enabled": True, "block": 512})


def test_a_section_that_is_off_counts_too(one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who forgot the key reads so; one who wrote false does not."""
    assert Job().accept({"enabled": False}) is None and not capsys.readouterr().out
    this = Job()
    assert this.accept({"block": 256}) is None and this.section == '{"block": 256}'
    assert '] off: "zipccl" has no key "enabled"; add "enabled": true\n' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already runs"):
        this.accept({"enabled": True})


def test_an_invalid_section_is_not_accepted(one_rank: None) -> None:
    this = Job()
    with pytest.raises(ConfigError, match="known keys"):
        this.accept({"blocks": 256})
    assert this.section is None and this.accept({"enabled": True}) is not None


def test_sections_that_precede_those_of_configs(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job.install_section({"enabled": True, "block": 512})
    with pytest.raises(ConfigError, match="known keys"):
        job.install_section({"blocks": 1})
    config = Job().accept({"enabled": True, "block": 256})
    assert config is not None and config.block == 512, "install() precedes"
    monkeypatch.setenv("DS_ZIPCCL", '{"block": 128}')
    config = Job().accept({"enabled": True, "block": 256})
    assert config is not None and config.block == 128, "the environment precedes install()"


# ---- engines -----------------------------------------------------------------------------------------------------------


def test_roles_depend_on_engines_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(torch.nn.Module):
        """A model with a tensor-parallel group."""

    class Group:
        """Stands for a process group."""

    monkeypatch.setattr(job.roles, "groups_of", lambda model: {model.group: "tp"})
    this, model, more = Job(), Layers(), Layers()
    model.group, more.group = Group(), Group()
    assert this.role_of("all_reduce", None) == "dp"
    this.zero_stages |= {2}
    assert this.role_of("all_reduce", None) == "zero_grad"
    assert this.role_of("all_reduce", model.group) == "zero_grad"  # type: ignore[arg-type]
    this.learn_groups(model)
    this.learn_groups(more)
    assert this.role_of("all_reduce", model.group) == this.role_of("all_reduce", more.group) == "tp"  # type: ignore[arg-type]
    del model.group
    gc.collect()
    assert len(this.groups) == 1, "the job keeps no group alive"


class Engine:
    """An engine that takes steps; ``seen`` has the stepping stage during each step."""

    global_samples = 8

    def __init__(self, stage: int) -> None:
        self.stage, self.global_steps, self.seen = stage, 0, [0]
        self.events: list[Any] = []
        self.monitor = SimpleNamespace(enabled=True, write_events=self.events.append)

    def zero_optimization_stage(self) -> int:
        return self.stage

    def get_lr(self) -> list[float]:
        return [0.5]

    def step(self) -> str:
        self.global_steps += 1
        self.seen.append(hints.current().stepping)
        return "result"


@pytest.fixture
def this(monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job of DeepSpeed's backend."""
    built = backend.ZipcclBackend.__new__(backend.ZipcclBackend)
    built.job = Job()
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", built)
    monkeypatch.setattr(hooks.torch.distributed, "get_rank", lambda: 0)
    return built.job


def test_steps_are_seen_logged_and_shown(this: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    chosen: list[tuple[Any, int]] = []
    monkeypatch.setattr(hooks.table, "show", shown.append)
    monkeypatch.setattr(hooks.comm_engine, "before_step", lambda: None)
    monkeypatch.setattr(hooks.comm_engine, "end_step", lambda engine: chosen.append((engine, engine.global_steps)))
    engine, lines = Engine(2), []
    assert hooks._take_step(Engine.step, engine) == "result" and engine.seen == [0, 0], "coding is off"
    this.config = ZipcclConfig(enabled=True, log_interval=2)
    this.step_log = SimpleNamespace(write=lambda step, rates: lines.append((step, rates)))  # type: ignore[assignment]
    for _ in range(3):
        assert hooks._take_step(Engine.step, engine) == "result"
    assert engine.seen == [0, 0, 2, 2, 2] and hints.current().stepping == 0
    assert lines == [(step, [0.5]) for step in (2, 3, 4)]
    assert shown == ["after 2 steps", "after 4 steps"] and len(engine.events) == 2
    assert chosen == [(engine, step) for step in (2, 3, 4)], "after the optimizer step, whose gathers are part of it"


def test_another_backend_has_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", object())
    engine = Engine(2)
    assert hooks._job() is None and hooks._take_step(Engine.step, engine) == "result" and engine.seen == [0, 0]


def test_every_backend_has_a_job_of_its_own() -> None:
    plain = backend.TorchBackend.__new__(backend.TorchBackend)
    backend.ZipcclBackend.adopt(plain)
    another = backend.TorchBackend.__new__(backend.TorchBackend)
    backend.ZipcclBackend.adopt(another)
    assert type(plain) is backend.ZipcclBackend and plain.job.config is None and plain.job is not another.job


# ---- calls -------------------------------------------------------------------------------------------------------------


def test_only_a_step_of_zero_1_and_2_gathers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of steps, as when a checkpoint is saved, and in those of ZeRO-3 only what was asked for is known."""
    given: list[tuple[Any, Any]] = []
    monkeypatch.setattr(backend.gathers, "take_parameters", lambda *call: given.append(call) or ["weight"])
    monkeypatch.setattr(backend.gathers, "parameters_of", lambda params: f"states of {params}")
    output = torch.empty(4)
    found = {}
    for stage in (0, 1, 2, 3):
        with hints.hinting(stepping=stage):
            found[stage] = backend.gather_parameters(output, DATA)
    known = {"parameters": "states of ['weight']"}
    assert found == {0: known, 1: {"base": comm.IN_PLACE}, 2: {"base": comm.IN_PLACE}, 3: known}
    assert len(given) == 2 and all(one == (output, DATA) for one in given)


#: (owner_only, role, stages of engines, elements, known owners) -> owners of the call, and whether the table is told.
SUMS: dict[str, tuple[tuple[str, str, set[int], int, Any], Any, bool]] = {
    "known": (("auto", "zero_grad", {2}, 1000, OWNED), OWNED, False),
    "switched off": (("off", "zero_grad", {2}, 1000, OWNED), None, False),
    "switched off, unknown": (("off", "zero_grad", {2}, 1000, None), None, False),
    "unknown, ZeRO-2": (("auto", "zero_grad", {0, 2}, 1000, None), None, True),
    "unknown, ZeRO-1": (("auto", "zero_grad", {1}, 1000, None), None, True),
    "unknown, ZeRO-3": (("auto", "zero_grad", {3}, 1000, None), None, False),
    "unknown, no engine": (("auto", "zero_grad", set(), 1000, None), None, False),
    "unknown, another role": (("auto", "tp", {2}, 1000, None), None, False),
    "unknown, small": (("auto", "zero_grad", {2}, 999, None), None, False),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_that_go_to_all_ranks_are_counted(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    (owner_only, role, stages, numel, known), taken, told = SUMS[case]
    counted: list[Any] = []
    monkeypatch.setattr(backend.buckets, "take_owners", lambda tensor, op, group, async_op: known)
    monkeypatch.setattr(backend.counters, "record_whole", lambda *args: counted.append(args))
    config = ZipcclConfig(enabled=True, min_bytes=4000, owner_only=owner_only)  # type: ignore[arg-type]
    asked = Job(config=config, zero_stages=frozenset(stages))
    args = torch.empty(numel), dist.ReduceOp.SUM, DATA, False
    assert backend.slice_owners(asked, *args, role=role) is taken
    assert counted == ([("zero_grad", "all_reduce", UNKNOWN)] if told else [])
