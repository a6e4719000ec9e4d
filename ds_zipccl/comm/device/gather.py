"""Gathers on a device: every rank's frames go into slots of one size, and the backend's own all-gather, or exchanges in two levels, carry
the slots.

The sizes of slots are the largest frame of any rank. All ranks agree on them: here, with one wait of the host, or ahead for all parameters
(:mod:`.agreed`), with none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.in_place import InPlaceBase
from ds_zipccl.comm.bases.state import NOTHING_THERE, SOMETHING_ELSE
from ds_zipccl.comm.device.bases.proof import PROOF_WORDS, holds, proof
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.topology import Levels
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.cuda.jobs import GatherTable, Parameter, frame_bytes
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of a gather. ``whole``, flat, has the shards of all ranks in their order; ``own`` is this rank's, in its place or apart.

    ``sizes``: elements of the parameters of which a shard consists. ``names``: of these parameters, for messages, or none.
    """

    own: torch.Tensor
    whole: torch.Tensor
    sizes: Sequence[int]
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard that is one frame: its shard's number, first element, and elements; the number of its parameter in the shard."""

    shard: int
    start: int
    numel: int
    parameter: int = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """Pieces ``first`` up to ``last`` of a gather, which travel in one collective. ``names``: of the parameter of each."""

    first: int
    last: int
    table: GatherTable
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of gathers of shards that agree in sizes and dtype. No fragments: the words go as they are. ``in_levels``: all fragments
    go in two levels. Never written to."""

    pieces: Sequence[Piece]
    fragments: Sequence[Fragment]
    in_levels: bool = False


def pieces_of(numels: Sequence[Sequence[int]], itemsize: int, ranks: int, budget: int) -> list[Piece]:
    """Return the pieces of shards whose parameters have ``numels`` elements. A piece has no more than one parameter."""
    found = []
    for shard, sizes in enumerate(numels):
        end = 0
        for parameter, numel in enumerate(sizes):
            begin, end = end, end + numel
            most = wire.device_piece_numel(numel, itemsize, ranks, budget)
            found += [Piece(shard, start, min(most, end - start), parameter) for start in range(begin, end, most)]
    return found


def encoded_sizes(
    ctx: DeviceContext, words: Sequence[torch.Tensor], bases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the bytes of each frame, int64 on the device. Reads all words, on the encoding stream; writes no frame."""
    with ctx.streams.on(Stage.ENCODE):
        headers = tensors.empty(HEADER_BYTES * len(words), torch.uint8, ctx.device)
        code = ctx.codec if bases is None else "delta"
        ctx.route.frame_sizes(words, code, ctx.config.block, headers, bases)
        return frame_bytes(headers.view(-1, HEADER_BYTES)).contiguous()


