"""The CUDA routes: one set of kernels (csrc/cuda), started by a launcher over a library of nvcc or a module of NVRTC.

All work goes on the device's current torch stream. The calls of :class:`ds_zipccl.kernels.Route` wait for it; the calls that take
whole frames (``*_frames``) never wait.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ds_zipccl import devices, tensors
from ds_zipccl.frame import CHUNK_BLOCKS, DTYPE_IDS, HEADER_BYTES, FrameError
from ds_zipccl.kernels.sums import add

#: Jobs of one launch: kMaxJobs, kMaxDecodeJobs and kMaxFrames of the kernels.
MAX_JOBS = 48
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip
#: kernel -> itemsize -> bytes of shared memory; cuda/kernels.cuh asserts that they suffice.
SHARED_BYTES = {
    "encode": {1: 30720, 2: 47104, 4: 79872},
    "decode": {1: 25088, 2: 33280, 4: 49664},
    "decode_sum": {2: 50176, 4: 66560},
    "hash": {1: 0},
}
#: Most blocks of threads that hash; each takes 8 KiB at a time.
HASH_GRID = 1024
#: Content of a status word before a failure.
NO_FAILURE = -1

_u32, _u64, _ptr = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _EncodeJob(ctypes.Structure):
    _fields_ = [
        ("words", _ptr), ("base", _ptr), ("payload", _ptr), ("header", _ptr), ("bytes", _ptr),
        ("numel", _u64), ("capacity", _u64), ("first_item", _u64),
    ]  # fmt: skip


class _EncodeJobs(ctypes.Structure):
    _fields_ = [
        ("job", _EncodeJob * MAX_JOBS), ("count", _u32), ("block", _u32), ("dtype", _u32),
        ("ticket", _ptr), ("places", _ptr), ("overflows", _ptr),
    ]  # fmt: skip


class _DecodeJob(ctypes.Structure):
    _fields_ = [
        ("payload", _ptr), ("header", _ptr), ("bytes", _u64), ("words", _ptr), ("base", _ptr),
        ("numel", _u64), ("first_item", _u64),
    ]  # fmt: skip


class _DecodeJobs(ctypes.Structure):
    _fields_ = [
        ("job", _DecodeJob * MAX_JOBS), ("count", _u32), ("block", _u32), ("dtype", _u32), ("status", _ptr),
    ]  # fmt: skip


class _SumJob(ctypes.Structure):
    _fields_ = [
        ("frame", _ptr * MAX_JOBS), ("capacity", _u64 * MAX_JOBS), ("count", _u32), ("block", _u32), ("dtype", _u32),
        ("fp32_sums", _u32), ("add", _u32), ("sums", _ptr), ("numel", _u64), ("status", _ptr),
    ]  # fmt: skip


class _HashJob(ctypes.Structure):
    _fields_ = [("data", _ptr), ("bytes", _u64), ("sums", _ptr), ("ticket", _ptr)]


class Launcher(Protocol):
    """Starts a kernel of csrc/cuda/kernels.cuh by name."""

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        """Put ``grid`` blocks of 256 threads with ``params`` on ``stream`` of the current device; does not wait.

        Raises:
            RuntimeError: the driver refused.
        """
        ...


class CudaRoute:
    """Route for CUDA tensors; see :class:`ds_zipccl.kernels.Route`.

    Segments start at any address of an element, frames and payloads at multiples of 16 bytes. Work space is one allocation of torch
    per call, of ``16 + 8 * chunks`` bytes.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    # --- payloads; these calls wait for the device

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        return self._encode_payloads(segments, None, code, block, outs)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._encode_payloads([words], base, "delta", block, [out])[0]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._decode_payload(payload, None, block, words)

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._decode_payload(payload, base, block, words)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype, sums.device)
        self.decode(payload, block, values)
        self.add(values, sums)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        add(words, sums)

    def region_hash(self, data: torch.Tensor) -> tuple[int, int]:
        work = tensors.filled(3, 0, torch.int64, data.device)
        job = _HashJob(data.data_ptr(), data.numel(), work.data_ptr(), work.data_ptr() + 16)
        grid = max(1, min(HASH_GRID, -(-data.numel() // 8192)))
        self._launch("hash", "", 1, grid, job, data.device)
        first, second, _ = (int(half) & (1 << 64) - 1 for half in work.tolist())
        return first, second

    # --- whole flat frames; these calls do not wait

    def encode_frames(
        self,
        segments: Sequence[torch.Tensor],
        code: str,
        block: int,
        slots: Sequence[torch.Tensor],
        overflows: torch.Tensor | None = None,
    ) -> None:
        """Code each segment as a flat frame into its slot (uint8, at least the header's 32 bytes, of any such size).

        A frame that does not fit leaves its header, with the overflow flag, and writes nothing outside its slot. ``overflows``
        (int32, one element; pinned host memory or memory of the device) counts such frames.
        """
        jobs = []
        for words, slot in zip(segments, slots, strict=True):
            at = _aligned(slot)
            room = slot.numel() - HEADER_BYTES
            if room < 0:
                raise ValueError(f"a slot holds at least the {HEADER_BYTES} bytes of a header, got {slot.numel()}")
            jobs.append(_EncodeJob(words.data_ptr(), None, at + HEADER_BYTES, at, None, words.numel(), room, 0))
        self._encode(jobs, segments[0], code, block, overflows)

    def decode_frames(
        self, slots: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], status: torch.Tensor
    ) -> None:
        """Decode the flat frame in each slot, raw or coded in blocks of ``block``, to its ``outs``.

        ``status``: int64, one element, :data:`NO_FAILURE` before; see :func:`raise_failure`. The words of a refused frame are
        undefined.
        """
        jobs = [
            _DecodeJob(
                _aligned(slot) + HEADER_BYTES, slot.data_ptr(), slot.numel(), words.data_ptr(), None, words.numel(), 0
            )
            for slot, words in zip(slots, outs, strict=True)
        ]
        self._decode(jobs, outs[0], block, status)

    def decode_sum_frames(
        self,
        slots: Sequence[torch.Tensor],
        block: int,
        dtype: torch.dtype,
        sums: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Decode flat frames of ``dtype``, add their words in fp32 in this order, and write each sum once to ``sums``, which has
        ``dtype`` (rounded) or float32. Other arguments as for :meth:`decode_frames`."""
        fp32_sums = sums.dtype != dtype
        # The sums of several launches stay floats until the last launch.
        whole = sums if fp32_sums or len(slots) <= MAX_JOBS else tensors.empty(sums.numel(), torch.float32, sums.device)
        for at in range(0, len(slots), MAX_JOBS):
            part = slots[at : at + MAX_JOBS]
            job = _SumJob(
                (_ptr * MAX_JOBS)(*map(_aligned, part)), (_u64 * MAX_JOBS)(*(slot.numel() for slot in part)), len(part),
                block, DTYPE_IDS[dtype], whole.dtype != dtype, at > 0, whole.data_ptr(), sums.numel(), status.data_ptr(),
            )  # fmt: skip
            grid = -(-sums.numel() // (block * CHUNK_BLOCKS))
            if grid:
                self._launch("decode_sum", DTYPES[dtype], dtype.itemsize, grid, job, sums.device)
        if whole is not sums:
            sums.copy_(whole)

    # --- launches

    def _encode_payloads(
        self,
        segments: Sequence[torch.Tensor],
        base: torch.Tensor | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
    ) -> list[int]:
        sizes = tensors.empty(len(segments), torch.int64, segments[0].device)
        places = [
            out if out.data_ptr() % 16 == 0 else tensors.empty(out.numel(), out.dtype, out.device) for out in outs
        ]
        jobs = [
            _EncodeJob(
                words.data_ptr(), None if base is None else base.data_ptr(), out.data_ptr(), None,
                sizes.data_ptr() + 8 * i, words.numel(), out.numel(), 0,
            )
            for i, (words, out) in enumerate(zip(segments, places, strict=True))
        ]  # fmt: skip
        self._encode(jobs, segments[0], code, block, None)
        result: list[int] = sizes.tolist()
        for place, out, size in zip(places, outs, result, strict=True):
            if size > out.numel():
                raise ValueError(f"a payload of {size} bytes does not fit in {out.numel()}; use compress_bound()")
            if place is not out:
                out[:size].copy_(place[:size])
        return result

    def _decode_payload(
        self, payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor
    ) -> None:
        if payload.data_ptr() % 16:
            payload = payload.clone()
        status = new_status(words.device)
        place = None if base is None else base.data_ptr()
        job = _DecodeJob(payload.data_ptr(), None, payload.numel(), words.data_ptr(), place, words.numel(), 0)
        self._decode([job], words, block, status, "" if base is None else "_delta")
        raise_failure(status)

    def _encode(
        self, jobs: list[_EncodeJob], like: torch.Tensor, code: str, block: int, overflows: torch.Tensor | None
    ) -> None:
        for part, items in _launches(jobs, block):
            work = tensors.filled(2 + items, 0, torch.int64, like.device)
            params = _EncodeJobs(
                (_EncodeJob * MAX_JOBS)(*part), len(part), block, DTYPE_IDS[like.dtype], work.data_ptr(), work.data_ptr() + 16,
                None if overflows is None else overflows.data_ptr(),
            )  # fmt: skip
            self._launch("encode", f"{DTYPES[like.dtype]}_{code}", like.itemsize, items, params, like.device)

    def _decode(
        self, jobs: list[_DecodeJob], like: torch.Tensor, block: int, status: torch.Tensor, code: str = ""
    ) -> None:
        for part, items in _launches(jobs, block):
            params = _DecodeJobs(
                (_DecodeJob * MAX_JOBS)(*part), len(part), block, DTYPE_IDS[like.dtype], status.data_ptr()
            )
            self._launch("decode", DTYPES[like.dtype] + code, like.itemsize, items, params, like.device)

    def _launch(
        self, what: str, kind: str, itemsize: int, grid: int, params: ctypes.Structure, device: torch.device
    ) -> None:
        with _current(device) as stream:
            self._launcher.launch(
                "_".join(filter(None, ("zipccl", what, kind))), grid, SHARED_BYTES[what][itemsize], params, stream
            )


def new_status(device: torch.device) -> torch.Tensor:
    """Return a status word for the ``*_frames`` calls."""
    return tensors.filled(1, NO_FAILURE, torch.int64, device)


def raise_failure(status: torch.Tensor) -> None:
    """Raise the failure that the kernels wrote to ``status``; waits for the device.

    Raises:
        FrameError: a frame was refused.
    """
    value = int(status.item())
    if value != NO_FAILURE:
        number, chunk, code = value >> 48, value >> 8 & (1 << 40) - 1, value & 255
        raise FrameError(code, f"frame {number} of the call is wrong, in chunk {chunk}")


def _launches(jobs: list[Any], block: int) -> Iterator[tuple[list[Any], int]]:
    """Give each launch its jobs, with the first item of each, and its number of items."""
    for at in range(0, len(jobs), MAX_JOBS):
        part = jobs[at : at + MAX_JOBS]
        items = 0
        for job in part:
            job.first_item = items
            items += max(1, -(-job.numel // (block * CHUNK_BLOCKS)))
        yield part, items


def _aligned(slot: torch.Tensor) -> int:
    if slot.data_ptr() % 16:
        raise ValueError(f"frames start at multiples of 16 bytes, got address {slot.data_ptr():#x}")
    return slot.data_ptr()


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int]:
    """Make the device current and give its current stream."""
    runtime = devices.runtime(device)
    if runtime is None:  # the tests' emulation
        yield 0
        return
    with runtime.device(device):
        yield runtime.current_stream(device).cuda_stream
