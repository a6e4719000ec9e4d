"""The repeated and scaled rows of the segments that an operation sends: which segments are searched, and the maps that are remembered."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import RowSegment
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder, Rows
from ds_zipccl.comm.host.rows.memory import MapKey, RowMemory, RowPairs
from ds_zipccl.frame import DELTA_WORDS
from ds_zipccl.kernels import row_moves
from ds_zipccl.policy import row_rules, wire


class SentRows:
    """The rows of the segments of one operation, searched at once. ``segments``: group rank of the receiver -> flat contiguous CPU tensor,
    which must not change before its last frame. One search counts for all segments: a peer whose rows do not repeat switches off no other.
    Searches take 12 to 20 bytes of memory for each row, until :meth:`release`, and at most ``staging_mib`` in all.
    With a lossy codec no row is a scaled one. A codec that does not round every word by itself adds a copy of the segments with the
    values that travel.
    """

    def __init__(self, ctx: OpContext, coder: FrameCoder, rows: Rows, segments: Mapping[int, torch.Tensor]) -> None:
        self._ctx, self._coder, self._rows = ctx, coder, rows
        self._memory = ctx.state.of(RowMemory)
        self._name = "lossy repeats" if coder.lossy else "repeats"  # of the backoff
        self._buffers = PooledBuffers()
        searched = {peer: words for peer, words in segments.items() if _is_worth_it(words, rows.width)}
        if not row_rules.search_fits(
            [words.numel() // rows.width for words in searched.values()], ctx.config.staging_mib
        ):
            searched = {}
        self._searched = self._found = False
        fitting = {} if coder.lossy else self._fitting(searched)
        self._segments = self._search(searched, fitting)
        self._at = dict.fromkeys(self._segments, 0)

    def frame(self, peer: int, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor | None:
        """Return the row frame of ``flat``, the next part of the segment for ``peer``, in memory of ``buffers``; None where an ordinary
        frame is as good."""
        if peer not in self._segments:
            return None
        begin = self._at[peer]
        self._at[peer] = begin + flat.numel()
        return self._coder.compress_rows(self._segments[peer], begin, flat, buffers)

    def note_found(self) -> None:
        """Note that a row frame is smaller than a lossless one. The search goes on then, also where a lossy frame is smaller still: in a
        later message it may not be, and no lossy message is to be larger than a lossless one."""
        self._found = True

    def release(self) -> None:
        """Give the memory of the searches back, after the last frame, and note whether a search has saved anything."""
        if self._searched:
            self._memory.backoff(self._name, self._rows.kind).note(self._found)
        self._segments.clear()
        self._buffers.release()

    def _search(
        self, searched: Mapping[int, torch.Tensor], fitting: Mapping[int, torch.Tensor]
    ) -> dict[int, RowSegment]:
        """Return the segments that have repeated or scaled rows, and remember the maps of the repeated ones."""
        backoff = self._memory.backoff(self._name, self._rows.kind)
        if not searched or (backoff.skips() and not fitting):
            return {}
        self._searched = True
        found = {}
        for peer, words in searched.items():
            compared = self._coder.compared(words, self._buffers)
            segment = self._coder.row_segment(compared, self._rows.width, self._buffers)
            repeats = segment.find()
            if peer in fitting:
                segment.scale_by(fitting[peer])
            if repeats and not self._coder.lossy:  # later lossy segments have no scaled rows
                self._remember(peer, words, segment.sources)
            if repeats or peer in fitting:
                found[peer] = segment
        return found

    def _remember(self, peer: int, words: torch.Tensor, sources: torch.Tensor) -> None:
        """Keep the map of a segment for later segments. ``sources``: for each row the first row that equals it."""
        rows = torch.nonzero(sources != _numbers(len(sources))).view(-1)
        by = sources[rows]
        copies = torch.bincount(by, minlength=1)[by]  # repeats of each row's source
        rows, by = rows[copies <= row_rules.COPIES], by[copies <= row_rules.COPIES]
        if words.dtype in DELTA_WORDS and len(rows) * row_rules.WORTH_REMEMBERING >= len(sources):
            self._memory.remember(self._key(peer, words), RowPairs(rows.int(), by))

    def _key(self, peer: int, words: torch.Tensor) -> MapKey:
        return MapKey(peer, words.numel(), self._rows.width)

    def _fitting(self, searched: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return for some peers the row that predicts each row, its own number where none does, from the newest map that fits."""
        maps = {
            peer: kept
            for peer, words in searched.items()
            if words.dtype in DELTA_WORDS and (kept := self._memory.newest(self._key(peer, words)))
        }
        backoff = self._memory.backoff("maps", self._rows.kind)
        if not maps or backoff.skips():
            return {}
        found = {}
        for peer, kept in maps.items():
            for number, pairs in kept:
                if self._fits(searched[peer], pairs):
                    found[peer] = self._predicted(searched[peer], pairs)
                    self._memory.forget(number)
                    break
        backoff.note(bool(found))
        return found

    def _fits(self, words: torch.Tensor, pairs: RowPairs) -> bool:
        """Return whether a map predicts most of some rows."""
        every = max(1, len(pairs.rows) // row_rules.TRIAL_ROWS)  # so that a trial's rows spread over all
        some = RowPairs(*(numbers[::every][: row_rules.TRIAL_ROWS].contiguous() for numbers in pairs))
        return float(self._good(words, some).float().mean()) >= row_rules.GOOD_ROWS

    def _predicted(self, words: torch.Tensor, pairs: RowPairs) -> torch.Tensor:
        good = self._good(words, pairs)
        predicted = _numbers(words.numel() // self._rows.width)
        predicted[pairs.rows[good].long()] = pairs.sources[good]
        return predicted

    def _good(self, words: torch.Tensor, pairs: RowPairs) -> torch.Tensor:
        """Return for each pair whether its source, times the best factor, predicts most of a few words of its row."""
        width, count = self._rows.width, len(pairs.rows)
        columns = row_moves.matrix(words, width)[:, :: max(1, width // row_rules.TRIAL_WORDS)]
        chosen = columns.index_select(0, torch.cat([pairs.sources, pairs.rows]))
        few, part = chosen.shape[1], chosen.view(words.dtype).view(-1)
        kernel = kernels.row_route(self._coder.route, "cpu")
        numbers = _numbers(2 * count)
        sources, rows = numbers[:count], numbers[count:]
        factors = kernel.row_factors(part, few, rows, sources)
        known = factors != 0
        predictions = tensors.empty(count * few, words.dtype)
        kernel.predict_rows(part, few, sources, torch.where(known, factors, 1.0), predictions)
        missed = predictions.view(chosen.dtype).view(count, few).long() - chosen[count:].long()
        near = (missed.abs() <= 1).float().mean(1) >= row_rules.GOOD_WORDS
        return near & known


def _is_worth_it(words: torch.Tensor, width: int) -> bool:
    """Return whether a segment has rows of a size that pays, and more bytes than a raw frame takes anyway."""
    wide = width * words.element_size() >= row_rules.LEAST_ROW_BYTES
    return wide and words.numel() >= 2 * width and words.nbytes >= wire.RAW_BELOW_BYTES


def _numbers(count: int) -> torch.Tensor:
    return tensors.of_buffer(np.arange(count, dtype=np.int32)).view(torch.int32)
