"""The rules by which a job chooses between plain and coded data movement from times of whole optimizer steps. Pure: numbers in, numbers
out.

A call's own time would not show that decoding takes multiprocessors and memory from the model. Whole steps show it. A trial lets windows of
a few steps take turns between the two schedules. Its times are agreed by all ranks at once, some steps after the trial. All else follows
from step numbers, so that all ranks switch at the same step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

#: The schedules: data movement is plain, or coded.
PLAIN, CODED = "plain", "coded"
#: Steps before the first trial (seed: allocators, compilers and caches settle).
WARMUP_STEPS = 10
#: Windows of a trial for each schedule; steps of a window that do not count, because the step before had another schedule; steps that do
#: (seed).
TRIAL_WINDOWS, SETTLE_STEPS, WINDOW_STEPS = 6, 1, 4
#: Windows of a probe for each schedule (seed).
PROBE_WINDOWS = 2
#: Steps between a trial and the agreement on its times (admission: the device has finished the trial, so that no rank waits).
DELAY_STEPS = 2
#: Part of all steps that probes of the other schedule may cost (seed).
PROBE_SHARE = 0.01
#: The other schedule must take less than this share of the current schedule's time (seed).
HYSTERESIS = 0.98
#: The other schedule must be ahead in ranks by so many standard deviations, in a probe and in the trial that follows it (seed: noise alone
#: passes a trial once in 4,000, and both tests once in 60,000 probes, whatever its distribution).
AHEAD_IN_PROBE, AHEAD_IN_TRIAL = 1.5, 3.5


class Comparison(NamedTuple):
    """The medians of both schedules in seconds, infinite where too few steps count. ``ahead``: by how many standard deviations of chance
    the coded steps are ahead in the ranking of all steps (Mann and Whitney's test)."""

    plain: float = math.inf
    coded: float = math.inf
    ahead: float = 0.0

    def of(self, schedule: str) -> float:
        """Return the median of a schedule."""
        return self.plain if schedule == PLAIN else self.coded


class Ended(NamedTuple):
    """What a step that ended is for: ``timed``: its time counts. ``agree``: now the ranks agree on the times that count."""

    timed: bool
    agree: bool


def other(schedule: str) -> str:
    """Return the other schedule."""
    return CODED if schedule == PLAIN else PLAIN


def judge(schedules: Sequence[str], seconds: Sequence[float]) -> Comparison:
    """Compare the schedules by their steps. A time that is not finite and above 0 does not count."""
    times: dict[str, list[float]] = {PLAIN: [], CODED: []}
    for schedule, spent in zip(schedules, seconds, strict=True):
        if 0 < spent < math.inf:
            times[schedule].append(spent)
    plain, coded = times[PLAIN], times[CODED]
    if min(len(plain), len(coded)) < WINDOW_STEPS:
        return Comparison()
    pairs = len(plain) * len(coded)
    wins = sum((fast < slow) + 0.5 * (fast == slow) for fast in coded for slow in plain)
    deviation = math.sqrt(pairs * (len(plain) + len(coded) + 1) / 12)
    return Comparison(statistics.median(plain), statistics.median(coded), (wins - pairs / 2) / deviation)


def clearly_better(comparison: Comparison, current: str, ahead: float) -> bool:
    """Return whether the schedule that is not ``current`` is faster, and ``ahead`` by so many standard deviations."""
    found = comparison.ahead if current == PLAIN else -comparison.ahead
    return comparison.of(other(current)) < HYSTERESIS * comparison.of(current) and found >= ahead


def steps_to_probe(comparison: Comparison, current: str) -> int:
    """Return the steps until the next probe: its slower steps cost at most :data:`PROBE_SHARE`."""
    now, then = comparison.of(current), comparison.of(other(current))
    lost = PROBE_WINDOWS * (SETTLE_STEPS + WINDOW_STEPS) * max(1.0, then / now - 1.0 if now < math.inf else 1.0)
    return math.ceil(lost / PROBE_SHARE)


class StepTuner:
    """The schedule of every step. All ranks call in step with each other.

    ``schedule``: of the step that runs now. ``chosen``: of steps that are not part of a trial. ``last``: the last comparison.
    """

    def __init__(self, start: str) -> None:
        self.chosen = self.schedule = start
        self.last = Comparison()
        #: Of coming steps: schedule, whether timed, whether to agree after.
        self._plan: deque[tuple[str, bool, bool]] = deque()
        self._timed: list[str] = []  # schedules of the steps that count
        self._confirming = True
        self._idle(WARMUP_STEPS - 1)
        self._try(TRIAL_WINDOWS)
        self._now = self._plan.popleft()
        self.schedule = self._now[0]

    def end_step(self) -> Ended:
        """Note that a step has ended; the next one begins. Where ``agree`` is set, :meth:`decide` follows before the next call."""
        schedule, timed, agree = self._now
        if timed:
            self._timed.append(schedule)
        if not agree:
            self._advance()
        return Ended(timed, agree)

    def decide(self, seconds: Sequence[float]) -> bool:
        """Take the agreed seconds of the steps that count, in their order; return whether the choice has changed."""
        self.last = judge(self._timed, seconds)
        self._timed = []
        better = clearly_better(self.last, self.chosen, AHEAD_IN_TRIAL if self._confirming else AHEAD_IN_PROBE)
        switched = better and self._confirming
        if switched:
            self.chosen = other(self.chosen)
        # a probe that finds the other schedule better is followed by a trial
        self._confirming = better and not switched
        if not self._confirming:
            self._idle(steps_to_probe(self.last, self.chosen))
        self._try(TRIAL_WINDOWS if self._confirming else PROBE_WINDOWS)
        self._advance()
        return switched

    def _idle(self, steps: int) -> None:
        self._plan.extend([(self.chosen, False, False)] * steps)

    def _try(self, windows: int) -> None:
        """Plan windows of both schedules in turns, the chosen one first, and the agreement."""
        for _ in range(windows):
            for schedule in (self.chosen, other(self.chosen)):
                self._plan.extend([(schedule, False, False)] * SETTLE_STEPS + [(schedule, True, False)] * WINDOW_STEPS)
        self._idle(DELAY_STEPS - 1)
        self._plan.append((self.chosen, False, True))

    def _advance(self) -> None:
        self._now = self._plan.popleft()
        self.schedule = self._now[0]
