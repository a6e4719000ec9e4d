"""The request: one call of a collective, with all values that its decision and its execution need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host.repeats.memory import Places
from ds_zipccl.comm.reduction_order import Arithmetic, arithmetic
from ds_zipccl.comm.shadow_check import Plain, Tolerance
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission
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


class Schedule(Protocol):
    """An algorithm that executes an operation with frames, over messages of pairs of ranks."""

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Write the outputs; blocks. Tensors are flat, contiguous, of one dtype on one device, in the element order of the request."""
        ...


class DeviceSchedule(Protocol):
    """A schedule that has another algorithm over collectives in the order of a device's streams."""

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Put the work on the streams, the last of it on the decoding stream; the host waits at most for an agreement. Tensors as for
        ``run``."""
        ...


@dataclass(slots=True)  # not frozen: freezing would double the time to make a request, which counts in small messages
class Request:
    """One call of a collective. In-place operations have no inputs, only outputs.

    The operation:
        op: name in :data:`ds_zipccl.ops.OPS`. ``group`` None is the default group. ``role``: one of
        :data:`ds_zipccl.config.ROLES`.
        uncompressed_call: executes the operation uncompressed, by the caller's function, such as DeepSpeed's; None: ``plain`` does.
    The message:
        numel: elements of the whole message, equal on all ranks; None: ranks may see different numbers.
        sent: elements that this rank would send uncompressed.
        row_width: elements of a row of this rank's inputs; 0: no rows. Rows may be sent once, see FORMAT.md, codec rows.
        kind: place of an exchange in a layer of experts, equal on all ranks: "dispatch", "combine", "dispatch.bwd" or "combine.bwd";
        "replicated": a sum of tensors that may be the same on all ranks; "" otherwise.
        plain: torch.distributed's collective, on the tensors that are its arguments.
        lossy: the codec that may change the values in the message, see :mod:`ds_zipccl.comm.lossy.frames`; None: no value changes.
    Differences that are allowed between schedules and ``plain``:
        problem: the reason why the arguments cannot be sent; "" if they can.
        plain_fits: the plain collective takes all arguments that ours takes.
        memory_order: elements count in memory order, as in gloo's sums and broadcasts.
        flat: only the number of elements of a tensor matters, not its shape.
        sends_less: our schedule sends less than the plain collective even before compression. The plain collective's bytes then count as
        logical bytes.
        nodes: the ranks of each node if the operation is a sum in two levels, see :mod:`ds_zipccl.comm.reduction_order`.
        plain_sums: the sum is the plain collective's own, so that the call passes.
        based: ranks may hold an earlier result. ``token`` tells that result from others, equally on all ranks; None where no value does.
    Repeats, see :mod:`ds_zipccl.comm.host.repeats.memory`:
        again: the call may repeat messages of a forward pass.
        places: the segments of the first exchanges of our schedule; None where they are not kept.
    """

    op: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    group: dist.ProcessGroup | None
    async_op: bool
    config: ZipcclConfig
    role: str
    plain: Plain
    numel: int | None
    sent: float
    uncompressed_call: Callable[[], Any] | None = None
    problem: str = ""
    reduce_op: dist.ReduceOp | None = None
    tolerance: Tolerance = "bits"
    plain_fits: bool = True
    memory_order: bool = False
    flat: bool = False
    sends_less: bool = False
    nodes: Sequence[Sequence[int]] = ()
    plain_sums: bool = False
    based: bool = False
    token: Hashable = None
    row_width: int = 0
    kind: str = ""
    again: bool = False
    places: Callable[[OpContext], Sequence[Places]] | None = None
    lossy: LossyCodec | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """Return a tensor whose dtype, device and layout stand for all tensors. Raises ValueError if the request has no tensor."""
        for tensor in self.outputs or self.inputs:
            return tensor
        raise ValueError(f"{self.op}: no tensors; give at least one")

    def nbytes(self) -> int:
        """Return the bytes of the message; where ``numel`` is None, the bytes that this rank would send uncompressed."""
        return self.sent_bytes() if self.numel is None else self.numel * self.tensor.element_size()

    def sent_bytes(self) -> int:
        """Return the bytes that this rank would send uncompressed."""
        return int(self.sent * self.tensor.element_size())

    def may_meet(self) -> bool:
        """Return whether ranks may wait for each other before the call: a blocking call in which every rank needs data of every other.

        In an uneven all-to-all a rank may need no data. It may wait all the same, because gloo's all-to-all waits for a message of every
        peer, also for an empty one.
        """
        return not self.async_op and not OPS[self.op].one_sided


def set_sum(request: Request, op: Any) -> Arithmetic:
    """Set the fields of a request that follow from its sum, and return the arithmetic of the sum. Raises as :func:`arithmetic`."""
    tensors = request.outputs or request.inputs
    device = tensors[0].device.type if tensors else ""
    found = arithmetic(device, op, request.group, request.config, request.role, request.lossy)
    request.reduce_op, request.tolerance, request.nodes = op, found.tolerance, found.nodes
    request.plain_sums = found.reduction.plain
    return found


_Lossy = TypeVar("_Lossy")  # a codec, or what makes factors


def lossy_here(
    lossy: _Lossy | None,
    words: tuple[torch.dtype, torch.device] | None,
    group: dist.ProcessGroup | None,
    op: str,
    role: str,
) -> _Lossy | None:
    """Return ``lossy`` where our schedules carry tensors of a dtype on a device lossily, equally on all ranks. Elsewhere the call goes
    exact, as without ``lossy``, and the reason is counted. ``words`` None: there are no tensors."""
    if lossy is None or words is None:  # first: nearly every call of a job ends here
        return None
    state = group_state(group)
    if state is None:
        return None
    dtype, device = words[0], words[1].type
    reason = admission.exact_because(dtype, device, state.backend(device))
    if reason:
        counters.record_lossy(role, op, str(lossy), 1)  # the message counts as a frame
        counters.record_exact(role, op, reason, 1)
        return None
    return lossy
