"""Sums of shards: every rank sends each peer its shard, and adds the shards that arrive for its own place; or in two levels, see
:mod:`.sums_by_node`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, Received, detached, open_exchange, run_pipeline
from ds_zipccl.comm.host.sums_by_node import NodeAdder
from ds_zipccl.comm.reduction_order import Reduction
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
    with open_adder(ctx, sources, reduction, [span], chunk) as adder:

        def take(step: int) -> None:
            adder.take(places.at(step)[0])

        run_pipeline(sources.steps, *adder.stages, take)
    adder.finish(out)


@contextmanager
def open_adder(
    ctx: OpContext, shards: Fragments, reduction: Reduction, spans: Sequence[slice], chunk: int
) -> Iterator[ShardAdder | NodeAdder]:
    """Open an adder of shards, with an exchange for each of its ``stages``, from exchange 0 on: in two levels if the operation goes by
    node. ``spans``, ``chunk``: as for :class:`ShardAdder`."""
    if ctx.nodes:
        with open_exchange(ctx, 0, uncoded=True) as inside, open_exchange(ctx, 1) as between:
            yield NodeAdder(ctx, inside, between, shards, reduction, spans)
    else:
        with open_exchange(ctx) as exchange:
            yield ShardAdder(ctx, exchange, shards, reduction, spans, chunk)


class ShardAdder:
    """Sends every peer its shard, and sums the arriving frames of the own shard, a fragment a step: ``stages``, then :meth:`take`.

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

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """Return the stages of a step before :meth:`take`, for :func:`.pipeline.run_pipeline`."""
        return (self._post,)

    def _post(self, step: int) -> None:
        """Post the receives and sends of a step."""
        self._exchange.next_step()
        fragments = self._shards.at(step)
        self._own.append(fragments[self._ctx.rank])
        for peer in self._ctx.peers:
            self._exchange.post_recv(peer, fragments[self._ctx.rank])
        for peer in self._ctx.peers:
            self._exchange.announce([fragments[peer]], peer)
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
            received = Received(self._ctx.rank, self._exchange, own)
            self._reduction.fold(received, out, spans, self._chunk, self._ctx.flushing_ranks())
        return out, spans

    def finish(self, out: torch.Tensor) -> None:
        """Turn the sums in ``out`` into averages if the reduction is AVG."""
        if out.numel():
            self._reduction.finish(out, self._ctx.flushing_ranks()[self._ctx.rank])
