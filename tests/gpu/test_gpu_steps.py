"""``make gpu`` without a GPU: its steps exist and select tests, its programs run on emulated kernels, its runner does what it says."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import build_all
import figures
import gpu
import nccl_rank
import no_skips
import pytest
import wheels
from places import ROOT, TESTS
from step_runner import FAILED, HUNG, MISSING, NO_TIME, NOT_RUN, PASSED, SLOW, Result, Runner, Step, as_json

from ds_zipccl.__main__ import parse
from ds_zipccl.benchmarks.codec import floors
from ds_zipccl.integration import autoload
from ds_zipccl.tools import namespaces

sys.path.insert(0, str(ROOT / "docs"))
import measured

#: With a GPU in sight, which adds its routes to the parameters of tests.
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["--collect-only", *sys.argv[1:]]))
"""
STEPS = {step.name: step for step in gpu.steps(ROOT / "out")}
#: Results of a machine on which all goes well.
GOOD = {name: Result(name, PASSED) for name in STEPS}


def command(step: Step) -> tuple[str, ...]:
    """The whole command of a step where all goes well."""
    return (*step.command, *step.words(GOOD))


def environment(**more: str) -> dict[str, str]:
    """As the runner's, and quiet."""
    return gpu.environment(Path("/nowhere")) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def ran(
    command: Sequence[str], cwd: Path = ROOT, timeout: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    """The end of a program in the environment of a step."""
    return subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout)


# ---- the list -------------------------------------------------------------------------------------------------------


def test_each_part_ends_in_eight_minutes() -> None:
    parts = [[step.name for step in gpu.steps(ROOT / "out", part=1 + at)] for at in range(3)]
    assert all(names == [*gpu.BEGIN, *some] for names, some in zip(parts, gpu.PARTS, strict=True))
    assert {name for names in parts for name in names} == set(STEPS), "each step belongs to a part"
    for names in parts:
        assert sum(STEPS[name].seconds for name in names) <= gpu.PART_SECONDS < 480


def collected(*arguments: str) -> list[str]:
    """The tests that pytest finds on a machine with a GPU."""
    result = ran([sys.executable, "-c", COLLECT, *arguments])
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if "::" in line]


@pytest.mark.full(reason="collects the tests of two folders")
def test_every_file_with_tests_on_a_gpu_is_named_and_no_emulated_test_is_selected() -> None:
    """By the step's own command, for all tests of the folders of its files."""
    python, option, module, *options = STEPS["tests"].command
    assert (python, option, module) == (sys.executable, "-m", "pytest")
    timeouts = [word for word in STEPS["tests"].words(GOOD) if word.startswith("--")]
    selected = collected(*options, *timeouts, *(str(TESTS / name) for name in ("codec", "comm")))
    found = {name.partition("::")[0].removeprefix("tests/") for name in selected}
    assert found == set(gpu.CUDA_TESTS), "make gpu must name each file with tests on a GPU"
    assert not [name for name in selected if "emulated" in name or "cpu" in name]
    counts = [sum(f"cuda-{route}" in name for name in selected) for route in no_skips.ROUTES]
    assert counts[0] > 1000 and counts[1] > 50, "all tests of one route, golden frames of the other"


def test_the_commands_of_ds_zipccl_parse() -> None:
    as_probed = str(TESTS / "gpu" / "as_probed.py")
    quick = {**GOOD, "nccl_probe": Result("nccl_probe", PASSED, figures={"tiny_ms": 2 * gpu.TURNS_MS})}
    commands = [command(STEPS[step]) for step in ("bench", "comm", "train")]
    commands += [(*STEPS[step].command, *STEPS[step].words(quick)) for step in ("comm", "train")]
    assert parse([*commands[4][4:]]).steps < parse([*commands[2][4:]]).steps, "ranks that take turns train less"
    for words in (*commands, build_all.report_command(), build_all.report_command(every=False)):
        python, *rest = (word for word in words if word != as_probed)
        assert (python, *rest[:2]) == (sys.executable, "-m", "ds_zipccl")
        assert callable(parse(rest[2:]).main)
    for step in ("comm", "train"):
        assert STEPS[step].command[1] == as_probed and parse(list(command(STEPS[step])[4:])).backend == "nccl"
    route = gpu.usable_routes({"build": Result("build", PASSED, figures={"usable": ["cupy"]})})
    assert parse([*STEPS["bench"].command[3:], *route]).route == ["cupy"]


