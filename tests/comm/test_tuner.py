"""The tuner without ranks: which calls are timed, what their times mean, and when that becomes a choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from ds_zipccl.comm import tuner
from ds_zipccl.comm.tuner import CallTimer, Tuner, agreed_seconds, in_line
from ds_zipccl.policy import trial
from ds_zipccl.policy.admission import Decision

INF, NAN = math.inf, math.nan
PLAIN, RAW, CODED = PLANS = (Decision(False, "", ""), Decision(True, "raw", ""), Decision(True, "cascade", ""))
DELTA = Decision(True, "cascade", "", with_base=True)
#: Calls from the last one of a trial to the decision, where ranks have met.
SOON = trial.DELAY_CALLS[0] + 1


# ---- decisions ---------------------------------------------------------------------------------------------------------


class Link:
    """The context of a group of one rank."""

    def tag(self, index: int) -> int:
        return index


class TimingExchange:
    """The messages of a group of one rank: its own."""

    def __init__(self, link: Any, pairs: Sequence[tuple[float, float, float]], tag: int = 0) -> None:
        self._pairs = [tuple(map(float, each)) for each in pairs]

    def all(self) -> torch.Tensor:
        return torch.tensor([self._pairs], dtype=torch.float64)


class Bench:
    """A tuner whose calls take the seconds of a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plans: Sequence[Decision] = PLANS, meet: bool = True) -> None:
        monkeypatch.setattr(tuner, "TimingExchange", TimingExchange)
        self.told: list[str] = []
        self.tuner, self.meet, self.calls = Tuner(plans, self.told.append, 1), meet, 0
        self.now = Fraction(0)  # exact, so that a call takes the seconds of the table

    def call(self, seconds: Any, tensor: Hashable = None) -> tuple[Decision, bool]:
        """The plan of the next call, which takes ``seconds[plan]``, an iterator or a number; and whether it was timed."""
        plan, watch = self.tuner.next_plan(Link, tensor, meets=self.meet)  # type: ignore[arg-type]
        self.calls += 1
        took = seconds[plan]
        if watch is not None:
            lasted = next(took) if isinstance(took, Iterator) else took
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tuner.time, "perf_counter", lambda: self.now)
                watch.start()
                watch.nbytes = 1
                if lasted < INF:
                    self.now += Fraction(lasted)
                    watch.stop()
        return plan, watch is not None

    def run(self, count: int, seconds: Any, tensor: Hashable = None) -> list[tuple[Decision, bool]]:
        return [self.call(seconds, tensor) for _ in range(count)]


TRIAL = len(PLANS) * trial.TRIAL_CALLS


@pytest.mark.parametrize("meet, delay", [(True, trial.DELAY_CALLS[0]), (False, trial.DELAY_CALLS[1])])
def test_a_trial_and_its_decision(monkeypatch: pytest.MonkeyPatch, meet: bool, delay: int) -> None:
    """Every candidate in a block of timed calls; so many calls later, and not one earlier, the fastest."""
    bench = Bench(monkeypatch, meet=meet)
    seconds = {PLAIN: 3.0, RAW: 2.0, CODED: 1.0}
    tried = bench.run(TRIAL, seconds)
    assert tried == [(plan, True) for plan in PLANS for _ in range(trial.TRIAL_CALLS)]
    assert bench.run(delay, seconds) == [(PLAIN, False)] * delay and not bench.told and bench.tuner.trying
    assert bench.call(seconds) == (CODED, False) and not bench.tuner.trying
    assert bench.told == [
        f"cascade frames from call {TRIAL + delay + 1} on "
        "(plain 3e+03 ms, raw frames 2e+03 ms, cascade frames 1e+03 ms)"
    ]


