"""Calls of the CUDA route for scaled payloads (FORMAT.md 2.10)."""

from __future__ import annotations

import abc
import ctypes

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels.cuda import arguments
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED
from ds_zipccl.kernels.cuda.launching import Family, Launching
from ds_zipccl.kernels.cuda.status import new_status, raise_failure
from ds_zipccl.kernels.lossy_protocol import ScaledCodec
from ds_zipccl.lossy import Int

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64
#: Most blocks of threads of a launch, and the groups that each takes at a time.
_GRID = 2048
_WARPS = 8
#: Kernels read and write planes by words of so many bytes.
_ALIGNED = 4


class ScaledJob(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("out", _u64), ("scales", _u64), ("codes", _u64), ("places", _u64), ("status", _u64), ("numel", _u64),
        ("integers", _u32), ("bits", _u32), ("log2", _u32), ("hadamard", _u32),
    ]  # fmt: skip


#: The kernels of csrc/cuda/lossy/scaled.cuh.
KERNELS = tuple(
    Family(f"scaled_{what}", "", ScaledJob, SUMMED, {2: 0, 4: 0}) for what in ("encode", "decode", "project")
)


class ScaledCalls(Launching):
    """The functions of :class:`ds_zipccl.kernels.LossyRoute` for scaled payloads. ``project_scaled`` does not wait for the device."""

    @abc.abstractmethod
    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None: ...

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.encode_scaled`."""
        device, job = self._device(words), _job(words, codec)
        groups, size = scales.numel(), _group_bytes(codec)
        _as_many_groups(groups, words.numel(), codec)
        arguments.as_many("bytes of codes", codes.numel(), "groups", groups, size)
        (job.words,) = arguments.addresses([words], "words", words.dtype, device)
        (job.scales,) = arguments.addresses([scales], "scales", _scale_dtype(codec), device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        all_codes = codes if codes.data_ptr() % _ALIGNED == 0 else tensors.empty(codes.numel(), torch.uint8, device)
        stays = tensors.filled(1, 0, torch.int64, device)
        job.codes, job.status = all_codes.data_ptr(), stays.data_ptr()
        self._start_scaled("encode", words.dtype, job, groups, device, [words], [scales, all_codes, stays])
        if stays.item():
            return None
        coded = int(torch.count_nonzero(scales))
        if coded < groups:  # those without codes leave gaps
            codes[: coded * size].view(coded, size).copy_(all_codes.view(groups, size)[scales != 0])
        elif all_codes is not codes:
            codes.copy_(all_codes)
        return coded

    def decode_scaled(self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_scaled`.

        Raises:
            FrameError: a code is no number.
        """
        device, job = self._device(words), _job(words, codec)
        groups = scales.numel()
        _as_many_groups(groups, words.numel(), codec)
        coded = int(torch.count_nonzero(scales))
        arguments.as_many("bytes of codes", codes.numel(), "groups with codes", coded, _group_bytes(codec))
        (job.out,) = arguments.addresses([words], "output", words.dtype, device)
        (job.scales,) = arguments.addresses([scales], "scales", _scale_dtype(codec), device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        if codes.data_ptr() % _ALIGNED:
            codes = codes.clone()
        places = None if coded == groups else torch.cumsum(scales != 0, 0)
        status = new_status(device)
        job.codes, job.status = codes.data_ptr(), status.data_ptr()
        job.places = 0 if places is None else places.data_ptr()
        reads = [scales, codes, *([] if places is None else [places])]
        self._start_scaled("decode", words.dtype, job, groups, device, reads, [words, status])
        raise_failure(status)

    def decode_scaled_add(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.decode_scaled_add`."""
        values = tensors.empty(sums.numel(), dtype, sums.device)
        self.decode_scaled(scales, codes, codec, values)
        self.add(values, sums)

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        """See :meth:`ds_zipccl.kernels.LossyRoute.project_scaled`."""
        device, job = self._device(words), _job(words, codec)
        arguments.as_many("words of output", out.numel(), "words", words.numel())
        job.words, job.out = arguments.addresses([words, out], "words or output", words.dtype, device)
        self._start_scaled("project", words.dtype, job, -(-words.numel() // codec.group), device, [words], [out])

    def _start_scaled(
        self,
        what: str,
        dtype: torch.dtype,
        job: ScaledJob,
        groups: int,
        device: torch.device,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        if groups:
            grid = min(-(-groups // _WARPS), _GRID), 1
            self._launch(f"scaled_{what}", DTYPES[dtype], dtype.itemsize, grid, job, device, reads, writes)


def _job(words: torch.Tensor, codec: ScaledCodec) -> ScaledJob:
    arguments.choice("scaled payloads of", words.dtype, SUMMED)
    bits = codec.bits if isinstance(codec, Int) else 8
    log2 = codec.group.bit_length() - 1
    return ScaledJob(
        numel=words.numel(), integers=isinstance(codec, Int), bits=bits, log2=log2, hadamard=codec.hadamard
    )


def _scale_dtype(codec: ScaledCodec) -> torch.dtype:
    return torch.int16 if isinstance(codec, Int) else torch.uint8


def _group_bytes(codec: ScaledCodec) -> int:
    """Bytes of the codes of a group."""
    return codec.group * codec.bits // 8 if isinstance(codec, Int) else codec.group


def _as_many_groups(scales: int, numel: int, codec: ScaledCodec) -> None:
    arguments.as_many("scales", scales, f"groups of {codec.group} words", -(-numel // codec.group))
