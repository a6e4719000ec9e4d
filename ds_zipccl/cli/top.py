"""``top``: a live view of a training, from the file that ``"step_log"`` in the section of its config names.

    top run.jsonl

A row for each role. ``ratio``: all logical bytes / all wire bytes of the run so far, coded or passed through. The other columns are of the
last ``--last`` steps: ``now``: their ratio; ``mb_step``: 1e6 bytes on the wire of rank 0 per step; ``gbps``: 1e9 logical bytes per second
of training. The line above has the latest step, the seconds of a step, and the seconds that coding has saved, as far as trials have
measured them. A file may hold several runs, one after the other: the latest counts. Ctrl-C ends the view. Where stdout is no terminal, the
table is printed once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ds_zipccl.cli import ToolError, tables
from ds_zipccl.cli.step_logs import Malformed, Step, parse
from ds_zipccl.cli.tables import Column
from ds_zipccl.telemetry import counters

COLUMNS = (
    Column("role", width=10),
    *tables.alike("ratio now", ".3f", 8),
    Column("mb_step", ",.2f", 10),
    Column("gbps", ".3f", 8),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``top``."""
    option = parser.add_argument
    option("file", metavar="FILE", help='file that "step_log" names in the section of a training')
    option("--last", type=tables.count(1e6), default=20, metavar="K", help="steps that the latest figures cover (20)")
    option("--every", type=tables.positive, default=1.0, metavar="S", help="seconds between looks at the file (1)")


def main(args: argparse.Namespace) -> int:
    """Run ``top``; always 0."""
    run = Run(args.file, args.last)
    run.look()
    if not sys.stdout.isatty():
        if not run.steps:
            raise ToolError(
                f"{args.file} has no whole line of a step yet: start the training, or wait for its first step"
            )
        tables.say(run.title())
        tables.show(COLUMNS, run.rows())
        return 0
    try:
        from rich.live import Live
        from rich.table import Table
    except ImportError as error:
        raise ToolError(
            f"a live view needs rich ({error}): pip install rich, or print it once: top FILE | cat"
        ) from error

    def drawn() -> Table:
        table = Table(title=run.title(), title_justify="left")
        for column in COLUMNS:
            table.add_column(column.head, justify="right" if column.style else "left", min_width=column.width)
        for row in run.rows():
            table.add_row(*(column.text(row[column.key]) for column in COLUMNS))
        return table

    try:
        with Live(drawn(), auto_refresh=False) as live:
            while True:
                time.sleep(args.every)
                run.look()
                live.update(drawn(), refresh=True)
    except KeyboardInterrupt:
        return 0


class Run:
    """The latest run in the step log at ``path``: sums by role of all of it, and its ``last`` steps with the one before."""

    def __init__(self, path: str, last: int) -> None:
        self._path, self._at, self._rest, self._torn = path, 0, b"", 0
        self._sums: dict[str, tuple[int, ...]] = {}
        self.steps: deque[Step] = deque(maxlen=last + 1)

    def look(self) -> None:
        """Read the lines that the file has more than at the last look. A line without its end waits; a shorter file is a new one.

        Raises:
            ToolError: the file cannot be read.
        """
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at, self._rest, self._torn = 0, b"", 0
                    self._forget()
                file.seek(self._at)
                *lines, self._rest = (self._rest + file.read()).split(b"\n")
                self._at = file.tell()
        except OSError as error:
            raise ToolError(f"cannot read {self._path}: {error.strerror}") from error
        for line in lines:
            try:
                self._add(parse(line))
            except (Malformed, RecursionError):  # of a training that was killed in the middle of it
                self._torn += 1

    def _forget(self) -> None:
        self.steps.clear()
        self._sums.clear()

    def _add(self, step: Step) -> None:
        if self.steps and step.step <= self.steps[-1].step:
            self._forget()
        self.steps.append(step)
        for role, counts in step.parts().items():
            self._sums[role] = tuple(map(sum, zip(self._sums.get(role, (0, 0, 0)), counts)))

    def _recent(self) -> tuple[list[Step], float | None]:
        """The last steps that count, and the seconds that they took together, None where the file does not tell."""
        first, *later = self.steps
        if not later or first.time is None or later[-1].time is None:
            return later or [first], None
        return later, later[-1].time - first.time

    def title(self) -> str:
        """Return the line above the table."""
        if not self.steps:
            return f"{self._path}: no step yet"
        (steps, seconds), latest = self._recent(), self.steps[-1]
        said = [f"step {latest.step:,}"]
        said += [f"{seconds / len(steps):.3g} s per step"] if seconds is not None else []
        said += ["time saved: not measured" if latest.saved is None else f"{latest.saved:.3g} s saved"]
        said += [f"{self._torn} lines are not whole"] if self._torn else []
        return f"{self._path}: {', '.join(said)}"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each role and kind, columns as in ``top --help``."""
        if not self.steps:
            return
        steps, seconds = self._recent()
        for role, sums in sorted(self._sums.items()):
            logical, wire, passed = map(sum, zip((0, 0, 0), *(one.parts().get(role, (0, 0, 0)) for one in steps)))
            row = {"role": role, "ratio": counters.ratio(*sums), "now": counters.ratio(logical, wire, passed)}
            speed = (logical + passed) / seconds / 1e9 if seconds else None
            yield row | {"mb_step": (wire + passed) / len(steps) / 1e6, "gbps": speed}
