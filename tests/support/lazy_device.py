"""A device for the tests of host staging: CPU memory behind streams that run nothing before the host waits for it.

Kernels and copies are queued on the current stream and run as late as they may. Fresh memory is full of POISON. A forgotten wait therefore
reads POISON, and a wait for too much runs work that was to stay queued. Other calls of torch on CPU tensors run at once. A test keeps the
tensors that it passes alive, as an operation does: a queued kernel has their addresses only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import emulation
import pytest
import torch

from ds_zipccl import devices, kernels, tensors
from ds_zipccl.comm.transport import staging
from ds_zipccl.kernels.cuda.backend import Launcher

POISON = 0xA5


class Stream:
    """Work in order; ``ran`` counts the work that has run."""

    def __init__(self, runtime: LazyRuntime) -> None:
        self._runtime, self._queue, self.ran = runtime, [], 0
        self.cuda_stream = len(runtime.streams) + 1
        runtime.streams.append(self)

    def put(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)

    def run(self, until: int | None = None) -> None:
        with self._runtime.running:
            while self.ran < (len(self._queue) if until is None else until):
                self.ran += 1
                self._queue[self.ran - 1]()

    def queued(self) -> int:
        return len(self._queue)

    def wait_event(self, event: Event) -> None:
        assert event.place, "a wait for an event that is not recorded waits for nothing"
        stream, until = event.place
        self.put(lambda: stream.run(until))

    def synchronize(self) -> None:
        self._runtime.host_waits += 1
        self.run()


class Event:
    def __init__(self) -> None:
        self.place: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.place = stream, stream.queued()


class LazyRuntime:
    """:class:`ds_zipccl.devices.Runtime` for CPU tensors. Each thread begins on the stream ``default``."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.running = threading.RLock()
        self.host_waits = 0
        self.capturing = False
        self.default = Stream(self)
        self.Event = Event
        self._thread = threading.local()

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._thread, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class _LazyLauncher:
    def __init__(self, runtime: LazyRuntime, launcher: Launcher) -> None:
        self._runtime, self._launcher = runtime, launcher

    def launch(self, kernel: str, grid: Any, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        assert stream, "a kernel on no stream"
        given = type(params).from_buffer_copy(params)
        put = self._runtime.streams[stream - 1].put
        put(lambda: self._launcher.launch(kernel, grid, shared_bytes, given, stream))


def install(patch: pytest.MonkeyPatch) -> LazyRuntime:
    """Let CPU tensors be tensors of a lazy device, whose route has the name "auto" alone."""
    runtime, route = LazyRuntime(), emulation.load()
    launches = route._launches
    launches._launcher = _LazyLauncher(runtime, launches._launcher)
    alive: list[
        torch.Tensor
    ] = []  # queued kernels hold addresses, and memory of the device is freed in stream order only

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any) -> torch.Tensor:
            alive.append(make(*arguments))
            alive[-1].view(torch.uint8).fill_(POISON)
            return alive[-1]

        return made

    def filled(*arguments: Any, make: Callable[..., torch.Tensor] = tensors.filled) -> torch.Tensor:
        alive.append(make(*arguments))
        return alive[-1]

    def queued(work: Callable[..., Any]) -> Callable[..., None]:
        return lambda *arguments: runtime.current_stream().put(lambda: work(*arguments))

    patch.setitem(devices.RUNTIMES, "cpu", runtime)
    patch.setitem(kernels.ROUTES, "cpu", {"emulated": lambda: route})
    patch.setattr(kernels, "_loaded", {})
    patch.setattr(tensors, "empty", poisoned(tensors.empty))
    patch.setattr(tensors, "pinned", poisoned(tensors.pinned))
    patch.setattr(tensors, "filled", filled)
    patch.setattr(staging, "_copy", queued(staging._copy))
    patch.setattr(staging, "add", queued(staging.add))
    patch.setattr(staging, "STAGED", {"cpu"})
    staging._frame_kernels.cache_clear()
    staging._idle.clear()
    return runtime
