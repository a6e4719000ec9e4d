"""Process-wide counters of what was sent: plain integers under one lock, never a synchronisation with a device or a rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Row:
    calls: int = 0
    logical_bytes: int = 0
    wire_bytes: int = 0
    passed: int = 0
    passed_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    choices: dict[str, _Choice] = field(default_factory=dict)  # the last CHOICES of them
    more_choices: int = 0  # those before


#: Kinds of messages of one role and operation whose choices are kept (seed): programs that make groups again and again have ever new ones.
CHOICES = 32


@dataclass
class _Choice:
    latest: str
    count: int = 0


_staging_bytes = 0
_memory: dict[str, Callable[[], int]] = {}
_rows: dict[tuple[str, str], _Row] = {}
_SENT = ("logical_bytes", "wire_bytes", "passed_bytes")
_seen: dict[str, tuple[Counter[tuple[str, str]], Counter[str]]] = {}  # reader -> what since_last() last found counted
_lock = threading.Lock()


def _row(role: str, op: str) -> _Row:
    """The row to count in; the lock is held."""
    row = _rows.get((role, op))
    if row is None:
        row = _rows[role, op] = _Row()
    return row


def record(role: str, op: str, logical_bytes: int, wire_bytes: int, staging_bytes: int = 0) -> None:
    """Count one coded call: bytes this rank would have sent uncoded, and bytes it sent, headers included.

    Uncoded means our schedule with uncoded frames. Where that sends less than the plain collective by itself (``reduce_to_owners``, about
    half of an all-reduce), it means the plain collective, so that the ratio has all that was saved.

    ``staging_bytes``: the most memory that frames have taken in this process until now.
    """
    global _staging_bytes
    with _lock:
        _staging_bytes = max(_staging_bytes, staging_bytes)
        row = _row(role, op)
        row.calls += 1
        row.logical_bytes += logical_bytes
        row.wire_bytes += wire_bytes


def record_pass(role: str, op: str, logical_bytes: int, reason: str) -> None:
    """Count one call that went to the plain backend, and why."""
    with _lock:
        row = _row(role, op)
        row.passed += 1
        row.passed_bytes += logical_bytes
        row.reasons[reason] += 1


def record_difference(role: str, op: str, reason: str) -> None:
    """Count one gather that this rank's shard went out for as a difference, or in full for a reason."""
    with _lock:
        _row(role, op).differences[reason] += 1


def count_memory(what: str, nbytes: Callable[[], int]) -> None:
    """Ask ``nbytes`` from now on how many bytes of this rank's memory are taken by ``what``."""
    _memory[what] = nbytes


def record_whole(role: str, op: str, reason: str) -> None:
    """Count one sum of gradients that all ranks got although ZeRO keeps a part on each, and why."""
    with _lock:
        _row(role, op).whole[reason] += 1


def record_choice(role: str, op: str, what: str, text: str) -> None:
    """Count a choice of schedule for the messages that ``what`` tells apart; the latest text is kept."""
    with _lock:
        row = _row(role, op)
        choice = row.choices.pop(what, None) or _Choice(text)
        choice.latest = text
        choice.count += 1
        row.choices[what] = choice
        if len(row.choices) > CHOICES:
            row.more_choices += 1
            del row.choices[next(iter(row.choices))]


def memory() -> dict[str, int]:
    """Bytes that this rank keeps from call to call, by what they are for, if there are any."""
    found = {what: nbytes() for what, nbytes in _memory.items()}
    return {what: nbytes for what, nbytes in found.items() if nbytes}


def _ratio(logical_bytes: int, wire_bytes: int) -> float:
    """Original / compressed; 1.0 where this rank sent nothing."""
    return logical_bytes / wire_bytes if wire_bytes else 1.0


def rows() -> list[dict[str, Any]]:
    """One dict per (role, op), sorted: role, op, calls, logical_bytes, wire_bytes, ratio, passed, passed_bytes, reasons, differences,
    whole, choices, more_choices.

    ``calls``, ``logical_bytes`` and ``wire_bytes`` count coded calls, ``passed`` and ``passed_bytes`` the others; ``reasons`` maps
    a reason to its number of calls, and ``differences`` the reason why a shard went in full, empty where it went as a difference
    against the last one. ``whole`` maps a reason to the sums of gradients that went to all ranks for it instead of to their owners.
    ``choices`` maps a kind of message to the schedule that was chosen last and how often one was; ``more_choices`` counts the kinds of
    long ago that it has no more. A snapshot: later calls do not change it.
    """
    with _lock:
        return [
            {
                "role": role,
                "op": op,
                "calls": row.calls,
                "logical_bytes": row.logical_bytes,
                "wire_bytes": row.wire_bytes,
                "ratio": _ratio(row.logical_bytes, row.wire_bytes),
                "passed": row.passed,
                "passed_bytes": row.passed_bytes,
                "reasons": dict(row.reasons),
                "differences": dict(row.differences),
                "whole": dict(row.whole),
                "choices": {what: (choice.latest, choice.count) for what, choice in row.choices.items()},
                "more_choices": row.more_choices,
            }
            for (role, op), row in sorted(_rows.items())
        ]


