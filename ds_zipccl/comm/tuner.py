"""The tuner: tries the schedules that compete for a kind of message, then follows the fastest one. All ranks switch at the same call.

All steps follow from call numbers, and all decisions from agreed seconds. Both are equal on all ranks. Ranks send each other their
measured times without waiting. Some calls later each rank makes the same decision from the same times. Ranks meet before a timed call,
and the time of the slowest rank counts. At the end of the last call that is timed, ranks that have met send their times. A rank that
waits for these times thus waits for a call that all ranks have begun, and never for the next call of a rank, which may itself wait.

Asynchronous calls, and operations in which some ranks need no data of other ranks, must not make a rank wait. There the time of the fastest
rank counts, because the other ranks may have waited for a late rank. Such calls may overlap: the time counts for which a call had the link
(:func:`in_line`). Times are sent in the next call, and the decision comes many calls later, when the times have long arrived
(:data:`ds_zipccl.policy.trial.DELAY_CALLS`).
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.context import OpContext, Told
from ds_zipccl.policy import trial
from ds_zipccl.policy.admission import Decision
from ds_zipccl.policy.cost_model import LinkProfile


class Tuner:
    """The choice between ``candidates`` for one kind of message on one group. Every rank calls in program order.

    A tuner lives as long as the group, and must keep neither the group nor an operation's tensors alive. Estimates are seconds for
    ``nominal`` bytes, because messages of one kind may differ in size. ``exchanging``: all-to-alls, whose first trial goes in rounds.
    ``profile``: of the link, from which the candidates follow. ``on_choice`` is called with the text of every choice.

    ``decided``: what a call has just decided from, for the caller to take: the agreed seconds of the plain collective, nan where it was not
    tried, and whether all ranks had met.
    """

    def __init__(
        self,
        candidates: Sequence[Decision],
        on_choice: Callable[[str], None],
        nominal: int,
        exchanging: bool = False,
        profile: LinkProfile | None = None,
    ) -> None:
        self._candidates, self._on_choice = candidates, on_choice
        self.nominal, self.profile = nominal, profile
        self.decided: tuple[float, bool] | None = None
        self.trying = True  # the latest planned call belongs to a trial, or there is no choice yet
        self._trial = trial.CallTrial(len(candidates), exchanging)
        self._soon = trial.EXCHANGE_DELAY if exchanging else trial.DELAY_CALLS[0]
        self._calls = 0
        self._due = -1  # the last call that is timed
        self._tag = 0  # of the exchange of measurements
        self._exchange: TimingExchange | None = None  # measurements on their way between ranks
        self._told: int | None = None  # the choice that was counted; the first one counts, also where it was in use
        self._seen: Counter[Hashable] = Counter()  # token -> calls by differences since the last call without them
        self._slots: list[CallTimer] = []  # of the calls that are timed
        self._planned = 0  # the schedule of the latest planned call
        self._waiting: trial.Turn | None = None  # the turn of a candidate that is not ready

    @tensors.undisturbed()
    def next_plan(
        self, open_context: Callable[[], OpContext], token: Hashable = None, *, meets: bool = False
    ) -> tuple[Decision, CallTimer | None]:
        """Return the decision for the next call, and the timer of a timed call, otherwise None. Blocks at a new choice until all ranks
        have sent their measurements.

        ``open_context`` returns a context with new tags of the group, for the exchange of times. ``token`` tells the tensor from other
        tensors of its kind, equally on all ranks; None where no value does. Differences are timed only after an earlier call has left
        their base behind. ``meets``: this rank may wait for the others before the call.

        Raises:
            CommError: a rank's measurements did not arrive.
        """
        told, met = None, False
        if self._calls == self._due:
            # by all ranks, because its tags count; used by ranks that have not told their times yet
            ctx = open_context()
            if self._exchange is None:
                self._tell(ctx)
        elif self._exchange is not None:
            synchronized = all(timer.synchronized for timer in self._slots)
            if _arrived(self._exchange, self._calls - self._due, self._soon, synchronized):
                told, self._exchange, self._slots = self._exchange.all(), None, []
                met = bool((told[:, :, 1] == 1).all())
                self._trial.agree(agreed_seconds(told, self.nominal), overlapping=not met)
        self._calls += 1
        turn = self._waiting or self._trial.next_turn()
        if told is not None:
            self._note_choice(met)
        ready = self._ready(turn.schedule, token) or not turn.trying
        self._waiting = None if ready else turn
        self.trying = turn.trying or self._told is None
        self._planned = turn.schedule
        decision = self._candidates[turn.schedule]
        if not (turn.timed and ready):
            return decision, None
        timer = CallTimer(TimingExchange(open_context(), [(0.0, float(meets), 0.0)]), meets, turn.schedule)
        self._slots.append(timer)
        if turn.agree:
            self._due = self._calls
            ctx = open_context()
            self._tag = ctx.tag(0)
            if all(earlier.synchronized for earlier in self._slots[:-1]):
                timer.on_stop = functools.partial(self._tell, ctx)
        return decision, timer

    def saved(self) -> tuple[float, float] | None:
        """Return the seconds that the planned call takes less than the plain collective, for nominal bytes, with the standard error; None
        unless trials have timed both."""
        if self._told is None or self._waiting or self._candidates[0].frames:  # plain is the first, or none
            return None
        gain = self._trial.estimates[0] - self._trial.estimates[self._planned]
        error = math.hypot(*(self._trial.errors.get(index, math.inf) for index in {0} ^ {self._planned}))
        return (gain, error) if math.isfinite(gain + error) else None

    def _tell(self, ctx: OpContext) -> None:
        """Send this rank's measurements to all ranks."""
        self._exchange = TimingExchange(ctx, in_line(self._slots), self._tag)

    def _ready(self, index: int, token: Hashable) -> bool:
        """Return whether the next call of a candidate shows its speed. For differences, an earlier call must have sent the same tensor as
        a difference."""
        if not self._candidates[index].with_base:
            self._seen.clear()
            return True
        self._seen[token] += 1
        before = trial.SETTLE_CALLS[token is None]
        return self._seen[token] > before or self._seen.total() > trial.SETTLE_CALLS[-1]

    def _note_choice(self, met: bool) -> None:
        """Set what the last agreement has decided from, and count a new choice. ``met``: all ranks had met."""
        tried, chosen = self._trial.tried, self._trial.chosen
        plain = (seconds for index, seconds in tried.items() if not self._candidates[index].frames)
        self.decided = next(plain, math.nan), met
        if chosen == self._told:
            return
        self._told = chosen
        shown = ", ".join(
            f"{decision} {1e3 * seconds:.3g} ms"
            for decision, seconds in zip(self._candidates, self._trial.estimates, strict=True)
            if math.isfinite(seconds)
        )
        self._on_choice(f"{self._candidates[chosen]} from call {self._calls} on ({shown})")


