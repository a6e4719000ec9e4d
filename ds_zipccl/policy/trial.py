"""Trials: the turns that competing schedules take, and what their times mean. Pure: numbers in, numbers out.

There are two clocks. A call is timed by :mod:`ds_zipccl.comm.tuner`: every candidate has its turns, and all ranks judge the agreed times.
An optimizer step is timed on devices, where a call's own time would not show that decoding takes multiprocessors and memory from the model:
windows of a few steps take turns between plain and coded data movement. The measurement of a link has turns too, of sizes.

All turns follow from numbers of calls and steps, and all judgements from agreed times: all ranks switch at the same one.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

#: Another candidate must take less than this share of the current candidate's time (seed: above the noise of medians of three).
HYSTERESIS = 0.95

_T = TypeVar("_T")


class Turn(NamedTuple):
    """The schedule of a call or step. ``timed``: its time counts. ``trying``: it may wait until earlier turns have left what its schedule
    needs. ``agree``: a trial ends with it, and the ranks agree on the times that count."""

    schedule: int
    timed: bool = False
    trying: bool = False
    agree: bool = False


class Trial(ABC):
    """The schedules of all calls or steps: turns that are timed, and those of the choice. Ranks take them in step with each other.

    ``chosen``: the schedule of turns that are not part of a trial. ``errors``: schedule -> standard error of its last times.
    """

    def __init__(self, start: int) -> None:
        self.chosen = start
        self.errors: dict[int, float] = {}
        self._agreed: list[float] = []
        self._overlapping = False
        self._turns = self._plan()

    def next_turn(self) -> Turn:
        """Return the next turn. Agreed times are judged first."""
        return next(self._turns)

    def agree(self, seconds: list[float], overlapping: bool = False) -> None:
        """Take the agreed seconds of the last turns that were timed, in their order. ``overlapping``: of calls that may overlap."""
        self._agreed, self._overlapping = seconds, overlapping

    @abstractmethod
    def _plan(self) -> Iterator[Turn]:
        """Yield all turns."""

    def _time(self, planned: Sequence[Turn]) -> Generator[Turn, None, Mapping[int, list[float]]]:
        """Yield planned turns, and then those of the choice until their times are agreed; return the seconds of each schedule."""
        yield from planned[:-1]
        yield planned[-1]._replace(agree=True)
        while not self._agreed:
            yield Turn(self.chosen)
        agreed, self._agreed = self._agreed, []
        measured: defaultdict[int, list[float]] = defaultdict(list)
        for turn, seconds in zip((turn for turn in planned if turn.timed), agreed, strict=True):
            measured[turn.schedule].append(seconds)
        self.errors |= {schedule: standard_error(times) for schedule, times in measured.items()}
        return measured


def _ended(seconds: Sequence[float]) -> list[float]:
    """Return the seconds of calls that have ended, and whose size counts."""
    return [spent for spent in seconds if math.isfinite(spent)]


def standard_error(seconds: Sequence[float]) -> float:
    """Return the standard error of a median of seconds, by their median deviation, which a first slow call does not move; inf where fewer
    than two seconds count."""
    times = [spent for spent in seconds if 0 < spent < math.inf]
    if len(times) < 2:
        return math.inf
    middle = statistics.median(times)
    deviation = 1.86 * statistics.median(abs(spent - middle) for spent in times)  # of normal times
    return deviation / math.sqrt(len(times))


def turns(candidates: Sequence[_T], rounds: int, in_a_row: int = 1) -> list[_T]:
    """Return the turns of a trial: in each round every candidate has ``in_a_row`` turns. Turns of one candidate in a row leave it what it
    needs of its earlier ones; with several rounds a slow moment meets all candidates."""
    return [candidate for _ in range(rounds) for candidate in candidates for _ in range(in_a_row)]


def choose(current: int, estimates: Sequence[float], below: float = HYSTERESIS) -> int:
    """Return the candidate with the shortest estimate in seconds (inf where unknown) if it takes less than ``below`` of the time of
    ``current``. Otherwise, and if the estimate of ``current`` is unknown, return ``current``."""
    best = min(range(len(estimates)), key=estimates.__getitem__)
    return best if estimates[best] < below * estimates[current] < math.inf else current


# ---- calls -----------------------------------------------------------------------------------------------------------

#: Calls of each candidate in its first trial, and in a check or a later trial, if they do not overlap. In trials, and where calls overlap,
#: the first call warms up and does not count (seed).
TRIAL_CALLS, PROBE_CALLS = 7, 3
#: Calls by differences before a call is timed (seed): of one tensor, so that every tensor of a step has had a call; of all tensors, where
#: tensors have no token; of all tensors, in any case.
SETTLE_CALLS = (2, 6, 4096)
#: Calls between the last timed call and the use of its time: where ranks have met at every timed call (seed: the times then arrive before
#: they are used), and where they have not (admission: a program in which a rank runs farther ahead than this could deadlock).
DELAY_CALLS = (4, 64)
#: The rounds of the first trial of an all-to-all, in calls of each candidate, and the calls from a round to its result (seed: a step has
#: few calls of a kind, and a candidate that is clearly slower shows in three calls).
EXCHANGE_ROUNDS, EXCHANGE_DELAY = (3, 4), 1
#: A candidate whose fastest call takes this many times the median call of the best candidate is not tried further in a trial (seed).
CLEARLY_SLOWER = 1.3
#: Calls of a stream of messages whose sizes each rank knows only of itself, from one agreement on their size to the next (seed: a step of
#: a model has as many calls of a kind as layers, and an agreement costs some 50 us).
SIZE_CALLS = 8
#: The size of such messages leaves its class when it is this many times out of the class (seed: sizes change a little in every call).
SIZE_MARGIN = 1.25
#: A timed call counts if its size is at most this many times smaller or larger than the nominal one (seed: the time of a message is not
#: proportional to its size).
SIZE_RATIO = 8
#: Calls between checks of a choice: for calls longer than CHECK_SECONDS, and for shorter calls (seed: a check costs about 0.2 ms).
CHECK_CALLS, CHECK_SECONDS = (32, 256), 2e-3
#: Checks before the other candidates are tried again: the first number at first, twice as many each time, up to the second number (seed).
REVIEW_CHECKS = (2, 32)
#: A time longer or shorter than the estimate by this factor starts a new trial at once (seed).
DRIFT = 1.3
#: Weight of a new measurement in an estimate (seed).
FOLLOW = 0.5
#: The measurement of the link is wrong if plain collectives take so many times longer or shorter than predicted (seed: the prediction of
#: gloo's own schedules is right within a half); bytes from which on the link decides on their time (seed).
LINK_ERROR, LINK_BYTES = 3.0, 4 << 20


def link_error(predicted: float, seconds: float, met: bool) -> float:
    """Return the factor by which the link is slower than it was measured, from the predicted and the agreed seconds of plain collectives; 1
    where they agree well enough. Ranks that have not met may have waited for each other, so that only a short time tells something."""
    factor = seconds / predicted
    wrong = 0 < factor < 1 / LINK_ERROR or (met and LINK_ERROR < factor < math.inf)
    return factor if wrong else 1.0


def size_class(nbytes: int) -> int:
    """Return the size class of a message of ``nbytes`` bytes, the exponent of a power of two. Messages of one class share a choice."""
    return nbytes.bit_length()


def followed_class(size: int, nbytes: int) -> int:
    """Return the size class of messages of about ``nbytes`` bytes after messages of class ``size``; 0 stands for no messages."""
    inside = size and (1 << size >> 1) / SIZE_MARGIN <= nbytes < (1 << size) * SIZE_MARGIN
    return size if inside else size_class(max(1, nbytes))


def size_text(size: int) -> str:
    """Return a size class in words."""
    return f"up to {(1 << size) / (1 << 20):.3g} MiB"


def remaining(estimates: Sequence[float], fastest: Mapping[int, float]) -> list[int]:
    """Return the candidates that are not clearly slower than the best one. ``estimates``: seconds of each candidate; ``fastest``: candidate
    -> seconds of its fastest call, of those that have been timed."""
    best = min(estimates)
    return [index for index in range(len(estimates)) if not fastest.get(index, 0.0) > CLEARLY_SLOWER * best]


def follow(estimate: float, seconds: float) -> float:
    """Return the estimate after another measurement, in seconds; inf stands for no measurement."""
    if math.isinf(seconds) or math.isinf(estimate):
        return min(estimate, seconds)
    return estimate + FOLLOW * (seconds - estimate)


def drifted(estimate: float, seconds: float) -> bool:
    """Return whether a measurement is so far from the estimate that the other candidates need another trial."""
    return math.isfinite(seconds) and not estimate / DRIFT < seconds < estimate * DRIFT


def check_calls(seconds: float) -> int:
    """Return the calls between two checks of a choice that takes ``seconds`` a call: the exchange of times must cost next to nothing."""
    return CHECK_CALLS[0] if seconds > CHECK_SECONDS else CHECK_CALLS[1]


def probed(current: int, estimates: Sequence[float], review: int) -> list[int]:
    """Return the candidates that review number ``review`` tries again. A candidate twice as slow is tried in every second review, a
    candidate four times as slow in every fourth, a slower one at most in every eighth."""
    rivals = [index for index in range(len(estimates)) if index != current]
    behind = {
        index: estimates[index] / estimates[current] if math.isfinite(estimates[current]) else 1.0 for index in rivals
    }
    rarity = {index: int(min(8.0, max(1.0, behind[index]))).bit_length() - 1 for index in rivals}
    return [index for index in rivals if review % (1 << rarity[index]) == 0]


class CallTrial(Trial):
    """The choice between candidates by times of calls: a first trial, which goes in rounds for ``exchanging`` calls; then checks of the
    choice, and reviews of other candidates.

    ``estimates``: seconds of each candidate, inf where unknown. ``tried``: candidate -> seconds in the last trial; empty after a check.
    """

    def __init__(self, candidates: int, exchanging: bool) -> None:
        self.estimates = [math.inf] * candidates
        self.tried: dict[int, float] = {}
        self._exchanging, self._reviews, self._review_at = exchanging, 0, REVIEW_CHECKS[0]
        super().__init__(0)

    def _plan(self) -> Iterator[Turn]:
        left: Sequence[int] = range(len(self.estimates))
        for calls in EXCHANGE_ROUNDS if self._exchanging else (TRIAL_CALLS,):
            measured = yield from self._time(self._tries(left, calls))
            self._judge(measured)
            fastest = {index: min(_ended(times), default=0.0) for index, times in measured.items()}
            left = remaining(self.estimates, fastest)
            if len(left) == 1:
                break
        checks = 0
        while True:
            calls = TRIAL_CALLS if self._overlapping else PROBE_CALLS
            yield from [Turn(self.chosen)] * (check_calls(self.estimates[self.chosen]) - calls)
            changed = self._judge((yield from self._time([Turn(self.chosen, timed=True)] * calls)))
            checks += 1
            while changed or checks >= self._review_at:
                self._reviews += 1
                self._review_at = REVIEW_CHECKS[0] if changed else min(2 * self._review_at, REVIEW_CHECKS[1])
                rivals = probed(self.chosen, self.estimates, 0 if changed else self._reviews)
                changed = self._judge((yield from self._time(self._tries([self.chosen, *rivals], calls))))
                checks = 0 if rivals else 1  # without rivals it was a check

    def _tries(self, indices: Sequence[int], calls: int) -> list[Turn]:
        """Return turns of ``calls`` calls of each candidate: in a row, because differences need the base of earlier calls, or by turns in
        exchanges, so that a slow moment of the network meets all candidates."""
        order = turns(indices, calls) if self._exchanging else turns(indices, 1, calls)
        return [Turn(index, timed=True, trying=True) for index in order]

    def _judge(self, measured: Mapping[int, list[float]]) -> bool:
        """Choose a candidate by the seconds of a trial, whose first calls warm up. A check times the choice alone: return whether that has
        drifted. All estimates are outdated then."""
        tried, before = len(measured) > 1, self.estimates[self.chosen]
        # of calls that overlap, only the mean adds up to the time of all
        middle = statistics.fmean if self._overlapping else statistics.median
        warm = int(tried or self._overlapping)
        found = {index: middle(_ended(times[warm:] or times) or [math.inf]) for index, times in measured.items()}
        for index, seconds in found.items():
            self.estimates[index] = follow(self.estimates[index], seconds)
        self.tried = found if tried else {}
        if tried:
            self.chosen = choose(self.chosen, self.estimates)
            return False
        now = found[self.chosen]
        if not drifted(before, now):
            return False
        self.estimates = [math.inf] * len(self.estimates)
        self.estimates[self.chosen] = now
        return True


# ---- steps -----------------------------------------------------------------------------------------------------------

#: The schedules: data movement is plain, or coded.
PLAIN, CODED = range(2)
#: Steps before the first trial (seed: allocators, compilers and caches settle).
WARMUP_STEPS = 10
#: Windows of a trial and of a probe for each schedule; steps of a window that do not count, because the step before had another schedule;
#: steps that do (seed). A trial begins with a probe.
TRIAL_WINDOWS, PROBE_WINDOWS, SETTLE_STEPS, WINDOW_STEPS = 6, 2, 1, 4
#: Steps between a trial and the agreement on its times (admission: the device has finished the trial, so that no rank waits).
DELAY_STEPS = 2
#: Part of all steps that probes of the other schedule may cost (seed).
PROBE_SHARE = 0.01
#: The other schedule must take less than this share of the current schedule's time (seed).
STEP_HYSTERESIS = 0.98
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
        return choose(1 - rival, (self.plain, self.coded), STEP_HYSTERESIS) == rival and lead >= ahead

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


class StepTrial(Trial):
    """The choice between :data:`PLAIN` and :data:`CODED` by times of whole steps. ``last``: the last comparison."""

    last = Comparison()

    def _plan(self) -> Iterator[Turn]:
        """Yield windows of both schedules in turns, the chosen one first, and some steps up to the agreement; then wait for the next probe.
        The first probe, and one that finds the other schedule better, are followed by a trial unless they are clear."""
        pause, windows, ahead = WARMUP_STEPS - 1, PROBE_WINDOWS, AHEAD_IN_PROBE
        while True:
            yield from [Turn(self.chosen)] * pause
            rival, steps = 1 - self.chosen, list[Turn]()
            for schedule in turns((self.chosen, rival), windows):
                steps += [Turn(schedule)] * SETTLE_STEPS + [Turn(schedule, timed=True)] * WINDOW_STEPS
            times = yield from self._time(steps + [Turn(self.chosen)] * DELAY_STEPS)
            before, self.last = self.last, compare(times[PLAIN], times[CODED])
            better = self.last.favors(rival, ahead)
            if windows == PROBE_WINDOWS and not self.last.clear and (better or before == Comparison()):
                pause, windows, ahead = 0, TRIAL_WINDOWS, AHEAD_IN_TRIAL
                continue
            self.chosen = rival if better else self.chosen
            pause, windows, ahead = self.last.steps_to_probe(self.chosen), PROBE_WINDOWS, AHEAD_IN_PROBE


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
