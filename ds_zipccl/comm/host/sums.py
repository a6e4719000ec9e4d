"""Sums of shards: every rank sends each peer its shard, and adds the shards that arrive for its own place.

In two levels, sums go inside each node in raw frames, then between the ranks of one local rank in coded frames. Rank l of a node has local
rank l. It first sums, for every node i, the shard of rank l of node i over its own node. Then the ranks of a local rank send each other
these sums of nodes: the elements of a shard enter a node once for each other node, in one frame. Links inside a node are fast, and coding
would only take time there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.host.gather import open_gather
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, SpanView, detached, open_exchange, run_pipeline
from ds_zipccl.comm.reduction_order import Owned, Received, Reduction, add_in_fp32
from ds_zipccl.comm.request import Request, equal_shards
from ds_zipccl.comm.spans import common, cut, length, within
from ds_zipccl.comm.topology import Levels
from ds_zipccl.policy import wire


def reduce_scatter(
    ctx: OpContext, request: Request, shards: Sequence[torch.Tensor], out: torch.Tensor, chunk: int, begin: int = 0
) -> None:
    """Write the sum of all ranks' shards for this rank into ``out``; blocks.

    Args:
        shards: flat, one for each rank; ``out`` may be the own shard.
        chunk, begin: the size of the message's chunks, see :func:`_ring_chunk`, and the place of the own shard in the message.
    """
    sources, places = Fragments(ctx, detached(shards, [out], [out] * len(shards))), Fragments(ctx, [out])
    span = slice(begin, begin + out.numel())
    with open_adder(ctx, sources, request.sum.reduction, [span], chunk) as adder:

        def take(step: int) -> None:
            adder.take(places.at(step)[0])

        run_pipeline(sources.steps, *adder.stages, take)
    adder.finish(out)


@contextmanager
def open_adder(
    ctx: OpContext, shards: Fragments, reduction: Reduction, spans: Sequence[slice], chunk: int
) -> Iterator[ShardAdder]:
    """Open an adder of shards, with an exchange for each of its ``stages``, from exchange 0 on: in two levels if the operation goes by
    node. ``spans``, ``chunk``: as for :class:`ShardAdder`."""
    if ctx.nodes:
        with open_exchange(ctx, 0, FrameCoder(ctx, raw=True)) as inside, open_exchange(ctx, 1) as between:
            yield NodeAdder(ctx, between, shards, reduction, spans, chunk, inside)
    else:
        with open_exchange(ctx) as exchange:
            yield ShardAdder(ctx, exchange, shards, reduction, spans, chunk)


@dataclass(eq=False)
class ShardAdder:
    """Sends every peer its shard, and sums the arriving frames of the own shard, a fragment a step: ``stages``, then :meth:`take`.

    ``spans``: the places of the own shard in the message, laid end to end; ``chunk``: the size of the message's chunks, in elements.
    """

    ctx: OpContext
    exchange: Exchange
    shards: Fragments
    reduction: Reduction
    spans: Sequence[slice]
    chunk: int

    def __post_init__(self) -> None:
        self._own: deque[torch.Tensor] = deque()  # own fragments that are posted and not taken yet
        self._taken = 0  # elements taken

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """Return the stages of a step before :meth:`take`, for :func:`.pipeline.run_pipeline`."""
        return (self._post,)

    def _post(self, step: int) -> None:
        """Post the receives and sends of a step."""
        self.exchange.next_step()
        fragments = self.shards.at(step)
        self._own.append(fragments[self.ctx.rank])
        for peer in self.ctx.peers:
            self.exchange.post_recv(peer, fragments[self.ctx.rank])
        self.exchange.send_each(fragments, self.ctx.peers[::-1])

    def take(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, list[slice]]:
        """Write the sum of the next fragment into ``out``; blocks. ``out`` may be the own fragment, and is the own fragment if None.

        Returns:
            The sum, and its places in the message.
        """
        own = self._own.popleft()
        out = own if out is None else out
        begin, self._taken = self._taken, self._taken + out.numel()
        spans = within(self.spans, begin, self._taken)
        self._sum(own, out, spans)
        return out, spans

    def _sum(self, own: torch.Tensor, out: torch.Tensor, spans: Sequence[slice]) -> None:
        """Write the sum of the next fragment, whose own contribution is ``own``, into ``out``."""
        if out.numel():  # a rank with an empty shard receives no frames
            received = Received(self.ctx.rank, self.exchange, own)
            self.reduction.fold(received, out, spans, self.chunk, self.ctx.flushing_ranks())

    def finish(self, out: torch.Tensor) -> None:
        """Turn the sums in ``out`` into averages if the reduction is AVG. Sums in fp32 are averages already."""
        if out.numel():
            self.reduction.finish(out, self.ctx.flushing_ranks()[self.ctx.rank])


@dataclass(eq=False)
class NodeAdder(ShardAdder):
    """As its base, in two levels; :mod:`ds_zipccl.comm.reduction_order` has the order of the sum. ``inside``: the exchange inside the node;
    the base's is that between nodes."""

    inside: Exchange

    def __post_init__(self) -> None:
        super().__post_init__()
        self._levels = Levels.of(self.ctx.nodes, self.ctx.rank, self.ctx.size)
        #: The ranks with this local rank, this rank last.
        self._peers = [ranks[self._levels.local_rank] for ranks in self._levels.turns]
        #: Steps that are posted: own contributions to the sums of this node, one for each of ``_peers``.
        self._posted: deque[list[torch.Tensor]] = deque()
        #: Steps that are added in the node: the sum of the own fragment over the node, and the memory of the sum.
        self._added: deque[tuple[torch.Tensor, PooledBuffers]] = deque()

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        return (self._post, self._add_in_node)

    def _post(self, step: int) -> None:
        """Post the receives and sends of a step inside the node."""
        self.inside.next_step()
        fragments = self.shards.at(step)
        neighbors = [(place, rank) for place, rank in enumerate(self._levels.node_ranks) if rank != self.ctx.rank]
        for _, neighbor in neighbors:
            for rank in self._peers:
                self.inside.post_recv(neighbor, fragments[rank])
        for local_rank, neighbor in neighbors:
            for ranks in self._levels.turns:
                self.inside.send(fragments[ranks[local_rank]], neighbor)
        self._posted.append([fragments[rank] for rank in self._peers])

    def _add_in_node(self, step: int) -> None:
        """Add the frames of the neighbors for every rank with this local rank, and send each rank the sum of this node."""
        self.exchange.next_step()
        *others, own = self._posted.popleft()
        *peers, _ = self._peers
        for peer in peers:
            self.exchange.post_recv(peer, own)
        for peer, contribution in zip(peers, others, strict=True):
            buffers = PooledBuffers()
            self.exchange.send(self._sum_of_node(contribution, buffers), peer)
            buffers.release()
        self._own.append(own)
        self._added.append((self._sum_of_node(own, buffers := PooledBuffers()), buffers))

    def _sum_of_node(self, contribution: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        """Return the sum of ``contribution`` over this node, in memory of ``buffers``."""
        total = buffers.empty(contribution.numel(), contribution.dtype)
        if total.numel():
            received = Received(self.ctx.rank, self.inside, contribution)
            add_in_fp32(received, self._levels.node_ranks, total, self.ctx.flushing_ranks(), self.reduction.divisor)
        return total

    def _sum(self, own: torch.Tensor, out: torch.Tensor, spans: Sequence[slice]) -> None:
        total, buffers = self._added.popleft()
        if out.numel():
            flushing = self.ctx.flushing_ranks()
            # the first rank of a node decides: a sum must not depend on the local rank that makes it
            peers = self._levels.peers
            flushes = {rank: flushing[ranks[0]] for rank, ranks in zip(peers, self._levels.nodes, strict=True)}
            received = Received(self.ctx.rank, self.exchange, total)
            add_in_fp32(received, peers, out, flushes)
        buffers.release()


# ---- the collectives


def _ring_chunk(ctx: OpContext, whole: torch.Tensor, ring: str = "all_reduce") -> int:
    """Return the size of the chunks of the ring in which the backend sums ``whole``, in elements."""
    return ctx.transport.ring_chunk(ring, whole.numel(), whole.element_size())


def reduce_scatter_tensor(
    ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    """The input consists of equal shards."""
    (whole,), (out,) = inputs, outputs
    reduce_scatter(ctx, request, equal_shards(whole, ctx.size), out, _ring_chunk(ctx, whole), ctx.rank * out.numel())


def reduce_scatter_list(
    ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    """Each input is a message by itself, because gloo all-reduces each tensor of the list by itself."""
    reduce_scatter(ctx, request, inputs, outputs[0], _ring_chunk(ctx, outputs[0]))


def reduce(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A reduce-scatter in which the root's shard is the whole message."""
    flat = [*inputs, *outputs][0]
    shards = [flat if rank == request.root else flat[:0] for rank in range(ctx.size)]
    reduce_scatter(ctx, request, shards, shards[ctx.rank], _ring_chunk(ctx, flat, "reduce"))


def all_reduce(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Each rank sums a shard of the message, laid end to end, and the shards are gathered."""
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    to_all(ctx, (), request.sum.reduction, whole)
    if len(outputs) > 1:
        for flat, part in zip(outputs, whole.split([flat.numel() for flat in outputs]), strict=True):
            flat.copy_(part)


def to_all(ctx: OpContext, spans: Sequence[Sequence[slice]], reduction: Reduction, whole: torch.Tensor) -> None:
    """Every rank sums a shard of ``whole``, and gathers each fragment of the sum as soon as it is ready: every rank gets the whole sum,
    whatever ``spans`` are. In two levels this sends less between nodes where slices have several owners in a node."""
    chunk = _ring_chunk(ctx, whole)
    slices = cut(whole.numel(), chunk, ctx.size)
    shards = Fragments(ctx, [whole[part] for part in slices], exchanges=2)
    places = [Fragments(ctx, [whole[part]], exchanges=2) for part in slices]
    with (
        open_adder(ctx, shards, reduction, [slices[ctx.rank]], chunk) as adder,
        open_gather(ctx, len(adder.stages), places) as gathering,
    ):

        def add(step: int) -> None:
            gathering.expect(step)
            adder.take(shards.at(step)[ctx.rank])
            gathering.send(places[ctx.rank], step)

        run_pipeline(shards.steps, *adder.stages, add, *gathering.stages)
    adder.finish(whole)


def reduce_to_owners(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A sum of which each rank gets the slices that it owns."""
    one_summer = ctx.rounding is not None
    schedule = owners_schedule(request.sum.owned, inputs[0].numel(), request.sum.nodes, one_summer)
    schedule(ctx, request.sum.owned.spans, request.sum.reduction, inputs[0])


def owners_schedule(
    owned: Owned, numel: int, nodes: Sequence[Sequence[int]], one_summer: bool = False
) -> Callable[[OpContext, Sequence[Sequence[slice]], Reduction, torch.Tensor], None]:
    """Return the schedule of a sum of ``numel`` elements. ``nodes``: the ranks of each node if the sum goes in two levels. Then the links
    between nodes are the slow ones, and the owners of a node share them. ``one_summer``: one rank alone sums an element, because owners
    that sum by themselves would get different sums: their own part is exact."""
    elements = [sum(map(length, slices)) for slices in owned.spans]
    if nodes:
        elements = [sum(elements[rank] for rank in ranks) for ranks in nodes]
    if one_summer and not owned.disjoint:
        return by_shards
    if wire.straight_to_owners(elements, numel):
        return straight
    return to_all if nodes and max(elements) > numel else by_shards


def straight(ctx: OpContext, spans: Sequence[Sequence[slice]], reduction: Reduction, whole: torch.Tensor) -> None:
    """Every contribution goes to the owners, and the owners sum. ``spans[r]``: the slices that rank r owns."""
    own, chunk = spans[ctx.rank], _ring_chunk(ctx, whole)
    of_peers = [span for rank, owned in enumerate(spans) if rank != ctx.rank for span in owned]
    # this rank writes its own slices while their other owners may still wait for its contributions
    source = whole.clone() if any(common(own, span) for span in of_peers) else whole
    views = [SpanView(whole if rank == ctx.rank else source, owned) for rank, owned in enumerate(spans)]
    shards = Fragments(ctx, views)
    with open_adder(ctx, shards, reduction, own, chunk) as adder:

        def take(step: int) -> None:
            sums, places = adder.take()
            adder.finish(sums)
            for place, part in zip(places, sums.split(list(map(length, places))), strict=True):
                if whole[place].data_ptr() != part.data_ptr():
                    whole[place].copy_(part)

        run_pipeline(shards.steps, *adder.stages, take)


def by_shards(ctx: OpContext, spans: Sequence[Sequence[slice]], reduction: Reduction, whole: torch.Tensor) -> None:
    """Every rank sums a shard of the same size, as in an all-reduce, and sends the sums to their owners only."""
    chunk = _ring_chunk(ctx, whole)
    slices = cut(whole.numel(), chunk, ctx.size)
    shards = Fragments(ctx, [whole[part] for part in slices], exchanges=2)
    with (
        open_adder(ctx, shards, reduction, [slices[ctx.rank]], chunk) as adder,
        # one rounding, and equal sums at all owners
        open_exchange(ctx, len(adder.stages), FrameCoder(ctx, exact=True)) as coming,
    ):

        def parts(adding: int, step: int, owner: int) -> list[torch.Tensor]:
            """Return the slices of ``owner`` in the fragment that rank ``adding`` sums in a step."""
            if step >= len(shards[adding]):
                return []
            begin = slices[adding].start + step * shards[adding][0].numel()
            fragment = slice(begin, begin + shards[adding][step].numel())
            return [whole[part] for part in common(spans[owner], fragment)]

        def add(step: int) -> None:
            coming.next_step()
            for peer in ctx.peers:
                for part in parts(peer, step, ctx.rank):
                    coming.post_recv(peer, part)
            if step < len(shards[ctx.rank]):
                adder.take()
            for peer in ctx.peers:
                for part in parts(ctx.rank, step, peer):
                    coming.send(part, peer)

        def take(step: int) -> None:
            for peer in ctx.peers:
                for part in parts(peer, step, ctx.rank):
                    coming.recv(peer, part)

        run_pipeline(shards.steps, *adder.stages, add, take)
    for span in spans[ctx.rank]:
        adder.finish(whole[span])
