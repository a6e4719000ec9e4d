"""The engine of groups that exchange messages of pairs of ranks, matched by tags, such as those of gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import devices, tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.context import Call, OpContext, Told, packed, unpacked
from ds_zipccl.comm.group_state import GroupState, group_nodes, resolve_group
from ds_zipccl.comm.host import exchange, gather, sums
from ds_zipccl.comm.host.pipeline import abandon
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.request import Request, compare_by, copy_back, logical_order, memory_order, problem_of, shadow_of
from ds_zipccl.comm.shadow_check import AnyShadow
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE
from ds_zipccl.comm.tuner import CallTimer
from ds_zipccl.comm.work import CommError
from ds_zipccl.ops import OPS
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import Decision
from ds_zipccl.telemetry import counters

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


def takes(state: GroupState, device: str) -> bool:
    """Return whether a group's tensors on a device type go by messages, see :class:`ds_zipccl.comm.engine.Engine`."""
    return state.backend(device) in TRANSPORTS


def passes_now(request: Request) -> None:
    """Let no call pass. Raises CommError as :func:`refuse_capture`."""
    refuse_capture(request.op, request.tensor.device)


def refuse_capture(op: str, device: torch.device) -> None:
    """Raise CommError if the current stream of ``device`` records a graph: a replay would not send. The plain collective of a backend that
    takes host memory fails in a capture too."""
    if devices.is_capturing(device):
        raise CommError(
            f"{op}: got a call while a graph of {device} is captured, wanted a call outside of captures: on this group frames go through "
            f"host memory, and a graph cannot hold them; call before or after the capture, or pass a group whose backend is NCCL"
        )


def open_context(request: Request, decision: Decision) -> OpContext:
    """Return the context of a request, with the next tags of its group. Every rank calls in program order."""
    ctx = OpContext(
        *request.call(decision.codec),
        nodes=group_nodes(resolve_group(request.group)) if decision.by_node else (),
        with_base=decision.with_base,
        sums=decision.frames and request.sum.op is not None,
        rows=wire.may_have_rows(request.options.config, request.op, request.options.role, decision.codec),
    )
    ctx.rounding = None if decision.lossy is None else LossyFrames(ctx, decision.lossy)
    return ctx


@tensors.undisturbed()
def largest(request: Request, *numbers: int) -> list[int]:
    """Return the largest of all ranks of each number. A collective of the request's group; blocks. It is the backend's own all-reduce,
    which fails at once where another rank is in the all-reduce of a tensor.

    Raises:
        CommError: the transport failed.
    """
    words = tensors.of_numbers(numbers, torch.int64).to(request.tensor.device)
    with Call(*request.call("")[:4]).naming("comparing arguments with those of the other ranks"):
        dist.all_reduce(words, dist.ReduceOp.MAX, request.group)
    return list(words.tolist())


def start(request: Request, decision: Decision, timer: CallTimer | None = None) -> Any:
    """Execute a call by messages; blocks unless ``request.async_op``. Returns as torch.distributed does.

    Raises:
        CommError: a peer or the transport failed, or a frame was refused. The handle of an ``async_op`` call raises in ``wait()``.
    """
    shadow = shadow_of(request, decision.lossy)
    # After the shadow: the context's work on a device follows what is on the caller's stream now, the shadow's copies of tensors that our
    # schedule writes over among it.
    ctx = open_context(request, decision)
    if timer is not None:
        timer.start()

    def job() -> None:
        # both are states of a thread; only inference mode may write to every tensor
        with torch.inference_mode(), tensors.undisturbed():
            run()

    def run() -> None:
        order = memory_order if OPS[request.op].memory_order else logical_order
        with nullcontext() if shadow is None else telling_failures(ctx):
            with ctx.working():
                outputs = [order(tensor) for tensor in request.outputs]
                COLLECTIVES[request.op](ctx, request, [order(tensor) for tensor in request.inputs], outputs)
                copy_back(outputs, request.outputs)
            if timer is not None:
                timer.stop()
        if shadow is not None:
            compare_on_all_ranks(ctx, shadow, request.outputs)
        logical, kind = request.sent_bytes() if OPS[request.op].plain else ctx.logical_bytes, request.options.kind
        counters.record(ctx.role, request.op, logical, ctx.wire_bytes, POOL.peak, kind=kind)

    if not request.async_op:
        job()
        return None
    return work.start(request.op, request.outputs, job)


# ---- checked calls

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
            abandon(_told(ctx, problem_of(ctx, error)))
        raise


@tensors.undisturbed()
def compare_on_all_ranks(ctx: OpContext, shadow: AnyShadow, outputs: Sequence[torch.Tensor]) -> None:
    """Compare the outputs of a call that all ranks check. A collective; blocks.

    Raises:
        CommError: the outputs of a rank differ from the plain results, or a rank has failed. All ranks raise; ShadowMismatch is raised by
            those whose outputs differ.
    """

    def tell(text: str) -> dict[int, str]:
        texts = [unpacked(part) for part in _told(ctx, text).all()]
        return dict(zip((ctx.rank, *ctx.peers), texts, strict=True))

    compare_by(ctx, shadow, outputs, tell)


def _told(ctx: OpContext, text: str) -> Told:
    return Told(ctx, tensors.of_buffer(packed(text)), "the outcomes of a check", ctx.tag(_OUTCOME))
