"""The time of the fabric: streams of a device whose work takes the seconds of a model.

On CPUs a clock stands in for the device. Work that is put on a stream begins when the host has come to it and the
stream is free; what it computes is there at once. The host's own time passes by :meth:`Clock.pass_on` alone, so that
equal programs take equal times on every machine. On a GPU the streams are real, and modelled work is a kernel that
waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

#: Multiprocessors of the device, and bytes of its memory that are free, and all: an H200's with a model on it.
PROCESSORS, MEMORY = 132, (60 << 30, 140 << 30)


class Event:
    """``second``: that at which the work before the event has ended."""

    def __init__(self, clock: Clock, second: float = 0.0) -> None:
        self._clock, self.second = clock, second

    def record(self, stream: Stream) -> None:
        self.second = stream.record_event().second

    def query(self) -> bool:
        return self.second <= self._clock.host

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.second - self.second)


class Stream:
    """``free``: the second at which all work on the stream has ended."""

    cuda_stream = 0

    def __init__(self, clock: Clock) -> None:
        self._clock, self.free = clock, 0.0

    def record_event(self, event: Event | None = None) -> Event:
        self._clock.counts["records"] += 1
        found = event or Event(self._clock)
        found.second = max(self.free, self._clock.host)
        return found

    def wait_event(self, event: Event) -> None:
        self._clock.counts["waits"] += 1
        self.free = max(self.free, event.second)


class Clock:
    """``host``: the second at which the host is. ``current``: the stream that takes work; ``default``: the program's.
    ``apart``: seconds of this process that stand for work of the device, and are none of the host. ``counts``: events
    recorded, waits of streams for them, and contexts in which a stream was current."""

    def __init__(self) -> None:
        self.host = self.apart = 0.0
        self.counts: Counter[str] = Counter()
        self.default = self.current = self.new()
        self.runtime: Any = _Runtime(self)

    def new(self) -> Any:
        """Return a new stream."""
        return Stream(self)

    def busy(self, seconds: float) -> None:
        """Put work of so many seconds on the current stream."""
        self.current.free = max(self.current.free, self.host) + seconds

    def pass_on(self, seconds: float) -> None:
        """Let the host take time."""
        self.host += seconds

    def wait(self, event: Any) -> bool:
        """Let the host wait for an event."""
        self.host = max(self.host, event.second)
        return True

    def finish(self) -> float:
        """Let the host wait for the program's stream; return its time."""
        self.wait(self.default.record_event())
        return self.host

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        self.counts["contexts"] += 1
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Take the time of the block from the host: it stands for work of the device."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.apart += time.perf_counter() - begin


class _Runtime:
    """The functions of :class:`ds_zipccl.devices.Runtime` on a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.stream = clock.on

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self._clock)

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self._clock)

    def current_stream(self, device: Any = None) -> Any:
        return self._clock.current

    def device(self, device: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return False

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=lambda *span: 0, cudaHostUnregister=lambda address: 0)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return MEMORY

    def memory_reserved(self, device: Any) -> int:
        return 0

    memory_allocated = memory_reserved

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(multi_processor_count=PROCESSORS, uuid="")


class CudaClock(Clock):
    """The streams of a GPU, on which the seconds of a model are those of a kernel that waits."""

    def __init__(self) -> None:
        self.apart = 0.0
        self.default, self.runtime = torch.cuda.current_stream(), torch.cuda
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for mark, cycles in ((begin, 1000), (begin, 50_000_000), (end, 0)):  # the first launch loads the kernel
            mark.record()
            torch.cuda._sleep(cycles)
        end.synchronize()
        self._cycles = 50_000_000 / (begin.elapsed_time(end) / 1e3)

    @property
    def host(self) -> float:  # type: ignore[override]
        return time.perf_counter()

    @property
    def current(self) -> Any:
        return torch.cuda.current_stream()

    def new(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def busy(self, seconds: float) -> None:
        torch.cuda._sleep(max(1, int(seconds * self._cycles)))

    def pass_on(self, seconds: float) -> None:
        """The host takes its own time."""

    def wait(self, event: Any) -> bool:
        event.synchronize()
        return True
