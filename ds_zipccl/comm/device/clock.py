"""Times of work on a device, agreed by all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_zipccl import devices
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import agree, to_device
from ds_zipccl.comm.device.streams import Stage

#: Nanoseconds of a span that is not known: larger than any other.
_UNKNOWN = 1 << 62


class Span(NamedTuple):
    """Two marks of one device; None: the mark was not made."""

    first: Any
    last: Any

    def nanoseconds(self) -> int:
        """Return the time between the marks; ``1 << 62`` where a mark is missing, or the device has not come to it. Does not block."""
        if self.first is None or self.last is None:
            return _UNKNOWN
        if isinstance(self.first, int):
            return int(self.last - self.first)
        if not (self.first.query() and self.last.query()):
            return _UNKNOWN
        return int(self.first.elapsed_time(self.last) * 1e6)


def mark(device: torch.device) -> Any:
    """Return a mark after the work on the current stream of a device; for a device without streams, the time of the host."""
    runtime = devices.runtime(device)
    if runtime is None:
        return time.perf_counter_ns()
    event = runtime.Event(enable_timing=True)
    event.record(runtime.current_stream(device))
    return event


def agreed_seconds(ctx: DeviceContext, nanoseconds: Sequence[int]) -> list[float]:
    """Return the seconds of the slowest rank for each time, infinite where a rank does not know its own. An agreement.

    Raises:
        CommError: as :func:`.sizes.agree`.
    """
    with ctx.streams.on(Stage.ENCODE):
        words = to_device(ctx.streams, nanoseconds)
    return [found / 1e9 if found < _UNKNOWN else float("inf") for found in agree(ctx, [words])]
