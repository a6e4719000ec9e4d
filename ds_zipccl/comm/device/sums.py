"""Sums on a device in two levels: inside a node by plain words, between nodes by frames. Both are added in fp32, in rank and node order.

The ranks of a node give each other plain words, because links inside a node are fast. Each rank then has the node's sum of the parts of its
local rank, rounded once, and sends the sums of other nodes' parts in frames. Words that do not shrink go raw by the same steps: the bits
of a sum never depend on how well words compress.

Levels have no groups of their own. An exchange of some ranks is the group's own all-to-all, in which all other ranks have nothing for each
other: a group of its own would need a name, or a communicator, on which ranks with different histories of groups do not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.device import gather
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.spans import cut, length, within
from ds_zipccl.comm.topology import Levels
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.cuda.backend import Own
from ds_zipccl.kernels.sums import divide, settle_nans
from ds_zipccl.policy import wire

#: Rows of node sums, and shards of an all-reduce, begin at multiples of so many elements: kernels read 16 bytes at once.
_ALIGNED = 8


class Part:
    """The words of a message that one rank gets the sum of: spans of flat tensors, laid end to end."""

    def __init__(self, *pieces: tuple[torch.Tensor, slice]) -> None:
        self.pieces = [(source, span) for source, span in pieces if length(span)]
        self.numel = sum(length(span) for _, span in self.pieces)

    @classmethod
    def of(cls, flat: torch.Tensor) -> Part:
        """Return all words of a flat tensor."""
        return cls((flat, slice(0, flat.numel())))

    def cut(self, begin: int, end: int) -> Part:
        """Return elements ``begin`` to ``end``, as far as there are any."""
        found, before = [], 0
        for source, span in self.pieces:
            found += [(source, one) for one in within([span], begin - before, end - before)]
            before += length(span)
        return Part(*found)

    def views(self) -> list[torch.Tensor]:
        """Return a view of each piece."""
        return [source[span] for source, span in self.pieces]

    def pack(self, into: torch.Tensor) -> None:
        """Copy the words to the begin of flat ``into``. Work of the current stream."""
        for view, place in zip(self.views(), self._places(into), strict=True):
            place.copy_(view)

    def unpack(self, packed: torch.Tensor) -> None:
        """Copy the begin of flat ``packed`` to the pieces. Work of the current stream."""
        for view, place in zip(self.views(), self._places(packed), strict=True):
            view.copy_(place)

    @contextmanager
    def written(self, room: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Give flat memory for new words, which are in their pieces afterwards. Work of the current stream. ``room``: for several."""
        views = self.views()
        if len(views) == 1:
            yield views[0]
            return
        out = tensors.empty(self.numel, views[0].dtype, views[0].device) if room is None else room
        yield out
        self.unpack(out)

    def _places(self, packed: torch.Tensor) -> Sequence[torch.Tensor]:
        places: Sequence[torch.Tensor] = packed[: self.numel].split([length(span) for _, span in self.pieces])
        return places


def reduce_scatter(
    ctx: DeviceContext, levels: Levels, parts: Sequence[Part], out: Part, divisor: int = 1, *, kind: Any = None
) -> None:
    """Write the sum of the parts of this rank of all ranks, divided by ``divisor``, to ``out``. Puts the work on the streams. ``kind``:
    what sums, None: :class:`Summing`.

    The host waits once, and once more for each further half of the budget that node sums take. ``parts[r]`` is the part of rank r; its
    number of elements is equal on all ranks. ``out`` may be the own part; otherwise it shares no memory with the parts.
    """
    longest = max(part.numel for part in parts)
    if not longest:
        return
    summing = (kind or Summing)(ctx, levels, parts, out, divisor)
    step = summing.step(longest)
    for begin in range(0, longest, step):
        summing.sum(begin, min(begin + step, longest))


