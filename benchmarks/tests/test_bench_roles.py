"""``bench train`` by role: bytes, ratios and times of experts, and lossy roles, whose runs must have equal bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import outcome
from places import EXAMPLES
from test_bench_train import EXAMPLE as LOSSY_EXAMPLE
from test_bench_train import Backend, logged, results

from ds_zipccl.benchmarks.comm.variants import VARIANTS, find
from ds_zipccl.benchmarks.train import volume
from ds_zipccl.benchmarks.train.results import judge, rows
from ds_zipccl.benchmarks.train.trial import Training
from ds_zipccl.tools.step_logs import Step

EXAMPLE = EXAMPLES / "train_moe.py"


def test_exchanges_of_experts_are_counted_from_the_second_step_on() -> None:
    kinds = {"ep dispatch": (60, 20, 0), "ep combine": (20, 10, 20), "tp dispatch": (9, 9, 9)}
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
    if workload != "moe":
        pytest.importorskip("transformers")
    content = outcome(tmp_path, f"bench train --workload {workload} --size tiny --steps 3 --skip 1")
    plain, coded = content["rows"]
    assert plain["params_sha256"] == coded["params_sha256"]
    assert all(0 < row["ep_ms"] == row["role_ms"]["ep"] < row["comm_ms"] for row in content["rows"])
    found = content["verdicts"][0]["experts"]["coded"]
    assert found["share"] >= 0.6
    assert set(found["ratios"]) == {"ep", "ep dispatch", "ep combine", "ep combine.bwd", "ep dispatch.bwd"}
    assert "exchanges of experts are" in capsys.readouterr().out


def test_times_are_told_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times have the roles of ds_zipccl; the wait of a handle has the role of its call."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from comm_time import OTHER, CommTime
    from deepspeed.utils import groups

    experts = object()
    monkeypatch.setattr(groups, "_EXPERT_PARALLEL_GROUP", {"ep_size_2": experts})

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
    assert handle is not None and handle.wait() and clock.times()["zero_grad"] > spent["zero_grad"]
    assert clock.ms == sum(clock.times().values())


# ---- lossy roles ---------------------------------------------------------------------------------------

#: Columns of times of exchanges.
TIMES = ("exchange_ms", "quiet_ms", "of_plain", "of_coded")


def test_variants_with_settings_of_their_own() -> None:
    assert find("coded") is VARIANTS["coded"] and not find("coded").changes
    one = find("ep=round:3,zero_grad=powersgd:8:start_step=2")
    assert one.always and one.compressed
    roles = {"ep": {"codec": "round", "mantissa": 3}, "zero_grad": {"codec": "powersgd", "rank": 8, "start_step": 2}}
    assert one.settings == {"mode": "always", "lossy": True, "roles": roles}
    assert "ep round mantissa 3" in one.changes
    assert find("fused_embedding=true").settings == {"mode": "always", "fused_embedding": True}
    assert find("tp=never").changes == "" and "lossy" not in (find("tp=never").settings or {})
    for wrong, said in {
        "code": "'code' is no variant: take one of plain, raw, coded, auto, or settings such as tp=round:3",
        "tp=round:9": "mantissa of round must be 1 to 6, got '9'",
        "zero_param=round:3": "takes no lossy codec",
        "pp=lowrank:16:when": "the settings of lowrank are rank",
        "nothing=1": "nothing",
    }.items():
        with pytest.raises(ValueError, match=said):
            find(wrong)


def test_lossy_runs_are_compared_with_each_other() -> None:
    """With a lossy role, all coded runs are compared with each other, and a lossy variant only with itself."""
    training = Training(LOSSY_EXAMPLE, "tp", ranks=2, steps=3)
    off = {"losses": [value.hex() for value in (2.0, 1.25, 1.25)], "params_sha256": "lossy"}
    runs = {"plain": [results(sent=None)], "raw": [results(**off)], "coded": [results(**off)]}
    judged = judge(training, runs, lossy=True)
    assert judged["problems"] == [] and judged["lossy"] == {"largest": 0.25, "last": 0.0}
    assert judge(training, runs)["problems"], "without a lossy role, coded runs must have the bits of the plain run"
    runs["coded"] = [results(**off | {"params_sha256": "other"})]
    assert judge(training, runs, lossy=True)["problems"] == ["coded run: parameters differ from the first raw run's"]

    times = [{"exchange_ms": [[9.0, 9.0], [ms, 1.0], [ms + 2.0, 0.5]]} for ms in (40.0, 20.0, 10.0)]
    runs = {
        "plain": [results(sent=None, **times[0])],
        "coded": [results(**times[1])],
        "tp=round:3": [results(**off, **times[2]), results(**off, **times[2])],
    }
    judged = judge(training, runs)
    assert judged["problems"] == [] and judged["changed"] == {"tp=round:3": {"largest": 0.25, "last": 0.0}}
    found = {row["variant"]: [row[key] for key in TIMES] for row in rows(training, runs, skip=1)}
    assert found == {
        "plain": [41.75, 40.5, 1, 40.5 / 20.5],
        "coded": [21.75, 20.5, 20.5 / 40.5, 1],
        "tp=round:3": [11.75, 10.5, 10.5 / 40.5, 10.5 / 20.5],
    }
    runs["tp=round:3"][1] = results(**off | {"params_sha256": "other", "replicas_equal": False})
    assert judge(training, runs)["problems"] == [
        "tp=round:3 run: parameters differ from the first tp=round:3 run's",
        "tp=round:3 run: ranks ended with different parameters",
    ]


def test_exchanges_take_the_time_of_the_rank_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LOSSY_EXAMPLE.parent))
    from comm_time import exchanging

    assert exchanging([[[5.0, 1.0], [3.0]], [[2.0, 4.0], [3.5]]]) == [[2.0, 1.0], [3.0]]
    assert exchanging([[[5.0]], [[2.0, 4.0]]]) is None
