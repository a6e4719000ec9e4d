"""The calls of slot schedules on CPUs: the tables of jobs of the CUDA kernels, done by the C++ kernels.

:class:`.CudaBackend` checks the arguments of a call and makes a table of jobs; a launch here does the jobs one after the other. So the
schedules of NCCL groups run on CPUs at the speed of a CPU, with the checks, tables and frames of a GPU.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import DTYPES, HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header, pack, parse_nested
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp import backend as cpp
from ds_zipccl.kernels.cpp.interface import CODES, INTO_SUMS, INTO_WORDS, SIGNATURES, Segment
from ds_zipccl.kernels.cuda import jobs
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.protocol import raw_bound
from ds_zipccl.kernels.sums import settle_nans

#: Name of the words of a kernel -> their dtype.
_WORDS = {**{name: dtype for dtype, name in jobs.DTYPES.items()}, "u8": torch.uint8}
#: Suffix of a kernel -> the codec of its coded frames.
_CODECS = {"delta": CodecId.DELTA, "rounded": CodecId.ROUNDED}
_NO_RANK, _MOST_FRAMES = 0xFFFF, 0xFFFF


class SlotBackend(cpp.CppBackend, CudaBackend):
    """The C++ backend with the calls of :class:`.CudaBackend` of which schedules are made. Each call has done its work when it returns.

    A refused frame makes all words of its shard, or of the sum, NaN, not those of a chunk; the status has chunk 0.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        cpp.CppBackend.__init__(self, library, SIGNATURES)
        CudaBackend.__init__(self, _Launcher(self), "cpu", 1)


