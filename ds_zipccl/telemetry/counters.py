"""Process-wide counters of communication and of lossy frames, under one lock. Counting never waits for a device or a rank."""

from __future__ import annotations

import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict


class Row(TypedDict):
    """Counts of one (role, op, kind), as :func:`rows` gives them. ``kind``: of an expert exchange, see :mod:`integration.hooks`;
    "" of other calls.

    ``calls``, ``logical_bytes`` and ``wire_bytes`` count coded calls, ``passed`` and ``passed_bytes`` calls of the plain backend.
    ``reasons`` maps the reason of a pass to its number of calls. ``differences`` maps the reason why a shard went in full to the number of
    such shards; the empty reason counts the shards that went as differences. ``whole`` maps a reason to the number of gradient sums that
    went to all ranks, not to their owners only. ``choices`` maps what was measured, "whole steps", to the latest choice of a schedule and
    the number of choices. ``host_waits``: times that the host waited for a device.
    """

    role: str
    op: str
    kind: str
    calls: int
    logical_bytes: int
    wire_bytes: int
    ratio: float
    passed: int
    passed_bytes: int
    reasons: dict[str, int]
    differences: dict[str, int]
    whole: dict[str, int]
    choices: dict[str, tuple[str, int]]
    host_waits: int


class Lossy(TypedDict):
    """Lossy frames of one (role, op) that this rank sent, the calls of all kinds together.

    ``codec``: text of the latest codec. ``frames``: number of frames, with those that went exact. ``error``: relative L2 error of one
    rounding, the root of the squared errors over the squared values, over the sampled frames; None where none was sampled, or zeros
    alone. ``kept``: root of the squares of errors that ride on later messages, over those of the values of their own messages; ``alike``:
    mean cosine of a stage's inputs in consecutive micro-batches; None without any. ``exact`` maps the reason why a frame went exact to the
    number of such frames. ``ratio``: of all coded calls of the (role, op).
    """

    role: str
    op: str
    codec: str
    frames: int
    error: float | None
    kept: float | None
    alike: float | None
    exact: dict[str, int]
    ratio: float


class Totals(TypedDict):
    """Bytes and ratio over the coded calls of this process; ``staging_bytes``: the peak of the memory for frames."""

    logical_bytes: int
    wire_bytes: int
    ratio: float
    staging_bytes: int


class Sent(TypedDict):
    """Bytes of one role or kind: logical and wire bytes of coded calls, bytes of passed calls, and the ratio over both kinds of calls."""

    logical_bytes: int
    wire_bytes: int
    passed_bytes: int
    ratio: float


class Increment(TypedDict):
    """Counts since a reader last asked: bytes by role, those of calls with a kind also by role and kind, such as "ep dispatch", and shards
    by reason as in :class:`Row`. ``errors`` has the relative L2 error of a rounding, by role, where lossy frames were sampled;
    ``feedback`` has ``kept`` and ``alike`` of :class:`Lossy`, by role, where errors ride on later messages."""

    roles: dict[str, Sent]
    kinds: dict[str, Sent]
    differences: dict[str, int]
    errors: dict[str, float]
    feedback: dict[str, dict[str, float]]


@dataclass
class _LossyCounts:
    """Counts of one (role, op). ``sums``: by the names of :data:`_FACTS`, the two numbers that a fact is made of."""

    codec: str = ""
    frames: int = 0
    exact: Counter[str] = field(default_factory=Counter)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)


def _root(squares: float, of: float) -> float:
    return math.sqrt(max(0.0, squares) / of)


#: Key of :class:`Lossy` -> what it is made of: squares of errors and of values, or a sum of cosines and their number.
_FACTS: dict[str, Callable[[float, float], float]] = {"error": _root, "kept": _root, "alike": operator.truediv}
#: Keys of :class:`Row` that are counts of calls and their bytes.
CALLED: tuple[Literal["calls", "logical_bytes", "wire_bytes", "passed", "passed_bytes"], ...] = (
    "calls", "logical_bytes", "wire_bytes", "passed", "passed_bytes"
)  # fmt: skip
#: What grows, such as "roles", "ops" or a key of _FACTS, and a role, kind, operation or reason -> numbers that add up.
_Sums = dict[tuple[str, str], tuple[Any, ...]]

