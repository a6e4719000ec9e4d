"""Streams, events and graphs with the meaning that torch.cuda gives them, and flags.

Streams of torch do not wait for the default stream, nor it for them (c10/cuda/CUDAStream.cpp creates them with
``cudaStreamNonBlocking``). An event that was never recorded makes nobody wait (CUDA Runtime API, cudaStreamWaitEvent; torch's
``Event.wait`` does nothing before the first record). A wait is for the last record before the call of ``wait``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sim import races
from sim.device import Captured, Gpu, Lane, machine, mine
from sim.scheduler import Op, here


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, lane: Lane | None = None) -> None:
        gpu = mine() if device is None else machine().gpu(device)
        self.gpu = gpu
        self.lane = lane or gpu.lane(f"side{len(gpu.lanes)}")
        self.device, self.priority = gpu.device, priority
        self.cuda_stream = self.stream_id = self.lane.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.synchronize_stream("Stream.synchronize", self.lane)

    def query(self) -> bool:
        return _query(self.gpu, lambda: not self.lane.queue.ops, f"Stream.query of {self.lane.name}", self.lane.clock)


class _Record:
    def __init__(self, clock: races.Clock) -> None:
        self.clock = clock
        self.done = False
        self.op: Op | None = None
        #: Moves of the scheduler until the end.
        self.moves = 0

    def end(self) -> None:
        self.done = True
        self.moves = machine().scheduler.progress


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._record: _Record | None = None
        self._gpu: Gpu | None = None

    def record(self, stream: Stream | None = None) -> None:
        gpu = self._on(stream)
        if gpu.capture is not None:
            return
        lane = gpu.current if stream is None else stream.lane
        record = _Record({})
        record.op = Op("record", "record of an event", record.end)
        gpu.submit(record.op, [], [], lane)
        record.clock = dict(lane.clock)
        self._record = record

    def wait(self, stream: Stream | None = None) -> None:
        gpu = self._on(stream)
        if gpu.capture is not None:
            return
        lane = gpu.current if stream is None else stream.lane
        record = self._record
        if record is None:
            gpu.idle_waits[lane.name] = here()
            return
        races.take_over(lane.clock, record.clock)
        why = f"the {record.op}"
        gpu.submit(Op("wait", "wait for an event", lambda: None, lambda: record.done, lambda: why), [], [], lane)

    def query(self) -> bool:
        record = self._record
        if record is None:  # CUDA Runtime API, cudaEventQuery: success for an event that was never recorded
            return True
        return _query(self._on(None), lambda: record.done, f"Event.query of the {record.op}", record.clock)

    def synchronize(self) -> None:
        record, gpu = self._record, self._on(None)
        if record is None:
            gpu.idle_waits[f"host of rank {gpu.rank}"] = here()
            return
        gpu.wait(lambda: record.done, f"Event.synchronize for the {record.op}", record.clock)

    def elapsed_time(self, end: Event) -> float:
        """Return the "milliseconds" between two events that have ended: moves of the scheduler."""
        if self._record is None or end._record is None or not (self._record.done and end._record.done):
            raise RuntimeError("Both events must be recorded and completed before calculating elapsed time.")
        return float(end._record.moves - self._record.moves)

    def _on(self, stream: Stream | None) -> Gpu:
        gpu = mine()
        if self._gpu not in (None, gpu) or (stream is not None and stream.gpu is not gpu):
            gpu.machine.fail("device", f"an event or a stream of another rank's GPU, at {here()}")
        self._gpu = gpu
        return gpu


def _query(gpu: Gpu, done: Callable[[], bool], reason: str, clock: races.Clock) -> bool:
    """Look whether work has ended. A program that polls lets others move between two looks."""
    gpu.forbid_in_capture(reason)
    gpu.counters.queries += 1
    if done():
        gpu.seen(dict(clock))
        return True
    before = gpu.scheduler.progress
    gpu.scheduler.turn(gpu.rank, lambda: gpu.scheduler.progress > before, f"a move after {reason}", polls=True)
    return False


class Graph:
    """A captured graph, in the order of the capture on one stream."""

    def __init__(self) -> None:
        self._ops: list[Captured] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record what the calling rank launches; nothing runs."""
        gpu = mine()
        gpu.capture = self._ops
        try:
            yield
        finally:
            gpu.capture = None

    def replay(self) -> None:
        """Launch the recorded operations on the current stream."""
        for op in self._ops:
            if op.kind == "collective":
                op.body()
                continue
            mine().launch(op.kind, op.label, op.body, op.reads, op.writes)


class Flag:
    """A word of memory that a stream waits for (cuStreamWaitValue32) and that the host or a stream sets."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set the word, by the host."""
        self._set = True
        mine().scheduler.turn(mine().rank)

    def write(self) -> None:
        """Set the word when the current stream comes to it."""
        mine().submit(Op("record", "write of a flag", self._end), [], [], mine().current)

    def wait(self) -> None:
        """Stop the current stream until the word is set."""
        why = f"a flag that nobody has set, waited for at {here()}"
        mine().submit(
            Op("wait", "wait for a flag", lambda: None, lambda: self._set, lambda: why), [], [], mine().current
        )

    def spin(self) -> None:
        """Put a kernel on the current stream that spins until the word is set."""
        why = f"a flag that nobody has set, waited for at {here()}"
        op = Op("kernel", "spinning kernel", lambda: None, lambda: self._set, lambda: why)
        op.can_start = lambda: True
        mine().submit(op, [], [], mine().current)

    def _end(self) -> None:
        self._set = True
