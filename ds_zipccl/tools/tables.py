"""Output of every command: aligned rows on stdout, progress on stderr, and the same rows as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

import ds_zipccl
from ds_zipccl.telemetry.counters import ratio_text
from ds_zipccl.tools import ToolError

T = TypeVar("T")

#: Packages on whose versions figures depend.
PACKAGES = ("torch", "deepspeed", "numpy", "numba", "safetensors")
#: Options that name files to write.
OUTPUTS = ("json", "plot", "report")


@dataclass(frozen=True)
class Column:
    """One column: ``key`` of the row, ``style`` as in ``format()``, or "ratio", least ``width``. Text is aligned left, figures right."""

    key: str
    style: str = ""
    width: int = 0

    def text(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{key}:{count}" for key, count in value.items()) or "-"
        return "-" if value is None else ratio_text(value) if self.style == "ratio" else format(value, self.style)

    def align(self, text: str) -> str:
        width = max(self.width, len(self.key))
        return text.rjust(width) if self.style else text.ljust(width)


def alike(keys: str, style: str, width: int = 0) -> tuple[Column, ...]:
    """Columns of one style and width; ``keys``: separated by spaces."""
    return tuple(Column(key, style, width) for key in keys.split())


def aligned(columns: Sequence[Column], row: Mapping[str, Any] | None = None) -> str:
    """Return the line of a row, without one the line of the heads. Keys without a column are left out. None and {} show as "-"."""
    cells = (column.align(column.key if row is None else column.text(row[column.key])) for column in columns)
    return " ".join(cells).rstrip()


class Table:
    """A table that prints each row at once; the widths of its columns are therefore fixed in advance."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._begun = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Print ``row``, see :func:`aligned`."""
        if not self._begun:
            self._begun = True
            say(aligned(self._columns))
        say(aligned(self._columns, row))


def show(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows as a table, each at once, and return them."""
    table, shown = Table(columns), []
    for row in rows:
        table.add(row)
        shown.append(row)
    return shown


def say(line: str = "") -> None:
    """Print a line on stdout, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def complain(line: str) -> None:
    """Print a line on stderr, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)


def progress(items: Iterable[T], label: str, total: int | None = None) -> tqdm[T]:
    """``items`` with a bar on stderr, if stderr is a terminal. The bar is there before the first item, which may take long."""
    return tqdm(items, desc=label, total=total, leave=False, disable=None, file=sys.stderr)


def version(package: str) -> str:
    """Installed version of a package, or "not installed"; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of this package, Python and :data:`PACKAGES`, for a results file."""
    found = {"ds_zipccl": ds_zipccl.__version__, "python": platform.python_version()}
    return found | {package: version(package) for package in PACKAGES}


def machine() -> dict[str, Any]:
    """Host description for a results file: system, processor, number of processors that this process may use, memory in bytes."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    memory = pages * os.sysconf("SC_PAGE_SIZE") if pages else None
    processor = {"processor": _processor(), "processors": usable}
    return {"system": platform.platform(), **processor, "memory_bytes": memory}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _number(text: str) -> float:
    """The number that a text is; NaN where it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A finite number above 0 (argparse type)."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0; write 7e9 or 420")
    return value


def count(most: float) -> Callable[[str], int]:
    """The argparse type of a number from 1 to ``most``, such as 70e9."""

    def parsed(text: str) -> int:
        value = _number(text)
        if not 1 <= value <= most or value != int(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:g}; write 1024 or 70e9")
        return int(value)

    return parsed


def check_outputs(args: argparse.Namespace) -> None:
    """Check the files that a command is to write, by :data:`OUTPUTS`, before it measures. Existing files stay as they are.

    Raises:
        ToolError: one cannot be written, or two are one file.
    """
    paths = {f"--{name}": path for name in OUTPUTS if (path := getattr(args, name, None)) is not None}
    if len(set(map(os.path.realpath, paths.values()))) < len(paths):
        raise ToolError(f"two of {' '.join(paths)} are one file, {next(iter(paths.values()))}; name another")
    if os.environ.get("RANK", "0") != "0":
        return  # rank 0 of a launcher writes, maybe on another machine
    for path in map(os.path.realpath, paths.values()):  # of a link the file that it is to be
        there = os.path.exists(path)
        if there and not os.path.isfile(path) and not os.path.isdir(path):
            continue  # a pipe or a terminal: to open it may wait
        try:
            open(path, "ab").close()
        except OSError as error:
            raise ToolError(f"cannot write {path}: {error.strerror}") from error
        if not there:
            os.unlink(path)


def write_json(path: str, rows: Sequence[Mapping[str, Any]], command: str, **more: Any) -> None:
    """Write ``{"rows": rows, "date", "machine", "versions", "command", **more}``; ``date`` is the day in UTC, ``command`` as one types it.

    Raises:
        ToolError: the file cannot be written.
    """
    date = datetime.now(timezone.utc).date().isoformat()
    known = {"date": date, "machine": machine(), "versions": versions(), "command": command}
    try:
        Path(path).write_text(json.dumps({"rows": list(rows)} | known | more, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}") from error


def read_json(path: str, what: str = "") -> dict[str, Any]:
    """Content of a JSON file. ``what``: it is, followed by a space.

    Raises:
        ToolError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"cannot read {what}{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict):
        raise ToolError(f"cannot use {what}{path}: it holds a {type(content).__name__}, wanted is a JSON object")
    return content
