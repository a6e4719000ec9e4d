"""Collectives on a device whose values a lossy codec may change.

Sums have the levels, the order and the roundings of :mod:`.sums`: with nodes of several ranks, the sums of nodes are the words that the
codec changes. Each frame is made and read by :mod:`ds_zipccl.codecs`, which makes the host wait for the device a few times a frame; the
ranks tell each other the sizes of the frames of each fragment, for which the host waits once. The streams are ordered all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import compress, compress_bound, decompress, decompress_add
from ds_zipccl.comm.device import exchange as exact_exchange
from ds_zipccl.comm.device import gather as exact_gather
from ds_zipccl.comm.device import sums
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import exchange_words, largest
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.reduction_order import add_in_fp32
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.topology import Levels
from ds_zipccl.comm.transport.gloo import all_reduce_chunk
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy import admission, wire


class _Coder:
    """The frames of one operation. ``exact``: they carry values as they are. All calls are work of the current stream, and the host waits
    for it."""

    def __init__(self, ctx: DeviceContext, exact: bool = False) -> None:
        self._ctx, self._exact = ctx, exact
        self._route = kernels.preferred(ctx.config.route, ctx.device.type)

    def room(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of a slot for any frame of ``numel`` elements, exact or not; none for no elements."""
        block = self._ctx.config.block
        exact = compress_bound(numel, dtype, self._ctx.codec, block=block)
        return wire.slot_bytes(max(exact, self._ctx.rounding.bound(numel, dtype, block))) if numel else 0

    def encode(self, words: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return a frame of flat words, at the begin of ``slot``."""
        ctx, block = self._ctx, self._ctx.config.block
        if not self._exact:
            frame: torch.Tensor = ctx.rounding.compress(words, ctx.codec, block, lambda nbytes: slot[:nbytes])
            return frame
        return compress(words, ctx.codec, out=slot, block=block, shaped=False, checksum=False, route=self._route)

    def decode(self, frame: torch.Tensor, peer: int, place: Part) -> None:
        """Write the words in the frame of group rank ``peer`` to ``place``."""
        with place.written() as out, self._ctx.refusing(peer):
            decompress(frame, out.data, route=self._route)

    def add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, total: torch.Tensor) -> None:
        """Add the words in the frame of group rank ``peer`` to flat fp32 ``total``."""
        with self._ctx.refusing(peer):
            decompress_add(frame, total.data, dtype=dtype, route=self._route)


class _Arrived:
    """:class:`ds_zipccl.comm.reduction_order.Contributions`: the own words, and the frames of the peers."""

    def __init__(self, coder: _Coder, rank: int, own: torch.Tensor, frames: Mapping[int, torch.Tensor]) -> None:
        self._coder, self.rank, self.own, self._frames = coder, rank, own, frames

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        if rank == self.rank:
            return self.own
        self._coder.decode(self._frames[rank], rank, Part((into, slice(0, into.numel()))))
        return into

    def add(self, rank: int, sums: torch.Tensor) -> None:
        if rank == self.rank:
            self.add_taken(self.own, sums)
        else:
            self._coder.add(self._frames[rank], rank, self.own.dtype, sums)

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        plain_sums.add(taken, sums)


@contextmanager
def _swapped(
    ctx: DeviceContext, coder: _Coder, leaving: Mapping[int, torch.Tensor], coming: Mapping[int, int]
) -> Iterator[dict[int, torch.Tensor]]:
    """Send frames of flat words to group ranks, and give the frames that arrive; the body reads them on the decoding stream. ``coming``:
    elements from each group rank, this one left out. Without words there is no frame. All ranks of the group call.

    Raises:
        CommError: a rank announces a size that no frame has, on this rank.
    """
    dtype, streams = next(iter(leaving.values())).dtype, ctx.streams
    rooms = [coder.room(numel, dtype) for numel in (*(one.numel() for one in leaving.values()), *coming.values())]
    with streams.staging(sum(rooms), ctx.budget) as staging:
        slots = staging.split(rooms)
        with streams.on(Stage.ENCODE):
            pairs = zip(leaving.items(), slots, strict=False)
            frames = {rank: coder.encode(words, slot) if words.numel() else slot for (rank, words), slot in pairs}
            nothing = tensors.empty(0, torch.int64, ctx.device).view(ctx.size, 0)
        sizes = [[frames[rank].numel() if rank in frames else 0] for rank in range(ctx.size)]
        told = exchange_words(ctx, nothing, sizes)[1]
        for rank, slot in zip(coming, slots[len(leaving) :], strict=True):
            (size,) = told[rank]
            if not (HEADER_BYTES if slot.numel() else 0) <= size <= slot.numel():
                raise ctx.error(
                    f"global rank {ctx.global_rank(rank)} announces a frame of {size} bytes, wanted at most {slot.numel()} for "
                    f"{coming[rank]} elements; give equal sizes on both ranks, and run one version with one configuration"
                )
        arriving = {rank: slot[: told[rank][0]] for rank, slot in zip(coming, slots[len(leaving) :], strict=True)}
        with streams.wire():
            ctx.transport.exchange(arriving, frames)
        ctx.count(sum(words.nbytes for words in leaving.values()), sum(frame.numel() for frame in frames.values()))
        yield arriving


class Summing(sums.Summing):
    """A sum in which the words from other nodes, or from other ranks in one level, are those that the codec has made of them."""

    def _agreed(self, words: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
        return [[0] * len(words[0]) for _ in words]  # the ranks tell each other the sizes with each fragment

    def _fragment(self, words: Sequence[torch.Tensor], sizes: Sequence[int], place: Part) -> None:
        ctx, peers, coder = self._ctx, self._levels.peers, _Coder(self._ctx)
        own = words[self._levels.node]
        leaving = {rank: one for rank, one in zip(peers, words, strict=True) if rank != ctx.rank}
        with _swapped(ctx, coder, leaving, dict.fromkeys(leaving, own.numel())) as frames:
            if own.numel():
                with ctx.streams.on(Stage.DECODE), place.written() as out:
                    arrived = _Arrived(coder, ctx.rank, own, frames)
                    add_in_fp32(arrived, peers, out, dict.fromkeys(peers, False), self._divisor)


def all_reduce(
    ctx: DeviceContext, levels: Levels, whole: Sequence[torch.Tensor], divisor: int = 1, exact_sums: bool = False
) -> None:
    """Replace flat tensors by their sums over all ranks, divided by ``divisor``. Each rank sums a shard of all tensors laid end to end, and
    the shards are gathered: as the codec changes them, on the rank that summed them too, or exactly. Shards are those of gloo's ring, so
    that gloo groups get the same bits."""
    laid = Part(*((flat, slice(0, flat.numel())) for flat in whole))
    if laid.numel:
        chunk = all_reduce_chunk(laid.numel, whole[0].itemsize, ctx.size)
        parts = [laid.cut(span.start, span.stop) for span in cut(laid.numel, chunk, ctx.size)]
        sums.reduce_scatter(ctx, levels, parts, parts[ctx.rank], divisor, Summing)
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # the sums
        gather(ctx, parts[ctx.rank], parts, exact_sums)


def gather(ctx: DeviceContext, own: Part, places: Sequence[Part], exact: bool = False) -> None:
    """Write the words of each rank to its place: as the codec changes them, those of this rank too, unless they are ``exact``. ``own``
    may be the own place. ``places`` have equal sizes on all ranks."""
    streams, coder, longest = ctx.streams, _Coder(ctx, exact), max(place.numel for place in places)
    dtype = next(source.dtype for place in places for source, _ in place.pieces) if longest else torch.uint8
    step = wire.device_sum_fragment(longest, dtype.itemsize, ctx.size, ctx.budget)
    for begin in range(0, longest, step):
        words, parts = own.cut(begin, begin + step), [place.cut(begin, begin + step) for place in places]
        room = coder.room(max(part.numel for part in parts), dtype)
        with streams.staging(room * (1 + ctx.size), ctx.budget) as staging:
            with streams.on(Stage.ENCODE):
                frame = coder.encode(words.joined(), staging[:room]) if words.numel else staging[:0]
            slot = wire.slot_bytes(largest(ctx, frame.numel()))
            if slot > room:
                raise ctx.error(f"a rank has a frame of {slot} bytes, wanted at most {room}; run one version on all")
            slots = staging[room:][: slot * ctx.size]
            with streams.wire():
                exact_gather.all_gather(ctx, slots, staging[:slot])
            with streams.on(Stage.DECODE):
                for rank, (part, one) in enumerate(zip(parts, slots.split(slot), strict=True)):
                    if part.numel:
                        coder.decode(one, rank, part)
        ctx.count(words.numel * dtype.itemsize * (ctx.size - 1), slot * (ctx.size - 1))


def exchange(
    ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, even: bool
) -> None:
    """Exchange flat tensors; ``sources[r]`` goes to rank r, ``targets[r]`` comes from rank r. ``even``: all have one size. A rank that
    sends less than ``min_bytes`` sends its words exactly.

    Raises:
        CommError: as :func:`_swapped`; or a frame was refused, on this rank.
    """
    sources = exact_exchange.apart(ctx, sources, targets)
    peers = [peer for peer in range(ctx.size) if peer != ctx.rank]
    coder = _Coder(ctx, admission.is_small(sum(one.nbytes for one in sources), ctx.config))
    piece = wire.uneven_piece(targets[0].itemsize, ctx.size, ctx.budget)
    steps = max(-(-tensor.numel() // piece) for some in (sources, targets) for tensor in some)
    for begin in range(0, piece * (steps if even else largest(ctx, steps)), piece):
        leaving, coming = ({peer: some[peer][begin : begin + piece] for peer in peers} for some in (sources, targets))
        sizes = {peer: words.numel() for peer, words in coming.items()}
        with _swapped(ctx, coder, leaving, sizes) as frames, ctx.streams.on(Stage.DECODE):
            for peer, words in coming.items():
                if words.numel():
                    coder.decode(frames[peer], peer, Part((words, slice(0, words.numel()))))
    ctx.copy(sources[ctx.rank], targets[ctx.rank])
