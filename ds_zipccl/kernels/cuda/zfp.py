"""Calls of the CUDA route for ZFP (FORMAT.md 2.11)."""

from __future__ import annotations

import abc
import ctypes

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.cuda import arguments
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED
from ds_zipccl.kernels.cuda.launching import Family, Launching

RATES = range(3, 33)
#: Most blocks of threads of a launch, and the values that each takes at a time.
_GRID = 2048
_WORDS_OF_BLOCK = 1024
#: Kernels read and write codes by words of so many bytes.
_ALIGNED = 4

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class ZfpJob(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("out", _u64), ("codes", _u64), ("status", _u64), ("numel", _u64), ("rate", _u32),
    ]  # fmt: skip


#: The kernels of csrc/cuda/lossy/zfp.cuh.
KERNELS = tuple(
    Family(f"zfp_{what}", "", ZfpJob, SUMMED, {2: 6144, 4: 6144}) for what in ("encode", "decode", "project")
)


class ZfpCalls(Launching):
    """The functions of :class:`ds_zipccl.kernels.LossyRoute` for ZFP. Only ``encode_zfp`` waits for the device."""

    @abc.abstractmethod
    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None: ...

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        """See :meth:`ds_zipccl.kernels.LossyRoute.encode_zfp`."""
        device = self._device(words)
        _check(words, rate, codes)
        (at,) = arguments.addresses([words], "words", words.dtype, device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        place = codes if codes.data_ptr() % _ALIGNED == 0 else tensors.empty(codes.numel(), torch.uint8, device)
        infinite = tensors.filled(1, 0, torch.int64, device)
        job = ZfpJob(words=at, codes=place.data_ptr(), status=infinite.data_ptr(), numel=words.numel(), rate=rate)
        self._start_zfp("encode", words, job, [words], [place, infinite])
        if place is not codes:
            codes.copy_(place)
        return not infinite.item()

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_zfp`."""
        device = self._device(words)
        _check(words, rate, codes)
        (out,) = arguments.addresses([words], "output", words.dtype, device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        if codes.data_ptr() % _ALIGNED:
            codes = codes.clone()
        job = ZfpJob(out=out, codes=codes.data_ptr(), numel=words.numel(), rate=rate)
        self._start_zfp("decode", words, job, [codes], [words])

    def decode_zfp_add(self, codes: torch.Tensor, rate: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_zfp_add`."""
        values = tensors.empty(sums.numel(), dtype, sums.device)
        self.decode_zfp(codes, rate, values)
        self.add(values, sums)

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.project_zfp`."""
        device = self._device(words)
        arguments.choice("ZFP of", words.dtype, SUMMED)
        arguments.choice("rate", rate, RATES)
        arguments.as_many("words of output", out.numel(), "words", words.numel())
        at, to = arguments.addresses([words, out], "words or output", words.dtype, device)
        self._start_zfp("project", words, ZfpJob(words=at, out=to, numel=words.numel(), rate=rate), [words], [out])

    def _start_zfp(
        self, what: str, words: torch.Tensor, job: ZfpJob, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        if words.numel():
            grid = min(-(-words.numel() // _WORDS_OF_BLOCK), _GRID), 1
            self._launch(f"zfp_{what}", DTYPES[words.dtype], words.itemsize, grid, job, words.device, reads, writes)


def _check(words: torch.Tensor, rate: int, codes: torch.Tensor) -> None:
    """Accept words and as many codes as they have.

    Raises:
        ValueError: they have others.
    """
    arguments.choice("ZFP of", words.dtype, SUMMED)
    arguments.choice("rate", rate, RATES)
    wanted = -(-4 * rate * -(-words.numel() // 4) // 64)
    arguments.as_many("bytes of codes", codes.numel(), "words of codes", wanted, 8)
