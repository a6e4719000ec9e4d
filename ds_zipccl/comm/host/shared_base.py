"""The base of a gather into new memory, such as ZeRO-3's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.pipeline import Exchange, abandon, swap

#: The exchange after those of the gather itself.
_DONE = 3


class SharedBase:
    """A :class:`ds_zipccl.comm.Base` for one gather of several tensors laid end to end. Each tensor has its own :class:`.BaseSlot`.

    All ranks make the object for a gather at the same point of the program. Two gathers in flight should not be of the same tensor: their
    results would be right, but few of their shards differences.
    """

    def __init__(self, slots: Sequence[BaseSlot]) -> None:
        self._slots = slots
        for slot in slots:
            slot.asked += 1
        self._versions = [slot.asked for slot in slots]

    def begin(self, ctx: OpContext, places: Sequence[torch.Tensor], buffers: PooledBuffers) -> torch.Tensor | None:
        """See :class:`ds_zipccl.comm.Base`."""
        if not all(slot.filled for slot in self._slots):
            return None
        last = buffers.empty(places[ctx.rank].numel(), places[ctx.rank].dtype, places[ctx.rank].device)
        for rank, place in enumerate(places):
            parts = (last if rank == ctx.rank else place).split(self._sizes())
            for part, slot in zip(parts, self._slots, strict=True):
                part.copy_(slot.memory[rank])
        return last

    def end(self, ctx: OpContext, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """See :class:`ds_zipccl.comm.Base`. All ranks of a node have read the old contents before, for the hash."""
        self.keep(ctx, [place.split(self._sizes()) for place in places])

    def keep(self, ctx: OpContext, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold the flat tensor ``shards[rank][number]`` in slot ``number``. Each rank of a node writes some of the shards, and no rank
        reads the old contents any more. Blocks until all shards are written."""
        node_ranks = self._slots[0].node_ranks
        for rank, parts in enumerate(shards):
            writer = rank if rank in node_ranks else node_ranks[rank % len(node_ranks)]
            if writer == ctx.rank:
                for part, slot in zip(parts, self._slots, strict=True):
                    slot.memory[rank].copy_(part)
        written = all(bool(word) for word in swap(ctx, _DONE, self._peers(ctx), _written(True), 1).values())
        for slot, version in zip(self._slots, self._versions, strict=True):
            slot.filled, slot.version = written, version

    def abandon(self, ctx: OpContext) -> None:
        """See :class:`ds_zipccl.comm.Base`. This rank tells the peers on its node that it writes nothing, so that they do not wait for
        its writes."""
        for slot in self._slots:
            slot.filled = False
        abandon(exchange := Exchange(ctx, _DONE, control=True))
        for peer in self._peers(ctx):
            # a peer whose connection is closed knows already; every other one gets the message, and its own message a receive
            with suppress(RuntimeError, ValueError):
                exchange.post_recv(peer, _written(False))
            with suppress(RuntimeError, ValueError):
                exchange.send(_written(False), peer)

    def token(self) -> Hashable:
        """See :class:`ds_zipccl.comm.Base`."""
        return self._slots[0].serial

    def _peers(self, ctx: OpContext) -> list[int]:
        """Return the other ranks that write to the same memory."""
        return [peer for peer in self._slots[0].node_ranks if peer != ctx.rank]

    def _sizes(self) -> list[int]:
        return [slot.memory.shape[1] for slot in self._slots]


def _written(done: bool) -> torch.Tensor:
    """Return the message to a peer: whether this rank has written its part of the memory."""
    return tensors.filled(1, done, torch.uint8)
