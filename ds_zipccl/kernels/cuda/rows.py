"""Calls of the CUDA route for rows of a segment: which rows repeat, factors between rows, and predicted rows."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.cuda import arguments, jobs
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED
from ds_zipccl.kernels.cuda.launching import Launching

#: Most blocks of threads of a launch; each takes eight rows at a time.
_GRID = 2048
_ROWS_OF_BLOCK = 8
#: Bytes that a lane reads at a time, best first.
_UNITS = (16, 4, 2, 1)


class RowCalls(Launching):
    """The calls of :class:`ds_zipccl.kernels.Route` for rows, which wait for the device where they return a number."""

    @abc.abstractmethod
    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None: ...

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        """See :meth:`ds_zipccl.kernels.Route.find_rows`. Here an entry of the table is the first of some equal rows, plus one."""
        device, count, slots = self._device(data), sources.numel(), table.numel()
        (at,) = arguments.addresses([data], "rows", torch.uint8, device)
        (names, entries) = arguments.addresses([sources, table], "sources or table", torch.int32, device)
        if row_bytes < 1 or first < 0 or data.numel() < (first + count) * row_bytes:
            raise ValueError(
                f"got {data.numel()} bytes for rows {first} to {first + count} of {row_bytes} bytes; give the whole segment from row 0 on"
            )
        if slots < 2 * (first + count) or slots & (slots - 1) or slots > 1 << 31:
            raise ValueError(
                f"got a table of {slots} entries for {first + count} rows, wanted a power of two, at least twice as many; make it larger"
            )
        if not count:
            return 0
        repeats = tensors.filled(1, 0, torch.int32, device)
        unit = next(unit for unit in _UNITS if not (at | row_bytes) % unit)
        job = jobs.FindRows(
            data=at, row_bytes=row_bytes, sources=names, table=entries, repeats=repeats.data_ptr(), first=first, count=count,
            mask=slots - 1, unit=unit,
        )  # fmt: skip
        for naming in (False, True):
            job.naming = naming
            self._launch("find_rows", "", 1, _grid(count), job, device, [data], [sources, table, repeats])
        return int(repeats.item())

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """See :meth:`ds_zipccl.kernels.Route.row_factors`; does not wait."""
        sums = tensors.empty(2 * rows.numel(), torch.float64, words.device)
        (numbers,) = arguments.addresses([rows], "rows", torch.int32, self._device(words))
        arguments.as_many("rows", rows.numel(), "sources", sources.numel())
        self._pairs("row_sums", words, width, sources, sums, [rows], rows=numbers)
        ab, aa = sums.view(-1, 2).unbind(1)
        factors = (ab / aa).to(torch.float32)
        usable = factors.isfinite() & (factors.abs() >= torch.finfo(torch.float32).tiny)
        return factors.masked_fill(~usable, 0.0)

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See :meth:`ds_zipccl.kernels.Route.predict_rows`; does not wait."""
        device = self._device(words)
        (numbers,) = arguments.addresses([factors], "factors", torch.float32, device)
        arguments.addresses([out], "output", words.dtype, device)
        arguments.as_many("factors", factors.numel(), "sources", sources.numel())
        arguments.as_many("words of predictions", out.numel(), "sources", sources.numel(), width)
        self._pairs("predict_rows", words, width, sources, out, [factors], factors=numbers)

    def encode_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, code: str, block: int, out: torch.Tensor
    ) -> int:
        """See :meth:`ds_zipccl.kernels.Route.encode_rows`. The literals are copied to one place first."""
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        row_moves.gather(words, width, head, rows, literals)
        return self.encode([literals], code, block, [out])[0]

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        """See :meth:`ds_zipccl.kernels.Route.decode_rows`. The literals are copied from one place at last."""
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        self.decode(payload, block, literals)
        row_moves.spread(literals, words, width, head, rows)

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.Route.copy_rows`; does not wait."""
        matrix = row_moves.matrix(words, width)
        matrix.index_copy_(0, rows.long(), matrix.index_select(0, sources))

    def _pairs(
        self,
        what: str,
        words: torch.Tensor,
        width: int,
        sources: torch.Tensor,
        out: torch.Tensor,
        more: Sequence[torch.Tensor],
        **numbers: int,
    ) -> None:
        """Launch a kernel of :class:`jobs.RowPairs`; the numbers of rows are not checked."""
        arguments.choice("rows of", words.dtype, SUMMED)
        device = self._device(words)
        (at,) = arguments.addresses([words], "words", words.dtype, device)
        (places,) = arguments.addresses([sources], "sources", torch.int32, device)
        if width < 1:
            raise ValueError(f"got rows of {width} words, wanted at least 1; give the width of a row")
        count, itemsize = sources.numel(), words.itemsize
        if count:
            job = jobs.RowPairs(words=at, width=width, sources=places, out=out.data_ptr(), count=count, **numbers)
            self._launch(what, DTYPES[words.dtype], itemsize, _grid(count), job, device, [words, sources, *more], [out])


def _grid(rows: int) -> tuple[int, int]:
    return min(-(-rows // _ROWS_OF_BLOCK), _GRID), 1
