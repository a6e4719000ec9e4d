"""Counters of lossy frames by (role, op): their number, their error, and those that went exact. :mod:`counters` shows them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

SquaredError = tuple[float, float]  # sums of squared errors and of squared values


@dataclass
class LossyCounts:
    """Counts of one (role, op). ``codec``: text of the latest codec. ``frames``: number of frames, with those that went exact.
    ``kept``: squares of errors that ride on later messages, and of the values of their own messages. ``alike``: sum and number of the
    cosines of a stage's inputs in consecutive micro-batches."""

    codec: str = ""
    frames: int = 0
    squared_error: SquaredError = (0.0, 0.0)
    kept: SquaredError = (0.0, 0.0)
    alike: tuple[float, float] = (0.0, 0.0)
    exact: Counter[str] = field(default_factory=Counter)


class Sums(NamedTuple):
    """Sums of one role, as in :class:`LossyCounts`."""

    squared_error: SquaredError = (0.0, 0.0)
    kept: SquaredError = (0.0, 0.0)
    alike: tuple[float, float] = (0.0, 0.0)


_counts: dict[tuple[str, str], LossyCounts] = {}
_lock = threading.Lock()


def record_lossy(role: str, op: str, codec: str, frames: int) -> None:
    """Count ``frames`` frames that this rank sent with a lossy codec allowed, those that went exact included."""
    with _lock:
        counts = _counts.setdefault((role, op), LossyCounts())
        counts.codec = codec
        counts.frames += frames


def record_error(role: str, op: str, codec: str, squared_error: float, squared_values: float) -> None:
    """Add a sampled frame to the error of a role and operation.

    Args:
        squared_error: sum of (value - what its frame decodes to) squared, over the values of the frame.
        squared_values: sum of the squares of these values. A frame with a sum that is not finite is not counted.
    """
    if math.isfinite(squared_error) and math.isfinite(squared_values):
        with _lock:
            counts = _counts.setdefault((role, op), LossyCounts())
            counts.codec = codec
            counts.squared_error = _sum(counts.squared_error, (squared_error, squared_values))


def record_kept(role: str, op: str, squared_error: float, squared_values: float) -> None:
    """Add an error that is kept for a later message: the sum of its squares, and that of the values that the program sent. Sums that are
    not finite are not counted."""
    if math.isfinite(squared_error) and math.isfinite(squared_values):
        with _lock:
            counts = _counts.setdefault((role, op), LossyCounts())
            counts.kept = _sum(counts.kept, (squared_error, squared_values))


def record_alike(role: str, op: str, cosine: float) -> None:
    """Add the cosine of a stage's inputs in two consecutive micro-batches. A cosine that is not finite is not counted."""
    if math.isfinite(cosine):
        with _lock:
            counts = _counts.setdefault((role, op), LossyCounts())
            counts.alike = (counts.alike[0] + cosine, counts.alike[1] + 1)


def record_exact(role: str, op: str, why: str, count: int) -> None:
    """Count ``count`` frames that could have been lossy and went exact, for a reason such as "not finite", "smaller" or "overflow"."""
    with _lock:
        _counts.setdefault((role, op), LossyCounts()).exact[why] += count


def snapshot() -> dict[tuple[str, str], LossyCounts]:
    """Return a copy of the counts, sorted by role and operation."""
    with _lock:
        return {key: replace(one, exact=one.exact.copy()) for key, one in sorted(_counts.items())}


def sums_of_roles() -> dict[str, Sums]:
    """Return the sums of each role since the process started or since :func:`clear`."""
    found: dict[str, Sums] = {}
    for (role, _), one in snapshot().items():
        sums = found.get(role, Sums())
        found[role] = Sums(
            _sum(sums.squared_error, one.squared_error), _sum(sums.kept, one.kept), _sum(sums.alike, one.alike)
        )
    return found


def error(squared: SquaredError) -> float | None:
    """Return the relative L2 error, the root of the squared errors over the squared values; None without a value that is not zero."""
    return math.sqrt(max(0.0, squared[0]) / squared[1]) if squared[1] > 0 else None


def mean(alike: tuple[float, float]) -> float | None:
    """Return the mean of cosines, from their sum and number; None without any."""
    return alike[0] / alike[1] if alike[1] > 0 else None


def errors_between(before: Mapping[str, Sums], now: Mapping[str, Sums]) -> dict[str, float]:
    """Return the error of each role that was sampled between two results of :func:`sums_of_roles`."""
    found = {
        role: error(_since(sums.squared_error, before.get(role, Sums()).squared_error)) for role, sums in now.items()
    }
    return {role: one for role, one in found.items() if one is not None}


def feedback_between(before: Mapping[str, Sums], now: Mapping[str, Sums]) -> dict[str, dict[str, float]]:
    """Return for each role what is known of errors that rode on later messages between two results of :func:`sums_of_roles`: "kept" and
    "alike", see :class:`ds_zipccl.telemetry.counters.Lossy`."""
    found = {}
    for role, sums in now.items():
        earlier = before.get(role, Sums())
        facts = {"kept": error(_since(sums.kept, earlier.kept)), "alike": mean(_since(sums.alike, earlier.alike))}
        if known := {name: fact for name, fact in facts.items() if fact is not None}:
            found[role] = known
    return found


def clear() -> None:
    """Set all counts to zero."""
    with _lock:
        _counts.clear()


def _sum(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _since(now: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    return now[0] - before[0], now[1] - before[1]
