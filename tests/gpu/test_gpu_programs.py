"""The programs of ``make gpu`` without a GPU: builds, driver, stress, NCCL and the benchmark, on emulated kernels and CPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import build_all
import builds
import driver
import emulation
import figures
import golden_cases
import gpu
import parts
import pytest
import wheels
import where
from places import ROOT
from step_runner import FAILED, PASSED, Result

from ds_zipccl.benchmarks.codec import floors
from ds_zipccl.kernels import build

sys.path.insert(0, str(ROOT / "docs"))
import measured

STEPS = {step.name: step for step in gpu.steps(ROOT / "out")}


def environment(**more: str) -> dict[str, str]:
    """As the runner's, and quiet."""
    return gpu.environment(Path("/nowhere")) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


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
    "parts do not add up": (
        "cuda/encode.cuh",
        ("uint64_t(bodies) << 32 | tails;", "uint64_t(bodies + 16) << 32 | tails;"),
    ),
    "no capacity is known": ("cuda/encode.cuh", ("if (end > job.capacity || !blocks) return;", "if (!blocks) return;")),
}


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
    monkeypatch.setattr(driver, "compiled", lambda *words: made)
    driver.carry(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(wheels.WHEELS, str(tmp_path))

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


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Soon, with the words of each."""
    program = """
import nccl_rank, test_nccl, sys, time
def fails(it):
    if it.rank == 1:
        raise ValueError("rank 1 has a problem")
    nccl_rank.dist.barrier()
nccl_rank.PROGRAMS["probe"] = (fails,)
if len(sys.argv) > 1:
    from pathlib import Path
    name, rank, ranks, store, report = sys.argv[1:]
    nccl_rank.main(name, int(rank), int(ranks), store, Path(report))
test_nccl.PROGRAM = __file__
try:
    test_nccl.launch("probe", 2, 100.0, {})
except AssertionError as error:
    print(error)
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=environment(ZIPCCL_DRY="1")
    )
    assert "rank 1 has a problem" in result.stdout, result.stderr
    assert time.monotonic() - start < 60


# ---- the benchmark --------------------------------------------------------------------------------------------------


@pytest.mark.full(reason="an emulation to compile, and a benchmark on it")
def test_the_benchmark_on_the_emulation_and_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row and figure is in the JSON, and the documentation shows them."""
    command = {one.name: one.command for one in gpu.steps(tmp_path, dry=True)}["bench"]
    at = command.index("--mib") + 1
    words = [*command[:at], "1", "4", *command[at + len(gpu.MIB) :]]
    os.makedirs(tmp_path / "docs" / "results")
    words[words.index("--json") + 1] = str(tmp_path / "docs" / "results" / "cuda.json")
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment(ZIPCCL_DRY="1")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "docs" / "results" / "cuda.json").read_text())
    assert len(content["rows"]) == 2 * 2 * 3 + 2 * 2 and not any(row["wrong"] for row in content["rows"])
    assert {(row["block"], row["offset"]) for row in content["rows"]} == {(1024, 0), (1024, 2), (128, 0)}
    calls = {"encode of 1", "decode of 1", "encode of 20", "decode of 20", floors.GATHER}
    assert {route: set(times) for route, times in content["python_us"].items()} == dict.fromkeys(
        ("native", "cupy"), calls
    )
    judged = [one.name for one in floors.FLOORS if one.mib != floors.MIDDLE]  # no row has that size
    assert [one["floor"] for one in content["floors"][:-1]] == judged and len(judged) > 10
    assert floors.GATHER in content["floors"][-1]["floor"] and "nvCOMP" in content["left_out"]
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    text = measured.cuda(tmp_path / "docs" / "page.md")
    assert "| native | cascade | 256 | 1024 | 2 |" in text and "Not measured: nvCOMP" in text
    (tmp_path / "docs" / "results" / "cuda.json").unlink()
    assert "Not measured yet" in measured.cuda(tmp_path / "docs" / "page.md")


def row(codec: str, mib: int, **more: float) -> dict[str, Any]:
    figures_ = {"encode_gbps": 3000.0, "decode_gbps": 3000.0, "sum_moved": 0.9, "pair_us": 20.0}
    return {"codec": codec, "dtype": "bfloat16", "mib": mib, "offset": 0, "block": 1024, **figures_, **more}


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
    assert line == "cascade / nvCOMP ANS, encode: 2, wanted is at least 3"
    assert floors.missed(floors.compare(rows[:-1], "NVIDIA H200", FAST)) == [
        f"cascade {way}, misaligned words / aligned words: not measured, wanted is at least 0.5"
        for way in ("encode", "decode")
    ]
    modest = [one | {"encode_gbps": 1100.0, "decode_gbps": 1100.0, "sum_moved": 0.4} for one in rows]
    assert not floors.missed(floors.compare(modest, "NVIDIA H200", FAST)), "as the counts of instructions allow"
    slow = [one | {"encode_gbps": 300.0, "pair_us": 40.0, "sum_moved": 0.3} for one in rows]
    late = {floors.GATHER: 151.0}
    assert len(floors.missed(floors.compare(slow, "NVIDIA H200", late))) == 2 * 2 + 3
    assert len(floors.missed(floors.compare(slow, "NVIDIA A100", late))) == 1, (
        "rates are for an H200, the sum for every GPU"
    )


def test_the_table_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = list(STEPS.values())
    results = [Result("machine", PASSED, 3.0, figures={"device": {"name": "NVIDIA H200"}, "torch": "2.11.0"})]
    results += [Result(step.name, FAILED, 2.0, reason="status 1") for step in planned[1:]]
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    assert "Not run yet" in measured.gpu(tmp_path)
    figures.write(folder / "gpu.json", gpu.summary(results, planned, "make gpu"))
    text = measured.gpu(tmp_path)
    assert "NVIDIA H200" in text and "torch 2.11.0" in text and "Outcome: failed." in text
    assert "| machine | passed | 3 |  |" in text and "| bench | failed | 2 | status 1 |" in text
    assert "over NCCL" not in text
    place = {"ranks": 2, "variant": "coded", "host_waits": 1.0}
    of_comm = place | {"op": "all_gather", "numel": 4096, "time_us": 71.4, "ratio": 1.4, "wrong": 0}
    sent = {"logical_bytes": 70, "wire_bytes": 50, "params_sha256": 2 * "0123456789abcdef"}
    by_step = {one.step: one for one in results}
    by_step["comm"].figures = {"rows": [of_comm], "environment": {"NCCL_NET": "Socket"}}
    by_step["train"].figures = {
        "rows": [place | sent | {"workload": "zero3", "step_ms": 12.34}],
        "verdicts": [{"problems": ["coded run: a loss is not finite"]}],
    }
    figures.write(folder / "gpu.json", gpu.summary(results, planned, "make gpu"))
    text = measured.gpu(tmp_path)
    assert "| all_gather | 2 | 4096 | coded | 71 | 1.400 | 1 | 0 |" in text and "the ranks share a GPU" in text
    assert "| zero3 | 2 | coded | 12.3 | 70 | 50 | 1 | 0123456789abcdef |" in text
    assert "bits: coded run: a loss is not finite" in text
