"""Lossy roles at the start of real jobs: the line about them, the switch of the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backend_programs import succeed
from places import ROOT

SECTION = {
    "enabled": True,
    "mode": "always",
    "lossy": True,
    "roles": {"tp": {"codec": "int", "bits": 6, "when": "forward"}},
}

STARTS = """
e = engine(SECTION)
config = deepspeed.comm.comm.cdb.job.config
print("CODECS", config.lossy_of("tp", "forward"), config.lossy_of("tp"), config.lossy_of("zero_grad"))
leave()
"""


def test_the_line_comes_last_and_from_rank_0(tmp_path: Path) -> None:
    first, second = succeed(tmp_path, STARTS.replace("SECTION", repr(SECTION)))
    lines = [line for line in first.splitlines() if line.startswith("[ds_zipccl")]
    assert " on, codes cpu tensors over gloo; " in lines[0]
    assert lines[1] == "[ds_zipccl] LOSSY by config: tp int bits 6 group 128 forward only; all other roles bit-exact"
    assert "LOSSY" not in second and "CODECS int bits 6 group 128 None None" in first and "CODECS int" in second


@pytest.mark.full(reason="the sections are tested without ranks in the short tier")
def test_the_switch_of_the_environment_is_never_lossy(tmp_path: Path) -> None:
    """DS_ZIPCCL=1 precedes the section of the config, and allows nothing."""
    for text in succeed(tmp_path, STARTS.replace("SECTION", repr(SECTION)), DS_ZIPCCL="1"):
        assert "LOSSY" not in text
        assert "CODECS None None None" in text


TRAINS = """
from ds_zipccl.telemetry import counters
section = {**json.load(open(EXAMPLE))["zipccl"], "mode": "always", "log_interval": 2}
e = engine({**section, "step_log": STEPS}, 1, csv_monitor={"enabled": True, "output_path": FOLDER, "job_name": "run"})
for _ in range(20):
    e.backward(e(torch.randn(1, 256).bfloat16()).float().mean())
    e.step()
print("LOSSY ROWS", json.dumps(counters.lossy()))
leave()
"""


@pytest.mark.full(reason="the parts have tests of their own in the short tier")
def test_a_hybrid_policy_trains_and_tells_its_error(tmp_path: Path) -> None:
    """The example of MZHybrid: the line at the start, the table, the step log and the monitor of a job with ZeRO-1."""
    values = {"EXAMPLE": ROOT / "examples" / "ds_config_mzhybrid.json", "STEPS": tmp_path / "steps", "FOLDER": tmp_path}
    program = TRAINS
    for name, value in values.items():
        program = program.replace(name, repr(str(value)))
    first, second = succeed(tmp_path, program)
    assert "LOSSY by config: zero_grad round mantissa 2; dp round mantissa 2; all other roles bit-exact\n" in first
    for text in (first, second):
        (row,) = json.loads(text.split("LOSSY ROWS ")[1].splitlines()[0])
        assert (row["role"], row["op"], row["codec"]) == ("zero_grad", "reduce_to_owners", "round mantissa 2")
        assert row["frames"] >= 20 and 0.02 < row["error"] < 0.08 and row["ratio"] > 2
    assert "zero_grad reduce_to_owners: round mantissa 2, relative L2 error 0.0" in first
    steps = [json.loads(line)["roles"] for line in (tmp_path / "steps").read_text().splitlines()]
    errors = [roles["zero_grad"]["error"] for roles in steps if "error" in roles["zero_grad"]]
    assert errors and all(0.02 < error < 0.08 for error in errors)
    assert not any("error" in roles.get("zero_param", {}) for roles in steps)
    assert (tmp_path / "run" / "Train_zipccl_zero_grad_error.csv").exists()
