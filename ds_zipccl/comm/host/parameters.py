"""Gathers of parameters with bases, on groups that exchange messages.

Parameters whose bases hold the shards of all ranks, as :mod:`.cached` asks, are copied before the call returns. All others go together in
one gather, which fills the bases of those that have one, whatever its schedule is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import memory
from ds_zipccl.comm import work
from ds_zipccl.comm.bases.state import GATHER, Way
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.execution import run
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.host.cached import CachedParameter, ask
from ds_zipccl.comm.host.checks import compare_on_all_ranks, telling_failures
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.request import Request, equal_shards, shadow_of
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.ops import OPS
from ds_zipccl.telemetry import counters


class _Column(NamedTuple):
    """A parameter of a gather: the output's rows, one for each rank, the own shard, and its state; None: it has no base that fits."""

    rows: torch.Tensor
    shard: torch.Tensor
    cached: CachedParameter | None


def has_bases(request: Request) -> bool:
    """Return whether parameters of a gather have bases that fit, see :meth:`ds_zipccl.comm.engine.Engine.has_bases`."""
    ranks, dtype = group_size(request.group), request.tensor.dtype
    return any(one.fitting(ranks, dtype) is not None for one in request.parameters)


def gather_parameters(request: Request) -> Any:
    """Execute a gather of CPU tensors in which parameters have bases. Where a gather has filled one of the bases before, the call waits for
    one small message of all ranks. Returns as torch.distributed does.

    Raises:
        CommError: a base is damaged, see :func:`.cached.ask`, or see :func:`.execution.execute`.
        ValueError: no kernel can read the tensors.
    """
    (whole,), (own,) = request.outputs, request.inputs
    memory.admit("input_tensor", own)
    memory.admit("output_tensor", whole)
    call, sizes = Call(*request.call("")[:4]), [one.numel for one in request.parameters]
    with torch.inference_mode():
        rows, shards = whole.view(call.size, -1).split(sizes, 1), own.view(-1).split(sizes)
    held = (
        one if isinstance(one, CachedParameter) and one.fitting(call.size, whole.dtype) is not None else None
        for one in request.parameters
    )
    columns = list(map(_Column, rows, shards, held))
    filled = [(one.cached, one.shard) for one in columns if one.cached is not None and one.cached.way is Way.DELTA]
    holds = dict(zip((one for one, _ in filled), ask(call, filled), strict=True)) if filled else {}
    copied = [one for one in columns if one.cached is not None and holds.get(one.cached)]
    sent = [one for one in columns if one.cached is None or not holds.get(one.cached)]
    shadow = None
    if copied:
        shadow = shadow_of(request)
        _copy(call, copied)
    if not sent:
        if shadow is not None:
            compare_on_all_ranks(_raw_context(call), shadow, [whole])
        return work.done(GATHER, [whole]) if request.async_op else None
    rest = replace(request, parameters=())
    if copied:
        part, shard = _laid_out(call, sent)
        options = rest.options._replace(uncompressed_call=None)
        rest = replace(rest, inputs=[shard], outputs=[part], numel=part.numel(), options=options)
    return _send(call, rest, whole, sent, shadow)


@tensors.undisturbed()
@torch.inference_mode()
def _copy(call: Call, columns: Sequence[_Column]) -> None:
    """Copy parameters from their bases. Blocks."""
    for rows, shard, cached in columns:
        assert cached is not None  # ranks have been asked
        cached.copy(rows, call.rank, shard)
    nbytes = sum(rows.numel() * rows.element_size() for rows, *_ in columns)
    counters.record(call.role, GATHER, OPS[GATHER].sent_bytes(nbytes, call.size), 0)
    counters.record_difference(call.role, GATHER, "")


@tensors.undisturbed()
@torch.no_grad()
def _laid_out(call: Call, columns: Sequence[_Column]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for a gather of parameters, and the own shards in it, end to end. It is no tensor of inference mode: plain collectives
    write to it outside of that mode."""
    first = columns[0].shard
    whole = tensors.empty(call.size * sum(one.shard.numel() for one in columns), first.dtype, first.device)
    return whole, torch.cat([one.shard for one in columns], out=equal_shards(whole, call.size)[call.rank])


def _send(call: Call, request: Request, output: torch.Tensor, columns: Sequence[_Column], shadow: Shadow | None) -> Any:
    """Gather parameters by messages, put them into their columns of the output, and fill the bases of those that have one, unless the
    schedule does. Then compare with the shadow of the whole gather, if there is one. Returns as torch.distributed does."""
    whole = request.outputs[0]
    filled = [(rows, cached) for rows, _, cached in columns if cached is not None]
    for _, cached in filled:
        cached.fill()
    base = SharedBase([slot for _, cached in filled if (slot := cached.slot()) is not None]) if filled else None
    request.base = base if len(filled) == len(columns) else None
    ctx = None if base is None and shadow is None else _raw_context(call)

    @contextmanager
    def telling() -> Iterator[None]:
        """If the body fails, no rank waits for this one's part of shared bases, nor for its outcome of a check."""
        with nullcontext() if ctx is None or shadow is None else telling_failures(ctx):
            try:
                yield
            except BaseException:
                if ctx is not None and base is not None and not base.scheduled:
                    base.abandon(ctx)
                raise

    def end(wait: Callable[[], Any]) -> None:
        with telling():
            wait()
            if whole is not output:
                with torch.inference_mode(), tensors.undisturbed():
                    parts = whole.view(call.size, -1).split([shard.numel() for _, shard, _ in columns], 1)
                    for (rows, *_), part in zip(columns, parts, strict=True):
                        rows.copy_(part)
        if ctx is not None and base is not None and not base.scheduled:
            with torch.inference_mode(), tensors.undisturbed():
                base.keep(ctx, [[rows[rank] for rows, _ in filled] for rank in range(ctx.size)])
        if ctx is not None and shadow is not None:
            compare_on_all_ranks(ctx, shadow, [output])

    if not request.async_op:
        return end(lambda: run(request))
    with telling():
        handle = run(request)
    if base is not None or whole is not output:
        handle = work.start(GATHER, [output], functools.partial(end, handle.wait))
    for _, cached in filled:
        cached.filled_by(handle)
    return handle


def _raw_context(call: Call) -> OpContext:
    """Return a context with the next tags of the group, which every rank takes in program order."""
    return OpContext(GATHER, call.group, call.config, call.role, "raw")
