"""``steps``: ratios over a training, from the files that ``"step_log"`` in the section of its config names.

    steps run.jsonl --plot run.png

A row per file and role (also in ``--json``); the exchanges of experts have rows by kind too, such as ``ep dispatch``, which are parts of
the row ``ep``. Every ratio is of all bytes of the role, coded or passed through:

* ``steps``: number of steps in which the role sent bytes. ``mean``, ``min``, ``max``: of their ratios.
* ``ratio``: all logical / all wire bytes. ``first``, ``middle``, ``last``: of the first tenth of the steps, the middle, the last tenth.

A line for each file has the number of shards that went as differences from the last step, and the reasons of those that went in full.
A file may hold several runs, one after the other, as when a training resumes from a checkpoint.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ds_zipccl.telemetry import counters
from ds_zipccl.tools import tables
from ds_zipccl.tools.step_logs import Step, read
from ds_zipccl.tools.tables import Column

_RATIOS = "mean min max ratio first middle last"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``steps``."""
    option = parser.add_argument
    option("files", nargs="+", metavar="FILE", help='file that "step_log" names in the section of a training')
    option("--from-step", type=int, default=0, metavar="A", help="first step that counts (0)")
    option("--plot", metavar="PNG", help="draw ratios and learning rate over the steps (needs matplotlib)")
    option("--json", metavar="FILE", help="write the rows here too")


def main(args: argparse.Namespace) -> int:
    """Run ``steps``; always 0."""
    if args.plot:
        from ds_zipccl.tools import plots  # before reading: matplotlib may be missing
    logs = {path: read(path, args.from_step) for path in args.files}
    columns = (Column("file", width=max(map(len, logs))), Column("role", width=15), Column("steps", ",d", 7))
    every = (row for path, steps in logs.items() for row in rows(path, steps))
    found = tables.show((*columns, *tables.alike(_RATIOS, "ratio", 8)), every)
    counted = {path: (Counter(step.differences) for step in steps) for path, steps in logs.items()}
    reasons = {path: dict(sum(counts, Counter())) for path, counts in counted.items()}
    for path, counts in reasons.items():
        if counts:
            tables.say(f"{path}, shards: " + ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())))
    if args.json:
        tables.write_json(args.json, found, args.command, differences=reasons)
    if args.plot:
        plots.ratios(args.plot, logs)
    return 0


def rows(path: str, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """One row per role, and per kind of expert exchange, of a log with at least one step."""
    tenth = max(1, len(steps) // 10)
    parts = {"ratio": steps, "first": steps[:tenth], "middle": steps[tenth:-tenth], "last": steps[-tenth:]}
    for role in sorted({role for step in steps for role in step.parts()}):
        ratios = [ratio for step in steps if (ratio := step.ratio(role)) is not None]
        row = {"file": path, "role": role, "steps": len(ratios)}
        row |= {"mean": math.fsum(ratios) / len(ratios), "min": min(ratios), "max": max(ratios)}
        for name, part in parts.items():
            counts = [sent[role] for step in part if role in (sent := step.parts())]
            row[name] = counters.ratio(*map(sum, zip(*counts, strict=True))) if counts else None
        yield row
