"""Collectives on a device whose values a lossy codec may change.

Sums have the levels, the order and the roundings of :mod:`.sums`: with nodes of several ranks, the sums of nodes are the words that the
codec changes. Each frame is made and read by :mod:`ds_zipccl.codecs`, which makes the host wait for the device a few times a frame; the
ranks tell each other the sizes of the frames of each fragment, for which the host waits once. The streams are ordered all the same.
"""

from __future__ import annotations

import functools
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
from ds_zipccl.comm.reduction_order import Received, add_in_fp32
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.topology import Levels
from ds_zipccl.comm.transport.gloo import all_reduce_chunk
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy import admission, wire


class _Frames:
    """The frames of one operation, of which ``arrived`` has the last ones of each group rank. ``exact``: they carry values as they are.
    All calls are work of the current stream, and the host waits for it."""

    def __init__(self, ctx: DeviceContext, exact: bool = False) -> None:
        self._ctx, self._exact, self.arrived = ctx, exact, dict[int, torch.Tensor]()
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

    def recv(self, peer: int, out: torch.Tensor) -> torch.Tensor:
        """Write the words from group rank ``peer`` to flat ``out``."""
        with self._ctx.refusing(peer):
            return decompress(self.arrived[peer], out.data, route=self._route)

    def recv_add(self, peer: int, dtype: torch.dtype, total: torch.Tensor) -> None:
        """Add the words from group rank ``peer`` to flat ``total``."""
        with self._ctx.refusing(peer):
            decompress_add(self.arrived[peer], total.data, dtype=dtype, route=self._route)

    add = staticmethod(plain_sums.add)

    @contextmanager
    def swapped(self, leaving: Mapping[int, torch.Tensor], coming: Mapping[int, int]) -> Iterator[None]:
        """Send flat words to group ranks; the body reads the frames that arrive on the decoding stream. ``coming``: elements from each
        group rank, this one left out. Without words there is no frame. All ranks of the group call. Raises CommError, on this rank, where
        one announces a size that no frame has: after the exchange, for which the others wait."""
        ctx, dtype, streams = self._ctx, next(iter(leaving.values())).dtype, self._ctx.streams
        rooms = [self.room(numel, dtype) for numel in (*map(len, leaving.values()), *coming.values())]
        with streams.staging(sum(rooms), ctx.budget) as staging:
            slots = staging.split(rooms)
            places = dict(zip(coming, slots[len(leaving) :], strict=True))
            with streams.on(Stage.ENCODE):
                pairs = zip(leaving.items(), slots, strict=False)
                frames = {rank: self.encode(words, slot) if len(words) else slot for (rank, words), slot in pairs}
                nothing = tensors.empty(0, torch.int64, ctx.device).view(ctx.size, 0)
            sizes = [[len(frames[rank]) if rank in frames else 0] for rank in range(ctx.size)]
            told = [size for (size,) in exchange_words(ctx, nothing, sizes)[1]]
            with streams.wire():
                self.arrived = {
                    rank: place[:size] if size <= len(place) else tensors.empty(size, torch.uint8, ctx.device)
                    for size, (rank, place) in zip((told[rank] for rank in places), places.items(), strict=True)
                }
                ctx.transport.exchange(self.arrived, frames)
            for rank, place in places.items():
                if not min(HEADER_BYTES, len(place)) <= told[rank] <= len(place):
                    raise ctx.error(
                        f"global rank {ctx.global_rank(rank)} announces {told[rank]} bytes for {coming[rank]} elements, wanted at most "
                        f"{len(place)}; give equal sizes on both ranks, and run one version with one configuration"
                    )
            ctx.count(sum(words.nbytes for words in leaving.values()), sum(map(len, frames.values())))
            yield