def totals() -> dict[str, float]:
    """logical_bytes, wire_bytes and ratio over all coded calls of this process, and staging_bytes, the most memory that frames took."""
    with _lock:
        logical_bytes = sum(row.logical_bytes for row in _rows.values())
        wire_bytes = sum(row.wire_bytes for row in _rows.values())
        staging = _staging_bytes
    return {
        "logical_bytes": logical_bytes,
        "wire_bytes": wire_bytes,
        "ratio": _ratio(logical_bytes, wire_bytes),
        "staging_bytes": staging,
    }


def since_last(reader: str) -> dict[str, dict[str, Any]]:
    """What was sent since ``reader``, a name of the caller's choice, last asked; at first, since the process started or :func:`reset`.

    ``roles`` maps each role that sent something to logical_bytes and wire_bytes of its coded calls, passed_bytes of the others, and the
    ratio of them all; ``differences`` a reason as in :func:`rows` to the number of shards.
    """
    sent: Counter[tuple[str, str]] = Counter()
    differences: Counter[str] = Counter()
    with _lock:
        for (role, _), row in _rows.items():
            for key in _SENT:
                sent[role, key] += getattr(row, key)
            differences.update(row.differences)
        sent_before, differences_before = _seen.get(reader, (Counter(), Counter()))
        _seen[reader] = sent, differences
    new = sent - sent_before
    roles = {role: {key: new[role, key] for key in _SENT} for role in sorted({role for role, _ in new})}
    return {
        "roles": {role: {**counts, "ratio": ratio(**counts)} for role, counts in roles.items()},
        "differences": dict(differences - differences_before),
    }


def ratio(logical_bytes: int, wire_bytes: int, passed_bytes: int) -> float:
    """Original / compressed of coded calls together with those that passed through."""
    return _ratio(logical_bytes + passed_bytes, wire_bytes + passed_bytes)


def events(samples: int) -> list[tuple[str, float, int]]:
    """DeepSpeed monitor events (name, value, samples so far): the totals, and each role's ratio since the events before."""
    values = totals() | {f"{role}/ratio": sent["ratio"] for role, sent in since_last("events")["roles"].items()}
    return [(f"Train/zipccl/{name}", float(value), samples) for name, value in values.items()]


def reset() -> None:
    """Forget everything counted so far."""
    global _staging_bytes
    with _lock:
        _rows.clear()
        _seen.clear()
        _staging_bytes = 0


_HEADER = ("role", "op", "coded", "MB", "sent MB", "ratio", "passed", "MB", "why passed")


def table() -> str:
    """The rows as plain text, columns aligned, MB of 10^6 bytes, and the total over coded calls; then lines for
    memory, for what went as differences, for sums that went to all ranks, and for the schedules that were chosen."""
    cells = [_HEADER]
    for row in rows():
        why = ", ".join(f"{reason} ({count})" for reason, count in sorted(row["reasons"].items()))
        cells.append(
            (row["role"], row["op"], *_amounts(row), str(row["passed"]), f"{row['passed_bytes'] / 1e6:.2f}", why)
        )  # fmt: skip
    total = {"calls": sum(row["calls"] for row in rows()), **totals()}
    cells.append(("total", "", *_amounts(total), "", "", ""))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = {0, 1, len(_HEADER) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if index in texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    if total["staging_bytes"]:
        lines.append(f"memory for frames: {total['staging_bytes'] / 1e6:.1f} MB at most")
    lines += [f"memory for {what}: {nbytes / 1e6:.1f} MB" for what, nbytes in sorted(memory().items())]
    return "\n".join([*lines, *_differences(), *_whole(), *_choices()])


def _differences() -> Iterator[str]:
    """A line for every operation that sends differences: how many, and why not the others."""
    for row in rows():
        counts = dict(row["differences"])
        total, hits = sum(counts.values()), counts.pop("", 0)
        why = "".join(f", {reason} ({count})" for reason, count in sorted(counts.items()))
        if total:
            yield f"{row['role']} {row['op']}: {hits} of {total} shards went as differences{why}"


def _whole() -> Iterator[str]:
    """A line for every reason why sums went to all ranks, not to their owners only."""
    for row in rows():
        for reason, count in sorted(row["whole"].items()):
            yield f"{row['role']} {row['op']}: {count} calls not owner-only: {reason}"


def _choices() -> Iterator[str]:
    """A line for every kind of message whose schedule was chosen by measurement."""
    for row in rows():
        for what, (latest, count) in sorted(row["choices"].items()):
            switches = f"; switched {count - 1} times" if count > 1 else ""
            yield f"{row['role']} {row['op']}, {what}: {latest}{switches}"
        if row["more_choices"]:
            yield f"{row['role']} {row['op']}: and {row['more_choices']} kinds of messages before these"


def _amounts(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        str(row["calls"]),
        f"{row['logical_bytes'] / 1e6:.2f}",
        f"{row['wire_bytes'] / 1e6:.2f}",
        f"{row['ratio']:.3f}",
    )
