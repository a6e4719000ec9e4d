"""``make gpu``: everything that needs a GPU, in three parts of at most eight minutes.

    python tests/gpu/gpu.py [--out FOLDER] [--part {1,2,3}] [--only STEP ...] [--wheels FOLDER] [--dry] [--list]

Part 1 measures what estimates are made of, and decides most; part 2 shows that bits are right; part 3 compares steps of a training, and
measures the kernels. Without ``--part`` they follow each other. Writes to the folder (docs/results): ``gpu.json``, the outcome and the
figures of every step, written anew after each; files of the benchmarks; ``gpu.log``, the whole output. Each step has a limit of time and
ends with all its processes. A step that fails does not stop the next ones, unless they need its result. Status 1 after wrong bits, a hang,
or an error; 3 if a step was only slow or late; 0 otherwise, also where parts of the machine are missing, which the first lines name. The
last line says the same in words. ``gpu.json`` keeps the results that it has of steps that do not run; each result has its commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import figures
import mps
from step_runner import FAILED, HUNG, MISSING, NO_TIME, NOT_RUN, PASSED, SLOW, Result, Results, Runner, Step, as_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # where PYTHONPATH lacks it
from places import PYTHONPATH, ROOT
from wheels import SITE, WHEELS

HERE = Path(__file__).resolve().parent
#: Seconds for the steps of a part; the starts of the interpreters are among them.
PART_SECONDS = 475
#: Steps of every part, and the other ones of each. They run in the order of :func:`steps`.
BEGIN = ("machine", "build")
PARTS = (
    ("units", "host_time", "fabric", "beside", "bus"),
    ("driver", "tests", "nccl_probe", "nccl", "nccl_one", "comm", "train", "stress", "sanitizers"),
    ("nccl_probe", "windows", "doctor", "auto", "bench", "counters"),
)
#: Tests of which some run on a GPU: those of :data:`SELECTED`. Both routes have the same kernels: one has all tests, for a minute.
_CODEC = (
    "cuda_kernels cuda_calls cuda_sums cuda_lists cuda_rows cuda_lossy rounded scaled zfp lossy_codecs row_kernels "
    "rows refused self_test codec arrays codec_calls delta gap_list format frame golden hash fuzz"
)
CUDA_TESTS = tuple(f"codec/test_{name}.py" for name in _CODEC.split())
#: The tests on a GPU, without those of the emulation, which need none.
SELECTED = "cuda-native or cuda] or (cuda-cupy and golden)"
DRY_SELECTED = "emulated and (golden_frame or frames_in_slots)"
#: Processes of a step with many files of tests, where pytest-xdist is installed: on an H200 six need 42 s where one needs 95.
PROCESSES = min(6, os.cpu_count() or 1)
#: Last lines of a step that did not pass, at the end of the output, and characters of each: all steps together are 9,600 characters.
LINES, LINE = 6, 160
#: The training of the step "auto": LoRA of 239M parameters, timed from step 35 on, when a clear choice by whole steps is made. With 60M
#: parameters DeepSpeed's Python takes as long as the network.
AUTO = tuple("lora --size medium --steps 45 --skip 34 --link 10gbit".split())
#: The training of the step "windows", whose plain steps send 480 MB.
WINDOWS = tuple("lora --size medium --link 10gbit".split())
#: The modelled networks of a layer of 7B, the usual ones first: a row is written at once.
FABRIC = tuple(
    "--steps 6 --skip 5 --fabric 2x8@100gbit 4x8@25gbit 4x8@100gbit 2x8@25gbit 2x8@400gbit 4x8@400gbit".split()
)
#: Message sizes of the benchmark.
MIB = (1, 4, 16, 64, 256, 1024)
#: Milliseconds of the smallest collective above which ranks that share the GPU take turns on it: benchmarks repeat less.
TURNS_MS = 5.0


def machine_is_right(results: Results) -> str:
    """Nothing makes sense without a GPU."""
    return "" if results["machine"].outcome == PASSED else "this machine has no GPU for torch"


def lacks(results: Results, *parts: str) -> str:
    """The reason of a step that wants these parts of the machine."""
    absent = [part for part in parts if part in results["machine"].figures.get("missing", {})]
    return f"{MISSING}{', '.join(absent)}" if absent else ""


def some_route(results: Results) -> str:
    """Tests of a route that was not built fail; those of the other route still tell something."""
    usable = "build" in results and results["build"].figures.get("usable")
    return machine_is_right(results) or ("" if usable else "no CUDA route works")


def tests_of_a_route(results: Results) -> str:
    """Tests want pytest, and a route."""
    return machine_is_right(results) or lacks(results, "pytest") or some_route(results)


def built(results: Results, name: str) -> bool:
    """Whether the step "build" has built something."""
    return "build" in results and results["build"].figures.get("builds", {}).get(name, {}).get("status") == 0


def driver_built(results: Results) -> str:
    """The driver is not compiled again: its steps have no time for that."""
    fails = "" if built(results, "driver") else "the driver was not built"
    return machine_is_right(results) or lacks(results, "driver") or fails


def sanitizers_are_here(results: Results) -> str:
    """The sanitizers watch the driver."""
    return driver_built(results) or lacks(results, "compute-sanitizer")


def usable_routes(results: Results) -> tuple[str, ...]:
    """The routes to measure: one that was not built would be built again, in the time of the measurement."""
    return ("--route", *found) if (found := results["build"].figures.get("usable", ())) else ()


def probed(results: Results) -> str:
    """Ranks cannot share this GPU unless two could."""
    probe = results["nccl_probe"]
    lost = machine_is_right(results) or (probe.reason if probe.reason.startswith(MISSING) else "")
    return lost or ("" if probe.outcome == PASSED else "two ranks could not share the GPU")


def deepspeed_works(results: Results) -> str:
    """DeepSpeed need not be on a machine with a GPU; its wheels can be carried there."""
    fails = "" if built(results, "deepspeed") else f"{MISSING}DeepSpeed, whose import fails in the step build"
    return probed(results) or lacks(results, "deepspeed") or fails


def engine_works(results: Results) -> str:
    """An engine of one process wants kernels, and no ranks."""
    return some_route(results) or lacks(results, "deepspeed")


def joined_nodes(results: Results) -> str:
    """Ranks that train over a network between nodes."""
    return deepspeed_works(results) or lacks(results, "namespaces")


def quicker(usual: Sequence[str], few: Sequence[str]) -> Callable[[Results], tuple[str, ...]]:
    """Words of a benchmark of ranks that share the GPU, from the time of the smallest collective that the probe found."""
    return lambda results: tuple(few if results["nccl_probe"].figures.get("tiny_ms", 0.0) > TURNS_MS else usual)


def _pytest(
    name: str, words: Sequence[str], needs: Callable[[Results], str], budget: int, seconds: int, *files: str
) -> Step:
    """A step of tests. ``files``: of the codec, less those that need hypothesis where it is missing. ``seconds``: for one test."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "no_skips", "--maxfail=60", *words)

    def more(results: Results) -> tuple[str, ...]:
        absent = results["machine"].figures.get("missing", {})
        several = ("-n", str(PROCESSES)) if len(files) > 1 and importlib.util.find_spec("xdist") else ()
        limit = () if "pytest-timeout" in absent else (f"--timeout={seconds}", "--timeout-method=thread")
        paths = [f"tests/{one}" for one in files]
        if "hypothesis" in absent:
            paths = [path for path in paths if "from hypothesis" not in (ROOT / path).read_text()]
        return (*several, *limit, *paths)

    return Step(name, (sys.executable, "-m", "pytest", *options), budget, needs, words=more)


