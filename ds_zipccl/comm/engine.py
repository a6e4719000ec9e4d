"""The engines: how the frames of a call travel. One exchanges messages of pairs of ranks (:mod:`.host.engine`), one puts collectives on the
streams of a device (:mod:`.device.engine`), and a program may register more. What a job tells its engines and asks them is here too."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_zipccl.comm.device import engine as device
from ds_zipccl.comm.device import sizes
from ds_zipccl.comm.device.bases.agreed import Agreed, agree_ahead, check_frames
from ds_zipccl.comm.device.choice import Settled, end_step, host_bases_gain, never_coded, passed, settle, sums_of
from ds_zipccl.comm.device.streams import streams_of
from ds_zipccl.comm.group_state import GroupState, find_nodes, group_state
from ds_zipccl.comm.host import calibration
from ds_zipccl.comm.host import engine as host
from ds_zipccl.comm.host.cached import CachedParameter, ask, same_bits
from ds_zipccl.comm.host.gather import SharedBase, abandoning
from ds_zipccl.comm.host.p2p.message import receive, send
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.transport.staging import SideStream
from ds_zipccl.comm.tuner import CallTimer
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.policy.cost_model import LinkProfile

__all__ = [
    "ENGINES", "Agreed", "CachedParameter", "Engine", "Settled", "SharedBase", "SideStream", "abandoning", "agree_ahead", "ask",
    "calibrate", "calibration", "check_frames", "end_step", "engine_of", "finish", "host", "host_bases_gain", "never_coded",
    "passed", "receive", "register", "same_bits", "send", "settle", "start", "sums_of",
]  # fmt: skip


class Engine(Protocol):
    """How the calls of a group on tensors of one device type are executed; a module or an object. Equal on all ranks of the group."""

    def takes(self, state: GroupState, device: str) -> bool:
        """Return whether this engine executes the coded calls of a group on a device type; equal on all ranks."""

    def passes_now(self, request: Request) -> PassReason | None:
        """Return why the plain collective executes an admitted call at this moment of the program; None where frames do. All ranks get
        equal answers, however often they ask: nothing changes.

        Raises:
            CommError: the call is not possible now, by frames or plain.
        """

    def largest(self, request: Request, *numbers: int) -> list[int]:
        """Return the largest of all ranks of each number, before a call with owners; blocks. Engines without such calls need it not."""

    def start(self, request: Request, decision: Decision, timer: CallTimer | None = None) -> Any:
        """Execute a call by frames, and count its bytes; see :func:`start`."""


#: The engines in the order in which they are asked.
ENGINES: list[Engine] = [device, host]


class _Chosen(dict[str, Engine]):
    """Device type -> the engine of a group."""


def register(engine: Engine) -> None:
    """Let an engine be asked before the others. Groups that have had a coded call on a device type keep their engine for it."""
    ENGINES.insert(0, engine)


def engine_of(state: GroupState, device: str) -> Engine:
    """Return the engine of a group for tensors on a device type that admission lets through. The choice is made once."""
    chosen = state.of(_Chosen)
    if device not in chosen:
        chosen[device] = next(engine for engine in ENGINES if engine.takes(state, device))
    return chosen[device]


def start(request: Request, decision: Decision, timer: CallTimer | None = None) -> Any:
    """Execute a call by frames; returns as torch.distributed does: None, or a handle if ``request.async_op``.

    Args:
        timer: of a timed call; the time is that of the call on this rank.

    Raises:
        CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
    """
    state = group_state(request.group)
    assert state is not None  # admission lets no other rank through
    return engine_of(state, request.tensor.device.type).start(request, decision, timer)


def finish(place: torch.device, seconds: float = math.inf) -> bool:
    """Wait on the host for the work that is on the streams of a device now, before memory is freed that only this work knows; for
    ``seconds`` at most. Return whether the work has ended."""
    return sizes.ended(streams_of(place).record_all(), seconds)


def calibrate(group: dist.ProcessGroup | None = None) -> LinkProfile:
    """Measure link and codec of a group (None: the default group) for ``mode`` auto, and find the ranks that share a node.

    A collective: every rank of the group calls, while the group has no other operation in flight. Blocks for less than 2 s. A group
    without a measurement uses that of the default group. Without any measurement every schedule is tried, gathers do not go by node,
    sums do not go in two levels, and sends are always compressed. Only the codec of CPU tensors is measured: tensors on other devices are
    without a measurement.

    Raises:
        ValueError: the group has one rank, this rank is not in the group, or the group's CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    profile = calibration.measure(group)
    state = group_state(group)
    assert state is not None  # measure() has raised on a rank outside the group
    state.profiles["cpu", state.backend("cpu")] = profile
    if group is None or group is dist.group.WORLD:
        find_nodes()
    return profile
