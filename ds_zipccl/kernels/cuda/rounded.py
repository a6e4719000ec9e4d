"""Calls of the CUDA route for rounded words and payloads (FORMAT.md 2.9)."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.cuda import arguments, jobs
from ds_zipccl.kernels.cuda.jobs import DTYPES, MAX_JOBS, SUMMED
from ds_zipccl.kernels.cuda.launching import Family, Launching
from ds_zipccl.kernels.rounded_rows import RoundedRows

#: The dtypes with rounded payloads: exponent payloads of float32 have trims already.
TRIMMED = (torch.bfloat16, torch.float16)
MANTISSAS = range(1, 7)
#: Most blocks of threads of a launch that rounds; each takes 2048 words at a time.
_GRID = 2048
_WORDS_OF_BLOCK = 2048
_WARPS = 8

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class RoundJob(ctypes.Structure):
    _fields_ = [("words", _u64), ("out", _u64), ("numel", _u64), ("mantissa", _u32)]


class UntrimmedJob(ctypes.Structure):
    _fields_ = [
        ("payload", _u64), ("bytes", _u64), ("untrimmed", _u64), ("numel", _u64), ("capacity", _u64), ("first_item", _u32),
        ("unused", _u32),
    ]  # fmt: skip


class UntrimmedJobs(ctypes.Structure):
    _fields_ = [("job", UntrimmedJob * MAX_JOBS), ("count", _u32), ("block", _u32)]


_UNTRIMMED = np.dtype(UntrimmedJob)

#: The kernels of csrc/cuda/lossy/rounded.cuh, and those of exponent payloads for rounded ones; those have their shared memory.
KERNELS = (
    Family("round", "", RoundJob, SUMMED, {2: 0, 4: 0}),
    Family("encode", "_rounded", jobs.EncodeJobs, SUMMED, None),
    Family("decode", "_rounded", jobs.DecodeJobs, TRIMMED, None),
    Family("untrimmed", "", UntrimmedJobs, TRIMMED, {2: 2048}),
)


class RoundedCalls(Launching, RoundedRows):
    """The functions of :class:`ds_zipccl.kernels.LossyRoute` for the codec ``round``. ``round_words`` does not wait for the device."""

    @abc.abstractmethod
    def _payload_rows(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
        sizes: torch.Tensor,
    ) -> tuple[jobs.Rows, list[torch.Tensor]]: ...

    @abc.abstractmethod
    def _encode(
        self,
        rows: jobs.Rows,
        like: torch.Tensor,
        code: str,
        block: int,
        overflows: torch.Tensor | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        items: jobs.Rows | None = None,
        mantissa: int = 0,
    ) -> None: ...

    @abc.abstractmethod
    def _decode_payload(
        self,
        payload: torch.Tensor,
        bases: Sequence[torch.Tensor] | None,
        block: int,
        words: torch.Tensor,
        suffix: str = "",
    ) -> None: ...

    @abc.abstractmethod
    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None: ...

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.round_words`."""
        device = self._device(words)
        arguments.choice("words of", words.dtype, SUMMED)
        arguments.choice("mantissa", mantissa, MANTISSAS)
        arguments.as_many("words of output", out.numel(), "words", words.numel())
        at, to = arguments.addresses([words, out], "words or output", words.dtype, device)
        if not words.numel():
            return
        job = RoundJob(words=at, out=to, numel=words.numel(), mantissa=mantissa)
        grid = min(-(-words.numel() // _WORDS_OF_BLOCK), _GRID), 1
        self._launch("round", DTYPES[words.dtype], words.itemsize, grid, job, device, [words], [out])

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        """See :meth:`ds_zipccl.kernels.LossyRoute.encode_rounded`. Sizes without trims are read off the payloads."""
        arguments.choice("words of", segments[0].dtype, SUMMED)
        arguments.choice("mantissa", mantissa, MANTISSAS)
        count, dtype = len(segments), segments[0].dtype
        sizes = tensors.filled(2 * count, 0, torch.int64, segments[0].device)
        rows, places = self._payload_rows(segments, None, "rounded", block, outs, sizes)
        self._encode(rows, segments[0], "rounded", block, None, segments, [*places, sizes], mantissa=mantissa)
        if dtype in TRIMMED:
            self._count_untrimmed(rows, segments[0], block, places, sizes)
        found: list[int] = sizes.tolist()
        arguments.return_payloads(places, outs, found[:count])
        return list(zip(found[:count], found[count if dtype in TRIMMED else 0 :], strict=False))

    def _count_untrimmed(
        self, rows: jobs.Rows, like: torch.Tensor, block: int, places: Sequence[torch.Tensor], sizes: torch.Tensor
    ) -> None:
        """Write the sizes without trims of payloads, of which ``rows`` are the encoder's, to the second half of ``sizes``."""
        columns = {name: rows[name] for name in ("payload", "bytes", "numel", "capacity")}
        columns["untrimmed"] = rows["bytes"] + np.uint64(8 * len(rows))
        table = jobs.table(_UNTRIMMED, columns, len(rows))
        for _, part, chunks in jobs.launches(table, jobs.items_of(table["numel"], block)):
            params = UntrimmedJobs(block=block)
            jobs.fill(params, _UNTRIMMED, part)
            grid = -(-chunks // _WARPS), 1
            self._launch("untrimmed", DTYPES[like.dtype], like.itemsize, grid, params, like.device, places, [sizes])

    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_rounded`."""
        arguments.choice("rounded payloads of", words.dtype, TRIMMED)
        self._decode_payload(payload, None, block, words, "_rounded")

    def decode_rounded_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_rounded_add`."""
        values = tensors.empty(sums.numel(), dtype, sums.device)
        self.decode_rounded(payload, block, values)
        self.add(values, sums)
