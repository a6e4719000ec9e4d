"""How long a program stands still for communication: a stopwatch around DeepSpeed's collectives (train_gpt.py --comm-time)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

#: What DeepSpeed's communication backend offers, as far as it moves data or waits for other ranks.
CALLS = (
    "all_gather all_gather_base all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced inference_all_reduce reduce reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single "
    "broadcast broadcast_object_list gather scatter send recv isend irecv barrier monitored_barrier"
).split()


class CommTime:
    """A stopwatch that runs while the program is inside a collective's call, or inside ``wait()`` of its handle.

    What an asynchronous operation does meanwhile is not counted: the program computes. On a GPU both return before the
    operation is done, and what is counted is the host's time.
    """

    def __init__(self) -> None:
        self.ms = 0.0  # so far, in milliseconds
        self._running = False

    def watch(self, backend: Any) -> None:
        """Count every collective that is called on ``backend``, ``deepspeed.comm.comm.cdb``, from now on."""
        for name in CALLS:
            if hasattr(backend, name):
                setattr(backend, name, self.timed(getattr(backend, name)))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, counted; its handle, if it returns one, is counted too."""

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._running:  # a collective that is made of others counts once
                return call(*args, **kwargs)
            self._running, started = True, time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                self._running = False
                self.ms += 1000 * (time.perf_counter() - started)
            return TimedHandle(result, self) if hasattr(result, "wait") else result

        return counted


class TimedHandle:
    """A collective's handle with a counted ``wait()``."""

    def __init__(self, handle: Any, clock: CommTime) -> None:
        self._handle, self._wait = handle, clock.timed(handle.wait)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
