"""The engines: how the frames of a call travel. One exchanges messages of pairs of ranks, one puts collectives on the streams of a device,
and a program may register more. Callers know none of them. What a job tells its engines is here too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.group_state import GroupState, find_nodes, group_state, state_of
from ds_zipccl.comm.request import Post, Request
from ds_zipccl.comm.transport import calibration
from ds_zipccl.comm.work import Work
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.policy.settled import Settled
from ds_zipccl.telemetry import counters


class Engine:
    """How the calls of a group on tensors of one device type are executed. Equal on all ranks of the group. An engine has :meth:`takes`,
    :meth:`start`, and what it needs of the others."""

    # --- a call

    def takes(self, state: GroupState, device: str) -> bool:
        """Return whether this engine executes the coded calls of a group on a device type; equal on all ranks."""
        raise NotImplementedError

    def passes_now(self, request: Request) -> PassReason | None:
        """Return why the plain collective executes an admitted call at this moment of the program; None where frames do. All ranks get
        equal answers, however often they ask: nothing changes."""
        return None

    def passed(self, request: Request, handle: Any, reason: str) -> None:
        """Note a call that has passed for a reason of :meth:`passes_now`. All ranks call."""

    def largest(self, request: Request, *numbers: int) -> list[int]:
        """Return the largest of all ranks of each number, before a call with owners; blocks."""
        raise NotImplementedError

    def start(self, request: Request, decision: Decision) -> Any:
        """Execute a call by frames, and count its bytes. Returns as torch.distributed does: None, or a handle if ``request.async_op``.

        Raises:
            CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
        """
        raise NotImplementedError

    # --- a message between two ranks

    def send(self, post: Post, *, bounded: bool) -> Work:
        """Post a message by frames. With ``bounded``, posting may block on the peer, so that memory is bounded, and the tensor must stay as
        it is."""
        raise NotImplementedError

    def receive(self, post: Post, *, blocking: bool) -> Work:
        """Post the receive of a message. With ``blocking``, the caller waits for it at once."""
        raise NotImplementedError

    # --- parameters that are gathered again and again

    def parameter(self, name: str, numel: int, dtype: torch.dtype | None, trained: bool) -> GatheredParameter:
        """See :func:`parameter`."""
        return GatheredParameter(name, numel, dtype)

    def has_bases(self, request: Request) -> bool:
        """Return whether :meth:`gather_parameters` executes a gather with parameters, and not :meth:`start`; equal on all ranks."""
        return False

    def gather_parameters(self, request: Request) -> Any:
        """Execute a gather with parameters, some of which have bases. Returns as :meth:`start`."""
        raise NotImplementedError

    def agree_ahead(
        self, parameters: Sequence[tuple[GatheredParameter, torch.Tensor]], group: dist.ProcessGroup, config: ZipcclConfig, role: str,
        codec: str,
    ) -> int:  # fmt: skip
        """Agree on what later gathers of parameters need, outside of an operation; return for how many. A collective."""
        return 0

    def check_frames(
        self, device: torch.device, group: dist.ProcessGroup | None, config: ZipcclConfig, role: str
    ) -> None:
        """See :func:`check_frames`. An engine whose calls raise by themselves has nothing to check."""

    def kinds_of_bases(self, group: dist.ProcessGroup, device: str) -> tuple[str, ...]:
        """Return the kinds of bases of which copies are faster than gathers of a group, the fastest first; equal on all ranks."""
        return ("host",)

    def saved_by_bases(self, kind: str, nbytes: int, group: dist.ProcessGroup, device: str) -> float:
        """Return the seconds that copies of a kind of base save in gathers of so many bytes; 0 where that is not known."""
        return 0.0

    # --- a job, which tells all engines

    def settle(self, config: ZipcclConfig, device: torch.device, asked: str) -> Settled | None:
        """Measure and settle what lasts as long as the job; None where nothing is. A collective of all ranks. ``asked``: why the user wants
        the backend's own sums where ``reduction`` is auto; "" where nothing says so. Equal on all ranks.

        Raises:
            ConfigError: the config does not fit the job.
            CommError: a rank did not come within the group's timeout.
        """
        return None

    def before_step(self) -> None:
        """Raise CommError on all ranks where a gradient sum of the step that comes is known to be wrong. All ranks call, as end_step."""

    def end_step(self, engine: Any) -> None:
        """Note that an optimizer step of a training engine has ended. All ranks call at the same place of the program."""

    def never_coded(self, op: str, group: dist.ProcessGroup | None, device: str) -> PassReason | None:
        """Return why an operation of a group passes for as long as the job runs in mode auto; None if it may be coded."""
        return None

    def finish(self, place: torch.device, seconds: float) -> bool:
        """Wait on the host for the work on a device that only this engine knows, at most ``seconds``. Return whether it has ended."""
        return True


#: The engines in the order in which they are asked.
ENGINES: list[Engine] = []


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


def engine_for(call: Request | Post) -> Engine:
    """Return the engine of a call that admission lets through."""
    return engine_of(state_of(call.group), call.tensor.device.type)


def parameter(
    group: dist.ProcessGroup, device: str, name: str, numel: int, dtype: torch.dtype | None = None, *, trained: bool = False
) -> GatheredParameter:  # fmt: skip
    """Return the state of a parameter whose gathers over a group name it, on all ranks; arguments as of :class:`.GatheredParameter`.
    ``trained``: optimizer steps change it; ranks may differ."""
    return engine_of(state_of(group), device).parameter(name, numel, dtype, trained)


def check_frames(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> None:
    """Raise if a rank of the group has refused a frame, on any group, so far. A collective; the host waits once. Nothing happens where the
    group has not gathered parameters since its last call of this function, or agreement.

    Args:
        device: has the tensors of the operations.

    Raises:
        CommError: a frame was refused, or a rank did not come within the group's timeout. All ranks raise.
    """
    if (state := group_state(group)) is not None:
        engine_of(state, device.type).check_frames(device, group, config, role)


def settle(config: ZipcclConfig, device: torch.device, asked: str = "") -> Settled | None:
    """See :meth:`Engine.settle`."""
    return next(filter(None, [one.settle(config, device, asked) for one in ENGINES]), None)


def before_step() -> None:
    """See :meth:`Engine.before_step`."""
    for one in ENGINES if dist.group.WORLD is not None else ():
        one.before_step()


def end_step(engine: Any) -> None:
    """See :meth:`Engine.end_step`. The step is counted."""
    counters.record_saved("")
    for one in ENGINES if dist.group.WORLD is not None else ():
        one.end_step(engine)


def never_coded(op: str, group: dist.ProcessGroup | None, device: str) -> PassReason | None:
    """See :meth:`Engine.never_coded`. Only after :func:`settle`."""
    return next(filter(None, [one.never_coded(op, group, device) for one in ENGINES]), None)


def finish(place: torch.device, seconds: float = math.inf) -> bool:
    """Wait on the host for the work that is on the streams of a device now, before memory is freed that only this work knows; for
    ``seconds`` at most. Return whether the work has ended."""
    return all([one.finish(place, seconds) for one in ENGINES])


def calibrate(group: dist.ProcessGroup | None = None) -> LinkProfile:
    """Measure link and codec of a group (None: the default group) for ``mode`` auto, and find the ranks that share a node.

    A collective: every rank of the group calls, while the group has no other operation in flight. Blocks for less than 2 s. A group
    without a measurement uses that of the default group. Without any measurement everything is compressed, gathers do not go by node,
    and sums do not go in two levels.

    Raises:
        ValueError: the group has one rank, this rank is not in the group, or the group's CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    profile = calibration.measure(group)
    state_of(group).profile = profile
    if group is None or group is dist.group.WORLD:
        find_nodes()
    return profile
