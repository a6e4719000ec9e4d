"""Gathers by node. Every shard enters each other node once; the ranks of a node then forward the frame to each other, without recoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, send_own


class NodeGather:
    """As :class:`.gather.FlatGather`, by node.

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
        """As :attr:`.gather.FlatGather.stages`."""
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
