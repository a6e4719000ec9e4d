"""The request: one call of a collective, with all values that its decision and its execution need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from ds_zipccl.codecs import memory, project
from ds_zipccl.comm.bases.in_place import Base
from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.group_state import group_size, group_state, resolve_group
from ds_zipccl.comm.lossy.factors import Factored, Factoring
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.reduction_order import NO_SUM, Sum, arithmetic
from ds_zipccl.comm.shadow_check import Plain, Shadow
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters


class TensorKind(NamedTuple):
    """The properties of tensors on which decisions depend, equal on all ranks. ``device``: a device type."""

    dtype: torch.dtype
    device: str
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Return the kind of a tensor."""
        return cls(tensor.dtype, tensor.device.type, tensor.layout)


class Segments(NamedTuple):
    """The elements of the segments of an all-to-all: of those that leave for each rank, and of those that come from each rank.

    ``row_width``: elements of a row of this rank's inputs, 0: no rows. Rows may be sent once, see FORMAT.md, codec rows.
    """

    leaving: Sequence[int] = ()
    coming: Sequence[int] = ()
    row_width: int = 0


NO_SEGMENTS = Segments()


class MessageOptions(TypedDict, total=False):
    """The keywords of all functions of :mod:`ds_zipccl.comm`."""

    config: ZipcclConfig
    role: str


class SendOptions(MessageOptions, total=False):
    """The keywords of sends. ``lossy``: the receiver, which names no codec, gets the values that this codec, or the product of these
    factors, makes of the tensor's."""

    lossy: LossyCodec | Factoring | None


class ExactOptions(MessageOptions, total=False):
    """The keywords of all collectives."""

    uncompressed_call: Callable[[], Any] | None


class Options(ExactOptions, total=False):
    """The keywords of collectives that may be lossy."""

    lossy: LossyCodec | None


class CallOptions(NamedTuple):
    """The values of a call's :class:`Options`. ``role``: one of :data:`ds_zipccl.config.ROLES`. ``uncompressed_call``: executes the
    operation uncompressed, by the caller's function, such as DeepSpeed's. ``lossy``: the codec that may change the values in the message,
    see :mod:`ds_zipccl.comm.lossy.frames`.

    ``kind``: place of an exchange in a layer of experts, equal on all ranks: "dispatch", "combine", "dispatch.bwd" or "combine.bwd";
    "" otherwise.
    """

    config: ZipcclConfig = DEFAULT
    role: str = "dp"
    uncompressed_call: Callable[[], Any] | None = None
    lossy: LossyCodec | None = None
    kind: str = ""


