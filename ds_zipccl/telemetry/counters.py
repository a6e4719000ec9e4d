"""Process-wide counters of communication: integers under one lock. Counting never waits for a device or a rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from ds_zipccl.telemetry import lossy_counts
from ds_zipccl.telemetry.lossy_counts import record_alike as record_alike
from ds_zipccl.telemetry.lossy_counts import record_error as record_error
from ds_zipccl.telemetry.lossy_counts import record_exact as record_exact
from ds_zipccl.telemetry.lossy_counts import record_kept as record_kept
from ds_zipccl.telemetry.lossy_counts import record_lossy as record_lossy

#: Kinds of messages of one role and operation whose choices are kept (seed): a program that makes groups again and again has ever new
#: kinds.
CHOICES = 32


class Row(TypedDict):
    """Counts of one (role, op, kind), as :func:`rows` gives them. ``kind``: of an expert exchange, see :mod:`integration.moe_calls`, or
    "replicated", see :mod:`comm.schedules.replicated`; "" of other calls.

    ``calls``, ``logical_bytes`` and ``wire_bytes`` count coded calls, ``passed`` and ``passed_bytes`` calls of the plain backend.
    ``reasons`` maps the reason of a pass to its number of calls. ``differences`` maps the reason why a shard went in full to the number of
    such shards; the empty reason counts the shards that went as differences. ``whole`` maps a reason to the number of gradient sums that
    went to all ranks, not to their owners only. ``choices`` maps a kind of message to the latest choice of a schedule and the number of
    choices; ``more_choices`` counts the earlier kinds, which are no longer kept. ``host_waits``: times that the host waited for a device.
    ``repeats``: segments that went as hashes, as they repeat messages of the forward pass.
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
    more_choices: int
    host_waits: int
    repeats: int


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


_Bytes = tuple[int, int, int]  # logical, wire, passed


@dataclass
class _Choice:
    latest: str
    count: int = 0


@dataclass
class _Counts:
    """Counts of one (role, op, kind); :class:`Row` tells their meaning."""

    calls: int = 0
    logical_bytes: int = 0
    wire_bytes: int = 0
    passed: int = 0
    passed_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    choices: dict[str, _Choice] = field(default_factory=dict)  # the latest CHOICES
    more_choices: int = 0
    host_waits: int = 0
    repeats: int = 0


@dataclass
class _Seen:
    """Counts that a reader of :func:`since_last` has been given: bytes by role and by kind, shards by reason, sums of lossy frames by
    role."""

    roles: dict[str, _Bytes] = field(default_factory=dict)
    kinds: dict[str, _Bytes] = field(default_factory=dict)
    differences: Counter[str] = field(default_factory=Counter)
    lossy: dict[str, lossy_counts.Sums] = field(default_factory=dict)


_staging_bytes = _resets = 0
_memory: dict[str, Callable[[], int]] = {}
_counts: dict[tuple[str, str, str], _Counts] = {}  # by role, operation and kind
_seen: dict[str, _Seen] = {}  # by reader
_lock = threading.Lock()
_late: Callable[[], None] | None = None


def _of(role: str, op: str, kind: str = "") -> _Counts:
    """Return the counts of one (role, op, kind). The caller holds the lock."""
    counts = _counts.get((role, op, kind))
    if counts is None:
        counts = _counts[role, op, kind] = _Counts()
    return counts


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
        counts = _of(role, op, kind)
        counts.calls += 1
        counts.logical_bytes += logical_bytes
        counts.wire_bytes += wire_bytes


def record_pass(role: str, op: str, logical_bytes: int, reason: str, *, kind: str = "") -> None:
    """Count one call that went to the plain backend for ``reason``."""
    record_passes(role, op, 1, logical_bytes, reason, kind=kind)


def record_passes(role: str, op: str, calls: int, logical_bytes: int, reason: str, *, kind: str = "") -> None:
    """Count calls that went to the plain backend for ``reason``, of ``logical_bytes`` together."""
    with _lock:
        counts = _of(role, op, kind)
        counts.passed += calls
        counts.passed_bytes += logical_bytes
        counts.reasons[reason] += calls


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
        _of(role, op).differences[reason] += 1


def record_whole(role: str, op: str, reason: str) -> None:
    """Count one sum of gradients that went to all ranks for ``reason``, although ZeRO keeps a part on each rank."""
    with _lock:
        _of(role, op).whole[reason] += 1


def record_host_wait(role: str, op: str, *, kind: str = "") -> None:
    """Count one wait of the host for a device."""
    with _lock:
        _of(role, op, kind).host_waits += 1


def record_repeats(role: str, op: str, segments: int, *, kind: str = "") -> None:
    """Count segments that this rank sent as hashes, as the receivers keep them from the forward pass."""
    with _lock:
        _of(role, op, kind).repeats += segments


