"""``make size``: lines of source of each folder, its limit, the aim of the house that is being rebuilt, and the change against main.

Markdown and data are not counted. ``tests/test_floors.py`` enforces the limits. A feature that needs lines pays with a cut in its folder,
or moves the limit in the same commit, which says why; after a cut the limit follows.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".cpp", ".cu", ".cuh", ".h")


class Budget(NamedTuple):
    """``limit``: lines that the folder may have. ``aim``: lines that it shall have once the house is rebuilt."""

    limit: int
    aim: int


#: The folders that have one budget together, and its name.
TOGETHER = ("docs", "release", "examples")
SHARED = ", ".join(TOGETHER)
#: Folder -> its budget; the files of the folder itself are not those of a folder named beside it.
BUDGETS = {
    "ds_zipccl": Budget(1_525, 1_450),
    "ds_zipccl/cli": Budget(2_975, 2_800),
    "ds_zipccl/codecs": Budget(2_775, 2_900),
    "ds_zipccl/comm": Budget(10_811, 9_800),
    "ds_zipccl/csrc": Budget(9_940, 10_050),
    "ds_zipccl/integration": Budget(4_340, 3_700),
    "ds_zipccl/integration/fsdp": Budget(387, 450),
    "ds_zipccl/kernels": Budget(5_480, 5_200),
    "ds_zipccl/policy": Budget(1_798, 1_350),
    "ds_zipccl/sync": Budget(1_241, 1_250),
    "ds_zipccl/telemetry": Budget(804, 900),
    "ds_zipccl/tools": Budget(1_340, 1_450),
    "benchmarks": Budget(5_575, 5_300),
    SHARED: Budget(4_400, 4_400),
    "tests": Budget(57_945, 56_000),
}
#: Files of one folder of the package and of the benchmarks.
MAX_FILES = 14


def folder_of(path: str) -> str:
    """Return the folder of BUDGETS that counts a file, "" where none does."""
    if not path.endswith(SUFFIXES):
        return ""
    parts = path.split("/")
    if parts[:2] == ["benchmarks", "tests"]:
        return "tests"
    if parts[0] in TOGETHER:
        return SHARED
    names = ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((name for name in names if name in BUDGETS), "")


def lines() -> dict[str, int]:
    """Return the lines of each folder of BUDGETS."""
    found = dict.fromkeys(BUDGETS, 0)
    for top in ("ds_zipccl", "benchmarks", "tests", *TOGETHER):
        for path in (ROOT / top).rglob("*"):
            if folder := folder_of(path.relative_to(ROOT).as_posix()):
                found[folder] += len(path.read_bytes().splitlines())
    return found


def crowded(tops: Sequence[Path] = (ROOT / "ds_zipccl", ROOT / "benchmarks")) -> dict[str, int]:
    """Return the folders with more than MAX_FILES files of source, and their numbers of files."""
    files = [path for top in tops for path in top.rglob("*") if path.suffix in SUFFIXES and "tests" not in path.parts]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    return {name: count for name, count in sorted(counts.items()) if count > MAX_FILES}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def changes() -> dict[str, int]:
    """Return the lines that each folder has more than at the merge base with origin/main; empty where git does not know."""
    try:
        base = _git("merge-base", "HEAD", "origin/main").strip()
        rows = [line.split("\t") for line in _git("diff", "--numstat", "--no-renames", base).splitlines()]
    except (OSError, subprocess.SubprocessError):
        return {}
    found = dict.fromkeys(BUDGETS, 0)
    for added, removed, path in rows:
        if folder := folder_of(path):
            found[folder] += int(added) - int(removed)
    return found


def main() -> None:
    """Print the table."""
    now, change = lines(), changes()
    package = [name for name in BUDGETS if name.startswith("ds_zipccl")]
    print(f"{'folder':24}{'lines':>8}{'limit':>8}{'aim':>8}{'change':>8}")
    for name, names in [*((name, [name]) for name in BUDGETS), ("the package", package)]:
        limit, aim = (sum(BUDGETS[one][index] for one in names) for index in range(2))
        changed = f"{sum(change[one] for one in names):+}" if change else "-"
        print(f"{name:24}{sum(now[one] for one in names):8}{limit:8}{aim:8}{changed:>8}")


if __name__ == "__main__":
    main()
