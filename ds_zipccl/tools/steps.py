"""``steps``: how the ratio went over a training, from the files that ``"step_log"`` in its section names.

    steps run.jsonl --plot run.png

A row per file and role (also in ``--json``); every ratio is of all bytes of the role, coded or passed through:

* ``steps``: those in which the role sent anything. ``mean``, ``min``, ``max``: of their ratios.
* ``ratio``: all raw bytes / all wire bytes; ``first``, ``middle`` and ``last`` are the same over the first tenth of the
  steps, the last tenth, and the steps between.

Below, for each file: how many shards went as differences against the last step's, and why the others went in full.
A file may hold several runs, one after the other, as when a training goes on from a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_zipccl import stats
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

_BYTES = ("raw_bytes", "wire_bytes", "passed_bytes")
_MOST = 1 << 63  # a count above this is none
_RATIOS = ("mean", "min", "max", "ratio", "first", "middle", "last")


@dataclass(frozen=True)
class Step:
    """One line of a step log; ``sent`` maps a role to its counts in the order of the arguments of stats.ratio()."""

    step: int
    rates: tuple[float, ...]
    sent: Mapping[str, tuple[int, int, int]]
    differences: Mapping[str, int]

    def ratio(self, role: str) -> float | None:
        """The role's in this step; None where it sent nothing."""
        return stats.ratio(*self.sent[role]) if role in self.sent else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``steps``."""
    parser.add_argument("files", nargs="+", metavar="FILE", help='what "step_log" names in the section of a training')
    parser.add_argument("--from-step", type=int, default=0, metavar="A", help="leave out the steps before step A")
    parser.add_argument("--plot", metavar="PNG", help="draw ratios and learning rate over the steps (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")


def main(args: argparse.Namespace) -> int:
    """Run ``steps``; 0."""
    if args.plot:
        from ds_zipccl.tools import plot_steps  # before reading: matplotlib may be missing
    logs = {path: read(path, args.from_step) for path in args.files}
    columns = (Column("file", width=max(map(len, logs))), Column("role", width=10), Column("steps", ",d", 7))
    table, found = tables.Table((*columns, *(Column(name, ".3f", 7) for name in _RATIOS))), []
    for path, steps in logs.items():
        for row in rows(path, steps):
            table.add(row)
            found.append(row)
    reasons = {
        path: dict(sum((Counter(step.differences) for step in steps), Counter())) for path, steps in logs.items()
    }
    for path, counts in reasons.items():
        if counts:
            tables.say(f"{path}, shards: " + ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())))
    if args.json:
        tables.write_json(args.json, found, args.command, differences=reasons)
    if args.plot:
        plot_steps.save(args.plot, logs)
    return 0


def rows(path: str, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """One row per role of a log with at least one step."""
    tenth = max(1, len(steps) // 10)
    parts = {"ratio": steps, "first": steps[:tenth], "middle": steps[tenth:-tenth], "last": steps[-tenth:]}
    for role in sorted({role for step in steps for role in step.sent}):
        ratios = [ratio for step in steps if (ratio := step.ratio(role)) is not None]
        row = {"file": path, "role": role, "steps": len(ratios)}
        row |= {"mean": math.fsum(ratios) / len(ratios), "min": min(ratios), "max": max(ratios)}
        yield row | {name: _ratio_over(part, role) for name, part in parts.items()}


def _ratio_over(steps: Sequence[Step], role: str) -> float | None:
    """All raw bytes / all wire bytes; None where the role sent nothing."""
    counts = [step.sent[role] for step in steps if role in step.sent]
    return stats.ratio(*map(sum, zip(*counts, strict=True))) if counts else None


def read(path: str, first: int = 0) -> list[Step]:
    """The steps of a log from step ``first`` on, in the order of the file.

    Raises:
        ToolError: the file cannot be read, a line is not what a training writes, or there is no such step.
    """
    steps = []
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    steps.append(_parse(line))
                except (_Malformed, RecursionError) as error:
                    raise ToolError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error
    kept = [step for step in steps if step.step >= first]
    if not kept:
        last = f"the last of its {number} lines is step {steps[-1].step}" if steps else "it is empty"
        raise ToolError(f"{path} has no step from step {first} on: {last}")
    return kept


class _Malformed(ValueError):
    """A line is not what step_log.py describes; the message says what was got and what was wanted."""


def _parse(line: bytes) -> Step:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        hint = "remove the line if the training was killed in the middle of it"
        raise _Malformed(f"got {_short(line)}, wanted a JSON object; {hint}")
    rates = found.get("lr", [])
    if not isinstance(rates, list) or not all(type(rate) in (int, float) and abs(rate) < _MOST for rate in rates):
        raise _Malformed(f'"lr" is {_short(rates)}, wanted a list of finite numbers')
    sent = {role: _sent(role, counts) for role, counts in _object(found, "roles").items()}
    differences = _object(found, "differences")
    for reason in differences:
        _count(differences, reason)
    return Step(_count(found, "step"), tuple(map(float, rates)), sent, differences)


def _sent(role: str, counts: Any) -> tuple[int, int, int]:
    from ds_zipccl.config import ROLES

    if role not in ROLES:
        raise _Malformed(f"got the role {_short(role)}, wanted one of {', '.join(ROLES)}")
    if not isinstance(counts, dict):
        raise _Malformed(f'"{role}" is {_short(counts)}, wanted an object with {", ".join(_BYTES)}')
    raw, wire, passed = (_count(counts, key) for key in _BYTES)
    if counts.get("ratio") != stats.ratio(raw, wire, passed):
        raise _Malformed(
            f'"ratio" of {role} is {_short(counts.get("ratio"))}, its bytes give {stats.ratio(raw, wire, passed)}'
        )
    return raw, wire, passed


def _object(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    if not isinstance(value, dict) or not all(map(str.isprintable, value)):  # keys are shown on a terminal
        raise _Malformed(f'"{key}" is {_short(value)}, wanted an object with printable keys')
    return value


def _count(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value < _MOST:
        raise _Malformed(f'"{key}" is {_short(value)}, wanted an integer >= 0')
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
