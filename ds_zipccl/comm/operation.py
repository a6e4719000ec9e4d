"""What all collectives share: plan, then pass or frames, now or in the background, checked or not, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import policy, stats
from ds_zipccl.comm import staging, work
from ds_zipccl.comm.exchange import Link
from ds_zipccl.comm.shadow import Plain, Shadow, Tolerance
from ds_zipccl.config import ZipcclConfig

#: What a call that passes through runs instead of torch.distributed's function; DeepSpeed's backend puts its own method here.
PLAIN: ContextVar[Callable[[], Any] | None] = ContextVar("ds_zipccl_plain", default=None)

#: coded(link, inputs, outputs): the operation with frames, on flat contiguous views of the tensors.
Coded = Callable[[Link, list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(frozen=True)
class Operation:
    """One collective call. In-place operations have no inputs, only outputs."""

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    plain: Plain
    coded: Coded
    numel: int | None  # of the whole message, equal on all ranks; None: may differ
    sent: float  # elements that this rank would send uncoded
    problem: str = ""  # why the arguments cannot be coded or sent at all
    reduce_op: dist.ReduceOp | None = None
    tolerance: Tolerance = "bits"
    memory_order: bool = False  # treat dense tensors as gloo's sums do: in the order of memory


@dataclass(frozen=True)
class Call:
    """How an operation was called. ``group`` None is the default group."""

    group: dist.ProcessGroup | None
    async_op: bool
    config: ZipcclConfig
    role: str


def run(op: Operation, call: Call) -> Any:
    """Carry out ``op``; blocks unless ``async_op``. Returns what torch.distributed would: None, or a handle if ``async_op``.

    Raises:
        ValueError: arguments that do not fit together, on the rank that has them and before anything is sent.
        CommError: a peer or the transport failed, or a frame was refused; ``async_op`` operations raise it in ``wait()``.
    """
    group, async_op, config, role = call.group or dist.group.WORLD, call.async_op, call.config, call.role
    if not is_member(group):
        return op.plain(op.inputs, op.outputs, async_op)
    tensors = [*op.outputs, *op.inputs]
    if not tensors:
        raise ValueError(f"{op.name}: no tensors")
    plan = decide(op.name, tensors[0], op.numel, group, config, role, op.reduce_op)
    if not plan.frames:
        stats.record_pass(role, op.name, int(op.sent * tensors[0].element_size()), plan.reason)
        return PLAIN.get()() if PLAIN.get() else op.plain(op.inputs, op.outputs, async_op)
    problem = op.problem or _mixture(tensors)
    if problem:
        raise ValueError(f"{op.name}: {problem}")
    link = Link(op.name, group, config, role, plan.codec)
    shadow = Shadow(op.plain, op.inputs, op.outputs, op.tolerance, link.size) if config.check == "shadow" else None

    stream = staging.callers_stream(tensors[0])

    def job() -> None:
        with torch.inference_mode(), stream():  # thread-local, and the only mode that may write to every tensor
            carry_out()

    def carry_out() -> None:
        flat = memory_order if op.memory_order else logical_order
        outputs = [flat(tensor) for tensor in op.outputs]
        op.coded(link, [flat(tensor) for tensor in op.inputs], outputs)
        link.lease.release()
        for tensor, written in zip(op.outputs, outputs, strict=True):
            if written.data_ptr() != tensor.data_ptr():
                tensor.copy_(written.view(tensor.shape))
        if shadow is not None:
            shadow.compare(op.outputs, link.error)
        stats.record(role, op.name, link.raw_bytes, link.wire_bytes)

    if async_op:
        return work.start(op.name, op.outputs, job)
    job()
    return None


def is_member(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is in the group."""
    return dist.get_rank(group) >= 0


def group_rank(group: dist.ProcessGroup | None, global_rank: int | None, rank: int | None) -> int:
    """Rank in the group, given as one of global rank and group rank.

    Raises:
        ValueError: both or none is given, or the global rank is not in the group.
    """
    if (global_rank is None) == (rank is None):
        raise ValueError(f"give either a global rank or a group rank, got {global_rank} and {rank}")
    return rank if global_rank is None else dist.get_group_rank(group or dist.group.WORLD, global_rank)


def decide(
    op: str,
    tensor: torch.Tensor,
    numel: int | None,
    group: dist.ProcessGroup,
    config: ZipcclConfig,
    role: str,
    reduce_op: dist.ReduceOp | None = None,
) -> policy.Plan:
    """The plan for a message of ``numel`` elements like those of ``tensor``."""
    device = tensor.device.type if tensor.layout == torch.strided else f"{tensor.device.type} ({tensor.layout})"
    message = policy.Message(
        op=op,
        dtype=tensor.dtype,
        numel=numel,
        ranks=dist.get_world_size(group),
        device=device,
        backend=backend_of(group, tensor.device.type),
        role=role,
        reduce_op=None if reduce_op is None else reduce_op_name(reduce_op),
    )
    return policy.plan(message, config)


def backend_of(group: dist.ProcessGroup | None, device: str) -> str:
    """Name of the backend that serves tensors on ``device`` in the group, such as "gloo"; "" where there is none."""
    if not is_member(group):
        return ""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    name = pairs.get(device, "")
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # torch then compares how many messages each rank has sent and received, and takes a difference for a wrong program
        return f"{name} under TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return name


def reduce_op_name(op: dist.ReduceOp) -> str:
    """Name of a reduce op as in ``torch.distributed.ReduceOp``."""
    return next((name for name, member in dist.ReduceOp.RedOpType.__members__.items() if op == member), "unknown")


def _mixture(tensors: Sequence[torch.Tensor]) -> str:
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
    return f"tensors must be of one dtype on one device, got {', '.join(kinds)}" if len(kinds) > 1 else ""


def logical_order(tensor: torch.Tensor) -> torch.Tensor:
    """Flat view of a contiguous tensor, otherwise a copy."""
    return _flat_view(tensor.contiguous())


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Flat view of a dense tensor whatever its strides, otherwise a copy in logical order."""
    return _flat_view(tensor) if torch.ops.aten.is_non_overlapping_and_dense(tensor) else logical_order(tensor)


def _flat_view(dense: torch.Tensor) -> torch.Tensor:
    # as_strided, because view(-1) keeps the odd stride that a tensor of one element may have
    return dense.as_strided((dense.numel(),), (1,))