def test_the_first_call_of_a_block_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With seven times, one more or less moves the median: 1, 2, 3 twice each, and a first call that took an hour."""
    bench = Bench(monkeypatch)
    warm = [3600.0, 1.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert len(warm) == trial.TRIAL_CALLS
    bench.run(TRIAL, {PLAIN: iter(warm), RAW: 3.5, CODED: 4.0})
    bench.run(SOON, dict.fromkeys(PLANS, 9.0))
    assert bench.tuner._trial.estimates == [3.0, 3.5, 4.0], "of the median of six"
    assert len(bench.told) == 1 and bench.told[0].startswith("plain from call ")


def test_saved_is_plain_less_the_planned_call_once_a_trial_has_timed_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first one the median of the plain calls is 4. The median deviation of all seven is 2."""
    seconds = {PLAIN: itertools.chain([9.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0], itertools.repeat(4.0)), RAW: 2.0, CODED: 1.0}
    bench = settled(monkeypatch, seconds, (2, 4))
    assert bench.tuner.saved() is None, "nothing is decided"
    bench.call(seconds)
    assert bench.tuner.saved() == (3.0, pytest.approx(1.86 * 2 / math.sqrt(7)))
    while bench.call(seconds)[0] is not RAW:
        pass
    assert bench.tuner.saved() == (2.0, pytest.approx(1.86 * 2 / math.sqrt(7))), "of the call that runs"
    while bench.call(seconds)[0] is not PLAIN:
        pass
    assert bench.tuner.saved() == (0.0, 0.0)
    for plans in ((RAW, CODED), (PLAIN, CODED)):
        other = Bench(monkeypatch, plans)
        other.run(len(plans) * trial.TRIAL_CALLS + SOON, {PLAIN: INF, RAW: 2.0, CODED: 1.0})
        assert other.tuner.saved() is None, "no plain call, or none that has ended"


def test_one_rank_that_has_not_met_delays_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has met all others at every call, another has not met at one."""
    bench = Bench(monkeypatch)
    theirs = [(1.0, 1.0, 1.0)] * (TRIAL - 1) + [(1.0, 0.0, 1.0)]
    monkeypatch.setattr(TimingExchange, "all", lambda self: torch.tensor([self._pairs, theirs[: len(self._pairs)]]))
    seconds = {PLAIN: 3.0, RAW: 2.0, CODED: 1.0}
    bench.run(TRIAL, seconds)
    bench.run(trial.DELAY_CALLS[1], seconds)
    assert not bench.told
    bench.call(seconds)
    assert len(bench.told) == 1


def test_nobody_waits_early_for_times_that_may_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of this rank did not wait for the others, who may be far behind: it does not wait for what they tell either."""
    waits: list[int] = []
    bench = Bench(monkeypatch)
    told_all = TimingExchange.all
    seconds = {PLAIN: 3.0, RAW: 2.0, CODED: 1.0}
    for number in range(TRIAL):
        bench.meet = number != 5
        bench.call(seconds)
    monkeypatch.setattr(TimingExchange, "all", lambda self: waits.append(bench.calls) or told_all(self))
    bench.run(trial.DELAY_CALLS[1], seconds)
    assert not waits and not bench.told
    bench.call(seconds)
    assert waits and len(bench.told) == 1


def settled(monkeypatch: pytest.MonkeyPatch, seconds: Any, reviews: tuple[int, int] = (50, 50)) -> Bench:
    """A bench whose next call begins with its first decision. The others get their turn after ``reviews`` checks, at first and later."""
    monkeypatch.setattr(trial, "CHECK_CALLS", (10, 20))
    monkeypatch.setattr(trial, "REVIEW_CHECKS", reviews)
    bench = Bench(monkeypatch)
    bench.run(TRIAL + SOON - 1, seconds)
    return bench


