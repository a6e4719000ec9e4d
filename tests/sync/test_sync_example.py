"""The example and the benchmark of weight sync run as their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import outcome
from places import ROOT


@pytest.mark.full(reason="two processes with a training")
@pytest.mark.parametrize("way", ["socket", "folder"])
def test_the_example_ends_with_equal_weights(way: str, tmp_path: Path) -> None:
    options = ["--steps", "3"] + (["--folder", str(tmp_path / "weights")] if way == "folder" else ["--lose", "1"])
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sync_weights.py"), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    weights = re.findall(r"^(?:engine|trainer): weights (\w{64})$", result.stdout, re.MULTILINE)
    assert len(weights) == 2 and weights[0] == weights[1]
    ratios = [float(ratio) for ratio in re.findall(r"ratio ([\d.]+)$", result.stdout, re.MULTILINE)]
    assert ratios[0] < 2 and min(ratios[1:]) > 8
    assert result.stdout.count("engine: BASE: the message changes version 2 to 3") == (way == "socket")
    assert result.stdout.count(" bytes, full") == (way == "socket")


def test_the_benchmark_holds_the_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 2 to 5 percent at least 4 times fewer bytes than pairs, and 1.4 times fewer than XOR and zstd."""
    found = outcome(tmp_path, "bench sync --changed 0 2 5 --mib 4 --repeats 1")
    rows = {(row["changed"], row["way"]): row for row in found["rows"]}
    assert {row["wrong"] for row in rows.values()} == {0}
    for changed in (2, 5):
        assert rows[changed, "pairs"]["times"] >= 4
        if (changed, "xor_zstd1") in rows:
            assert rows[changed, "xor_zstd1"]["times"] >= 1.4
    assert rows[0, "sync"]["ratio"] > 2000 and rows[2, "sync"]["ratio"] > 80
    assert "pack_memcpy" in capsys.readouterr().out
