"""Gathers of tensors that have changed a little since an earlier gather. A shard goes as a difference if all ranks prove to hold its base.

Before a gather every rank sends each owner the hash of the region in the owner's place. The owner sends a difference if it still has the
shard of the last gather, and the hash of that shard equals the hashes of all ranks. Otherwise the owner's shard goes in full. A loaded
checkpoint, an edited weight or new memory costs one full gather, never a wrong bit. A :class:`Base` knows the memory of the base.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.proof import NOTHING_THERE, SOMETHING_ELSE
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host import gather as full
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.comm.host.pipeline import detached, open_exchange
from ds_zipccl.telemetry import counters

HASH_BYTES = 16


class Base(Protocol):
    """The memory of an earlier gather, which ranks may hold. ``places`` are the output's shards, flat, one for each rank."""

    def begin(self, ctx: OpContext, places: Sequence[torch.Tensor], buffers: PooledBuffers) -> torch.Tensor | None:
        """Copy the shards of other ranks, as far as this rank holds them, to their places. Return the own shard of the last gather, flat,
        or None without a last gather. Only the gather itself may change the places and the returned shard until the gather is over."""
        ...

    def end(self, ctx: OpContext, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """Hold the contents of ``places`` from now on: the gather has succeeded. ``last`` is the result of :meth:`begin`, and may be
        overwritten."""
        ...

    def abandon(self, ctx: OpContext) -> None:
        """Drop the base after a failed gather of this rank; does not block."""
        ...

    def enqueue(self, ctx: DeviceContext, shard: Shard) -> None:
        """Put a gather on the streams of a device whose frames stay there; the host waits at most for an agreement."""
        ...

    def token(self) -> Hashable:
        """Return a value that tells bases apart, equally on all ranks; None where no value does."""
        ...


def gather(ctx: OpContext, own: torch.Tensor, places: Sequence[torch.Tensor], base: Base) -> None:
    """Send ``own`` to every rank, and write the tensor of rank r to ``places[r]``, as :func:`ds_zipccl.comm.host.gather.gather` does with
    one flat shard. Blocks."""
    try:
        # begin() writes the base to the places, and the own tensor may share memory with a place
        (own,) = detached([own], places, [places[ctx.rank]])
        last = base.begin(ctx, places, buffers := PooledBuffers())
        reason = _objection(ctx, last, places)
        full.gather(ctx, 1, [own], [[place] for place in places], base=None if reason else last)
    except BaseException:
        base.abandon(ctx)
        raise
    base.end(ctx, places, last)
    buffers.release()
    counters.record_difference(ctx.role, ctx.op, reason)


def _objection(ctx: OpContext, last: torch.Tensor | None, places: Sequence[torch.Tensor]) -> str:
    """Return the reason why this rank's shard must go in full; "" if every rank holds the shard of the last gather. Uses exchange 0."""
    answers = {peer: tensors.empty(HASH_BYTES, torch.uint8) for peer in ctx.peers}
    with open_exchange(ctx, 0, control=True) as exchange:
        for peer in ctx.peers:
            exchange.post_recv(peer, answers[peer])
        for peer in ctx.peers:
            exchange.send(_hash(places[peer]), peer)
        for peer in ctx.peers:
            exchange.recv(peer, answers[peer])
    if last is None:
        return NOTHING_THERE
    own = _hash(last)
    return "" if all(torch.equal(own, answer) for answer in answers.values()) else SOMETHING_ELSE


def _hash(region: torch.Tensor) -> torch.Tensor:
    return tensors.of_buffer(bytearray(region_hash(region)))
