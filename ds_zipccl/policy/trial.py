"""The trial of whole optimizer steps: the turns that plain and coded steps take, and what their times mean. Pure: numbers in, numbers out.

The time of one call says little: on devices decoding takes multiprocessors and memory from the model, and calls that overlap wait for
each other. So windows of a few steps take turns between the plain schedules and the coded ones. The measurement of a link has turns too, of
sizes.

All turns follow from numbers of steps, and all judgements from agreed times: all ranks switch at the same step.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

#: The schedules: whatever has a choice is plain, or coded.
PLAIN, CODED = range(2)


class Turn(NamedTuple):
    """The schedule of a step. ``timed``: its time counts. ``agree``: a trial ends with it, and the ranks agree on the times that count."""

    schedule: int
    timed: bool = False
    agree: bool = False


def standard_error(seconds: Sequence[float]) -> float:
    """Return the standard error of a median of seconds, by their median deviation, which a first slow call does not move; inf where fewer
    than two seconds count."""
    times = [spent for spent in seconds if 0 < spent < math.inf]
    if len(times) < 2:
        return math.inf
    middle = statistics.median(times)
    deviation = 1.86 * statistics.median(abs(spent - middle) for spent in times)  # of normal times
    return deviation / math.sqrt(len(times))


def turns(candidates: Sequence[_T], rounds: int) -> list[_T]:
    """Return the turns of a trial: with several rounds a slow moment meets all candidates."""
    return [candidate for _ in range(rounds) for candidate in candidates]


#: Steps before the first trial (seed: allocators, compilers and caches settle).
WARMUP_STEPS = 10
#: Windows of a trial and of a probe for each schedule; steps of a window that do not count, because the step before had another schedule;
#: steps that do (seed).
TRIAL_WINDOWS, PROBE_WINDOWS, SETTLE_STEPS, WINDOW_STEPS = 6, 2, 1, 4
#: Steps between a trial and the agreement on its times (admission: the device has finished the trial, so that no rank waits).
DELAY_STEPS = 2
#: Part of all steps that probes of the other schedule may cost (seed).
PROBE_SHARE = 0.01
#: The other schedule must take less than this share of the current schedule's time (seed).
STEP_HYSTERESIS = 0.98
#: A schedule that takes this many times the time of the other is clearly slower (seed).
CLEARLY_SLOWER = 1.3
#: The other schedule must be ahead in ranks by so many standard deviations, in a probe and in the trial that follows it (seed: noise alone
#: passes a trial once in 4,000, and both tests once in 60,000 probes). No trial follows a probe in which one schedule is so far ahead, and
#: :data:`CLEARLY_SLOWER` times as fast.
AHEAD_IN_PROBE, AHEAD_IN_TRIAL, AHEAD_CLEARLY = 1.5, 3.5, 3.0


class Comparison(NamedTuple):
    """The medians of both schedules in seconds, infinite where too few steps count. ``ahead``: by how many standard deviations of chance
    the coded steps are ahead in the ranking of all steps (Mann and Whitney's test)."""

    plain: float = math.inf
    coded: float = math.inf
    ahead: float = 0.0

    def favors(self, rival: int, ahead: float) -> bool:
        """Return whether the schedule ``rival`` is faster than the other one, and ``ahead`` by so many standard deviations."""
        lead = self.ahead if rival == CODED else -self.ahead
        now, then = (self.plain, self.coded) if rival == CODED else (self.coded, self.plain)
        return then < STEP_HYSTERESIS * now < math.inf and lead >= ahead

    @property
    def clear(self) -> bool:
        """Whether one schedule is so much faster that a probe alone shows it."""
        return abs(self.ahead) >= AHEAD_CLEARLY and max(self[:2]) > CLEARLY_SLOWER * min(self[:2])

    def steps_to_probe(self, chosen: int) -> int:
        """Return the steps until the next probe: its slower steps cost at most :data:`PROBE_SHARE`."""
        now, then = (self.plain, self.coded) if chosen == PLAIN else (self.coded, self.plain)
        lost = PROBE_WINDOWS * (SETTLE_STEPS + WINDOW_STEPS) * max(1.0, then / now - 1.0 if now < math.inf else 1.0)
        return math.ceil(lost / PROBE_SHARE)


def compare(plain: Sequence[float], coded: Sequence[float]) -> Comparison:
    """Compare the schedules by the seconds of their steps. A time that is not finite and above 0 does not count."""
    plain, coded = ([spent for spent in times if 0 < spent < math.inf] for times in (plain, coded))
    if min(len(plain), len(coded)) < WINDOW_STEPS:
        return Comparison()
    pairs = len(plain) * len(coded)
    wins = sum((fast < slow) + 0.5 * (fast == slow) for fast in coded for slow in plain)
    deviation = math.sqrt(pairs * (len(plain) + len(coded) + 1) / 12)
    return Comparison(statistics.median(plain), statistics.median(coded), (wins - pairs / 2) / deviation)


class StepTrial:
    """The choice between :data:`PLAIN` and :data:`CODED` by times of whole steps: turns that are timed, and those of the choice. Ranks take
    them in step with each other.

    ``chosen``: the schedule of turns that are not part of a trial. ``errors``: schedule -> standard error of its last times. ``last``: the
    last comparison.
    """

    def __init__(self, start: int) -> None:
        self.chosen = start
        self.errors: dict[int, float] = {}
        self.last = Comparison()
        self._agreed: list[float] = []
        self._turns = self._plan()

    def next_turn(self) -> Turn:
        """Return the next turn. Agreed times are judged first."""
        return next(self._turns)

    def agree(self, seconds: list[float]) -> None:
        """Take the agreed seconds of the last turns that were timed, in their order."""
        self._agreed = seconds

    def _plan(self) -> Iterator[Turn]:
        """Yield windows of both schedules in turns, the chosen one first, and some steps up to the agreement; then wait for the next probe.
        A probe that finds the other schedule better is followed by a trial unless it is clear. The first choice is that of the rule."""
        pause, windows, ahead = WARMUP_STEPS - 1, PROBE_WINDOWS, AHEAD_IN_PROBE
        while True:
            yield from [Turn(self.chosen)] * pause
            rival, steps = 1 - self.chosen, list[Turn]()
            for schedule in turns((self.chosen, rival), windows):
                steps += [Turn(schedule)] * SETTLE_STEPS + [Turn(schedule, timed=True)] * WINDOW_STEPS
            times = yield from self._time(steps + [Turn(self.chosen)] * DELAY_STEPS)
            self.last = compare(times[PLAIN], times[CODED])
            better = self.last.favors(rival, ahead)
            if windows == PROBE_WINDOWS and better and not self.last.clear:
                pause, windows, ahead = 0, TRIAL_WINDOWS, AHEAD_IN_TRIAL
                continue
            self.chosen = rival if better else self.chosen
            pause, windows, ahead = self.last.steps_to_probe(self.chosen), PROBE_WINDOWS, AHEAD_IN_PROBE

    def _time(self, planned: Sequence[Turn]) -> Generator[Turn, None, Mapping[int, list[float]]]:
        """Yield planned turns, the last of which agrees; return the seconds of each schedule."""
        yield from planned[:-1]
        yield planned[-1]._replace(agree=True)
        agreed, self._agreed = self._agreed, []
        measured: defaultdict[int, list[float]] = defaultdict(list)
        for turn, seconds in zip((turn for turn in planned if turn.timed), agreed, strict=True):
            measured[turn.schedule].append(seconds)
        self.errors |= {schedule: standard_error(times) for schedule, times in measured.items()}
        return measured


# ---- sizes of a measurement ------------------------------------------------------------------------------------------

#: Rounds over all sizes, of which the median counts (seed): a bad moment of the machine or of the network meets one of them. Two times of a
#: size that differ by this factor at most (seed: as much as free machines show) agree, and need no third one.
ROUNDS, _AGREEING = 3, 1.25


def in_rounds(
    sizes: tuple[int, ...], measured: Callable[[int], tuple[float, float]], budget: float
) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of each of ``sizes``, which rise: the median of :data:`ROUNDS` measurements, one in each round over all
    sizes; the lower one of two, because other programs only slow a link down. The third is made where the first two do not agree.

    Args:
        measured: returns the seconds of a size, and those of its measurement; equal on all ranks.
        budget: seconds of all measurements. Larger sizes and later rounds that would take longer are left out; the first size is measured.
    """
    times: dict[int, list[float]] = {}
    spent = 0.0
    for size in turns(sizes, ROUNDS):
        known, last = times.get(size), max(times, default=0)
        expected = known[0] if known else size / last * times[last][0] if last else 0.0
        agreed = known is not None and len(known) == ROUNDS - 1 and max(known) <= _AGREEING * min(known)
        if spent + expected <= budget and (known or size > last) and not agreed:
            seconds, took = measured(size)
            times.setdefault(size, []).append(seconds)
            spent += took
    return [(float(size), statistics.median_low(found)) for size, found in times.items()]