class TunersBySize:
    """The tuners of a kind of message whose size each rank knows only of itself: one tuner for each size class.

    The size of a message is the mean of the bytes that the ranks send. All ranks count the calls. After every
    :data:`ds_zipccl.policy.trial.SIZE_CALLS` calls they exchange their bytes of these calls without waiting, and the class of later
    calls follows from the agreed mean. The mean of several calls is also stable where the sizes of layers differ. ``make`` returns the
    tuner of a size class. A rank whose calls block waits in the next call, until its peers have begun the last of these calls: that call
    itself would have waited for them in gloo. If a call of any rank was asynchronous, all ranks use the mean many calls later, as they do
    with times.
    """

    def __init__(self, make: Callable[[int], Tuner]) -> None:
        self._make = make
        self._tuners: dict[int, Tuner] = {}
        self._size = 0  # the size class; 0 before the first agreement
        self._calls = self._nbytes = 0  # since the last agreement
        self._due = 1  # calls of the next agreement
        self._blocking = True
        self._exchange: TimingExchange | None = None

    @tensors.undisturbed()
    def at(self, open_context: Callable[[], OpContext], nbytes: int, blocking: bool) -> Tuner | None:
        """Return the tuner of the next call, equal on all ranks; None before the first agreement. ``nbytes``: the bytes that this rank
        sends to its peers. ``blocking``: the call is not asynchronous. Blocks where :class:`Tuner` does.

        Raises:
            CommError: a rank's bytes did not arrive.
        """
        if self._exchange is not None and _arrived(self._exchange, self._calls - self._due, 0, self._blocking):
            mean = float(self._exchange.all()[:, 0, 2].mean()) / self._due
            self._size = trial.followed_class(self._size, round(mean))
            self._exchange, self._blocking = None, True
            self._calls = self._nbytes = 0
            self._due = trial.SIZE_CALLS
        self._calls += 1
        if self._calls <= self._due:
            self._nbytes += nbytes
            self._blocking = self._blocking and blocking
            if self._calls == self._due:
                said = (0.0, float(self._blocking), float(self._nbytes))
                self._exchange = TimingExchange(open_context(), [said])
        if not self._size:
            return None
        if self._size not in self._tuners:
            self._tuners[self._size] = self._make(self._size)
        return self._tuners[self._size]


