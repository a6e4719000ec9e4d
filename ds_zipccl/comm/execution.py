"""The execution of a call, by the plain collective or by a schedule, on the caller's thread or in the background. Every call is counted;
some are timed or checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.context import Call, OpContext, Told, packed, unpacked
from ds_zipccl.comm.decision import Choice, open_context, open_device_context
from ds_zipccl.comm.device import sizes
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.stream_work import StreamWork
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.host.buffer_pool import POOL
from ds_zipccl.comm.host.pipeline import abandon
from ds_zipccl.comm.host.repeats.memory import Repeats, Words
from ds_zipccl.comm.host.side_stream import SideStream
from ds_zipccl.comm.host.tuner import CallTimer
from ds_zipccl.comm.reduction_order import reduce_op_name
from ds_zipccl.comm.request import DeviceSchedule, Request, Schedule
from ds_zipccl.comm.shadow_check import LossyShadow, Shadow
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission, repeat_rules
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters


def execute(choice: Choice, request: Request, schedule: Schedule) -> Any:
    """Execute a call; blocks unless ``request.async_op``. Returns as torch.distributed does: None, or a handle if ``async_op``.

    Raises:
        CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
    """
    # a caller may change its lists as soon as an asynchronous call has returned
    request.inputs, request.outputs = tuple(request.inputs), tuple(request.outputs)
    if choice.decision.on_device:
        return _enqueue(choice, request, cast(DeviceSchedule, schedule))
    if choice.decision.frames:
        return _execute_coded(choice, request, schedule)
    if choice.decision.reason == PassReason.NOT_A_MEMBER.value:
        return request.plain(request.inputs, request.outputs, request.async_op)
    if choice.decision.reason == PassReason.TRACED.value:
        return _uncompressed(request)
    return _execute_plain(choice, request)


def pass_small(op: str, role: str, sent: int, call: Callable[[], Any], *, kind: str = "") -> Any:
    """Execute a call of fewer than ``min_bytes`` by the plain collective, and return its result. ``sent``: bytes that this rank sends."""
    counters.record_pass(role, op, sent, PassReason.SMALL.value, kind=kind)
    return call()


def is_small(tensor: torch.Tensor, config: ZipcclConfig) -> bool:
    """Return whether a message like ``tensor`` passes because of its size, whatever its dtype and role are."""
    return tensor.layout is torch.strided and admission.is_small(tensor.nbytes, config)


def sent_to_peers(nbytes: int, group: dist.ProcessGroup | None) -> int:
    """Return the part of ``nbytes`` that belongs to other ranks of the group, where all ranks have equal parts."""
    ranks = max(1, group_size(group))
    return nbytes * (ranks - 1) // ranks


def _execute_plain(choice: Choice, request: Request) -> Any:
    """Execute a call by the plain collective. Where schedules compete, results must not depend on the choice: the plain collective then
    gets tensors in the element order of our schedules."""
    timer = choice.timer
    if timer is not None:
        timer.start()
    in_order = choice.competing and not _suits_plain(request)
    handle = _plain_in_order(request) if in_order else _uncompressed(request)
    if timer is not None:
        timer.stop_after(handle) if request.async_op else timer.stop()
    counters.record_pass(request.role, request.op, request.sent_bytes(), choice.decision.reason, kind=request.kind)
    return handle


def _uncompressed(request: Request) -> Any:
    call = request.uncompressed_call
    return call() if call else request.plain(request.inputs, request.outputs, request.async_op)


def _suits_plain(request: Request) -> bool:
    """Return whether the plain collective reads the tensors of this rank in the element order of our schedules."""
    return request.memory_order or all(
        tensor.is_contiguous() and (tensor.dim() == 1 or not request.flat)
        for tensor in (*request.inputs, *request.outputs)
    )


def _plain_in_order(request: Request) -> Any:
    """Execute a call by the plain collective on contiguous tensors, which are flat if ``request.flat``.

    gloo refuses some layouts and shapes, and sends other layouts in memory order, depending on each rank's own tensors. The results of a
    program must not depend on the schedule, and all ranks must run the same collective.
    """
    order = logical_order if request.flat else torch.Tensor.contiguous
    inputs, outputs = ([order(tensor.detach()) for tensor in some] for some in (request.inputs, request.outputs))
    handle = request.plain(inputs, outputs, request.async_op)
    if all(written.data_ptr() == tensor.data_ptr() for tensor, written in zip(request.outputs, outputs, strict=True)):
        return handle

    def finish() -> None:
        if handle is not None:
            handle.wait()
        with torch.inference_mode(), tensors.undisturbed():
            _copy_back(outputs, request.outputs)

    if not request.async_op:
        finish()
        return None
    side = SideStream(request.tensor.device)

    def job() -> None:
        with side.current():
            finish()

    return work.start(request.op, request.outputs, job)


def _copy_back(written: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Copy results to the caller's outputs, unless a result is a view of its output."""
    for result, output in zip(written, outputs, strict=True):
        if result.data_ptr() != output.data_ptr():
            output.copy_(result.view(output.shape))


