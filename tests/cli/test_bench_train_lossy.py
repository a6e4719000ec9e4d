"""``bench train`` with lossy roles: our runs have one another's bits, and a line tells how far they are from the plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_train import EXAMPLE, results


def test_lossy_runs_are_compared_with_each_other() -> None:
    from ds_zipccl.bench.train_results import verdict
    from ds_zipccl.bench.train_trial import Training

    training = Training(EXAMPLE, "tp", ranks=2, steps=3)
    off = {"losses": [value.hex() for value in (2.0, 1.25, 1.25)], "params_sha256": "lossy"}
    runs = {"plain": [results(sent=None)], "raw": [results(**off)], "coded": [results(**off)]}
    judged = verdict(training, runs, lossy=True)
    assert judged["problems"] == [] and judged["lossy"] == {"largest": 0.25, "last": 0.0}
    assert verdict(training, runs)["problems"], "without a lossy role the bits of the plain run are wanted"
    runs["coded"] = [results(**off | {"params_sha256": "other"})]
    assert verdict(training, runs, lossy=True)["problems"] == ["coded run: parameters differ from the first raw run's"]


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
