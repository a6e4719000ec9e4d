"""Gathers: every rank sends its shard to every other rank, in fragments.

By node, every shard enters each other node once; the ranks of a node then forward the frame to each other, without recoding.

A tensor may have changed only a little since an earlier gather. Then every rank first sends each owner the hash of the region in the
owner's place. The owner sends a difference if it still has the shard of the last gather, and the hash of that shard equals the hashes of
all ranks. Otherwise the owner's shard goes in full. A loaded checkpoint, an edited weight or new memory costs one full gather, never a
wrong bit.
A :class:`.request.Base` knows the memory of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs.known import HASH_BYTES
from ds_zipccl.comm.bases.state import NOTHING_THERE, SOMETHING_ELSE
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host.byte_words import ByteCoder
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, detached, open_exchange, run_pipeline, send_own, swap
from ds_zipccl.comm.request import Base, Request, equal_shards
from ds_zipccl.telemetry import counters


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
def open_gather(ctx: OpContext, index: int, coming: Sequence[Fragments]) -> Iterator[Gathering]:
    """Open the exchanges of a gather, from ``index`` on. ``coming[r]``: the places of rank r."""
    with open_exchange(ctx, index) as across, open_exchange(ctx, index + 1) as inside:
        yield Gathering(ctx, across, inside, coming)


class Gathering:
    """The steps of a gather. A step begins with :meth:`expect` and :meth:`send`; ``stages`` follow, see :func:`.pipeline.run_pipeline`.

    Every rank sends to every other rank, by the frames of ``across``. If the operation goes by node, rank i of a node sends to rank i of
    every other node, and to its neighbors in the node. Rank i forwards the frames from other nodes to its neighbors, so that every shard
    enters a node once: forwarded frames are those of ``inside``. All nodes have the same number of ranks.
    """

    def __init__(self, ctx: OpContext, across: Exchange, inside: Exchange, coming: Sequence[Fragments]) -> None:
        self._across, self._inside, self._coming, self._own = across, inside, coming, coming[ctx.rank]
        self._by_node = bool(ctx.nodes)
        # straight, all ranks are neighbors
        mine = next((ranks for ranks in ctx.nodes if ctx.rank in ranks), [ctx.rank, *ctx.peers])
        self._neighbors = [rank for rank in mine if rank != ctx.rank]
        # rank of this node -> the ranks of other nodes whose shards it receives and forwards
        self._through = {
            rank: [ranks[local_rank] for ranks in ctx.nodes if ranks is not mine]
            for local_rank, rank in enumerate(mine)
        }
        self._received = self._through[ctx.rank]

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """Return the stages of a step after :meth:`send`, for :func:`.pipeline.run_pipeline`."""
        # no attribute: an object that holds its own methods keeps its tensors until garbage is collected
        return (self._forward, self._take) if self._by_node else (self._take,)

    def expect(self, step: int) -> None:
        """Post the receives of a step."""
        self._across.next_step()
        for peer in (*self._received, *self._neighbors):
            for place in self._coming[peer].at(step):
                self._across.post_recv(peer, place)

    def send(self, leaving: Fragments, bases: Fragments, step: int) -> None:
        """Send the own fragments of a step. ``leaving`` and ``bases``: as in :func:`.pipeline.send_own`."""
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


# ---- differences against the result of an earlier gather


def gather_differences(ctx: OpContext, own: torch.Tensor, places: Sequence[torch.Tensor], base: Base) -> None:
    """Send ``own`` to every rank, and write the tensor of rank r to ``places[r]``, as :func:`gather` does with one flat shard.
    Blocks."""
    try:
        # begin() writes the base to the places, and the own tensor may share memory with a place
        (own,) = detached([own], places, [places[ctx.rank]])
        last = base.begin(ctx, places, buffers := PooledBuffers())
        reason = _objection(ctx, last, places)
        gather(ctx, 1, [own], [[place] for place in places], base=None if reason else last)
    except BaseException:
        base.abandon(ctx)
        raise
    base.end(ctx, places, last)
    buffers.release()
    counters.record_difference(ctx.role, ctx.op, reason)


def _objection(ctx: OpContext, last: torch.Tensor | None, places: Sequence[torch.Tensor]) -> str:
    """Return the reason why this rank's shard must go in full; "" if every rank holds the shard of the last gather. Uses exchange 0."""
    answers = swap(ctx, 0, ctx.peers, (hashed(places[peer]) for peer in ctx.peers), HASH_BYTES)
    if last is None:
        return NOTHING_THERE
    own = hashed(last)
    return "" if all(torch.equal(own, answer) for answer in answers.values()) else SOMETHING_ELSE


def hashed(region: torch.Tensor) -> torch.Tensor:
    """Return the hash of a region as a message."""
    return tensors.of_buffer(bytearray(region_hash(region)))


# ---- the collectives


def gather_list(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A gather of one tensor; output r is the place of rank r."""
    gather(ctx, 0, inputs, [[place] for place in outputs])


def gather_shards(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A gather in which each output consists of the shards of all ranks; as differences if all ranks hold the same base."""
    places = list(zip(*(equal_shards(whole, ctx.size) for whole in outputs), strict=True))
    if request.base is not None and ctx.with_base:
        gather_differences(ctx, inputs[0], [place for (place,) in places], request.base)
    else:
        gather(ctx, 0, inputs, places)


def broadcast(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """The root compresses each fragment once and sends it to every peer. Bytes may go as words of another dtype."""
    fragments, sends = Fragments(ctx, [*inputs, *outputs]), ctx.rank == request.root
    bytes_alone = request.tensor.dtype == torch.uint8 and ctx.device == "cpu"  # equal on all ranks
    coder = ByteCoder(ctx) if bytes_alone else None
    with open_exchange(ctx, coder=coder) as exchange:

        def post(step: int) -> None:
            exchange.next_step()
            for fragment in fragments.at(step):
                exchange.send(fragment, *ctx.peers) if sends else exchange.post_recv(request.root, fragment)

        def take(step: int) -> None:
            for fragment in fragments.at(step):
                sends or exchange.recv(request.root, fragment)

        run_pipeline(fragments.steps, post, take)