def all_reduce(ctx: DeviceContext, levels: Levels, whole: Sequence[torch.Tensor], divisor: int = 1) -> None:
    """Replace flat tensors by their sums over all ranks, divided by ``divisor``. Puts the work on the streams; the host waits twice.

    Each rank sums a shard of each tensor, and the shards are gathered. The last rank sums the elements that are left over, too.
    """
    if not sum(map(len, whole)):
        return
    rank, last, streams = ctx.rank, ctx.size - 1, ctx.streams
    each, parts = list(zip(whole, _shards(ctx, whole), strict=True)), parts_of(ctx, whole)
    reduce_scatter(ctx, levels, parts, parts[rank], divisor)
    shards = [
        Shard(flat[rank * size : (rank + 1) * size], flat[: ctx.size * size], [size]) for flat, size in each if size
    ]
    left = Part(*((flat, slice(ctx.size * size, flat.numel())) for flat, size in each))
    with streams.on(Stage.DECODE):  # the elements that are left over; those of the last rank alone are sums
        own, of_all = (tensors.empty(left.numel * rows, whole[0].dtype, ctx.device) for rows in (1, ctx.size))
        left.pack(own)
    streams.order(Stage.DECODE, Stage.ENCODE)
    if left.numel:
        shards.append(Shard(own, of_all, [left.numel]))
    gather.gather(ctx, shards)
    with streams.on(Stage.DECODE):
        left.unpack(of_all[last * left.numel :])


