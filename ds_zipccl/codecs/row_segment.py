"""The sender's side of row frames (FORMAT.md 2.6): which rows of a segment repeat or are scaled, frame by frame."""

from __future__ import annotations

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent, rows
from ds_zipccl.codecs.exponent import DELTA, RAW, ROUNDED
from ds_zipccl.codecs.memory import admit, frame_buffer, write_header
from ds_zipccl.codecs.registry import spec_for
from ds_zipccl.codecs.rows import LITERALS, MOST_ROWS, Literals, RowMap, Scratch, row_list
from ds_zipccl.codecs.spec import LOSSY_DTYPES, CodecSpec, PayloadSpec
from ds_zipccl.frame import DELTA_WORDS, HEADER_BYTES, CodecId, Header
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.cpp.backend import CppBackend, RowFrames

#: Rows that :meth:`RowSegment.trial` tries (seed: enough to tell scaled copies from other rows).
TRIAL_ROWS = 24
#: A row frame must save this part of the bytes of the rows that it leaves out, at least (seed: half of them is what the codec would save).
_WORTH = 0.5
#: ``raw_below`` of literals that are raw in any case.
_ALL = (1 << 64) - 1
#: Words of a row that are compared to tell a row of one word, which costs next to nothing in any frame.
_PROBES = 8


