"""The choice of mode auto by whole optimizer steps: calls that have the same bits either way are coded, or plain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from ds_zipccl import tensors
from ds_zipccl.policy import trial
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

#: Steps of other engines after which these count, not the steps of the first engine (seed: that engine has ended).
OTHER_STEPS = 64
_WHAT = "whole steps"


class Clock(NamedTuple):
    """The clock of an engine. ``mark`` returns a mark at this moment of the program; ``agreed`` the seconds of the slowest rank for each
    pair of marks, infinite where some rank does not know its own. A collective of all ranks."""

    mark: Callable[[], Any]
    agreed: Callable[[Sequence[tuple[Any, Any]]], list[float]]


class Steps:
    """The choice by whole optimizer steps of this rank. Ranks agree on times once a trial, some steps after it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._trial = trial.StepTrial(trial.CODED)
        self._turn = self._trial.next_turn()  # the step that runs
        self._steps = 0
        self._last: Any = None  # the mark at the end of the step before
        self._spans: list[tuple[Any, Any]] = []
        self._saved = math.nan, math.nan  # seconds of a coded step that trials measured, with their standard error
        self._seen: set[tuple[str, str]] = set()  # roles and operations that have a choice
        self._told: set[tuple[str, str]] = set()  # those with a line in the table
        self._engine: ref[Any] | None = None
        self._others = 0

    def reason(self, role: str, op: str) -> PassReason | None:
        """Return why an operation of the step that runs passes, None if it is coded; note it for the table."""
        self._seen.add((role, op))
        return None if self._turn.schedule == trial.CODED else PassReason.STEPS_ARE_FASTER

    @tensors.undisturbed()
    def end_step(self, engine: Any) -> None:
        """Note that a step of an engine has ended. The steps of one engine count. All ranks call at the same place of the program; the
        host waits where the times of a trial are agreed.

        Raises:
            CommError: a rank did not come within the group's timeout, or has refused a frame.
        """
        if self._engine is None or self._engine() is not engine:
            self._others += 1
            if self._engine is not None and self._others < OTHER_STEPS:
                return
            self._engine, self._last = ref(engine), None
        self._others = 0
        self._steps += 1
        now, ended = self._clock.mark(), self._turn
        if ended.timed:
            self._spans.append((self._last, now))
        if math.isfinite(sum(self._saved)):
            counters.record_saved("steps", *(self._saved if ended.schedule == trial.CODED else ()))
        self._last = now
        if ended.agree:
            self._decide()
        else:
            self._turn = self._trial.next_turn()

    def _decide(self) -> None:
        before = self._trial.chosen
        self._trial.agree(self._clock.agreed(self._spans))
        self._turn, self._spans = self._trial.next_turn(), []
        found, name = self._trial.last, "coded" if self._trial.chosen == trial.CODED else "plain"
        text = f"{name} from step {self._steps + 1} on (plain {1e3 * found.plain:.4g} ms, coded {1e3 * found.coded:.4g} ms)"
        self._saved = found.plain - found.coded, math.hypot(*self._trial.errors.values())
        switched = self._trial.chosen != before
        for role, op in sorted(self._seen if switched else self._seen - self._told):
            counters.record_choice(role, op, _WHAT, text)
        self._told |= self._seen
