"""Sums of shards: every rank sends each peer its shard, and adds the shards that arrive for its own place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.reduction_order import Reduction
from ds_zipccl.comm.schedules.pipeline import Exchange, Fragments, detached, open_exchange, run_pipeline
from ds_zipccl.comm.spans import within


def reduce_scatter(
    ctx: OpContext,
    shards: Sequence[torch.Tensor],
    out: torch.Tensor,
    reduction: Reduction,
    span: slice,
    chunk: int,
) -> None:
    """Write the sum of all ranks' shards for this rank into ``out``; blocks.

    Args:
        shards: flat, one for each rank; ``out`` may be the own shard.
        span, chunk: the place of the own shard in the message, and the size of the message's chunks, in elements.
    """
    sources, places = Fragments(ctx, detached(shards, [out], [out] * len(shards))), Fragments(ctx, [out])
    with open_exchange(ctx) as exchange:
        adder = ShardAdder(ctx, exchange, sources, reduction, [span], chunk)

        def take(step: int) -> None:
            adder.take(places.at(step)[0])

        run_pipeline(sources.steps, adder.post, take)
    adder.finish(out)


class ShardAdder:
    """Sends every peer its shard, and sums the arriving frames of the own shard, a fragment a step.

    ``spans``: the places of the own shard in the message, laid end to end; ``chunk``: the size of the message's chunks, in elements.
    """

    def __init__(
        self,
        ctx: OpContext,
        exchange: Exchange,
        shards: Fragments,
        reduction: Reduction,
        spans: Sequence[slice],
        chunk: int,
    ) -> None:
        self._ctx, self._exchange, self._shards, self._reduction = ctx, exchange, shards, reduction
        self._spans, self._chunk = spans, chunk
        self._own: deque[torch.Tensor] = deque()  # own fragments that are posted and not taken yet
        self._taken = 0  # elements taken

    def post(self, step: int) -> None:
        """Post the receives and sends of a step."""
        self._exchange.next_step()
        fragments = self._shards.at(step)
        self._own.append(fragments[self._ctx.rank])
        for peer in self._ctx.peers:
            self._exchange.post_recv(peer, fragments[self._ctx.rank])
        self._exchange.send_each(fragments, self._ctx.peers[::-1])

    def take(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, list[slice]]:
        """Write the sum of the next fragment into ``out``; blocks. ``out`` may be the own fragment, and is the own fragment if None.

        Returns:
            The sum, and its places in the message.
        """
        own = self._own.popleft()
        out = own if out is None else out
        begin, self._taken = self._taken, self._taken + out.numel()
        spans = within(self._spans, begin, self._taken)
        if out.numel():  # a rank with an empty shard receives no frames
            received = _Received(self._ctx.rank, self._exchange, own)
            self._reduction.fold(received, out, spans, self._chunk, self._ctx.flushing_ranks())
        return out, spans

    def finish(self, out: torch.Tensor) -> None:
        """Turn the sums in ``out`` into averages if the reduction is AVG."""
        if out.numel():
            self._reduction.finish(out, self._ctx.flushing_ranks()[self._ctx.rank])


class _Received:
    """:class:`ds_zipccl.comm.reduction_order.Contributions`: the own tensor, and the frames of the peers."""

    def __init__(self, rank: int, exchange: Exchange, own: torch.Tensor) -> None:
        self._exchange, self.rank, self.own = exchange, rank, own

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        return self.own if rank == self.rank else self._exchange.recv(rank, into)

    def add(self, rank: int, sums: torch.Tensor) -> None:
        if rank == self.rank:
            self._exchange.add(self.own, sums)
        else:
            self._exchange.recv_add(rank, self.own.dtype, sums)

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        self._exchange.add(taken, sums)