def test_the_target_of_make(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "-n", "gpu", "OUT=/tmp/somewhere", "PYTHON=some_python"]
    said = ran(command).stdout.strip()
    assert said.startswith("env -u DS_ACCELERATOR ")
    assert said.endswith('some_python tests/gpu/gpu.py --out "/tmp/somewhere" --wheels "out/wheels"')
    assert "tests/gpu/gpu.py --part 2 --out" in ran([*command, "PART=2"]).stdout
    found = gpu.environment(tmp_path, tmp_path / "wheels")
    assert "DS_ACCELERATOR" not in found and found[wheels.WHEELS] == str(tmp_path / "wheels")
    assert found["PYTHONPATH"].endswith(f"{tmp_path}/{wheels.SITE}")


# ---- the runner -----------------------------------------------------------------------------------------------------


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def run(steps: Sequence[Step], folder: Path, total: float = 60) -> tuple[dict[str, Result], list[list[str]], str]:
    """Results by name, the outcomes that each save had, and the log."""
    saved: list[list[str]] = []

    def save(results: Sequence[Result]) -> None:
        saved.append([one.outcome for one in results])

    runner = Runner(total, folder, folder / "log", environment(), save)
    results = {result.step: result for result in runner.run(steps)}
    return results, saved, (folder / "log").read_text()


def test_outcomes(tmp_path: Path) -> None:
    """Each is saved at once, with its figures; a failure stops only the steps that need the result."""
    put = "import figures; figures.put(count=3); "
    steps = [
        Step("good", python(put + "print('fine')"), 10),
        Step("bad", python(put + "print('why'); raise SystemExit(4)"), 10),
        Step("absent", ("/no/such/program",), 10),
        Step("needy", python("print('never')"), 10, lambda results: "bad failed" if results["bad"].status else ""),
        Step("last", python("import sys; print(sys.argv[1])"), 10, words=lambda results: (results["good"].outcome,)),
    ]
    results, saved, log = run(steps, tmp_path)
    assert {name: result.outcome for name, result in results.items()} == {
        "good": PASSED, "bad": FAILED, "absent": FAILED, "needy": NOT_RUN, "last": PASSED,
    }  # fmt: skip
    assert [len(outcomes) for outcomes in saved] == [1, 2, 3, 4, 5]
    assert results["good"].figures == results["bad"].figures == {"count": 3}
    assert results["bad"].tail == ["why"] and results["bad"].reason == "status 4"
    assert not results["good"].tail
    assert "could not be started" in results["absent"].reason and results["needy"].reason == "bad failed"
    assert "fine" in log and "why" in log and "never" not in log and f"\n{PASSED}\n" in log
    assert results["last"].command.endswith(PASSED)