class _Launcher:
    """Does the jobs of a launch."""

    def __init__(self, kernels: cpp.CppBackend) -> None:
        self._kernels, self._thread = kernels, threading.local()

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """As :meth:`ds_zipccl.kernels.cuda.launchers.Launcher.launch`; blocks until the work is done."""
        names = kernel.split("_")
        words, suffix = next((_WORDS[name] for name in names if name in _WORDS), torch.uint8), names[-1]
        with torch.inference_mode(), tensors.undisturbed():
            if isinstance(params, jobs.EncodeJobs):
                self._encode(params, words, suffix)
            elif isinstance(params, jobs.DecodeJobs):
                self._decode(params, words, _CODECS.get(suffix, CodecId.EXPONENT), grid[1])
            elif isinstance(params, jobs.SumJob):
                self._sum(params, words)
            elif isinstance(params, jobs.HashJobs):
                self._hash(params)
            else:
                raise RuntimeError(f"{kernel} was not started: it has no C++ function; call that of the C++ backend")

    # --- frames

    def _encode(self, params: jobs.EncodeJobs, words: torch.dtype, code: str) -> None:
        codec = _CODECS.get(code, CodecId.EXPONENT)
        for job in params.job[: params.count]:
            raw = bool(job.raw)
            source, size = (job.words, job.numel * words.itemsize) if raw else self._payload(params, job, words, code)
            fits = size <= job.capacity
            if fits:
                ctypes.memmove(job.payload, source, size)
            elif params.overflows:
                ctypes.c_int32.from_address(params.overflows).value += 1
            if job.bytes:
                ctypes.c_uint64.from_address(job.bytes).value = size
            if job.header:
                numel, block = job.numel >> params.element_log2, 0 if raw else params.block
                kind = CodecId.RAW if raw else codec
                header = Header(kind, DTYPES[params.dtype], numel, HEADER_BYTES + size, block)
                pack(header, _bytes_at(job.header, HEADER_BYTES), overflowed=not fits)

    def _payload(self, params: jobs.EncodeJobs, job: jobs.EncodeJob, words: torch.dtype, code: str) -> tuple[int, int]:
        """Return address and bytes of a job's payload, in memory of this thread."""
        call, block = self._kernels._call, params.block
        out = self._room(_bound(job.numel, words, block))
        if code == "delta":
            return out, call("zipccl_delta_encode", job.words, job.base, job.numel, out, words, block)
        segments = (Segment * 1)(Segment(job.words, job.numel, out, 0))
        if code == "rounded":
            untrimmed = (ctypes.c_uint64 * 1)()
            call("zipccl_encode_rounded", segments, 1, words, params.mantissa, block, untrimmed)
        else:
            call("zipccl_encode", segments, 1, words, CODES[code], block)
        return out, segments[0].bytes

    def _decode(self, params: jobs.DecodeJobs, words: torch.dtype, codec: CodecId, rows: int) -> None:
        for number, job in enumerate(params.job[: params.count]):
            for row in range(rows):
                rank = row + (row >= params.skip)
                moved, apart = rank * params.rank_bytes, rank * job.stride * words.itemsize
                out, base = job.words + apart, job.base + apart if job.base else 0
                try:
                    if job.header:
                        dtype, numel = DTYPES[params.dtype], job.numel >> params.element_log2
                        payload, size, raw = _opened(job.header + moved, job.bytes, codec, dtype, params.block, numel)
                    else:
                        payload, size, raw = job.payload + moved, job.bytes, False
                    self._write(payload, size, raw, codec, params.block, out, base, job.numel, words)
                except FrameError as error:
                    ctypes.memset(out, 0xFF, job.numel * words.itemsize)
                    place = (rank if params.ranked else _NO_RANK) << 48
                    _report(params.status, place | min(params.first_frame + number, _MOST_FRAMES) << 32 | error.code)

    def _write(
        self, payload: int, size: int, raw: bool, codec: CodecId, block: int, out: int, base: int, numel: int,
        words: torch.dtype,
    ) -> None:  # fmt: skip
        """Write the words of a payload to ``out``. Raises FrameError."""
        if raw:
            ctypes.memmove(out, payload, size)
        elif codec == CodecId.DELTA:
            if numel and not base:
                raise FrameError(FrameErrorCode.CODEC, "a difference, and no base")
            if size > _bound(numel, words, block):
                raise FrameError(FrameErrorCode.SIZE, "longer than any payload of so many words")
            self._kernels._decode("zipccl_delta_decode", payload, size, base, out, numel, words, block)
        else:
            rounded = codec == CodecId.ROUNDED
            self._kernels._decode("zipccl_decode", payload, size, out, numel, words, rounded, block, INTO_WORDS)

    # --- sums and hashes

    def _sum(self, job: jobs.SumJob, words: torch.dtype) -> None:
        numel, sum_dtype = job.numel, torch.float32 if job.fp32_sums else words
        sums = _bytes_at(job.sums, numel * sum_dtype.itemsize).view(sum_dtype)
        total = tensors.empty(numel, torch.float32)
        for number in range(job.count):
            at = job.frame[0] + number * job.stride if job.stride else job.frame[number]
            try:
                if number == job.own_at:
                    self._add(job.own, numel * words.itemsize, True, job, words, total, number)
                elif job.plain:
                    self._add(at, numel * words.itemsize, True, job, words, total, number)
                else:
                    capacity = job.capacity[0 if job.stride else number]
                    opened = _opened(at, capacity, CodecId.EXPONENT, words, job.block, numel)
                    self._add(*opened, job, words, total, number)
            except FrameError as error:
                ctypes.memset(job.sums, 0xFF, sums.nbytes)
                return _report(job.status, _NO_RANK << 48 | min(number, _MOST_FRAMES) << 32 | error.code)
        sums.copy_(total)
        settle_nans(sums)

    def _add(
        self, payload: int, size: int, raw: bool, job: jobs.SumJob, words: torch.dtype, total: torch.Tensor, number: int
    ) -> None:
        """Add a summand to ``total``, float32, whose contents are undefined before the first one. Raises FrameError."""
        if not number:
            if not raw:
                room = self._room(job.numel * words.itemsize)
                self._kernels._decode(
                    "zipccl_decode", payload, size, room, job.numel, words, False, job.block, INTO_WORDS
                )
                payload = room
            total.copy_(_bytes_at(payload, job.numel * words.itemsize).view(words))
        elif raw:
            self._kernels._call("zipccl_add", payload, job.numel, total, words, words is not torch.float32)
        else:
            into = INTO_SUMS + (words is not torch.float32)
            self._kernels._decode("zipccl_decode", payload, size, total, job.numel, words, False, job.block, into)

    def _hash(self, params: jobs.HashJobs) -> None:
        for number, job in enumerate(params.job[: params.count]):
            self._kernels._call("zipccl_hash", job.data, job.bytes, params.key, params.result + 16 * number)

    def _room(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of memory of this thread, until its next call."""
        held = getattr(self._thread, "room", None)
        if held is None or held.numel() < nbytes:
            held = self._thread.room = tensors.empty(nbytes, torch.uint8)
        return int(held.data_ptr())


def _opened(
    at: int, capacity: int, codec: CodecId, dtype: torch.dtype, block: int, numel: int
) -> tuple[int, int, bool]:
    """Return address and bytes of the payload of a flat frame in a slot, and whether it is raw, by its header.

    Raises:
        FrameError: it is no raw frame, and none with ``codec``, of so many elements.
    """
    header = parse_nested(_bytes_at(at, min(capacity, HEADER_BYTES)), capacity, FrameErrorCode.RESERVED)
    raw = header.codec == CodecId.RAW
    if not raw and header.codec != codec:
        raise FrameError(FrameErrorCode.CODEC, f"codec {header.codec.name}, wanted {codec.name} or RAW")
    if header.dtype is not dtype or header.numel != numel or (not raw and header.block != block):
        raise FrameError(
            FrameErrorCode.MISMATCH, f"{header.numel} elements of {header.dtype}, wanted {numel} of {dtype}"
        )
    size = header.frame_bytes - HEADER_BYTES
    if raw and size != numel * dtype.itemsize:
        raise FrameError(FrameErrorCode.SIZE, f"a raw payload of {size} bytes, wanted {numel * dtype.itemsize}")
    return at + HEADER_BYTES, size, raw


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return memory as a tensor; the caller keeps it allocated."""
    return (
        tensors.of_buffer((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else tensors.empty(0, torch.uint8)
    )


def _report(status: int, failure: int) -> None:
    """Note a failure in a status word, which keeps the first one."""
    word = ctypes.c_uint64.from_address(status)
    word.value = min(word.value, failure)


def _bound(numel: int, words: torch.dtype, block: int) -> int:
    """Return the bytes of the largest payload."""
    return raw_bound(numel, words.itemsize, 4 if words.itemsize == 4 else 3, block)


def load() -> SlotBackend:
    """Return the backend; builds the library of the C++ backend unless the cache has it. Raises as :func:`.backend.load`."""
    cpp.load()  # proves the kernels
    return SlotBackend(ctypes.CDLL(str(build.shipped() or build.build(build.CPU))))
