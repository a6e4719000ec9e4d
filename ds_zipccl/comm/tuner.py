"""Which of several schedules a kind of message goes by: tried first, then followed, switched by all ranks at the same call.

Everything here goes by call numbers, which are equal on all ranks, as is all that decisions are made of: ranks send each other the times
they measured, without waiting, and some calls later each makes the same decision from the same numbers. Ranks meet before a call that is
timed, and the time of the slowest counts. Where a call is asynchronous, or some ranks need nothing of others, nobody may be made
to wait: then the time of the fastest counts, as the others may have waited for somebody, and the decision comes many calls later,
when the numbers have long arrived (policy.DELAY_CALLS).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.work import CommError
from ds_zipccl.policy import tuner_rules
from ds_zipccl.policy.admission import Decision

if TYPE_CHECKING:
    from ds_zipccl.comm.frames import Link

#: tell(text): counts a decision, for the table.
Tell = Callable[[str], None]


class Tuner:
    """The choice between ``candidates`` for one kind of message on one group. Called in program order.

    It lives as long as the group and must keep neither the group nor an operation's tensors alive. Estimates are in seconds for
    ``nominal`` bytes: messages of one kind may differ in size.
    """

    def __init__(self, candidates: Sequence[Decision], tell: Tell, nominal: int) -> None:
        self._candidates = candidates
        self._nominal = nominal
        self._tell = tell
        self._current = 0
        self._estimates = [math.inf] * len(candidates)
        self._calls = 0
        self._due = 0  # the call before which measurements are sent
        self._told: _Told | None = None  # measurements that are under way
        self._checks = self._reviews = 0
        self._review_at = tuner_rules.REVIEW_CHECKS[0]
        self._queue: deque[int] = deque()
        self._seen: Counter[Hashable] = Counter()  # tensors that went as differences since others last went otherwise
        self._slots: list[tuple[int, Stopwatch]] = []
        self._try(range(len(candidates)), tuner_rules.TRIAL_CALLS)

    @tensors.undisturbed()
    def next(self, link: Callable[[], Link], tensor: Hashable = None) -> tuple[Decision, Stopwatch | None]:
        """The plan for the next call, and a stopwatch where it is to be timed. Blocks at a decision until all ranks have come to where
        they sent their measurements.

        ``link`` opens a connection with a tag of its own, for what ranks tell each other. ``tensor`` tells what is sent from other things
        of its kind, in the same way on all ranks, if anything can: differences are timed when what they need has been left behind.

        Raises:
            CommError: a rank's measurements did not come.
        """
        if self._calls == self._due:
            self._told = _Told(link(), [watch.reading() for _, watch in self._slots])
        elif self._told is not None:
            soon, late = (self._due + delay for delay in tuner_rules.DELAY_CALLS)
            met = all(watch.reading()[1] for _, watch in self._slots)
            if self._calls == late or (self._calls == soon and met and bool((self._told.all()[:, :, 1] == 1).all())):
                self._decide(slowest(self._told.all()))
        self._calls += 1
        trying = bool(self._queue)
        index = self._queue[0] if trying else self._current
        ready = self._ready(index, tensor)
        if trying and ready:
            self._queue.popleft()
            self._due = self._calls if not self._queue else -1
        timed = ready if trying else self._due - tuner_rules.CHECKED_CALLS < self._calls <= self._due
        if not timed:
            return self._candidates[index], None
        self._slots.append((index, Stopwatch(_Told(link(), [(0.0, 0.0)]), self._nominal)))
        return self._candidates[index], self._slots[-1][1]

    def _ready(self, index: int, tensor: Hashable) -> bool:
        """Whether the next call of a candidate shows what it can do: as a difference, what is sent must have been sent so before."""
        if self._candidates[index].codec != "delta":
            self._seen.clear()
            return True
        self._seen[tensor] += 1
        before = tuner_rules.SETTLE_CALLS[tensor is None]
        return self._seen[tensor] > before or self._seen.total() > tuner_rules.SETTLE_CALLS[-1]

    def _try(self, indices: Sequence[int], calls: int) -> None:
        """Let the next calls try these candidates, a block of calls each: differences need what the calls before have left behind."""
        self._slots = []
        self._queue.extend(index for index in indices for _ in range(calls))
        self._due = -1  # known when the last of them comes

    def _decide(self, agreed: Sequence[float]) -> None:
        """Take in the measurements of all ranks: choose, and plan what to measure next."""
        self._told = None
        measured: defaultdict[int, list[float]] = defaultdict(list)
        for (index, _), seconds in zip(self._slots, agreed, strict=True):
            measured[index].append(seconds)
        tried = set(measured) != {self._current}
        before = self._estimates[self._current]
        # the first call of a trial warms up
        now = {index: statistics.median((times[1:] if tried else []) or times) for index, times in measured.items()}
        for index, seconds in now.items():
            self._estimates[index] = tuner_rules.follow(self._estimates[index], seconds)
        if tried:
            self._switch(tuner_rules.choose(self._current, self._estimates))
        else:
            self._checks += 1
            drifted = tuner_rules.drifted(before, now[self._current])
            if drifted:  # what was known of all of them is old
                self._estimates = [math.inf] * len(self._candidates)
                self._estimates[self._current] = now[self._current]
            if drifted or self._checks >= self._review_at:
                self._review(everything=drifted)
                return
        self._slots = []
        self._due = self._calls + tuner_rules.check_calls(self._estimates[self._current])

    def _review(self, everything: bool) -> None:
        """Try other candidates again: all, or those whose turn it is."""
        self._checks = 0
        self._reviews += 1
        first, last = tuner_rules.REVIEW_CHECKS
        self._review_at = first if everything else min(2 * self._review_at, last)
        chosen = tuner_rules.probed(self._current, self._estimates, 0 if everything else self._reviews)
        self._try([self._current, *chosen], tuner_rules.PROBE_CALLS)

    def _switch(self, index: int) -> None:
        old, self._current = self._current, index
        if old == index and self._reviews:
            return
        shown = ", ".join(
            f"{plan} {1e3 * seconds:.3g} ms"
            for plan, seconds in zip(self._candidates, self._estimates, strict=True)
            if math.isfinite(seconds)
        )
        self._tell(f"{self._candidates[index]} from call {self._calls + 1} on ({shown})")


class Stopwatch:
    """For one call of this rank, of ``nbytes``; ``meeting`` tells that the other ranks have come to it."""

    def __init__(self, meeting: _Told, nominal: int) -> None:
        self.nbytes = self._nominal = nominal
        self._meeting: _Told | None = meeting
        self._met = False
        self._start = math.nan
        self._seconds = math.inf

    def start(self, meet: bool) -> None:
        """Begin; if this rank may ``meet`` the others, once all are there."""
        if meet and self._meeting is not None:
            with tensors.undisturbed():
                self._meeting.all()
            self._meeting = None  # trials of many kinds of messages go on at a time
        self._met = meet
        self._start = time.perf_counter()

    def stop(self) -> None:
        """End; may be called in another thread."""
        self._seconds = time.perf_counter() - self._start

    def stop_after(self, handle: Any) -> None:
        """End when a handle of torch.distributed is done; a handle that cannot tell is not timed."""
        try:
            future = handle if hasattr(handle, "then") else handle.get_future()
            future.then(lambda _: self.stop())
        except (AttributeError, RuntimeError):
            return

    def reading(self) -> tuple[float, float]:
        """Seconds for the nominal size, inf if it did not run or runs still, and 1 if the ranks have met, else 0."""
        return self._seconds * self._nominal / max(1, self.nbytes), float(self._met)


class _Told:
    """Pairs of numbers on their way between all ranks."""

    def __init__(self, link: Link, pairs: Sequence[tuple[float, float]]) -> None:
        self._where = link.where()
        mine = tensors.of_numbers(pairs, torch.float64)
        self._all = [mine, *(torch.empty_like(mine) for _ in link.peers)]
        self._handles: list[dist.Work] = []
        for peer, theirs in zip(link.peers, self._all[1:], strict=True):
            with link.naming("telling measured times to", peer):
                self._handles += [
                    link.group.recv([theirs], peer, link.tag(0)),
                    link.group.send([mine], peer, link.tag(0)),
                ]

    def all(self) -> torch.Tensor:
        """``[ranks, pairs, 2]``, float64, this rank first; blocks until all are there. May be called again."""
        try:
            for handle in self._handles:
                handle.wait()
        except RuntimeError as error:
            raise CommError(f"{self._where}: waiting for the times that other ranks measured: {error}") from error
        self._handles = []
        return torch.stack(self._all)


def slowest(told: torch.Tensor) -> list[float]:
    """Seconds of every call, from ``[ranks, calls, (seconds, met)]``: of the slowest rank where all have met, else of the fastest."""
    seconds = told[:, :, 0].nan_to_num(nan=math.inf, posinf=math.inf)
    return list(torch.where((told[:, :, 1] == 1).all(0), seconds.amax(0), seconds.amin(0)).tolist())
