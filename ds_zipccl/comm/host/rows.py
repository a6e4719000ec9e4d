"""The frames of messages in rows: repeated and scaled rows of the segments that an operation sends are left out. Which segments are
searched, and the memory that a rank keeps of the rows in its messages of a group.

A token that goes to several experts of a rank is a repeated row. Its gradients come back as multiples of each other, each weighted by a
gate. So the map of repeated rows in one message predicts rows of a later message of the same size. A rank remembers and forgets by itself;
its peers know nothing of that.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import RowSegment, compress_bound
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.request import Request
from ds_zipccl.frame import DELTA_WORDS
from ds_zipccl.kernels import row_moves
from ds_zipccl.policy import admission, wire
from ds_zipccl.telemetry import ranges


class MapKey(NamedTuple):
    """The segments that a map may fit: of ``numel`` elements, in rows of ``width`` elements, to group rank ``peer``."""

    peer: int
    numel: int
    width: int


class RowPairs(NamedTuple):
    """Rows of a segment by their numbers, ascending, and the earlier row that is the source of each; both int32."""

    rows: torch.Tensor
    sources: torch.Tensor

    def nbytes(self) -> int:
        """Return the bytes of both lists."""
        return self.rows.nbytes + self.sources.nbytes


class RowMemory:
    """The maps of repeated rows of one group. Asynchronous operations of the group share it, each from its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, tuple[MapKey, RowPairs]] = {}  # by number, the oldest first
        self._numbers: defaultdict[MapKey, list[int]] = defaultdict(list)
        self._issued = count()
        self._nbytes = 0

    def remember(self, key: MapKey, pairs: RowPairs) -> None:
        """Keep a map. The oldest maps go where there are too many."""
        with self._lock:
            number = next(self._issued)
            self._maps[number] = key, pairs
            self._numbers[key].append(number)
            self._nbytes += pairs.nbytes()
            while self._nbytes > wire.MAP_BYTES or len(self._maps) > wire.MAPS:
                self._drop(next(iter(self._maps)))

    def newest(self, key: MapKey) -> Sequence[tuple[int, RowPairs]]:
        """Return the newest maps of a key with their numbers, the newest first, at most MAP_TRIALS."""
        with self._lock:
            numbers = self._numbers.get(key, [])[: -wire.MAP_TRIALS - 1 : -1]
            return [(number, self._maps[number][1]) for number in numbers]

    def forget(self, number: int) -> None:
        """Drop a map that has served: in a backward pass, the next message of its key belongs to an older map."""
        with self._lock:
            if number in self._maps:
                self._drop(number)

    def _drop(self, number: int) -> None:
        key, pairs = self._maps.pop(number)
        self._nbytes -= pairs.nbytes()
        self._numbers[key].remove(number)
        if not self._numbers[key]:
            del self._numbers[key]


def coder_of(ctx: OpContext, request: Request, inputs: Sequence[torch.Tensor]) -> FrameCoder:
    """Return the coder of an all-to-all: one of rows where senders may choose frames by rows, equally on all ranks except for the width.
    A rank that sends less than ``min_bytes`` sends its values exactly; ranks may differ, because every frame names its codec. Blocks in the
    first operations of a group, see :meth:`ds_zipccl.comm.context.OpContext.has_row_kernels`."""
    exact = admission.is_small(sum(flat.nbytes for flat in inputs), ctx.config)
    if not ctx.has_row_kernels():
        return FrameCoder(ctx, exact=exact)
    return RowCoder(ctx, request.segments.row_width, request.options.kind, exact)