SLEEPERS = """
import figures, subprocess, sys, time
figures.put(before=1)
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
figures.put(processes=[own.pid, other.pid])
print("sleeping", flush=True)
def where_it_is():
    time.sleep(600)
where_it_is()
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.full(reason="waits for a limit")
def test_a_step_that_hangs_ends_with_all_its_processes(tmp_path: Path) -> None:
    start = time.monotonic()
    steps = [Step("stuck", python(SLEEPERS), 6), Step("next", python("print('on')"), 10)]
    results, _, log = run(steps, tmp_path, total=16)
    assert time.monotonic() - start < 40
    stuck = results["stuck"]
    assert stuck.outcome == HUNG and stuck.reason.startswith("hung: still running after 6 s")
    assert stuck.figures["before"] == 1
    assert any("where_it_is" in line for line in stuck.tail), "Python does not show where it was"
    deadline = time.monotonic() + 5
    while any(map(alive, stuck.figures["processes"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, stuck.figures["processes"]))
    assert results["next"].outcome == PASSED and "\non\n" in log


def test_a_step_gets_the_time_that_earlier_steps_left(tmp_path: Path) -> None:
    steps = [Step("quick", python("pass"), 30), Step("long", python("pass"), 10), Step("end", python("pass"), 20)]
    results, _, _ = run(steps, tmp_path, total=60)
    assert results["quick"].limit_seconds == pytest.approx(30, abs=1)
    assert 10 < results["long"].limit_seconds <= 40
    assert results["end"].limit_seconds > 20
    late, _, _ = run(
        [Step("first", python("import time; time.sleep(3)"), 2), Step("second", python("pass"), 2)], tmp_path, 2
    )
    assert late["first"].outcome == HUNG and late["second"].reason == NO_TIME


def test_what_the_steps_need() -> None:
    machine = {"machine": Result("machine", PASSED)}
    assert gpu.machine_is_right({"machine": Result("machine", FAILED)})
    bare = {"machine": Result("machine", PASSED, figures={"missing": {"pytest": "", "driver": "", "deepspeed": ""}})}
    bare |= {"build": Result("build", PASSED, figures={"usable": ["cupy"], "builds": {"driver": {"status": 1}}})}
    assert gpu.tests_of_a_route(bare) == f"{MISSING}pytest" and gpu.driver_built(bare) == f"{MISSING}driver"
    bare |= {"nccl_probe": Result("nccl_probe", NOT_RUN, reason=gpu.tests_of_a_route(bare))}
    assert not gpu.some_route(bare) and gpu.probed(bare) == gpu.deepspeed_works(bare) == f"{MISSING}pytest"
    nothing = machine | {"build": Result("build", FAILED)}
    half = machine | {
        "build": Result("build", FAILED, figures={"usable": ["native"], "builds": {"driver": {"status": 0}}})
    }
    assert gpu.some_route(nothing) and gpu.driver_built(nothing)
    assert not gpu.some_route(half) and not gpu.driver_built(half)
    assert gpu.probed(machine | {"nccl_probe": Result("nccl_probe", HUNG)}) == "two ranks could not share the GPU"
    shared = nothing | {"nccl_probe": Result("nccl_probe", PASSED)}
    assert gpu.deepspeed_works(shared).startswith(MISSING)
    imported = {"build": Result("build", PASSED, figures={"builds": {"deepspeed": {"status": 0}}})}
    assert not gpu.deepspeed_works(shared | imported)
    for step in list(STEPS.values())[1:]:
        assert step.needs({"machine": Result("machine", FAILED), "nccl_probe": Result("nccl_probe", NOT_RUN)})


def test_the_summary_says_that_a_run_was_cut_short() -> None:
    """And tells a step that failed from one that lacks a part."""
    planned = list(STEPS.values())
    good = [Result(step.name, PASSED) for step in planned]
    ends = [(Result("counters", NOT_RUN, reason=f"{MISSING}driver"), PASSED)]
    for outcome, said in ((FAILED, "failed"), (HUNG, "failed"), (NOT_RUN, "failed"), (SLOW, SLOW)):
        ends.append((Result("counters", outcome), said))
    cases = [(good[:3], "running or cut short", {}), (good, PASSED, {})]
    cases += [([*good[:-1], last], said, {"counters": last.outcome}) for last, said in ends]
    for results, said, not_passed in cases:
        content = gpu.summary(results, planned, "make gpu")
        assert (content["outcome"], content["not_passed"]) == (said, not_passed)
        assert content["missing"] == list(STEPS)[len(results) :]


def test_a_run_of_some_steps_keeps_the_results_of_others(tmp_path: Path) -> None:
    planned = [STEPS["machine"], STEPS["stress"]]
    before = [Result("machine", FAILED, commit="1"), Result("comm", SLOW, 3.0, commit="1"), Result("stress", HUNG)]
    figures.write(tmp_path / "gpu.json", {"rows": as_json(before)})
    kept = gpu.earlier(tmp_path / "gpu.json", planned)
    now = [Result("machine", PASSED, 1.0, commit="2"), Result("stress", PASSED, 1.0, commit="2")]
    content = gpu.summary(now, planned, "make gpu", kept)
    assert [(row["step"], row["commit"]) for row in content["rows"]] == [
        ("machine", "2"),
        ("comm", "1"),
        ("stress", "2"),
    ]
    assert (content["outcome"], content["seconds"], content["not_passed"]) == (SLOW, 2.0, {"comm": SLOW})
    assert not gpu.earlier(tmp_path / "none.json", planned)


@pytest.mark.full(reason="six seconds")
def test_without_a_gpu_the_target_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "gpu" / "gpu.py"), "--out", str(tmp_path)]
    result = ran(command)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert result.returncode == 1 and content["outcome"] == "failed"
    assert {row["outcome"] for row in content["rows"][1:]} == {NOT_RUN}
    last = result.stdout.splitlines()[-1]
    assert last == content["verdict"] and last.startswith("status 1, wrong bits, a hang or an error: machine")
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.log"}
    assert "this machine has no GPU" in (tmp_path / "gpu.log").read_text()


def test_deepspeed_joins_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are unpacked, torch gets the entry point of a package that is not installed, and DeepSpeed is imported; in this order."""
    ran: list[list[str]] = []
    monkeypatch.setattr(wheels, "_run", ran.append)
    monkeypatch.setattr(wheels.importlib.metadata, "entry_points", lambda group: ())
    (tmp_path / "some.whl").touch()
    (tmp_path / "pytest-9.0-py3-none-any.whl").touch()  # which is here: its plugins fit the one that is here
    wheels.unpack(str(tmp_path), tmp_path / "site")
    wheels.ready(tmp_path / "site")
    assert [command[1:3] for command in ran] == [["-m", "pip"], ["-c", wheels.PROBE]]
    assert ran[0][-2:] == [str(tmp_path / "site"), str(tmp_path / "some.whl")] and "--no-index" in ran[0]
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("torch.backends", "ds_zipccl.integration.autoload:autoload")
    assert entry.load() is autoload.autoload
    del ran[:]
    wheels.unpack("", tmp_path / "other")
    wheels.ready(tmp_path / "other")
    assert [command[1:3] for command in ran] == [["-c", wheels.PROBE]]


