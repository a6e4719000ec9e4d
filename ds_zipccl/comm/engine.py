"""The engines: how a call that was decided on is executed. One exchanges messages of pairs of ranks (:mod:`.host.engine`), the other puts
collectives on the streams of a device (:mod:`.device.engine`)."""

from __future__ import annotations

from typing import Any

from ds_zipccl.comm.device import engine as device
from ds_zipccl.comm.host import engine as host
from ds_zipccl.comm.host.tuner import CallTimer
from ds_zipccl.comm.request import Request
from ds_zipccl.policy.admission import Decision

__all__ = ["host", "start"]


def start(request: Request, decision: Decision, timer: CallTimer | None = None) -> Any:
    """Execute a call by frames; returns as torch.distributed does: None, or a handle if ``request.async_op``.

    Args:
        timer: of a timed call; the time is that of the call on this rank.

    Raises:
        CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
    """
    return device.start(request, decision) if decision.on_device else host.start(request, decision, timer)