def words_of(shards: Sequence[Shard], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the own words of each piece."""
    return [part_of(shards[piece.shard].own, piece) for piece in pieces]


def part_of(words: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the words of a piece in its shard, or in a tensor with the layout of its shard."""
    return words[piece.start : piece.start + piece.numel]


def gather(ctx: DeviceContext, shards: Sequence[Shard]) -> None:
    """Gather the shards; one wait of the host. Puts the rest of the work on the streams."""
    pieces = pieces_of([shard.sizes for shard in shards], shards[0].own.element_size(), ctx.size, ctx.budget)
    sizes = agree(ctx, [encoded_sizes(ctx, words_of(shards, pieces))]) if pieces and ctx.codec != "raw" else None
    gather_agreed(ctx, shards, pieces, sizes)


class _Differences(set[tuple[int, torch.dtype]]):
    """Elements and dtype of the shards that went as differences when they were last gathered in place over a group."""


def gather_in_place(ctx: DeviceContext, shard: Shard, base: InPlaceBase) -> None:
    """Gather a shard as a difference if all ranks hold the result of the last gather, otherwise in full. The host waits once, for the proof
    and the sizes of both kinds of frames; of differences alone where the last gather of such a shard was one, and once more if this one is
    not. The copy of the own shard is memory of the device, written on the decoding stream; after an agreement that raised there is no
    copy."""
    places = list(shard.whole.split(shard.own.numel()))
    last = base.begin(ctx, places)
    ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # an earlier gather has written `last` on the decoding stream
    pieces = pieces_of([shard.sizes], shard.own.element_size(), ctx.size, ctx.budget)
    lasts = None if last is None else [part_of(last, piece) for piece in pieces]
    words, count = words_of([shard], pieces), len(pieces)
    last_ones, kind = ctx.state.of(_Differences), (shard.own.numel(), shard.own.dtype)  # equal on all ranks
    full = [] if kind in last_ones else [encoded_sizes(ctx, words)]
    if last is None:
        with ctx.streams.on(Stage.ENCODE):
            rest = [tensors.filled(count + 1 + PROOF_WORDS * ctx.size, 1, torch.int64, ctx.device)]
    else:
        regions = [last if rank == ctx.rank else place for rank, place in enumerate(places)]
        delta = encoded_sizes(ctx, words, lasts)
        with ctx.streams.on(Stage.ENCODE):
            rest = [delta, tensors.filled(1, 0, torch.int64, ctx.device), proof(ctx, regions)]
    agreed = agree(ctx, [*full, *rest])
    sizes, found = agreed[: count * len(full)], agreed[count * len(full) :]
    unproven, hashes = bool(found[count]), found[count + 1 :]  # some rank has no base
    reason = NOTHING_THERE if unproven else "" if holds(hashes) else SOMETHING_ELSE
    if not reason:
        sizes = found[:count]
    elif not full:
        sizes = agree(ctx, [encoded_sizes(ctx, words)])
    (last_ones.discard if reason else last_ones.add)(kind)
    gather_agreed(ctx, [shard], pieces, sizes, None if reason else lasts)
    with ctx.streams.on(Stage.DECODE):
        base.end(ctx, places, last)
    counters.record_difference(ctx.role, ctx.op, reason)


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
        lasts: the words of each piece that this rank sent in the last gather. The frames are then differences, and the places of all other
            ranks in each ``whole`` hold the words of that gather. The encoding stream reads ``lasts``.
    """
    send_planned(ctx, shards, plan_of(ctx, shards, pieces, sizes), lasts)
    put_own(ctx, shards)


def plan_of(
    ctx: DeviceContext,
    shards: Sequence[Shard],
    pieces: Sequence[Piece],
    sizes: Sequence[int] | None,
    *,
    partial: bool = False,
) -> Plan:
    """Return the layout of :func:`gather_agreed`, which does not depend on words. ``partial``: the pieces are only a part of the shards, so
    that the words cannot go as they are."""
    itemsize = shards[0].own.element_size()
    slots: list[tuple[int, bool]] = []
    if sizes is not None:
        slots = [slot_of(piece.numel * itemsize, size) for piece, size in zip(pieces, sizes, strict=True)]
    if all(raw for _, raw in slots) and not partial:
        return Plan(pieces, ())
    fragments, nbytes = [], [size * ctx.size for size, _ in slots]
    words = sum(piece.numel for piece in pieces) * itemsize * ctx.size
    count, in_levels = ctx.cut.gather(
        words, sum(nbytes), frame=max(nbytes), budget=ctx.budget, least=ctx.cut.levels_from
    )
    for first, last in _fragments(nbytes, count):
        some = pieces[first:last]
        parameters = tuple(
            Parameter(piece.numel, size, shards[piece.shard].own.numel(), piece.start, raw)
            for piece, (size, raw) in zip(some, slots[first:last], strict=True)
        )
        table = GatherTable(parameters, shards[0].own.dtype, ctx.config.block, ctx.size)
        names = tuple(shards[one.shard].names[one.parameter] for one in some if shards[one.shard].names)
        fragments.append(Fragment(first, last, table, names))
    return Plan(pieces, fragments, in_levels)


def send_planned(
    ctx: DeviceContext, shards: Sequence[Shard], plan: Plan, lasts: Sequence[torch.Tensor] | None = None
) -> None:
    """Gather the pieces of a plan, except the own ones; no wait of the host. ``lasts`` as for :func:`gather_agreed`."""
    if not plan.fragments and plan.pieces:
        with ctx.streams.wire():
            for shard in shards:
                all_gather(ctx, shard.whole, shard.own)
                ctx.count(0, shard.own.nbytes * (ctx.size - 1))
    for fragment in plan.fragments:
        part, table, nbytes = slice(fragment.first, fragment.last), fragment.table, fragment.table.part_bytes
        pieces, code = plan.pieces[part], ctx.codec if lasts is None else "delta"
        with ctx.streams.staging(nbytes * ctx.size, ctx.budget) as staging:
            own = staging[ctx.rank * nbytes : (ctx.rank + 1) * nbytes]
            with ctx.streams.on(Stage.ENCODE):
                bases = None if lasts is None else lasts[part]
                segments = shards[0].own if len(shards) == 1 else words_of(shards, pieces)
                ctx.route.encode_gather(segments, code, table, own, bases=bases)
            with ctx.streams.wire():
                all_gather(ctx, staging, own, plan.in_levels)
            with ctx.streams.on(Stage.DECODE):
                outs = shards[0].whole if len(shards) == 1 else [shards[piece.shard].whole for piece in pieces]
                status = ctx.reports.word(ctx.where(), fragment.names)
                ctx.route.decode_gather(staging, table, outs, ctx.rank, status, bases=None if lasts is None else outs)
        ctx.count(0, nbytes * (ctx.size - 1))


def all_gather(ctx: DeviceContext, whole: torch.Tensor, own: torch.Tensor, in_levels: bool | None = None) -> None:
    """Write the parts of all ranks to flat ``whole``, in their order; the own part may be left out. ``own`` is this rank's, in its place or
    apart. Work of the current stream.

    ``in_levels``: a rank's part enters each other node once, where a ring of all ranks brings it back to its own node; None: if the gather
    is large. Every rank sends its part to the ranks of its node, and to those of its local rank on other nodes, which forward it to their
    nodes.
    """
    if not (whole.nbytes >= ctx.cut.levels_from if in_levels is None else in_levels):
        ctx.transport.all_gather(whole, own)
        return
    levels, rows = ctx.cut.levels, whole.view(ctx.size, own.numel()).unbind()  # rows of an empty part too
    first = [rank for rank in (*levels.node_ranks, *levels.peers) if rank != ctx.rank]
    ctx.transport.exchange({rank: rows[rank] for rank in first}, dict.fromkeys(first, own))
    forward(ctx, rows, levels, [ranks for ranks in levels.nodes if ctx.rank not in ranks])


def forward(ctx: DeviceContext, rows: Sequence[torch.Tensor], levels: Levels, nodes: Sequence[Sequence[int]]) -> None:
    """Bring the rows of this rank's peers on some nodes to the other ranks of its node, which bring those of theirs: an exchange inside the
    node for each of ``nodes``. Work of the current stream.

    Args:
        rows: a contiguous row for each rank of the group.
    """
    others = [rank for rank in levels.node_ranks if rank != ctx.rank]
    for ranks in nodes:
        coming = {rank: rows[ranks[place]] for place, rank in enumerate(levels.node_ranks) if rank != ctx.rank}
        ctx.transport.exchange(coming, dict.fromkeys(others, rows[ranks[levels.local_rank]]))


def put_own(ctx: DeviceContext, shards: Sequence[Shard]) -> None:
    """Copy the own shards to their places, and count the gather."""
    for shard in shards:
        numel = shard.own.numel()
        ctx.copy(shard.own, shard.whole[ctx.rank * numel : (ctx.rank + 1) * numel])
        ctx.count(shard.own.nbytes * (ctx.size - 1), 0)


def _fragments(nbytes: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Yield the first piece of each of ``count`` fragments and the piece after its last. ``nbytes``: of the slots of each piece."""
    ends = list(itertools.accumulate(nbytes))
    own = [wire.device_fragment_of(end - one, one, ends[-1], count) for one, end in zip(nbytes, ends, strict=True)]
    for _, found in itertools.groupby(range(len(own)), own.__getitem__):
        some = list(found)
        yield some[0], some[-1] + 1


def slot_of(nbytes: int, frame: int) -> tuple[int, bool]:
    """Return the bytes of a slot for frames of up to ``frame`` bytes of ``nbytes`` bytes of words, and whether they are raw. ``frame`` 0:
    they are."""
    raw = not frame or not wire.shrinks(nbytes, frame)
    return wire.slot_bytes(nbytes + HEADER_BYTES if raw else frame), raw