@dataclass(slots=True)  # not frozen: freezing would double the time to make a request, which counts in small messages
class Request:
    """One call of a collective. In-place operations have no inputs, only outputs.

    op: name in :data:`ds_zipccl.ops.OPS`. ``group`` None is the default group.
    plain: torch.distributed's collective, on the tensors that are its arguments.
    numel: elements of the whole message, equal on all ranks; None: ranks may see different numbers.
    problem: the reason why the arguments cannot be sent; "" if they can.
    sum, segments: of a sum, of an all-to-all. base: the memory of an earlier gather. parameters: those of a gather, whose shards lie
    end to end in the input. root: the group rank that is the source of a broadcast, or that gets a sum. tag: the first tag of messages, of
    a request that waits for others of the program; None: the next one.
    """

    op: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    group: dist.ProcessGroup | None
    async_op: bool
    options: CallOptions
    _: KW_ONLY
    plain: Plain
    numel: int | None
    problem: str = ""
    sum: Sum = NO_SUM
    segments: Segments = NO_SEGMENTS
    base: Base | None = None
    parameters: Sequence[GatheredParameter] = ()
    root: int = 0
    tag: int | None = None

    def prepare(self) -> None:
        """Find the arithmetic of a sum, and whether the call is lossy. Raises ValueError if a gather of parameters or from a base is
        lossy."""
        tensor = next(iter(self.outputs or self.inputs), None)
        lossy = self.options.lossy
        if lossy is not None:  # first: nearly every call of a job ends here
            if tensor is None or not may_change(lossy, tensor, self.group, self.op, self.options.role):
                lossy = None
            if lossy is not None and (self.based or self.parameters):
                raise ValueError(
                    f"{self.op}: got lossy={lossy} with a base or parameters, whose gathers are exact; leave one of them out"
                )
            self.options = self.options._replace(lossy=lossy)
        if self.sum.op is not None:
            told = self.options
            self.sum = arithmetic(tensor, self.sum, self.group, told.config, told.role, self.numel, lossy is not None)

    def check_tensors(self) -> None:
        """Raise ValueError if frames cannot carry the tensors, or if the arguments do not fit together; before the first message."""
        if problem := self.problem or unfit(self.op, self.inputs, self.outputs):
            raise ValueError(f"{self.op}: {problem}")

    def call(self, codec: str) -> tuple[str, dist.ProcessGroup, ZipcclConfig, str, str]:
        """Return the arguments that contexts of all kinds have."""
        return self.op, resolve_group(self.group), self.options.config, self.options.role, codec

    def facts(self) -> tuple[str | None, int, bool, bool, LossyCodec | None, bool]:
        """Return the fields of :class:`.admission.Message` from ``reduce_op`` on."""
        name, nodes, told = self.sum.reduction.op or None, len(self.sum.nodes), self.options
        return name, nodes, self.based, self.plain_sums, told.lossy, self.copied

    @property
    def based(self) -> bool:
        """Return whether ranks may hold an earlier result."""
        if self.base is not None or not self.parameters:
            return self.base is not None  # nearly every call of a job ends here
        ranks, dtype = group_size(self.group), self.tensor.dtype
        return all(one.fitting(ranks, dtype) is not None for one in self.parameters)

    @property
    def copied(self) -> bool:
        """Return whether most of a gather comes from bases while its parameters stay as they are: those of "auto" are frozen, and
        with "node" a backward pass gathers what its forward pass has gathered."""
        if not self.parameters or self.options.config.zero3_base not in ("auto", "node"):
            return False
        based = sum(one.numel for one in self.parameters if one.slot() is not None)
        return 2 * based > sum(one.numel for one in self.parameters)

    @property
    def plain_sums(self) -> bool:
        """Return whether the sum is the plain collective's own, so that the call passes."""
        return self.sum.reduction.plain

    @property
    def exact(self) -> bool:
        """Return whether our schedules give the bits of the plain collective, which takes all arguments that ours take."""
        return self.sum.tolerance != "rounding" and OPS[self.op].plain_fits and self.options.lossy is None

    @property
    def tensor(self) -> torch.Tensor:
        """Return a tensor whose dtype, device and layout stand for all tensors. Raises ValueError if the request has no tensor."""
        for tensor in self.outputs or self.inputs:
            return tensor
        raise ValueError(f"{self.op}: no tensors; give at least one")

    def nbytes(self) -> int:
        """Return the bytes of the message; where ``numel`` is None, the bytes that this rank sends in the plain collective."""
        return self.sent_bytes() if self.numel is None else self.numel * self.tensor.element_size()

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in the plain collective."""
        ranks, itemsize = group_size(self.group), self.tensor.element_size()
        if self.numel is None or self.segments.leaving:
            rank = dist.get_rank(self.group)
            return itemsize * sum(size for peer, size in enumerate(self.segments.leaving) if peer != rank)
        sends = not OPS[self.op].one_sided or self.inputs
        return OPS[self.op].sent_bytes(self.numel * itemsize, ranks) if sends else 0


class Post(NamedTuple):
    """One message between this rank and the group rank ``peer``, None: any rank; and the decision on it.

    What changes the values of frames: a ``codec``; or ``factored``, factors, whose product ``tensor`` then is; or neither.
    """

    tensor: torch.Tensor
    group: dist.ProcessGroup
    tag: int
    peer: int | None
    config: ZipcclConfig
    role: str
    decision: admission.Decision
    codec: LossyCodec | None = None
    factored: Factored | None = None

    def changed(self, op: str, options: SendOptions) -> Post:
        """Return the message with the values that its codec or its factors give it, with frames and without: they must not depend on
        times."""
        lossy, slower = options.get("lossy"), self.decision.reason == PassReason.LINK_IS_FASTER.value
        if lossy is None or not may_change(lossy, self.tensor, self.group, op, self.role):
            return self
        if not (self.decision.frames or slower):
            return self
        if isinstance(lossy, Factoring):
            factored = lossy.factored(self.tensor, op, self.config.route)
            return self if factored is None else self._replace(tensor=factored.values, factored=factored)
        if self.decision.frames:
            return self._replace(codec=lossy)
        return self._replace(tensor=LossyFrames(Call(op, self.group, self.config, self.role), lossy).alone(self.tensor))


def may_change(lossy: object, tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str, role: str) -> bool:
    """Return whether our schedules carry tensors like ``tensor`` lossily, equally on all ranks. Elsewhere the call goes exact, as without
    ``lossy``, and the reason is counted."""
    if group_state(group) is None:
        return False
    if tensor.dtype not in admission.CODED_DTYPES:
        counters.record_lossy(role, op, str(lossy), 1)  # the message counts as a frame
        counters.record_exact(role, op, f"dtype {str(tensor.dtype).removeprefix('torch.')} is never lossy", 1)
        return False
    return True


def is_small(tensor: torch.Tensor, config: ZipcclConfig) -> bool:
    """Return whether a message like ``tensor`` passes because of its size, whatever its dtype and role are."""
    return tensor.layout is torch.strided and admission.is_small(tensor.nbytes, config)


# ---- checked calls


def shadow_of(request: Request, lossy: LossyCodec | None = None) -> Shadow | None:
    """Start the plain collective beside a checked call whose values ``lossy`` changes, if any; None where the call is not checked."""
    if request.options.config.check != "shadow" or (lossy is not None and request.sum.op is not None):
        return None
    inputs, outputs = request.inputs, request.outputs
    if lossy is not None:
        carried = [_carried(request, number, tensor, lossy) for number, tensor in enumerate(inputs or outputs)]
        inputs, outputs = (carried, outputs) if inputs else ([], carried)
    return Shadow(request.plain, inputs, outputs, request.sum.tolerance, group_size(request.group))


def _carried(request: Request, number: int, tensor: torch.Tensor, lossy: LossyCodec) -> torch.Tensor:
    """Return a copy of a tensor of a call with the values that its frames carry. What a rank sends to itself stays exact."""
    op, rank, ranks = OPS[request.op], dist.get_rank(request.group), group_size(request.group)
    copy = tensor.detach().clone()
    flat = memory_order(copy) if op.memory_order else logical_order(copy)
    parts = {number: flat}  # by peer, in an exchange
    if request.op == "all_to_all_single":
        parts = dict(enumerate(flat.split(list(request.segments.leaving) or [flat.numel() // ranks] * ranks)))
    for peer, part in parts.items():
        if op.traffic != "all_to_all" or peer != rank:
            part.copy_(project(part, lossy))
    copy_back([flat], [copy])
    return copy


def compare_by(
    call: Call, shadow: Shadow, outputs: Sequence[torch.Tensor], tell: Callable[[str], Mapping[int, str]]
) -> None:
    """As :func:`compare_on_all_ranks`, of operations in any order. ``tell`` returns the text of every rank of the group: a collective."""
    try:
        shadow.compare(outputs, call.error)
    except Exception as error:
        with suppress(RuntimeError):
            tell(problem_of(call, error))
        raise
    said = {call.global_rank(rank): text for rank, text in tell("").items() if text}
    if said:
        first = min(said)
        others = f"; so did ranks {sorted(said)[1:]}" if len(said) > 1 else ""
        raise call.error(f"the check failed on global rank {first}: {said[first]}{others}")


def problem_of(call: Call, error: BaseException) -> str:
    """Return the text of an error for the other ranks, which know the operation."""
    return str(error).removeprefix(f"{call.where()}: ").strip() or repr(error)


# ---- the elements of tensors


def unfit(op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Return the reason why frames cannot carry the tensors of a call together; "" where they can. The door of all engines, which asks
    before the first message: behind it tensors are read and written at their addresses.

    torch's collectives lose a result in a negative view, which they resolve as if it were an input; those of a list of gathered tensors
    alone copy it there.
    """
    first, *more = every = (*outputs, *inputs)
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in more):
        kinds = ", ".join(sorted({f"{tensor.dtype} on {tensor.device}" for tensor in every}))
        return f"make a call for each dtype and device: tensors must be of one dtype on one device, got {kinds}"
    if not all(map(memory.has_words, every)):
        return "tensors must have memory of their own, got one that is freed, cut short, nested or not written out; pass a clone"
    if op != "all_gather" and any(tensor.is_neg() for tensor in outputs):
        return (
            "an output is a negative view, in which torch's collective loses its result; pass a clone, and copy it back"
        )
    return ""


def equal_shards(flat: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """Return equal shards of a flat tensor, one for each rank."""
    shards: Sequence[torch.Tensor] = flat.split([flat.numel() // ranks] * ranks)
    return shards


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its own flat view, in memory order and in logical order; nearly all of a job are."""
    return tensor.dim() == 1 and tensor.stride(0) == 1 and not tensor.is_conj() and not tensor.is_neg()


def logical_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor, otherwise a flat copy; of a conjugate or negative view a copy with its values."""
    return _flat_view(tensor.resolve_conj().resolve_neg().contiguous())


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the memory that gloo sums: ``tensor.numel()`` elements from the tensor's first element on, for any strides.

    The memory of a dense tensor is its own elements. gloo sums a tensor with gaps together with the gaps, and so do our schedules: bits
    must not depend on the schedule. A tensor that overlaps itself may have too little memory. Then, and for tensors with gaps on other
    devices than CPUs, the result is a copy in logical order.
    """
    tensor = tensor.resolve_neg()  # as torch's collectives do
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


def copy_back(written: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Copy results to the caller's outputs, unless a result is a view of its output."""
    for result, output in zip(written, outputs, strict=True):
        if result.data_ptr() != output.data_ptr():
            output.copy_(result.view(output.shape))
