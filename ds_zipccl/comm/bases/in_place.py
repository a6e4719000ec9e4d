"""The base of a gather, and the one in the output itself, which still holds the result of the last gather, as in ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.group_state import of_all_groups
from ds_zipccl.telemetry import counters

#: Address, elements and dtype of a shard: equal for repeated gathers into one output.
_Key = tuple[int, int, torch.dtype]


class Base(Protocol):
    """The memory of an earlier gather, which ranks may hold. ``places`` are the output's shards, flat, one for each rank. On groups in the
    order of streams shards go in full, except where the base is :data:`IN_PLACE`."""

    def begin(self, ctx: OpContext, places: Sequence[torch.Tensor], buffers: PooledBuffers) -> torch.Tensor | None:
        """Copy the shards of other ranks, as far as this rank holds them, to their places. Return the own shard of the last gather, flat,
        or None without a last gather. Only the gather itself may change the places and the returned shard until the gather is over."""

    def end(self, ctx: OpContext, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """Hold the contents of ``places`` from now on: the gather has succeeded. ``last`` is the result of :meth:`begin`, and may be
        overwritten."""

    def abandon(self, ctx: OpContext) -> None:
        """Drop the base after a failed gather of this rank; does not block."""
        return


class _Copy(NamedTuple):
    shard: torch.Tensor
    home: StorageWeakRef  # the memory of the output
    span: range  # the output's addresses


class Sent(dict[_Key, _Copy]):
    """The copies of the shards that a rank has sent in one group."""

    def prune(self) -> Sent:
        """Drop the copies whose output is gone; return the rest."""
        for key in [key for key, one in self.items() if one.home.expired()]:
            del self[key]
        return self


class InPlaceBase(Base):
    """The output itself as a base. The output still holds the result of the last gather, as in ZeRO-1 and ZeRO-2.

    Each rank keeps a copy of the shard that it sent, as long as the output's memory lives: one copy of its own shards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        counters.count_memory("copies of the shards sent", self._nbytes)

    def _nbytes(self) -> int:
        with self._lock:
            return sum(one.shard.nbytes for sent in of_all_groups(Sent) for one in sent.prune().values())

    def begin(
        self, ctx: Call, places: Sequence[torch.Tensor], buffers: PooledBuffers | None = None
    ) -> torch.Tensor | None:
        # no copy is kept until the gather has succeeded, because after an error the contents of the peers are unknown
        with self._lock:
            for sent in of_all_groups(Sent):
                sent.prune()
            last = ctx.state.of(Sent).pop(_key(places), None)
        return None if last is None else last.shard

    def end(self, ctx: Call, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        own = places[ctx.rank]
        shard = own.clone() if last is None else last.copy_(own)
        span = range(places[0].data_ptr(), places[-1].data_ptr() + places[-1].nbytes)
        with self._lock:
            sent = ctx.state.of(Sent)
            # earlier gathers into the same addresses, also those of other sizes, are overwritten
            for key in [key for key, one in sent.items() if one.span.start < span.stop and span.start < one.span.stop]:
                del sent[key]
            sent[_key(places)] = _Copy(shard, StorageWeakRef(own.untyped_storage()), span)


def _key(places: Sequence[torch.Tensor]) -> _Key:
    return places[0].data_ptr(), places[0].numel(), places[0].dtype


#: The base object of all gathers in place.
IN_PLACE = InPlaceBase()
