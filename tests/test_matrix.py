"""The tool that runs the core set with many versions: its rows, its verdicts and the table of the documentation."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

sys.path += [str(ROOT / "release"), str(ROOT / "docs")]  # behind tests/gpu, which has a wheels.py too
matrix, pages = (importlib.import_module(name) for name in ("matrix", "release_tables"))
matrix.sources = functools.cache(matrix.sources)  # two seconds each
ROW = matrix.Row("3.11", "2.13.0", "0.18.0")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "deepspeed": "0.18.0", "numpy": "2.4.6"}
#: What a healthy environment tells.
PROBED = json.dumps({"versions": VERSIONS, "hooks": {"deepspeed.moe.ep_tp_dispatch": "absent"}})


def report(*broken: str) -> str:
    """A JUnit report with a test of each file of the core set; those of ``broken`` files have failed."""
    files = dict.fromkeys(test.partition("::")[0] for some in matrix.GROUPS.values() for test in some)
    error = "<failure message='AssertionError: rank0'>E  [rank0]:  File x\nE  [rank0]: AttributeError: no y</failure>"
    cases = (
        f'<testcase classname="{file.removesuffix(".py").replace("/", ".")}" name="test_x" time="1.5">'
        f"{error if file in broken else ''}</testcase>"
        for file in files
    )
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


NO_MOE = report("tests/integration/test_moe.py")
PLAIN_MOE = NO_MOE.replace("[rank0]:  File x", f"{matrix.PLAIN}: rank0: status 1")


class Installer:
    """Answers in place of uv, the probe and pytest; pytest leaves ``text`` as its report."""

    def __init__(self, text: str, fails: str = "") -> None:
        self.text, self.fails, self.commands = text, fails, []  # type: ignore[var-annotated]

    def __call__(self, command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Any:
        self.commands.append(" ".join(command))
        if self.fails and self.fails in self.commands[-1]:
            return matrix.Done(1, "", "a word\n  \u2570\u2500\u25b6 no such release\n")
        place = next((word.partition("=")[2] for word in command if word.startswith("--junitxml=")), "")
        if place and self.text:
            Path(place).write_text(self.text)
        return matrix.Done(0, f"noise\n{PROBED}\n", "")


def measured(folder: Path, text: str, fails: str = "") -> dict[str, Any]:
    """The row of the results that the answers give; the environment must be gone."""
    (folder / "venv").mkdir()
    found = matrix.measure(ROW, folder, "3.11", Installer(text, fails))
    assert not (folder / "venv").exists()
    return dict(found)


def test_the_table_has_each_version() -> None:
    rows = matrix.table()
    assert len(set(rows)) == len(rows) == len({row.name for row in rows})
    newest = matrix.DEEPSPEED[-1]
    for torch in matrix.TORCH:
        assert any(row.torch == torch and row.deepspeed == newest for row in rows), torch
    for deepspeed in matrix.DEEPSPEED:
        assert any(row.torch == matrix.USUAL_TORCH and row.deepspeed == deepspeed for row in rows), deepspeed
    assert {row.python for row in rows} == set(matrix.PYTHON) and {row.numpy for row in rows} == set(matrix.NUMPY)
    corners = {(row.torch, row.deepspeed) for row in rows}
    assert {(matrix.TORCH[0], matrix.DEEPSPEED[0]), (matrix.TORCH[-1], newest)} <= corners


def test_the_core_set_is_there() -> None:
    """A file belongs to one group, because the report of pytest has files and names alone."""
    places: dict[str, str] = {}
    for group, tests in matrix.GROUPS.items():
        for test in tests:
            file, _, function = test.partition("::")
            assert places.setdefault(file, group) == group
            assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text() or not function


def test_a_green_row(tmp_path: Path) -> None:
    found = measured(tmp_path, report())
    assert found["outcome"] == "green" and not found.get("reason")
    assert found["versions"] == VERSIONS and found["hooks"] == {"deepspeed.moe.ep_tp_dispatch": "absent"}
    assert {name: one["passed"] for name, one in found["groups"].items()} == {"bits": 2} | dict.fromkeys(
        list(matrix.GROUPS)[1:], 1
    )


@pytest.mark.parametrize(
    ("text", "fails", "outcome", "reason"),
    [
        (NO_MOE, "", "red", "MoE: test_x: [rank0]: AttributeError: no y"),
        (PLAIN_MOE, "", "red", "MoE: test_x: without ds_zipccl: [rank0]: AttributeError: no y"),
        (report().replace("</testcase>", "<skipped/></testcase>"), "", "red", "the core set: "),
        ("", "", "red", "the core set: "),
        (report(), "hooks_found", "red", "ds_zipccl: no such release"),
        (report(), "venv", "not installed", "no such release"),
        (report(), "deepspeed==0.18.0", "not installed", "no such release"),
    ],
    ids=["a failure", "a plain run", "all skipped", "no report", "no import", "no interpreter", "no DeepSpeed"],
)
def test_other_rows(tmp_path: Path, text: str, fails: str, outcome: str, reason: str) -> None:
    found = measured(tmp_path, text, fails)
    assert found["outcome"] == outcome and found["reason"].startswith(reason), found


def test_the_words_for_a_plain_run_are_those_of_its_launch() -> None:
    import programs

    assert matrix.PLAIN == programs.PLAIN


@pytest.mark.parametrize("problem", ["", "absent", "TypeError: no such slot"])
def test_a_hook_that_fails_is_red(problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The traffic of a job would stay plain there, with a warning; a module that a DeepSpeed lacks is no mistake."""
    from ds_zipccl.cli import doctor_ranks

    name = "deepspeed.runtime.engine"
    monkeypatch.setattr(doctor_ranks, "hooks_found", lambda: {name: problem})
    printed: list[str] = []
    exec(matrix.PROBE, {"print": printed.append})
    told = json.loads(printed[0])
    assert told["reason"] == (f"{name} is {problem}" if "Error" in problem else "")
    assert told["hooks"] == ({name: problem} if problem else {}) and told["versions"]["torch"]
    monkeypatch.setattr(sys.modules[__name__], "PROBED", printed[0])
    assert measured(tmp_path, report())["outcome"] == ("red" if told["reason"] else "green")


