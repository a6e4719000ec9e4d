"""Gathers: every rank sends its shard to every other rank, in fragments.

By node, every shard enters each other node once; the ranks of a node then forward the frame to each other, without recoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, detached, open_exchange, run_pipeline, send_own


def gather(
    ctx: OpContext,
    index: int,
    own: Sequence[torch.Tensor],
    places: Sequence[Sequence[torch.Tensor]],
    base: torch.Tensor | None = None,
) -> None:
    """In exchange ``index``, send the tensors in ``own`` to every rank, and write those of rank r to ``places[r]``. Blocks.

    All tensors are flat. Own tensors may share memory with any place. With ``base``, ``own`` is a single tensor and goes as a difference
    against ``base``. The base of an arriving frame is the contents of its place.
    """
    sources = detached(own, [place for there in places for place in there], places[ctx.rank])
    exchanges = 2 if ctx.nodes else 1
    leaving, bases = (Fragments(ctx, flats, exchanges) for flats in (sources, [] if base is None else [base]))
    with open_gather(ctx, index, [Fragments(ctx, there, exchanges) for there in places]) as gathering:

        def post(step: int) -> None:
            gathering.expect(step)
            gathering.send(leaving, bases, step)

        run_pipeline(leaving.steps, post, *gathering.stages)
    if ctx.lossy is not None:
        return  # the own places have the values of the own frames
    for source, place in zip(sources, places[ctx.rank], strict=True):
        place.copy_(source)


@contextmanager
def open_gather(ctx: OpContext, index: int, coming: Sequence[Fragments]) -> Iterator[FlatGather | NodeGather]:
    """Open the exchanges of a gather, from ``index`` on: by node if the operation goes by node. ``coming[r]``: the places of rank r."""
    if ctx.nodes:
        with open_exchange(ctx, index) as across, open_exchange(ctx, index + 1) as inside:
            yield NodeGather(ctx, across, inside, coming)
    else:
        with open_exchange(ctx, index) as exchange:
            yield FlatGather(ctx, exchange, coming)


class FlatGather:
    """The steps of a gather. A step begins with :meth:`expect` and :meth:`send`; ``stages`` follow, see :func:`.pipeline.run_pipeline`."""

    def __init__(self, ctx: OpContext, exchange: Exchange, coming: Sequence[Fragments]) -> None:
        self._exchange, self._coming, self._peers, self._own = exchange, coming, ctx.peers, coming[ctx.rank]

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """Return the stages of a step after :meth:`send`, for :func:`.pipeline.run_pipeline`."""
        # no attribute: an object that holds its own methods keeps its tensors until garbage is collected
        return (self._take,)

    def expect(self, step: int) -> None:
        """Post the receives of a step."""
        self._exchange.next_step()
        for peer in self._peers:
            for place in self._coming[peer].at(step):
                self._exchange.post_recv(peer, place)

    def send(self, leaving: Fragments, bases: Fragments, step: int) -> None:
        """Send the own fragments of a step. ``leaving`` and ``bases``: as in :func:`.pipeline.send_own`."""
        send_own(self._exchange, leaving, bases, step, self._peers, self._own)

    def _take(self, step: int) -> None:
        for peer in self._peers:
            for place in self._coming[peer].at(step):
                self._exchange.recv(peer, place, base=place)


class NodeGather:
    """As :class:`FlatGather`, by node.

    Rank i of a node sends to rank i of every other node, and to its neighbors in the node. Rank i forwards the frames from other nodes to
    its neighbors, so that every shard enters a node once. All nodes have the same number of ranks. Frames between nodes, and the first
    frames inside a node, are those of ``across``; forwarded frames are those of ``inside``.
    """

    def __init__(self, ctx: OpContext, across: Exchange, inside: Exchange, coming: Sequence[Fragments]) -> None:
        self._across, self._inside, self._coming, self._own = across, inside, coming, coming[ctx.rank]
        mine = next(ranks for ranks in ctx.nodes if ctx.rank in ranks)
        self._neighbors = [rank for rank in mine if rank != ctx.rank]
        # rank of this node -> the ranks of other nodes whose shards it receives and forwards
        self._through = {
            rank: [ranks[local_rank] for ranks in ctx.nodes if ranks is not mine]
            for local_rank, rank in enumerate(mine)
        }
        self._received = self._through[ctx.rank]

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """As :attr:`FlatGather.stages`."""
        return (self._forward, self._take)

    def expect(self, step: int) -> None:
        """Post the receives of a step."""
        self._across.next_step()
        for peer in (*self._received, *self._neighbors):
            for place in self._coming[peer].at(step):
                self._across.post_recv(peer, place)

    def send(self, leaving: Fragments, bases: Fragments, step: int) -> None:
        """Send the own fragments of a step."""
        send_own(self._across, leaving, bases, step, [*self._received, *self._neighbors], self._own)

    def _forward(self, step: int) -> None:
        self._inside.next_step()
        for neighbor in self._neighbors:
            for peer in self._through[neighbor]:
                for place in self._coming[peer].at(step):
                    self._inside.post_recv(neighbor, place)
        for peer in self._received:
            for place in self._coming[peer].at(step):
                self._across.forward(peer, place, self._inside, self._neighbors)

    def _take(self, step: int) -> None:
        for neighbor in self._neighbors:
            for place in self._coming[neighbor].at(step):
                self._across.recv(neighbor, place, base=place)
            for peer in self._through[neighbor]:
                for place in self._coming[peer].at(step):
                    self._inside.recv(neighbor, place, base=place)