class CallTimer:
    """The timer of one call of this rank by a schedule. ``nbytes``: the bytes of the message, or of this rank's part of a message whose
    size each rank knows only of itself. ``arrivals`` ends when all ranks have reached the call, and tells for each rank whether it meets
    the others; this rank does if ``meets``. ``synchronized``: all ranks began together. ``on_stop`` is called once, where all ranks have
    met, when the call has ended. ``began`` and ``ended``: seconds; ``ended`` is inf if the call did not run or is still running."""

    def __init__(self, arrivals: TimingExchange, meets: bool, schedule: int = 0) -> None:
        self.nbytes, self.schedule = 0, schedule
        self.synchronized = False
        self.on_stop: Callable[[], None] | None = None
        self._arrivals: TimingExchange | None = arrivals
        self._meets = meets
        self.began, self.ended = math.nan, math.inf

    def start(self) -> None:
        """Start the timer. Blocks first until all ranks have reached the call if this rank meets the others."""
        if self._meets and self._arrivals is not None:
            with tensors.undisturbed():
                self.synchronized = bool((self._arrivals.all()[:, 0, 1] == 1).all())
            self._arrivals = None  # frees memory: many kinds of messages may be on trial at a time
        if not self.synchronized:
            self.on_stop = None
        self.began = time.perf_counter()

    def stop(self) -> None:
        """Stop the timer; any thread may call.

        Raises:
            CommError: the transport refused a message of ``on_stop``.
        """
        self.ended = time.perf_counter()
        if self.on_stop is not None:
            then, self.on_stop = self.on_stop, None
            with tensors.undisturbed():
                then()

    def stop_after(self, handle: Any) -> None:
        """Stop the timer when a handle of torch.distributed is done; does not block. A handle without a future is not timed."""
        try:
            future = handle if hasattr(handle, "then") else handle.get_future()
            future.then(lambda _: self.stop())
        except (AttributeError, RuntimeError):
            return


def in_line(timers: Sequence[CallTimer]) -> list[tuple[float, float, float]]:
    """Return (seconds, synchronized, bytes) of calls that may overlap, for each schedule in the order of their ends. A call has the link
    from the end of the call before, or its own start, to its end. From start to end, calls that a schedule sends side by side would each
    last as long as all of them. Seconds are not finite if a call did not run or is still running."""
    found: defaultdict[int, deque[tuple[float, float, float]]] = defaultdict(deque)
    before = -math.inf
    for timer in sorted(timers, key=lambda timer: timer.ended):
        seconds, before = timer.ended - max(timer.began, before), timer.ended
        found[timer.schedule].append((seconds, float(timer.synchronized), float(timer.nbytes)))
    return [found[timer.schedule].popleft() for timer in timers]


class TimingExchange(Told):
    """An exchange of triples of numbers between all ranks: seconds, a flag and bytes, as ``[triples, 3]``, float64. Otherwise as
    :class:`Told`."""

    def __init__(self, ctx: OpContext, triples: Sequence[tuple[float, float, float]], tag: int | None = None) -> None:
        mine = tensors.of_numbers(triples, torch.float64)
        super().__init__(ctx, mine, "the times that ranks measured", ctx.tag(0) if tag is None else tag)


def _arrived(exchange: TimingExchange, calls: int, soon: int, waits: bool) -> bool:
    """Return whether all ranks use what they have exchanged from the next call on, ``calls`` calls after the last one that it is about:
    ``soon``, if every rank waits for its peers, otherwise late. Blocks if this rank ``waits`` for its peers."""
    return calls == trial.DELAY_CALLS[1] or (calls == soon and waits and bool((exchange.all()[:, :, 1] == 1).all()))


def agreed_seconds(measured: torch.Tensor, nominal: int) -> list[float]:
    """Return the agreed seconds of every call for a message of ``nominal`` bytes. ``measured`` is ``[ranks, calls, (seconds, synchronized,
    bytes)]``. The slowest rank counts where all ranks began together, otherwise the fastest rank. The bytes are the mean of all ranks, so
    that the seconds are those of the message. Seconds are NaN, and do not count, where the bytes are far from the nominal ones."""
    seconds = measured[:, :, 0].nan_to_num(nan=math.inf, posinf=math.inf)
    slowest = torch.where((measured[:, :, 1] == 1).all(0), seconds.amax(0), seconds.amin(0))
    nbytes = measured[:, :, 2].mean(0)
    counts = (nbytes * trial.SIZE_RATIO >= nominal) & (nbytes <= nominal * trial.SIZE_RATIO)
    return list(torch.where(counts, slowest * nominal / nbytes, math.nan).tolist())
