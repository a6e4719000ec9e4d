"""The summary of DeepSpeed's comms logger: logical and wire bytes of coded calls, below DeepSpeed's table.

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


def reset() -> None:
    """Begin anew, as DeepSpeed's ``reset_log()`` does; the counters keep counting."""
    counters.grown(KEY)


def summary() -> Mapping[str, Coded]:
    """Return the calls of each operation since the process started or since :func:`reset`, by name; none without calls."""
    return {
        op: Coded(
            count=calls,
            logical_bytes=logical,
            wire_bytes=wire,
            ratio=counters.ratio(logical, wire),
            passed_count=passed,
            passed_bytes=passed_bytes,
        )
        for op, (calls, logical, wire, passed, passed_bytes) in counters.grown(KEY, stay=True).get("ops", {}).items()
    }


def render() -> str:
    """Return the rows of :func:`summary` in the form of DeepSpeed's table; "" where there are none."""
    rows = [
        f"{op}\n{' ': <20}{row['count']: <20}{row['logical_bytes']: <20}{row['wire_bytes']: <20}{counters.ratio_text(row['ratio']): <20}"
        f"{row['passed_count']: <20}{row['passed_bytes']: <20}"
        for op, row in summary().items()
    ]
    return "\n".join([_HEADER, *rows]) if rows else ""
