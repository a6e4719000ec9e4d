"""The decision on a call: PASS, or FRAMES by one of the competing schedules. Decisions are remembered per kind of message and group."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl import tensors
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import GroupState, group_nodes, group_state, link_profile, resolve_group
from ds_zipccl.comm.request import Request, TensorKind, unfit
from ds_zipccl.comm.tuner import CallTimer, Tuner, TunersBySize
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission, cost_model, trial
from ds_zipccl.policy.admission import Decision, Message, PassReason
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters

#: Kinds of messages whose decisions are remembered for each group (admission: programs repeat themselves).
REMEMBERED = 4096


class DecisionMemory:
    """The decisions and tuners of one group. ``decisions`` maps a kind of message to its decision, the tuner that may change the decision,
    and the config, which the entry keeps alive. ``tuners`` maps a kind of message to its tuner."""

    def __init__(self) -> None:
        self.decisions: dict[tuple[Hashable, ...], tuple[Decision, Tuner | TunersBySize | None, ZipcclConfig]] = {}
        self.tuners: dict[tuple[Hashable, ...], Tuner | TunersBySize] = {}


class Choice(NamedTuple):
    """A decision; the timer of a timed call, otherwise None; and whether schedules compete for messages of this kind."""

    decision: Decision
    timer: CallTimer | None = None
    competing: bool = False


def decide(request: Request) -> Choice:
    """Decide how a call is executed. Blocks only where ranks agree on measured times, see :class:`.tuner.Tuner`.

    Raises:
        ValueError: no tensors, an unknown role, or arguments that do not fit together. The rank with the bad arguments raises, before
            it sends.
        CommError: the measured times of a rank did not arrive.
    """
    request.group = resolve_group(request.group)
    state = group_state(request.group)
    if state is None:
        return Choice(Decision.passing(PassReason.NOT_A_MEMBER))
    request.prepare()
    tensor = request.tensor
    if any(map(tensors.is_traced, {type(one) for one in (*request.outputs, *request.inputs)})):
        return Choice(Decision.passing(PassReason.TRACED))
    admitted, tuner = _remembered(request, TensorKind(tensor.dtype, tensor.device.type, tensor.layout), state)
    problem = (request.problem or unfit(request.op, request.inputs, request.outputs)) if admitted.frames else ""
    if problem:
        raise ValueError(f"{request.op}: {problem}")
    if admitted.frames and request.group in c10d._world.pg_coalesce_state:
        return Choice(Decision.passing(PassReason.COALESCED))  # torch keeps some calls of our schedules for later too
    reason = engine.engine_of(state, tensor.device.type).passes_now(request) if admitted.frames else None
    if reason is not None:
        return Choice(Decision.passing(reason))
    if tuner is None:
        return Choice(admitted)

    def opened() -> OpContext:
        return engine.engine_of(state, tensor.device.type).open_context(request, admitted)

    if isinstance(tuner, TunersBySize):
        tuner = tuner.at(opened, request.nbytes(), not request.async_op)
        if tuner is None:
            return Choice(admitted, competing=True)
    token = None if request.base is None else request.base.token()
    decision, timer = tuner.next_plan(opened, token, meets=request.may_meet())
    if tuner.decided is not None:
        _follow_link(request, state, tuner, *tuner.decided)
        tuner.decided = None
    saved = None if request.numel is None else tuner.saved()  # one rank's own bytes say nothing of the time of all
    if saved is not None:
        counters.record_saved("calls", *(each * request.nbytes() / tuner.nominal for each in saved))
    if timer is not None:
        timer.nbytes = request.nbytes()
    if tuner.trying and not decision.frames:
        decision = Decision.passing(PassReason.TRIAL)
    return Choice(decision, timer, competing=True)


def _follow_link(request: Request, state: GroupState, tuner: Tuner, seconds: float, met: bool) -> None:
    """Correct the measured link of a group, once, if its plain collectives contradict it: the measurement may have met a bad moment. Then
    kinds of messages are decided on anew, and a tuner whose candidates follow from the old link goes. All ranks are at the same call, and
    the seconds are agreed."""
    traffic, profile = OPS[request.op].traffic, _link(state)
    if profile is None or request.numel is None or not traffic:
        return
    if state.corrected is None and tuner.nominal >= trial.LINK_BYTES:
        predicted = cost_model.predict(traffic, "gloo", tuner.nominal, state.size, profile)
        factor = trial.link_error(predicted, seconds, met)
        if factor != 1:
            state.corrected = profile.slowed(factor)
    if state.corrected is not None and tuner.profile is not state.corrected:
        memory = state.of(DecisionMemory)
        memory.decisions.clear()
        memory.tuners = {key: one for key, one in memory.tuners.items() if one is not tuner}


def _link(state: GroupState) -> LinkProfile | None:
    """Return the profile by which collectives of a group are decided on."""
    return state.corrected or link_profile(state)


def _remembered(request: Request, kind: TensorKind, state: GroupState) -> tuple[Decision, Tuner | TunersBySize | None]:
    """Return the decision for a request on tensors of a kind, and the tuner that may change the decision from call to call."""
    config, role, facts = request.options.config, request.options.role, request.facts()
    # configs are compared by identity, which is cheap; the entry keeps the config alive
    key = (request.op, request.numel, role, kind, facts, request.sum.tolerance, id(config))
    decisions = state.of(DecisionMemory).decisions
    found = decisions.get(key)
    if found is None:
        if len(decisions) >= REMEMBERED:
            decisions.clear()
        message = _message_of(request.op, kind, request.numel, state, role, *facts)
        found = decisions[key] = (*_decide(request, message, state), config)
    return found[:2]


def _message_of(op: str, kind: TensorKind, numel: int | None, state: GroupState, role: str, *more: Any) -> Message:
    """Describe ``numel`` elements of tensors of a kind to the policy. ``more``: the fields of :class:`Message` from ``reduce_op`` on."""
    device = kind.device if kind.layout == torch.strided else f"{kind.device} ({kind.layout})"
    return Message(op, kind.dtype, numel, state.size, device, state.backend(kind.device), role, *more)


def _decide(request: Request, message: Message, state: GroupState) -> tuple[Decision, Tuner | TunersBySize | None]:
    config, group = request.options.config, resolve_group(request.group)
    admitted = admission.admit(message, config)
    if not admitted.frames or admitted.on_device:
        return admitted, None
    levels = topology.levels(group_nodes(group))
    competing = admission.candidates(message, config, exact=request.exact, levels=levels)
    profile = _link(state)
    competing = cost_model.prune_candidates(competing, message, profile)
    if len(competing) == 1:
        return competing[0], None
    size = None if message.nbytes is None else trial.size_class(message.nbytes)
    key = replace(message, numel=None), size, json.dumps(asdict(config))
    tuners = state.of(DecisionMemory).tuners
    if key not in tuners:
        where = "" if group is dist.group.WORLD else f", group {group.group_name}"
        # neither the group nor the request: a tuner keeps no group and no tensors alive
        make = functools.partial(_tuner_of, competing, message, where, profile)
        tuners[key] = TunersBySize(make) if size is None else make(size)
    return admitted, tuners[key]


def _tuner_of(
    competing: Sequence[Decision], message: Message, where: str, profile: LinkProfile | None, size: int
) -> Tuner:
    """Return the tuner for messages of one kind and size class. Its choices are counted under the name of the kind in the table. Sizes are
    those of the message, or the mean bytes that a rank sends where each rank knows only its own."""
    text = f"{message.describe(trial.size_text(size))}{where}"
    on_choice = functools.partial(counters.record_choice, message.role, message.op, text, kind=message.kind)
    return Tuner(competing, on_choice, 1 << size, OPS[message.op].traffic == "all_to_all", profile)


def decide_message(op: str, tensor: torch.Tensor, state: GroupState, config: ZipcclConfig, role: str) -> Decision:
    """Decide on a single message between two ranks, by the number of elements: gloo lets a receive have another dtype than its send, as in
    DeepSpeed's pipelines, and both ends decide alike.

    Raises:
        ValueError: frames cannot carry the tensor, see :func:`.request.unfit`.
    """
    if tensors.is_traced(type(tensor)):
        return Decision.passing(PassReason.TRACED)
    admitted = admission.admit(_message_of(op, TensorKind.of(tensor), tensor.numel(), state, role), config)
    if not admitted.frames:
        return admitted
    if problem := unfit(op, [tensor], [tensor] if op == "recv" else []):
        raise ValueError(f"{op}: {problem}")
    if config.mode_of(role) != "auto":
        return admitted
    profile = link_profile(state)
    if profile is not None and not cost_model.send_may_gain(tensor.numel(), profile, config.staging):
        return Decision.passing(PassReason.LINK_IS_FASTER)
    return admitted
