"""``make gpu`` without a GPU: builds, driver and ranks on emulated kernels; outcomes, missing parts, planted faults, a stand-in for MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import build_all
import builds
import driver
import emulation
import figures
import golden_cases
import gpu
import mps
import parts
import pytest
import wheels
import where
import windows
from places import ROOT
from step_runner import FAILED, HUNG, MISSING, NO_TIME, NOT_RUN, PASSED, SLOW, Result, Step
from test_gpu_steps import COLLECT, GOOD, STEPS, alive, python, ran, run

from ds_zipccl.benchmarks.codec import floors
from ds_zipccl.kernels import build

sys.path.insert(0, str(ROOT / "docs"))

# ---- the programs, on the CPU ---------------------------------------------------------------------------------------


def test_the_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that fails has its reason; routes that work are known before the last build ends."""
    monkeypatch.setenv(figures.VARIABLE, str(tmp_path / "figures.json"))
    monkeypatch.setenv(figures.SCRATCH, str(tmp_path))
    commands = {
        "cuda native": list(python("print('good')")),
        "cuda cupy": list(python("import time; time.sleep(1); raise ImportError('no compiler')")),
        "driver": list(python("pass")),
    }
    done = build_all.build(commands)
    assert build_all.usable(done) == ["native"] == figures.told("usable")
    assert figures.read(tmp_path / "figures.json")["usable"] == ["native"]
    assert done["cuda cupy"]["status"] == 1 and "no compiler" in done["cuda cupy"]["output"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(where, "PATIENCE", 8)  # the emulation is slow
    return [str(driver.for_emulation()), "--library"]


#: A fault of the kernels -> the words of the driver.
PLANTED: dict[str, tuple[str, builds.Change]] = {
    "a byte past the table": ("cuda/encode.cuh", ("entry >> 8);", "entry >> 8 ^ 1);")),
    "chunks in any order": ("cuda/encode.cuh", ("atomicAdd(jobs.ticket, 1u)", "blockIdx.x")),
    "sums in another order": ("cuda/sum.cuh", ("sum[row][i] = start ? value", "sum[row][i] = start ? -value")),
    "the own rank is decoded, another one is not": ("cuda/decode.cuh", ("blockIdx.y >= jobs.skip ? 1 : 0", "0")),
    "every rank has the words of the first": (
        "cuda/decode.cuh",
        ("job.payload + rank * jobs.rank_bytes", "job.payload"),
    ),
    "own words are not taken": ("cuda/sum.cuh", ("const bool own = k == job.own_at;", "const bool own = false;")),
    "words of a refused frame stay": ("cuda/frame.cuh", ("words[at] = Word(~Word(0));", "(void)words;")),
    "parts do not add up": ("cuda/encode.cuh", ("uint64_t(bodies) << 32 |", "uint64_t(bodies + 16) << 32 |")),
    "no capacity is known": ("cuda/encode.cuh", ("if (end > job.capacity || !blocks) return;", "if (!blocks) return;")),
}


@pytest.mark.by_turns
@pytest.mark.full(reason="each has an emulation to compile")
@pytest.mark.parametrize("fault", [*PLANTED, ""])
def test_the_driver_notices_a_planted_fault(fault: str, emulated: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """And passes without one."""
    file, *changes = PLANTED.get(fault, ("cuda/encode.cuh",))
    library = emulation.binary({file: tuple(changes)}, emulation.BF16 | emulation.HASH).path()
    status, said = driver.run([*emulated, str(library)], "bf16"), capfd.readouterr().out
    assert (status != 0) == bool(fault) and ("WRONG" in said or "emulation: block" in said) == bool(fault), said


@pytest.mark.full(reason="nvcc needs half a minute")
def test_the_programs_compile_for_a_gpu() -> None:
    """The driver with a few kernels: codec/test_cuda_build.py compiles all."""
    try:
        build.nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    few = (f"-DZIPCCL_PARTS={emulation.HASH}", *driver._TRAVELLING)
    assert driver.compiled("driver", driver.CARRIED, few).stat().st_mode & 0o100
    assert b"spin_start" in driver.compiled("spin", ["9.0"]).read_bytes()


def test_a_driver_travels_to_a_machine_without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of other sources does not run there."""
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(wheels.WHEELS, str(tmp_path))
    made = tmp_path / "made"
    made.write_text("#!/bin/sh\n")
    with monkeypatch.context() as patch:
        patch.setattr(driver, "compiled", lambda *words: made)
        driver.carry(tmp_path)

    def no_nvcc() -> tuple[str]:
        raise build.BuildError("no nvcc")

    monkeypatch.setattr(build, "nvcc", no_nvcc)
    for path in tmp_path.glob("zipccl_*"):
        path.chmod(0o644)  # as a copy may have it
    for name in driver.PROGRAMS:
        there = driver.there(name)
        assert there.read_bytes() == made.read_bytes() and os.access(there, os.X_OK)
    (part,) = [part for part in parts.PARTS if part.name == "driver"]
    assert not part.why()
    for path in tmp_path.glob("zipccl_*"):
        path.rename(path.with_name(f"{path.name[:-1]}x"))
    with pytest.raises(build.BuildError, match="of other sources"):
        driver.there("driver")
    assert "of other sources" in part.why()


#: Stands for compute-sanitizer: BLIND does not notice a planted mistake, STRICT finds something in the kernels.
SANITIZER = """#!/bin/sh
for word in "$@"; do
    [ "$word" = --plant ] && {{ echo planted; exit {planted}; }}
done
while [ "${{1#-}}" != "$1" ]; do shift 2; done
"$@" > /dev/null || exit $?
{then}
exit {clean}
"""
#: A sanitizer for which the kernels take long, and which has seen nothing yet, or something.
LATE = "echo '========= COMPUTE-SANITIZER'; echo 'case 7 trials equal'; {}; sleep 60"


@pytest.mark.full(reason="six seconds")
def test_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(figures.VARIABLE, str(tmp_path / "figures.json"))
    monkeypatch.setattr(golden_cases, "main", lambda path, *options: Path(path).touch())
    monkeypatch.setattr(driver, "MOST_TOOL_SECONDS", 3.0)
    tool = tmp_path / "sanitizer"
    program = ["sh", "-c", 'test "$1" = --bare && shift; test -f "$1"', "driver"]
    seen_one = LATE.format("echo '========= Invalid write'")
    for planted, clean, then, status, outcome in (
        (9, 0, "", 0, "clean"),
        (0, 0, "", 1, "blind here"),
        (9, 9, "", 1, "found something"),
        (9, 0, LATE.format("true"), figures.SLOW, "clean so far, 7 trials"),
        (9, 0, seen_one, 1, "found something"),
    ):
        tool.write_text(SANITIZER.format(planted=planted, clean=clean, then=then))
        tool.chmod(0o755)
        assert driver.sanitize(program, str(tool)) == status
        seen = figures.read(tmp_path / "figures.json")
        assert all(seen[name]["outcome"].startswith(outcome) for name in driver.TOOLS)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises((FileNotFoundError, build.BuildError)):
        driver.sanitizer_path()


# ---- the benchmark --------------------------------------------------------------------------------------------------


def row(codec: str, mib: int, **more: float) -> dict[str, Any]:
    figures_ = {"encode_gbps": 3000.0, "decode_gbps": 3000.0, "decode_moved": 0.5, "sum_moved": 0.25, "pair_us": 20.0}
    place = {"codec": codec, "dtype": "bfloat16", "mib": mib, "offset": 0, "block": 1024}
    return {**place, "ratio": 1.5, **figures_, **more}


FAST = {floors.GATHER: 149.0}


def test_floors() -> None:
    rows = [row(codec, mib) for codec in ("wide", "cascade") for mib in (1, 16, 256)]
    rows += [row(codec, 256, offset=2, encode_gbps=1600, decode_gbps=1600) for codec in ("wide", "cascade")]
    compared = floors.compare(rows, "NVIDIA H200", FAST)
    assert not floors.missed(compared)
    assert [one["floor"] for one in compared if one["met"] is None] == [
        "cascade / nvCOMP ANS, encode", "cascade / nvCOMP ANS, decode",
    ]  # fmt: skip
    with_peer = [*rows, row("nvcomp-ans", 256, encode_gbps=1500.0, decode_gbps=900.0)]
    (line,) = floors.missed(floors.compare(with_peer, "NVIDIA H200", FAST))
    some = [one for one in rows if one["mib"] != floors.SMALL]
    compared = floors.compare(some, "NVIDIA H100 80GB HBM3", FAST)
    assert not floors.missed(compared) and not any("1 MiB" in one["floor"] for one in compared), (
        "sizes that were not asked for"
    )
    assert line == "cascade / nvCOMP ANS, encode: 2, wanted at least 3"
    assert floors.missed(floors.compare(rows[:-1], "NVIDIA H200", FAST)) == [
        f"cascade {way}, misaligned words / aligned words: not measured, wanted at least 0.5"
        for way in ("encode", "decode")
    ]
    modest = [one | {"encode_gbps": 1100.0, "decode_gbps": 1100.0} for one in rows]
    assert not floors.missed(floors.compare(modest, "NVIDIA H200", FAST)), "as the counts of instructions allow"
    slow = [one | {"encode_gbps": 300.0, "pair_us": 40.0, "sum_moved": 0.2} for one in rows]
    late = {floors.GATHER: 151.0}
    assert len(floors.missed(floors.compare(slow, "NVIDIA H200", late))) == 2 * 2 + 3
    assert len(floors.missed(floors.compare(slow, "NVIDIA A100", late))) == 1, (
        "rates are for an H200, the sum for every GPU"
    )


def test_windows_bear_a_drift_and_give_no_speedup_that_the_rig_decides() -> None:
    planned = windows.turns(window=8, pairs=6)
    sent = [(0, 0, 480e6) if turn == windows.PLAIN else (480e6, 5e6, 0) for turn in planned]
    times = [(500.0 if turn == windows.PLAIN else 250.0) + at for at, turn in enumerate(planned)]
    run = {
        "step_ms": times,
        "comm_ms": [9.0] * len(planned),
        "sent": {"host_waits": 2.0 * planned.count(windows.CODED)},
    }
    run |= {"steps": [SimpleNamespace(sent={"zero_param": one}) for one in sent]}
    found = windows.compared(run, 8, 6, tiny_ms=1.2)
    assert found["least_saved_ms"] == found["most_saved_ms"] == 250.0 and 1.7 < found["speedup"] < 2, found
    plain = run["steps"][windows.WARM_UP : windows.WARM_UP + 1] * len(planned)
    for change, tiny_ms in (({}, 9.0), ({"comm_ms": [30.0] * len(planned)}, 1.2), ({"steps": plain}, 1.2)):
        refused = windows.compared(run | change, 8, 6, tiny_ms)
        assert len(refused["no_speedup"]) == 1 and "speedup" not in refused, refused


#: Outcomes of steps -> the status of the run, and words of its last line.
ENDS: list[tuple[list[Result], int, str]] = [
    ([], 0, "status 0: 3 steps passed"),
    ([Result("train", NOT_RUN, reason=f"{MISSING}deepspeed")], 0, "parts are missing: train (deepspeed)"),
    ([Result("bench", SLOW, reason="floor")], 3, "status 3, no wrong bit was seen: slow or late: bench (floor)"),
    ([Result("stress", NOT_RUN, reason=NO_TIME)], 3, "slow or late: stress (no time is left)"),
    ([Result("nccl_probe", SLOW), Result("nccl", NOT_RUN, reason="two")], 3, "not run for that: nccl (two)"),
    ([Result("tests", FAILED, reason="status 1")], 1, "status 1, wrong bits, a hang or an error: tests (status 1)"),
    ([Result("nccl", HUNG), Result("bench", SLOW, reason="floor")], 1, "nccl (hung); also slow or late: bench"),
    ([Result("driver", NOT_RUN, reason="nobody knows")], 1, "an error: driver (nobody knows)"),
]


@pytest.mark.parametrize(("some", "status", "words"), ENDS, ids=[words for _, _, words in ENDS])
def test_the_status_tells_slow_from_wrong(some: list[Result], status: int, words: str) -> None:
    got, said = gpu.verdict([*(Result(name, PASSED) for name in ("machine", "build", "comm")), *some])
    assert got == status and words in said


TICKS = "import time\nfor _ in range(99): print('at work', flush=True); time.sleep(0.2)"


@pytest.mark.full(reason="six seconds")
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


@pytest.mark.full(reason="five seconds")
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
        result = ran([*python(program), vital], tmp_path, **more)
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
    bare = Result("machine", PASSED, figures={"missing": {"hypothesis": "", "pytest-timeout": ""}})
    without = {**GOOD, "machine": bare}
    _, _, _, *options = STEPS["tests"].command
    files = [word for word in STEPS["tests"].words(without) if word.startswith("tests/")][:3]
    words = [sys.executable, "-c", blind, *options, *files, "-p", "no:timeout", "-p", "no:hypothesispytest"]
    result = ran(words, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
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
@pytest.mark.full(reason="four seconds")
def test_the_service_of_ranks_that_share_a_gpu_ends(
    quit_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it does not obey."""
    stand_in(tmp_path, quit=quit_)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = mps.start(tmp_path)
    assert int(found.pop(mps.QUEUES)) > 1 and set(found) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    assert all(Path(folder).parent == tmp_path for folder in found.values())
    (daemon,) = mps.users(tmp_path)
    mps.stop(tmp_path)
    assert not mps.users(tmp_path) and not alive(daemon)
    mps.stop(tmp_path)  # nothing is there any more
    stand_in(tmp_path, start="echo forbidden; exit 3")
    with pytest.raises(RuntimeError, match="status 3: forbidden"):
        mps.start(tmp_path)


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


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=str)
@pytest.mark.full(reason="three runs of pytest")
def test_a_skipped_test_fails(tmp_path: Path, processes: tuple[str, ...]) -> None:
    """And its reason is among the figures. Tests of a route that was not built are left out; none at all is a failure."""
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "usable.json").write_text('["native"]')

    def pytest_(*words: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "figures.json").unlink(missing_ok=True)
        options = "-m pytest -q -p no:cacheprovider -p no_skips --rootdir".split()
        command = [sys.executable, *options, str(tmp_path), *processes, *words]
        variables = {figures.VARIABLE: str(tmp_path / "figures.json"), figures.SCRATCH: str(tmp_path)}
        return ran(command, tmp_path, **variables).returncode, figures.read(tmp_path / "figures.json")

    status, seen = pytest_(".")
    assert status == 1 and (seen["passed"], seen["failed"], seen["selected"]) == (2, 4, 6)
    assert seen["left_out"] == {"cuda-cupy": 1}
    texts = "\n".join(seen["failures"])
    assert "no such device" in texts and "never" in texts and "1 == 2" in texts
    assert pytest_("-k", "good or native")[0] == 0
    assert pytest_("-k", "good or late")[0] == figures.SLOW == floors.SLOW and pytest_("-k", "wrong or late")[0] == 1
    assert pytest_("-k", "nothing_of_this_name")[0] == 5
