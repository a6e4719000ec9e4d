"""Measure all files of docs/results again with the present sources: `make results`. Takes hours; a new start resumes.

Every file of docs/results has the command that wrote it, which is run again. The file gets the commit and a hash of the
sources, and is skipped while the hash is the same. Files that this machine cannot measure are named with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]

#: Folders with files that affect figures.
SOURCES = ("ds_zipccl", "benchmarks", "examples", "op_builder")
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".json")
#: Endings of files that commands read -> the target of make that writes these files.
INPUTS = {".safetensors": "corpus", ".jsonl": "step-logs"}


def sources(folders: Iterable[str] = SOURCES) -> str:
    """Return a short hash of everything in ``folders`` that affects figures: Python without comments and docstrings."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and "tests" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + _code(path))
    return digest.hexdigest()[:12]


def _code(path: Path) -> bytes:
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        match body := getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant()), *_]:
                del body[0]
    return ast.dump(tree).encode()


def why_not(name: str, content: Mapping[str, Any], words: list[str]) -> str:
    """Return why this program does not measure a file here; "" if it does."""
    if "device" in content and name != "gpu":
        return "`make gpu` writes it"
    if name == "gpu" and not shutil.which("nvidia-smi"):
        return "needs a GPU"
    if "--json" in words and Path(words[words.index("--json") + 1]) != Path("docs/results", f"{name}.json"):
        return "kept for comparison: its command writes another file"
    if "--json" not in words and words[0] != "make":
        return "recorded by hand: its command writes no file"
    links = words[words.index("--link") + 1 :] if "--link" in words else []
    if any("bit" in word for word in links) and os.geteuid():
        return "shapes links: needs root"
    return ""


def commit() -> str:
    """Return the commit of HEAD, with "-dirty" if sources differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *(f":/{folder}" for folder in SOURCES))
    return git("rev-parse", "--short=12", "HEAD") + "-dirty" * bool(changed)


def measure(path: Path, words: list[str]) -> str:
    """Run the command of a file and add commit and sources to the file; blocks. A command that breaks off leaves it unchanged.

    Returns:
        The problem; "" after success.
    """
    before, state = path.read_bytes(), sources()
    programs = {"python": [sys.executable], "make": ["make", f"VENV={Path(sys.executable).parent.parent}"]}
    inputs = [target for ending, target in INPUTS.items() if any(word.endswith(ending) for word in words)]
    began = time.time_ns()
    status = subprocess.run([*programs["make"], *inputs], cwd=ROOT).returncode if inputs else 0
    status = status or subprocess.run([*programs[words[0]], *words[1:]], cwd=ROOT).returncode
    made: dict[str, Any] = {}
    if path.stat().st_mtime_ns >= began:
        with contextlib.suppress(ValueError):  # a command that was killed may leave half a file
            made = json.loads(path.read_bytes())
    rows, were = len(made.get("rows", ())), len(json.loads(before)["rows"])
    if not made or (status and rows < were):
        path.write_bytes(before)
        return f"status {status}" if status else "its command did not write the file"
    if sources() != state:
        path.write_bytes(before)
        return "the sources changed during the measurement"
    path.write_text(json.dumps(made | {"commit": commit(), "sources": state}, indent=1) + "\n")
    if rows < were:
        print(f"{path.stem} has {rows} rows, before {were}: is a package missing?", flush=True)
    if status:  # a check of the figures failed: to measure until it passes would choose figures
        print(f"{path.stem} is new, though its command ended with status {status}: its output says why", flush=True)
    return ""


def main(given: Iterable[str] | None = None) -> int:
    """Measure the files that are older than the sources.

    Returns:
        Exit status: 1 if a command failed, otherwise 0.
    """
    from measured import results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of docs/results without .json (default: all)")
    parser.add_argument("--list", action="store_true", help="list the files that are older than the sources, and stop")
    options = parser.parse_args(None if given is None else list(given))
    paths = sorted(path for path in RESULTS.glob("*.json") if not options.names or path.stem in options.names)
    if unknown := set(options.names) - {path.stem for path in paths}:
        parser.error(f"docs/results has no {', '.join(sorted(unknown))}")
    todo, state, failed = [], sources(), []
    for path in paths:
        content = results(path.stem)
        words = shlex.split(content["command"])
        reason = (
            "measured with these sources" if content.get("sources") == state else why_not(path.stem, content, words)
        )
        if reason:
            print(f"{path.stem}: skipped, {reason}", flush=True)
        else:
            todo.append((path, words))
    for number, (path, words) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {path.stem}: {shlex.join(words)}", flush=True)
        if options.list:
            continue
        began = time.monotonic()
        problem = measure(path, words)
        print(f"[{number}/{len(todo)}] {path.stem}: {problem or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [path.stem] if problem else []
    if failed:
        print(f"failed and left unchanged: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
