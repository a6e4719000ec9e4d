"""``make gpu``: everything that needs a GPU, in less than ten minutes.

    python tests/gpu/gpu.py [--out FOLDER] [--only STEP ...] [--wheels FOLDER] [--dry] [--list]

Writes to the folder (docs/results): ``gpu.json``, the outcome and the figures of every step, written anew after each; ``cuda.json``,
``comm_nccl.json`` and ``train_nccl.json``, the benchmarks; ``gpu.log``, the whole output. Each step has a limit of time and ends with all
its processes. A step that fails does not stop the next ones, unless they need its result. Status 1 unless every step passed; the step
"train" is left out where DeepSpeed cannot be imported.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import figures
from step_runner import NOT_RUN, PASSED, Result, Results, Runner, Step, as_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # where PYTHONPATH lacks it
from places import PYTHONPATH, ROOT
from wheels import SITE, WHEELS

HERE = Path(__file__).resolve().parent
#: Seconds for all steps; the starts of the interpreters are among them.
TOTAL_SECONDS = 588
#: Tests of which some run on a GPU: those of :data:`SELECTED`.
CUDA_TESTS = (
    "codec/test_cuda_kernels.py",
    "codec/test_cuda_calls.py",
    "codec/test_cuda_sums.py",
    "codec/test_cuda_misaligned.py",
    "codec/test_cuda_lists.py",
    "codec/test_cuda_rows.py",
    "codec/test_cuda_rounded.py",
    "codec/test_cuda_scaled.py",
    "codec/test_cuda_zfp.py",
    "codec/test_rounded.py",
    "codec/test_golden_rounded.py",
    "codec/test_scaled.py",
    "codec/test_scaled_refused.py",
    "codec/test_golden_scaled.py",
    "codec/test_zfp.py",
    "codec/test_zfp_planted.py",
    "codec/test_lowrank.py",
    "codec/test_row_kernels.py",
    "codec/test_rows.py",
    "codec/test_rows_refused.py",
    "codec/test_golden_rows.py",
    "codec/test_known_and_bits.py",
    "codec/test_codec.py",
    "codec/test_codec_calls.py",
    "codec/test_delta.py",
    "codec/test_gap_list.py",
    "codec/test_format.py",
    "codec/test_frame.py",
    "codec/test_golden.py",
    "codec/test_hash.py",
    "codec/test_fuzz.py",
    "comm/test_host_staging.py",
)
#: The tests on a GPU, without those of the emulation, which need none.
SELECTED = "cuda-native or cuda-nvrtc or on_nccl or cuda]"
DRY_SELECTED = "emulated and (golden_frame or frames_in_slots)"
#: Last lines of a step that did not pass, at the end of the output, and characters of each: all steps together are 9,600 characters.
LINES, LINE = 6, 160
#: Message sizes of the benchmark.
MIB = (1, 4, 16, 64, 256, 1024)


def machine_is_right(results: Results) -> str:
    """Nothing makes sense without a GPU."""
    return "" if results["machine"].outcome == PASSED else "this machine has no GPU for torch"


def some_route(results: Results) -> str:
    """Tests of a route that was not built fail; those of the other route still tell something."""
    usable = "build" in results and results["build"].figures.get("usable")
    return machine_is_right(results) or ("" if usable else "no CUDA route works")


def driver_built(results: Results) -> str:
    """The driver is not compiled again: its steps have no time for that."""
    built = "build" in results and results["build"].figures.get("builds", {}).get("driver", {}).get("status") == 0
    return machine_is_right(results) or ("" if built else "the driver was not built")


def usable_routes(results: Results) -> tuple[str, ...]:
    """The routes to measure: one that was not built would be built again, in the time of the measurement."""
    return ("--route", *results["build"].figures["usable"])


def probed(results: Results) -> str:
    """Ranks cannot share this GPU unless two could."""
    return "" if results["nccl_probe"].outcome == PASSED else "two ranks could not share the GPU"


def deepspeed_works(results: Results) -> str:
    """DeepSpeed need not be on a machine with a GPU; its wheels can be carried there."""
    built = "build" in results and results["build"].figures.get("builds", {}).get("deepspeed", {}).get("status") == 0
    return probed(results) or ("" if built else "DeepSpeed cannot be imported: carry the wheels of `make gpu-wheels`")


def _pytest(name: str, *words: str, seconds: int) -> tuple[str, ...]:
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no_skips",
        "--maxfail=60",
        f"--timeout={seconds}",
        "--timeout-method=thread",
    )
    return (sys.executable, "-m", "pytest", *options, *words, f"tests/{name}")


def steps(out: Path, dry: bool = False) -> list[Step]:
    """All steps in their order: those first that decide whether to go on. Their least times together are :data:`TOTAL_SECONDS`.

    ``dry``: the programs run without a GPU; the benchmark and the tests of the codec have the emulated kernels.
    """
    python = sys.executable
    results = out / "cuda.json"
    first, *others = CUDA_TESTS
    tests = _pytest(first, "-k", DRY_SELECTED if dry else SELECTED, *(f"tests/{name}" for name in others), seconds=40)
    nccl = functools.partial(_pytest, "gpu/test_nccl.py")
    program = (python, str(HERE / "dry_bench.py")) if dry else (python, "-m", "ds_zipccl")
    bench = (
        *program,
        "bench",
        "codec",
        "--device",
        "cuda",
        "--codec",
        "cascade",
        "wide",
        "round:3",
        "--dtype",
        "bf16",
        "--mib",
        *map(str, MIB),
        "--floors",
        "--peers",
    )
    shared = (python, str(HERE / "as_probed.py"), *program[1:], "bench")
    comm_json, train_json = out / "comm_nccl.json", out / "train_nccl.json"
    comm = (*shared, "comm", "--backend", "nccl", "--ranks", "2", "4")
    comm += (
        "--repeats",
        *(("1", "--iterations", "2", "--numel", "4K") if dry else ("3", "--iterations", "5", "--numel", "1M", "4M")),
    )
    train = (*shared, "train", "--backend", "nccl", "--size", "tiny", "--workload")
    dry_train = ("zero3", "--steps", "2", "--skip", "1", "--script", str(HERE / "dry_train.py"))
    train += dry_train if dry else ("zero2", "zero3", "--steps", "20")
    return [
        Step("machine", (python, str(HERE / "machine.py")), 25),
        Step("build", (python, str(HERE / "build_all.py")), 125, machine_is_right),
        Step("driver", (python, str(HERE / "driver.py"), "run"), 15, driver_built),
        Step("nccl_probe", nccl("-k", "probe", seconds=62), 40, some_route),
        Step("nccl", nccl("-k", "share", seconds=60), 65, probed),
        Step(
            "train",
            (*train, "--json", str(train_json)),
            90,
            deepspeed_works,
            _Written(train_json, *OF_TRAINING),
            optional=True,
        ),
        Step("comm", (*comm, "--json", str(comm_json)), 45, probed, _Written(comm_json, *OF_COMM)),
        Step("tests", tests, 50, some_route),
        Step("stress", _pytest("gpu/test_stress.py", seconds=55), 35, some_route),
        Step("sanitizers", (python, str(HERE / "driver.py"), "sanitize"), 40, driver_built),
        Step("nccl_one", nccl("-k", "one_rank", seconds=40), 15, some_route),
        Step("bench", (*bench, "--json", str(results)), 40, some_route, _Written(results, *OF_CODEC)),
    ]


#: Keys of a benchmark's file that are figures of its step.
OF_CODEC = ("floors", "python_us", "left_out")
OF_COMM = ("rows", "nccl", "environment")
OF_TRAINING = ("rows", "verdicts", "nccl", "environment")


class _Written:
    """Figures from the file that a benchmark writes; none from an older file."""

    def __init__(self, path: Path, *keys: str) -> None:
        self._path, self._keys, self._since = path, keys, time.time()

    def __call__(self) -> dict[str, Any]:
        if not self._path.exists() or self._path.stat().st_mtime < self._since - 1:
            return {}
        content = figures.read(self._path)
        return {key: content[key] for key in self._keys if key in content}


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
    """The commit of the tree, "" where git cannot say."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _host() -> dict[str, Any]:
    """The host, where the step "machine" could not describe it."""
    return {
        "system": platform.platform(),
        "processor": "unknown",
        "processors": os.cpu_count() or 1,
        "memory_bytes": None,
    }


