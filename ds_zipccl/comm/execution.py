"""What all collectives share: plan, then pass or frames, now or in the background, checked or not, counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import host_staging, topology, work
from ds_zipccl.comm.buffer_pool import BUFFERS
from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.group_state import REMEMBERED, Members, known, nodes_of, profile_of, resolved, size_of
from ds_zipccl.comm.shadow_check import Plain, Shadow, Tolerance
from ds_zipccl.comm.tuner import Stopwatch, Tuner
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission, cost_model, tuner_rules
from ds_zipccl.telemetry import counters

#: What a call that passes through runs instead of torch.distributed's function; DeepSpeed's backend puts its own method here.
PLAIN: ContextVar[Callable[[], Any] | None] = ContextVar("ds_zipccl_plain", default=None)

#: coded(link, inputs, outputs): the operation with frames, on flat contiguous views of the tensors.
Coded = Callable[[Link, list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(slots=True)  # not frozen: that would double the cost of making one, which small messages feel
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
    plain_fits: bool = True  # the plain collective does whatever ours does
    based: bool = False  # ranks may hold what was gathered before,
    token: Hashable = None  # of this, if that can be told
    memory_order: bool = False  # treat tensors as gloo's sums and broadcasts do: in the order of memory
    flat: bool = False  # shapes do not matter, only numbers of elements
    sends_less: bool = False  # before coding, than the plain collective: then that is what counts as uncoded


@dataclass(slots=True)
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
    members = known(call.group)
    if members is None:
        return op.plain(op.inputs, op.outputs, call.async_op)
    tensor = next(iter(op.outputs or op.inputs), None)
    if tensor is None:
        raise ValueError(f"{op.name}: no tensors")
    if tensors.is_traced(tensor):
        return _plain(op, call)
    admitted, tuner = decide(op, tensor, members, call)
    problem = (op.problem or _mixture([*op.outputs, *op.inputs])) if admitted.frames else ""
    if problem:
        raise ValueError(f"{op.name}: {problem}")
    plan, watch = admitted, None
    if tuner is not None:
        plan, watch = tuner.next(lambda: _link(op, call, admitted), op.token)
        if watch is not None:
            watch.nbytes = _nbytes(op, tensor)
    if plan.frames:
        return _code(op, call, plan, watch)
    return _pass(op, call, plan.reason, int(op.sent * tensor.element_size()), watch, in_order=tuner is not None)


def _nbytes(op: Operation, tensor: torch.Tensor) -> int:
    """The size of the message; where ranks may see different ones, what this rank sends and receives."""
    if op.numel is not None:
        return op.numel * tensor.element_size()
    return sum(one.nbytes for one in (*op.outputs, *op.inputs))


def _may_meet(op: Operation, call: Call) -> bool:
    """Whether ranks may wait for each other first: in a call that blocks, of an operation in which each needs every other anyway."""
    return not call.async_op and op.numel is not None and not OPS[op.name].one_sided


def pass_small(op: str, call: Call, sent: int, plain: Callable[[], Any]) -> Any:
    """Carry out an operation on too few bytes to look at closely, of which this rank sends ``sent``, by the plain collective."""
    counters.record_pass(call.role, op, sent, admission.SMALL)
    return (PLAIN.get() or plain)()


def others(nbytes: int, group: dist.ProcessGroup | None) -> int:
    """The part of ``nbytes`` that belongs to other ranks of the group when each has as much."""
    ranks = max(1, size_of(group))
    return nbytes * (ranks - 1) // ranks


def is_small(tensor: torch.Tensor, config: ZipcclConfig) -> bool:
    """Whether a message like ``tensor`` passes for its size, whatever it is."""
    return tensor.layout is torch.strided and admission.is_small(tensor.nbytes, config)


def _pass(op: Operation, call: Call, reason: str, nbytes: int, watch: Stopwatch | None, *, in_order: bool) -> Any:
    """Carry out ``op`` by the plain collective; ``in_order``: with what our schedules would give, whatever the tensors' layouts are."""
    if watch is not None:
        watch.start(meet=_may_meet(op, call))
    handle = _plain_in_order(op, call) if in_order and not _suits_plain(op) else _plain(op, call)
    if watch is not None:
        watch.stop_after(handle) if call.async_op else watch.stop()
    counters.record_pass(call.role, op.name, nbytes, reason)
    return handle


