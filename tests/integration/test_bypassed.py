"""Lines about features whose traffic bypasses the package: from a config and from engines, and none for a job that has no such feature."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import ranks as runner
import torch
from backend_programs import succeed

from ds_zipccl.cli import doctor, doctor_ranks
from ds_zipccl.cli.doctor_ranks import RankReport
from ds_zipccl.cli.planning import job, user_job
from ds_zipccl.integration import bypassed, start_line
from ds_zipccl.integration.bypassed import FEATURES, Facts
from ds_zipccl.policy.cost_model import LinkProfile

PROFILE = LinkProfile(((1.0, 1e-5), (1e9, 1.0)), 1e12, 1e12, 1e12, 1e12, 1e12, 1e-6)


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def experts(**keys: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, "comm_backend": "deepep", **keys}}


FETCH, QUANTIZED = "stage3_use_all_reduce_for_fetch_params", "zero_quantized_weights"
#: (config, what else is known, names of the features).
Case = tuple[dict[str, Any], dict[str, Any], list[str]]
CASES: list[Case] = [
    *((zero(stage) | {"compile": {"deepcompile": True}}, {}, ["DeepCompile"]) for stage in (1, 2, 3)),
    ({"zero_optimization": True, "compile": {"deepcompile": "true", "passes": ["z1"]}}, {}, ["DeepCompile"]),
    (zero(2) | experts(), {}, ["DeepEP"]),
    (zero(2), {"backend": "ccl"}, ["CCLBackend"]),
    (zero(**{FETCH: True}), {}, [FETCH]),
    (zero(use_all_reduce_for_fetch_params=1), {}, [FETCH]),
    (zero(**{QUANTIZED: True, FETCH: True}), {}, ["qwZ of ZeRO++"]),
    (zero(zero_quantized_nontrainable_weights=True), {}, ["qwZ of ZeRO++"]),
    (zero(**{QUANTIZED: True}, zero_quantized_gradients=True), {}, ["qwZ of ZeRO++", "qgZ of ZeRO++"]),
    ({"pipeline": {"stages": 2}}, {"device": "cuda", "pipelined": True}, ["pipeline sends"]),
    # None of these has one.
    ({}, {}, []),
    (zero(0), {"device": "cuda", "backend": "nccl"}, []),
    *((zero(stage), {"backend": "gloo"}, []) for stage in (1, 2, 3)),
    ({"zero_optimization": False, "compile": {"deepcompile": True}}, {}, []),
    (zero(3) | {"compile": {"deepcompile": False}}, {}, []),
    (zero(3) | {"compile": {"deepcompile": "auto"}}, {}, []),
    (zero(1) | {"compile": {"deepcompile": True, "passes": ["autosp"]}}, {}, []),
    (zero(1) | {"compile": {"deepcompile": True, "passes": ["autotp"]}}, {}, []),
    *((experts(**off), {}, []) for off in ({"comm_backend": "comm"}, {"enabled": False}, {"autoep_size": 1})),
    (zero(**{FETCH: "auto", QUANTIZED: False}, zero_quantized_gradients="auto"), {}, []),
    (zero(2, **{FETCH: True, QUANTIZED: True}, zero_quantized_gradients=True), {}, []),
    ({"pipeline": {"stages": 2}}, {"pipelined": True}, []),
]


def named(lines: list[str]) -> list[str]:
    return [line.split(": ")[1] for line in lines]


@pytest.mark.parametrize("case", CASES)
def test_a_line_for_each_feature(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the lines of the start, in those of the doctor, and in its file; and the doctor predicts no step of ZeRO that would be wrong."""
    config, known, names = case
    facts = Facts(config, **known)
    lines = bypassed.lines(facts)
    assert named(lines) == names and all(line.startswith("bypassed: ") and "; to do: " in line for line in lines)
    if isinstance(config.get("zero_optimization"), bool):
        return  # the doctor wants the section
    groups = facts.device, facts.backend or "gloo"
    monkeypatch.setattr(start_line, "device_here", lambda: groups)
    (path := tmp_path / "ds_config.json").write_text(json.dumps({**config, "zipccl": {"enabled": True}}))
    args = argparse.Namespace(ds_config=str(path), params=None, about="")
    found = doctor_ranks.Ranks(0, (RankReport("here", "", "", " ".join(groups), {}),) * 2)
    told = doctor._predict(args, user_job.read(str(path)), found, PROFILE, None)["notes"]
    assert [note for note in told if note.startswith("bypassed")] == lines
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if "bypassed" in line] == lines
    path.write_text(json.dumps({**config, "zipccl": {}}))
    off = doctor._predict(args, user_job.read(str(path)), found, PROFILE, None)
    assert off["covered"] == 'nothing will be coded: "enabled" is not true'
    reason = job.unpredicted(user_job.read(str(path)), "cpu", "gloo")
    of_zero = [one.name for one in FEATURES if one.of_zero and one.name in names]
    assert reason.endswith(", ".join(of_zero)) and ("no model predicts the traffic of" in reason) == bool(of_zero)