def steps(out: Path, dry: bool = False, part: int = 0) -> list[Step]:
    """The steps of a part in their order: those first that decide. 0: of all parts. The least times of a part's steps together are at most
    :data:`PART_SECONDS`.

    ``dry``: the programs run without a GPU; the benchmark and the tests of the codec have the emulated kernels.
    """
    python = sys.executable
    results = out / "cuda.json"
    selected = DRY_SELECTED if dry else SELECTED
    program = (python, str(HERE / "dry_bench.py")) if dry else (python, "-m", "ds_zipccl")
    bench = (*program, *"bench codec --device cuda --codec cascade wide round:3 --dtype bf16 --mib".split())
    bench += (*map(str, MIB), "--floors", "--peers")
    shared = (python, str(HERE / "as_probed.py"), *program[1:], "bench")
    comm_json, train_json, auto_json = out / "comm_nccl.json", out / "train_nccl.json", out / "train_nccl_auto.json"
    comm = (*shared, "comm", "--backend", "nccl", "--ranks", "2", *([] if dry else ["4"]))
    comm += ("--json", str(comm_json))
    few_calls = ("--repeats", "1", "--iterations", "2", "--numel", "4K" if dry else "1M")
    calls = few_calls if dry else ("--repeats", "3", "--iterations", "5", "--numel", "1M", "4M")
    train = (*shared, "train", "--backend", "nccl", "--size", "tiny", "--json", str(train_json), "--workload")
    train += ("zero3", "--steps", "2", "--skip", "1") if dry else ("zero2", "zero3")
    doctor = (*shared[:2], *"-m ds_zipccl doctor --params 7e9 --link".split(), "200mbit" if dry else "10gbit")
    doctor += ("--ds-config", str(ROOT / "examples" / "ds_config_zero3.json"), "--json", str(out / "doctor_nccl.json"))
    # As users have it: two nodes, Ethernet between them, and the section's default for NCCL.
    auto = (
        *shared,
        *"train --backend nccl --variants plain auto --set nccl=auto --json".split(),
        str(auto_json),
        "--workload",
    )
    auto += ("zero3", *"--size tiny --steps 8 --skip 5 --link 200mbit".split()) if dry else AUTO
    turns = quicker((), ()) if dry else quicker(("--steps", "20"), ("--steps", "6", "--skip", "2"))
    windows = (*shared[:2], str(HERE / "windows.py"), "--json", str(out / "windows_nccl.json"), "--workload")
    windows += ("zero3", *"--size tiny --link 200mbit --window 2 --pairs 2".split()) if dry else WINDOWS
    fabric_json = out / "fabric_cuda.json"
    fabric = (python, "-m", "ds_zipccl", *"bench train --workload zero3 --layers 1 --json".split(), str(fabric_json))
    fabric += ("--fabric", *"2x8@100gbit --steps 2 --skip 1".split()) if dry else ("--backend", "nccl", *FABRIC)
    host_json = out / "host_time_cuda.json"
    host = (python, "-m", "ds_zipccl.benchmarks.comm.host_time", "--device", "cpu" if dry else "cuda")
    driver, of_nccl, units = (python, str(HERE / "driver.py")), "gpu/test_nccl.py", (python, str(HERE / "units.py"))
    planned = [
        Step("machine", (python, str(HERE / "machine.py")), 18),
        Step("build", (python, str(HERE / "build_all.py")), 60, machine_is_right),
        Step("units", (*units, "units"), 30, some_route),
        Step("host_time", (*host, "--json", str(host_json)), 45, some_route, _written(host_json, "rows")),
        Step("fabric", fabric, 220, engine_works, _written(fabric_json, "rows")),
        Step("beside", (*units, "beside"), 45, some_route),
        Step("bus", (*units, "bus"), 45, some_route),
        Step("driver", (*driver, "run"), 25, driver_built),
        _pytest("tests", ("-k", selected), tests_of_a_route, 75, 40, *CUDA_TESTS),
        _pytest("nccl_probe", ("-k", "probe"), tests_of_a_route, 30, 75, of_nccl),
        _pytest("nccl", ("-k", "share"), probed, 50, 600, of_nccl),
        _pytest("nccl_one", ("-k", "one_rank"), tests_of_a_route, 15, 40, of_nccl),
        Step("comm", comm, 32, probed, _written(comm_json, *OF_COMM), quicker(calls, few_calls)),
        Step("train", train, 75, deepspeed_works, _written(train_json, *OF_TRAINING), turns),
        _pytest("stress", (), tests_of_a_route, 30, 55, "gpu/test_stress.py"),
        Step("sanitizers", (*driver, "sanitize"), 25, sanitizers_are_here),
        Step("windows", windows, 130, joined_nodes),
        Step("doctor", doctor, 25, joined_nodes),
        Step("auto", auto, 100, joined_nodes, _written(auto_json, *OF_TRAINING)),
        Step("bench", (*bench, "--json", str(results)), 45, some_route, _written(results, *OF_CODEC), usable_routes),
        Step("counters", (*units, "counters", str(results)), 30, some_route),
    ]
    return [step for step in planned if not part or step.name in (*BEGIN, *PARTS[part - 1])]