def _plain(op: Operation, call: Call) -> Any:
    plain = PLAIN.get()
    return plain() if plain else op.plain(op.inputs, op.outputs, call.async_op)


def _suits_plain(op: Operation) -> bool:
    """Whether the plain collective takes the tensors of ``op`` as our schedules do. A rank can tell only of its own."""
    return op.memory_order or all(
        tensor.is_contiguous() and (tensor.dim() == 1 or not op.flat) for tensor in (*op.inputs, *op.outputs)
    )


def _plain_in_order(op: Operation, call: Call) -> Any:
    """Carry out ``op`` by the plain collective on contiguous tensors, flat ones if ``op`` is of shards of flat tensors.

    gloo refuses some layouts and shapes and takes the memory of others as it lies, each rank by its own tensors. What a program computes
    must not depend on the schedule, and ranks must not part ways.
    """
    order = logical_order if op.flat else torch.Tensor.contiguous
    inputs, outputs = ([order(tensor.detach()) for tensor in group] for group in (op.inputs, op.outputs))
    handle = op.plain(inputs, outputs, call.async_op)
    pairs = list(zip(op.outputs, outputs, strict=True))
    if all(written.data_ptr() == tensor.data_ptr() for tensor, written in pairs):
        return handle

    def finish() -> None:
        if handle is not None:
            handle.wait()
        with torch.inference_mode(), tensors.undisturbed():
            for tensor, written in pairs:
                tensor.copy_(written.view(tensor.shape))

    if call.async_op:
        return work.start(op.name, op.outputs, finish)
    finish()
    return None


def _code(op: Operation, call: Call, plan: admission.Decision, watch: Stopwatch | None) -> Any:
    """Carry out ``op`` by our own schedule."""
    link = _link(op, call, plan)
    shadow = None
    if call.config.check == "shadow":
        shadow = Shadow(op.plain, op.inputs, op.outputs, op.tolerance, link.size)
    stream = host_staging.callers_stream((op.outputs or op.inputs)[0])
    if watch is not None:
        watch.start(meet=_may_meet(op, call))

    def job() -> None:
        # all three are of this thread; inference mode is the only one that may write to every tensor
        with torch.inference_mode(), tensors.undisturbed(), stream():
            carry_out()

    def carry_out() -> None:
        flat = memory_order if op.memory_order else logical_order
        outputs = [flat(tensor) for tensor in op.outputs]
        op.coded(link, [flat(tensor) for tensor in op.inputs], outputs)
        for tensor, written in zip(op.outputs, outputs, strict=True):
            if written.data_ptr() != tensor.data_ptr():
                tensor.copy_(written.view(tensor.shape))
        if watch is not None:
            watch.stop()
        if shadow is not None:
            shadow.compare(op.outputs, link.error)
        uncoded = int(op.sent * (op.outputs or op.inputs)[0].element_size()) if op.sends_less else link.logical_bytes
        counters.record(call.role, op.name, uncoded, link.wire_bytes, BUFFERS.peak)

    if call.async_op:
        return work.start(op.name, op.outputs, job)
    job()
    return None


def _link(op: Operation, call: Call, plan: admission.Decision) -> Link:
    group = resolved(call.group)
    nodes = nodes_of(group) if plan.by_node else ()
    return Link(
        op.name, group, call.config, call.role, plan.codec, nodes=nodes, sums=plan.frames and op.reduce_op is not None
    )


