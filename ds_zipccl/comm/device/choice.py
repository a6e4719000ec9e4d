"""The choice between plain and coded operations of groups in stream order, in mode auto.

Sums decide bits, so that their schedule is settled once, from the nodes and from speeds measured at the start. Moves (gathers, exchanges)
have equal bits either way, and follow the times of whole optimizer steps. Nothing is measured, and nothing is tried, where the nodes or the
speeds leave no gain. Without nodes or speeds, as with plain ``torch.distributed``, moves are coded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.device import calibration, first_steps
from ds_zipccl.comm.device.calibration import agreed_seconds, mark, nanoseconds
from ds_zipccl.comm.device.context import DeviceContext, cut_of
from ds_zipccl.comm.device.exchange import note_plain
from ds_zipccl.comm.device.reserve import reserve
from ds_zipccl.comm.group_state import (
    device_profile,
    group_nodes,
    group_profile,
    group_state,
    nodes_of_job,
    resolve_group,
    state_of,
)
from ds_zipccl.comm.reduction_order import match_refused
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.steps import Clock, Steps
from ds_zipccl.comm.topology import tell
from ds_zipccl.config import ROLES, ConfigError, ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import base_copies, cost_model
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import SUM, DeviceProfile, Topology
from ds_zipccl.policy.settled import Settled, sums_of

#: CUDA's variable: the number of hardware queues. With one, work behind a stream's wait waits too, whatever its stream.
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def settle(config: ZipcclConfig, device: torch.device) -> Settled | None:
    """Find the nodes, measure the default group if it has several, and settle its sums and moves, once. None if its tensors on ``device``
    do not go in stream order, or are not coded. A collective of all ranks; the host waits.

    Raises:
        ConfigError: ``reduction`` is match on more than two ranks.
        CommError: a rank did not come within the group's timeout.
    """
    state, group = group_state(None), resolve_group(None)
    modes = {config.mode_of(role) for role in ROLES} - {"never"}
    if state is None or state.size == 1 or not state.streams(device.type) or config.nccl == "off" or not modes:
        return None
    if refused := match_refused(config, state.size):
        raise ConfigError(refused)
    topology, profile = Topology.of(nodes_of_job()), None
    if topology.nodes > 1 and "auto" in modes:
        profile = calibration.measure(group, config, device)
        state.device_profiles[device.type, state.backend(device.type)] = profile
    state.device_sums = sums_of(config, topology, profile)
    one_queue = device.type == "cuda" and "1" in tell(group, os.environ.get(_QUEUES, "")).values()
    rule = rule_of(topology, profile, one_queue)
    if "auto" in modes and rule.reason is None and profile is not None:
        state.of(GroupChoice).steps = Steps(Clock(partial(mark, device), partial(_agreed, config, device)))
    cut, compared = cut_of(group, device.type), 1 + first_steps.STEPS if config.nccl == "auto" else 0
    settled = Settled(
        device.type, topology, profile, rule.reason, state.device_sums, rule.least[1], one_queue, compared,
        cut.levels_from, cut.raw,
    )  # fmt: skip
    own = state.of(GroupChoice)
    own.settled, own.reserving = settled, partial(reserve, config, device)
    if config.nccl == "auto" and (rule.reason is None or "always" in modes):
        own.first = first_steps.FirstSteps(config, device)
    return settled


@dataclass(frozen=True)
class Rule:
    """The static rule of a group's moves: why they pass, None if they may be coded; the least bytes of a coded gather, without a wait of
    the host and with one; the kinds of bases of which copies are faster than coded gathers, the fastest first; the least bytes of a copy
    of the first kind, and of a coded sum of two ranks."""

    reason: PassReason | None
    least: tuple[float, float]
    bases: tuple[str, ...] = ("host",)
    least_copy: float = 0.0
    least_sum: float = 0.0


def rule_of(topology: Topology, profile: DeviceProfile | None, one_queue: bool = False) -> Rule:
    """Return the static rule of a group. ``one_queue``: as in :class:`Settled`."""
    if topology.nodes == 1:
        return Rule(PassReason.INSIDE_NODE, (0.0, 0.0))
    if one_queue:
        return Rule(PassReason.ONE_QUEUE, (0.0, 0.0))
    if profile is None:
        return Rule(None, (0.0, 0.0))
    if not cost_model.moves_may_gain(topology, profile):
        return Rule(PassReason.NETWORK_IS_FASTER, (0.0, 0.0))
    without, with_one = (cost_model.least_bytes(topology, profile, waits=waits) for waits in (0, 1))
    bases = base_copies.gaining(topology, profile)
    least_copy = base_copies.least_bytes(bases[0] if bases else "host", topology, profile)
    least_sum = cost_model.least_bytes(topology, profile, waits=1, kind=SUM) if topology.ranks == 2 else 0.0
    return Rule(None, (without, with_one), bases, least_copy, least_sum)


class GroupChoice:
    """What a group has: the profile with which its rule was found, and the rule. Of the default group also what was settled, and the choice
    by whole steps where there is one."""

    def __init__(self) -> None:
        self.rule: tuple[DeviceProfile | None, Rule] | None = None
        self.settled: Settled | None = None
        self.steps: Steps | None = None
        self.first: first_steps.FirstSteps | None = None
        #: Reserves the staging buffers after the first optimizer step; None when that is done.
        self.reserving: Callable[[], None] | None = None


def _of_job() -> GroupChoice:
    """Return the choice of the default group."""
    return state_of(None).of(GroupChoice)


def lacks_memory() -> bool:
    """Return whether some rank could not reserve its staging buffers; equal on all ranks."""
    world = group_state(None)
    return world is not None and world.unreserved


def reason_to_pass(
    op: str,
    role: str,
    nbytes: int | None,
    config: ZipcclConfig,
    group: dist.ProcessGroup,
    device: str,
    *,
    copies: bool = False,
) -> PassReason | None:
    """Return why a move, or a sum whose bits are equal either way, passes now; None if it is coded. All ranks ask at the same place of the
    program, and get the same answer.

    Args:
        nbytes: of the whole message; None where ranks may see different sizes.
        copies: most of the gather comes from bases of unchanged parameters.
    """
    rule = _rule(group, device) if config.mode_of(role) == "auto" else None
    if rule is not None:
        if rule.reason is not None:
            return rule.reason
        waits = 0 if role == "zero_param" else 1  # ZeRO-3 agrees on sizes ahead; ZeRO-1 and ZeRO-2 gather large buckets
        least = {"all_gather": rule.least_copy if copies else rule.least[waits], "all_to_all": 0.0}
        if nbytes is not None and nbytes < least.get(OPS[op].traffic, rule.least_sum):
            return PassReason.BREAK_EVEN
    job = _of_job()
    if config.nccl == "auto":
        unproven = PassReason.UNPROVEN if job.first is None else job.first.reason(role)
        if unproven is not None:
            return unproven
    return job.steps.reason(role, op) if rule and job.steps else None


def lossy_passes(role: str, config: ZipcclConfig, group: dist.ProcessGroup, *, moves: bool) -> PassReason | None:
    """Return why a call that a lossy codec may change passes now, None if it is coded: never by a time, which must not decide values."""
    if config.mode_of(role) == "auto" and len(group_nodes(group)) == 1:
        return PassReason.INSIDE_NODE
    first = _of_job().first
    if config.nccl != "auto" or not moves:
        return None
    return PassReason.UNPROVEN if first is None else first.reason(role)


def passed(request: Request, handle: Any, reason: str) -> None:
    """Note a call that has passed: the coded form of an unproven one is compared with its plain result, see
    :meth:`.first_steps.FirstSteps.compare`; exchanges that did not pay are counted. All ranks call."""
    first = _of_job().first
    if reason == PassReason.SMALL_GAIN.value:
        note_plain(request)
    elif reason == PassReason.UNPROVEN.value and first is not None:
        first.compare(request, handle)


def _rule(group: dist.ProcessGroup, device: str) -> Rule | None:
    """Return the static rule of a group, None while its nodes are unknown."""
    profile, own = device_profile(device), state_of(group).of(GroupChoice)
    if own.rule is None or own.rule[0] is not profile:
        settled, nodes = _of_job().settled, group_nodes(group)
        if not nodes:
            return None
        topology, one_queue = Topology.of(nodes), settled is not None and settled.one_queue
        if profile is None:
            return rule_of(topology, None, one_queue)
        own.rule = profile, rule_of(topology, group_profile(group, profile), one_queue)
    return own.rule[1]


def never_coded(op: str, group: dist.ProcessGroup | None, device: str) -> PassReason | None:
    """Return why an operation of a group passes for as long as the job runs in mode auto; None if it may be coded. Only after
    :func:`settle`."""
    settled = _of_job().settled
    if settled is None or settled.device != device or group_state(group) is None:
        return None
    rule = _rule(resolve_group(group), device)
    if rule is None or (OPS[op].traffic == "reduce_scatter" and settled.sums != "plain"):
        return None
    return rule.reason


def kinds_of_bases(group: dist.ProcessGroup, device: str) -> tuple[str, ...]:
    """Return the kinds of bases of which copies are predicted to be faster than coded gathers of a group in stream order, the fastest
    first; host memory where nothing was measured."""
    rule = _rule(group, device)
    return Rule.bases if rule is None else rule.bases


def saved_by_bases(kind: str, nbytes: int, group: dist.ProcessGroup, device: str) -> float:
    """Return the seconds that copies of a kind of base are predicted to save in gathers of so many bytes; 0 where nothing was measured."""
    profile, nodes = device_profile(device), group_nodes(group)
    if profile is None or not nodes:
        return 0.0
    return base_copies.saved(kind, nbytes, Topology.of(nodes), group_profile(group, profile))


def _agreed(config: ZipcclConfig, device: torch.device, spans: Sequence[tuple[Any, Any]]) -> list[float]:
    """Return the seconds of the slowest rank between the marks of each pair, see :class:`.steps.Clock`."""
    ctx = DeviceContext("step", resolve_group(None), config, "dp", config.codec, device)
    return agreed_seconds(ctx, [nanoseconds(*span) for span in spans])


def end_step(engine: Any) -> None:
    """Note that an optimizer step of an engine has ended: the first one shows how much memory is left for staging buffers; for further
    ones see :meth:`.first_steps.FirstSteps.end_step` and :meth:`.Steps.end_step`. Costs nothing where steps decide nothing."""
    job = _of_job()
    if job.reserving is not None:
        reserving, job.reserving = job.reserving, None
        reserving()
    if job.first is not None:
        line = job.first.end_step()
        if line and dist.get_rank() == 0:
            print(f"[ds_zipccl] nccl: {line}", flush=True)
        if not job.first.proven:
            return
    if job.steps is not None:
        job.steps.end_step(engine)
