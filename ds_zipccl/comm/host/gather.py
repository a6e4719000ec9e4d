"""Gathers: every rank sends its shard to every other rank, in fragments.

By node, every shard enters each other node once; the ranks of a node then forward the frame to each other, without recoding.

A tensor may have changed only a little since an earlier gather. Then every rank first sends each owner the hash of the region in the
owner's place. The owner sends a difference if it still has the shard of the last gather, and the hash of that shard equals the hashes of
all ranks. Otherwise the owner's shard goes in full. A loaded checkpoint, an edited weight or new memory costs one full gather, never a
wrong bit. A rank without kernels of differences sends zeros in place of hashes, and all shards go in full.
A :class:`.in_place.Base` knows the memory of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.known import HASH_BYTES
from ds_zipccl.comm.bases.in_place import Base
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.bases.state import NO_KERNELS, NOTHING_THERE, SOMETHING_ELSE
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, abandon, detached, open_exchange, run_pipeline, swap
from ds_zipccl.comm.request import Request, equal_shards
from ds_zipccl.comm.topology import Levels
from ds_zipccl.telemetry import counters

#: The exchange of :class:`SharedBase`, after those of the gather itself.
_DONE = 3


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
    leaving, bases = Fragments(ctx, sources, exchanges), Fragments(ctx, [] if base is None else [base], exchanges)
    arriving = [Fragments(ctx, there, exchanges) for there in places]
    with open_gather(ctx, index, arriving) as gathering:

        def post(step: int) -> None:
            gathering.expect(step)
            gathering.send(leaving, step, *bases.at(step))

        run_pipeline(max(coming.steps for coming in arriving), post, *gathering.stages)
    if ctx.rounding is not None:
        return  # the own places have the values of the own frames
    for source, place in zip(sources, places[ctx.rank], strict=True):
        if place is not source:  # as for the root of a broadcast: torch would count a write to its input
            place.copy_(source)


@contextmanager
def open_gather(ctx: OpContext, index: int, coming: Sequence[Fragments]) -> Iterator[Gathering]:
    """Open the exchanges of a gather, from ``index`` on. ``coming[r]``: the places of rank r."""
    with (
        open_exchange(ctx, index) as across,
        open_exchange(ctx, index + 1) if ctx.nodes else nullcontext(across) as inside,
    ):
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
        levels = Levels.of(ctx.nodes or [range(ctx.size)], ctx.rank, ctx.size)
        own, others = levels.node_ranks, [ranks for ranks in levels.nodes if ctx.rank not in ranks]
        self._neighbors = [rank for rank in ctx.peers if rank in own]
        # rank of this node -> the ranks of other nodes whose shards it receives and forwards
        self._through = {rank: [ranks[place] for ranks in others] for place, rank in enumerate(own)}
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

    def send(self, leaving: Fragments, step: int, base: torch.Tensor | None = None) -> None:
        """Send the own fragments of a step, as differences if there is a ``base``. Only a single tensor may have one. The own places get
        the values that the frames carry, so that all ranks have the same."""
        peers = [*self._received, *self._neighbors]
        for fragment, place in zip(leaving.at(step), self._own.at(step), strict=True):
            self._across.send(fragment, *peers, base=base, own_place=place)

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
    lacks = kernels.lacking(lambda: kernels.delta_route(kernels.preferred(ctx.config.route, "cpu"), "cpu"))
    none = tensors.filled(HASH_BYTES, 0, torch.uint8)
    mine = none if lacks else (hashed(ctx, places[peer]) for peer in ctx.peers)
    answers = swap(ctx, 0, ctx.peers, mine, HASH_BYTES)
    if lacks or any(torch.equal(none, answer) for answer in answers.values()):
        return NO_KERNELS
    if last is None:
        return NOTHING_THERE
    own = hashed(ctx, last)
    return "" if all(torch.equal(own, answer) for answer in answers.values()) else SOMETHING_ELSE


def hashed(ctx: OpContext, region: torch.Tensor) -> torch.Tensor:
    """Return the hash of a region as a message."""
    return tensors.of_buffer(bytearray(region_hash(region, ctx.hash_key)))


class SharedBase(Base):
    """The base of one gather of several tensors laid end to end. Each tensor has its own :class:`.BaseSlot`.

    All ranks make the object for a gather at the same point of the program. Two gathers in flight should not be of the same tensor: their
    results would be right, but few of their shards differences. ``scheduled``: a schedule reads the base, and fills it.
    """

    def __init__(self, slots: Sequence[BaseSlot]) -> None:
        self.scheduled = False
        self._slots, self._sizes = slots, [slot.memory.shape[1] for slot in slots]
        for slot in slots:
            slot.asked += 1
        self._versions = [slot.asked for slot in slots]

    def begin(self, ctx: OpContext, places: Sequence[torch.Tensor], buffers: PooledBuffers) -> torch.Tensor | None:
        self.scheduled = True
        if not all(slot.filled for slot in self._slots):
            return None
        last = buffers.empty(places[ctx.rank].numel(), places[ctx.rank].dtype)
        for rank, place in enumerate(places):
            parts = (last if rank == ctx.rank else place).split(self._sizes)
            for part, slot in zip(parts, self._slots, strict=True):
                part.copy_(slot.memory[rank])
        return last

    def end(self, ctx: OpContext, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        # all ranks of a node have read the old contents before, for the hash
        self.keep(ctx, [place.split(self._sizes) for place in places])

    def keep(self, ctx: OpContext, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold the flat tensor ``shards[rank][number]`` in slot ``number``. Each rank of a node writes some of the shards, and no rank
        reads the old contents any more. Blocks until all shards are written."""
        node_ranks = self._slots[0].node_ranks
        for rank, parts in enumerate(shards):
            writer = rank if rank in node_ranks else node_ranks[rank % len(node_ranks)]
            if writer == ctx.rank:
                for part, slot in zip(parts, self._slots, strict=True):
                    slot.memory[rank].copy_(part)
        written = all(bool(word) for word in swap(ctx, _DONE, self._peers(ctx), _written(True), 1).values())
        for slot, version in zip(self._slots, self._versions, strict=True):
            slot.filled, slot.version = written, version

    def abandon(self, ctx: OpContext) -> None:
        """Tell the peers on the node that this rank writes nothing, so that they do not wait for its writes."""
        for slot in self._slots:
            slot.filled = False
        abandon(exchange := Exchange(ctx, _DONE, control=True))
        for peer in self._peers(ctx):
            # a peer whose connection is closed knows already; every other one gets the message, and its own message a receive
            with suppress(RuntimeError, ValueError):
                exchange.post_recv(peer, _written(False))
            with suppress(RuntimeError, ValueError):
                exchange.send(_written(False), peer)

    def _peers(self, ctx: OpContext) -> list[int]:
        """Return the other ranks that write to the same memory."""
        return [peer for peer in self._slots[0].node_ranks if peer != ctx.rank]


def _written(done: bool) -> torch.Tensor:
    """Return the message to a peer: whether this rank has written its part of the memory."""
    return tensors.filled(1, done, torch.uint8)


# ---- the collectives


def gather_shards(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A gather in which each output consists of the shards of all ranks, or output r of a list is the shard of rank r; as differences if
    all ranks hold the same base."""
    wholes = [outputs] if request.op == "all_gather" else [equal_shards(whole, ctx.size) for whole in outputs]
    places = list(zip(*wholes, strict=True))
    if request.base is not None and ctx.with_base:
        gather_differences(ctx, inputs[0], [place for (place,) in places], request.base)
    else:
        gather(ctx, 0, inputs, places)


def broadcast(ctx: OpContext, request: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A gather in which the root alone has a shard."""
    places = [[*inputs, *outputs] if rank == request.root else [] for rank in range(ctx.size)]
    gather(ctx, 0, inputs, places)
