"""The collectives that FSDP2 calls in place of its own: see ``AllGather`` and ``ReduceScatter`` of torch's ``fully_shard``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, tensors
from ds_zipccl.comm.reduction_order import reduce_op_name
from ds_zipccl.integration.fsdp.parameters import Parameters, Unit
from ds_zipccl.integration.job import Job
from ds_zipccl.policy.admission import CODED_REDUCE_OPS


class _Collective:
    """A collective of one module. ``plain``: torch's own, which calls that pass go through."""

    def __init__(self, unit: Unit, job: Job, plain: Callable[..., Any]) -> None:
        assert job.config is not None  # coding is on
        self.unit, self.job, self.config, self.plain = unit, job, job.config, plain

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of undefined contents."""
        return tensors.empty(math.prod(size), dtype, device).view(*size)


class AllGather(_Collective):
    """Gathers the shards of a module's parameters."""

    def __init__(self, unit: Unit, job: Job, plain: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(unit, job, plain)
        self.parameters = parameters

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather as ``torch.distributed.all_gather_into_tensor``. After ``reshard_after_forward`` to fewer ranks the shards are other ones,
        in another group, without bases."""
        call = functools.partial(self.plain, output_tensor, input_tensor, group, async_op)
        states = self.parameters.of(self.unit.name, input_tensor) if group is self.unit.group else ()
        return comm.all_gather_into_tensor(
            output_tensor,
            input_tensor,
            group,
            async_op,
            parameters=states,
            config=self.config,
            role="zero_param",
            uncompressed_call=call,
        )


class ReduceScatter(_Collective):
    """Sums or averages the gradients of a module. ``reduces`` is told of each sum before."""

    def __init__(self, unit: Unit, job: Job, plain: Callable[..., Any], reduces: Callable[[Unit], None]) -> None:
        super().__init__(unit, job, plain)
        self._reduces = reduces

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce as ``torch.distributed.reduce_scatter_tensor``."""
        self._reduces(self.unit)
        if (name := reduce_op_name(op)) not in CODED_REDUCE_OPS:
            self.job.tell([f"FSDP2: reduce-scatters by {name} stay plain, as for {self.unit.name or 'the root'}"])
        call = functools.partial(self.plain, output_tensor, input_tensor, group, op, async_op)
        return comm.reduce_scatter_tensor(
            output_tensor,
            input_tensor,
            op,
            group,
            async_op,
            config=self.config,
            role="zero_grad",
            uncompressed_call=call,
        )
