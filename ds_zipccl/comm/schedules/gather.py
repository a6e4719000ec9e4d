"""Gathers: every rank sends its shard to every other rank, in fragments; or by node, see :mod:`.by_node`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.schedules.by_node import gather_by_node
from ds_zipccl.comm.schedules.pipeline import Fragments, detached, open_exchange, run_pipeline, send_own


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
    schedule, exchanges = (gather_by_node, 2) if ctx.nodes else (_gather_flat, 1)
    leaving, bases = (Fragments(ctx, flats, exchanges) for flats in (sources, [] if base is None else [base]))
    schedule(ctx, index, leaving, [Fragments(ctx, there, exchanges) for there in places], bases)
    for source, place in zip(sources, places[ctx.rank], strict=True):
        place.copy_(source)


def _gather_flat(ctx: OpContext, index: int, leaving: Fragments, coming: Sequence[Fragments], bases: Fragments) -> None:
    with open_exchange(ctx, index) as exchange:

        def post(step: int) -> None:
            exchange.next_step()
            for peer in ctx.peers:
                for place in coming[peer].at(step):
                    exchange.post_recv(peer, place)
            send_own(exchange, leaving, bases, step, ctx.peers)

        def take(step: int) -> None:
            for peer in ctx.peers:
                for place in coming[peer].at(step):
                    exchange.recv(peer, place, base=place)

        run_pipeline(leaving.steps, post, take)
