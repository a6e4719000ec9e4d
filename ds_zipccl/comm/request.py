"""The request: one call of a collective, with all that its decision and its execution need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.shadow_check import Plain, Tolerance
from ds_zipccl.config import ZipcclConfig


class TensorKind(NamedTuple):
    """The properties of tensors that decisions depend on, equal on all ranks. ``device``: a device type."""

    dtype: torch.dtype
    device: str
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Return the kind of a tensor."""
        return cls(tensor.dtype, tensor.device.type, tensor.layout)


class Schedule(Protocol):
    """A coded way to carry out an operation."""

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Write the outputs; blocks. Tensors are flat, contiguous, of one dtype on one device, in the order of the request."""
        ...


@dataclass(slots=True)  # not frozen: that would double the cost of making one, which small messages feel
class Request:
    """One call of a collective. In-place operations have no inputs, only outputs.

    Where, for whom:
        op: name in :data:`ds_zipccl.ops.OPS`. ``group`` None is the default group. ``role``: one of
        :data:`ds_zipccl.config.ROLES`.
        uncompressed_call: carries out the operation uncompressed, by the caller's own function, such as DeepSpeed's; None: by ``plain``.
    The message:
        numel: elements of the whole message, equal on all ranks; None: ranks may see different numbers.
        sent: elements that this rank would send uncompressed.
        plain: torch.distributed's collective, on tensors that are given to it.
    The rest tells how far schedules may differ from ``plain``:
        problem: the reason why the arguments cannot be sent at all.
        plain_fits: the plain collective takes all arguments that ours takes.
        memory_order: tensors count in the order of memory, as in gloo's sums and broadcasts.
        flat: shapes do not matter, only numbers of elements.
        sends_less: before coding, than the plain collective: then that one's bytes count as uncompressed.
        based: ranks may hold an earlier result; ``token`` tells it from others, in the same way on all ranks, if anything can.
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
    based: bool = False
    token: Hashable = None

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor whose dtype, device and layout stand for all. Raises ValueError where there is none."""
        for tensor in self.outputs or self.inputs:
            return tensor
        raise ValueError(f"{self.op}: no tensors; give at least one")

    def nbytes(self) -> int:
        """Return the bytes of the message; where ranks may see different ones, those that this rank sends and receives."""
        if self.numel is not None:
            return self.numel * self.tensor.element_size()
        return sum(one.nbytes for one in (*self.outputs, *self.inputs))

    def sent_bytes(self) -> int:
        """Return the bytes that this rank would send uncompressed."""
        return int(self.sent * self.tensor.element_size())
