"""Which of several schedules a kind of message goes by: tried first, then followed, switched by all ranks at the same call.

Everything here goes by call numbers, which are equal on all ranks, as is all that decisions are made of: ranks send each other the times
they measured, without waiting, and some calls later each makes the same decision from the same numbers. Of one call the time of the
rank that took shortest counts: the others have waited for somebody.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_zipccl import policy
from ds_zipccl.policy import Plan

if TYPE_CHECKING:
    from ds_zipccl.comm.exchange import Link

#: tell(text): counts a decision, for the table.
Tell = Callable[[str], None]


class Tuner:
    """The choice between ``candidates`` for one kind of message on one group. Called in program order.

    ``link`` opens a connection with a tag of its own for the ranks' measurements. ``one_sided``: some ranks may be done long before
    others, so that the longest time of a call counts.
    """

    def __init__(
        self, candidates: Sequence[Plan], link: Callable[[], Link], tell: Tell, one_sided: bool = False
    ) -> None:
        self._candidates = candidates
        self._link = link
        self._tell = tell
        self._one_sided = one_sided
        self._current = 0
        self._estimates = [math.inf] * len(candidates)
        self._calls = 0
        self._due = 0  # the call before which measurements are sent
        self._told: _Told | None = None  # measurements that are under way
        self._checks = self._reviews = 0
        self._review_at = policy.REVIEW_CHECKS[0]
        self._queue: deque[int] = deque()
        self._slots: list[tuple[int, list[float]]] = []
        self._try(range(len(candidates)), policy.TRIAL_CALLS)

    def next(self) -> tuple[Plan, Callable[[], Stopwatch] | None]:
        """The plan for the next call, and what makes a stopwatch for it where it is to be timed.

        Raises:
            CommError: a rank's measurements did not come.
        """
        if self._calls == self._due:
            self._told = _Told(self._link(), [times[0] if times else math.inf for _, times in self._slots])
        elif self._told is not None and self._calls == self._due + policy.DELAY_CALLS:
            self._decide(self._told.agreed(self._one_sided))
        self._calls += 1
        if self._queue:
            index, timed = self._queue.popleft(), True
        else:
            index, timed = self._current, self._due - policy.CHECKED_CALLS < self._calls <= self._due
        if not timed:
            return self._candidates[index], None
        times: list[float] = []
        self._slots.append((index, times))
        return self._candidates[index], lambda: Stopwatch(times)

    def _try(self, indices: Sequence[int], calls: int) -> None:
        """Let the next calls try these candidates, a block of calls each: differences need what the call before has left behind."""
        self._slots = []
        self._queue.extend(index for index in indices for _ in range(calls))
        self._due = self._calls + len(self._queue)

    def _decide(self, agreed: Sequence[float]) -> None:
        """Take in the measurements of all ranks: choose, and plan what to measure next."""
        self._told = None
        measured: defaultdict[int, list[float]] = defaultdict(list)
        for (index, _), seconds in zip(self._slots, agreed, strict=True):
            measured[index].append(seconds)
        tried = set(measured) != {self._current} or len(self._candidates) == 1
        before = self._estimates[self._current]
        now = {index: statistics.median(times[1:] or times) for index, times in measured.items()}
        for index, seconds in now.items():
            self._estimates[index] = policy.follow(self._estimates[index], seconds)
        if tried:
            self._switch(policy.choose(self._current, self._estimates))
        else:
            self._checks += 1
            drifted = policy.drifted(before, now[self._current])
            if drifted:  # what was known of all of them is old
                self._estimates = [math.inf] * len(self._candidates)
                self._estimates[self._current] = now[self._current]
            if drifted or self._checks >= self._review_at:
                self._review(everything=drifted)
                return
        self._slots = []
        self._due = self._calls + policy.check_calls(self._estimates[self._current])

    def _review(self, everything: bool) -> None:
        """Try other candidates again: all, or those whose turn it is."""
        self._checks = 0
        self._reviews += 1
        first, last = policy.REVIEW_CHECKS
        self._review_at = first if everything else min(2 * self._review_at, last)
        chosen = policy.probed(self._current, self._estimates, 0 if everything else self._reviews)
        self._try([self._current, *chosen], policy.PROBE_CALLS)

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
    """Runs from its making until :meth:`stop`, which may be called in another thread."""

    def __init__(self, times: list[float]) -> None:
        self._times = times
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._times.append(time.perf_counter() - self._start)

    def stop_after(self, handle: Any) -> None:
        """Stop when a handle of torch.distributed is done; a handle that cannot tell is not timed."""
        try:
            handle.get_future().then(lambda _: self.stop())
        except (AttributeError, RuntimeError):
            return


class _Told:
    """Measurements on their way between all ranks."""

    def __init__(self, link: Link, times: Sequence[float]) -> None:
        self._link = link
        mine = torch.tensor(times, dtype=torch.float64)
        self._all = [mine, *(torch.empty_like(mine) for _ in link.peers)]
        self._handles: list[dist.Work] = []
        if not times:
            return
        for peer, theirs in zip(link.peers, self._all[1:], strict=True):
            with link.naming(f"telling global rank {link.global_rank(peer)} measured times"):
                self._handles += [
                    link.group.recv([theirs], peer, link.tag(0)),
                    link.group.send([mine], peer, link.tag(0)),
                ]

    def agreed(self, one_sided: bool) -> list[float]:
        """The time of every call over all ranks; blocks until all are there."""
        with self._link.naming("waiting for the times that other ranks measured"):
            for handle in self._handles:
                handle.wait()
        times = torch.stack(self._all).nan_to_num(nan=math.inf, posinf=math.inf)
        return list((times.amax(0) if one_sided else times.amin(0)).tolist())
