"""The handle of an operation whose work is on streams of a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ds_zipccl import devices
from ds_zipccl.comm.device.streams import Stage, Streams
from ds_zipccl.comm.work import Handle


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
