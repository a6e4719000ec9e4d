"""A simulated GPU: its memory, its streams' queues and clocks, launches, and the waits of its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sim import memory, races
from sim.scheduler import Op, Place, Queue, here
from sim.tensor import DeviceTensor, Simulated

#: Operations that a host may be ahead of the device before a launch blocks. CUDA documents no number; programs report about 1024.
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
class Captured:
    """An operation of a graph under capture. The body of a collective issues it, at each replay anew."""

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
        self.capture: list[Captured] | None = None
        #: Waits for events that had not been recorded: stream -> place.
        self.idle_waits: dict[str, Place] = {}
        #: Host memory whose pages are locked: address -> bytes.
        self.locked: dict[int, int] = {}
        self._history = races.History()
        self._clock: races.Clock = {}
        self._host_count = 0
        self._loaded: set[str] = set()

    @property
    def scheduler(self) -> Any:
        return self.machine.scheduler

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether the pages of a tensor in host memory are locked."""
        at = tensor.data_ptr()
        return any(first <= at < first + nbytes for first, nbytes in self.locked.items())

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
            self.capture.append(Captured(kind, label, body, reads, writes))
            return
        if kind == "kernel":
            if self.machine.modes.declared:
                body = self._watched(label, body, writes)
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

    def _watched(self, label: str, body: Callable[[], None], writes: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return ``body`` with a comparison of all other memory before and after."""
        written = [span for tensor in writes for span in memory.spans(tensor)]
        place = here()

        def watched() -> None:
            before = self.allocator.used().clone()
            body()
            changed = self.allocator.used() != before
            begin = self.allocator.used().data_ptr()
            for first, last in written:
                changed[max(0, first - begin) : max(0, last - begin)] = False
            if changed.any():
                block = self.allocator.find(begin + int(changed.nonzero()[0]))
                self.machine.fail(
                    "undeclared",
                    f"{label} at {place} writes memory that it did not name, allocated at {block and block.allocated}",
                )

        return watched

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

    def known(self, actor: str) -> int:
        """Return the number of the last access of an actor of which the host knows that it has ended."""
        return self._clock.get(actor, 0)

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


def kernel(
    name: str, function: Callable[..., None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> None:
    """Launch a Python function as a kernel on the current stream; it gets the memory of ``reads`` and ``writes`` as CPU tensors."""
    given, taken = [memory_of(tensor) for tensor in reads], [memory_of(tensor) for tensor in writes]
    mine().launch("kernel", name, lambda: function(given, taken), given, taken)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor behind a tensor of the GPU or of pinned memory."""
    assert isinstance(tensor, Simulated), type(tensor)
    return tensor.inner
