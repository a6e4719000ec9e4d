"""The engine of groups that exchange messages of pairs of ranks, matched by tags, such as those of gloo."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.engine import Engine
from ds_zipccl.comm.group_state import GroupState, group_nodes, group_state, resolve_group, state_of
from ds_zipccl.comm.host import exchange, gather, messages, parameters, sums
from ds_zipccl.comm.host.cached import CachedParameter
from ds_zipccl.comm.host.checks import compare_on_all_ranks, telling_failures
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.request import Request, copy_back, logical_order, memory_order, shadow_of
from ds_zipccl.comm.steps import Clock, Steps
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.policy.settled import Settled
from ds_zipccl.telemetry import counters

#: Nanoseconds of a step that is not known: more than of any other.
_UNKNOWN = 1 << 62
_Collective = Callable[[OpContext, Request, list[torch.Tensor], list[torch.Tensor]], None]
#: Operation -> the function that writes the outputs, and blocks. Tensors are flat, contiguous, of one dtype on one device, in the element
#: order of the request.
COLLECTIVES: dict[str, _Collective] = {
    "all_gather": gather.gather_shards,
    "all_gather_into_tensor": gather.gather_shards,
    "all_gather_coalesced": gather.gather_shards,
    "all_to_all": exchange.exchange,
    "all_to_all_single": exchange.exchange,
    "broadcast": gather.broadcast,
    "reduce_scatter_tensor": sums.reduce_scatter_tensor,
    "reduce_scatter": sums.reduce_scatter_list,
    "reduce": sums.reduce,
    "all_reduce": sums.all_reduce,
    "all_reduce_coalesced": sums.all_reduce,
    "reduce_to_owners": sums.reduce_to_owners,
}


class MessageEngine(Engine):
    """The engine of groups that exchange messages. Every gather of parameters asks all ranks."""

    def takes(self, state: GroupState, device: str) -> bool:
        return state.backend(device) in TRANSPORTS

    def passes_now(self, request: Request) -> PassReason | None:
        found, role = _of_job().steps, request.options.role
        if found is None or not request.exact or request.options.config.mode_of(role) != "auto":
            return None
        return found.reason(role, request.op)

    @tensors.undisturbed()
    def largest(self, request: Request, *numbers: int) -> list[int]:
        return _largest(Call(*request.call("")[:4]), "comparing arguments with those of the other ranks", numbers)

    def start(self, request: Request, decision: Decision) -> Any:
        shadow = shadow_of(request, decision.lossy)
        ctx = OpContext(
            *request.call(decision.codec),
            tag=request.tag,
            nodes=group_nodes(resolve_group(request.group)) if decision.by_node else (),
            with_base=decision.with_base,
            sums=request.sum.op is not None,
            rows=wire.may_have_rows(request.options.config, request.op, request.options.role, decision.codec),
        )
        ctx.rounding = None if decision.lossy is None else LossyFrames(ctx, decision.lossy)

        def job() -> None:
            # both are states of a thread; only inference mode may write to every tensor
            with torch.inference_mode(), tensors.undisturbed():
                run()

        def run() -> None:
            order = memory_order if OPS[request.op].memory_order else logical_order
            with nullcontext() if shadow is None else telling_failures(ctx):
                outputs = [order(tensor) for tensor in request.outputs]
                COLLECTIVES[request.op](ctx, request, [order(tensor) for tensor in request.inputs], outputs)
                copy_back(outputs, request.outputs)
            if shadow is not None:
                compare_on_all_ranks(ctx, shadow, request.outputs)
            logical, kind = request.sent_bytes() if OPS[request.op].plain else ctx.logical_bytes, request.options.kind
            counters.record(ctx.role, request.op, logical, ctx.wire_bytes, POOL.peak, kind=kind)

        if not request.async_op:
            job()
            return None
        return work.start(request.op, request.outputs, job)

    send = staticmethod(messages.send)
    receive = staticmethod(messages.receive)

    def parameter(self, name: str, numel: int, dtype: torch.dtype | None, trained: bool) -> GatheredParameter:
        return CachedParameter(name, numel, dtype, trained=trained)

    has_bases = staticmethod(parameters.has_bases)
    gather_parameters = staticmethod(parameters.gather_parameters)

    def settle(self, config: ZipcclConfig, device: torch.device, asked: str) -> Settled | None:
        state = group_state(None)
        if state is None or state.size == 1 or not self.takes(state, device.type):
            return None
        if len(group_nodes(resolve_group(None))) != 1 and "auto" in {config.mode_of(role) for role in ROLES}:
            state.of(_Job).steps = Steps(Clock(time.perf_counter_ns, functools.partial(_agreed, config)))
        return None

    def end_step(self, engine: Any) -> None:
        if (found := _of_job().steps) is not None:
            found.end_step(engine)


class _Job:
    """What the default group has: the choice by whole steps, None where they decide nothing."""

    steps: Steps | None = None


def _of_job() -> _Job:
    return state_of(None).of(_Job)


def _agreed(config: ZipcclConfig, spans: Sequence[tuple[int | None, int]]) -> list[float]:
    """Return the seconds of the slowest rank between the marks of each pair, see :class:`.steps.Clock`."""
    spent = [_UNKNOWN if first is None else last - first for first, last in spans]
    found = _largest(Call("step", resolve_group(None), config, "dp"), "agreeing on the times of steps", spent)
    return [math.inf if one == _UNKNOWN else one / 1e9 for one in found]


def _largest(call: Call, doing: str, numbers: Sequence[int]) -> list[int]:
    """Return the largest of all ranks of each number; blocks. The backend's own all-reduce fails at once where another rank is in the
    all-reduce of a tensor."""
    words = tensors.of_numbers(numbers, torch.int64)
    with call.naming(doing):
        dist.all_reduce(words, dist.ReduceOp.MAX, call.group)
    return list(words.tolist())