class RowSegment:
    """A tensor that goes to one receiver in one or more frames, in order, of which any may refer to rows in front of it.

    Nothing is copied: the words must not change before the last frame. One thread at a time; calls block.

    Args:
        words: flat contiguous tensor of any dtype of a frame, whose rows begin at element 0.
        width: elements of a row, at least 1. Elements behind the last whole row belong to no row.
        block: words of a block in nested frames, as for :func:`ds_zipccl.compress`.
        raw_below: literals of fewer bytes are raw.
        rounded: bits to which literals are rounded (FORMAT.md 2.9), so that every frame decodes to rounded words; 0: none is. Rows are
            compared before they are rounded, and no row is scaled. Words are then bfloat16, float16 or float32.
        route: kernels to use.
        scratch: gives memory, (elements, dtype, device) -> flat tensor, contents undefined, for as long as the segment is used: 12 to 24
            bytes per row, and three times the scaled rows of the largest frame.

    Raises:
        ValueError: a width that no frame has, too many rows, or words of a dtype that is not rounded.
    """

    def __init__(
        self,
        words: torch.Tensor,
        width: int,
        *,
        block: int = 1024,
        raw_below: int = 0,
        rounded: int = 0,
        route: str = "auto",
        scratch: Scratch = tensors.empty,
    ) -> None:
        admit("words", words)
        if not isinstance(width, int) or isinstance(width, bool):
            raise TypeError(f"got rows of {width!r} elements, wanted an int")
        if not 1 <= width < 1 << 32:
            raise ValueError(f"got rows of {width} elements, wanted at least 1 and less than 2^32")
        self._words, self._width, self._block, self._raw_below = words, width, block, raw_below
        if rounded and words.dtype not in LOSSY_DTYPES:
            raise ValueError(f"got rows of {words.dtype} to round, wanted {', '.join(map(str, LOSSY_DTYPES))}")
        self._rounded = rounded
        # a row that is left out saves its coded words: sign, kept bits and about two bits of an exponent
        self._worth_of = min(_WORTH, (3 + rounded) / (8 * words.itemsize)) if rounded else _WORTH
        self._rows = words.numel() // width
        if self._rows > MOST_ROWS:
            raise ValueError(f"got {self._rows} rows, a segment has at most {MOST_ROWS}; give a larger width")
        self._route, self._scratch = route, scratch
        self._candidates: np.ndarray | None = None
        self._table = scratch(1 << max(1, (2 * self._rows - 1).bit_length()), torch.int32, words.device).zero_()
        self._found = scratch(self._rows, torch.int32, words.device)
        on_host = words.device.type == "cpu"
        self._sources = self._found.numpy() if on_host else np.empty(self._rows, dtype=np.int32)
        self._known = 0  # rows that find_rows has seen
        self._gathered = self._predicted = words[:0]
        self._spill = words[:0].view(torch.uint8)
        self._frames: tuple[CodecSpec, RowFrames] | None = None
        #: Rows that equal earlier rows, of those that :meth:`find` has seen.
        self.repeats = 0
        #: Rows that travelled as scaled copies.
        self.scaled = 0

    @property
    def sources(self) -> torch.Tensor:
        """For each whole row that :meth:`find` has seen the first row with the same words, its own number if there is none: int32 on the
        CPU, a copy."""
        return row_list(self._sources[: self._known], tensors.CPU)

    def find(self, end: int | None = None) -> int:
        """Look for repeats in the rows before row ``end``, None: in all; return :attr:`repeats`. :meth:`frame` does so for its own rows."""
        with tensors.undisturbed():
            self._find(self._rows if end is None else end)
            return self.repeats

    def scale_by(self, candidates: torch.Tensor | None) -> None:
        """Let later frames code rows as scaled copies of ``candidates``; None: no rows.

        Args:
            candidates: for each whole row of the segment the number of an earlier row of which it may be a scaled copy, int32 on the CPU. A
                number that is not below the row's own means none. :attr:`sources` of another segment with the same rows in other words is
                such a list. Segments of other dtypes than bfloat16, float16 and float32, and rounded ones, have no scaled rows.

        Raises:
            ValueError: candidates for another number of rows.
        """
        if candidates is not None and len(candidates) != self._rows:
            raise ValueError(f"got candidates for {len(candidates)} rows of {self._rows}; give one for each")
        scalable = candidates is not None and self._words.dtype in DELTA_WORDS and not self._rounded
        self._candidates = candidates.numpy() if candidates is not None and scalable else None

    def trial(self, candidates: torch.Tensor, codec: str = "cascade") -> float:
        """Return the size of a few rows as scaled copies of ``candidates`` (:meth:`scale_by`), by their size coded with ``codec``.

        1.0 where no row has a candidate.
        """
        spec = spec_for(codec, self._words.dtype)
        if self._words.dtype not in DELTA_WORDS or spec is RAW:
            return 1.0
        with tensors.undisturbed():
            places = np.flatnonzero(_earlier(candidates.numpy(), np.arange(self._rows)))
            places = places[:: max(1, len(places) // TRIAL_ROWS)][:TRIAL_ROWS]
            kept, factors = self._factors(places, candidates.numpy()[places])
            places = places[kept]
            if not len(places):
                return 1.0
            sources = candidates.numpy()[places]
            there, base = self._against(places, sources, factors)
            out = self._scratch(DELTA.payload_bound(there.numel(), there.dtype, self._block), torch.uint8, there.device)
            scaled = DELTA.encode([there], [base], self._block, [out], self._route)[0] + 4 * len(places)
            return scaled / spec.encode([there], (), self._block, [out], self._route)[0]

    def frame(self, begin: int, end: int, out: torch.Tensor, codec: str = "cascade") -> torch.Tensor | None:
        """Write the row frame of elements ``begin`` to ``end`` to ``out``: flat, without a checksum.

        Args:
            begin: the end of the frame before; frames come in order, ordinary frames among them.
            end: behind the last element.
            out: 1-D uint8, ``compress_bound(end - begin, dtype, codec, block=block)`` bytes or more, apart from the words; with ``rounded``
                that of the codec ``Round``. No frame has more bytes.
            codec: "cascade", "wide" or "raw", for the literals; that of the ordinary frame.

        Returns:
            The frame, a view of ``out``; None where a row frame would not be smaller than the ordinary frame, which the caller then makes.

        Raises:
            ValueError: the elements are not a part of the segment.
        """
        with tensors.undisturbed():
            spec, numel = spec_for(codec, self._words.dtype), end - begin
            bound = HEADER_BYTES + self._form(spec).payload_bound(numel, self._words.dtype, spec.block(self._block))
            buffer = frame_buffer(out, bound, self._words.device, [self._words])
            size = self.payload(begin, end, buffer[HEADER_BYTES:bound], spec)
            if size is None:
                return None
            return write_header(Header(CodecId.ROWS, self._words.dtype, numel, HEADER_BYTES + size), buffer)

    def payload(self, begin: int, end: int, out: torch.Tensor, spec: CodecSpec) -> int | None:
        """Write the payload of :meth:`frame` to ``out``, the bound of an ordinary payload of ``spec``; return its bytes, or None."""
        if not 0 <= begin <= end <= self._words.numel():
            raise ValueError(f"got elements {begin} to {end} of a segment of {self._words.numel()}; give a part of it")
        if spec.frame_id not in LITERALS:
            return None
        first, last = -(-begin // self._width), end // self._width
        compiled = kernels.compiled(self._route, self._words.device.type)
        if compiled is not None and self._candidates is None:
            return self._in_one_call(begin, end, out, spec, compiled) or None
        self._find(last)
        if first >= last or not (self.repeats or self._candidates is not None):
            return None
        rows_of, factors = self._map(first, last, spec)
        fields = rows.fields_of(rows_of, end - begin, self._width, first * self._width - begin)
        if fields.literal_numel * self._words.itemsize < self._raw_below:
            spec = RAW
        if not self._worth(first, rows_of, fields, spec):
            return None
        at = rows.encode(self._words[begin:end], rows_of, fields, self._literals(spec), out, factors)
        if at is not None and fields.scaled:
            there, base = self._against(rows_of.scaled + first, rows_of.scaled_sources + first, factors)
            nested = Literals(spec, self._block, self._route)  # a raw spec has no block
            at = rows.encode_deltas(there, base, nested, out, at, self._room)
            self.scaled += fields.scaled if at is not None else 0
        return at

    def _form(self, spec: CodecSpec) -> PayloadSpec:
        """The format of literals in frames whose ordinary ones are of ``spec``."""
        return ROUNDED if self._rounded and spec is not RAW and self._words.dtype in ROUNDED.dtypes else spec

    def _literals(self, spec: CodecSpec) -> Literals:
        return Literals(self._form(spec), spec.block(self._block), self._route, spec.name, self._rounded)

    def _in_one_call(self, begin: int, end: int, out: torch.Tensor, spec: CodecSpec, compiled: CppBackend) -> int:
        """:meth:`payload` where no row has a candidate; 0 for None."""
        block, dtype, form, raw_below = spec.block(self._block), self._words.dtype, self._form(spec), _ALL
        bound = form.payload_bound(end - begin, dtype, block)
        if spec is not RAW:
            raw_below = self._raw_below
            exponent.check_bound(self._words, bound, exponent.MAX_PAYLOAD)
        if out.numel() < bound:
            raise ValueError(
                f"got room for {out.numel()} bytes of payload, wanted {bound}; compress_bound() gives its size"
            )
        if self._frames is None or self._frames[0] is not spec:
            header = bytearray(HEADER_BYTES)
            framing.pack(Header(form.frame_id, dtype, 0, HEADER_BYTES, block), tensors.of_buffer(header))
            literals = self._scratch(self._rows, torch.int32, self._words.device)
            self._frames = spec, RowFrames(
                compiled, self._words, self._width, self._found, self._table, literals, bytes(header[:16]), spec.name, block,
                raw_below, self._worth_of, self._rounded,
            )  # fmt: skip
        size, self._known, self.repeats = self._frames[1].payload(begin, end - begin, out, self._known, self.repeats)
        return size

    def _find(self, end: int) -> None:
        """Look at the rows before ``end`` that no frame has looked at."""
        if end <= self._known:
            return
        data, row_bytes = self._words.view(torch.uint8), self._width * self._words.itemsize
        found = self._found[self._known : end]
        kernel = kernels.row_route(self._route, self._words.device.type)
        self.repeats += kernel.find_rows(data, row_bytes, self._known, found, self._table)
        if self._words.device.type != "cpu":
            self._sources[self._known : end] = found.cpu().numpy()
        self._known = end

    def _map(self, first: int, last: int, spec: CodecSpec) -> tuple[RowMap, torch.Tensor]:
        """The map of a frame with the whole rows ``first`` to ``last``, and the factors of its scaled rows."""
        own = np.arange(first, last)
        sources = self._sources[first:last].astype(np.int64)
        repeated = np.flatnonzero(sources != own)
        scaled = by = repeated[:0]
        factors = tensors.empty(0, torch.float32)
        if self._candidates is not None and spec is not RAW:
            scaled, by, factors = self._scaled(self._candidates[first:last].astype(np.int64), sources, own)
        literal = sources == own
        literal[scaled] = False
        return RowMap(np.flatnonzero(literal), repeated, sources[repeated] - first, scaled, by - first), factors

    def _scaled(
        self, predicted: np.ndarray, sources: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """The scaled rows of a frame from its first whole row on, the rows of the segment that predict them, and their factors."""
        scaled = np.flatnonzero((sources == own) & _earlier(predicted, own))
        # A candidate that repeats an earlier row is that row.
        by = self._sources[predicted[scaled]].astype(np.int64)
        # The source of a scaled row is no scaled row of this frame.
        chosen = np.zeros(len(own), dtype=bool)
        chosen[scaled] = True
        within = by - int(own[0])
        alone = ~((within >= 0) & chosen[np.maximum(within, 0)])
        scaled, by = scaled[alone], by[alone]
        kept, factors = self._factors(own[scaled], by)
        return scaled[kept], by[kept], factors

    def _against(
        self, places: np.ndarray, sources: np.ndarray, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The words of rows, and their predictions; valid until the next call."""
        device, numel = self._words.device, len(places) * self._width
        if self._gathered.numel() < numel:
            self._gathered, self._predicted = (self._scratch(numel, self._words.dtype, device) for _ in range(2))
        there, base = self._gathered[:numel], self._predicted[:numel]
        matrix = row_moves.matrix(self._words, self._width)
        torch.index_select(matrix, 0, row_list(places, device), out=row_moves.matrix(there, self._width))
        kernel = kernels.row_route(self._route, device.type)
        kernel.predict_rows(self._words, self._width, row_list(sources, device), factors, base)
        return there, base

    def _room(self, size: int) -> torch.Tensor:
        """Memory of ``size`` bytes, valid until the next call."""
        if self._spill.numel() < size:
            self._spill = self._scratch(size, torch.uint8, self._words.device)
        return self._spill[:size]

    def _factors(self, places: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Which of the rows have a factor, and those factors."""
        if not len(places):
            return np.zeros(0, dtype=bool), tensors.empty(0, torch.float32)
        device = self._words.device
        kernel = kernels.row_route(self._route, device.type)
        factors = kernel.row_factors(self._words, self._width, row_list(places, device), row_list(sources, device))
        kept = (factors != 0).cpu().numpy()  # on the host, as the number of factors is
        return kept, factors.index_select(0, row_list(np.flatnonzero(kept), device))

    def _worth(self, first: int, found: RowMap, fields: rows.Fields, literals: CodecSpec) -> bool:
        """Whether a row frame is likely to be smaller than the ordinary one."""
        useful = fields.repeats
        if useful and literals is not RAW:
            columns = np.arange(_PROBES) * (self._width - 1) // (_PROBES - 1)
            sources, of_each = np.unique(found.repeat_sources + first, return_inverse=True)
            device = self._words.device
            lines = row_moves.matrix(self._words, self._width).index_select(0, row_list(sources, device))
            lines = lines.index_select(1, row_list(columns, device))
            plain = (lines == lines[:, :1]).all(1).cpu().numpy()
            useful -= int(plain[of_each].sum())
        return self._saves(fields, useful + fields.scaled)

    def _saves(self, fields: rows.Fields, useful: int) -> bool:
        """Whether leaving out ``useful`` rows saves more than the other parts of a row frame cost."""
        return fields.literals_at + HEADER_BYTES < self._worth_of * useful * self._width * self._words.itemsize


def _earlier(candidates: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Where a candidate is an earlier row."""
    return (candidates >= 0) & (candidates < own)
