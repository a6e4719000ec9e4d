"""The state of lossy codecs between messages: errors that later messages carry, and factors that the next power iteration begins with.

An entry belongs to an engine, a role and a key: the name of a parameter, or the place of a tensor on a link of a pipeline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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


_warned: set[str] = set()
_lock = threading.Lock()


@dataclass(eq=False)
class State:
    """The state of one engine. ``sent``, ``inputs``: of a pipeline's engine, the gradients that it has sent in the running batch, one per
    micro-batch, and the inputs of the micro-batch before."""

    held: dict[tuple[str, Key], Entry] = field(default_factory=dict)
    sent: int = 0
    inputs: torch.Tensor | None = None

    def entry(self, role: str, key: Key, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> Entry:
        """Return the entry of a role and key, an empty one where there is none yet. An entry for another shape, dtype or number of ranks is
        dropped, with one warning a role."""
        kind = (tuple(shape), dtype, ranks)
        with _lock:
            found = self.held.get((role, key))
            if found is None or found.kind != kind:
                if found is not None and role not in _warned:
                    _warned.add(role)
                    print(
                        f"[ds_zipccl] role {role}: the state of {key} was for {found.kind}, the tensor has {kind}; it starts anew",
                        flush=True,
                    )
                found = self.held[role, key] = Entry(kind)
            return found

    def entries(self) -> list[tuple[str, Key, Entry]]:
        """Return the role, key and entry of all state, sorted by role and text of the key."""
        with _lock:
            found = [(*key, entry) for key, entry in self.held.items()]
        return sorted(found, key=lambda one: (one[0], str(one[1])))

    def drop(self, role: str | None = None) -> None:
        """Forget all entries, those of one role where it is named: its tensors get other shapes."""
        with _lock:
            for key in [key for key in self.held if role in (None, key[0])]:
                del self.held[key]


_states: WeakKeyDictionary[Any, State] = WeakKeyDictionary()


def of(engine: Any) -> State:
    """Return the state of an engine, which goes with it."""
    with _lock:
        return _states.setdefault(engine, State())


def forget(engine: Any) -> None:
    """Forget the state of an engine that has ended: DeepSpeed keeps references to the engine itself."""
    with _lock:
        _states.pop(engine, None)


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
    for role, _, entry in of(engine).entries():
        if not taken:
            entry.error = entry.factor = None
        elif entry.error is not None and now != before:
            entry.error = entry.error * (now / before)
        if role in settings and settings[role].error == "lazy":
            entry.error = None


def _loss_scale(engine: Any) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def _nbytes() -> int:
    with _lock:
        entries = [entry for state in _states.values() for entry in state.held.values()]
    return sum(one.nbytes for entry in entries for one in (entry.error, entry.factor) if one is not None)


counters.count_memory("error feedback", _nbytes)
