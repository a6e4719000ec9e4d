"""The state of lossy codecs between messages: errors that later messages carry, and factors that the next power iteration begins with.

An entry belongs to a role and a key: the name of a parameter, or the place of a tensor on a link of a pipeline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters


@dataclass
class Entry:
    """The state of one matrix. ``error``: fp32, in units of the scaled loss; ``factor``: fp32. ``kind``: that for which the entry is
    good."""

    kind: tuple[object, ...]
    error: torch.Tensor | None = None
    factor: torch.Tensor | None = None


Key = tuple[str | int, ...]
_entries: dict[tuple[str, Key], Entry] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def state_of(role: str, key: Key, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> Entry:
    """Return the entry of a role and key, an empty one where there is none yet. An entry for another shape, dtype or number of ranks is
    dropped, with one warning a role."""
    kind = (tuple(shape), dtype, ranks)
    with _lock:
        found = _entries.get((role, key))
        if found is not None and found.kind != kind:
            if role not in _warned:
                _warned.add(role)
                print(
                    f"[ds_zipccl] role {role}: the state of {key} was for {found.kind}, the tensor has {kind}; it starts anew",
                    flush=True,
                )
            found = None
        if found is None:
            found = _entries[role, key] = Entry(kind)
        return found


@contextmanager
def stepping(engine: Any, settings: Mapping[str, RoleSettings]) -> Iterator[None]:
    """Surround an optimizer step of an engine: errors follow the loss scale. A step that is not taken, as gradients overflowed, takes all
    state with it.

    Args:
        settings: of the roles with a lossy codec. Those with ``error`` "lazy" forget their errors at the end of the step.
    """
    before = _loss_scale(engine) if settings else 1.0
    yield
    if not settings:
        return
    if not engine.was_step_applied():
        discard_step()
    elif (now := _loss_scale(engine)) != before:
        rescale(now / before)
    for role, one in settings.items():
        if one.error == "lazy":
            end_step(role)


def _loss_scale(engine: Any) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def rescale(factor: float) -> None:
    """Multiply all errors by ``factor``: the new loss scale over the old one."""
    for entry in _all():
        if entry.error is not None:
            entry.error = entry.error * factor


def discard_step() -> None:
    """Forget all errors and factors, after a step that was not taken."""
    for entry in _all():
        entry.error = entry.factor = None


def end_step(role: str) -> None:
    """Forget the errors of a role at the end of an optimizer step. Factors stay."""
    for entry in _all(role):
        entry.error = None


def drop(role: str) -> None:
    """Forget all entries of a role, whose tensors get other shapes."""
    with _lock:
        for key in [key for key in _entries if key[0] == role]:
            del _entries[key]


def _all(role: str | None = None) -> list[Entry]:
    with _lock:
        return [entry for (one, _), entry in _entries.items() if role in (None, one)]


def _nbytes() -> int:
    return sum(one.nbytes for entry in _all() for one in (entry.error, entry.factor) if one is not None)


counters.count_memory("error feedback", _nbytes)