_staging_bytes = 0
_memory: dict[str, Callable[[], int]] = {}
_rows: dict[tuple[str, str, str], Row] = {}  # by role, operation and kind; the ratio is that of a snapshot
_lossy: dict[tuple[str, str], _LossyCounts] = {}  # by role and operation
_seen: dict[str, _Sums] = {}  # by reader of since_last()
_saved: dict[str, tuple[float, float, int]] = {}  # by clock, see saved()
_lock = threading.Lock()
_late: Callable[[], None] | None = None


def _of(role: str, op: str, kind: str = "") -> Row:
    """Return the counts of one (role, op, kind). The caller holds the lock."""
    row = _rows.get((role, op, kind))
    if row is None:
        row = _rows[role, op, kind] = Row(
            role=role, op=op, kind=kind, calls=0, logical_bytes=0, wire_bytes=0, ratio=1.0, passed=0, passed_bytes=0,
            reasons=Counter(), differences=Counter(), whole=Counter(), choices={}, host_waits=0,
        )  # fmt: skip
    return row


def record(role: str, op: str, logical_bytes: int, wire_bytes: int, staging_bytes: int = 0, *, kind: str = "") -> None:
    """Count one coded call.

    Args:
        logical_bytes: bytes that our schedule sends from this rank with raw frames. Where our schedule by itself sends less than the
            plain collective (``reduce_to_owners``: about half of an all-reduce), bytes that the plain collective sends, so that the
            ratio covers the whole saving.
        wire_bytes: bytes that this rank sent, headers included.
        staging_bytes: the peak of the memory for frames in this process so far.
        kind: of an expert exchange.
    """
    global _staging_bytes
    with _lock:
        _staging_bytes = max(_staging_bytes, staging_bytes)
        row = _of(role, op, kind)
        row["calls"] += 1
        row["logical_bytes"] += logical_bytes
        row["wire_bytes"] += wire_bytes


def record_pass(role: str, op: str, logical_bytes: int, reason: str, *, kind: str = "", calls: int = 1) -> None:
    """Count one call that went to the plain backend for ``reason``, or several ``calls`` of ``logical_bytes`` together."""
    with _lock:
        row = _of(role, op, kind)
        row["passed"] += calls
        row["passed_bytes"] += logical_bytes
        row["reasons"][reason] += calls


def count_later(count: Callable[[], None]) -> None:
    """Call ``count`` whenever counts are asked for or reset: it records what it has tallied. The function replaces the one before."""
    global _late
    _late = count


def _count_late() -> None:
    if _late is not None:
        _late()


def record_difference(role: str, op: str, reason: str) -> None:
    """Count one gather to which this rank sent its shard in full for ``reason``, or as a difference if ``reason`` is empty."""
    with _lock:
        _of(role, op)["differences"][reason] += 1


def record_whole(role: str, op: str, reason: str) -> None:
    """Count one sum of gradients that went to all ranks for ``reason``, although ZeRO keeps a part on each rank."""
    with _lock:
        _of(role, op)["whole"][reason] += 1


def record_host_wait(role: str, op: str, *, kind: str = "") -> None:
    """Count one wait of the host for a device."""
    with _lock:
        _of(role, op, kind)["host_waits"] += 1


def record_choice(role: str, op: str, what: str, text: str) -> None:
    """Count the choice ``text`` of a schedule by ``what`` was measured; the latest choice is kept."""
    with _lock:
        choices = _of(role, op)["choices"]
        _, count = choices.get(what, ("", 0))
        choices[what] = text, count + 1


def record_saved(clock: str, seconds: float = 0.0, error: float = 0.0) -> None:
    """Count what a step, of the clock "steps", took less than its plain form, as trials measured, with the standard error. Errors add up,
    because all steps have that of one trial. The clock "" counts all optimizer steps."""
    with _lock:
        before = _saved.get(clock, (0.0, 0.0, 0))
        _saved[clock] = before[0] + seconds, before[1] + error, before[2] + 1