def _execute_coded(choice: Choice, request: Request, schedule: Schedule) -> Any:
    shadow = _shadow(request, choice.decision.lossy)
    # After the shadow: the context's work on a device follows what is on the caller's stream now, the shadow's copies of tensors that our
    # schedule writes over among it.
    ctx = open_context(request, choice.decision)
    timer: CallTimer | None = choice.timer
    if timer is not None:
        timer.start()
    ctx.repeats = _repeats(ctx, request)

    def job() -> None:
        # all three are states of a thread; only inference mode may write to every tensor
        try:
            with torch.inference_mode(), tensors.undisturbed():
                run()
        finally:
            if ctx.repeats is not None:
                ctx.repeats.end(drop=not request.async_op)

    def run() -> None:
        order = memory_order if request.memory_order else logical_order
        with nullcontext() if shadow is None else telling_failures(ctx):
            with ctx.working():
                outputs = [order(tensor) for tensor in request.outputs]
                schedule.run(ctx, [order(tensor) for tensor in request.inputs], outputs)
                _copy_back(outputs, request.outputs)
            if timer is not None:
                timer.stop()
        if shadow is not None:
            compare_on_all_ranks(ctx, shadow, request.outputs)
        logical = request.sent_bytes() if request.sends_less else ctx.logical_bytes
        counters.record(request.role, request.op, logical, ctx.wire_bytes, POOL.peak, kind=request.kind)
        if ctx.repeats is not None and ctx.repeats.count:
            counters.record_repeats(request.role, request.op, ctx.repeats.count, kind=request.kind)

    if not request.async_op:
        job()
        return None
    try:
        return work.start(request.op, request.outputs, job)
    except BaseException:  # no thread: later operations must not wait for this one
        if ctx.repeats is not None:
            ctx.repeats.end(drop=False)
        raise


def _repeats(ctx: OpContext, request: Request) -> Repeats | None:
    """Reserve the segments of a call that are kept, and find those that it may repeat, in program order; None where there are none."""
    keeps = repeat_rules.keeps(request.config, request.role, request.kind)
    if request.places is None or not keeps or ctx.nodes or ctx.lossy is not None:
        return None
    return ctx.state.repeat_memory.open(
        request.places(ctx),
        Words(request.tensor.dtype, request.tensor.device.type),
        repeat_rules.most(request.config, ctx.size),
        request.again,
        f"{request.op} {request.kind}",
        ctx.transport.timeout().total_seconds(),
    )


def _shadow(request: Request, lossy: LossyCodec | None = None) -> Shadow | LossyShadow | None:
    """Start the plain collective beside a checked call whose values ``lossy`` changes, if any; None where the call is not checked."""
    if request.config.check != "shadow":
        return None
    ranks = group_size(request.group)
    if lossy is None:
        return Shadow(request.plain, request.inputs, request.outputs, request.tolerance, ranks)
    summed = "" if request.reduce_op is None else reduce_op_name(request.reduce_op)
    twice = OPS[request.op].traffic == "all_reduce"  # contributions and the sum
    return LossyShadow(request.plain, request.inputs, request.outputs, lossy, ranks, summed, twice)


def _enqueue(choice: Choice, request: Request, schedule: DeviceSchedule) -> Any:
    """Execute a call on a device: the work is on its streams when the call returns. The current stream waits for a blocking call."""
    shadow = _shadow(request)
    with torch.inference_mode(), tensors.undisturbed():
        ctx = open_device_context(request, choice.decision)
        ctx.kind = request.kind
        inputs, outputs = _flat_on_stream(ctx, request)
        try:
            schedule.enqueue(ctx, inputs, outputs)
            with ctx.streams.on(Stage.DECODE):
                _copy_back(outputs, request.outputs)
        except BaseException:
            ctx.streams.abandon([*inputs, *outputs, *request.inputs, *request.outputs])
            raise
        event = ctx.streams.record(Stage.DECODE)
    keep = [*inputs, *outputs, *request.inputs, *request.outputs]
    handle = StreamWork(ctx.where(), ctx.streams, event, request.outputs, keep)
    logical = request.sent_bytes() if request.sends_less else ctx.logical_bytes
    counters.record(request.role, request.op, logical, ctx.wire_bytes, ctx.streams.nbytes(), kind=request.kind)
    if request.async_op and shadow is None:
        return handle
    handle.wait()
    if shadow is not None:
        _compare(ctx, shadow, request.outputs, lambda text: dict(enumerate(sizes.tell(ctx, text))))
    return handle if request.async_op else None


