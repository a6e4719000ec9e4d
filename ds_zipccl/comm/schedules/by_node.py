"""Gathers by node. Every shard enters each other node once; the ranks of a node then forward the frame to each other, without recoding."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.schedules.pipeline import Fragments, open_exchange, run_pipeline, send_own


def gather_by_node(
    ctx: OpContext, index: int, leaving: Fragments, coming: Sequence[Fragments], bases: Fragments
) -> None:
    """Send the own fragments to every rank, and write those of rank r to ``coming[r]``, in exchanges ``index`` and ``index`` + 1. Blocks.

    Rank i of a node sends to rank i of every other node, and to its neighbors in the node. Rank i forwards the frames from other nodes to
    its neighbors, so that every shard enters a node once. All nodes have the same number of ranks.
    """
    mine = next(ranks for ranks in ctx.nodes if ctx.rank in ranks)
    neighbors = [rank for rank in mine if rank != ctx.rank]
    # rank of this node -> the ranks of other nodes whose shards it receives and forwards
    through = {rank: [ranks[seat] for ranks in ctx.nodes if ranks is not mine] for seat, rank in enumerate(mine)}
    with open_exchange(ctx, index) as across, open_exchange(ctx, index + 1) as within:

        def post(step: int) -> None:
            across.next_step()
            for peer in (*through[ctx.rank], *neighbors):
                for place in coming[peer].at(step):
                    across.post_recv(peer, place)
            send_own(across, leaving, bases, step, [*through[ctx.rank], *neighbors])

        def forward(step: int) -> None:
            within.next_step()
            for neighbor in neighbors:
                for peer in through[neighbor]:
                    for place in coming[peer].at(step):
                        within.post_recv(neighbor, place)
            for peer in through[ctx.rank]:
                for place in coming[peer].at(step):
                    across.forward(peer, place, within, neighbors)

        def take(step: int) -> None:
            for neighbor in neighbors:
                for place in coming[neighbor].at(step):
                    across.recv(neighbor, place, base=place)
                for peer in through[neighbor]:
                    for place in coming[peer].at(step):
                        within.recv(neighbor, place, base=place)

        run_pipeline(leaving.steps, post, forward, take)
