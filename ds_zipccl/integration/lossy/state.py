"""The state of lossy codecs between messages: errors that later messages carry, and factors that the next power iteration begins with.

An entry belongs to an engine, a role and a key: the name of a parameter, or the place of a tensor on a link of a pipeline.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

Key = tuple[str | int, ...]
#: Gets the tensor of a call with a hint, which is about to be sent, and the settings of its role; returns whether the call may be changed,
#: what makes factors of the tensor, the sum to make in place of the call, or the reason, to be counted, why the call stays exact.
Ready = Callable[[torch.Tensor, RoleSettings], Any]
Kind = tuple[tuple[int, ...], torch.dtype, int]  # shape, dtype, ranks of the job


@dataclass
class Entry:
    """The state of one matrix. ``error``: fp32, in units of the scaled loss; ``factor``: fp32. ``kind``: that for which the entry is
    good."""

    kind: Kind
    error: torch.Tensor | None = None
    factor: torch.Tensor | None = None


_entries: dict[tuple[int, str, Key], Entry] = {}
_engines: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_numbers = itertools.count()
_warned: set[str] = set()
_lock = threading.RLock()  # a finalizer may run in a thread that holds it


def owner_of(engine: Any) -> int:
    """Return the number of an engine. State goes with its engine; no later engine gets the number, as an engine that has ended may be
    collected much later."""
    with _lock:
        found = _engines.get(engine)
        if found is None:
            found = _engines[engine] = next(_numbers)
            finalize(engine, drop, found)
        return found


def forget(engine: Any) -> None:
    """Forget an engine that has ended, and its state."""
    with _lock:
        number = _engines.pop(engine, None)
    if number is not None:
        drop(number)


def state_of(role: str, key: Key, shape: tuple[int, ...], dtype: torch.dtype, ranks: int, owner: int) -> Entry:
    """Return the entry of a role and key, an empty one where there is none yet. An entry for another shape, dtype or number of ranks is
    dropped, with one warning a role. ``owner``: the number of the engine."""
    kind = (tuple(shape), dtype, ranks)
    with _lock:
        found = _entries.get((owner, role, key))
        if found is not None and found.kind != kind:
            if role not in _warned:
                _warned.add(role)
                print(
                    f"[ds_zipccl] role {role}: the state of {key} was for {found.kind}, the tensor has {kind}; it starts anew",
                    flush=True,
                )
            found = None
        if found is None:
            found = _entries[owner, role, key] = Entry(kind)
        return found


@contextmanager
def stepping(engine: Any, settings: Mapping[str, RoleSettings]) -> Iterator[None]:
    """Surround an optimizer step of an engine: errors follow the new loss scale over the old one. A step that is not taken, as gradients
    overflowed, takes all state with it.

    Args:
        settings: of the roles with a lossy codec. Those with ``error`` "lazy" forget their errors at the end of the step.
    """
    if not settings:
        yield
        return
    before = _loss_scale(engine)
    yield
    taken, now = engine.was_step_applied(), _loss_scale(engine)
    for role, _, entry in entries_of(owner_of(engine)):
        if not taken:
            entry.error = entry.factor = None
        elif entry.error is not None and now != before:
            entry.error = entry.error * (now / before)
        if role in settings and settings[role].error == "lazy":
            entry.error = None


def _loss_scale(engine: Any) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def entries_of(owner: int) -> list[tuple[str, Key, Entry]]:
    """Return the role, key and entry of all state of an engine, sorted by role and text of the key."""
    with _lock:
        found = [(role, key, entry) for (of, role, key), entry in _entries.items() if of == owner]
    return sorted(found, key=lambda one: (one[0], str(one[1])))


def drop(owner: int, role: str | None = None) -> None:
    """Forget all entries of an engine, those of one role where it is named: its tensors get other shapes."""
    with _lock:
        for key in [key for key in _entries if key[0] == owner and role in (None, key[1])]:
            del _entries[key]


def _nbytes() -> int:
    with _lock:
        return sum(one.nbytes for entry in _entries.values() for one in (entry.error, entry.factor) if one is not None)


counters.count_memory("error feedback", _nbytes)