#: The tag of a checked call's outcome, after those of its exchanges.
_OUTCOME = TAGS_PER_COLLECTIVE - 1


@contextmanager
def telling_failures(ctx: OpContext) -> Iterator[None]:
    """If the body of a checked call fails, tell the other ranks, which wait for the outcome of this one. Does not wait for theirs: they may
    lack frames of this rank."""
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):
            abandon(_told(ctx, _problem(ctx, error)))
        raise


@tensors.undisturbed()
def compare_on_all_ranks(ctx: OpContext, shadow: Shadow | LossyShadow, outputs: Sequence[torch.Tensor]) -> None:
    """Compare the outputs of a call that all ranks check. A collective; blocks.

    Raises:
        CommError: the outputs of a rank differ from the plain results, or a rank has failed. All ranks raise; ShadowMismatch is raised by
            those whose outputs differ.
    """

    def tell(text: str) -> dict[int, str]:
        texts = [unpacked(part) for part in _told(ctx, text).all()]
        return dict(zip((ctx.rank, *ctx.peers), texts, strict=True))

    _compare(ctx, shadow, outputs, tell)


def _compare(
    call: Call,
    shadow: Shadow | LossyShadow,
    outputs: Sequence[torch.Tensor],
    tell: Callable[[str], Mapping[int, str]],
) -> None:
    """As :func:`compare_on_all_ranks`. ``tell`` returns the text of every rank of the group: a collective."""
    try:
        shadow.compare(outputs, call.error)
    except Exception as error:
        with suppress(RuntimeError):
            tell(_problem(call, error))
        raise
    said = {dist.get_global_rank(call.group, rank): text for rank, text in tell("").items() if text}
    if said:
        first = min(said)
        others = f"; so did ranks {sorted(said)[1:]}" if len(said) > 1 else ""
        raise call.error(f"the check failed on global rank {first}: {said[first]}{others}")


def _told(ctx: OpContext, text: str) -> Told:
    return Told(ctx, tensors.of_buffer(packed(text)), "the outcomes of a check", ctx.tag(_OUTCOME))


def _problem(call: Call, error: BaseException) -> str:
    return str(error).removeprefix(f"{call.where()}: ").strip() or repr(error)


def _flat_on_stream(ctx: DeviceContext, request: Request) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the inputs and outputs of a request, flat.

    Copies are memory of a stream, so that they can be freed when any stream has waited: the caller's stream may be another one than the
    stream that waits, and would then use their memory again too early.
    """
    order = memory_order if request.memory_order else logical_order
    with ctx.streams.on(Stage.DECODE):
        inputs, outputs = ([order(tensor) for tensor in some] for some in (request.inputs, request.outputs))
    pairs = zip((*inputs, *outputs), (*request.inputs, *request.outputs), strict=True)
    if any(flat.data_ptr() != tensor.data_ptr() for flat, tensor in pairs):
        for stage in (Stage.ENCODE, Stage.WIRE):
            ctx.streams.order(Stage.DECODE, stage)
    return inputs, outputs


def logical_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor, otherwise a flat copy."""
    return _flat_view(tensor.contiguous())


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the memory that gloo sums: ``tensor.numel()`` elements from the tensor's first element on, for any strides.

    The memory of a dense tensor is its own elements. gloo sums a tensor with gaps together with the gaps, and so do our schedules: bits
    must not depend on the schedule. A tensor that overlaps itself may have too little memory. Then, and for tensors with gaps on other
    devices than CPUs, the result is a copy in logical order.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return (
        _flat_view(tensor)
        if dense or (tensor.device.type == "cpu" and tensor.numel() <= room)
        else logical_order(tensor)
    )


def _flat_view(dense: torch.Tensor) -> torch.Tensor:
    # as_strided, because view(-1) keeps the odd stride that a tensor of one element may have
    return dense.as_strided((dense.numel(),), (1,))
