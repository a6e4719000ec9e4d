"""Gathers of parameters that have bases, and agreements on the sizes of their frames, see :mod:`.host.cached` and
:mod:`.device.bases.agreed`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import memory
from ds_zipccl.comm import engine, work
from ds_zipccl.comm.bases.state import GATHER, Way
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.engine import Agreed, CachedParameter, SharedBase, abandoning
from ds_zipccl.comm.execution import execute
from ds_zipccl.comm.group_state import group_state, resolve_group
from ds_zipccl.comm.ops.all_gather import request_shards
from ds_zipccl.comm.request import CallOptions, Request, equal_shards, shadow_of
from ds_zipccl.comm.shadow_check import AnyShadow
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.telemetry import counters


def agree_sizes(
    parameters: Iterable[tuple[Agreed, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> int:
    """Agree on the sizes of the frames of parameters that have none, for gathers with ``agreed``. A collective; the host waits once.

    Nothing happens where a gather of all these parameters would not be coded in the order of streams, or where all of them have sizes.

    Args:
        parameters: with the own shards, flat, contiguous, all on one device, in an order that is equal on all ranks.

    Returns:
        The number of parameters that got sizes.

    Raises:
        CommError: a rank has refused a frame of an earlier operation, or did not come within the group's timeout. All ranks raise.
    """
    state = group_state(group)
    if state is None:
        return 0
    found: dict[torch.dtype, list[tuple[Agreed, torch.Tensor]]] = {}
    for one, words in parameters:
        found.setdefault(one.dtype or words.dtype, []).append((one, words))
    coded: list[tuple[Agreed, torch.Tensor]] = []
    codec: str = config.codec
    for dtype, some in found.items():
        like = tensors.empty(0, dtype, some[0][1].device)
        # decided on, not executed
        request = request_shards(GATHER, [like], [like], group, False, CallOptions(config, role))
        request.numel = sum(words.numel() for _, words in some) * state.size
        decision = decide(request).decision
        if decision.on_device and decision.codec != "raw":
            codec = decision.codec
            coded += some
    return engine.agree_ahead(coded, resolve_group(group), config, role, codec) if coded else 0


class Part(NamedTuple):
    """A parameter of a gather: the elements of a shard, and its state; None: it has no base that fits the gather."""

    numel: int
    cached: CachedParameter | None = None


def gather_parts(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    parts: Sequence[Part],
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_gather_into_tensor`` of flat CPU tensors whose shards lie end to end, one for each of ``parts``.

    Parameters whose bases hold the shards of all ranks are copied before the call returns. All others go together in one gather, which
    fills the bases of those that have one, whatever its schedule is. Where a gather has filled one of the bases before, the call waits for
    one small message of all ranks.

    Raises:
        CommError: a base is damaged, see :func:`.host.cached.ask`, or see :func:`.execution.execute`.
        ValueError: the parts are not those of the tensors, or no kernel can read these.
    """
    state = group_state(group)
    if state is None or sum(part.numel for part in parts) != input_tensor.numel():
        raise ValueError(
            f"parts have {[part.numel for part in parts]} elements, the input has {input_tensor.numel()}; "
            "call on ranks of the group, and name all parameters of the input, in their order"
        )
    memory.admit("input_tensor", input_tensor)
    memory.admit("output_tensor", output_tensor)
    call, sizes = Call(GATHER, resolve_group(group), config, role), [part.numel for part in parts]
    with torch.inference_mode():
        rows, shards = output_tensor.view(call.size, -1).split(sizes, 1), input_tensor.view(-1).split(sizes)
    columns = list(map(_Column, rows, shards, (part.cached for part in parts)))
    filled = [(one.cached, one.shard) for one in columns if one.cached is not None and one.cached.way is Way.DELTA]
    holds = dict(zip((one for one, _ in filled), engine.ask(call, filled), strict=True)) if filled else {}
    copied = [one for one in columns if one.cached is not None and holds.get(one.cached)]
    sent = [one for one in columns if one.cached is None or not holds.get(one.cached)]
    shadow = None
    if copied and config.check == "shadow":
        options = CallOptions(config, role)
        shadow = shadow_of(request_shards(GATHER, [output_tensor], [input_tensor], group, False, options))
    if copied:
        _copy(call, copied)
    if sent:
        whole, own, options = output_tensor, input_tensor, CallOptions(config, role, uncompressed_call)
        if copied:
            whole, own, options = *_laid_out(call, sent), CallOptions(config, role)
        request = request_shards(GATHER, [whole], [own], group, async_op, options)
        return _send(call, request, output_tensor, sent, shadow)
    if shadow is not None:
        engine.host.compare_on_all_ranks(_raw_context(call), shadow, [output_tensor])
    return work.done(GATHER, [output_tensor]) if async_op else None


class _Column(NamedTuple):
    """A parameter of a gather: the output's rows, one for each rank, the own shard, and its state."""

    rows: torch.Tensor
    shard: torch.Tensor
    cached: CachedParameter | None


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


def _send(
    call: Call, request: Request, output: torch.Tensor, columns: Sequence[_Column], shadow: AnyShadow | None
) -> Any:
    """Gather parameters by messages, put them into their columns of the output, and fill the bases of those that have one. Then compare
    with the shadow of the whole gather, if there is one. Returns as torch.distributed does."""
    whole = request.outputs[0]
    filled = [(rows, cached) for rows, _, cached in columns if cached is not None]
    for _, cached in filled:
        cached.fill()
    base = SharedBase([slot for _, cached in filled if (slot := cached.slot()) is not None]) if filled else None
    request.base = base if len(filled) == len(columns) else None
    choice = decide(request)
    if choice.decision.with_base:
        base = None  # the schedule fills it
    ctx = None if base is None and shadow is None else _raw_context(call)

    def telling() -> contextlib.ExitStack:
        """Return a context: if its body fails, no rank waits for this one's part of shared bases, nor for its outcome of a check."""
        stack = contextlib.ExitStack()
        if ctx is not None and base is not None:
            stack.enter_context(abandoning(ctx, base))
        if ctx is not None and shadow is not None:
            stack.enter_context(engine.host.telling_failures(ctx))
        return stack

    def end(wait: Callable[[], Any]) -> None:
        with telling():
            wait()
            if whole is not output:
                with torch.inference_mode(), tensors.undisturbed():
                    parts = whole.view(call.size, -1).split([shard.numel() for _, shard, _ in columns], 1)
                    for (rows, *_), part in zip(columns, parts, strict=True):
                        rows.copy_(part)
        if ctx is not None and base is not None:
            with torch.inference_mode(), tensors.undisturbed():
                base.keep(ctx, [[rows[rank] for rows, _ in filled] for rank in range(ctx.size)])
        if ctx is not None and shadow is not None:
            engine.host.compare_on_all_ranks(ctx, shadow, [output])

    if not request.async_op:
        return end(lambda: execute(choice, request))
    with telling():
        handle = execute(choice, request)
    if base is not None or whole is not output:
        handle = work.start(GATHER, [output], functools.partial(end, handle.wait))
    for _, cached in filled:
        cached.filled_by(handle)
    return handle


def _raw_context(call: Call) -> OpContext:
    """Return a context with the next tags of the group, which every rank takes in program order."""
    return OpContext(GATHER, call.group, call.config, call.role, "raw", tensors.CPU)