def test_every_feature_with_a_line_has_a_case() -> None:
    models = "DDP, FSDP or DTensor in the model"  # below
    assert {name for *_, names in CASES for name in names} | {models} == {one.name for one in FEATURES if one.found}


def parallel(rank: int, ranks: int) -> list[list[str]]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    def model(inner: Any) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), inner)

    plain, spread = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    spread.weight = torch.nn.Parameter(distribute_tensor(spread.weight.detach(), mesh))
    models = [
        model(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))),
        model(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))),
        model(fully_shard(torch.nn.Linear(4, 4), mesh=mesh)),
        model(spread),
        model(plain),
    ]
    return [named(bypassed.lines(Facts(classes=bypassed.classes_of(one)))) for one in models]


@pytest.mark.full(reason="imports FSDP and DTensor, for ten seconds; test_engines_say_it_once has DDP")
def test_models_with_parallelism_of_torch() -> None:
    """DDP, FSDP 1 and 2 and DTensor as torch makes them; a plain model has no line."""
    assert runner.run(parallel, 1)[0] == [["DDP, FSDP or DTensor in the model"]] * 4 + [[]]


ENGINES = """
section = {"enabled": True, "mode": "always", "min_bytes": 0}
def say(what):
    dist.barrier()
    if rank == 0:
        print("##", what, flush=True)
deepspeed.init_distributed()
say("plain")
steps(engine(section, stage=3), 1)
steps(engine(section, zero_optimization=True), 1)  # the old form of stage 1
say("fetch")
config = {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True, "stage3_param_persistence_threshold": 0}
from ds_zipccl.telemetry import counters
counters.reset()
steps(engine(section, zero_optimization=config), 2)
print("OPS", {row["op"] for row in counters.rows() if row["logical_bytes"] > 1e5}, flush=True)
say("again")
engine(section, zero_optimization=config)
say("model")
linear = torch.nn.Linear
torch.nn.Linear = lambda *sizes: torch.nn.Sequential(torch.nn.parallel.DistributedDataParallel(linear(*sizes)))
engine(section)
torch.nn.Linear = linear
say("ccl, off")
cdb = deepspeed.comm.comm.cdb
cdb.__class__ = deepspeed.comm.ccl.CCLBackend  # on a group of gloo and without oneCCL: all calls go to torch
cdb.name, cdb.available_coll, cdb.ccl_comm_op = "ccl", (), None
engine({"enabled": False})
say("ccl")
steps(engine(section), 1)
say("end")
leave()
"""


@pytest.mark.full(reason="six seconds")
def test_engines_say_it_once(tmp_path: Path) -> None:
    """A line for an engine that fetches by sums, for DDP in the model and for CCLBackend, each once; none for a plain config."""
    first, other = succeed(tmp_path, ENGINES)
    said = {part.partition("\n")[0].strip(): part for part in first.split("##")}
    told = {
        what: named(lines)
        for what, text in said.items()
        if (lines := [line for line in text.splitlines() if line.startswith("[ds_zipccl] bypassed: ")])
    }
    assert told == {"fetch": [FETCH], "model": ["DDP, FSDP or DTensor in the model"], "ccl": ["CCLBackend"]}
    assert "bypassed" not in other
    (ops,) = (line for line in said["fetch"].splitlines() if line.startswith("OPS"))
    assert "all_reduce" in ops and "all_gather" not in ops
