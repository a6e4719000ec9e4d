"""``bench train`` with experts: their part of the bytes, their ratios by kind and their time; the stopwatch's roles."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import EXAMPLES
from test_bench_train import logged, results

from ds_zipccl.cli.step_logs import Step

EXAMPLE = EXAMPLES / "train_moe.py"


def test_exchanges_of_experts_are_counted_from_the_second_step_on() -> None:
    from ds_zipccl.benchmarks.train import volume
    from ds_zipccl.benchmarks.train.results import judge, rows
    from ds_zipccl.benchmarks.train.trial import Training

    kinds = {"ep dispatch": (60, 20, 0), "ep combine": (20, 10, 20), "tp replicated": (9, 9, 9)}
    steps = [Step(step, (), {"ep": (80, 30, 20), "zero_grad": (25, 5, 0)}, {}, kinds) for step in (1, 2, 3)]
    steps[0] = Step(1, (), {"ep": (9, 1, 9), "dp": (0, 0, 900)}, {}, {"ep dispatch": (9, 1, 9)})
    found = {"share": 0.8, "ratios": {"ep": 2.0, "ep combine": 40 / 30, "ep dispatch": 3.0}}
    assert volume.experts(steps) == found and volume.experts(logged()) == {}
    times = {"role_ms": [{"ep": 700.0}, {"ep": 2.0, "dp": 1.0}, {"ep": 4.0}]}
    runs = {"plain": [results(**times)], "coded": [results(steps=steps)]}
    training = Training(EXAMPLE, "moe", ranks=2, steps=3)
    plain, coded = rows(training, runs, skip=1)
    assert (plain["role_ms"], plain["ep_ms"]) == ({"dp": 0.5, "ep": 3.0}, 3.0) and "ep_ms" not in coded
    assert judge(training, runs)["experts"] == {"plain": {}, "coded": found}


@pytest.mark.full(reason="half a minute of two trainings in two variants each")
@pytest.mark.parametrize("workload", ["moe", "qwen"])
def test_experts_send_most_of_the_bytes(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_zipccl.__main__ import main

    if workload != "moe":
        pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    assert main(f"bench train --workload {workload} --size tiny --steps 3 --skip 1 --json {file}".split()) == 0
    content = json.loads(file.read_text())
    plain, coded = content["rows"]
    assert plain["params_sha256"] == coded["params_sha256"]
    assert all(0 < row["ep_ms"] == row["role_ms"]["ep"] < row["comm_ms"] for row in content["rows"])
    found = content["verdicts"][0]["experts"]["coded"]
    assert found["share"] >= 0.6
    assert set(found["ratios"]) == {
        "ep",
        *(f"ep {kind}" for kind in ("dispatch", "combine", "combine.bwd", "dispatch.bwd")),
    }
    assert "exchanges of experts are" in capsys.readouterr().out


def test_times_are_told_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles are those of ds_zipccl; a handle's wait has the role of its call."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from comm_time import OTHER, CommTime
    from deepspeed.utils import groups

    experts = object()
    monkeypatch.setattr(groups, "_EXPERT_PARALLEL_GROUP", {"ep_size_2": experts})

    class Handle:
        def wait(self) -> bool:
            return True

    class Backend:
        def all_to_all_single(self, output: Any, input: Any, *, group: Any = None) -> None:
            pass

        def all_reduce(self, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
            return Handle()

    backend, clock = Backend(), CommTime()
    clock.watch(backend)
    backend.all_reduce(None)
    before = clock.times()
    assert set(before) == {OTHER}
    clock.learn(SimpleNamespace(zero_optimization_stage=lambda: 2, module=torch.nn.Linear(1, 1)))
    backend.all_to_all_single(None, None, group=experts)
    handle = backend.all_reduce(None, async_op=True)
    spent = clock.times(before)
    assert set(spent) == {OTHER, "ep", "zero_grad"} and spent[OTHER] == 0 < spent["ep"]
    assert handle.wait() and clock.times()["zero_grad"] > spent["zero_grad"]
    assert clock.ms == sum(clock.times().values())
