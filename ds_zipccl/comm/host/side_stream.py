"""Streams of our own for the device work of operations. A stream of the caller also has work that is queued after the call; waiting for the
stream would wait for that work too."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_zipccl import devices

#: (runtime, device) -> streams without an operation. torch keeps the memory of temporaries for each stream, so streams are used again.
_idle: defaultdict[tuple[devices.Runtime, torch.device], list[Any]] = defaultdict(list)
_lock = threading.Lock()


class SideStream:
    """The stream of one operation on a device; nothing for a device without streams.

    The constructor runs at the call, on the caller's thread: the operation's work follows the work that the caller has queued by then on
    its current stream. The operation does not wait for work that the caller queues later.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime, self._device = devices.runtime(device), device
        if self._runtime is not None:
            self._called = self._runtime.Event()
            self._called.record(self._runtime.current_stream(device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream the calling thread's current stream. Any thread may call, once.

        The end blocks until the operation's work is done, also after an error: afterwards no stream has to wait for the outputs, the
        memory of all tensors may be freed, and a graph may be captured.
        """
        if self._runtime is None:
            yield
            return
        key = self._runtime, self._device
        with _lock:
            stream = _idle[key].pop() if _idle[key] else self._runtime.Stream(self._device)
        try:
            with self._runtime.stream(stream):
                stream.wait_event(self._called)
                try:
                    yield
                finally:
                    self.wait()
        finally:
            with _lock:
                _idle[key].append(stream)

    def wait(self) -> None:
        """Block until the work is done that the calling thread, inside of :meth:`current`, has queued."""
        if self._runtime is not None:
            self._runtime.current_stream(self._device).synchronize()