def test_torch_is_pinned_in_each_installation(tmp_path: Path) -> None:
    """Else DeepSpeed or transformers would bring another."""
    answers = Installer(report())
    matrix.measure(ROW, tmp_path, "/usr/bin/python3.11", answers)
    venv, *installs = (command for command in answers.commands if " uv " in command)
    assert "-p /usr/bin/python3.11 " in venv and len(installs) == 2
    assert all("torch==2.13.0" in command for command in installs)


def test_rows_of_these_sources_are_kept() -> None:
    new = {"name": ROW.name, "sources": matrix.sources()}
    old = new | {"sources": "of yesterday"}
    assert matrix.wanted([ROW], [new], (), again=False) == []
    assert matrix.wanted([ROW], [old], (), again=False) == matrix.wanted([ROW], [new], (), again=True) == [ROW]
    assert matrix.wanted([ROW], [], ["0.19"], again=False) == []
    assert matrix.wanted([ROW], [], ["0.19", "0.18.0"], again=False) == [ROW]
    assert matrix.merged([old], new) == [new]


def test_the_span_of_versions() -> None:
    rows = [{"versions": VERSIONS | {"torch": one}} for one in ("2.9.1", "2.13.0+cpu", "2.10.0")]
    assert matrix.spans([*rows, {}])["torch"] == "2.9.1 to 2.13.0" and matrix.spans(rows)["numpy"] == "2.4.6"


def test_the_table_of_the_documentation(tmp_path: Path) -> None:
    rows = []
    for number, (text, fails) in enumerate(((report(), ""), (NO_MOE, ""), ("", "venv"), ("", ""))):
        (tmp_path / str(number)).mkdir()
        rows.append(measured(tmp_path / str(number), text, fails))
    shown = pages.matrix(rows)
    lines = [line.split(" | ") for line in shown.splitlines() if line.startswith("| 3.11")]
    assert [line[4] for line in lines] == ["green", "**red**", "**not installed**", "**red**"]
    assert lines[0][:4] == ["| 3.11.7", "2.13.0", "0.18.0", "2.4.6"] and lines[0][5] == "2 passed"
    assert lines[1][8] == "**1 of 1 failed**" and lines[2][5] == "-" and lines[3][5] == "**not run**"
    assert "red: `MoE: test_x: [rank0]: AttributeError: no y`" in shown and "not installed: `no such release`" in shown
    assert "DeepSpeed 0.18.0: `deepspeed.moe.ep_tp_dispatch` is absent" in shown