def saved() -> dict[str, tuple[float, float, int]]:
    """Return (seconds saved, their error, number of steps) by clock, "steps"; "" has the number of all optimizer steps."""
    with _lock:
        return dict(_saved)


def seconds_saved() -> float | None:
    """Return the seconds that steps have saved so far; None where no trial has measured any."""
    found = [seconds for clock, (seconds, *_) in saved().items() if clock]
    return sum(found) if found else None


def _lossy_of(role: str, op: str) -> _LossyCounts:
    """Return the counts of lossy frames of one (role, op). The caller holds the lock."""
    return _lossy.setdefault((role, op), _LossyCounts())


def record_lossy(role: str, op: str, codec: str, frames: int) -> None:
    """Count ``frames`` frames that this rank sent with a lossy codec allowed, those that went exact included."""
    with _lock:
        counts = _lossy_of(role, op)
        counts.codec = codec
        counts.frames += frames


def record_exact(role: str, op: str, why: str, count: int) -> None:
    """Count ``count`` frames that could have been lossy and went exact, for a reason such as "not finite", "smaller" or "overflow"."""
    with _lock:
        _lossy_of(role, op).exact[why] += count


def record_error(role: str, op: str, codec: str, squared_error: float, squared_values: float) -> None:
    """Add a sampled frame to the error of a role and operation.

    Args:
        squared_error: sum of (value - what its frame decodes to) squared, over the values of the frame.
        squared_values: sum of the squares of these values. A frame with a sum that is not finite is not counted.
    """
    _sample(role, op, "error", squared_error, squared_values, codec)


def record_kept(role: str, op: str, squared_error: float, squared_values: float) -> None:
    """Add an error that is kept for a later message: the sum of its squares, and that of the values that the program sent. Sums that are
    not finite are not counted."""
    _sample(role, op, "kept", squared_error, squared_values)


def record_alike(role: str, op: str, cosine: float) -> None:
    """Add the cosine of a stage's inputs in two consecutive micro-batches. A cosine that is not finite is not counted."""
    _sample(role, op, "alike", cosine, 1)


def _sample(role: str, op: str, fact: str, one: float, other: float, codec: str = "") -> None:
    if math.isfinite(one) and math.isfinite(other):
        with _lock:
            counts = _lossy_of(role, op)
            counts.codec = codec or counts.codec
            before = counts.sums.get(fact, (0.0, 0.0))
            counts.sums[fact] = before[0] + one, before[1] + other


def count_memory(what: str, nbytes: Callable[[], int]) -> None:
    """Call ``nbytes`` whenever :func:`memory` is asked, for the bytes that ``what`` takes of this rank's memory at that time."""
    _memory[what] = nbytes


def memory() -> dict[str, int]:
    """Return the bytes that this rank keeps between calls, by purpose, without empty entries."""
    found = {what: nbytes() for what, nbytes in _memory.items()}
    return {what: nbytes for what, nbytes in found.items() if nbytes}


def ratio(logical_bytes: int, wire_bytes: int, passed_bytes: int = 0) -> float:
    """Return original / compressed bytes of coded and passed calls together; 1.0 where this rank had nothing to send.

    Where copies of bases have replaced all messages, the compressed bytes count as one: the ratio stays a number.
    """
    sent = wire_bytes + passed_bytes
    return (logical_bytes + passed_bytes) / max(1, sent) if sent or logical_bytes else 1.0


def ratio_text(ratio: float) -> str:
    """Return a ratio as tables show it. Beyond 9999 copies of bases have replaced nearly all messages, and digits say nothing more."""
    return f"{ratio:.3f}" if ratio <= 9999 else ">9999"


def rows() -> list[Row]:
    """Return one row per (role, op, kind), sorted. A snapshot: later calls do not change it."""
    _count_late()
    with _lock:
        return [
            {
                **row,
                "ratio": ratio(row["logical_bytes"], row["wire_bytes"]),
                "reasons": dict(row["reasons"]),
                "differences": dict(row["differences"]),
                "whole": dict(row["whole"]),
                "choices": dict(row["choices"]),
            }
            for _, row in sorted(_rows.items())
        ]


