"""``make gpu`` without a GPU: slow is told from wrong, missing parts are named, and ranks that share a GPU get their service."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import gpu
import mps
import nccl_suites
import parts
import pytest
import wheels
from places import ROOT
from step_runner import FAILED, HUNG, MISSING, NO_TIME, NOT_RUN, PASSED, SLOW, Result, Runner, Step
from test_gpu_steps import COLLECT, GOOD, STEPS, alive, environment, python, run

from ds_zipccl.benchmarks.codec import floors

#: Outcomes of steps -> the status of the run, and words of its last line.
ENDS: list[tuple[list[Result], int, str]] = [
    ([], 0, "status 0: 3 steps passed"),
    ([Result("train", NOT_RUN, reason=f"{MISSING}deepspeed")], 0, "parts are missing: train (deepspeed)"),
    ([Result("bench", SLOW, reason="floor")], 3, "status 3, no wrong bit was seen: slow or late: bench (floor)"),
    ([Result("stress", NOT_RUN, reason=NO_TIME)], 3, "slow or late: stress (no time is left)"),
    (
        [Result("nccl_probe", SLOW, reason="late"), Result("nccl", NOT_RUN, reason="two")],
        3,
        "not run for that: nccl (two)",
    ),
    ([Result("tests", FAILED, reason="status 1")], 1, "status 1, wrong bits, a hang or an error: tests (status 1)"),
    (
        [Result("nccl", HUNG, reason="hung"), Result("bench", SLOW, reason="floor")],
        1,
        "nccl (hung); also slow or late: bench",
    ),
    ([Result("driver", NOT_RUN, reason="nobody knows")], 1, "an error: driver (nobody knows)"),
]


@pytest.mark.parametrize(("some", "status", "words"), ENDS, ids=[words for _, _, words in ENDS])
def test_the_status_tells_slow_from_wrong(some: list[Result], status: int, words: str) -> None:
    got, said = gpu.verdict([*(Result(name, PASSED) for name in ("machine", "build", "comm")), *some])
    assert got == status and words in said


TICKS = "import time\nfor _ in range(99): print('at work', flush=True); time.sleep(0.2)"


def test_a_limit_of_work_that_goes_on_is_a_budget(tmp_path: Path) -> None:
    """As is the status of a program that was slow. A program in silence hangs, one that writes figures does not."""
    writes = "import figures, time\nwhile True: figures.alive(); time.sleep(0.2)"
    steps = [
        Step("ticks", python(TICKS), 2),
        Step("writes", python(writes), 2),
        Step("silent", python("import time; time.sleep(60)"), 2),
        Step("slow", python("raise SystemExit(3)"), 2),
    ]
    results, _, _ = run(steps, tmp_path, total=8)
    assert {name: one.outcome for name, one in results.items()} == {
        "ticks": SLOW, "writes": SLOW, "slow": SLOW, "silent": HUNG,
    }  # fmt: skip
    assert results["ticks"].reason.startswith("late: still at work after 2 s")


def test_missing_parts_have_a_line_each(tmp_path: Path) -> None:
    """Before anything runs, and with what is lost; steps go by them."""
    absent = {name: part for part in parts.PARTS for name in [part.name]}
    assert all(part.loss for part in absent.values()) and len(absent) == len(parts.PARTS)
    program = """
