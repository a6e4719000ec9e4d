"""Collectives of the backend as a transport: NCCL takes device memory, and follows the current stream of the calling thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl.comm.transport.protocol import timeout_of


class NcclTransport:
    """The collectives of one group that schedules are made of; see :class:`.protocol.CollectiveTransport`.

    Collectives alone: an unbatched send makes a communicator for each pair of ranks (ProcessGroupNCCL::pointToPoint). Calls are blocking
    ones (``async_op`` false), which NCCL puts on the current stream, so that no stream of its own has to be waited for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        dist.all_gather_into_tensor(whole, part, self._group)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        outputs, inputs = (None if sizes is None else list(sizes) for sizes in (received_sizes, sent_sizes))
        dist.all_to_all_single(received, sent, outputs, inputs, self._group)

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        nothing = next(iter(received.values()))[:0]
        outputs, inputs = ([some.get(rank, nothing) for rank in range(self._group.size())] for some in (received, sent))
        dist.all_to_all(outputs, inputs, self._group)

    def max(self, words: torch.Tensor) -> None:
        dist.all_reduce(words, dist.ReduceOp.MAX, self._group)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp) -> None:
        dist.reduce_scatter_tensor(part, whole, op, self._group)

    def timeout(self, device: torch.device) -> timedelta:
        return timeout_of(self._group, device)
