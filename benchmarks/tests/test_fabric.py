"""The modelled fabric: its streams, and its numbers compared with those of ``plan``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import outcome
from pytest import MonkeyPatch

from ds_zipccl.benchmarks.fabric import bench
from ds_zipccl.benchmarks.fabric.clock import Clock

#: A training whose gathers are cut by the speeds of a network that nobody has measured.
UNMEASURED = """
import sys
from ds_zipccl.benchmarks.fabric import job
from ds_zipccl.comm.device import context
from ds_zipccl.policy.cost_model import UNMEASURED
context.device_profile = lambda device: UNMEASURED
context.group_profile = lambda group, profile: profile
job.main(sys.argv[1])
"""


def test_streams_follow_events_and_the_host() -> None:
    clock = Clock()
    one, other = clock.new(), clock.new()
    with clock.on(one):
        clock.busy(2.0)
    first = one.record_event()
    other.wait_event(first)
    with clock.on(other):
        clock.busy(1.0)
    assert not first.query() and (first.second, other.free) == (2.0, 3.0)
    assert clock.finish() == 0.0, "nothing is on the program's stream"
    assert clock.wait(other.record_event()) and clock.host == 3.0 and first.query()
    clock.pass_on(4.0)
    clock.busy(0.5)
    assert clock.finish() == 7.5, "work begins when the host has come to it"
    assert first.elapsed_time(clock.current.record_event()) == 5500.0


@pytest.mark.full(reason="half a minute each")
@pytest.mark.parametrize(
    ("words", "fabric"),
    [
        ("zero3 --layers 3 --steps 3 --skip 2", "2x8@100gbit"),
        ("zero3 --layers 3 --steps 3 --skip 2", "4x8@25gbit"),
        ("zero2 --layers 3 --steps 3 --skip 2", "2x8@25gbit"),
        ("lora --steps 6 --skip 5", "4x8@100gbit"),
    ],
)
def test_steps_take_the_seconds_of_plan(tmp_path: Path, words: str, fabric: str) -> None:
    words = f"bench train --fabric {fabric} --workload {words}"
    plain, coded = outcome(tmp_path, words)["rows"]
    assert 0.97 < plain["of_plan"] < 1.03 and 0.9 < coded["of_plan"] < 1.1
    assert coded["speedup"] > 1.7 and coded["between_gb"] < 0.6 * plain["between_gb"]
    assert plain["gather_us"] > 0 and coded["gather_us"] > plain["gather_us"]


@pytest.mark.full(reason="half a minute")
def test_a_wrong_cut_is_noticed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    script = tmp_path / "planted.py"
    script.write_text(UNMEASURED)
    monkeypatch.setattr(bench, "COMMAND", (sys.executable, str(script)))
    words = "bench train --fabric 4x8@25gbit --workload zero3 --layers 1 --steps 3 --skip 2"
    plain, coded = outcome(tmp_path, words)["rows"]
    assert plain["of_plan"] < 1.05 < 1.1 < coded["of_plan"]


@pytest.mark.full(reason="half a minute")
def test_computing_hides_communication(tmp_path: Path) -> None:
    words = "bench train --fabric 2x8@100gbit --workload zero2 --layers 1 --variants plain --steps 2 --skip 1"
    alone = outcome(tmp_path, words)["rows"][0]
    both = outcome(tmp_path, words, "--tflops", "400", "--tokens", "8e3")["rows"][0]
    computing = 6 * 202_375_168 * 8e3 / 400e9
    assert both["of_plan"] is None and both["wire_ms"] == pytest.approx(alone["wire_ms"])
    assert computing + 0.1 * alone["step_ms"] < both["step_ms"] <= 1.001 * (computing + alone["step_ms"])