#: Keys of a benchmark's file that are figures of its step.
OF_CODEC = ("floors", "python_us", "left_out")
OF_COMM = ("rows", "nccl", "environment")
OF_TRAINING = ("rows", "verdicts", "nccl", "environment")


def _written(path: Path, *keys: str) -> Callable[[], dict[str, Any]]:
    """Returns the figures from the file that a benchmark will write; none from an older file."""
    since = time.time() - 1

    def read() -> dict[str, Any]:
        content = figures.read(path) if path.exists() and path.stat().st_mtime >= since else {}
        return {key: content[key] for key in keys if key in content}

    return read


def environment(scratch: Path, wheels: Path | None = None) -> dict[str, str]:
    """The environment of the steps. The setting of the CPU's tests is not for a GPU; output comes at once, stacks when a step ends.

    ``wheels``: folder of wheels that the step "build" unpacks.
    """
    kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    paths = os.pathsep.join((PYTHONPATH, str(HERE), str(scratch / SITE)))
    return kept | {
        "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", figures.SCRATCH: str(scratch), WHEELS: str(wheels or ""),
    }  # fmt: skip


def commit() -> str:
    """The commit of the tree, "" where git cannot say; ``ZIPCCL_COMMIT`` names that of a copy without history."""
    if named := os.environ.get("ZIPCCL_COMMIT"):
        return named
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _host() -> dict[str, Any]:
    """The host, where the step "machine" could not describe it."""
    facts = {"system": platform.platform(), "processor": "unknown"}
    return {**facts, "processors": os.cpu_count() or 1, "memory_bytes": None}