def is_member(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is in the group."""
    return known(group) is not None


def group_rank(group: dist.ProcessGroup | None, global_rank: int | None, rank: int | None) -> int:
    """Rank in the group, given as one of global rank and group rank.

    Raises:
        ValueError: both or none is given, or the global rank is not in the group.
    """
    if (global_rank is None) == (rank is None):
        raise ValueError(f"give either a global rank or a group rank, got {global_rank} and {rank}")
    if rank is not None:
        return rank
    assert global_rank is not None  # one of both is given
    return dist.get_group_rank(resolved(group), global_rank)


def decide(
    op: Operation, tensor: torch.Tensor, members: Members, call: Call
) -> tuple[admission.Decision, Tuner | None]:
    """The plan for an operation on tensors like ``tensor``, or who chooses it from call to call."""
    name = "" if op.reduce_op is None else reduce_op_name(op.reduce_op)
    # a config is compared by identity: that is cheap, and the memory below keeps it alive
    key = (
        op.name,
        op.numel,
        tensor.dtype,
        tensor.device.type,
        tensor.layout,
        call.role,
        name,
        op.tolerance,
        op.based,
        id(call.config),
    )
    found = members.plans.get(key)
    if found is None:
        if len(members.plans) >= REMEMBERED:
            members.plans.clear()
        message = message_of(op.name, tensor, op.numel, members, call.role, name or None, based=op.based)
        found = members.plans[key] = (*_decide(op, message, members, call), call.config)
    return found[:2]


def message_of(
    op: str,
    tensor: torch.Tensor,
    numel: int | None,
    members: Members,
    role: str,
    reduce_op: str | None = None,
    *,
    based: bool = False,
) -> admission.Message:
    """What the policy wants to know of ``numel`` elements like those of ``tensor``."""
    device = tensor.device.type
    return admission.Message(
        op=op,
        dtype=tensor.dtype,
        numel=numel,
        ranks=members.size,
        device=device if tensor.layout == torch.strided else f"{device} ({tensor.layout})",
        backend=members.backend(device),
        role=role,
        reduce_op=reduce_op,
        based=based,
    )


def _decide(
    op: Operation, message: admission.Message, members: Members, call: Call
) -> tuple[admission.Decision, Tuner | None]:
    plan = admission.admit(message, call.config)
    if not plan.frames:
        return plan, None
    group = resolved(call.group)
    several = topology.levels(nodes_of(group))
    competing = admission.candidates(
        message, call.config, exact=op.tolerance != "rounding" and op.plain_fits, levels=several
    )
    competing = cost_model.promising(competing, message, profile_of(members))
    if len(competing) == 1:
        return competing[0], None
    size = tuner_rules.size_class(message)
    kind = (op.name, size, message.dtype, message.device, message.role, message.reduce_op, message.based)
    key = (*kind, call.config.model_dump_json())
    if key not in members.tuners:
        dtype, summed = str(message.dtype).removeprefix("torch."), message.reduce_op or "SUM"
        where = "" if group is dist.group.WORLD else f", group {group.group_name}"
        what = f"{dtype}{'' if summed == 'SUM' else ' ' + summed}, {tuner_rules.size_text(size)}, {message.ranks} ranks"
        what += f"{', with a base' if message.based else ''}{where}"
        tell = functools.partial(counters.record_choice, message.role, message.op, what)
        members.tuners[key] = Tuner(competing, tell, nominal=1 << (size or tuner_rules.ANY_SIZE))
    return plan, members.tuners[key]


@functools.cache
def _names() -> dict[Any, str]:
    return {member: name for name, member in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_op_name(op: Any) -> str:
    """Name of a reduce op as in ``torch.distributed.ReduceOp``."""
    names = _names()
    if op in names:  # RedOpType itself, which is what torch.distributed.ReduceOp.SUM is
        return names[op]
    return next((name for member, name in names.items() if op == member), "unknown")


def _mixture(tensors: Sequence[torch.Tensor]) -> str:
    first, *more = tensors
    if all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in more):
        return ""
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
    return f"tensors must be of one dtype on one device, got {', '.join(kinds)}"


def logical_order(tensor: torch.Tensor) -> torch.Tensor:
    """Flat view of a contiguous tensor, otherwise a copy."""
    return _flat_view(tensor.contiguous())


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that gloo's sums work on: as many elements from the tensor's first on as it has, whatever its strides.

    Those of a dense tensor are its own. A tensor with gaps is summed gaps and all, as gloo does it: bits must not depend on the schedule.
    Where the tensor overlaps itself, so that its memory is too short for that, and on other devices: a copy in logical order.
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
