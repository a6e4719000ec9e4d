"""``steps``: what it reads from step logs, what it makes of it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import outcome

from ds_zipccl.__main__ import main
from ds_zipccl.cli import steps
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.step_log import StepLog
from ds_zipccl.tools import ToolError

DP = {"logical_bytes": 6, "wire_bytes": 2, "passed_bytes": 2, "ratio": 2.0}
GOOD = {"step": 1, "lr": [0.5], "roles": {"dp": DP}, "differences": {"as differences": 3}}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Of twenty steps as a training writes them: the ratio of zero_param is the step's number; ep is in the last two only."""
    path = tmp_path / "run.jsonl"
    counters.reset()
    writer = StepLog(str(path))
    for step in range(1, 21):
        counters.record("zero_param", "all_gather", 600 * step, 600)
        counters.record_difference("zero_param", "all_gather", "" if step > 1 else "nothing was gathered there")
        if step > 18:
            counters.record("ep", "all_to_all_single", 300, 100, kind="dispatch")
            counters.record_pass("ep", "all_to_all_single", 100, "smaller than min_bytes")
        writer.write(step, [0.1 * step, 7.0])
    counters.reset()
    yield path


def test_rows(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = outcome(tmp_path, f"steps {log}")
    keys = "file role steps mean min max ratio first middle last".split()
    assert content["rows"] == [
        dict(zip(keys, (str(log), *cells), strict=True))
        for cells in (
            ("ep", 2, 2.0, 2.0, 2.0, 2.0, None, None, 2.0),
            ("ep dispatch", 2, 3.0, 3.0, 3.0, 3.0, None, None, 3.0),
            ("zero_param", 20, 10.5, 1.0, 20.0, 10.5, 1.5, 10.5, 19.5),
        )
    ]
    assert content["differences"] == {str(log): {"nothing was gathered there": 1, "as differences": 19}}
    head, ep, dispatch, zero_param, shards = capsys.readouterr().out.splitlines()
    assert head.split() == keys
    assert ep.split() == [str(log), *"ep 2 2.000 2.000 2.000 2.000 - - 2.000".split()]
    assert dispatch.split()[1:] == "ep dispatch 2 3.000 3.000 3.000 3.000 - - 3.000".split()
    assert zero_param.split()[1:] == "zero_param 20 10.500 1.000 20.000 10.500 1.500 10.500 19.500".split()
    assert shards == f"{log}, shards: as differences 19, nothing was gathered there 1"


def test_ratios_of_several_steps_weigh_bytes(tmp_path: Path) -> None:
    """Not the mean of ratios: 100 bytes at 1 and 900 at 9 are 1000 sent as 200."""
    path = tmp_path / "run.jsonl"
    sent = [{"logical_bytes": 100 * n, "wire_bytes": 100, "passed_bytes": 0, "ratio": float(n)} for n in (1, 9)]

    def write() -> None:
        path.write_text("".join(f"{changed(roles={'dp': counts})}\n" for counts in sent))

    write()
    (row,) = steps.rows("run", steps.read(str(path)))
    assert (row["mean"], row["ratio"], row["first"], row["middle"], row["last"]) == (5.0, 5.0, 1.0, None, 9.0)
    sent[1] |= {"wire_bytes": 300, "ratio": 3.0}
    write()
    (row,) = steps.rows("run", steps.read(str(path)))
    assert (row["mean"], row["ratio"]) == (2.0, 2.5)


def test_from_step_and_files(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(f"{changed(step=19)}\n{changed(step=3)}\n")
    assert main(["steps", str(log), str(other), "--from-step", "19"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:4] for line in (lines[1], *lines[3:5])]  # the second one is of a kind
    expected = [[log, "ep", "2", "2.000"], [log, "zero_param", "2", "19.500"], [other, "dp", "1", "2.000"]]
    assert rows == [[str(cell) for cell in row] for row in expected]
    with pytest.raises(ToolError, match="no step from step 21 on: the last of its 20 lines is step 20"):
        steps.read(str(log), 21)


@pytest.mark.filterwarnings("error::UserWarning")
def test_plot_of_a_log_without_traffic(tmp_path: Path) -> None:
    """As a job of one rank writes it."""
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "run.jsonl", tmp_path / "out.png"
    counters.reset()
    StepLog(str(path)).write(1, [])
    assert main(["steps", str(path), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_plot(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from ds_zipccl.tools import plots

    twice, without = tmp_path / "twice.jsonl", tmp_path / "without.jsonl"
    twice.write_text(2 * log.read_text())
    without.write_text(changed(lr=None))
    figures: list[Any] = []
    monkeypatch.setattr(plots.pyplot, "close", figures.append)
    out = tmp_path / "out.png"
    assert main(["steps", *map(str, (log, twice, without)), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    first, second, third, *rates = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in first.lines}
    assert set(drawn) == {"ep", "ep dispatch", "zero_param"}
    assert drawn["zero_param"] == [[step, step] for step in range(1, 21)]
    assert drawn["ep dispatch"][-2:] == [[19, 3], [20, 3]]
    assert drawn["ep"][-2:] == [[19, 2], [20, 2]] and all(up != up for _, up in drawn["ep"][:-2])
    assert len(second.lines[0].get_xydata()) == 41, "the line breaks where the second run begins"
    assert [line.get_xydata().tolist() for line in third.lines] == [[[1, 2]]]
    assert len(rates) == 2, "no axis for a learning rate that no line has"
    assert [up for _, up in rates[0].lines[0].get_xydata().tolist()] == [0.1 * step for step in range(1, 21)]
    assert first.get_yscale() == "log"
    with pytest.raises(ToolError, match="cannot write /nowhere"):
        plots.ratios("/nowhere/out.png", {"run": steps.read(str(log))})


def changed(**parts: Any) -> str:
    """A line with other values of its keys; None removes a key."""
    return json.dumps({key: value for key, value in (GOOD | parts).items() if value is not None})


def role(**parts: Any) -> str:
    return changed(roles={"dp": {key: value for key, value in (DP | parts).items() if value is not None}})


#: (line, complaint)
MALFORMED = {
    "torn": (changed()[:40], "wanted a JSON object; remove the line"),
    "empty": ("", "wanted a JSON object"),
    "not utf-8": (b"\xff\xfe{", "wanted a JSON object"),
    "a list": ("[1]", "wanted a JSON object"),
    "deep": ("[" * 100_000, "recursion"),
    "no step": (changed(step=None), '"step" is None, wanted an integer'),
    "step is true": (changed(step=True), '"step" is True'),
    "step below 0": (changed(step=-1), '"step" is -1'),
    "step is a fraction": (changed(step=1.5), '"step" is 1.5'),
    "step is huge": (changed(step=10**400), '"step" is 1000'),
    "lr is a number": (changed(lr=0.1), '"lr" is 0.1, wanted a list of finite numbers'),
    "lr is no number": (changed(lr=[float("nan")]), '"lr" is [nan]'),
    "lr is huge": (changed(lr=[10**400]), '"lr" is [1000'),
    "no roles": (changed(roles=None), '"roles" is None, wanted an object'),
    "unknown role": (changed(roles={"zero": {}}), "got the role 'zero', wanted one of zero_param, zero_grad"),
    "role is a number": (changed(roles={"dp": 3}), '"dp" is 3, wanted an object with logical_bytes, wire_bytes, passed_bytes'),
    "bytes below 0": (role(wire_bytes=-2), '"wire_bytes" is -2, wanted an integer >= 0'),
    "bytes are text": (role(logical_bytes="6"), "\"logical_bytes\" is '6'"),
    "bytes are missing": (role(passed_bytes=None), '"passed_bytes" is None'),
    "wrong ratio": (role(ratio=2.5), '"ratio" of dp is 2.5, its bytes give 2.0'),
    "kinds are a list": (changed(kinds=[]), '"kinds" is [], wanted an object'),
    "wrong ratio of a kind": (changed(kinds={"ep dispatch": DP | {"ratio": 3.0}}), '"ratio" of ep dispatch is 3.0, its bytes give 2.0'),
    "differences are a list": (changed(differences=[]), '"differences" is [], wanted an object'),
    "a difference is text": (changed(differences={"as differences": "3"}), "\"as differences\" is '3'"),
    "a terminal's codes": (changed(differences={"\x1b[2J": 1}), "wanted an object with printable keys"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines_are_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, complaint = MALFORMED[case]
    path = tmp_path / "run.jsonl"
    good = f"{changed()}\n".encode()
    path.write_bytes(2 * good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    assert main(["steps", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}, line 3: " in said and complaint in said
    assert said.isascii() and len(said) < 400 + len(str(path)) and said.count("\n") == 1