def verdict(results: Sequence[Result]) -> tuple[int, str]:
    """The status of the run, and what it means in words."""
    late = [one for one in results if one.outcome == SLOW or (one.outcome == NOT_RUN and one.reason == NO_TIME)]
    absent = [one for one in results if one.outcome == NOT_RUN and one.reason.startswith(MISSING)]
    wrong = [one for one in results if one.outcome in (FAILED, HUNG)]
    # These wait for a step that is among the others; without such a step nobody knows why.
    waited = [one for one in results if one.outcome == NOT_RUN and one not in late and one not in absent]
    wrong, waited = (wrong, waited) if wrong or late else (waited, [])

    def named(some: Sequence[Result]) -> str:
        return ", ".join(f"{one.step} ({one.reason.removeprefix(MISSING) or one.outcome})" for one in some)

    words = [f"status 1, wrong bits, a hang or an error: {named(wrong)}"] if wrong else []
    if late:
        seen = "also" if wrong else f"status {figures.SLOW}, no wrong bit was seen:"
        words.append(f"{seen} slow or late: {named(late)}")
    words = words or [f"status 0: {sum(one.outcome == PASSED for one in results)} steps passed"]
    words += [f"not run for that: {named(waited)}"] if waited else []
    words += [f"not shown here, as parts are missing: {named(absent)}"] if absent else []
    return 1 if wrong else figures.SLOW if late else 0, "; ".join(words)


def earlier(path: Path, planned: Sequence[Step]) -> list[Result]:
    """The results of an earlier run, in its gpu.json, of steps that are not planned."""
    others = {step.name for step in steps(Path())} - {step.name for step in planned}
    return [Result(**row) for row in figures.read(path).get("rows", ()) if row["step"] in others]


