"""Counters of lossy frames by (role, op): their number, their error, and those that went exact. :mod:`counters` shows them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Squares = tuple[float, float]  # sums of squared errors and of squared values


@dataclass
class LossyCounts:
    """Counts of one (role, op). ``codec``: text of the latest codec. ``frames``: number of frames, with those that went exact."""

    codec: str = ""
    frames: int = 0
    squares: Squares = (0.0, 0.0)
    exact: Counter[str] = field(default_factory=Counter)


_counts: dict[tuple[str, str], LossyCounts] = {}
_lock = threading.Lock()


def record_lossy(role: str, op: str, codec: str, frames: int) -> None:
    """Count ``frames`` frames that this rank sent with a lossy codec allowed, those that went exact included."""
    with _lock:
        counts = _counts.setdefault((role, op), LossyCounts())
        counts.codec = codec
        counts.frames += frames


def record_error(role: str, op: str, codec: str, squares_of_error: float, squares: float) -> None:
    """Add a sampled frame to the error of a role and operation.

    Args:
        squares_of_error: sum of (value - what its frame decodes to) squared, over the values of the frame.
        squares: sum of the squares of these values. A frame with a sum that is not finite is not counted.
    """
    if math.isfinite(squares_of_error) and math.isfinite(squares):
        with _lock:
            counts = _counts.setdefault((role, op), LossyCounts())
            counts.codec = codec
            counts.squares = _sum(counts.squares, (squares_of_error, squares))


def record_exact(role: str, op: str, why: str, count: int) -> None:
    """Count ``count`` frames that could have been lossy and went exact, for a reason such as "not finite", "smaller" or "overflow"."""
    with _lock:
        _counts.setdefault((role, op), LossyCounts()).exact[why] += count


def snapshot() -> dict[tuple[str, str], LossyCounts]:
    """Return a copy of the counts, sorted by role and operation."""
    with _lock:
        return {key: replace(one, exact=one.exact.copy()) for key, one in sorted(_counts.items())}


def squares_of_roles() -> dict[str, Squares]:
    """Return the sums of squares of each role since the process started or since :func:`clear`."""
    found: dict[str, Squares] = {}
    for (role, _), one in snapshot().items():
        found[role] = _sum(found.get(role, (0.0, 0.0)), one.squares)
    return found


def error(squares: Squares) -> float | None:
    """Return the relative L2 error, the root of the squared errors over the squared values; None without a value that is not zero."""
    return math.sqrt(max(0.0, squares[0]) / squares[1]) if squares[1] > 0 else None


def errors_between(before: Mapping[str, Squares], now: Mapping[str, Squares]) -> dict[str, float]:
    """Return the error of each role that was sampled between two results of :func:`squares_of_roles`."""
    found = {}
    for role, (errors, values) in now.items():
        earlier = before.get(role, (0.0, 0.0))
        since = error((errors - earlier[0], values - earlier[1]))
        if since is not None:
            found[role] = since
    return found


def clear() -> None:
    """Set all counts to zero."""
    with _lock:
        _counts.clear()


def _sum(one: Squares, other: Squares) -> Squares:
    return one[0] + other[0], one[1] + other[1]
