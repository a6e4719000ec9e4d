"""The seeded scheduler of a simulated machine: one host thread or one operation of a stream moves at a time.

A *host* is the thread of a rank. It gives the turn away at every call of the simulated runtime (:meth:`Scheduler.turn`). A *stream* is a
queue of operations that run in order (CUDA C++ Programming Guide, "Streams": "a sequence of commands that execute in order. Different
streams, on the other hand, may execute their commands out of order with respect to one another or concurrently"). The scheduler draws
every choice from one generator, so that a seed repeats. It delays as long as it can: most seeds run operations only when every host
waits, and each seed holds back some streams (random priorities with a few changes; Burckhardt et al., "A randomized scheduler with
probabilistic guarantees of finding bugs", ASPLOS 2010).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import typing_extensions

_HERE = Path(__file__).parent
_OWN = "communicator cuda device memory nccl races scheduler store streams tensor world".split()
#: Files that are not the program under test.
_SKIPPED: tuple[str, ...] = (
    *(str(_HERE / f"{name}.py") for name in _OWN),
    *(module.__file__ for module in (contextlib, threading, typing_extensions)),
    str(Path(torch.__file__).parent),
    "<",
)
#: Frames of the program that a place names, from the inside out.
_DEPTH = 4


class Fault(AssertionError):
    """A mistake of the program that a GPU or NCCL would punish. ``kind`` is a short name of the broken rule."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Stopped(BaseException):
    """Ends a host thread after a fault; no ``except Exception`` of the program under test stops it."""


@dataclass(frozen=True)
class Place:
    """A place in the program: the innermost frames that belong neither to the simulator nor to torch."""

    frames: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return " < ".join(f"{'/'.join(name.split('/')[-2:])}:{line}" for name, line in self.frames) or "the end"


def skip(file: str) -> None:
    """Count a file as one of the simulator: no place names it."""
    global _SKIPPED
    _SKIPPED += (file,)