def test_checks_and_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a decision the last calls before the next check are timed; after so many checks the others get their turn, then rarer."""
    seconds = {PLAIN: 1.0, RAW: 1.1, CODED: 1.2}
    bench = settled(monkeypatch, seconds, (2, 4))
    checks = [timed for _, timed in bench.run(11 + SOON, seconds)]
    assert checks == [False] * 7 + [True] * 3 + [False] * (SOON + 1)
    history = bench.run(600, seconds)
    tried = [step for step, (plan, _) in enumerate(history) if plan is not PLAIN]
    # each other candidate has a block of so many calls a review
    reviews = [step for step, last in zip(tried, [-1, *tried], strict=False) if step != last + 1]
    assert [plan for plan, _ in history[reviews[0] :][: 2 * trial.PROBE_CALLS]] == (
        [RAW] * trial.PROBE_CALLS + [CODED] * trial.PROBE_CALLS
    )
    # two checks, each of ten calls until times are sent and some until they are used; the block of the choice itself comes first
    first = 2 * (10 + trial.DELAY_CALLS[0]) + trial.PROBE_CALLS
    assert reviews[0] == first - len(checks)
    gaps = [after - before for before, after in itertools.pairwise(reviews)]
    assert len(gaps) >= 3 and len(set(gaps[1:])) == 1 and gaps[0] <= gaps[1]
    assert bench.tuner._trial._review_at == 4 and len(bench.told) == 1, "a review that changes nothing is not told"
    before = bench.tuner._trial._reviews
    while bench.tuner._trial._reviews == before:
        bench.call({PLAIN: 5.0, RAW: 1.1, CODED: 1.2})
    assert bench.tuner._trial._review_at == 2, "after a drift as at first"


def test_a_review_without_rivals_is_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates four times as slow have their turn in every fourth review. With a review after every check, the next follows at once."""
    seconds = {PLAIN: 1.0, RAW: 4.5, CODED: 9.0}
    history = settled(monkeypatch, seconds, (1, 1)).run(60, seconds)
    first = 10 + 4 * (trial.DELAY_CALLS[0] + trial.PROBE_CALLS)
    assert history.index((RAW, True)) == first and all(plan is PLAIN for plan, _ in history[:first])


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_a_drift_forgets_what_was_known(monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
    """The current choice takes so much longer: all others are tried at once, by what they take now."""
    bench = settled(monkeypatch, {PLAIN: 1.0, RAW: 4.0, CODED: 9.0})
    now = {PLAIN: slower, RAW: 1.5, CODED: 1.0}
    history = [plan for plan, _ in bench.run(60, now)]
    first = history.index(RAW)
    assert history[first : first + 2 * trial.PROBE_CALLS] == [RAW] * trial.PROBE_CALLS + [CODED] * trial.PROBE_CALLS
    assert history[-1] is CODED and bench.tuner._trial.estimates == [slower, 1.5, 1.0]
    assert [text.split(" from call ")[0] for text in bench.told] == ["plain", "cascade frames"]


def test_a_new_trial_counts_what_it_has_timed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the check before it, nor what ranks told each other then."""
    bench = settled(monkeypatch, {PLAIN: 1.0, RAW: 4.0, CODED: 9.0})
    check, again = [2.0] * trial.PROBE_CALLS, [9.0, *[1.6] * (trial.PROBE_CALLS - 1)]
    now = {PLAIN: iter([*check, *again, *[1.6] * 50]), RAW: 4.0, CODED: 9.0}
    assert bench.call(now) == (PLAIN, False) and bench.tuner._exchange is None
    while bench.tuner._trial.estimates[0] == 1.0:
        bench.call(now)
    assert bench.tuner._trial.estimates == [2.0, INF, INF] and bench.tuner._exchange is None
    while bench.tuner._trial.estimates[1] == INF:
        bench.call(now)
    assert bench.tuner._trial.estimates == [trial.follow(2.0, 1.6), 4.0, 9.0]


def test_checks_follow_slow_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that does not drift moves the estimate of the current choice, by the median of all its calls."""
    bench = settled(monkeypatch, {PLAIN: 1.0, RAW: 4.0, CODED: 9.0})
    bench.run(11 + SOON, {PLAIN: iter([1.2, 1.2, 1.0, *[1.0] * 20]), RAW: 0.0, CODED: 0.0})
    assert bench.tuner._trial.estimates == [trial.follow(1.0, 1.2), 4.0, 9.0]


def test_calls_that_overlap_are_judged_by_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three coded calls side by side take 4.5 s together, and plain ones 2 s each. The first one began behind others and does not count."""
    pairs = {PLAIN: 2.0, CODED: itertools.cycle([4.5, 0.0, 0.0])}
    bench = Bench(monkeypatch, (PLAIN, CODED), meet=False)
    bench.run(2 * trial.TRIAL_CALLS + trial.DELAY_CALLS[1] + 1, pairs)
    assert bench.tuner._trial.estimates == [2.0, 1.5] and bench.told[0].startswith("cascade frames from call ")
    history = bench.run(trial.CHECK_CALLS[0] + trial.DELAY_CALLS[1], pairs)
    assert [timed for _, timed in history].count(True) == trial.TRIAL_CALLS, "a check of few calls would be of chance"
    assert bench.tuner._trial.estimates == [2.0, 1.5]
    still = [*[2.0] * 3, INF, *[2.0] * 3]
    bench = Bench(monkeypatch, (PLAIN, CODED), meet=False)
    bench.run(2 * trial.TRIAL_CALLS + trial.DELAY_CALLS[1] + 1, {PLAIN: iter([*still, *[2.0] * 99]), CODED: 3.0})
    assert bench.tuner._trial.estimates == [2.0, 3.0], "a call that has not ended does not count"


# ---- exchanges ---------------------------------------------------------------------------------------------------------


def exchanging(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(monkeypatch)
    bench.tuner = Tuner(PLANS, bench.told.append, 1, exchanging=True)
    return bench


FIRST, SECOND = trial.EXCHANGE_ROUNDS
DELAY = trial.EXCHANGE_DELAY


def test_a_candidate_that_is_clearly_fastest_is_chosen_after_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seconds = exchanging(monkeypatch), {PLAIN: 3.0, RAW: 2.0, CODED: 1.0}
    assert bench.run(3 * FIRST, seconds) == [(plan, True) for plan in PLANS] * FIRST
    assert bench.run(DELAY, seconds) == [(PLAIN, False)] * DELAY and not bench.told
    assert bench.call(seconds) == (CODED, False)
    (told,) = bench.told
    assert told.startswith(f"cascade frames from call {3 * FIRST + DELAY + 1} on (plain ")
    assert 3 * FIRST + DELAY < 4 * 3, "before step five of three layers, whose first call of a kind agrees on the size"


def test_candidates_that_are_close_have_another_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round the better one is used; all of their calls count."""
    bench, seconds = exchanging(monkeypatch), {PLAIN: 3.0, RAW: 1.0, CODED: 1.2}
    bench.run(3 * FIRST + DELAY, seconds)
    seconds = {RAW: 1.2, CODED: 0.6}  # type: ignore[dict-item]
    wanted = [(RAW, True), (CODED, True)] * SECOND + [(RAW, False)] * DELAY
    assert bench.run(2 * SECOND + DELAY, seconds) == wanted
    assert len(bench.told) == 1 and bench.told[0].startswith(f"raw frames from call {3 * FIRST + DELAY + 1} on (plain ")
    assert bench.call(seconds) == (CODED, False) and bench.tuner._trial.estimates == pytest.approx([3.0, 1.1, 0.9])
    assert len(bench.told) == 2 and sum(trial.EXCHANGE_ROUNDS) <= trial.TRIAL_CALLS


def test_calls_of_another_size_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate whose calls were all of another size is not left out, and one call among others is ignored."""
    bench, seconds = exchanging(monkeypatch), {PLAIN: 1.0, RAW: 5.0, CODED: 1.0}
    for number in range(3 * FIRST):
        bench.call(seconds)
        if number % 3 == 1 or number == 3:
            bench.tuner._slots[-1].nbytes = trial.SIZE_RATIO + 1
    bench.run(DELAY + 1, seconds)
    assert bench.tuner._trial.estimates == [1.0, INF, 1.0]
    bench.run(3 * SECOND + DELAY, seconds)
    assert bench.tuner._trial.estimates == [1.0, 5.0, 1.0] and bench.told[0].startswith("plain from call ")


# ---- differences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [[None], [1], [1, 2, 3]], ids=str)
def test_differences_settle_first(monkeypatch: pytest.MonkeyPatch, tensors: list[Any]) -> None:
    """Calls are timed when what they need has been left behind: of each tensor, or of all where they are not told apart."""
    monkeypatch.setattr(trial, "TRIAL_CALLS", 2)
    bench = Bench(monkeypatch, (RAW, DELTA))
    seconds = {RAW: 1.0, DELTA: 1.0}
    assert bench.run(2, seconds, tensors[0]) == [(RAW, True)] * 2
    before = trial.SETTLE_CALLS[0 if tensors[0] is not None else 1]
    found = [bench.call(seconds, tensor)[1] for _ in range(before + 1) for tensor in tensors]
    calls = len(tensors) * before
    assert found[:calls] == [False] * calls and found[calls]


def test_tensors_that_never_come_again_are_timed_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_CALLS", 1)
    monkeypatch.setattr(trial, "SETTLE_CALLS", (2, 6, 20))
    bench = Bench(monkeypatch, (RAW, DELTA))
    seconds = {RAW: 1.0, DELTA: 1.0}
    bench.call(seconds)
    assert [bench.call(seconds, tensor)[1] for tensor in range(21)] == [False] * 20 + [True]


def test_a_later_trial_waits_for_differences_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: nothing is sent or decided before all of its calls have been timed."""
    monkeypatch.setattr(trial, "SETTLE_CALLS", (2, 30, 4096))
    monkeypatch.setattr(trial, "REVIEW_CHECKS", (1, 1))
    seconds = {RAW: 1.0, DELTA: 1.5}
    monkeypatch.setattr(trial, "CHECK_CALLS", (10, 20))
    bench = Bench(monkeypatch, (RAW, DELTA))
    history = bench.run(400, seconds)[2 * trial.TRIAL_CALLS + 30 :]
    blocks = [list(calls) for plan, calls in itertools.groupby(history, lambda call: call[0]) if plan is DELTA]
    assert len(blocks) >= 4 and blocks[0] == blocks[1] == [(DELTA, False)] * 30 + [(DELTA, True)] * trial.PROBE_CALLS


def test_a_review_of_differences_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors come when the choice itself is to be tried again: longer than until the next check would have been."""
    monkeypatch.setattr(trial, "REVIEW_CHECKS", (1, 1))
    monkeypatch.setattr(trial, "CHECK_CALLS", (10, 20))
    bench, seconds = Bench(monkeypatch, (PLAIN, DELTA)), {PLAIN: 1.5, DELTA: 1.0}
    tuner = bench.tuner
    while not (bench.told and tuner._exchange and tuner._calls == tuner._due + trial.DELAY_CALLS[0]):
        bench.call(seconds, "old")
    assert [bench.call(seconds, tensor) for tensor in range(50)] == [(DELTA, False)] * 50
    assert tuner.saved() is None, "the call goes in full"
    assert [bench.call(seconds, 0)[1] for _ in range(3)] == [False, True, True] and tuner.saved() == (0.5, 0.0)


# ---- times of all ranks ------------------------------------------------------------------------------------------------

#: (seconds, met) of each rank, and what counts.
TIMES: dict[str, tuple[list[tuple[float, float]], float]] = {
    "all have met: the agreed_seconds": ([(1.0, 1), (3.0, 1), (2.0, 1)], 3.0),
    "the first has not: the fastest": ([(2.0, 0), (3.0, 1), (1.0, 1)], 1.0),
    "the last has not: the fastest": ([(1.0, 1), (3.0, 1), (2.0, 0)], 1.0),
    "none has: the fastest": ([(2.0, 0), (3.0, 0), (4.0, 0)], 2.0),
    "one did not run, all have met": ([(1.0, 1), (INF, 1), (2.0, 1)], INF),
    "one did not run, none has met": ([(1.0, 0), (INF, 0), (2.0, 0)], 1.0),
    "no number": ([(1.0, 1), (NAN, 1), (2.0, 1)], INF),
    "no number where none has met": ([(NAN, 0), (NAN, 0), (NAN, 0)], INF),
}


@pytest.mark.parametrize("case", TIMES)
def test_whose_time_counts(case: str) -> None:
    ranks, wanted = TIMES[case]
    told = [(*pair, 1.0) for pair in ranks]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64)[:, None], 1) == [wanted]


def test_every_call_counts_by_itself() -> None:
    told = [[(1.0, 1, 100), (5.0, 0, 100)], [(2.0, 1, 100), (4.0, 1, 100)]]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64), 100) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((100, 100), 3.0),
        ((50, 50), 6.0),
        ((0, 100), 6.0),
        ((0, 25), 24.0),
        ((800, 800), 0.375),
        *(((nbytes, nbytes), NAN) for nbytes in (0, 12, 801)),
    ],
)
def test_times_are_those_of_the_message(sizes: tuple[int, int], wanted: float) -> None:
    """Not of one rank's part of it, which may be empty. Messages of quite another size do not count."""
    told = [[(seconds, 1.0, nbytes)] for seconds, nbytes in zip((1.0, 3.0), sizes, strict=True)]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64), 100) == [pytest.approx(wanted, nan_ok=True)]