def summary(
    results: Sequence[Result], planned: Sequence[Step], command: str, kept: Sequence[Result] = ()
) -> dict[str, Any]:
    """The content of gpu.json. ``kept``: results of an earlier run."""
    missing = [step.name for step in planned[len(results) :]]
    seconds = round(sum(result.seconds for result in results), 1)
    order = [step.name for step in steps(Path())]
    results = sorted([*results, *kept], key=lambda result: order.index(result.step))
    status, words = verdict(results)
    facts = next((result.figures for result in results if result.step == "machine"), {})
    versions = {
        name: str(facts[name]) for name in ("torch", "cuda", "driver", "nccl", "nvcc", "python") if name in facts
    }
    return {
        "outcome": "running or cut short" if missing else {0: PASSED, figures.SLOW: SLOW}.get(status, "failed"),
        "verdict": words,
        "not_passed": {result.step: result.outcome for result in results if result.outcome != PASSED},
        "missing": missing,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        "commit": commit(),
        "seconds": seconds,
        "device": facts["device"].get("name", "unknown") if isinstance(facts.get("device"), dict) else "none",
        "machine": facts["host"] if isinstance(facts.get("host"), dict) else _host(),
        "versions": versions,
        "rows": as_json(results),
    }


def digest(results: Sequence[Result]) -> list[str]:
    """For a reader who sees the end of the output alone: missing parts, floors, and the last words of each step that did not pass."""
    lines = []
    for result in results:
        lines += [
            f"{floor['floor']}: {floor['got'] if floor['got'] is None else format(floor['got'], '.4g')}, wanted is {floor['wanted']}"
            for floor in result.figures.get("floors", ())
        ]
        lines += [f"missing {name}: {line[:LINE]}" for name, line in result.figures.get("missing", {}).items()]
        lines += [f"{result.step}: {line[:LINE]}" for line in [line for line in result.tail if line.strip()][-LINES:]]
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make gpu", description="Everything that needs a GPU.", allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results (docs/results)")
    add("--part", type=int, choices=range(1, 1 + len(PARTS)), default=0, help="this part alone")
    add("--only", nargs="+", metavar="STEP", help="these steps, and those that decide whether they can run")
    add("--dry", action="store_true", help="run every step without a GPU, on emulated kernels and small tensors")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of DeepSpeed, as `make gpu-wheels` makes them")
    add("--list", action="store_true", help="print the steps and end")
    args = parser.parse_args(words)
    out = args.out.resolve()
    planned, total = steps(out, args.dry, args.part), PART_SECONDS * (1 if args.part else len(PARTS))
    if args.dry:
        os.environ["ZIPCCL_DRY"] = "1"
        planned, total = [replace(step, seconds=4 * step.seconds) for step in planned], 4 * total
    if args.only:
        names = [step.name for step in planned]
        if unknown := sorted(set(args.only) - set(names)):
            parser.error(f"no step {', '.join(unknown)}; the steps are {', '.join(names)}")
        on_nccl = {"nccl", "comm", "doctor", "auto", "train", "windows"} & set(args.only)
        wanted = {*args.only, "machine", "build", *(["nccl_probe"] if on_nccl else [])}
        planned = [step for step in planned if step.name in wanted]
    kept = earlier(out / "gpu.json", planned)
    if args.list:
        for step in planned:
            command = (*step.command, *step.words({step.name: Result(step.name, PASSED) for step in planned}))
            print(f"{step.name:12} {step.seconds:4} s  {shlex.join(command)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_text("")
    made = ["make", "gpu", f"OUT={args.out}", *([f"PART={args.part}"] if args.part else [])]
    command = shlex.join([sys.executable, *sys.argv] if args.only else made)
    named = commit()
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-scratch-") as scratch:

        def save(results: Sequence[Result]) -> None:
            for result in results:
                result.commit = named
            figures.write(out / "gpu.json", summary(results, planned, command, kept))

        save([])
        variables = environment(Path(scratch), args.wheels and args.wheels.resolve())
        try:
            results = Runner(total, ROOT, out / "gpu.log", variables, save).run(planned)
        finally:
            mps.stop(Path(scratch))
    status, words = verdict(results)
    with (out / "gpu.log").open("a") as log:
        lines = [*digest(results), *(result.line() for result in results), f"results: {out / 'gpu.json'}", words]
        for line in ["", *lines]:
            print(line, flush=True)
            log.write(line + "\n")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what runs is ended first
    sys.exit(main())
