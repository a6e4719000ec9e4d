"""Run a core set of tests with many versions of Python, torch, DeepSpeed and numpy: `make matrix`.

Each row is a new environment, made by uv and removed after its tests. A row that does not install has the reason of the
installer. Rows measured with the same sources are kept. The program needs a network and 25 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

ROOT = Path(__file__).resolve().parent.parent

#: A release of each minor version, the newest last.
TORCH = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
DEEPSPEED = ("0.18.0", "0.18.9", "0.19.0", "0.19.8")
PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: "": the newest numpy that the packages of the row allow. 1.26.4: the last numpy 1.
NUMPY = ("", "1.26.4")
#: Python and torch of development. Except for the corners, rows differ from these and the newest DeepSpeed in one.
USUAL_PYTHON, USUAL_TORCH = "3.11", "2.13.0"

#: Group -> its tests. A test file belongs to one group. A test trains plain and coded, or compares with golden frames.
GROUPS: dict[str, tuple[str, ...]] = {
    "bits": ("tests/codec/test_golden.py::test_golden_frame", "tests/comm/test_moves.py::test_every_bit_arrives"),
    "ZeRO-1, ZeRO-2": tuple(
        f"tests/integration/test_engines.py::{name}[2-coded-{case}]"
        for name in ("test_plain_and_coded_agree", "test_training_moves")
        for case in ("zero1", "zero2")
    ),
    "ZeRO-3": tuple(
        f"tests/integration/test_bases_of_engines.py::test_every_route_has_the_bits_of_plain_deepspeed[gloo-{base}-{route}]"
        for base in ("auto", "host")
        for route in ("optimizer steps", "gathered, rank 0 writes", "rolled back", "no optimizer")
    ),
    "MoE": ("tests/integration/test_moe.py::test_always_has_the_bits_of_plain_runs[2-top-2]",),
    "HF Trainer, Accelerate": ("tests/integration/test_hf.py",),
}
#: pytest -k: without kernels that compile for minutes and depend only on numba's version.
LEFT_OUT = "not numba and not emulated"
#: Text of a failure in which plain DeepSpeed failed (tests/support/programs.py).
PLAIN = "without ds_zipccl"
#: Packages of the tests, in addition to those of the row and the requirements of ds_zipccl.
TESTED_WITH = ("transformers", "accelerate", "peft", "pytest", "pytest-rerunfailures", "pytest-timeout", "hypothesis")
#: Timeouts in seconds of an installation and of the core set.
INSTALL_SECONDS, TEST_SECONDS = 1200.0, 900.0
#: Size in bytes above which uv's cache is deleted after a row.
CACHE_BYTES = 20 * 10**9

#: Program that prints the versions of an environment, and the hooks that do not fit.
PROBE = """
import importlib.metadata, json, platform
import torch
from ds_zipccl.cli.doctor_ranks import hooks_found
from ds_zipccl.integration.autoload import ADJUSTED, OPTIONAL
names = ("torch", "deepspeed", "numpy", "transformers", "accelerate", "peft", "numba")
versions = {name: importlib.metadata.version(name) for name in names}
hooks = {name: problem for name, problem in hooks_found().items() if problem}
broken = [f"{name} is {hooks[name]}" for name in (*ADJUSTED, *OPTIONAL) if hooks.get(name, "absent") != "absent"]
print(json.dumps({"versions": {"python": platform.python_version(), **versions}, "hooks": hooks, "reason": "; ".join(broken)}))
"""


@dataclass(frozen=True)
class Row:
    """The versions of an environment; ``numpy`` "" means the newest that fits."""

    python: str
    torch: str
    deepspeed: str
    numpy: str = ""

    @property
    def name(self) -> str:
        """Name of the row for ``--only`` and in the JSON file."""
        return "-".join(filter(None, (self.python, self.torch, self.deepspeed, self.numpy)))

    @property
    def pins(self) -> tuple[str, ...]:
        numpy = f"numpy=={self.numpy}" if self.numpy else "numpy"
        return f"torch=={self.torch}", f"deepspeed=={self.deepspeed}", numpy


def table() -> list[Row]:
    """Return the rows: corners first, then each version of each package."""
    newest = DEEPSPEED[-1]
    rows = [
        Row(USUAL_PYTHON, USUAL_TORCH, DEEPSPEED[0]),
        Row(PYTHON[0], TORCH[0], DEEPSPEED[0], NUMPY[-1]),
        Row("3.13", TORCH[-1], newest),
        *(Row(USUAL_PYTHON, USUAL_TORCH, version) for version in reversed(DEEPSPEED)),
        *(Row(python, USUAL_TORCH, newest) for python in PYTHON),
        *(Row(USUAL_PYTHON, USUAL_TORCH, newest, numpy) for numpy in NUMPY),
        *(Row(USUAL_PYTHON, version, newest) for version in TORCH),
    ]
    return list(dict.fromkeys(rows))


@dataclass(frozen=True)
class Done:
    """Exit status of a command, 124 after a timeout, and its outputs."""

    status: int
    stdout: str
    stderr: str


#: (command, timeout in seconds, added environment variables) -> result.
Runner = Callable[[Sequence[str], float, Mapping[str, str]], Done]


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
    """Run a command in the root of the repository; blocks until it ends, at most ``seconds``."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DS_ZIPCCL")}
    try:
        found = subprocess.run(
            command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Done(124, "", f"{command[0]} did not end within {seconds:.0f} s")
    return Done(found.returncode, found.stdout, found.stderr)


def measure(row: Row, folder: Path, interpreter: str, runner: Runner = run) -> dict[str, Any]:
    """Install the environment of a row in ``folder``, run the core set in it, and return its results. Blocks.

    Args:
        interpreter: version or path, for uv.
    """
    began = time.monotonic()
    asked = {"python": row.python, "torch": row.torch, "deepspeed": row.deepspeed, "numpy": row.numpy or "newest"}
    found: dict[str, Any] = {"name": row.name, "asked": asked, "sources": sources(), "groups": {}, "hooks": {}}
    environment = {
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
        "UV_CACHE_DIR": str(folder / "uv"),
        "DS_ZIPCCL_CACHE": str(folder / "builds"),
        "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    python = str(folder / "venv" / "bin" / "python")
    try:
        reason = install(row, folder / "venv", interpreter, lambda *words: runner(words, INSTALL_SECONDS, environment))
        if reason:
            return found | {"outcome": "not installed", "reason": reason, "seconds": round(time.monotonic() - began)}
        probe = runner((python, "-c", PROBE), TEST_SECONDS, environment)
        if probe.status:
            found |= {"reason": f"ds_zipccl: {last_line(probe)}"}
        else:
            found |= json.loads(probe.stdout.splitlines()[-1])
        tests = [test for some in GROUPS.values() for test in some]
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        options = "-q -p no:cacheprovider --need-deepspeed --continue-on-collection-errors -k".split()
        words = (python, "-m", "pytest", *options, LEFT_OUT, f"--junitxml={report}", *tests)
        ended = runner(words, TEST_SECONDS, environment)
        found["groups"] = counted(report.read_text() if report.exists() else "")
    finally:
        shutil.rmtree(folder / "venv", ignore_errors=True)
    if not found.get("reason") and not green(found["groups"]):
        found["reason"] = next(
            (f"{name}: {one['first']}" for name, one in found["groups"].items() if one["first"]),
            f"the core set: {last_line(ended)}",
        )
    outcome = "red" if found.get("reason") else "green"
    return found | {"outcome": outcome, "seconds": round(time.monotonic() - began)}


def install(row: Row, venv: Path, interpreter: str, call: Callable[..., Done]) -> str:
    """Make the environment of a row; return "" or the reason of the failure.

    torch comes first: the setup of DeepSpeed imports it.
    """
    uv = (sys.executable, "-m", "uv")
    shutil.rmtree(venv, ignore_errors=True)
    into = (*uv, "pip", "install", "-q", "-p", str(venv / "bin" / "python"))
    steps = (
        (*uv, "venv", "-q", "-p", interpreter, str(venv)),
        (*into, row.pins[0], row.pins[-1], "setuptools", "wheel"),
        (*into, "--no-build-isolation-package", "deepspeed", *row.pins, "-e", str(ROOT), *TESTED_WITH),
    )
    return next((last_line(done) for done in map(lambda step: call(*step), steps) if done.status), "")


_FRAMES = " \u2502\u251c\u2570\u2500\u25b6\u00d7"  # decorations in messages of uv


def last_line(done: Done) -> str:
    """Return the end of a failed command's output as one line of at most 300 characters."""
    lines = [line.strip(_FRAMES) for line in (done.stderr.strip() or done.stdout.strip()).splitlines()]
    text = " ".join(filter(None, lines[-6:] if "No solution" in done.stderr else lines[-1:]))
    return text[:300] or f"exit status {done.status} without output"


def counted(report: str) -> dict[str, dict[str, Any]]:
    """Return passed, failed, skipped, seconds and first failure of each group from a JUnit report of pytest."""
    groups: dict[str, dict[str, Any]] = {
        name: {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "first": ""} for name in GROUPS
    }
    places = {test.partition("::")[0]: name for name, tests in GROUPS.items() for test in tests}
    for case in ElementTree.fromstring(report).iter("testcase") if report else ():
        where = (case.get("classname") or case.get("name") or "").replace(".", "/") + ".py"
        one = groups[places[where]]
        bad = [*case.findall("failure"), *case.findall("error")]
        outcome = "failed" if bad else "skipped" if case.findall("skipped") else "passed"
        one[outcome] += 1
        one["seconds"] = round(one["seconds"] + float(case.get("time", 0)), 1)
        if bad and not one["first"]:
            one["first"] = f"{case.get('name')}: {failure(bad[0])}"
    return groups


def failure(element: ElementTree.Element) -> str:
    """Return the line that names the error: that of the first failed rank, otherwise the last error line of pytest.

    :data:`PLAIN` precedes the line if the run without ds_zipccl, the baseline of the test, failed.
    """
    lines = [line.removeprefix("E ").strip() for line in (element.text or "").splitlines() if line.startswith("E ")]
    ranks = [line for line in lines if line.startswith("[rank") and "Error" in line.partition("]:")[2].split(":")[0]]
    message = (element.get("message") or "").strip().splitlines()
    said: str = (ranks[:1] or lines[-1:] or message or ["no message"])[0][:300]
    plain = any(f"{PLAIN}: rank" in line for line in lines) and PLAIN not in said
    return f"{PLAIN}: {said}" if plain else said


def green(groups: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether every group passed, with at least one test that was not skipped."""
    return bool(groups) and all(one["passed"] and not one["failed"] for one in groups.values())


def sources() -> str:
    """Return a short hash of the package and of this folder; rows of the same hash are kept."""
    return results.sources(("ds_zipccl", "release"))


def wanted(rows: Iterable[Row], before: Sequence[Mapping[str, Any]], only: Sequence[str], again: bool) -> list[Row]:
    """Return the rows to measure: rows of ``only``, without those measured with these sources unless ``again``."""
    now = sources()
    kept = set() if again else {one["name"] for one in before if one["sources"] == now}
    return [row for row in rows if row.name not in kept and (not only or any(part in row.name for part in only))]


def merged(before: Iterable[Mapping[str, Any]], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the results with a new or replaced row, in the order of the table."""
    found = {one["name"]: dict(one) for one in (*before, new)}
    return [found[row.name] for row in table() if row.name in found]


def spans(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the oldest and the newest installed version of each package, such as "2.6.0 to 2.15.0"."""
    found = {}
    for package in ("python", "torch", "deepspeed", "numpy"):
        versions = {str(row["versions"][package]).partition("+")[0] for row in rows if "versions" in row}
        ordered = sorted(versions, key=lambda one: [int(part) for part in one.split(".")])
        found[package] = " to ".join(dict.fromkeys((*ordered[:1], *ordered[-1:])))
    return found


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """Return an interpreter per version of Python: one of ``given``, or the version, for uv to find."""
    found = {}
    for path in given:
        words = (path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        found[subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()] = path
    return {version: found.get(version, version) for version in PYTHON}


def shrink(cache: Path) -> None:
    """Delete uv's cache if it is larger than :data:`CACHE_BYTES`."""
    sizes = (os.lstat(Path(folder, name)).st_size for folder, _, names in os.walk(cache) for name in names)
    if sum(sizes) > CACHE_BYTES:
        shutil.rmtree(cache)


def main() -> None:
    from ds_zipccl import __version__
    from ds_zipccl.tools import tables

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PART", help="rows whose names contain one of these parts"
    )
    parser.add_argument(
        "--pythons", nargs="+", default=(), metavar="PATH", help="interpreters (default: uv finds them)"
    )
    parser.add_argument("--json", default="docs/results/matrix.json", help="results, written after every row")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix", help="folder for environments")
    parser.add_argument("--again", action="store_true", help="also measure rows that have results of these sources")
    parser.add_argument("--list", action="store_true", help="print the names of the rows to measure, and stop")
    options = parser.parse_args()
    place = Path(options.json)
    rows: list[dict[str, Any]] = json.loads(place.read_text())["rows"] if place.exists() else []
    todo = wanted(table(), rows, options.only, options.again)
    if options.list:
        return print("\n".join(row.name for row in todo))
    options.folder.mkdir(parents=True, exist_ok=True)
    pythons = interpreters(options.pythons)
    command = shlex.join(("python", "release/matrix.py", *(("--json", options.json) if options.json else ())))
    for number, row in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {row.name} ...", flush=True)
        new = measure(row, options.folder.resolve(), pythons[row.python])
        rows = merged(rows, new)
        tables.write_json(options.json, rows, command, versions={"ds_zipccl": __version__} | spans(rows))
        counts = ", ".join(f"{name} {one['passed']}/{one['failed']}" for name, one in new["groups"].items())
        print(f"    {new['outcome']} after {new['seconds']} s: {new.get('reason') or counts}", flush=True)
        shrink(options.folder / "uv")
    if any(row["outcome"] == "red" for row in rows):
        raise SystemExit("some rows are red; their reasons are in the results")


if __name__ == "__main__":
    main()
