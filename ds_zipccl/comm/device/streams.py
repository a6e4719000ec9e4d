"""The streams of a device on which coded operations work, their memory for frames, and the handle of an operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ds_zipccl import devices, tensors
from ds_zipccl.comm.work import Handle
from ds_zipccl.telemetry import counters, ranges

#: Staging buffers are multiples of an eighth of the power of two below their size, and of this many bytes (seed: few sizes, so that
#: staging buffers fit again).
_GRAIN = 1 << 16
#: Staging buffers of one size (seed: one is encoded, one on the wire, one decoded).
_TURNS = 3


class Stage(Enum):
    """The work of a stream: encoding, the backend's collectives, decoding."""

    ENCODE = "encode"
    WIRE = "wire"
    DECODE = "decode"

    __hash__ = object.__hash__  # Enum's own is a function of Python, and stages are keys of every call


class StagingBuffer:
    """Memory for the frames of one fragment. ``last``: the event after its last use; None before the first use, and without streams.
    ``start``: its first byte in the reserved memory; None: it has memory of its own."""

    def __init__(self, memory: torch.Tensor, last: Any, start: int | None = None) -> None:
        self.memory, self.last, self.start, self.held = memory, last, start, True


class Streams:
    """The three streams of a device, one for each :class:`Stage`; nothing for a device without streams, whose work is done at once.

    All groups of a device share its streams: their collectives then never run side by side, which NCCL does not promise to allow. The
    wire has a high priority, so that its kernels get multiprocessors before the tail of a decoder.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._runtime = device, devices.runtime(device)
        self._buffers: list[StagingBuffer] = []
        self._left: list[tuple[Any, Sequence[torch.Tensor]]] = []
        self._reserved: torch.Tensor | None = None
        # A stream owes a wait until its next work, or until it waits for another stream that has waited: most waits are never put there.
        self._lock, self._owed = threading.Lock(), {stage: dict[Hashable, Any]() for stage in Stage}
        self._work = dict.fromkeys(Stage, 0)  # pieces of work of each stream
        self._inside = dict.fromkeys(Stage, 0)  # contexts in which more of it may come
        self._seen = {stage: dict.fromkeys(Stage, 0) for stage in Stage}  # for which of them each stream waits
        if self._runtime is not None:
            with self._runtime.device(device):
                priority = {Stage.WIRE: -1}
                self._streams = {
                    stage: self._runtime.Stream(device, priority=priority.get(stage, 0)) for stage in Stage
                }
                self._events = {stage: self._runtime.Event() for stage in Stage}
                self._owner = self._runtime.Stream(device)  # staging buffers are allocated and freed under this stream

    def on(self, stage: Stage) -> AbstractContextManager[Any]:
        """Return a context in which the stream is the calling thread's current stream; a range while a profiler runs."""
        name = ranges.RANGES[stage.value]
        return ranges.inside(name) if self._runtime is None else _Current(self, self._runtime, stage, name)

    def begin(self) -> None:
        """Let all streams wait for the work that the caller has put on its current stream."""
        if self._runtime is not None:
            stream = self._runtime.current_stream(self.device)
            self._owe(stream, stream.record_event())

    def order(self, first: Stage, second: Stage) -> None:
        """Let the second stream wait for the work that is on the first stream now."""
        if self._runtime is None:
            return
        with self._lock:
            seen, new = self._seen[second], self._seen[first] | {first: self._work[first]}
            if seen[first] >= new[first] and not self._inside[first]:
                return
            ours, theirs = self._owed[second], self._owed[first]
            paid = [(key, one) for key, one in ours.items() if theirs.get(key) is not one]  # by the first stream
        event = self._events[first]  # a wait is for its last record, which a thread beside this one may have made later
        self._streams[first].record_event(event)
        self._streams[second].wait_event(event)
        with self._lock:
            self._work[second] += 1  # those who have waited for it have not waited for this
            seen.update({stage: work for stage, work in new.items() if work > seen[stage]})
            for key, one in paid:
                if self._owed[second].get(key) is one:
                    del self._owed[second][key]

    def _owe(self, key: Hashable, event: Any) -> None:
        """Let all streams wait for an event before their next work, which takes the place of an earlier event with this key."""
        with self._lock:
            for owed in self._owed.values():
                owed[key] = event

    def _catch_up(self, stage: Stage) -> None:
        """Let a stream wait for what it owes."""
        with self._lock:
            owed, self._owed[stage] = self._owed[stage], {}
        for event in owed.values():
            self._streams[stage].wait_event(event)

    def _enter(self, stage: Stage) -> None:
        self._catch_up(stage)
        with self._lock:
            self._inside[stage] += 1

    def _leave(self, stage: Stage) -> None:
        with self._lock:
            self._inside[stage] -= 1
            self._work[stage] += 1

    @contextmanager
    def wire(self) -> Iterator[None]:
        """Give a context for a collective on what was encoded, of which the result will be decoded."""
        self.order(Stage.ENCODE, Stage.WIRE)
        with self.on(Stage.WIRE):
            yield
        self.order(Stage.WIRE, Stage.DECODE)

    def record(self, stage: Stage) -> Any:
        """Return an event after the work that is on the stream now, and what it waits for; None without streams."""
        if self._runtime is None:
            return None
        self._catch_up(stage)
        return self._streams[stage].record_event()

    def record_all(self) -> Any:
        """Return an event after the work that is on all streams now; None without streams. The decoding stream waits for the others."""
        for stage in (Stage.ENCODE, Stage.WIRE):
            self.order(stage, Stage.DECODE)
        return self.record(Stage.DECODE)

    def join(self, event: Any) -> None:
        """Let the calling thread's current stream wait for an event of :meth:`record`."""
        if self._runtime is not None and event is not None:
            self._runtime.current_stream(self.device).wait_event(event)

    @contextmanager
    def staging(self, nbytes: int, budget: int) -> Iterator[torch.Tensor]:
        """Give memory of ``nbytes``, uint8. All streams wait for its last use; its use ends with the work on all streams at the end.

        A reused staging buffer bounds the memory: the device waits, not the host. ``budget``: bytes of all staging buffers; a single
        one may be larger.
        """
        found = self._take(nbytes, budget)
        try:
            yield found.memory[:nbytes]
        finally:
            found.last, found.held = self.record_all(), False

    def reserve(self, nbytes: int) -> None:
        """Take memory for the staging buffers of later operations, in place of what was reserved; 0: none. Between operations alone.

        Raises:
            RuntimeError: the device has not so much memory.
        """
        for staging in self._free():
            self._give_back(staging)
        self._reserved = None
        self._reserved = self._allocate(nbytes) if nbytes else None

    def _take(self, nbytes: int, budget: int) -> StagingBuffer:
        grain = max(_GRAIN, (1 << max(nbytes - 1, 1).bit_length() - 1) // 8)
        rounded = -(-nbytes // grain) * grain  # one buffer may fill the budget, and two may fill it together
        size = min([rounded, *(part for part in (budget, budget // 2) if nbytes <= part)])
        alike = [staging for staging in self._buffers if size <= staging.memory.numel() <= 2 * size]
        fits = [staging for staging in alike if not staging.held]
        if fits and (len(alike) >= _TURNS or self.nbytes() + size > budget):
            found = fits[0]  # used least recently
            self._buffers.remove(found)
            found.held = True
        else:
            while self._free() and (self.nbytes() + size > budget or self._lacks_gap(size)):
                self._give_back(self._free()[0])  # staging buffers of other sizes make room
            found = self._new(size)
        self._buffers.append(found)
        if self._runtime is not None and found.last is not None:
            self._owe(
                id(found), found.last
            )  # a later buffer at its place follows it: its memory is allocated in the owner's order
        return found

    def _new(self, size: int) -> StagingBuffer:
        start = self._gap(size)
        if start is None or self._reserved is None:  # nothing is reserved, or a message is larger than the budget
            memory = self._allocate(size)
        else:
            with torch.inference_mode(False):
                memory = self._reserved[start : start + size]
        return StagingBuffer(memory, None if self._runtime is None else self._owner.record_event(), start)

    def _allocate(self, size: int) -> torch.Tensor:
        owner = nullcontext() if self._runtime is None else self._runtime.stream(self._owner)
        with torch.inference_mode(False), owner:  # written in inference mode and outside
            return tensors.empty(size, torch.uint8, self.device)

    def _gap(self, size: int) -> int | None:
        """Return the first byte of reserved memory of which ``size`` bytes have no staging buffer; None where there are not so many."""
        end = 0
        for start, numel in sorted((one.start, one.memory.numel()) for one in self._buffers if one.start is not None):
            if start - end >= size:
                break
            end = start + numel
        else:
            start = 0 if self._reserved is None else self._reserved.numel()
        return end if start - end >= size else None

    def _lacks_gap(self, size: int) -> bool:
        return self._reserved is not None and size <= self._reserved.numel() and self._gap(size) is None

    def _free(self) -> list[StagingBuffer]:
        return [staging for staging in self._buffers if not staging.held]

    def _give_back(self, staging: StagingBuffer) -> None:
        """Give a staging buffer back to the allocator: later allocations of the owner's stream follow the staging buffer's last use."""
        self._buffers.remove(staging)
        if self._runtime is not None and staging.last is not None:
            self._owner.wait_event(staging.last)

    def nbytes(self) -> int:
        """Return the bytes of all staging buffers."""
        return sum(staging.memory.numel() for staging in self._buffers)

    def memory(self) -> int:
        """Return the bytes that are reserved, and those of the staging buffers with memory of their own."""
        own = sum(staging.memory.numel() for staging in self._buffers if staging.start is None)
        return own + (0 if self._reserved is None else self._reserved.numel())

    def leave(self, event: Any, keep: Sequence[torch.Tensor]) -> None:
        """Keep tensors until the event is done: those of a handle without a wait, or of an operation that failed."""
        if event is not None and keep:
            self._left.append((event, keep))

    def abandon(self, keep: Sequence[torch.Tensor]) -> None:
        """Keep the tensors of an operation that failed until the work that it has put on the streams is done; does not wait."""
        self.leave(self.record_all(), keep)

    def sweep(self) -> None:
        """Drop tensors that were left, as far as their work is done; does not wait."""
        if not self._left:
            return
        left, self._left = self._left, []
        kept = [(event, keep) for event, keep in left if not event.query()]
        self._left.extend(kept)  # a handle that has died meanwhile has left its tensors there


class _Current:
    """A stream is the calling thread's current one. What was put there is work for which others have not waited."""

    __slots__ = ("_context", "_stage", "_streams")

    def __init__(self, streams: Streams, runtime: devices.Runtime, stage: Stage, name: str) -> None:
        self._streams, self._stage = streams, stage
        self._context = ranges.inside(name, runtime.stream(streams._streams[stage]))

    def __enter__(self) -> None:
        self._streams._enter(self._stage)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._streams._leave(self._stage)


class StreamWork(Handle):
    """An operation in flight, with the meaning of the handles of an NCCL group. A refused frame stops a later operation, see :mod:`.sizes`.

    The handle keeps the operation's tensors until :meth:`wait`. Then their memory follows the rules of the waiting stream, as with NCCL:
    tensors of an operation are used by streams that the allocator does not know.
    """

    def __init__(
        self, name: str, streams: Streams, event: Any, outputs: Sequence[torch.Tensor], keep: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(name, outputs)
        self._streams, self._event, self._keep = streams, event, tuple(keep)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the calling thread's current stream wait for the outputs; the host waits only with a ``timeout``.

        Raises:
            CommError: the operation is not done after ``timeout``; it goes on, and ``wait`` may be called again.
        """
        if timeout is not None:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise self._late(timeout)
                time.sleep(1e-4)
        self._streams.join(self._event)
        self._keep = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the device has written the outputs; does not block."""
        return self._event is None or bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors, completed in the order of streams; always the same future. Does not block."""
        if self._future is None:
            streams = devices.runtime(self._streams.device) is not None
            self._future = torch.futures.Future(devices=[self._streams.device] if streams else [])
            with self._streams.on(Stage.DECODE):
                self._streams.join(self._event)
                self._future.set_result(self._tensors)
        return self._future

    def __del__(self) -> None:
        if self._keep:
            self._streams.leave(self._event, self._keep)


#: runtime -> device -> streams.
_streams: WeakKeyDictionary[Any, dict[torch.device, Streams]] = WeakKeyDictionary()
#: Streams of devices without streams.
_plain: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device. The first call allocates streams."""
    runtime = devices.runtime(device)
    table = _plain if runtime is None else _streams.setdefault(runtime, {})
    found = table.get(device)
    if found is None:
        found = table[device] = Streams(device)
        found.sweep()
    return found


counters.count_memory(
    "staging buffers of frames",
    lambda: sum(streams.memory() for table in (_plain, *_streams.values()) for streams in table.values()),
)
