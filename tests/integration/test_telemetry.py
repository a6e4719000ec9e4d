"""Telemetry: sums, snapshots, increments and threads of the counters; the table, the monitor events and the step log."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_zipccl.telemetry import counters, monitor, table
from ds_zipccl.telemetry.step_log import StepLog


@pytest.fixture(autouse=True)
def empty(no_counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "memory", dict)  # other tests of the process have staging buffers


def test_rows() -> None:
    counters.record("zero_grad", "all_reduce", 3000, 2000)
    counters.record("zero_grad", "all_reduce", 1500, 1000)
    counters.record_pass("zero_grad", "all_reduce", 10, "smaller than min_bytes")
    counters.record_pass("dp", "broadcast", 8, "dtype int64")
    counters.record_pass("dp", "broadcast", 8, "dtype int64")
    rest = {"kind": "", "differences": {}, "whole": {}, "choices": {}, "host_waits": 0}
    found = counters.rows()
    counters.record_pass("dp", "broadcast", 8, "dtype int64")  # rows are a snapshot
    counters.record_choice("dp", "broadcast", "any size", "plain")
    assert found == [
        rest | {
            "role": "dp", "op": "broadcast", "calls": 0, "logical_bytes": 0, "wire_bytes": 0, "ratio": 1.0,
            "passed": 2, "passed_bytes": 16, "reasons": {"dtype int64": 2},
        },
        rest | {
            "role": "zero_grad", "op": "all_reduce", "calls": 2, "logical_bytes": 4500, "wire_bytes": 3000, "ratio": 1.5,
            "passed": 1, "passed_bytes": 10, "reasons": {"smaller than min_bytes": 1},
        },
    ]  # fmt: skip
    totals = {"logical_bytes": 4500, "wire_bytes": 3000, "ratio": 1.5, "staging_bytes": 0}
    assert counters.totals() == totals
    counters.reset()
    assert counters.rows() == [] and counters.totals() == dict.fromkeys(totals, 0) | {"ratio": 1.0}


def test_threads() -> None:
    def count() -> None:
        for _ in range(2000):
            counters.record("dp", "send", 3, 2)
            counters.record_pass("dp", "send", 1, "not enabled")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = counters.rows()
    assert (row["calls"], row["logical_bytes"], row["wire_bytes"]) == (8000, 24000, 16000)
    assert (row["passed"], row["passed_bytes"], row["reasons"]) == (8000, 8000, {"not enabled": 8000})


def test_table() -> None:
    counters.record("zero_param", "all_gather_into_tensor", 3_000_000, 2_000_000)
    counters.record_pass("dp", "all_reduce", 40_000, "smaller than min_bytes")
    counters.record_pass("dp", "all_reduce", 40_000, "dtype int64")
    assert table.render().splitlines() == [
        "role        op                      coded  logical MB  wire MB  ratio  passed    MB  why passed",
        "dp          all_reduce                  0        0.00     0.00  1.000       2  0.08  dtype int64 (1), smaller than min_bytes (1)",
        "zero_param  all_gather_into_tensor      1        3.00     2.00  1.500       0  0.00",
        "total                                   1        3.00     2.00  1.500",
    ]
    for _ in range(2):
        counters.record_whole("zero_grad", "all_reduce", "a reason")
    before = table.render().splitlines()
    assert before[-1] == "zero_grad all_reduce: 2 calls not owner-only: a reason"
    for op in ("all_gather_into_tensor", "agreement", "agreement"):
        counters.record_host_wait("zero_param", op)
    assert table.render().splitlines() == [
        *before,
        "zero_param agreement: the host waited 2 times for the device",
        "zero_param all_gather_into_tensor: the host waited 1 times for the device in 1 coded calls",
        LEGEND["agreement"],
    ]


def test_the_last_line_has_the_time_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Per optimizer step and in all, and nothing where no trial has timed anything."""

    def last() -> str:
        counters.record("dp", "all_reduce", 3000, 2000)
        table.show("after 2 steps")
        table.show("at the end")  # of the same counts
        lines = capsys.readouterr().out.splitlines()
        assert [one for one in lines if "traffic" in one] == ["[ds_zipccl] traffic of rank 0 after 2 steps"]
        return lines[-1].removeprefix("[ds_zipccl] time saved, plain less coded by the times of trials: ")

    for _ in range(4):
        counters.record_saved("")
    assert last() == "not measured" and "Train/zipccl/seconds_saved" not in {name for name, *_ in monitor.events(8)}
    for seconds in (0.03, 0.03, -0.02):
        counters.record_saved("steps", seconds, 0.01)
    assert last() == "0.01 s per step, 0.04 s in all, +- 0.03 s, in 3 steps"
    assert ("Train/zipccl/seconds_saved", pytest.approx(0.04), 8) in monitor.events(8)