@pytest.mark.full(reason="every step runs, three minutes of the processor")
def test_a_dry_run_of_every_step_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, and without PYTHONPATH; the documentation shows every figure of the benchmark."""
    command = [sys.executable, str(TESTS / "gpu" / "gpu.py"), "--dry", "--out", "docs/results"]
    out = tmp_path / "docs" / "results"
    variables = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", figures.SCRATCH)}
    result = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    content = json.loads((out / "gpu.json").read_text())
    assert result.returncode == 0, (content["not_passed"], result.stdout[-3000:])
    assert content["outcome"] == PASSED and [row["step"] for row in content["rows"]] == list(STEPS)
    written = {"cuda.json", "comm_nccl.json", "train_nccl.json", "host_time_cuda.json", "fabric_cuda.json"}
    told = {row["step"]: row.get("figures", {}) for row in content["rows"]}
    if not namespaces.why_not():
        written |= {"train_nccl_auto.json", "doctor_nccl.json", "windows_nccl.json"}
        assert {row["nodes"] for row in told["auto"]["rows"]} == {2} and not told["auto"]["verdicts"][0]["problems"]
        sent = told["windows"]["window_bytes"]
        assert max(sent[1::2]) < min(sent[::2]) and told["windows"]["no_speedup"], (
            "a tiny model says nothing about speed"
        )
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.log", *written}
    assert len(told["units"]) > 6 and told["beside"]["lost_per_second"] and told["bus"]["calibration_gbps"]
    assert told["host_time"]["rows"] and told["counters"]["of_a_copy"]["native cascade"]["sum"]
    assert told["train"]["verdicts"] and not any(verdict["problems"] for verdict in told["train"]["verdicts"])
    assert all(verdict["ratio_coded"]["coded"] > 1.3 for verdict in told["train"]["verdicts"])
    for plain, coded in zip(told["train"]["rows"][::2], told["train"]["rows"][1::2], strict=True):
        assert plain["params_sha256"] == coded["params_sha256"] and coded["wire_bytes"] < coded["logical_bytes"]
    assert {row["ranks"] for row in told["comm"]["rows"]} == {2} and not any(
        row["wrong"] for row in told["comm"]["rows"]
    )
    assert told["nccl"]["ranks_4"]["coded"]["all_gather_into_tensor"]["host_waits"]
    assert told["driver"]["small"]["trials"] > 2400 and not told["driver"]["small"]["wrong"]
    assert told["stress"]["passed"] == 12
    assert told["nccl_probe"]["works"] == "as planned" and told["nccl_probe"]["settings"]["NCCL_NET"] == "Socket"
    for step, name, checks in (("nccl_one", "one_rank", "one_rank"), ("nccl", "ranks_4", "shared_gpu_4")):
        assert set(told[step][name]["seconds"]) == {check.__name__ for check in nccl_rank.PROGRAMS[checks]}
    *_, last, results, verdict = result.stdout.splitlines()
    assert last.startswith("counters ") and verdict.startswith("status 0") and results == f"results: {out / 'gpu.json'}"
    of_codec = json.loads((out / "cuda.json").read_text())
    assert len(of_codec["rows"]) == 2 * len(gpu.MIB) * 3 + 2 * 2 and not any(row["wrong"] for row in of_codec["rows"])
    assert {(row["block"], row["offset"]) for row in of_codec["rows"]} == {(1024, 0), (1024, 2), (128, 0)}
    calls = {"encode of 1", "decode of 1", "encode of 20", "decode of 20", floors.GATHER}
    assert {route: set(times) for route, times in of_codec["python_us"].items()} == dict.fromkeys(
        no_skips.ROUTES, calls
    )
    judged = [one["floor"] for one in of_codec["floors"]]
    assert judged[:-1] == [one.name for one in floors.FLOORS] and len(judged) > 10
    assert floors.GATHER in judged[-1] and "nvCOMP" in of_codec["left_out"]
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    text = measured.cuda(tmp_path / "docs" / "page.md")
    assert "| native | cascade | 256 | 1024 | 2 |" in text and "Not measured: nvCOMP" in text
    (out / "cuda.json").unlink()
    assert "Not measured yet" in measured.cuda(tmp_path / "docs" / "page.md")
