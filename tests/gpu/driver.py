"""The stand-alone driver (driver.cu): built with nvcc for the GPU that is here, or for the emulation; run, and watched by sanitizers.

python tests/gpu/driver.py build | run | sanitize
"""

from __future__ import annotations

import contextlib
import hashlib
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
import wheels
import where
from places import TESTS
from step_runner import end_tree

from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import capabilities

HERE = Path(__file__).parent
#: Sanitizers; the cases that each watches, and options of the driver. Those that look at memory need an allocation for each buffer. Two
#: make a kernel a hundred times as slow, so that they get a few cases.
TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "memcheck": ("small", ("--bare",)),
    "racecheck": ("few", ()),
    "initcheck": ("few", ("--bare",)),
    "synccheck": ("small", ()),
}
#: Status of a sanitizer that found something. The driver has 0, 1 and 2. Outcome of one that found nothing.
FOUND, CLEAN = 9, "clean"
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
_FLAGS = ("-O3", "-std=c++17", "-diag-suppress=177,186", "--threads=0")
#: Of builds for the devices here: sanitizers name lines; the machine code is the same.
_LINES = ("-lineinfo",)


#: Programs and libraries: sources of the folders gpu and csrc, further flags.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "driver": (("gpu/driver.cu",), ()),
    "spin": (("gpu/spin.cu",), ("-shared", "-Xcompiler=-fPIC")),
}
FOLDERS = {"csrc": build.CSRC, "gpu": HERE}
#: Compute capabilities of the programs that travel with the wheels, and flags that make them small and let them run beside other libraries.
CARRIED = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
_TRAVELLING = (
    "-Xfatbin=-compress-all",
    "--compress-mode=size",
    "-Xcompiler=-static-libstdc++",
    "-Xcompiler=-static-libgcc",
)


def there(name: str) -> Path:
    """The program with the kernels in it: that of the wheels folder, else compiled unless it is there already (a minute and a half).

    Raises:
        BuildError: there is neither such a program nor nvcc, or nvcc failed; no device.
    """
    try:
        return carried(name)
    except build.BuildError as error:
        try:
            return compiled(name)
        except build.BuildError as failed:
            raise build.BuildError(f"{failed}; {error}") from None


def _digest() -> str:
    """A name for the sources."""
    digest = hashlib.sha256()
    for part in builds.contents(FOLDERS):
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def carried(name: str) -> Path:
    """The program of the wheels folder.

    Raises:
        BuildError: it is not there, or was made of other sources.
    """
    folder = os.environ.get(wheels.WHEELS, "")
    path = Path(folder) / f"zipccl_{name}_{_digest()}"
    if not folder or not path.is_file():
        others = [other.name for other in Path(folder).glob(f"zipccl_{name}_*")] if folder else []
        said = f"{others[0]} is of other sources, run it again" if others else "its folder is not here"
        raise build.BuildError(f"no {name} by `make gpu-wheels`: {said}")

    def make(target: Path) -> None:
        shutil.copyfile(path, target)
        target.chmod(0o755)

    return builds.kept(f"gpu_{name}", [path.read_bytes()], make)


def carry(folder: Path) -> None:
    """Put the programs into a folder that goes to a machine without nvcc; only says so where there is no nvcc here."""
    try:
        for name in PROGRAMS:
            target = folder / f"zipccl_{name}_{_digest()}"
            shutil.copy(compiled(name, CARRIED, _TRAVELLING), target)
            print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB", flush=True)
    except build.BuildError as error:
        print(f"without driver: {error}", flush=True)


def compiled(name: str, architectures: Sequence[str] = (), flags: Sequence[str] = _LINES) -> Path:
    """What nvcc makes of one of :data:`PROGRAMS` for the devices here, or for compute capabilities such as "9.0".

    Raises:
        BuildError: there is no nvcc or no device, or nvcc failed.
    """
    compiler, folders, (sources, more) = build.nvcc(), FOLDERS, PROGRAMS[name]
    flags = (*more, *flags)
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
                print(f"{name}: {status}", flush=True)
                late = isinstance(status, str) and status.startswith("late")
                return figures.SLOW if late else status if isinstance(status, int) and status else 2
    return 0


