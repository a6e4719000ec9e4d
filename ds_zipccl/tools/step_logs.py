"""Reads and checks step logs, the files that :mod:`ds_zipccl.telemetry.step_log` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_zipccl.telemetry import counters
from ds_zipccl.tools import ToolError

#: Role of the exchanges that have kinds.
EXPERTS = "ep"
_BYTES = ("logical_bytes", "wire_bytes", "passed_bytes")
_MOST = 1 << 63  # a larger number is no count


@dataclass(frozen=True)
class Step:
    """One line of a step log. ``sent``: role -> its counts, in the order of the arguments of counters.ratio(). ``kinds``: the same of
    the kinds, such as "ep dispatch", which are in those of their role too. ``time``: in seconds since 1970; ``saved``: seconds saved since
    the start of the job; None where the line does not tell."""

    step: int
    rates: tuple[float, ...]
    sent: Mapping[str, tuple[int, int, int]]
    differences: Mapping[str, int]
    kinds: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    time: float | None = None
    saved: float | None = None

    def parts(self) -> dict[str, tuple[int, int, int]]:
        """Counts of the roles, and of the kinds, such as "ep dispatch"."""
        return {**self.sent, **self.kinds}

    def ratio(self, part: str) -> float | None:
        """Ratio of a part, see :meth:`parts`, in this step; None if the part sent nothing."""
        counts = self.parts().get(part)
        return None if counts is None else counters.ratio(*counts)


def read(path: str, first: int = 0) -> list[Step]:
    """Steps of a log from step ``first`` on, in the order of the file.

    Raises:
        ToolError: the file cannot be read, no training writes such a line, or there is no such step.
    """
    steps, number = [], 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    steps.append(parse(line))
                except (Malformed, RecursionError) as error:
                    raise ToolError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error
    kept = [step for step in steps if step.step >= first]
    if not kept:
        last = f"the last of its {number} lines is step {steps[-1].step}" if steps else "it is empty"
        raise ToolError(f"{path} has no step from step {first} on: {last}")
    return kept


class Malformed(ValueError):
    """step_log.py writes no such line; the message says what was got and what was wanted."""


def parse(line: bytes) -> Step:
    """Return the step of a line.

    Raises:
        Malformed, RecursionError: no training writes such a line.
    """
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        hint = "remove the line if the training was killed in the middle of it"
        raise Malformed(f"got {_short(line)}, wanted a JSON object; {hint}")
    rates = found.get("lr", [])
    if not isinstance(rates, list) or not all(map(_number, rates)):
        raise Malformed(f'"lr" is {_short(rates)}, wanted a list of finite numbers')
    from ds_zipccl.config import ROLES

    sent = {}
    for role, counts in _object(found, "roles").items():
        if role not in ROLES:
            raise Malformed(f"got the role {_short(role)}, wanted one of {', '.join(ROLES)}")
        sent[role] = _sent(role, counts)
    kinds = {kind: _sent(kind, counts) for kind, counts in _object({"kinds": {}} | found, "kinds").items()}
    differences = _object(found, "differences")
    for reason in differences:
        _count(differences, reason)
    clocks = [found.get(key) for key in ("time", "seconds_saved")]
    if not all(value is None or _number(value) for value in clocks):
        raise Malformed(f'"time" and "seconds_saved" are {_short(clocks)}, wanted finite numbers')
    return Step(_count(found, "step"), tuple(map(float, rates)), sent, differences, kinds, *clocks)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST


def _sent(role: str, counts: Any) -> tuple[int, int, int]:
    """Logical, wire and passed bytes of a role or a kind."""
    if not isinstance(counts, dict):
        raise Malformed(f'"{role}" is {_short(counts)}, wanted an object with {", ".join(_BYTES)}')
    logical, wire, passed = (_count(counts, key) for key in _BYTES)
    ratio = counters.ratio(logical, wire, passed)
    if counts.get("ratio") != ratio:
        raise Malformed(f'"ratio" of {role} is {_short(counts.get("ratio"))}, its bytes give {ratio}')
    return logical, wire, passed


def _object(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    if not isinstance(value, dict) or not all(map(str.isprintable, value)):  # keys are shown on a terminal
        raise Malformed(f'"{key}" is {_short(value)}, wanted an object with printable keys')
    return value


def _count(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value < _MOST:
        raise Malformed(f'"{key}" is {_short(value)}, wanted an integer >= 0')
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
