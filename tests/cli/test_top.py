"""``top``: its figures, and step logs that are being written, cut, or begun anew."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import assert_refused

from ds_zipccl.__main__ import main
from ds_zipccl.cli.top import Run
from ds_zipccl.telemetry import comms_log, counters, table
from ds_zipccl.telemetry.step_log import StepLog


def line(step: int, wire: int, at: float | None = None, saved: float | None = None) -> str:
    """A line of 10 MB by role dp, sent as ``wire`` MB."""
    sent = {"logical_bytes": 10_000_000, "wire_bytes": wire * 1_000_000, "passed_bytes": 0, "ratio": 10 / wire}
    found = {"step": step, "lr": [0.1], "roles": {"dp": sent}, "kinds": {}, "differences": {}}
    found |= {"time": at, "seconds_saved": saved}
    return json.dumps({key: value for key, value in found.items() if value is not None}) + "\n"


def test_a_table_where_stdout_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line(step, 5 if step < 4 else 2, 100.0 + step / 2, 0.25 * step) for step in range(1, 6)))
    assert main(["top", str(path), "--last", "2"]) == 0
    title, head, row = capsys.readouterr().out.splitlines()
    assert title == f"{path}: step 5, 1.25 s saved, 0.5 s per step"
    assert head.split() == ["role", "ratio", "now", "gbps", "mb_step"]
    assert row.split() == ["dp", f"{50 / 19:.3f}", "5.000", "0.020", "2.00"]


def test_lines_as_a_training_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    counters.reset()
    log = StepLog(str(path))
    for step in (1, 2):
        counters.record("zero_grad", "reduce", 3_000_000, 1_000_000)
        if step == 2:
            counters.record_saved("steps", 0.5)
        log.write(step, [0.1])
    counters.reset()
    first, second = map(json.loads, path.read_text().splitlines())
    assert abs(second["time"] - time.time()) < 60 and "seconds_saved" not in first and second["seconds_saved"] == 0.5
    assert main(["top", str(path)]) == 0
    said = capsys.readouterr().out
    assert "step 2, " in said and "0.5 s saved" in said and "zero_grad          3.000" in said


def test_a_file_that_grows_is_cut_and_begins_anew(tmp_path: Path) -> None:
    path, run = tmp_path / "run.jsonl", Run(str(tmp_path / "run.jsonl"), 20)
    whole = line(2, 5)
    path.write_text(line(1, 5) + whole[:30])
    run.look()
    assert [step.step for step in run.steps] == [1] and "time saved: not measured" in next(run.lines())
    with path.open("a") as file:
        file.write(whole[30:])
    run.look()
    run.look()
    assert [step.step for step in run.steps] == [1, 2] and "not whole" not in next(run.lines())
    with path.open("a") as file:  # killed in the middle of a line, resumed from an earlier checkpoint
        file.write(whole[:30] + "\n" + line(2, 2))
    run.look()
    assert [step.step for step in run.steps] == [2] and "lines that are not whole: 1" in next(run.lines())
    assert [line.split() for line in run.lines()][2:] == ["dp 5.000 5.000 - 2.00".split()]
    path.write_text(line(7, 1))  # shorter: another file
    run.look()
    assert [step.step for step in run.steps] == [7] and list(run.lines())[2].split()[:2] == ["dp", "10.000"]
    assert "not whole" not in next(run.lines())


def test_ratios_of_copies_have_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of bases send no byte: the table, the comms logger's, top and steps."""
    path = str(tmp_path / "run.jsonl")
    counters.reset()
    counters.record("zero_param", "all_gather", 84_483_840, 0)
    StepLog(path).write(1, [])
    table.show("at the end")
    print(comms_log.render())
    assert main(["top", path]) == main(["steps", path]) == 0
    counters.reset()
    said = capsys.readouterr().out
    assert said.count(" >9999") == 2 + 1 + 2 + 6 and "84483840." not in said
    assert (counters.ratio_text(9999), counters.ratio_text(9999.01)) == ("9999.000", ">9999")


def test_files_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    assert_refused(["top", str(path)], f"cannot read {path}", capsys)
    path.write_text(line(1, 5)[:-1])
    assert main(["top", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: no whole line of a step yet\n"


def test_a_terminal_gets_a_view_that_follows(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "run.jsonl"
    path.write_text(line(1, 5))
    terminal, theirs = pty.openpty()
    words = [sys.executable, "-m", "ds_zipccl", "top", str(path)]
    # A shell starts what runs in its background without Ctrl-C, and these tests may be there.
    process = subprocess.Popen(
        words,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    said = b""
    try:
        while b"step 9" not in said:
            said += os.read(terminal, 1 << 16)
            if b"step 1," in said and not path.read_text().count('"step": 9'):
                with path.open("a") as file:
                    file.write(line(9, 2))
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # until its end is closed: a full terminal would block its last lines
            while os.read(terminal, 1 << 16):
                pass
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)
    assert b"mb_step" in said