class RowCoder(FrameCoder):
    """The frames of one operation whose tensors have rows of ``width`` elements, 0 where this rank's have none. ``kind``: of the request.

    All segments are searched at once, and one search counts for all: a peer whose rows do not repeat switches off no other. Searches take
    12 to 20 bytes of memory for each row, until :meth:`end`, and at most ``staging_mib`` in all. Where values change no row is a scaled
    one. A codec that does not round every word by itself adds a copy of the segments with the values that travel.
    """

    refers = True

    def __init__(self, ctx: OpContext, width: int, kind: str, exact: bool) -> None:
        super().__init__(ctx, exact=exact, block=wire.row_block(ctx.config.block, width, kind))
        self._least_block = wire.LEAST_BLOCK
        self._width, self._memory = width, ctx.state.of(RowMemory)
        # of searches in messages of a kind: the result in a whole message counts, all of its segments
        patience = wire.SEARCH_MISSES if kind else wire.MISSES_OF_UNKNOWN
        self._repeats, self._maps = (
            ctx.state.backoff(name, kind, skipped=wire.UNSEARCHED, patience=patience)
            for name in ("repeats" if self.exact else "rounded repeats", "maps")
        )
        # literal rows of words that are each rounded by themselves are rounded frames; where values change otherwise they are exact ones
        self._rounded: int = 0 if self._rounding is None else self._rounding.rounded
        self._buffers = PooledBuffers()
        self._segments: dict[int, RowSegment] = {}
        self._at: dict[int, int] = {}  # by peer, the elements in front of its next frame
        self._searched = self._found = False

    def search(self, segments: Mapping[int, torch.Tensor]) -> None:
        """Search segments for rows that need not travel, see :meth:`.frames.FrameCoder.search`."""
        with ranges.inside(ranges.ENCODE):
            searched = {peer: words for peer, words in segments.items() if _is_worth_it(words, self._width)}
            rows = [words.numel() // self._width for words in searched.values()]
            if wire.search_fits(rows, self._ctx.config.staging):
                self._segments = self._search(searched, self._fitting(searched) if self.exact else {})
        self._at = dict.fromkeys(self._segments, 0)

    def own_frame(self, peer: int, flat: torch.Tensor) -> tuple[torch.Tensor, PooledBuffers] | None:
        """Return the row frame of ``flat``, see :meth:`.frames.FrameCoder.own_frame`."""
        if peer not in self._segments:
            return None
        numel, dtype, begin = flat.numel(), flat.dtype, self._at[peer]
        self._at[peer] = end = begin + numel
        bound = compress_bound(numel, dtype, self._chosen, block=self._block)
        if self._rounded:
            bound = max(bound, self._rounding.bound(numel, dtype, self._block))
        buffers = PooledBuffers()
        with ranges.inside(ranges.ENCODE):
            frame = self._segments[peer].frame(begin, end, buffers.take(bound), self._chosen)
        if frame is None:
            buffers.release()
            return None
        # The search goes on, also where the ordinary frame is smaller still: in a later message it may not be, and no rounded message is to
        # be larger than an exact one.
        self._found = True
        if self._rounded:
            self._rounding.note(flat)
        if wire.compare_rows(flat.nbytes, not self.exact, self._rounded):
            ordinary = self.compress(flat, others := PooledBuffers())
            if ordinary.nbytes <= frame.nbytes:
                buffers.release()
                return ordinary, others
            others.release()
        return frame, buffers

    def end(self) -> None:
        """Give the memory of the searches back, and note whether a search has saved anything."""
        if self._searched:
            self._repeats.note(self._found)
        self._segments.clear()
        self._buffers.release()

    def _search(
        self, searched: Mapping[int, torch.Tensor], fitting: Mapping[int, torch.Tensor]
    ) -> dict[int, RowSegment]:
        """Return the segments that have repeated or scaled rows, and remember the maps of the repeated ones."""
        if not searched or (self._repeats.skips() and not fitting):
            return {}
        self._searched = True
        found = {}
        for peer, words in searched.items():
            # rows must be equal only where frames carry equal values, which may depend on more than the row
            compared = words
            if self._rounding is not None and not self._rounded:
                compared = self._rounding.carried(words, self._buffers)
            segment = RowSegment(
                compared, self._width, block=self._block, raw_below=wire.RAW_BELOW_BYTES, rounded=self._rounded,
                route=self.route, scratch=self._buffers.empty,
            )  # fmt: skip
            repeats = segment.find()
            if peer in fitting:
                segment.scale_by(fitting[peer])
            if repeats and self.exact:  # later rounded segments have no scaled rows
                self._remember(peer, words, segment.sources)
            if repeats or peer in fitting:
                found[peer] = segment
        return found

    def _remember(self, peer: int, words: torch.Tensor, sources: torch.Tensor) -> None:
        """Keep the map of a segment for later segments. ``sources``: for each row the first row that equals it."""
        rows = torch.nonzero(sources != _numbers(len(sources))).view(-1)
        by = sources[rows]
        copies = torch.bincount(by, minlength=1)[by]  # repeats of each row's source
        rows, by = rows[copies <= wire.COPIES], by[copies <= wire.COPIES]
        if words.dtype in DELTA_WORDS and len(rows) * wire.WORTH_REMEMBERING >= len(sources):
            self._memory.remember(self._key(peer, words), RowPairs(rows.int(), by))

    def _key(self, peer: int, words: torch.Tensor) -> MapKey:
        return MapKey(peer, words.numel(), self._width)

    def _fitting(self, searched: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return for some peers the row that predicts each row, its own number where none does, from the newest map that fits."""
        maps = {
            peer: kept
            for peer, words in searched.items()
            if words.dtype in DELTA_WORDS and (kept := self._memory.newest(self._key(peer, words)))
        }
        if not maps or self._maps.skips():
            return {}
        found = {}
        for peer, kept in maps.items():
            for number, pairs in kept:
                if self._fits(words := searched[peer], pairs):
                    good, predicted = self._good(words, pairs), _numbers(words.numel() // self._width)
                    predicted[pairs.rows[good].long()] = pairs.sources[good]
                    found[peer] = predicted
                    self._memory.forget(number)
                    break
        self._maps.note(bool(found))
        return found

    def _fits(self, words: torch.Tensor, pairs: RowPairs) -> bool:
        """Return whether a map predicts most of some rows."""
        every = max(1, len(pairs.rows) // wire.TRIAL_ROWS)  # so that a trial's rows spread over all
        some = RowPairs(*(numbers[::every][: wire.TRIAL_ROWS].contiguous() for numbers in pairs))
        return float(self._good(words, some).float().mean()) >= wire.GOOD_ROWS

    def _good(self, words: torch.Tensor, pairs: RowPairs) -> torch.Tensor:
        """Return for each pair whether its source, times the best factor, predicts most of a few words of its row."""
        width, count = self._width, len(pairs.rows)
        columns = row_moves.matrix(words, width)[:, :: max(1, width // wire.TRIAL_WORDS)]
        chosen = columns.index_select(0, torch.cat([pairs.sources, pairs.rows]))
        few, part = chosen.shape[1], chosen.view(words.dtype).view(-1)
        kernel = kernels.row_route(self.route, "cpu")
        numbers = _numbers(2 * count)
        sources, rows = numbers[:count], numbers[count:]
        factors = kernel.row_factors(part, few, rows, sources)
        known = factors != 0
        predictions = tensors.empty(count * few, words.dtype)
        kernel.predict_rows(part, few, sources, torch.where(known, factors, 1.0), predictions)
        missed = predictions.view(chosen.dtype).view(count, few).long() - chosen[count:].long()
        near = (missed.abs() <= 1).float().mean(1) >= wire.GOOD_WORDS
        return near & known


def _is_worth_it(words: torch.Tensor, width: int) -> bool:
    """Return whether a segment has rows of a size that pays, and more bytes than a raw frame takes anyway."""
    wide = width * words.element_size() >= wire.LEAST_ROW_BYTES
    return wide and words.numel() >= 2 * width and words.nbytes >= wire.RAW_BELOW_BYTES


def _numbers(count: int) -> torch.Tensor:
    return tensors.of_buffer(np.arange(count, dtype=np.int32)).view(torch.int32)
