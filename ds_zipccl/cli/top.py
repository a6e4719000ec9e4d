"""``top``: a live view of a training, from the file that ``"step_log"`` in the section of its config names.

    top run.jsonl

A row for each role. ``ratio``: all logical bytes / all wire bytes of the run, coded or passed through. The other columns are of the last
``--last`` steps: ``now``: their ratio; ``mb_step``: 1e6 bytes per step on the wire of rank 0; ``gbps``: 1e9 logical bytes per second of
training. The first line has the latest step, the seconds of a step, and the seconds that coding has saved, as far as trials have measured
them. A file may hold several runs, one after the other: the latest counts. Ctrl-C ends the view. Where stdout is no terminal, the table is
printed once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator

from ds_zipccl.telemetry import counters
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.step_logs import Malformed, Step, parse
from ds_zipccl.tools.tables import Column

RATIOS = tables.alike("ratio now", "ratio", 8)
COLUMNS = (Column("role", width=15), *RATIOS, Column("gbps", ".3f", 8), Column("mb_step", ",.2f", 10))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``top``."""
    option = parser.add_argument
    option("file", metavar="FILE", help='file that "step_log" names in the section of a training')
    option("--last", type=tables.count(1e6), default=20, metavar="K", help="steps that the latest figures cover (20)")


def main(args: argparse.Namespace) -> int:
    """Run ``top``; always 0."""
    run = Run(args.file, args.last)
    run.look()
    if not sys.stdout.isatty():
        for line in run.lines():
            tables.say(line)
        return 0
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise ToolError(f"a live view needs rich ({error}): pip install rich, or use top FILE | cat") from error
    try:
        with Live(auto_refresh=False) as live:
            while True:
                live.update(Text("\n".join(run.lines()), no_wrap=True), refresh=True)
                time.sleep(1)
                run.look()
    except KeyboardInterrupt:
        return 0


class Run:
    """The latest run in the step log at ``path``: sums by role of all of it, and its ``last`` steps with the one before."""

    def __init__(self, path: str, last: int) -> None:
        self._path = path
        self.steps: deque[Step] = deque(maxlen=last + 1)
        self._begin()

    def _begin(self) -> None:
        self._at, self._rest, self._torn = 0, b"", 0
        self._sums: dict[str, tuple[int, ...]] = {}
        self.steps.clear()

    def look(self) -> None:
        """Read what the file has more than at the last look. A line without its end waits; a shorter file is a new one.

        Raises:
            ToolError: the file cannot be read.
        """
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._at:
                    self._begin()
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

    def _add(self, step: Step) -> None:
        if self.steps and step.step <= self.steps[-1].step:  # another run
            self.steps.clear()
            self._sums.clear()
        self.steps.append(step)
        for role, counts in step.parts().items():
            self._sums[role] = tuple(map(sum, zip(self._sums.get(role, (0, 0, 0)), counts)))

    def lines(self) -> Iterator[str]:
        """Yield the first line, and the table as ``top --help`` has it."""
        if not self.steps:
            yield f"{self._path}: no whole line of a step yet"
            return
        first, latest = self.steps[0], self.steps[-1]
        steps = list(self.steps)[1:] or [first]  # a time is that of the end of a step
        seconds = latest.time - first.time if latest.time and first.time else 0.0
        saved = "time saved: not measured" if latest.saved is None else f"{latest.saved:.3g} s saved"
        said = [f"step {latest.step:,}", saved]
        said += [f"{seconds / len(steps):.3g} s per step"] if seconds else []
        said += [f"lines that are not whole: {self._torn}"] if self._torn else []
        yield f"{self._path}: {', '.join(said)}"
        yield tables.aligned(COLUMNS)
        for role, sums in sorted(self._sums.items()):
            logical, wire, passed = (sum(one.parts().get(role, (0, 0, 0))[at] for one in steps) for at in range(3))
            row = {"role": role, "ratio": counters.ratio(*sums), "now": counters.ratio(logical, wire, passed)}
            speed = (logical + passed) / seconds / 1e9 if seconds else None
            row |= {"gbps": speed, "mb_step": (wire + passed) / len(steps) / 1e6}
            yield tables.aligned(COLUMNS, row)