import dataclasses, runpy, sys, parts
def none(): raise ImportError("nothing there\\nof two lines")
names = ("pytest-timeout", "nvcc", "deepspeed")
parts.PARTS = tuple(dataclasses.replace(part, find=none) if part.name in names else part for part in parts.PARTS)
parts.VITAL = tuple(dataclasses.replace(part, find=none) if part.name in sys.argv[1:] else part for part in parts.VITAL)
import machine
sys.exit(machine.main())
"""
    said = {}
    for vital in ("", "torch"):
        more = {figures.VARIABLE: str(tmp_path / f"figures{vital}"), figures.SCRATCH: str(tmp_path)}
        result = subprocess.run(
            [*python(program), vital],
            cwd=tmp_path,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 1, result.stderr  # there is no GPU here
        said[vital] = result.stdout.splitlines()
    for name in ("pytest-timeout", "nvcc", "deepspeed"):
        assert f"missing {name}: nothing there; {absent[name].loss}" in said[""]
    described = next(at for at, line in enumerate(said[""]) if line.startswith("device: "))
    assert all(at < described for at, line in enumerate(said[""]) if line.startswith("missing "))
    assert said["torch"] == ["missing torch: nothing there; nothing runs", "nothing can run without torch"]
    missing = figures.read(tmp_path / "figures")["missing"]
    assert list(json.loads((tmp_path / "missing.json").read_text())) == ["torch"], "the later steps know"
    without = {**GOOD, "machine": Result("machine", PASSED, figures={"missing": missing | {"hypothesis": ""}})}
    words = STEPS["tests"].words(without)
    assert not any(word.startswith("--timeout") for word in words) and "--timeout=40" in STEPS["tests"].words(GOOD)
    assert "tests/codec/test_codec.py" not in words and "tests/codec/test_hash.py" in words
    assert gpu.digest([without["machine"]])[0].startswith("missing ")


def test_tests_are_collected_without_hypothesis_and_pytest_timeout() -> None:
    """As on a machine that has neither, and no wheels."""
    blind = (
        """
import importlib.util, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "_hypothesis_pytestplugin", "pytest_timeout"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "hypothesis" else plain(name, package)
"""
        + COLLECT
    )
    without = {
        **GOOD,
        "machine": Result("machine", PASSED, figures={"missing": {"hypothesis": "", "pytest-timeout": ""}}),
    }
    _, _, _, *options = STEPS["tests"].command
    files = [word for word in STEPS["tests"].words(without) if word.startswith("tests/")][:3]
    words = [sys.executable, "-c", blind, *options, *files, "-p", "no:timeout", "-p", "no:hypothesispytest"]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment(**plugins))
    assert result.returncode == 0 and "::" in result.stdout, result.stdout + result.stderr


#: Stands for nvidia-cuda-mps-control: -d starts a daemon that outlives it; "quit" ends the daemon, unless it is stubborn. A program that is
#: being started has no variables for a moment: the daemon is awaited, and starts nothing afterwards.
MPS = """#!/bin/sh
test -d "$CUDA_MPS_PIPE_DIRECTORY" || exit 5
if [ "$1" = -d ]; then
    {start}
    setsid sh -c 'mkfifo "$0/end"; echo $$ > "$0/pid"; read word < "$0/end"' "$CUDA_MPS_PIPE_DIRECTORY" > /dev/null 2>&1 &
    until [ -s "$CUDA_MPS_PIPE_DIRECTORY/pid" ]; do :; done; exit 0
fi
read word; [ "$word" = quit ] && {quit}
"""
QUIT = 'kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")'


def stand_in(folder: Path, **parts_: str) -> None:
    tool = folder / mps.CONTROL
    tool.write_text(MPS.format(**{"start": ":", "quit": QUIT, **parts_}))
    tool.chmod(0o755)


@pytest.mark.parametrize("quit_", [QUIT, "true", "exit 7"])
def test_the_service_of_ranks_that_share_a_gpu_ends(
    quit_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it does not obey."""
    stand_in(tmp_path, quit=quit_)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = mps.start(tmp_path)
    assert set(found) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    assert all(Path(folder).parent == tmp_path for folder in found.values())
    (daemon,) = mps.users(tmp_path)
    mps.stop(tmp_path)
    assert not mps.users(tmp_path) and not alive(daemon)
    mps.stop(tmp_path)  # nothing is there any more
    stand_in(tmp_path, start="echo forbidden; exit 3")
    with pytest.raises(RuntimeError, match="status 3: forbidden"):
        mps.start(tmp_path)


