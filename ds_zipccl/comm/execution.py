"""The execution of a call, by the plain collective or by a schedule, on the caller's thread or in the background. Every call is counted;
some are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import engine, work
from ds_zipccl.comm.decision import Choice, decide
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.request import CallOptions, Request, copy_back, logical_order
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

#: Reasons of calls that pass now, and of which their engine takes note, on all ranks.
_NOTED = (PassReason.UNPROVEN.value, PassReason.SMALL_GAIN.value)


def run(request: Request) -> Any:
    """Decide on a call, and execute it; see :func:`execute`. Raises as :func:`.decision.decide` too."""
    return execute(decide(request), request)


def execute(choice: Choice, request: Request) -> Any:
    """Execute a call; blocks unless ``request.async_op``. Returns as torch.distributed does: None, or a handle if ``async_op``.

    Raises:
        CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
    """
    # a caller may change its lists as soon as an asynchronous call has returned
    request.inputs, request.outputs = tuple(request.inputs), tuple(request.outputs)
    if choice.decision.frames:
        return engine.engine_for(request).start(request, choice.decision)
    options, reason = request.options, choice.decision.reason
    if reason == PassReason.NOT_A_MEMBER.value:
        return request.plain(request.inputs, request.outputs, request.async_op)
    if reason == PassReason.TRACED.value:
        return _uncompressed(request)
    # where schedules compete, the plain collective gets tensors in the element order of ours: results must not depend on the choice
    in_order = choice.competing and not _suits_plain(request)
    handle = _plain_in_order(request) if in_order else _uncompressed(request)
    counters.record_pass(options.role, request.op, request.sent_bytes(), reason, kind=options.kind)
    if reason in _NOTED:
        engine.engine_for(request).passed(request, handle, reason)
    return handle


def pass_small(
    op: str,
    options: CallOptions,
    nbytes: int,
    group: dist.ProcessGroup | None,
    plain: Callable[[], Any],
    reason: PassReason = PassReason.SMALL,
) -> Any:
    """Execute a call that no decision is needed for uncompressed, mostly of fewer than ``min_bytes``, and return its result. ``nbytes``: 0
    where this rank only receives."""
    sent = OPS[op].sent_bytes(nbytes, group_size(group))
    counters.record_pass(options.role, op, sent, reason.value, kind=options.kind)
    return (options.uncompressed_call or plain)()


def _uncompressed(request: Request) -> Any:
    call = request.options.uncompressed_call
    return call() if call else request.plain(request.inputs, request.outputs, request.async_op)


def _suits_plain(request: Request) -> bool:
    """Return whether the plain collective reads the tensors of this rank in the element order of our schedules."""
    return OPS[request.op].memory_order or all(
        tensor.is_contiguous() and (tensor.dim() == 1 or not OPS[request.op].flat)
        for tensor in (*request.inputs, *request.outputs)
    )


def _plain_in_order(request: Request) -> Any:
    """Execute a call by the plain collective on contiguous tensors, which are flat if the operation is.

    gloo refuses some layouts and shapes, and sends other layouts in memory order, depending on each rank's own tensors. The results of a
    program must not depend on the schedule, and all ranks must run the same collective.
    """
    order = logical_order if OPS[request.op].flat else torch.Tensor.contiguous
    inputs, outputs = ([order(tensor.detach()) for tensor in some] for some in (request.inputs, request.outputs))
    handle = request.plain(inputs, outputs, request.async_op)
    if all(written.data_ptr() == tensor.data_ptr() for tensor, written in zip(request.outputs, outputs, strict=True)):
        return handle

    def finish() -> None:
        if handle is not None:
            handle.wait()
        with torch.inference_mode(), tensors.undisturbed():
            copy_back(outputs, request.outputs)

    if not request.async_op:
        finish()
        return None
    return work.start(request.op, request.outputs, finish)