def _shards(ctx: DeviceContext, whole: Sequence[torch.Tensor]) -> list[int]:
    return [flat.numel() // ctx.size // _ALIGNED * _ALIGNED for flat in whole]


def parts_of(ctx: DeviceContext, whole: Sequence[torch.Tensor]) -> list[Part]:
    """Return the part of each rank in an all-reduce of flat tensors. That of the last rank has the elements that are left over, too."""
    last = ctx.size - 1
    each = zip(whole, _shards(ctx, whole), strict=True)
    spans = [[*cut(last * size, size, last), slice(last * size, flat.numel())] for flat, size in each]
    return [Part(*zip(whole, of_rank, strict=True)) for of_rank in zip(*spans, strict=True)]


#: For sums with owners: sums travel exactly.
all_by_shards = all_reduce


def _dtype_of(parts: Iterable[Part]) -> torch.dtype:
    """Return the dtype of parts, one of which has words."""
    return next(source.dtype for part in parts for source, _ in part.pieces)


def _joined(parts: Sequence[Part]) -> torch.Tensor | None:
    """Return a view of equal parts that follow each other in one tensor; None for other parts."""
    if any(len(part.pieces) != 1 or part.numel != parts[0].numel for part in parts):
        return None
    source, first = parts[0].pieces[0]
    follows = all(
        part.pieces[0][0] is source and part.pieces[0][1].start == first.start + number * part.numel
        for number, part in enumerate(parts)
    )
    return source[first.start : parts[-1].pieces[0][1].stop] if follows else None


class Summing:
    """One sum of parts. ``of_local_rank``: for each node, the part of the rank that has this rank's local rank there."""

    def __init__(self, ctx: DeviceContext, levels: Levels, parts: Sequence[Part], out: Part, divisor: int) -> None:
        self._ctx, self._levels, self._parts, self._out = ctx, levels, parts, out
        self._of_local_rank = [parts[ranks[levels.local_rank]] for ranks in levels.nodes]
        self._dtype = _dtype_of(parts)
        self._nodes, self._local_ranks = len(levels.nodes), len(levels.nodes[0])
        # averages divide before the first rounding
        self._inside_divisor, self._divisor = (divisor, 1) if self._local_ranks > 1 else (1, divisor)
        # equal on all ranks, as the agreements that follow from it
        self._packed = self._local_ranks > 1 or any(len(part.pieces) > 1 for part in parts)
        self._rows = 0

    def step(self, longest: int) -> int:
        """Return the elements of each part that are summed with one agreement."""
        if not self._packed:
            return longest
        of_nodes = ([self._parts[rank] for rank in ranks] for ranks in self._levels.nodes)
        adjacent = all(_joined(parts) is not None for parts in of_nodes)
        numel, sizes = -(-longest // _ALIGNED) * _ALIGNED, (self._dtype.itemsize, self._nodes, self._local_ranks)
        self._floats = self._fp32_rows(self._inside_divisor)
        step, self._rows = wire.sum_step(numel, *sizes, self._ctx.budget, adjacent=adjacent, more=self._floats)
        return step

    def sum(self, begin: int, end: int) -> None:
        """Sum elements ``begin`` to ``end`` of each part, with one agreement."""
        with self._node_sums(begin, end) as sums:
            itemsize, numel = self._dtype.itemsize, end - begin
            taken = self._rows * numel * itemsize if self._packed else 0
            step = wire.device_sum_fragment(numel, itemsize, self._nodes, self._ctx.budget - taken, self._ctx.cut.sum)
            starts = range(0, end - begin, step)
            words = [[summed[start : start + step] for start in starts] for summed in sums]
            sizes = self._agreed(words)
            for number, start in enumerate(starts):
                place = self._out.cut(begin + start, min(begin + start + step, end))
                self._fragment([of_node[number] for of_node in words], [of_node[number] for of_node in sizes], place)

    @contextmanager
    def _node_sums(self, begin: int, end: int) -> Iterator[list[torch.Tensor]]:
        """Give this node's sum of the part of each rank of this local rank; flat. In one level: the parts themselves."""
        cut = [part.cut(begin, end) for part in self._of_local_rank]
        if not self._packed:
            yield [part.views()[0] if part.numel else self._nothing() for part in cut]
            return
        streams, ctx = self._ctx.streams, self._ctx
        numel = -(-(end - begin) // _ALIGNED) * _ALIGNED
        with streams.staging(self._rows * numel * self._dtype.itemsize, ctx.budget) as staging:
            rows = staging.view(self._dtype).view(self._rows, numel)
            packed = self._rows - self._nodes - self._local_ranks - self._floats
            some = rows[self._nodes :].split([packed, self._local_ranks, self._floats]) if self._local_ranks > 1 else ()
            places = [one.view(-1) for one in some]
            with streams.on(Stage.WIRE):
                for ranks, part, row in zip(self._levels.nodes, cut, rows, strict=False):
                    if self._local_ranks == 1:
                        part.pack(row)
                    else:
                        self._sum_inside([self._parts[rank].cut(begin, end) for rank in ranks], row, *places)
            streams.order(Stage.WIRE, Stage.ENCODE)
            yield [row[: part.numel] for part, row in zip(cut, rows, strict=False)]

    def _nothing(self) -> torch.Tensor:
        with self._ctx.streams.on(Stage.ENCODE):
            return tensors.empty(0, self._dtype, self._ctx.device)

    def _sum_inside(
        self,
        parts: Sequence[Part],
        sums: torch.Tensor,
        packing: torch.Tensor,
        arriving: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """Write this node's sum of the part of this rank's local rank to ``sums``. ``parts``: those of the ranks of one node, any node.
        ``packing``: memory for parts that do not follow each other; ``arriving``: for those of the peers; ``total``: for an average."""
        ctx, numels = self._ctx, [part.numel for part in parts]
        own = numels[self._levels.local_rank]
        if not any(numels):
            return
        plain = (sum(numels) - own) * self._dtype.itemsize
        ctx.count(plain, plain)
        sent = _joined(parts)
        if sent is None:
            sent = packing[: sum(numels)]
            for part, place in zip(parts, sent.split(numels), strict=True):
                part.pack(place)
        received = arriving[: self._local_ranks * own]
        _exchange(ctx, self._levels.node_ranks, received, sent, [own] * self._local_ranks, numels)
        if own:
            status = ctx.reports.word(f"{ctx.where()}, inside a node")  # a word of this stream alone
            floats = total.view(torch.float32)[:own] if len(total) else total
            self._sum_rows(received.view(self._local_ranks, own), sums[:own], floats, self._inside_divisor, status)

    def _agreed(self, words: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
        """Return the bytes of the slots of each node's fragments: those of the largest frame of any node. 0: the words are raw."""
        ctx, me, fragments = self._ctx, self._levels.node, len(words[0])
        if ctx.codec == "raw":
            return [[0] * fragments for _ in words]
        with ctx.streams.on(Stage.ENCODE):
            sizes = tensors.filled(self._nodes * self._local_ranks * fragments, 0, torch.int64, ctx.device)
            of_local_rank = sizes.view(self._nodes, self._local_ranks, fragments)[:, self._levels.local_rank]
            theirs = [one for node, some in enumerate(words) if node != me for one in some]
            found = gather.encoded_sizes(ctx, theirs).view(self._nodes - 1, fragments)
            of_local_rank[:me].copy_(found[:me])
            of_local_rank[me + 1 :].copy_(found[me:])
        agreed = agree(ctx, [sizes])
        firsts = range(self._levels.local_rank * fragments, len(agreed), self._local_ranks * fragments)
        return [
            [self._slot(one.nbytes, agreed[first + number]) for number, one in enumerate(some)]
            for first, some in zip(firsts, words, strict=True)
        ]

    def _slot(self, nbytes: int, frame: int) -> int:
        return wire.slot_bytes(max(frame, HEADER_BYTES)) if wire.shrinks(nbytes, frame) else 0

    def _fragment(self, words: Sequence[torch.Tensor], sizes: Sequence[int], place: Part) -> None:
        """Send ``words[i]`` to node i, in a slot of ``sizes[i]`` bytes or raw, and write the sum of what arrives and the own words."""
        ctx, streams, me = self._ctx, self._ctx.streams, self._levels.node
        # A local rank may have no words here; its ranks take part all the same, because the exchange is one of the whole group.
        rooms = [size or wire.slot_bytes(one.nbytes) for one, size in zip(words, sizes, strict=True)]
        own, arriving = words[me], rooms[me] * self._nodes
        floats = wire.slot_bytes(own.numel() * 4) if self._fp32_rows(self._divisor) else 0
        with streams.staging(sum(rooms) + arriving + floats, ctx.budget) as staging:
            sent, received, total = staging.split([sum(rooms), arriving, floats])
            with streams.on(Stage.ENCODE):
                self._encode(words, sizes, sent.split(rooms))
            with streams.wire():
                # the own slot travels too, and is not read: summands lie at a regular distance
                _exchange(ctx, self._levels.peers, received, sent, [rooms[me]] * self._nodes, rooms)
            if own.numel():
                with streams.on(Stage.DECODE):
                    matrix = received.view(self._nodes, rooms[me])
                    if not sizes[me]:
                        matrix = matrix.view(self._dtype)[:, : own.numel()]
                    self._add(matrix, own, place, total.view(torch.float32)[: own.numel()])
        theirs = [node for node in range(self._nodes) if node != me]
        ctx.count(sum(words[node].nbytes for node in theirs), sum(rooms[node] for node in theirs))

    def _encode(self, words: Sequence[torch.Tensor], sizes: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        ctx, me = self._ctx, self._levels.node
        coded = [node for node, size in enumerate(sizes) if size and node != me]
        if coded:
            some, places = ([one[node] for node in coded] for one in (words, slots))
            ctx.route.encode_frames(some, ctx.codec, ctx.config.block, places)
        for node, (one, slot, size) in enumerate(zip(words, slots, sizes, strict=True)):
            if node != me and not size and one.numel():
                slot.view(self._dtype)[: one.numel()].copy_(one)

    def _add(self, matrix: torch.Tensor, own: torch.Tensor, place: Part, total: torch.Tensor) -> None:
        """Add the rows of a matrix, with the own words in the row of this node, and write the sum to ``place``. Work of the current
        stream."""
        status = self._ctx.reports.word(self._ctx.where())
        with place.written(own) as sums:
            self._sum_rows(matrix, sums, total, self._divisor, status, Own(own, self._levels.node))

    def _fp32_rows(self, divisor: int) -> int:
        """Return the rows of the dtype that an fp32 row takes, in which a sum is divided; 0 where none is needed."""
        return 4 // self._dtype.itemsize if divisor > 1 and self._dtype is not torch.float32 else 0

    def _sum_rows(
        self,
        matrix: torch.Tensor,
        sums: torch.Tensor,
        total: torch.Tensor,
        divisor: int,
        status: torch.Tensor,
        *own: Own,
    ) -> None:
        """Write the sum of the rows of a matrix, divided by ``divisor``, to ``sums``, by way of fp32 ``total`` if that is not empty. Work
        of the current stream."""
        into = total if total.numel() else sums
        self._ctx.route.decode_sum_frames(matrix, self._ctx.config.block, self._dtype, into, status, *own)
        if divisor > 1:
            divide(into, divisor)
        if into is not sums:
            sums.copy_(into)
            settle_nans(sums)


def _exchange(
    ctx: DeviceContext,
    ranks: Sequence[int],
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
) -> None:
    """Exchange pieces of flat tensors among ``ranks``, ascending, this rank among them; sizes in elements, one for each of them. All ranks
    of the group call, each with the ranks of its own node or local rank. Work of the current stream."""
    sizes = [[0] * ctx.size, [0] * ctx.size]
    for found, some in zip(sizes, (received_sizes, sent_sizes), strict=True):
        for rank, size in zip(ranks, some, strict=True):
            found[rank] = size
    ctx.transport.all_to_all(received, sent, *sizes)
