"""A simulated GPU: streams, events and launches with the meaning that torch.cuda gives them.

Streams of torch do not wait for the default stream, nor it for them (c10/cuda/CUDAStream.cpp creates them with
``cudaStreamNonBlocking``). An event that was never recorded makes nobody wait (CUDA Runtime API, cudaStreamWaitEvent; torch's
``Event.wait`` does nothing before the first record). A wait is for the last record before the call of ``wait``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sim import memory, races
from sim.scheduler import Fault, Op, Place, Queue, here
from sim.tensor import DeviceTensor

#: Launches that a host may be ahead of the device before a launch blocks (nccl.md and CUDA forums: 1024 on today's drivers).
LAUNCH_QUEUE = 1024


@dataclass
class Counters:
    """Events of one rank, for assertions."""

    #: Reason and place of each call that blocked the host until the device had done something.
    waits: list[tuple[str, Place]] = field(default_factory=list)
    #: ``Event.query`` and ``Stream.query``.
    queries: int = 0
    #: Kernel -> launches, those of torch included; copies are not kernels.
    launches: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    #: Kind of collective -> calls, and bytes of this rank's input.
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)
    #: Most bytes of GPU memory at a time.
    peak_bytes: int = 0


class Lane:
    """A stream of the GPU: its queue and its clock."""

    def __init__(self, queue: Queue, number: int) -> None:
        self.queue = queue
        self.name = str(queue)
        self.number = number
        self.count = 0
        self.clock: races.Clock = {}

    def last(self) -> Op | None:
        """Return the last operation, None if all have ended."""
        return self.queue.ops[-1] if self.queue.ops else None


@dataclass(frozen=True)
class _Captured:
    kind: str
    label: str
    body: Callable[[], None]
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]


class Gpu:
    """The GPU of one rank, and the state of the rank's host that concerns it."""

    def __init__(self, machine: Any, rank: int, arena_bytes: int) -> None:
        self.machine = machine
        self.rank = rank
        self.device = torch.device("cuda", rank)
        self.counters = Counters()
        self.allocator = memory.Allocator(rank, arena_bytes)
        self.lanes: list[Lane] = []
        self.current = self.lane("default")
        self.default = self.current
        #: Operations of a graph under capture.
        self.capture: list[_Captured] | None = None
        #: Waits for events that had not been recorded: stream -> place.
        self.idle_waits: dict[str, Place] = {}
        self._history = races.History()
        self._clock: races.Clock = {}
        self._host_count = 0
        self._loaded: set[str] = set()

    @property
    def scheduler(self) -> Any:
        return self.machine.scheduler

    def is_mine(self) -> bool:
        """Return whether the calling thread is this GPU's host."""
        return self.machine.mine() is self

    def lane(self, name: str) -> Lane:
        """Return a new stream."""
        number = 0 if name == "default" else 0x1000 + 0x10 * len(self.lanes)
        self.lanes.append(Lane(self.machine.scheduler.queue(self.rank, name), number))
        return self.lanes[-1]

    # --- memory

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        """Return a tensor of undefined contents, in memory of the current stream."""
        steps = sum((length - 1) * step for length, step in zip(shape, stride)) + 1 if all(shape) else 0
        block = self.allocator.take(steps * dtype.itemsize, self.current.name)
        self.counters.peak_bytes = self.allocator.peak
        if steps:
            flat = torch.frombuffer(block.memory.numpy()[: steps * dtype.itemsize], dtype=torch.uint8)
            inner = flat.view(dtype).as_strided(shape, stride)
        else:
            inner = torch.empty(shape, dtype=dtype)
        return DeviceTensor(self, inner, memory.Lease(block, self._freed))

    def _freed(self, block: memory.Block, holders: Sequence[Any]) -> None:
        if self.machine.closed:
            return
        use = block.uses
        lane = next(lane for lane in self.lanes if lane.name == block.name)
        ends = [op for op in (holder.last() for holder in holders if holder is not lane) if op is not None]
        clock: races.Clock = {}
        for holder in holders:
            races.take_over(clock, holder.clock)

        def ended() -> bool:
            """Return whether the work of ``record_stream`` has ended. Then the allocator, and so the host, knows, and the owning stream
            gets the block, from the work that it has now queued on."""
            if not all(op.done for op in ends):
                return False
            self.seen(clock)
            last = lane.last()
            if last is None:
                block.poison(use)
            else:
                last.after.append(lambda: block.poison(use))
            return True

        self.allocator.give_back(block, ended)

    # --- operations

    def launch(
        self,
        kind: str,
        label: str,
        body: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        lane: Lane | None = None,
    ) -> None:
        """Put a kernel or a copy on a stream (the current one); ``reads`` and ``writes`` are plain tensors over its memory."""
        if self.capture is not None:
            self.capture.append(_Captured(kind, label, body, reads, writes))
            return
        if kind == "kernel":
            self._load(label)
            self.counters.launches[label] += 1
        else:
            self.counters.copies += 1
        self.submit(Op(kind, label, body), reads, writes, lane or self.current)

    def submit(self, op: Op, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], lane: Lane) -> None:
        """Put an operation on a stream, and look for races."""
        if self.scheduler.pending(self.rank) >= LAUNCH_QUEUE:
            self.scheduler.turn(
                self.rank, lambda: self.scheduler.pending(self.rank) < LAUNCH_QUEUE, "room in the launch queue"
            )
        races.take_over(lane.clock, self._clock)
        lane.count += 1
        lane.clock[lane.name] = lane.count
        self.scheduler.submit(lane.queue, op)
        touched = self._check(lane.name, lane.count, op.label, op.place, reads, writes, lane.clock)
        if touched:
            op.after.append(lambda: _touch(touched))
        self.scheduler.turn(self.rank)

    def _check(
        self,
        actor: str,
        number: int,
        label: str,
        place: Place,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        clock: races.Clock,
    ) -> list[tuple[memory.Block, int]]:
        touched = []
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                spans = memory.spans(tensor)
                access = races.Access(actor, number, writing, label, place)
                found = self._history.add(access, spans, clock)
                if found is not None and self.machine.modes.races:
                    self.machine.fail("race", self._describe(access, *found))
                block = self.allocator.find(spans[0][0]) if spans else None
                if block is not None:
                    touched.append((block, block.uses))
        return touched

    def _describe(self, access: races.Access, earlier: races.Access, address: int) -> str:
        lines = [f"{access}\n  is not ordered after\n  {earlier}"]
        block = self.allocator.find(address)
        if block is not None:
            freed = f", freed at {block.freed}" if block.freed else ""
            lines.append(f"  memory allocated at {block.allocated}{freed}; use {block.uses} of its block")
        if access.actor in self.idle_waits:
            lines.append(
                f"  the wait at {self.idle_waits[access.actor]} was for an event not yet recorded: nobody waits"
            )
        return "\n".join(lines)

    def _load(self, label: str) -> None:
        """Load a kernel at its first launch (CUDA C++ Programming Guide, "Lazy Loading": loading a kernel may need to synchronise the
        context, so that a program deadlocks if it expects another kernel to run meanwhile)."""
        if label in self._loaded:
            return
        self._loaded.add(label)
        if self.machine.modes.lazy_loading:
            idle = f"an idle device, to load {label} at its first launch"
            self.scheduler.turn(self.rank, lambda: self.scheduler.pending(self.rank) == 0, idle)

    # --- the host

    def wait(self, condition: Callable[[], bool], reason: str, clock: races.Clock) -> None:
        """Block the host until ``condition`` is true; what it does then comes after ``clock``."""
        self.forbid_in_capture(reason)
        self.counters.waits.append((reason, here()))
        self.scheduler.turn(self.rank, condition, reason)
        races.take_over(self._clock, clock)

    def forbid_in_capture(self, reason: str) -> None:
        """Refuse a wait or a query while a graph is captured (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations")."""
        if self.capture is not None:
            self.machine.fail("capture", f"{reason}, at {here()}, while a graph is captured")

    def synchronize_stream(self, reason: str, lane: Lane | None = None, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Block the host until everything on a stream (the current one) has ended, then read ``tensors``."""
        lane = lane or self.current
        last = lane.last()
        self.wait(lambda: last is None or last.done, f"{reason} on {lane.name}", dict(lane.clock))
        for tensor in tensors:
            self.host_access(tensor, False, reason)

    def seen(self, clock: races.Clock) -> None:
        """Note that the host knows of the end of some work."""
        races.take_over(self._clock, clock)

    def host_access(self, tensor: torch.Tensor, writes: bool, label: str) -> None:
        """Note a read or a write by the host, of pinned memory or after a wait."""
        self._host_count += 1
        actor = f"host of rank {self.rank}"
        self._clock[actor] = self._host_count
        reads, written = ([], [tensor]) if writes else ([tensor], [])
        self._check(actor, self._host_count, label, here(), reads, written, self._clock)


def _touch(touched: list[tuple[memory.Block, int]]) -> None:
    for block, use in touched:
        block.touched = max(block.touched, use)


# --- what stands for torch.cuda

_machines: list[Any] = []


def machine() -> Any:
    """Return the machine that is simulated.

    Raises:
        RuntimeError: none is.
    """
    if not _machines:
        raise RuntimeError("no simulated GPU: call inside world.run")
    return _machines[-1]


def mine() -> Gpu:
    """Return the GPU of the calling thread's rank."""
    return machine().mine()  # type: ignore[no-any-return]


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
    gpu.scheduler.turn(gpu.rank, lambda: gpu.scheduler.progress > before, f"a move after {reason}")
    return False


class Graph:
    """A captured graph, in the order of the capture on one stream."""

    def __init__(self) -> None:
        self._ops: list[_Captured] = []

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
        mine().submit(Op("wait", "wait for a flag", lambda: None, lambda: self._set, lambda: why), [], [], mine().current)

    def spin(self) -> None:
        """Put a kernel on the current stream that spins until the word is set."""
        why = f"a flag that nobody has set, waited for at {here()}"
        op = Op("kernel", "spinning kernel", lambda: None, lambda: self._set, lambda: why)
        op.can_start = lambda: True
        mine().submit(op, [], [], mine().current)

    def _end(self) -> None:
        self._set = True