LEGEND = {
    "agreement": "agreement: ranks agree on sizes or earlier values before gathers; plain communication sends no such message",
    "shards": "shards: this rank's parts of gathered tensors, where others may hold those of an earlier gather",
}
GATHER = "all_gather_into_tensor"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], lambda: counters.record_choice("dp", GATHER, "whole steps", "plain from step 4 on")),
        (["agreement"], lambda: counters.record("zero_param", "agreement", 0, 4_000_000)),
        (["shards"], lambda: counters.record_difference("zero_param", GATHER, "")),
    ],
)
def test_the_legend_has_the_words_of_the_table(words: list[str], count: Callable[[], None]) -> None:
    """A line for each word that needs one, at the end, and none for other words."""
    counters.record("zero_param", GATHER, 3_000_000, 2_000_000)
    count()
    lines = table.render().splitlines()
    assert [line for line in lines if line in LEGEND.values()] == [LEGEND[word] for word in words]
    assert lines[len(lines) - len(words) :] == [LEGEND[word] for word in words]


def test_agreements_have_no_ratio() -> None:
    """They are no messages of DeepSpeed that were made smaller. The total has them all the same."""
    counters.record("zero_param", "agreement", 0, 1_000_000)
    counters.record("zero_param", GATHER, 4_000_000, 1_000_000)
    cells = [line.split() for line in table.render().splitlines()[1:4]]
    assert [row[:6] for row in cells] == [
        ["zero_param", "agreement", "1", "0.00", "1.00", "-"],
        ["zero_param", GATHER, "1", "4.00", "1.00", "4.000"],
        ["total", "2", "4.00", "2.00", "2.000"],
    ]


#: What a reader gets where nothing came since it asked.
NOTHING: dict[str, Any] = {"roles": {}, "kinds": {}, "differences": {}, "errors": {}, "feedback": {}}


def one_step(wire_bytes: int, reason: str) -> None:
    counters.record("zero_param", "all_gather_into_tensor", 3000, wire_bytes)
    counters.record_difference("zero_param", "all_gather_into_tensor", reason)
    counters.record("zero_grad", "reduce", 400, 300)
    counters.record("zero_grad", "all_reduce", 100, 100)
    counters.record_pass("zero_grad", "all_reduce", 200, "smaller than min_bytes")


def test_since_last_is_what_came_since_that_reader_asked() -> None:
    assert counters.since_last("a") == NOTHING
    one_step(2000, "nothing was gathered there")
    grad = {"logical_bytes": 500, "wire_bytes": 400, "passed_bytes": 200, "ratio": 700 / 600}
    param = {"logical_bytes": 3000, "wire_bytes": 2000, "passed_bytes": 0, "ratio": 1.5}
    roles = {"zero_grad": grad, "zero_param": param}
    first = NOTHING | {"roles": roles, "differences": {"nothing was gathered there": 1}}
    assert counters.since_last("a") == first
    assert list(first["roles"]) == list(counters.since_last("b")["roles"])
    assert counters.since_last("a") == NOTHING
    one_step(500, "")
    one_step(1500, "")
    param = {"logical_bytes": 6000, "wire_bytes": 2000, "passed_bytes": 0, "ratio": 3.0}
    grad = {"logical_bytes": 1000, "wire_bytes": 800, "passed_bytes": 400, "ratio": 1400 / 1200}
    second = NOTHING | {"roles": {"zero_grad": grad, "zero_param": param}, "differences": {"": 2}}
    assert counters.since_last("a") == second == counters.since_last("b")
    assert counters.since_last("c")["roles"]["zero_param"]["logical_bytes"] == 9000, "a new reader gets all"
    counters.record("dp", "send", 2, 1)
    found = counters.since_last("a")["roles"]
    assert found == {"dp": {"logical_bytes": 2, "wire_bytes": 1, "passed_bytes": 0, "ratio": 2.0}}
    one_step(700, "")
    counters.reset()
    one_step(600, "")
    assert counters.since_last("a")["roles"]["zero_param"]["wire_bytes"] == 600, "what was reset does not count"


