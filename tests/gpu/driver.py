"""The stand-alone driver (driver.cu): built with nvcc for the GPU that is here, or for the emulation; run, and watched by sanitizers.

python tests/gpu/driver.py build | run | sanitize
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import builds
import figures
import golden_cases
import where
from places import TESTS
from step_runner import end_tree

from ds_zipccl.kernels import build, capabilities

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Status of a sanitizer that found something. The driver has 0, 1 and 2.
FOUND = 9
#: Seconds for the planted mistake; for the cases, at least and at most, if the step's limit has room. The sanitizers run at a time.
PLANT_SECONDS, TOOL_SECONDS, MOST_TOOL_SECONDS = 20.0, 50.0, 150.0
#: Seconds of a step's limit that are left when the sanitizers are ended.
SPARE_SECONDS = 4.0
#: Stands for compute-sanitizer in a dry run: notices the planted mistake, and nothing in the kernels.
STAND_IN = """#!/bin/sh
case " $* " in *" --plant "*) exit 9;; esac
while [ "${1#-}" != "$1" ]; do shift 2; done
exec "$@"
"""
#: -lineinfo: sanitizers name lines; the machine code is the same.
_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-diag-suppress=177,186")


#: Of the driver with the kernels in it.
SOURCES = ("gpu/driver.cu",)


def for_gpu() -> Path:
    """The driver with the kernels in it, compiled unless it is there already (about a minute).

    Raises:
        BuildError: there is no nvcc or no device, or nvcc failed.
    """
    return compiled("driver", SOURCES)


def compiled(name: str, sources: Sequence[str], architectures: Sequence[str] = (), flags: Sequence[str] = ()) -> Path:
    """What nvcc makes of ``sources`` (of the folders gpu and csrc) for the devices here, or for compute capabilities such as "9.0"."""
    compiler, folders = build.nvcc(), {"csrc": build.CSRC, "gpu": HERE}
    targets = [
        flag for flag in build.cuda(architectures or capabilities.architectures()).flags if flag.startswith("-gencode")
    ]
    command = [*compiler, *_FLAGS, *flags, *targets, f"-I{build.CSRC}"]
    for source in sources:
        key, _, rest = source.partition("/")
        command.append(str(folders[key] / rest))

    def make(target: Path) -> None:
        result = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, timeout=builds.SECONDS)
        if result.returncode:
            raise build.BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")

    parts = [build._identity(compiler), *_FLAGS, *flags, *targets, *sources, *builds.contents(folders)]
    return builds.kept(f"gpu_{name}", parts, make)


def for_emulation() -> Path:
    """The driver that loads the emulated kernels: ``--library`` names them.

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    folders = {"csrc": build.CSRC, "emulation": TESTS / "emulation", "gpu": HERE}
    flags = ("-O1", "-std=c++17", f"-I{TESTS / 'emulation'}")
    return builds.Binary("emulated_driver", folders, {"gpu/driver.cu": ("-x", "c++")}, flags, ("-ldl",)).path()


#: Options of golden_cases.py.
SIZES = {"few": ("--few",), "bf16": ("--bf16",), "small": (), "large": ("--large",)}


def run(program: Sequence[str | Path], *sizes: str) -> int:
    """Run the driver on cases of these sizes; its status."""
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-cases-") as folder:
        for name in sizes:
            cases = Path(folder) / name
            golden_cases.main(str(cases), *SIZES[name])
            status, text, seconds = _watched([*program, cases], 60.0)
            print(text, flush=True)
            wrong = [line.strip() for line in text.splitlines() if line.startswith("    ")]
            trials = sum(map(int, re.findall(r" (\d+) trials", text)))
            figures.put(**{name: {"status": status, "trials": trials, "seconds": seconds, "wrong": wrong[:40]}})
            cases.unlink()
            if status or not trials:
                return status or 2
    return 0


def sanitize(program: Sequence[str], sanitizer: str) -> int:
    """Run the driver under each sanitizer; 0 if each sees its planted mistake, and nothing in the kernels."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-cases-") as folder, ThreadPoolExecutor(len(TOOLS)) as pool:
        cases, start = Path(folder) / "small", time.monotonic()
        golden_cases.main(str(cases), *(("--few",) if where.DRY else ()))
        seconds = figures.seconds(TOOL_SECONDS) - (time.monotonic() - start) - SPARE_SECONDS
        seconds = min(max(seconds, TOOL_SECONDS), MOST_TOOL_SECONDS)
        running = {pool.submit(_sanitized, program, sanitizer, tool, cases, seconds): tool for tool in TOOLS}
        for done in as_completed(running):
            found[running[done]] = done.result()
            figures.put(**found)
    for tool, seen in found.items():
        print(f"{tool:10} {seen['outcome']}, {seen['seconds']} s", flush=True)
    return 0 if all(seen["outcome"] == "clean" for seen in found.values()) else 1


def _sanitized(program: Sequence[str], sanitizer: str, tool: str, cases: Path, limit: float) -> dict[str, Any]:
    """The outcome of one sanitizer, which ends in ``limit`` seconds."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *program]
    status, text, seconds = _watched([*command, "--plant", tool], PLANT_SECONDS)
    if status != FOUND:
        reason = f"blind here: it does not see a planted mistake (status {status})"
        return {"outcome": reason, "seconds": seconds, "output": text[-1500:]}
    status, text, more = _watched([*command, "--bare", str(cases)], limit - seconds)
    outcome = "clean" if status == 0 else "found something" if status == FOUND else f"failed with status {status}"
    return {"outcome": outcome, "seconds": round(seconds + more, 1)} | ({"output": text[-4000:]} if status else {})


def _watched(command: Sequence[str | Path], seconds: float) -> tuple[int | str, str, float]:
    """Status, output and seconds of a program, which is ended after ``seconds``."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        status: int | str
        try:
            status = process.wait(seconds * where.PATIENCE)
        except subprocess.TimeoutExpired:
            end_tree(process)
            status = f"none after {seconds:.0f} s"
        output.seek(0)
        return status, output.read(), round(time.monotonic() - start, 1)


def sanitizer_path() -> str:
    """The path of compute-sanitizer.

    Raises:
        FileNotFoundError: it is not installed.
    """
    places = [os.environ.get("CUDA_HOME", ""), str(Path(build.nvcc()[0]).resolve().parent.parent), "/usr/local/cuda"]
    paths = [shutil.which("compute-sanitizer"), *(f"{place}/bin/compute-sanitizer" for place in places)]
    paths += [f"{place}/compute-sanitizer/compute-sanitizer" for place in places]
    for path in paths:
        if path and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"no compute-sanitizer at {paths}: install the CUDA toolkit")


def program() -> list[str]:
    """The command that starts the driver here."""
    if not where.DRY:
        return [str(for_gpu())]
    import emulation

    return [str(for_emulation()), "--library", str(emulation.binary().path())]


def main(command: str) -> int:
    if command == "build":
        print(*program())
        return 0
    if command == "run":
        return run(program(), "small", *(() if where.DRY else ("large",)))
    assert command == "sanitize", f"got {command}, wanted is build, run or sanitize"
    if not where.DRY:
        return sanitize(program(), sanitizer_path())
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-dry-") as folder:
        stand_in = Path(folder) / "sanitizer"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        return sanitize(program(), str(stand_in))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