def record_choice(role: str, op: str, what: str, text: str, *, kind: str = "") -> None:
    """Count the choice ``text`` of a schedule for messages like ``what``; the latest choice for such messages is kept."""
    with _lock:
        counts = _of(role, op, kind)
        choice = counts.choices.pop(what, None) or _Choice(text)
        choice.latest = text
        choice.count += 1
        counts.choices[what] = choice
        if len(counts.choices) > CHOICES:
            counts.more_choices += 1
            del counts.choices[next(iter(counts.choices))]


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


def rows() -> list[Row]:
    """Return one row per (role, op, kind), sorted. A snapshot: later calls do not change it."""
    _count_late()
    with _lock:
        return [
            Row(
                role=role,
                op=op,
                kind=kind,
                calls=counts.calls,
                logical_bytes=counts.logical_bytes,
                wire_bytes=counts.wire_bytes,
                ratio=ratio(counts.logical_bytes, counts.wire_bytes),
                passed=counts.passed,
                passed_bytes=counts.passed_bytes,
                reasons=dict(counts.reasons),
                differences=dict(counts.differences),
                whole=dict(counts.whole),
                choices={what: (choice.latest, choice.count) for what, choice in counts.choices.items()},
                more_choices=counts.more_choices,
                host_waits=counts.host_waits,
                repeats=counts.repeats,
            )
            for (role, op, kind), counts in sorted(_counts.items())
        ]


def lossy() -> list[Lossy]:
    """Return one entry per (role, op) with lossy frames, sorted. A snapshot."""
    return [
        Lossy(
            role=role,
            op=op,
            codec=one.codec,
            frames=one.frames,
            error=lossy_counts.error(one.squared_error),
            kept=lossy_counts.error(one.kept),
            alike=lossy_counts.mean(one.alike),
            exact=dict(one.exact),
            ratio=_ratio_of(role, op),
        )
        for (role, op), one in lossy_counts.snapshot().items()
    ]


def _ratio_of(role: str, op: str) -> float:
    with _lock:
        sent = [counts for key, counts in _counts.items() if key[:2] == (role, op)]
        return ratio(sum(one.logical_bytes for one in sent), sum(one.wire_bytes for one in sent))


def totals() -> Totals:
    """Return the sums over the coded calls of this process."""
    with _lock:
        logical_bytes = sum(counts.logical_bytes for counts in _counts.values())
        wire_bytes = sum(counts.wire_bytes for counts in _counts.values())
        staging = _staging_bytes
    return Totals(
        logical_bytes=logical_bytes,
        wire_bytes=wire_bytes,
        ratio=ratio(logical_bytes, wire_bytes),
        staging_bytes=staging,
    )


def since_last(reader: str) -> Increment:
    """Return the counts since the last call with the same ``reader``, a name of the caller's choice.

    The first call of a reader returns the counts since the process started or since :func:`reset`. Roles and kinds that sent nothing are
    left out. The bytes of a kind are in those of its role too. Only the kinds of role ep count.
    """
    _count_late()
    now = _Seen(lossy=lossy_counts.sums_of_roles())
    with _lock:
        for (role, _, kind), counts in _counts.items():
            _add(now.roles, role, counts)
            if kind and role == "ep":
                _add(now.kinds, f"{role} {kind}", counts)
            now.differences.update(counts.differences)
        before = _seen.get(reader, _Seen())
        _seen[reader] = now
    return Increment(
        roles=_sent_since(now.roles, before.roles),
        kinds=_sent_since(now.kinds, before.kinds),
        differences=dict(now.differences - before.differences),
        errors=lossy_counts.errors_between(before.lossy, now.lossy),
        feedback=lossy_counts.feedback_between(before.lossy, now.lossy),
    )


def _add(sent: dict[str, _Bytes], name: str, counts: _Counts) -> None:
    logical, wire, passed = sent.get(name, (0, 0, 0))
    sent[name] = (logical + counts.logical_bytes, wire + counts.wire_bytes, passed + counts.passed_bytes)


def _sent_since(now: dict[str, _Bytes], before: dict[str, _Bytes]) -> dict[str, Sent]:
    found: dict[str, Sent] = {}
    for name, totals_now in sorted(now.items()):
        earlier = before.get(name, (0, 0, 0))
        logical, wire, passed = (total - last for total, last in zip(totals_now, earlier, strict=True))
        if logical or wire or passed:
            found[name] = Sent(
                logical_bytes=logical, wire_bytes=wire, passed_bytes=passed, ratio=ratio(logical, wire, passed)
            )
    return found


def resets() -> int:
    """Return how often the counts were set to zero."""
    return _resets


def reset() -> None:
    """Set all counts to zero, for every reader."""
    global _staging_bytes, _resets
    _count_late()
    with _lock:
        _resets += 1
        _counts.clear()
        _seen.clear()
        _staging_bytes = 0
    lossy_counts.clear()