def test_exchanges_of_experts_are_counted_by_kind(tmp_path: Path) -> None:
    """Rows and lines by kind; the role has the bytes of all its kinds."""
    op = "all_to_all_single"
    log = StepLog(str(tmp_path / "steps.jsonl"))
    counters.record("ep", op, 300, 100, kind="dispatch")
    counters.record_pass("ep", op, 200, "plain is faster", kind="dispatch")
    counters.record_pass("ep", op, 8, "smaller than min_bytes")
    counters.record("ep", op, 300, 200, kind="combine.bwd")
    counters.record_choice("ep", op, "whole steps", "coded from step 42 on")
    counters.record_host_wait("ep", op, kind="combine.bwd")
    rows = {row["kind"]: row for row in counters.rows()}
    assert [(kind, row["calls"], row["passed"]) for kind, row in rows.items()] == [
        ("", 0, 1), ("combine.bwd", 1, 0), ("dispatch", 1, 1),
    ]  # fmt: skip
    lines = table.render().splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [["ep", op, word] for word in ("0", "combine.bwd", "dispatch")]
    assert f"ep {op}, whole steps: coded from step 42 on" in lines
    assert f"ep {op} combine.bwd: the host waited 1 times for the device in 1 coded calls" in lines
    log.write(1, [0.1])
    counters.record("ep", op, 90, 30, kind="dispatch")
    counters.record("tp", "all_reduce", 90, 30, kind="dispatch")
    log.write(2, [0.1])
    first, second = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert first["roles"]["ep"] == {"logical_bytes": 600, "wire_bytes": 300, "passed_bytes": 208, "ratio": 808 / 508}
    assert first["kinds"] == {
        "ep combine.bwd": {"logical_bytes": 300, "wire_bytes": 200, "passed_bytes": 0, "ratio": 1.5},
        "ep dispatch": {"logical_bytes": 300, "wire_bytes": 100, "passed_bytes": 200, "ratio": 500 / 300},
    }
    assert second["kinds"] == {"ep dispatch": second["roles"]["ep"]}
    assert second["kinds"]["ep dispatch"]["ratio"] == 3.0


def test_events_have_the_ratio_of_each_role_since_the_last_ones() -> None:
    for wire_bytes, ratio, total in ((2000, 1.5, 3500 / 2400), (1000, 3.0, 7000 / 3800)):
        one_step(wire_bytes, "")
        events = {name: value for name, value, samples in monitor.events(8) if samples == 8}
        assert events["Train/zipccl/zero_param/ratio"] == ratio
        assert events["Train/zipccl/zero_grad/ratio"] == 700 / 600
        assert events["Train/zipccl/ratio"] == total
    assert "Train/zipccl/zero_param/ratio" not in {name for name, *_ in monitor.events(9)}, "nothing was sent"


