"""Collectives of the backend as a transport: NCCL takes device memory, and follows the current stream of the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.comm.transport.protocol import timeout_of

_c10d: Any = c10d
_OF_GATHER, _OF_EXCHANGE = _c10d.AllgatherOptions(), _c10d.AllToAllOptions()
#: Whether a call can be said to be a blocking one; not up to torch 2.6.
_DIRECT = hasattr(_OF_GATHER, "asyncOp") and hasattr(_OF_EXCHANGE, "asyncOp")
if _DIRECT:
    _OF_GATHER.asyncOp = _OF_EXCHANGE.asyncOp = False
#: The methods of a process group that torch.distributed calls, by the names of this torch.
_ALL_GATHER, _ALL_TO_ALL = (
    next(name for name in names if hasattr(dist.ProcessGroup, name))
    for names in (("all_gather_single", "_allgather_base"), ("all_to_all_single", "alltoall_base"))
)


class NcclTransport:
    """The collectives of one group that schedules are made of; see :class:`.protocol.CollectiveTransport`.

    Collectives alone: an unbatched send makes a communicator for each pair of ranks (ProcessGroupNCCL::pointToPoint). Calls are blocking
    ones (``async_op`` false), which NCCL puts on the current stream, so that no stream of its own has to be waited for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def _run(
        self, method: str, plain: Callable[..., Any], options: Any, into: Any, out: Any, *sizes: list[int]
    ) -> None:
        """Call the group's own method: the checks of ``plain``, of torch.distributed, take three times as long."""
        if not _DIRECT:
            plain(into, out, *(some or None for some in sizes), group=self._group)
            return
        work = getattr(self._group, method)(into, out, *sizes, options)
        if work is not None:  # of backends whose calls are asynchronous, as torch.distributed says
            work.wait()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self._run(_ALL_GATHER, dist.all_gather_into_tensor, _OF_GATHER, whole, part)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        sizes = list(received_sizes or ()), list(sent_sizes or ())
        self._run(_ALL_TO_ALL, dist.all_to_all_single, _OF_EXCHANGE, received, sent, *sizes)

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        nothing = next(iter(received.values()))[:0]
        outputs, inputs = ([some.get(rank, nothing) for rank in range(self._group.size())] for some in (received, sent))
        self._run("alltoall", dist.all_to_all, _OF_EXCHANGE, outputs, inputs)

    def max(self, words: torch.Tensor) -> None:
        dist.all_reduce(words, dist.ReduceOp.MAX, self._group)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp) -> None:
        dist.reduce_scatter_tensor(part, whole, op, self._group)

    def timeout(self, device: torch.device) -> timedelta:
        return timeout_of(self._group, device)
