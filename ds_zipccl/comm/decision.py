"""The decision on a call: PASS, or FRAMES by the schedule that is predicted to be fastest. Decisions are remembered per kind of message and
group; what changes from call to call is asked of the engine."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

from ds_zipccl import tensors
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.group_state import GroupState, group_nodes, group_state, link_profile, resolve_group
from ds_zipccl.comm.request import Request, TensorKind, unfit
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, cost_model
from ds_zipccl.policy.admission import Decision, Message, PassReason

#: Kinds of messages whose decisions are remembered for each group, at 1.4 KB each (limit: programs repeat themselves; those whose sizes
#: always change would fill any memory).
REMEMBERED = 512


class DecisionMemory(dict[tuple[Hashable, ...], tuple[Decision, ZipcclConfig]]):
    """The decisions of one group, by kind of message, each with the config, which the entry keeps alive."""


class Choice(NamedTuple):
    """A decision, and whether schedules compete for messages of this kind."""

    decision: Decision
    competing: bool = False


def decide(request: Request) -> Choice:
    """Decide how a call is executed. Does not block.

    Raises:
        ValueError: no tensors, an unknown role, or arguments that do not fit together. The rank with the bad arguments raises, before
            it sends.
    """
    request.group = resolve_group(request.group)
    state = group_state(request.group)
    if state is None:
        return Choice(Decision.passing(PassReason.NOT_A_MEMBER))
    request.prepare()
    tensor = request.tensor
    if any(map(tensors.is_traced, {type(one) for one in (*request.outputs, *request.inputs)})):
        return Choice(Decision.passing(PassReason.TRACED))
    admitted = lasting(request, state)
    if not admitted.frames:
        return Choice(admitted)
    request.check_tensors()
    if request.group in c10d._world.pg_coalesce_state:
        return Choice(Decision.passing(PassReason.COALESCED))  # torch keeps some calls of our schedules for later too
    reason = engine.engine_of(state, tensor.device.type).passes_now(request)
    if reason is not None:
        return Choice(Decision.passing(reason), competing=not admitted.on_device)
    return Choice(admitted)


def lasting(request: Request, state: GroupState) -> Decision:
    """Return the decision on a prepared request that holds at every moment of the program. ``state``: of its group."""
    kind = TensorKind.of(request.tensor)
    config, role, facts = request.options.config, request.options.role, request.facts()
    # configs are compared by identity, which is cheap; the entry keeps the config alive
    key = (request.op, request.numel, role, kind, facts, request.sum.tolerance, id(config))
    decisions = state.of(DecisionMemory)
    found = decisions.get(key)
    if found is None:
        if len(decisions) >= REMEMBERED:
            decisions.clear()
        message = _message_of(request.op, kind, request.numel, state, role, *facts)
        found = decisions[key] = _decide(request, message, state), config
    return found[0]


def _message_of(op: str, kind: TensorKind, numel: int | None, state: GroupState, role: str, *more: Any) -> Message:
    """Describe ``numel`` elements of tensors of a kind to the policy. ``more``: the fields of :class:`Message` from ``reduce_op`` on."""
    device = kind.device if kind.layout == torch.strided else f"{kind.device} ({kind.layout})"
    return Message(op, kind.dtype, numel, state.size, device, state.backend(kind.device), role, *more)


def _decide(request: Request, message: Message, state: GroupState) -> Decision:
    config = request.options.config
    admitted = admission.admit(message, config)
    if not admitted.frames or admitted.on_device:
        return admitted
    nodes = group_nodes(resolve_group(request.group))
    if len(nodes) == 1 and request.exact and config.mode_of(message.role) == "auto":
        return Decision.passing(PassReason.INSIDE_NODE)
    levels = topology.levels(nodes)
    competing = admission.candidates(message, config, exact=request.exact, levels=levels)
    return cost_model.fastest(competing, message, link_profile(state))


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