@pytest.mark.parametrize("way", ["works", "refused", "absent"])
def test_ranks_share_a_gpu_by_the_service_first(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it where it is not there or refuses. The daemon of a refusal ends at once, the other one with the run."""
    import test_nccl

    if way != "absent":
        stand_in(tmp_path)
    for name, value in (
        ("PATH", f"{tmp_path}:/usr/bin:/bin"),
        (figures.SCRATCH, str(tmp_path)),
        (figures.VARIABLE, f"{tmp_path}/figures"),
    ):
        monkeypatch.setenv(name, value)
    calls = []

    def launch(program: str, ranks: int, seconds: float, settings: dict[str, str]) -> list[dict[str, Any]]:
        calls.append(mps.PIPE in settings)
        assert way != "refused" or not calls[-1], "no MPS here"
        return [{"done": {}, "figures": {"tiny_ms": 0.5}}] * 2

    monkeypatch.setattr(test_nccl, "launch", launch)
    try:
        test_nccl.test_probe_of_two_ranks_on_nccl()
        told = figures.read(tmp_path / "figures")
        assert told["works"] == ("with MPS" if way == "works" else "as planned") and told["tiny_ms"] == 0.5
        assert (mps.PIPE in figures.told("nccl")) == (way == "works") == bool(mps.users(tmp_path))
        assert calls == {"works": [True], "refused": [True, False], "absent": [False]}[way]
    finally:
        mps.stop(tmp_path)
    assert not mps.users(tmp_path)


def test_suites_are_as_large_as_a_tiny_collective_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = nccl_suites.SUITE_SIZES
    for ms, ranks, count in (
        (None, 4, len(sizes)),
        (0.3, 4, len(sizes)),
        (20.0, 2, len(sizes)),
        (20.0, 4, 3),
        (500.0, 4, 2),
    ):
        monkeypatch.setattr(figures, "told", lambda name, ms=ms: {"tiny_ms": ms}[name])
        assert nccl_suites.suite_sizes(ranks) == sizes[-count:]


def test_a_wheel_is_found_by_the_process_that_unpacked_it(tmp_path: Path) -> None:
    """As the step "machine" unpacks, and then looks for parts."""
    folder, about = tmp_path / "wheels", "zipccl_probe-1.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / "zipccl_probe-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("zipccl_probe.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: zipccl-probe\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    found = (
        "import importlib.util, wheels, pathlib, sys\nlook = lambda: bool(importlib.util.find_spec('zipccl_probe'))\n"
    )
    found += "print(look()); wheels.unpack(sys.argv[1], pathlib.Path(sys.argv[2])); print(look())"
    words = [*python(found), str(folder), str(tmp_path / wheels.SITE)]
    said = subprocess.run(words, env=gpu.environment(tmp_path), capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.split() == ["False", "True"]


def test_the_service_ends_with_a_run_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folders: list[Path] = []

    def run_(self: Runner, planned: Sequence[Step]) -> list[Result]:
        folders.append(Path(self._environment[figures.SCRATCH]))
        mps.start(folders[0])
        assert mps.users(folders[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", run_)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(tmp_path / "out")])
    assert not mps.users(folders[0])


SKIPPING = """
import pytest
def test_good(): pass
def test_absent(): pytest.skip("no such device")
@pytest.mark.skipif(True, reason="never")
def test_never(): pass
def test_wrong(): assert 1 == 2
def test_late(): import figures; raise figures.Late("at work")
@pytest.mark.parametrize("route", ["cuda-native", "cuda-cupy"])
def test_routes(route): pass
"""


@pytest.mark.full(reason="three runs of pytest")
def test_a_skipped_test_fails(tmp_path: Path) -> None:
    """And its reason is among the figures. Tests of a route that was not built are left out; none at all is a failure."""
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "usable.json").write_text('["native"]')

    def pytest_(*words: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "figures.json").unlink(missing_ok=True)
        options = "-m pytest -q -p no:cacheprovider -p no_skips --rootdir".split()
        command = [sys.executable, *options, str(tmp_path), *words]
        variables = {figures.VARIABLE: str(tmp_path / "figures.json"), figures.SCRATCH: str(tmp_path)}
        result = subprocess.run(
            command, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=60
        )
        return result.returncode, figures.read(tmp_path / "figures.json")

    status, seen = pytest_(".")
    assert status == 1 and (seen["passed"], seen["failed"], seen["selected"]) == (2, 4, 6)
    assert seen["left_out"] == {"cuda-cupy": 1}
    texts = "\n".join(seen["failures"])
    assert "no such device" in texts and "never" in texts and "1 == 2" in texts
    assert pytest_("-k", "good or native")[0] == 0
    assert pytest_("-k", "good or late")[0] == figures.SLOW == floors.SLOW and pytest_("-k", "wrong or late")[0] == 1
    assert pytest_("-k", "nothing_of_this_name")[0] == 5
