"""``bench train`` with lossy roles: our runs have one another's bits, and a line tells how far they are from the plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_train import EXAMPLE, results

#: Columns of the time of exchanges.
TIMES = ("exchange_ms", "quiet_ms", "of_plain", "of_coded")


def test_lossy_runs_are_compared_with_each_other() -> None:
    from ds_zipccl.benchmarks.train.results import judge
    from ds_zipccl.benchmarks.train.trial import Training

    training = Training(EXAMPLE, "tp", ranks=2, steps=3)
    off = {"losses": [value.hex() for value in (2.0, 1.25, 1.25)], "params_sha256": "lossy"}
    runs = {"plain": [results(sent=None)], "raw": [results(**off)], "coded": [results(**off)]}
    judged = judge(training, runs, lossy=True)
    assert judged["problems"] == [] and judged["lossy"] == {"largest": 0.25, "last": 0.0}
    assert judge(training, runs)["problems"], "without a lossy role the bits of the plain run are wanted"
    runs["coded"] = [results(**off | {"params_sha256": "other"})]
    assert judge(training, runs, lossy=True)["problems"] == ["coded run: parameters differ from the first raw run's"]


@pytest.mark.full(reason="two trainings with transformers")
def test_tensor_parallelism_with_a_lossy_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from ds_zipccl.__main__ import main

    file = tmp_path / "rows.json"
    words = f"bench train --workload tp --steps 3 --skip 1 --size tiny --json {file}"
    assert main([*words.split(), "--set", "lossy=true", 'roles={"tp": {"codec": "round", "mantissa": 3}}']) == 0
    plain, coded = json.loads(file.read_text())["rows"]
    assert coded["params_sha256"] != plain["params_sha256"]
    assert coded["wire_bytes"] < 0.55 * coded["logical_bytes"]
    said = capsys.readouterr().out
    assert "tp round mantissa 3 forward and backward is lossy: its losses are off by up to" in said
    assert "bits: equal among our runs" in said


def test_variants_with_settings_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    from ds_zipccl.__main__ import main
    from ds_zipccl.benchmarks.comm.variants import VARIANTS, find

    assert find("coded") is VARIANTS["coded"] and not find("coded").changes
    one = find("ep=round:3,zero_grad=powersgd:8:start_step=2")
    assert one.always and one.compressed
    assert one.settings == {
        "mode": "always",
        "lossy": True,
        "roles": {
            "ep": {"codec": "round", "mantissa": 3},
            "zero_grad": {"codec": "powersgd", "rank": 8, "start_step": 2},
        },
    }
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
    with pytest.raises(SystemExit):
        main(["bench", "train", "--variants", "plain", "code"])
    assert "'code' is no variant" in capsys.readouterr().err


def test_a_variant_that_changes_values_is_compared_with_itself() -> None:
    from ds_zipccl.benchmarks.train.results import judge, rows
    from ds_zipccl.benchmarks.train.trial import Training

    training = Training(EXAMPLE, "tp", ranks=2, steps=3)
    off = {"losses": [value.hex() for value in (2.0, 1.25, 1.25)], "params_sha256": "lossy"}
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
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from comm_time import exchanging

    assert exchanging([[[5.0, 1.0], [3.0]], [[2.0, 4.0], [3.5]]]) == [[2.0, 1.0], [3.0]]
    assert exchanging([[[5.0]], [[2.0, 4.0]]]) is None