def succeeded(results: Sequence[Result], planned: Sequence[Step]) -> bool:
    """Whether every step passed; a step that may be left out need not have run."""
    optional = {step.name for step in planned if step.optional}
    return all(one.outcome == PASSED or (one.outcome == NOT_RUN and one.step in optional) for one in results)


def summary(results: Sequence[Result], planned: Sequence[Step], command: str) -> dict[str, Any]:
    """The content of gpu.json."""
    missing = [step.name for step in planned[len(results) :]]
    good = not missing and succeeded(results, planned)
    facts = next((result.figures for result in results if result.step == "machine"), {})
    versions = {
        name: str(facts[name]) for name in ("torch", "cuda", "driver", "nccl", "nvcc", "python") if name in facts
    }
    return {
        "outcome": PASSED if good else "running or cut short" if missing else "failed",
        "not_passed": {result.step: result.outcome for result in results if result.outcome != PASSED},
        "missing": missing,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        "commit": commit(),
        "seconds": round(sum(result.seconds for result in results), 1),
        "device": facts["device"].get("name", "unknown") if isinstance(facts.get("device"), dict) else "none",
        "machine": facts["host"] if isinstance(facts.get("host"), dict) else _host(),
        "versions": versions,
        "rows": as_json(results),
    }


def digest(results: Sequence[Result]) -> list[str]:
    """For a reader who sees the end of the output alone: floors, and the last words of each step that ran and did not pass."""
    lines = []
    for result in results:
        lines += [
            f"{floor['floor']}: {floor['got'] if floor['got'] is None else format(floor['got'], '.4g')}, wanted is {floor['wanted']}"
            for floor in result.figures.get("floors", ())
        ]
        lines += [f"{result.step}: {line[:LINE]}" for line in [line for line in result.tail if line.strip()][-LINES:]]
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make gpu", description="Everything that needs a GPU.", allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results (docs/results)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", help="these steps, and those that decide whether they can run"
    )
    parser.add_argument(
        "--dry", action="store_true", help="run every step without a GPU, on emulated kernels and small tensors"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="wheels of DeepSpeed, as `make gpu-wheels` makes them"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    args = parser.parse_args(words)
    out = args.out.resolve()
    planned, total = steps(out, args.dry), TOTAL_SECONDS
    if args.dry:
        os.environ["ZIPCCL_DRY"] = "1"
        planned, total = [replace(step, seconds=4 * step.seconds) for step in planned], 4 * total
    if args.only:
        unknown = set(args.only) - {step.name for step in planned}
        if unknown:
            parser.error(
                f"no step {', '.join(sorted(unknown))}; the steps are {', '.join(step.name for step in planned)}"
            )
        on_nccl = {"nccl", "comm", "train"} & set(args.only)
        wanted = {*args.only, "machine", "build", *(["nccl_probe"] if on_nccl else [])}
        planned = [step for step in planned if step.name in wanted]
    if args.list:
        for step in planned:
            print(f"{step.name:12} {step.seconds:4} s  {shlex.join(step.command)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_text("")
    command = (
        shlex.join(["make", "gpu", f"OUT={args.out}"]) if not args.only else shlex.join([sys.executable, *sys.argv])
    )
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-scratch-") as scratch:

        def save(results: Sequence[Result]) -> None:
            figures.write(out / "gpu.json", summary(results, planned, command))

        save([])
        results = Runner(
            total, ROOT, out / "gpu.log", environment(Path(scratch), args.wheels and args.wheels.resolve()), save
        ).run(planned)
    with (out / "gpu.log").open("a") as log:
        for line in ["", *digest(results), *(result.line() for result in results), f"results: {out / 'gpu.json'}"]:
            print(line, flush=True)
            log.write(line + "\n")
    return 0 if succeeded(results, planned) else 1


if __name__ == "__main__":
    sys.exit(main())