# ---- one rank's stopwatch ----------------------------------------------------------------------------------------------


class _Meeting:
    """Counts how often it is waited for. ``flags``: whether each rank meets the others."""

    calls = 0

    def __init__(self, *flags: float) -> None:
        self.flags = flags or (1.0, 1.0)

    def all(self) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([[[0.0, flag, 0.0]] for flag in self.flags])


def test_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.5, 20.0, 21.0))
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: next(clock))
    meeting, stopped = _Meeting(), []
    watch = CallTimer(meeting, True)  # type: ignore[arg-type]
    watch.nbytes, watch.on_stop = 100, lambda: stopped.append(in_line([watch]))
    assert not math.isfinite(in_line([watch])[0][0]), "it has not run"
    watch.start()
    assert meeting.calls == 1 and in_line([watch]) == [(INF, 1.0, 100.0)], "it runs still"
    watch.stop()
    assert in_line([watch]) == [(2.5, 1.0, 100.0)] and stopped == [in_line([watch])]
    watch = CallTimer(meeting, False)  # type: ignore[arg-type]
    watch.on_stop = lambda: stopped.append(in_line([watch]))
    watch.start()
    watch.stop()
    assert meeting.calls == 1 and in_line([watch]) == [(1.0, 0.0, 0.0)] and len(stopped) == 1


