"""The engine of groups whose collectives go in the order of a device's streams, such as those of NCCL: frames stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ds_zipccl import devices, tensors
from ds_zipccl.comm.bases.in_place import InPlaceBase
from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.device import choice, gather, lossy, sizes, sums
from ds_zipccl.comm.device.bases import agreed
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.comm.device.choice import lacks_memory, lossy_passes, reason_to_pass
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.exchange import exchange_even, exchange_uneven, pays_now
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.streams import Stage, StreamWork, streams_of
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.engine import Engine
from ds_zipccl.comm.group_state import GroupState, resolve_group
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.request import (
    Request,
    compare_by,
    copy_back,
    equal_shards,
    is_flat,
    logical_order,
    memory_order,
    shadow_of,
)  # fmt: skip
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.topology import Levels
from ds_zipccl.ops import OPS
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.telemetry import counters

Tensors = list[torch.Tensor]


class StreamEngine(Engine):
    """The engine of groups in stream order. The work of a call is on the device's streams when the call returns, and the current stream
    waits for a blocking call. Whole steps are timed, not calls."""

    def takes(self, state: GroupState, device: str) -> bool:
        return state.streams(device)

    def passes_now(self, request: Request) -> PassReason | None:
        device, group = request.tensor.device, resolve_group(request.group)
        config, role = request.options.config, request.options.role
        if lacks_memory():
            return PassReason.NO_MEMORY
        if devices.is_capturing(device):
            return PassReason.CAPTURED
        if request.options.lossy is not None:
            return lossy_passes(role, config, group, moves=request.sum.op is None)
        if request.sum.op is None:
            nbytes = None if request.numel is None else request.nbytes()
            reason = reason_to_pass(request.op, role, nbytes, config, group, device.type, copies=request.copied)
            if reason is not None:
                return reason
        chosen = OPS[request.op].traffic == "all_to_all" and config.mode_of(role) == "auto"
        pays = not chosen or pays_now(request)
        return None if pays else PassReason.SMALL_GAIN

    passed = staticmethod(choice.passed)

    @torch.inference_mode()
    @tensors.undisturbed()
    def largest(self, request: Request, *numbers: int) -> list[int]:
        return sizes.largest(DeviceContext(*request.call("raw"), request.tensor.device), *numbers)

    def start(self, request: Request, decision: Decision) -> Any:
        shadow = shadow_of(request, decision.lossy)
        with torch.inference_mode(), tensors.undisturbed():
            exact = request.sum.reduction.fp32 and request.sum.op is not None and decision.lossy is None
            codec = choice.codec_of_sum(request, decision.codec) if exact else decision.codec
            ctx = DeviceContext(*request.call(codec), request.tensor.device, with_base=decision.with_base)
            ctx.kind = request.options.kind
            ctx.rounding = None if decision.lossy is None else LossyFrames(ctx, decision.lossy)
            inputs, outputs = _flat_on_stream(ctx, request)
            try:
                with (
                    choice.beside_sum(ctx, request, partial(_parts, ctx, request, inputs, outputs))
                    if exact
                    else nullcontext()
                ):
                    COLLECTIVES[request.op](ctx, request, inputs, outputs)
                if any(flat is not output for flat, output in zip(outputs, request.outputs, strict=True)):
                    with ctx.streams.on(Stage.DECODE):
                        copy_back(outputs, request.outputs)
            except BaseException:
                ctx.streams.abandon([*inputs, *outputs, *request.inputs, *request.outputs])
                raise
            event = ctx.streams.record(Stage.DECODE)
        keep = [*inputs, *outputs, *request.inputs, *request.outputs]
        handle = StreamWork(ctx.where(), ctx.streams, event, request.outputs, keep)
        logical = request.sent_bytes() if OPS[request.op].plain else ctx.logical_bytes
        counters.record(ctx.role, request.op, logical, ctx.wire_bytes, ctx.streams.nbytes(), kind=ctx.kind)
        if request.async_op and shadow is None:
            return handle
        handle.wait()
        if shadow is not None:
            compare_by(ctx, shadow, request.outputs, lambda text: dict(enumerate(sizes.tell(ctx, text))))
        return handle if request.async_op else None

    def parameter(self, name: str, numel: int, dtype: torch.dtype | None, trained: bool) -> GatheredParameter:
        return Agreed(name, numel, dtype)

    agree_ahead = staticmethod(agreed.agree_ahead)
    check_frames = staticmethod(agreed.check_frames)
    kinds_of_bases = staticmethod(choice.kinds_of_bases)
    saved_by_bases = staticmethod(choice.saved_by_bases)
    settle = staticmethod(choice.settle)
    before_step = staticmethod(choice.before_step)
    end_step = staticmethod(choice.end_step)
    never_coded = staticmethod(choice.never_coded)

    def finish(self, place: torch.device, seconds: float) -> bool:
        return sizes.ended(streams_of(place).record_all(), seconds)


def _flat_on_stream(ctx: DeviceContext, request: Request) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the inputs and outputs of a request, flat.

    Copies are memory of a stream, so that they can be freed when any stream has waited: the caller's stream may be another one than the
    stream that waits, and would then use their memory again too early.
    """
    order = memory_order if OPS[request.op].memory_order else logical_order
    if all(map(is_flat, (*request.inputs, *request.outputs))):
        return list(request.inputs), list(request.outputs)
    with ctx.streams.on(Stage.DECODE):
        inputs, outputs = ([order(tensor) for tensor in some] for some in (request.inputs, request.outputs))
    pairs = zip((*inputs, *outputs), (*request.inputs, *request.outputs), strict=True)
    if any(flat.data_ptr() != tensor.data_ptr() for flat, tensor in pairs):
        for stage in (Stage.ENCODE, Stage.WIRE):
            ctx.streams.order(Stage.DECODE, stage)
    return inputs, outputs


