"""Gathers by node: between nodes every shard goes once, and the ranks of a node forward it to each other as it came."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.schedules.pipeline import Fragments, open_exchange, run_pipeline, send_own


def gather_by_node(
    ctx: OpContext, index: int, leaving: Fragments, coming: Sequence[Fragments], bases: Fragments
) -> None:
    """Give every rank the own fragments, and take those of rank r into ``coming[r]``, in exchanges ``index`` and ``index`` + 1.

    Rank i of a node sends to rank i of every other node and to its neighbors in the node, and forwards to these the frames from the
    other nodes, so that every shard enters a node once. Nodes have the same number of ranks.
    """
    mine = next(ranks for ranks in ctx.nodes if ctx.rank in ranks)
    neighbors = [rank for rank in mine if rank != ctx.rank]
    # the ranks of other nodes whose shards enter this node through a rank of it
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
