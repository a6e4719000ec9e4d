"""The choice between plain and coded operations of groups in stream order, in mode auto.

Sums decide bits, so that their order is settled once, at the start: by facts that repeat between runs, where a timing of both sums agrees.
Moves (gathers, exchanges) have equal bits either way, and follow the times of whole optimizer steps. Nothing is measured, and nothing is
tried, where the nodes or the speeds leave no gain. Without nodes or speeds, as with plain ``torch.distributed``, moves are coded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from ds_zipccl.comm.device.sizes import largest
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.group_state import (
    device_profile,
    group_nodes,
    group_profile,
    group_state,
    nodes_of_job,
    resolve_group,
    state_of,
)
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.steps import Clock, Steps
from ds_zipccl.comm.topology import ascending, tell
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import base_copies, cost_model
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile, Topology
from ds_zipccl.policy.settled import TIMED_GAIN, Settled, Sums, sums_of

#: CUDA's variable: the number of hardware queues. With one, work behind a stream's wait waits too, whatever its stream.
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
#: The step whose gradient sums are timed in a job (default, not tuned: schedules and allocators have settled).
TIMED_STEP = 100


def settle(config: ZipcclConfig, device: torch.device, asked: str = "") -> Settled | None:
    """Find the nodes, measure the default group if it has several, and settle its sums and moves, once. None if its tensors on ``device``
    do not go in stream order, or are not coded. A collective of all ranks; the host waits. ``asked``: as for :func:`.settled.sums_of`,
    equal on all ranks.

    Raises:
        CommError: a rank did not come within the group's timeout.
    """
    state, group = group_state(None), resolve_group(None)
    modes = {config.mode_of(role) for role in ROLES} - {"never"}
    if state is None or state.size == 1 or not state.streams(device.type) or config.nccl == "off" or not modes:
        return None
    nodes, profile = nodes_of_job(), None
    topology = Topology.of(nodes)
    if topology.nodes > 1 and "auto" in modes:
        profile = calibration.measure(group, config, device)
        state.device_profiles[device.type, state.backend(device.type)] = profile
    own, sums = state.of(GroupChoice), sums_of(config, topology, profile, asked)
    if profile is not None and sums.dtypes and config.reduction == "auto" and config.mode_of("zero_grad") == "auto":
        none = Sums(why="the ranks of nodes do not ascend")
        sums = _confirmed(sums, own, config, device) if ascending(nodes) else none
    state.device_sums = sums
    one_queue = device.type == "cuda" and "1" in tell(group, os.environ.get(_QUEUES, "")).values()
    rule = rule_of(topology, profile, one_queue)
    if "auto" in modes and rule.reason is None and profile is not None:
        own.steps = Steps(Clock(partial(mark, device), partial(_agreed, config, device)))
    cut, compared = cut_of(group, device.type), 1 + first_steps.STEPS if config.nccl == "auto" else 0
    settled = Settled(
        device.type, topology, profile, rule.reason, sums, rule.least[1], one_queue, compared, cut.levels_from, cut.raw,
    )  # fmt: skip
    own.settled, own.reserving = settled, partial(reserve, config, device)
    own.timing = partial(_timed, config, device) if sums.dtypes and own.plain_sums else None
    if config.nccl == "auto" and (rule.reason is None or sums.dtypes or "always" in modes):
        own.first = first_steps.FirstSteps(config, device)
    return settled


def _confirmed(sums: Sums, own: GroupChoice, config: ZipcclConfig, device: torch.device) -> Sums:
    """Return the sums of the dtypes in which ours are faster in a timing of both, too. A collective; the host waits."""
    gains = {}
    for dtype in sums.dtypes:
        ours, own.plain_sums[dtype] = calibration.sums(resolve_group(None), config, device, getattr(torch, dtype))
        gains[dtype] = min(theirs / mine for (_, mine), (_, theirs) in zip(ours, own.plain_sums[dtype]))
    said = ", ".join(f"{gain:.2f} times as fast in {dtype}" for dtype, gain in gains.items())
    kept = tuple(dtype for dtype, gain in gains.items() if gain >= TIMED_GAIN)
    return sums._replace(dtypes=kept, why=f"ours timed {said}, wanted {TIMED_GAIN}; {sums.why}")


@dataclass(frozen=True)
class Rule:
    """The static rule of a group's moves: why they pass, None if they may be coded; the least bytes of a coded gather, without a wait of
    the host and with one; the kinds of bases of which copies are faster than coded gathers, the fastest first; the least bytes of a copy
    of the first kind."""

    reason: PassReason | None
    least: tuple[float, float]
    bases: tuple[str, ...] = ("host",)
    least_copy: float = 0.0


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
    return Rule(None, (without, with_one), bases, least_copy)


class GroupChoice:
    """What a group has: the profile with which its rule was found, and the rule. Of the default group also what was settled, and the choice
    by whole steps where there is one."""

    def __init__(self) -> None:
        self.rule: tuple[DeviceProfile | None, Rule] | None = None
        self.settled: Settled | None = None
        self.steps: Steps | None = None
        self.first: first_steps.FirstSteps | None = None
        #: Dtype -> points (bytes, seconds) of the backend's own sums, where ours were timed beside them.
        self.plain_sums: dict[str, Sequence[tuple[float, float]]] = {}
        #: Of the gradient sums of step TIMED_STEP: seconds of the backend's own, and the marks around ours.
        self.timed: list[tuple[float, Any, Any]] = []
        self.timing: Callable[[Sequence[tuple[float, Any, Any]]], str] | None = None
        self.ended = 0
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
    """Return why a move passes now; None if it is coded. All ranks ask at the same place of the program, and get the same answer.

    Args:
        nbytes: of the whole message; None where ranks may see different sizes.
        copies: most of the gather comes from bases of unchanged parameters.
    """
    rule = _rule(group, device) if config.mode_of(role) == "auto" else None
    if rule is not None:
        if rule.reason is not None:
            return rule.reason
        waits = 0 if role == "zero_param" else 1  # ZeRO-3 agrees on sizes ahead; ZeRO-1 and ZeRO-2 gather large buckets
        least = rule.least_copy if copies else rule.least[waits]
        if nbytes is not None and OPS[op].traffic == "all_gather" and nbytes < least:
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


def codec_of_sum(request: Request, codec: str) -> str:
    """Return the codec of a sum that is ours: ``codec``, or "raw" until coded sums are proven, which have the same bits."""
    first, options = _of_job().first, request.options
    proven = options.config.nccl != "auto" or (first is not None and first.codes_sums(options.role))
    return codec if proven else "raw"


@contextmanager
def beside_sum(
    ctx: DeviceContext, request: Request, parts: Callable[[], tuple[Sequence[Part], Part]]
) -> Iterator[None]:
    """Surround a sum that is ours: one that goes unproven is compared, and those of step :data:`TIMED_STEP` are timed. ``parts``: gives the
    words of each rank, and the place of those of this rank."""
    job, streams = _of_job(), ctx.streams
    timed = (
        job.plain_sums.get(str(request.tensor.dtype).removeprefix("torch.")) if job.ended == TIMED_STEP - 1 else None
    )
    if request.options.config.nccl == "auto" and ctx.codec == "raw" and job.first is not None and job.first.compares:
        with job.first.beside_sum(ctx, request, *parts(), gathered=not request.inputs):
            yield
    elif timed is not None:
        (nbytes, seconds), twice = timed[0], OPS[OPS[request.op].plain or request.op].traffic == "all_reduce"
        theirs = (1 + twice) * (seconds + (request.nbytes() - nbytes) / cost_model.slope(timed))
        with streams.on(Stage.DECODE):
            first = mark(ctx.device)
        yield
        with streams.on(Stage.DECODE):
            job.timed.append((max(0.0, theirs), first, mark(ctx.device)))
    else:
        yield


def _timed(config: ZipcclConfig, device: torch.device, spans: Sequence[tuple[float, Any, Any]]) -> str:
    """Return the line about the gradient sums of a step, "" where some rank has none. The rank that waited least for others counts. An
    agreement."""
    ctx = DeviceContext("step", resolve_group(None), config, "dp", config.codec, device)
    mine = min(calibration.UNKNOWN, sum(nanoseconds(*marks) for _, *marks in spans))
    with torch.inference_mode():
        least, most = largest(ctx, -mine, int(1e9 * sum(theirs for theirs, *_ in spans)))
    if not -calibration.UNKNOWN < least < 0:
        return ""
    lost = '; ours lose: "reduction": "plain" keeps the backend\'s' if -least > most else ""
    return f"gradient sums of step {TIMED_STEP}: {-least / 1e6:.3g} ms, the backend's own would take {most / 1e6:.3g} ms{lost}"


def before_step() -> None:
    """Let all ranks stop before an optimizer step if one of its sums is wrong; see :mod:`.first_steps`. Costs an agreement in the first
    steps of a job, and nothing later."""
    first = _of_job().first
    if first is not None and first.compares:
        first.check()


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
    if rule is None or (OPS[op].traffic == "reduce_scatter" and (state_of(None).device_sums or settled.sums).dtypes):
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
    job, lines, state = _of_job(), [], state_of(None)
    job.ended += 1
    if job.reserving is not None:
        reserving, job.reserving = job.reserving, None
        reserving()
        if state.unreserved and state.device_sums is not None and state.device_sums.dtypes:
            state.device_sums = Sums(why="no memory for staging buffers")
            lines.append(f"from step 2 on other bits: {state.device_sums}")
    if job.timing is not None and job.ended == TIMED_STEP + 1:  # the device has ended that step
        lines.append(job.timing(job.timed))
    if job.first is not None:
        lines.append(job.first.end_step())
    for line in filter(None, lines):
        if dist.get_rank() == 0:
            print(f"[ds_zipccl] nccl: {line}", flush=True)
    if job.steps is not None and (job.first is None or job.first.proven):
        job.steps.end_step(engine)
