"""The summary of DeepSpeed's comms logger: logical and wire bytes of coded calls, beside its own table.

The logger's table has a row for each operation and message size, that of a call's tensor, whether coded or not. It has no column for bytes
on the wire. No row may be added: its breakdown of stragglers is a collective for each row, and wire bytes differ between ranks. So the rows
of :func:`summary` follow the table, and the dict of ``log_summary(return_dict=True)`` has them under the key ``"ds_zipccl"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from ds_zipccl.telemetry import counters

KEY = "ds_zipccl"
_HEADER = (
    f"{'Coded Op': <20}{'Count': <20}{'Logical Bytes': <20}{'Wire Bytes': <20}{'Ratio': <20}{'Passed Count': <20}"
    f"{'Passed Bytes': <20}"
)


class Coded(TypedDict):
    """Calls of one operation on this rank. ``count``, ``logical_bytes`` and ``wire_bytes`` are of coded calls, ``passed_count`` and
    ``passed_bytes`` of calls of the plain backend; ratio = logical / wire."""

    count: int
    logical_bytes: int
    wire_bytes: int
    ratio: float
    passed_count: int
    passed_bytes: int


_Counts = tuple[int, ...]  # coded calls, logical and wire bytes, passed calls, their bytes
_NONE: _Counts = (0, 0, 0, 0, 0)
_before: tuple[int, dict[str, _Counts]] = (0, {})  # counters.resets() and the counts at the last reset of the logger


def _counts() -> dict[str, _Counts]:
    """Return the counts of each operation since the process started, all roles and kinds together."""
    found: dict[str, _Counts] = {}
    for row in counters.rows():
        own = row["calls"], row["logical_bytes"], row["wire_bytes"], row["passed"], row["passed_bytes"]
        found[row["op"]] = tuple(map(sum, zip(found.get(row["op"], _NONE), own, strict=True)))
    return found


def reset() -> None:
    """Begin anew, as DeepSpeed's ``reset_log()`` does; the counters keep counting."""
    global _before
    _before = counters.resets(), _counts()


def summary() -> Mapping[str, Coded]:
    """Return the calls of each operation since the process started or since :func:`reset`, by name; none without calls."""
    found: dict[str, Coded] = {}
    resets, before = _before
    if resets != counters.resets():  # the counters themselves were set to zero since
        before = {}
    for op, now in _counts().items():
        calls, logical, wire, passed, passed_bytes = (
            one - other for one, other in zip(now, before.get(op, _NONE), strict=True)
        )
        if calls or passed:
            found[op] = Coded(
                count=calls, logical_bytes=logical, wire_bytes=wire, ratio=counters.ratio(logical, wire),
                passed_count=passed, passed_bytes=passed_bytes,
            )  # fmt: skip
    return found


def render() -> str:
    """Return the rows of :func:`summary` in the form of DeepSpeed's table; "" where there are none."""
    rows = [
        f"{op}\n{' ': <20}{row['count']: <20}{row['logical_bytes']: <20}{row['wire_bytes']: <20}{row['ratio']: <20.3f}"
        f"{row['passed_count']: <20}{row['passed_bytes']: <20}"
        for op, row in summary().items()
    ]
    return "\n".join([_HEADER, *rows]) if rows else ""