#: (schedule, began, ended, bytes) of calls, and the seconds and bytes that count: each schedule's in the order of their ends.
OVERLAPS: dict[str, tuple[list[tuple[int, float, float, int]], list[tuple[float, int]]]] = {
    "apart": ([(0, 0, 2, 1), (0, 5, 6, 2), (1, 6, 9, 3)], [(2, 1), (1, 2), (3, 3)]),
    "one after the other": ([(0, 0, 2, 1), (0, 0, 4, 1), (0, 1, 6, 1)], [(2, 1), (2, 1), (2, 1)]),
    "side by side": ([(0, 0, 4, 1), (0, 0, 4, 1), (0, 5, 7, 1)], [(4, 1), (0, 1), (2, 1)]),
    "the later one ends first": ([(0, 0, 4, 1), (0, 1, 3, 2)], [(2, 2), (1, 1)]),
    "schedules overlap, too": ([(0, 0, 4, 1), (1, 1, 3, 2), (1, 3, 8, 3)], [(1, 1), (2, 2), (4, 3)]),
    "some have not ended": ([(0, NAN, INF, 1), (0, 0, 4, 2), (0, 1, INF, 3)], [(4, 2), (INF, 1), (INF, 3)]),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_calls_that_overlap_share_the_time(case: str) -> None:
    calls, wanted = OVERLAPS[case]
    timers = []
    for schedule, began, ended, nbytes in calls:
        timers.append(CallTimer(_Meeting(), False, schedule))  # type: ignore[arg-type]
        timers[-1].began, timers[-1].ended, timers[-1].nbytes = began, ended, nbytes
    found = [(seconds if math.isfinite(seconds) else INF, nbytes) for seconds, _, nbytes in in_line(timers)]
    assert found == wanted


def test_one_rank_that_does_not_wait_is_known_to_all() -> None:
    """The others have waited for it, and know that it runs ahead from here on: nothing is sent at the end of the call."""
    watch = CallTimer(_Meeting(1.0, 0.0), True)  # type: ignore[arg-type]
    watch.on_stop = lambda: pytest.fail("the times were sent")
    watch.start()
    watch.stop()
    assert in_line([watch])[0][1] == 0.0


def test_a_handle_stops_it_when_it_is_done() -> None:
    for wrap in (lambda future: future, lambda future: type("Handle", (), {"get_future": lambda self: future})()):
        watch, future = CallTimer(_Meeting(), False), torch.futures.Future()  # type: ignore[arg-type,var-annotated]
        watch.start()
        watch.stop_after(wrap(future))
        assert watch.ended == INF
        future.set_result(None)
        assert watch.ended < INF
    watch = CallTimer(_Meeting(), False)  # type: ignore[arg-type]
    watch.start()
    watch.stop_after(object())
    assert watch.ended == INF, "a handle that cannot tell"