def here() -> Place:
    """Return the place in the program that called into the simulator."""
    frames: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _DEPTH:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            frames.append((name, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return Place(tuple(frames))


@dataclass(eq=False)
class Op:
    """An operation in a stream."""

    #: "kernel", "copy", "record", "wait" or "collective".
    kind: str
    label: str
    body: Callable[[], None]
    #: Returns whether the operation may end; None: at once.
    ready: Callable[[], bool] | None = None
    #: Says what the operation waits for.
    why: Callable[[], str] | None = None
    #: Collectives start, which takes the multiprocessors, before they end. Others start and end in one move.
    can_start: Callable[[], bool] | None = None
    begin: Callable[[], None] = lambda: None
    started: bool = False
    done: bool = False
    #: Called when the operation has ended.
    after: list[Callable[[], None]] = field(default_factory=list)
    place: Place = Place(())
    stream: Queue | None = None

    def __str__(self) -> str:
        return f"{self.label} at {self.place}"


@dataclass(eq=False)
class Queue:
    """The operations of a stream that have not ended."""

    rank: int
    name: str
    ops: deque[Op] = field(default_factory=deque)

    def __str__(self) -> str:
        return f"stream {self.name} of rank {self.rank}"


@dataclass(eq=False)
class Host:
    """The thread of a rank."""

    rank: int
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    #: Condition, reason and place of a wait.
    waiting: tuple[Callable[[], bool], str, Place] | None = None
    #: The host waits in a loop of its own, which looks again and again.
    polls: bool = False
    ended: bool = False


@dataclass
class _Temper:
    """How a seed schedules: probabilities of the choices."""

    #: An operation moves although a host could.
    device_first: float
    #: A host keeps the turn at a call.
    host_keeps: float
    #: An operation is drawn without priorities.
    any_stream: float


_TEMPERS = (_Temper(0.0, 0.9, 0.15), _Temper(0.0, 0.3, 0.3), _Temper(0.4, 0.5, 0.5), _Temper(0.97, 0.2, 0.2))


class Scheduler:
    """See the module's docstring."""

    def __init__(self, ranks: int, seed: int, one_queue: bool, busy: bool, patient: bool = False) -> None:
        self.random = random.Random(seed)
        self.hosts = [Host(rank) for rank in range(ranks)]
        self.queues: list[list[Queue]] = [[] for _ in range(ranks)]
        self.failure: BaseException | None = None
        #: Moves so far; a host that polls waits for another move.
        self.progress = 0
        self.over = threading.Event()
        self.trace: Callable[[str], None] | None = None
        self._one_queue = one_queue
        self._busy = busy
        self._patient = patient
        self._temper = self.random.choice(_TEMPERS)
        self._priority: dict[Queue, float] = {}
        #: Collectives of a rank that have started and not ended.
        self.spinning: list[set[Op]] = [set() for _ in range(ranks)]
        #: Submitted operations of a rank that have not started, for one hardware queue.
        self._unstarted: list[deque[Op]] = [deque() for _ in range(ranks)]

    # --- for hosts

    def queue(self, rank: int, name: str) -> Queue:
        """Return the queue of a new stream."""
        found = Queue(rank, name)
        self.queues[rank].append(found)
        self._priority[found] = self.random.random()
        return found

    def submit(self, queue: Queue, op: Op) -> None:
        """Put an operation at the end of a stream."""
        op.stream, op.place = queue, here()
        queue.ops.append(op)
        self._unstarted[queue.rank].append(op)

    def pending(self, rank: int) -> int:
        """Return the number of operations of a rank that have not ended."""
        return sum(len(queue.ops) for queue in self.queues[rank])

    def turn(
        self, rank: int, condition: Callable[[], bool] | None = None, reason: str = "", polls: bool = False
    ) -> None:
        """Let others move. Return when ``condition`` is true, if one is given."""
        me = self.hosts[rank]
        if self.failure is not None:
            raise Stopped
        if condition is None:
            self.progress += 1
            if self.random.random() < self._temper.host_keeps:
                return
        else:
            me.waiting, me.polls = (condition, reason, here()), polls
        chosen = self._advance()
        if chosen is not me and chosen is not None:
            chosen.baton.release()
            me.baton.acquire()
        me.waiting, me.polls = None, False
        if self.failure is not None:
            raise Stopped

    def end(self, rank: int) -> None:
        """Note the end of a host's program, and give its turn away."""
        self.hosts[rank].ended = True
        if self.failure is not None:
            return
        try:
            chosen = self._advance()
        except Stopped:
            return
        if chosen is None:
            self.over.set()
        else:
            chosen.baton.release()

    def fail(self, failure: BaseException) -> NoReturn:
        """Stop every host; the first failure counts."""
        if self.failure is None:
            self.failure = failure
            for host in self.hosts:
                host.baton.release()
            self.over.set()
        raise Stopped

    # --- moves

    def _advance(self) -> Host | None:
        """Run operations until a host is to move, and return it; None if all hosts have ended and all streams are empty."""
        while True:
            hosts = [host for host in self.hosts if not host.ended and (host.waiting is None or host.waiting[0]())]
            moves = self._moves() if not hosts or self.random.random() < self._temper.device_first else []
            if moves:
                self._move(moves)
            elif hosts:
                return self.random.choice(hosts)
            elif all(host.ended for host in self.hosts) and (self._patient or not self._heads()):
                return None
            elif self._patient and (polling := [host for host in self.hosts if host.polls]):
                return self.random.choice(polling)
            else:
                self.fail(Fault("deadlock", "no host and no stream can move\n" + self._graph()))

    def _heads(self) -> list[Op]:
        """Return the first operation of each stream that has any."""
        return [queue.ops[0] for queues in self.queues for queue in queues if queue.ops]

    def _moves(self) -> list[Op]:
        return [op for op in self._heads() if self._hindrance(op) is None]

    def _hindrance(self, op: Op) -> str | None:
        """Return why the head of a stream cannot move; None if it can."""
        rank = op.stream.rank  # type: ignore[union-attr]
        if not op.started:
            # CUDA C++ Programming Guide, environment variables: CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues; work of
            # streams that share a queue has false dependencies: nothing passes the head of the queue.
            if self._one_queue:
                waiting = self._unstarted[rank]
                while waiting and waiting[0].started:
                    waiting.popleft()
                if waiting and waiting[0] is not op:
                    return f"the one hardware queue is held by {waiting[0]}"
            # A spinning NCCL kernel that takes all multiprocessors leaves no room for another kernel (NVIDIA/nccl#195).
            if self._busy and op.kind in ("kernel", "collective") and self.spinning[rank]:
                return f"the multiprocessors are held by {next(iter(self.spinning[rank]))}"
        may_move = op.ready if op.started or op.can_start is None else op.can_start
        return None if may_move is None or may_move() else f"waits for {op.why() if op.why else '?'}"

    def _move(self, moves: list[Op]) -> None:
        self.progress += 1
        if self.random.random() < 0.1:  # a change of priorities
            self._priority[self.random.choice(moves).stream] = self.random.random()  # type: ignore[index]
        if self.random.random() < self._temper.any_stream:
            op = self.random.choice(moves)
        else:
            op = max(moves, key=lambda op: self._priority[op.stream])  # type: ignore[index]
        queue: Any = op.stream
        try:
            with torch.inference_mode():
                if op.can_start is not None and not op.started:
                    op.started = True
                    self.spinning[queue.rank].add(op)
                    op.begin()
                    return
                op.body()
        except Stopped:
            raise
        except BaseException as error:
            self.fail(Fault("operation", f"{op} failed: {type(error).__name__}: {error}"))
        op.started = op.done = True
        self.spinning[queue.rank].discard(op)
        queue.ops.popleft()
        if self.trace is not None:
            self.trace(f"{queue}: {op.label}")
        for call in op.after:
            call()

    def _graph(self) -> str:
        """Return who waits for what."""
        lines = []
        for host in self.hosts:
            if host.ended:
                lines.append(f"  host of rank {host.rank}: its program has ended")
            elif host.waiting:
                lines.append(f"  host of rank {host.rank}: waits for {host.waiting[1]} at {host.waiting[2]}")
        for op in self._heads():
            behind = len(op.stream.ops) - 1  # type: ignore[union-attr]
            lines.append(f"  {op.stream}: {op} {self._hindrance(op)} ({behind} operations behind)")
        return "\n".join(lines)
