"""Gathers of parameters with bases, on groups that exchange messages.

Parameters whose bases hold the shards of all ranks, as :mod:`.cached` asks, are copied. All others go together in one gather, which fills
the bases of those that have one, whatever its schedule is.

Ranks learn what is copied only during the operation, on a thread of its own if it is asynchronous. No plain collective may begin there: the
backend matches collectives by their order. What is not copied goes by messages, with tags that the call has taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ds_zipccl import tensors
from ds_zipccl.comm import engine, work
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER, Source
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.decision import lasting
from ds_zipccl.comm.group_state import group_nodes, group_size
from ds_zipccl.comm.host.cached import BasedShard, CachedParameter, ask
from ds_zipccl.comm.host.checks import compare_on_all_ranks, telling_failures
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.request import Request, equal_shards, shadow_of
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.topology import levels
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import Decision
from ds_zipccl.telemetry import counters


class _Column(NamedTuple):
    """A parameter of a gather: the output's rows, one for each rank, the own shard, and the same with its base; None: no base fits."""

    rows: torch.Tensor
    shard: torch.Tensor
    based: BasedShard | None


def has_bases(request: Request) -> bool:
    """Return whether parameters of a gather have bases that fit, see :meth:`ds_zipccl.comm.engine.Engine.has_bases`."""
    ranks, dtype = group_size(request.group), request.tensor.dtype
    return any(one.fitting(ranks, dtype) is not None for one in request.parameters)


def gather_parameters(request: Request) -> Any:
    """Execute a gather of CPU tensors in which parameters have bases. Where a gather was to fill one of the bases before, the operation
    begins with one small message of all ranks. Returns as torch.distributed does; a checked call blocks, whatever ``request.async_op`` is.

    Raises:
        CommError: a base is damaged, see :func:`.cached.ask`, or see :func:`.execution.execute`.
        ValueError: no kernel can read the tensors, or the call is lossy.
    """
    (whole,), (own,) = request.outputs, request.inputs
    request.check_tensors()
    request.prepare()
    call, sizes = Call(*request.call("")[:4]), [one.numel for one in request.parameters]
    with torch.inference_mode():
        rows, shards = whole.view(call.size, -1).split(sizes, 1), own.view(-1).split(sizes)
    columns = []
    for there, shard, one in zip(rows, shards, request.parameters, strict=True):
        slot = one.fitting(call.size, whole.dtype)
        based = BasedShard(one, slot, shard) if slot is not None and isinstance(one, CachedParameter) else None
        columns.append(_Column(there, shard, based))
    handle = _start(call, replace(request, group=call.group), columns)
    for column in columns:
        if column.based is not None:
            column.based.slot.read_by(handle)
    return handle


def _start(call: Call, request: Request, columns: Sequence[_Column]) -> Any:
    """Ask which filled bases hold the shards, copy those, and gather the others. Returns as :func:`gather_parameters`."""
    (whole,) = request.outputs
    # what ranks do in program order ends with this function
    asking, ctx = (OpContext(op, call.group, call.config, call.role, "raw") for op in (AGREEMENT, GATHER))
    decision = _decided(call, request)
    later = replace(request, async_op=False, parameters=(), tag=call.state.next_tag())
    bases = {number: one.based for number, one in enumerate(columns) if one.based is not None}
    before = [earlier for one in bases.values() if (earlier := one.slot.in_flight()) is not None]
    asked = {number: one for number, one in bases.items() if one.parameter.source is Source.DELTA}
    for one in bases.values():
        one.parameter.source = Source.DELTA

    @torch.inference_mode()
    @tensors.undisturbed()
    def job() -> None:
        for earlier in before:
            earlier.join()
        copied = [number for number, holds in zip(asked, ask(asking, list(asked.values())), strict=True) if holds]
        sent = [one for number, one in enumerate(columns) if number not in copied]
        shadow, rest = shadow_of(request) if copied else None, later
        for one in copied:
            bases[one].copy(columns[one].rows, call.rank)
        if copied:
            nbytes = call.size * sum(columns[one].shard.nbytes for one in copied)
            counters.record(call.role, GATHER, OPS[GATHER].sent_bytes(nbytes, call.size), 0)
            counters.record_difference(call.role, GATHER, "")
        if copied and sent:
            shards = [one.shard for one in sent]
            part = tensors.empty(call.size * sum(map(len, shards)), whole.dtype, whole.device)
            shard = torch.cat(shards, out=equal_shards(part, call.size)[call.rank])
            rest = replace(rest, inputs=[shard], outputs=[part], numel=part.numel())
        if sent:
            _send(ctx, rest, whole, sent, shadow, decision)
        elif shadow is not None:
            compare_on_all_ranks(ctx, shadow, [whole])

    if request.async_op and request.options.config.check != "shadow":
        return work.start(GATHER, [whole], job)
    job()
    return work.done(GATHER, [whole]) if request.async_op else None


def _decided(call: Call, request: Request) -> Decision:
    """Return the decision on a gather of all words at this moment of the program: to send raw frames where it is to pass. What is sent has
    bases alone if all words have: a parameter without one is always sent."""
    found = lasting(request, call.state)
    if found.frames and engine.engine_for(request).passes_now(request) is None:
        return found
    return Decision(True, "raw", "", by_node=levels(group_nodes(call.group)))


def _send(
    ctx: OpContext, request: Request, output: torch.Tensor, columns: Sequence[_Column], shadow: Shadow | None, decision: Decision
) -> None:  # fmt: skip
    """Gather parameters by messages, put them into their columns of the output, and fill the bases of those that have one, unless the
    schedule does. Then compare with the shadow of the whole gather, if there is one. Blocks."""
    (whole,), rows = request.outputs, [one.rows for one in columns if one.based is not None]
    bases = [one.based for one in columns if one.based is not None]
    for one in bases:
        one.parameter.fill()
    base = SharedBase([one.slot for one in bases]) if bases else None
    request.base = base if len(bases) == len(columns) else None
    # no rank waits for the part of shared bases of one that has failed, nor for its outcome of a check
    with nullcontext() if shadow is None else telling_failures(ctx):
        try:
            engine.engine_for(request).start(request, decision)
            if whole is not output:
                parts = whole.view(ctx.size, -1).split([one.shard.numel() for one in columns], 1)
                for column, part in zip(columns, parts, strict=True):
                    column.rows.copy_(part)
        except BaseException:
            if base is not None and not base.scheduled:
                base.abandon(ctx)
            raise
    if base is not None and not base.scheduled:
        base.keep(ctx, [[row[rank] for row in rows] for rank in range(ctx.size)])
    if shadow is not None:
        compare_on_all_ranks(ctx, shadow, [output])
