"""Gathers of tensors that have changed a little since an earlier gather: as differences where every rank proves to hold the same base.

Before a gather every rank sends each owner the hash of the region that it holds in the owner's place. An owner who still has the shard
that it sent then, and whose hash all ranks have sent, sends a difference; otherwise its shard goes in full. A loaded checkpoint, an edited
weight or new memory costs one full gather, never a wrong bit. A :class:`Base` knows where the base lies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import region_hash
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.schedules import gather as full
from ds_zipccl.comm.schedules.pipeline import detached, open_exchange
from ds_zipccl.telemetry import counters

HASH_BYTES = 16


class Base(Protocol):
    """The memory of an earlier gather that ranks may hold. ``places`` are the output's shards, flat, one for each rank."""

    def begin(self, ctx: OpContext, places: Sequence[torch.Tensor], buffers: PooledBuffers) -> torch.Tensor | None:
        """Put the shards of all other ranks that this rank holds into their places. Return the own shard as the peers got it, flat, or
        None where they got none. Nothing else may change either until the gather is over."""
        ...

    def end(self, ctx: OpContext, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """Hold the contents of ``places`` from now on: the gather has succeeded. ``last`` is the result of :meth:`begin`, free to use."""
        ...

    def abandon(self, ctx: OpContext) -> None:
        """The gather has failed on this rank; does not block."""
        ...

    def token(self) -> Hashable:
        """Return a value that tells bases apart, in the same way on all ranks; None where none does."""
        ...


def gather(ctx: OpContext, own: torch.Tensor, places: Sequence[torch.Tensor], base: Base) -> None:
    """Give every rank ``own``, and write that of rank r to ``places[r]``, as :func:`.schedules.gather.gather` does with one flat shard."""
    try:
        # the base is put into the places first, and the own tensor may lie in one of them
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
    """The reason why this rank's shard must go in full; "" where every rank holds the shard sent last. Exchange 0."""
    answers = {peer: tensors.empty(HASH_BYTES, torch.uint8) for peer in ctx.peers}
    with open_exchange(ctx, 0, control=True) as exchange:
        for peer in ctx.peers:
            exchange.post_recv(peer, answers[peer])
        for peer in ctx.peers:
            exchange.send(_hash(places[peer]), peer)
        for peer in ctx.peers:
            exchange.recv(peer, answers[peer])
    if last is None:
        return "nothing was gathered there"
    own = _hash(last)
    return "" if all(torch.equal(own, answer) for answer in answers.values()) else "a rank holds something else"


def _hash(region: torch.Tensor) -> torch.Tensor:
    return tensors.of_buffer(bytearray(region_hash(region)))