def test_lossy_frames_in_the_table() -> None:
    """One line for each role and operation, the kinds of its calls together; errors are of one rounding, over all samples."""
    assert counters.lossy() == []
    counters.record("tp", "all_reduce", 4700, 2000)
    counters.record("tp", "all_reduce", 2000, 850, kind="dispatch")
    counters.record_lossy("tp", "all_reduce", "taco_fp8 group 128", 4790)
    counters.record_lossy("tp", "all_reduce", "taco_fp8 group 128", 10)
    counters.record_error("tp", "all_reduce", "taco_fp8 group 128", 3.0, 4.0e3)
    counters.record_error("tp", "all_reduce", "taco_fp8 group 128", 4.0, 6.0e3)
    counters.record_exact("tp", "all_reduce", "not finite", 12)
    counters.record_exact("tp", "all_reduce", "another reason", 2)
    for pair in ((math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)):  # spoil no error
        counters.record_error("tp", "all_reduce", "taco_fp8 group 128", *pair)
    counters.record_error("dp", "all_reduce", "round mantissa 3", 0.0, 0.0)
    assert counters.lossy()[1] == {
        "role": "tp", "op": "all_reduce", "codec": "taco_fp8 group 128", "frames": 4800, "error": math.sqrt(7e-4),
        "kept": None, "alike": None, "exact": {"not finite": 12, "another reason": 2}, "ratio": 6700 / 2850,
    }  # fmt: skip
    lines = table.render().splitlines()
    assert (
        "tp all_reduce: taco_fp8 group 128, relative L2 error 0.0265 per rounding, ratio 2.35; 12 of 4800 frames exact (not finite), "
        "0 exact (smaller), 2 exact (another reason)"
    ) in lines
    unsampled = "round mantissa 3, no frame sampled, ratio 1.00; 0 of 0 frames exact (not finite), 0 exact (smaller)"
    assert f"dp all_reduce: {unsampled}" in lines
    counters.reset()
    assert counters.lossy() == [] and "exact" not in table.render()


def test_lossy_errors_since_a_reader_last_asked(tmp_path: Path) -> None:
    """The step log and the monitor have the error of each sampled role, each for its own time."""
    log = StepLog(str(tmp_path / "steps.jsonl"))
    for error in (0.25, 0.5):
        for op in ("all_reduce", "reduce_scatter_tensor"):
            counters.record("tp", op, 400, 100)
            counters.record_error("tp", op, "round mantissa 1", error**2 * 8, 8.0)
        counters.record("dp", "all_reduce", 400, 100)
        log.write(1, [0.1])
    counters.record("tp", "all_reduce", 400, 100)
    log.write(3, [0.1])
    lines = [json.loads(line)["roles"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["tp"].get("error") for line in lines] == [0.25, 0.5, None]
    assert all("error" not in line.get("dp", {}) for line in lines)
    events = {name: value for name, value, _ in monitor.events(8)}
    assert events["Train/zipccl/tp/error"] == pytest.approx(math.sqrt((0.25**2 + 0.5**2) / 2))
    assert "Train/zipccl/dp/error" not in events
    assert "Train/zipccl/tp/error" not in {name for name, *_ in monitor.events(9)}, "nothing was sampled"


def test_step_log_adds_a_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("of an earlier process")  # stopped in the middle of a line
    log = StepLog(str(path))
    written = []
    for step, (wire_bytes, reason) in enumerate([(2000, "nothing was gathered there"), (500, ""), (250, "")], 7):
        one_step(wire_bytes, reason)
        log.write(step, [0.1 * step, 0.0])
        earlier, *lines = path.read_text().splitlines()
        assert earlier == "of an earlier process" and len(lines) == step - 6, "there when the step is over"
        written.append(json.loads(lines[-1]))
    assert [line["step"] for line in written] == [7, 8, 9]
    assert [line["lr"] for line in written] == [[0.1 * step, 0.0] for step in (7, 8, 9)]
    assert [line["roles"]["zero_param"]["wire_bytes"] for line in written] == [2000, 500, 250]
    assert [line["roles"]["zero_param"]["ratio"] for line in written] == [1.5, 6, 12]
    shards = ("nothing was gathered there", "as differences", "as differences")
    assert [line["differences"] for line in written] == [{one: 1} for one in shards]


@pytest.mark.parametrize("path", ["/nonexistent/steps.jsonl", "/", "/dev/full", "a\0b"])
def test_a_step_log_that_cannot_be_written_stops_nothing(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if path == "/dev/full" and not Path(path).exists():
        pytest.skip("this system has no file that is always full")
    log = StepLog(path)
    for step in (1, 2, 3):
        log.write(step, [0.1])
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f'cannot write the "step_log" {path}: ' in said and "training goes on" in said