class Summing(sums.Summing):
    """A sum in which the words from other nodes, or from other ranks in one level, are those that the codec has made of them."""

    def _agreed(self, words: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
        return [[0] * len(words[0]) for _ in words]  # the ranks tell each other the sizes with each fragment

    def _fragment(self, words: Sequence[torch.Tensor], sizes: Sequence[int], place: Part) -> None:
        ctx, peers, frames = self._ctx, self._levels.peers, _Frames(self._ctx)
        own = words[self._levels.node]
        leaving = {rank: one for rank, one in zip(peers, words, strict=True) if rank != ctx.rank}
        with frames.swapped(leaving, dict.fromkeys(leaving, len(own))):
            if len(own):
                with ctx.streams.on(Stage.DECODE), place.written(own) as out:
                    arrived = Received(ctx.rank, frames, own)
                    add_in_fp32(arrived, peers, out, dict.fromkeys(peers, False), self._divisor)


#: As :func:`.sums.reduce_scatter`.
reduce_scatter = functools.partial(sums.reduce_scatter, kind=Summing)


def all_reduce(
    ctx: DeviceContext, levels: Levels, whole: Sequence[torch.Tensor], divisor: int = 1, *, exact: bool = False
) -> None:
    """Replace flat tensors by their sums over all ranks, divided by ``divisor``. Each rank sums a shard of all tensors laid end to end, and
    the shards are gathered: as the codec changes them, on the rank that summed them too, or ``exact``. Shards are those of gloo's ring,
    so that gloo groups get the same bits."""
    laid = Part(*(piece for flat in whole for piece in Part.of(flat).pieces))
    if laid.numel:
        chunk = all_reduce_chunk(laid.numel, whole[0].itemsize, ctx.size)
        parts = [laid.cut(span.start, span.stop) for span in cut(laid.numel, chunk, ctx.size)]
        reduce_scatter(ctx, levels, parts, parts[ctx.rank], divisor)
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # the sums
        gather(ctx, parts[ctx.rank], parts, exact)


#: For sums with owners, each of an element with the same bits: rounded once.
all_by_shards = functools.partial(all_reduce, exact=True)


def gather(ctx: DeviceContext, own: Part, places: Sequence[Part], exact: bool = False) -> None:
    """Write the words of each rank to its place: as the codec changes them, those of this rank too, unless they are ``exact``. ``own``
    may be the own place. ``places`` have equal sizes on all ranks."""
    streams, frames, longest = ctx.streams, _Frames(ctx, exact), max(place.numel for place in places)
    dtype = next(source.dtype for place in places for source, _ in place.pieces) if longest else torch.uint8
    step = wire.device_sum_fragment(longest, dtype.itemsize, ctx.size, ctx.budget)
    in_levels = None
    for begin in range(0, longest, step):
        words, parts = own.cut(begin, begin + step), [place.cut(begin, begin + step) for place in places]
        room = frames.room(max(part.numel for part in parts), dtype)
        with streams.staging(room * (1 + ctx.size), ctx.budget) as staging:
            with streams.on(Stage.ENCODE):
                frame = frames.encode(torch.cat(words.views()), staging[:room]) if words.numel else staging[:0]
            slot = wire.slot_bytes(largest(ctx, len(frame))[0])
            slots = staging[room:][: slot * ctx.size]
            if in_levels is None:  # the shorter last one goes as the first one
                in_levels = slots.nbytes >= ctx.cut.levels_from
            with streams.wire():
                exact_gather.all_gather(ctx, slots, staging[:slot], in_levels)
            frames.arrived = dict(enumerate(slots.split(slot)))
            with streams.on(Stage.DECODE):
                for rank, part in enumerate(parts):
                    if part.numel:
                        with part.written() as out:
                            frames.recv(rank, out)
        ctx.count(words.numel * dtype.itemsize * (ctx.size - 1), slot * (ctx.size - 1))


def exchange(
    ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, even: bool
) -> None:
    """Exchange flat tensors; ``sources[r]`` goes to rank r, ``targets[r]`` comes from rank r. ``even``: all have one size. A rank that
    sends less than ``min_bytes`` sends its words exactly. Raises CommError, on this rank, where a frame is refused."""
    sources = exact_exchange.apart(ctx, sources, targets)
    peers = [peer for peer in range(ctx.size) if peer != ctx.rank]
    frames = _Frames(ctx, admission.is_small(sum(one.nbytes for one in sources), ctx.config))
    piece = wire.uneven_piece(targets[0].itemsize, ctx.size, ctx.budget)
    steps = max(-(-len(flat) // piece) for some in (sources, targets) for flat in some)
    for begin in range(0, piece * (steps if even else largest(ctx, steps)[0]), piece):
        leaving, coming = ({peer: some[peer][begin : begin + piece] for peer in peers} for some in (sources, targets))
        with (
            frames.swapped(leaving, {peer: len(words) for peer, words in coming.items()}),
            ctx.streams.on(Stage.DECODE),
        ):
            for peer, words in coming.items():
                if len(words):
                    frames.recv(peer, words)
    ctx.copy(sources[ctx.rank], targets[ctx.rank])
