"""A base in the output itself. The output still holds the result of the last gather, as in ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl.comm.bases import on_device
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.telemetry import counters


class _Sent(NamedTuple):
    shard: torch.Tensor
    home: StorageWeakRef  # the memory of the output
    span: range  # the output's addresses


#: Address, elements and dtype of a shard: equal for repeated gathers into one output.
_Key = tuple[int, int, torch.dtype]


class InPlaceBase:
    """The output itself as a base. The output still holds the result of the last gather, as in ZeRO-1 and ZeRO-2.

    Each rank keeps a copy of the shard that it sent, as long as the output's memory lives: one copy of its own shards.
    """

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _Sent]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        counters.count_memory("copies of the shards sent", self._nbytes)

    def _nbytes(self) -> int:
        with self._lock:
            self._prune()
            return sum(one.shard.nbytes for sent in self._sent.values() for one in sent.values())

    def _prune(self) -> None:
        """Drop copies whose output is gone."""
        for sent in self._sent.values():
            for key in [key for key, one in sent.items() if one.home.expired()]:
                del sent[key]

    def begin(
        self, ctx: Call, places: Sequence[torch.Tensor], buffers: PooledBuffers | None = None
    ) -> torch.Tensor | None:
        """See :class:`.request.Base`. The copy is not kept here until the gather has succeeded, because after an error the contents
        of the peers are unknown."""
        with self._lock:
            self._prune()
            last = self._sent.setdefault(ctx.group, {}).pop(_key(places), None)
        return None if last is None else last.shard

    def end(self, ctx: Call, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """See :class:`.request.Base`."""
        own = places[ctx.rank]
        shard = own.clone() if last is None else last.copy_(own)
        span = range(places[0].data_ptr(), places[-1].data_ptr() + places[-1].nbytes)
        with self._lock:
            sent = self._sent.setdefault(ctx.group, {})
            # earlier gathers into the same addresses, also those of other sizes, are overwritten
            for key in [key for key, one in sent.items() if one.span.start < span.stop and span.start < one.span.stop]:
                del sent[key]
            sent[_key(places)] = _Sent(shard, StorageWeakRef(own.untyped_storage()), span)

    def abandon(self, ctx: OpContext) -> None:
        """See :class:`.request.Base`."""

    def enqueue(self, ctx: DeviceContext, shard: Shard) -> None:
        """See :class:`.request.Base`. The copy of the own shard is memory of the device, written on the decoding stream. After an
        agreement that raised there is no copy."""
        places = shard.whole.split(shard.own.numel())
        last = self.begin(ctx, places)
        reason = on_device.gather(ctx, shard, last)
        with ctx.streams.on(Stage.DECODE):
            self.end(ctx, places, last)
        counters.record_difference(ctx.role, ctx.op, reason)

    def token(self) -> Hashable:
        """See :class:`.request.Base`. Return None: addresses differ from rank to rank."""
        return None


def _key(places: Sequence[torch.Tensor]) -> _Key:
    return places[0].data_ptr(), places[0].numel(), places[0].dtype


#: The base object of all gathers in place.
IN_PLACE = InPlaceBase()