def sanitize(program: Sequence[str], sanitizer: str) -> int:
    """Run the driver under each sanitizer; 0 if each sees its planted mistake, and nothing in the kernels.

    :data:`figures.SLOW` if one saw nothing so far, and ran out of time.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-cases-") as folder, ThreadPoolExecutor(len(TOOLS)) as pool:
        start = time.monotonic()
        for size in ("few", "small"):
            golden_cases.main(str(Path(folder) / size), *SIZES["few" if where.DRY else size])
        seconds = figures.seconds(TOOL_SECONDS) - (time.monotonic() - start) - SPARE_SECONDS
        seconds = min(max(seconds, TOOL_SECONDS), MOST_TOOL_SECONDS)
        running = {pool.submit(_sanitized, program, sanitizer, tool, Path(folder), seconds): tool for tool in TOOLS}
        for done in as_completed(running):
            found[running[done]] = done.result()
            figures.put(**found)
    for tool, seen in found.items():
        print(f"{tool:10} {seen['outcome']}, {seen['seconds']} s", flush=True)
    bad = [seen for seen in found.values() if not seen["outcome"].startswith(CLEAN)]
    return 1 if bad else figures.SLOW if any(seen["outcome"] != CLEAN for seen in found.values()) else 0


def _sanitized(program: Sequence[str], sanitizer: str, tool: str, cases: Path, limit: float) -> dict[str, Any]:
    """The outcome of one sanitizer, which ends in ``limit`` seconds."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *program]
    status, text, seconds = _watched([*command, "--plant", tool], PLANT_SECONDS)
    if status != FOUND:
        reason = f"blind here: it does not see a planted mistake (status {status})"
        return {"outcome": reason, "seconds": seconds, "output": text[-1500:]}
    size, options = TOOLS[tool]
    status, text, more = _watched([*command, *options, str(cases / size)], limit - seconds)
    outcome = CLEAN if status == 0 else "found something" if status == FOUND else f"failed with status {status}"
    if isinstance(status, str):  # the sanitizers write what they see at once, behind a mark
        said = [line for line in text.splitlines() if line.startswith("=========") and "COMPUTE-SANITIZER" not in line]
        trials = sum(map(int, re.findall(r" (\d+) trials", text)))
        outcome = "found something" if said else f"{CLEAN} so far, {trials} trials"
    return {"outcome": outcome, "seconds": round(seconds + more, 1)} | ({"output": text[-4000:]} if status else {})


def _watched(command: Sequence[str | Path], seconds: float) -> tuple[int | str, str, float]:
    """Status, output and seconds of a program, which is ended after ``seconds``."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        grown, last = 0, start
        while (status := process.poll()) is None and time.monotonic() - start < seconds * where.PATIENCE:
            if (size := os.fstat(output.fileno()).st_size) > grown:
                grown, last = size, time.monotonic()
                figures.alive()
            time.sleep(0.02)
        if status is None:
            end_tree(process)
            status = figures.overdue(time.monotonic() - last, seconds)[1]
        output.seek(0)
        return status, output.read(), round(time.monotonic() - start, 1)


def sanitizer_path() -> str:
    """The path of compute-sanitizer.

    Raises:
        FileNotFoundError: it is not installed.
    """
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    with contextlib.suppress(build.BuildError):
        places.append(str(Path(build.nvcc()[0]).resolve().parent.parent))
    paths = [shutil.which("compute-sanitizer"), *(f"{place}/bin/compute-sanitizer" for place in places)]
    paths += [f"{place}/compute-sanitizer/compute-sanitizer" for place in places]
    for path in paths:
        if path and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError("no compute-sanitizer on PATH, in CUDA_HOME, beside nvcc or in /usr/local/cuda")


def program() -> list[str]:
    """The command that starts the driver here."""
    if not where.DRY:
        return [str(there("driver"))]
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