# ---- the collectives: each puts its work on the streams, the last of it on the decoding stream; the host waits at most for an agreement


def _gather_list(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    (own,) = inputs
    if ctx.rounding is not None:
        return lossy.gather(ctx, Part.of(own), [Part.of(place) for place in outputs])
    with ctx.streams.on(Stage.DECODE):  # NCCL's gather of a list has a temporary too
        whole = tensors.empty(own.numel() * ctx.size, own.dtype, own.device)
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)
    gather.gather(ctx, [Shard(own, whole, [own.numel()])])
    for place, part in zip(outputs, equal_shards(whole, ctx.size), strict=True):
        ctx.copy(part, place)


def _gather_shards(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    shards = [Shard(own, whole, [own.numel()]) for own, whole in zip(inputs, outputs, strict=True)]
    if ctx.rounding is not None:
        for shard in shards:
            lossy.gather(ctx, Part.of(shard.own), [Part.of(place) for place in equal_shards(shard.whole, ctx.size)])
    elif request.parameters:
        parameters = [one for one in request.parameters if isinstance(one, Agreed)]
        agreed.gather_parameters(ctx, inputs[0], outputs[0], parameters)
    elif isinstance(request.base, InPlaceBase) and ctx.with_base:
        gather.gather_in_place(ctx, shards[0], request.base)
    else:
        gather.gather(ctx, shards)


def _exchange(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    even, listed = request.numel is not None, request.op == "all_to_all"
    if even and ctx.rounding is None:
        exchange_even(ctx, inputs[0], outputs[0])
        return
    sources = inputs if listed else inputs[0].split(request.segments.leaving)
    targets = outputs if listed else outputs[0].split(request.segments.coming)
    if ctx.rounding is None:
        exchange_uneven(ctx, sources, targets)
    else:
        lossy.exchange(ctx, sources, targets, even=even)


def _parts(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> tuple[list[Part], Part]:
    """Return the words of a sum that each rank gets, and the place of those of this rank."""
    if request.op == "reduce_to_owners":
        parts = [Part(*((inputs[0], span) for span in spans)) for spans in request.sum.owned.spans]
    elif not inputs:
        parts = sums.parts_of(ctx, outputs)
    else:
        parts = [Part.of(shard) for shard in inputs]
        if request.op == "reduce_scatter_tensor":
            parts = [Part((inputs[0], span)) for span in cut(len(inputs[0]), len(outputs[0]), ctx.size)]
        return parts, Part.of(outputs[0])
    return parts, parts[ctx.rank]


def _reduce_scatter(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    levels = Levels.of(request.sum.nodes, ctx.rank, ctx.size)
    _sums(ctx).reduce_scatter(ctx, levels, *_parts(ctx, request, inputs, outputs), request.sum.reduction.divisor)


def _sums(ctx: DeviceContext) -> Any:
    return sums if ctx.rounding is None else lossy


def _all_reduce(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    _sums(ctx).all_reduce(ctx, Levels.of(request.sum.nodes, ctx.rank, ctx.size), outputs, request.sum.reduction.divisor)


def _to_owners(ctx: DeviceContext, request: Request, inputs: Tensors, outputs: Tensors) -> None:
    (whole,), summed = inputs, request.sum
    parts, own = _parts(ctx, request, inputs, outputs)
    levels = Levels.of(summed.nodes, ctx.rank, ctx.size)
    owned = [sum(parts[rank].numel for rank in ranks) for ranks in levels.nodes]
    if summed.owned.disjoint and wire.straight_to_owners(owned, whole.numel()):
        _sums(ctx).reduce_scatter(ctx, levels, parts, own, summed.reduction.divisor)
    else:
        _sums(ctx).all_by_shards(ctx, levels, [whole], summed.reduction.divisor)


#: Operation -> its function.
COLLECTIVES: dict[str, Callable[[DeviceContext, Request, Tensors, Tensors], None]] = {
    "all_gather": _gather_list,
    "all_gather_into_tensor": _gather_shards,
    "all_gather_coalesced": _gather_shards,
    "all_to_all": _exchange,
    "all_to_all_single": _exchange,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce_to_owners": _to_owners,
}
