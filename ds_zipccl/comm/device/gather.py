"""Gathers on a device: every rank's frames go into slots of one size, and the backend's own all-gather carries the slots.

The sizes of slots are the largest frame of any rank. All ranks agree on them: here, with one wait of the host, or ahead for all parameters
(:mod:`.agreed`), with none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.lanes import Lane
from ds_zipccl.comm.device.verdict import agree
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.frame_calls import frame_bytes
from ds_zipccl.kernels.jobs import GatherTable, Parameter
from ds_zipccl.policy import wire


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of a gather. ``whole``, flat, has the shards of all ranks in their order; ``own`` is this rank's, in its place or apart.

    ``sizes``: elements of the parameters of which a shard consists.
    """

    own: torch.Tensor
    whole: torch.Tensor
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard that is one frame: its shard's number, first element, and elements."""

    shard: int
    start: int
    numel: int


def pieces_of(numels: Sequence[Sequence[int]], itemsize: int, ranks: int, budget: int) -> list[Piece]:
    """Return the pieces of shards whose parameters have ``numels`` elements. A piece has no more than one parameter."""
    most = wire.device_piece_numel(itemsize, ranks, budget)
    found = []
    for shard, sizes in enumerate(numels):
        end = 0
        for numel in sizes:
            begin, end = end, end + numel
            found += [Piece(shard, start, min(most, end - start)) for start in range(begin, end, most)]
    return found


def encoded_sizes(
    ctx: DeviceContext, words: Sequence[torch.Tensor], bases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the bytes of each frame, int64 on the device. Reads all words, on the encoding lane; writes no frame."""
    with ctx.lanes.on(Lane.ENCODE):
        headers = tensors.empty(HEADER_BYTES * len(words), torch.uint8, ctx.device)
        code = ctx.codec if bases is None else "delta"
        ctx.route.frame_sizes(words, code, ctx.config.block, headers, bases)
        return frame_bytes(headers.view(-1, HEADER_BYTES)).contiguous()


def words_of(shards: Sequence[Shard], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the own words of each piece."""
    return parts_of([shard.own for shard in shards], pieces)


def parts_of(tensors_of_shards: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the part of each piece in flat tensors, one for each shard."""
    return [tensors_of_shards[piece.shard][piece.start : piece.start + piece.numel] for piece in pieces]


def gather(ctx: DeviceContext, shards: Sequence[Shard]) -> None:
    """Gather the shards; one wait of the host. Puts the rest of the work on the lanes."""
    pieces = pieces_of([shard.sizes for shard in shards], shards[0].own.element_size(), ctx.size, ctx.budget)
    sizes = agree(ctx, [encoded_sizes(ctx, words_of(shards, pieces))]) if pieces and ctx.codec != "raw" else None
    gather_agreed(ctx, shards, pieces, sizes)


def gather_agreed(
    ctx: DeviceContext,
    shards: Sequence[Shard],
    pieces: Sequence[Piece],
    sizes: Sequence[int] | None,
    lasts: Sequence[torch.Tensor] | None = None,
) -> None:
    """Gather the shards with frames that fit ``sizes``, the bytes of each piece's largest frame, equal on all ranks; no wait of the host.

    Pieces that hardly shrink go raw. Where all do (``sizes`` None: also), the words go as they are.

    Args:
        lasts: this rank's shards of the last gather, flat. The frames are then differences, and the places of all other ranks in each
            ``whole`` hold the words of that gather. The encoding lane reads ``lasts``.
    """
    itemsize = shards[0].own.element_size()
    slots = (
        []
        if sizes is None
        else [_slot(piece.numel * itemsize, size) for piece, size in zip(pieces, sizes, strict=True)]
    )
    peers = ctx.size - 1
    if all(raw for _, raw in slots):
        ctx.lanes.order(Lane.ENCODE, Lane.WIRE)
        with ctx.lanes.on(Lane.WIRE):
            for shard in shards:
                ctx.transport.all_gather(shard.whole, shard.own)
                ctx.count(shard.own.nbytes * peers, shard.own.nbytes * peers)
        ctx.lanes.order(Lane.WIRE, Lane.DECODE)
        return
    for first, last in _fragments(pieces, itemsize, ctx):
        _fragment(ctx, shards, pieces[first:last], slots[first:last], lasts)
    for shard in shards:
        numel = shard.own.numel()
        ctx.copy(shard.own, shard.whole[ctx.rank * numel : (ctx.rank + 1) * numel])
        ctx.count(shard.own.nbytes * peers, 0)


def _fragments(pieces: Sequence[Piece], itemsize: int, ctx: DeviceContext) -> Iterator[tuple[int, int]]:
    """Yield the first piece of each fragment and the piece after its last."""
    total = sum(piece.numel for piece in pieces) * itemsize * ctx.size
    most = wire.device_fragment_bytes(total, ctx.budget)
    first, nbytes = 0, 0
    for number, piece in enumerate(pieces):
        size = piece.numel * itemsize * ctx.size
        if number > first and nbytes + size > most:
            yield first, number
            first, nbytes = number, 0
        nbytes += size
    yield first, len(pieces)


def _slot(nbytes: int, frame: int) -> tuple[int, bool]:
    """Return the bytes of a slot for frames of up to ``frame`` bytes of ``nbytes`` bytes of words, and whether they are raw."""
    raw = not wire.shrinks(nbytes, frame)
    return wire.slot_bytes(nbytes + HEADER_BYTES if raw else frame), raw


@functools.lru_cache(maxsize=4096)
def _table(parameters: tuple[Parameter, ...], dtype: torch.dtype, block: int, ranks: int) -> GatherTable:
    return GatherTable(parameters, dtype, block, ranks)


def _fragment(
    ctx: DeviceContext,
    shards: Sequence[Shard],
    pieces: Sequence[Piece],
    slots: Sequence[tuple[int, bool]],
    lasts: Sequence[torch.Tensor] | None,
) -> None:
    parameters = tuple(
        Parameter(piece.numel, size, shards[piece.shard].own.numel(), piece.start, raw)
        for piece, (size, raw) in zip(pieces, slots, strict=True)
    )
    table = _table(parameters, shards[0].own.dtype, ctx.config.block, ctx.size)
    lanes, part_bytes = ctx.lanes, table.part_bytes
    with lanes.slab(part_bytes * ctx.size, ctx.budget) as slab:
        part = slab[ctx.rank * part_bytes : (ctx.rank + 1) * part_bytes]
        with lanes.on(Lane.ENCODE):
            code, bases = (ctx.codec, None) if lasts is None else ("delta", parts_of(lasts, pieces))
            ctx.route.encode_gather(words_of(shards, pieces), code, table, part, bases=bases)
        lanes.order(Lane.ENCODE, Lane.WIRE)
        with lanes.on(Lane.WIRE):
            ctx.transport.all_gather(slab, part)
        lanes.order(Lane.WIRE, Lane.DECODE)
        with lanes.on(Lane.DECODE):
            outs = [shards[piece.shard].whole for piece in pieces]
            status = ctx.reports.word(ctx.where())
            ctx.route.decode_gather(slab, table, outs, ctx.rank, status, bases=None if lasts is None else outs)
    ctx.count(0, part_bytes * (ctx.size - 1))