def lossy() -> list[Lossy]:
    """Return one entry per (role, op) with lossy frames, sorted. A snapshot."""
    with _lock:
        return [
            Lossy(
                role=role,
                op=op,
                codec=one.codec,
                frames=one.frames,
                error=_fact("error", one.sums),
                kept=_fact("kept", one.sums),
                alike=_fact("alike", one.sums),
                exact=dict(one.exact),
                ratio=ratio(*_coded(row for key, row in _rows.items() if key[:2] == (role, op))),
            )
            for (role, op), one in sorted(_lossy.items())
        ]


def _fact(name: str, sums: Mapping[str, tuple[float, float]]) -> float | None:
    """Return a fact of lossy frames, None where nothing that is not zero was sampled."""
    one, other = sums.get(name, (0.0, 0.0))
    return _FACTS[name](one, other) if other > 0 else None


def _coded(some: Iterable[Row]) -> tuple[int, int]:
    """Return the logical and the wire bytes of rows."""
    some = list(some)
    return sum(row["logical_bytes"] for row in some), sum(row["wire_bytes"] for row in some)


def totals() -> Totals:
    """Return the sums over the coded calls of this process."""
    with _lock:
        logical, wire = _coded(_rows.values())
        return Totals(logical_bytes=logical, wire_bytes=wire, ratio=ratio(logical, wire), staging_bytes=_staging_bytes)


def since_last(reader: str) -> Increment:
    """Return the counts since the last call with the same ``reader``, a name of the caller's choice.

    The first call of a reader returns the counts since the process started or since :func:`reset`. Roles and kinds that sent nothing are
    left out. The bytes of a kind are in those of its role too. Only the kinds of role ep count.
    """
    new = grown(reader)
    facts: dict[str, dict[str, float]] = {}
    for what in _FACTS:
        for role, sums in new.get(what, {}).items():
            if (fact := _fact(what, {what: sums})) is not None:
                facts.setdefault(role, {})[what] = fact
    errors = {role: known.pop("error") for role, known in facts.items() if "error" in known}
    return Increment(
        roles=_sent(new.get("roles", {})),
        kinds=_sent(new.get("kinds", {})),
        differences={reason: count for reason, (count,) in new.get("differences", {}).items()},
        errors=errors,
        feedback={role: known for role, known in facts.items() if known},
    )


def grown(reader: str, *, stay: bool = False) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return what has grown since ``reader`` last asked, by what and by name, see :data:`_Sums`. ``stay``: this time does not count."""
    _count_late()
    with _lock:
        now, before = _sums(), _seen.get(reader, {})
        if not stay:
            _seen[reader] = now
    new: dict[str, dict[str, tuple[Any, ...]]] = {}
    for (what, name), numbers in now.items():
        more = tuple(map(operator.sub, numbers, before.get((what, name), (0,) * len(numbers))))
        if any(more):
            new.setdefault(what, {})[name] = more
    return new


def _sums() -> _Sums:
    """Return everything whose growth is told. The caller holds the lock."""
    found: _Sums = {}

    def add(what: str, name: str, *numbers: float) -> None:
        found[what, name] = tuple(map(operator.add, found.get((what, name), (0,) * len(numbers)), numbers))

    for (role, op, kind), row in sorted(_rows.items()):
        add("ops", op, *(row[key] for key in CALLED))
        sent = row["logical_bytes"], row["wire_bytes"], row["passed_bytes"]
        add("roles", role, *sent)
        if kind and role == "ep":
            add("kinds", f"{role} {kind}", *sent)
        for reason, count in row["differences"].items():
            add("differences", reason, count)
    for (role, _), one in sorted(_lossy.items()):
        for fact, pair in one.sums.items():
            add(fact, role, *pair)
    return found


def _sent(bytes_of: Mapping[str, tuple[Any, ...]]) -> dict[str, Sent]:
    return {
        name: Sent(logical_bytes=logical, wire_bytes=wire, passed_bytes=passed, ratio=ratio(logical, wire, passed))
        for name, (logical, wire, passed) in sorted(bytes_of.items())
    }


def reset() -> None:
    """Set all counts to zero, for every reader."""
    global _staging_bytes
    _count_late()
    with _lock:
        for table in (_rows, _lossy, _seen, _saved):
            table.clear()
        _staging_bytes = 0
