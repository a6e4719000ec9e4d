"""The CUDA routes: one set of kernels (csrc/cuda), started by a launcher over a library of nvcc or functions of CuPy.

All work goes on the device's current torch stream. The calls of :class:`ds_zipccl.kernels.Route` wait for it. The calls that take whole
frames or write hashes never wait, and never bring a word to the host.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ds_zipccl import devices, tensors
from ds_zipccl.frame import CHUNK_BLOCKS, DTYPE_IDS
from ds_zipccl.kernels.cuda import arguments, jobs, lossy
from ds_zipccl.kernels.cuda.frames import FrameCalls, frame_bytes
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED, GatherTable, Parameter
from ds_zipccl.kernels.cuda.lossy import LossyCalls
from ds_zipccl.kernels.cuda.rows import RowCalls
from ds_zipccl.kernels.cuda.status import NO_FAILURE, Failure, failure_of, new_status, raise_failure
from ds_zipccl.kernels.sums import add

__all__ = [
    "DTYPES", "NO_FAILURE", "CudaRoute", "Failure", "FrameCalls", "GatherTable", "Launch", "Launcher", "Own", "Parameter", "failure_of",
    "frame_bytes", "new_status", "raise_failure",
]  # fmt: skip
#: kernel -> itemsize -> bytes of shared memory; cuda/kernels.cuh asserts that they suffice.
SHARED_BYTES: dict[str, Mapping[int, int]] = {
    "encode": {1: 30720, 2: 47104, 4: 79872},
    "decode": {1: 25088, 2: 33280, 4: 49664},
    "decode_sum": {2: 50176, 4: 66560},
    "hash": {1: 0},
    "find_rows": {1: 0},
    "row_sums": {2: 0, 4: 0},
    "predict_rows": {2: 0, 4: 0},
    **{family.what: family.shared_bytes for family in lossy.KERNELS if family.shared_bytes is not None},
}
#: kernel -> threads of a block: kThreads of cuda/warp.cuh.
THREADS = dict.fromkeys(SHARED_BYTES, 256)
#: Most blocks of threads that hash; each takes 8 KiB at a time.
HASH_GRID = 1024


@dataclass(frozen=True)
class Kernel:
    """The facts that a launcher needs of a kernel."""

    #: Threads of a block.
    threads: int
    #: Most bytes of shared memory of a launch.
    shared_bytes: int
    #: The struct that is its parameter. A launch with zeros does nothing.
    params: type[ctypes.Structure]


def _kernels() -> Iterator[tuple[str, Kernel]]:
    of_a_kind: list[tuple[str, str, type[ctypes.Structure]]] = [
        ("encode", "_cascade", jobs.EncodeJobs), ("encode", "_wide", jobs.EncodeJobs), ("decode", "", jobs.DecodeJobs),
        ("encode", "_delta", jobs.EncodeJobs), ("decode", "_delta", jobs.DecodeJobs), ("decode_sum", "", jobs.SumJob),
        ("row_sums", "", jobs.RowPairs), ("predict_rows", "", jobs.RowPairs),
    ]  # fmt: skip
    for dtype, kind in DTYPES.items():
        for what, suffix, params in of_a_kind if dtype.itemsize > 1 else of_a_kind[:3]:
            yield f"zipccl_{what}_{kind}{suffix}", Kernel(THREADS[what], SHARED_BYTES[what][dtype.itemsize], params)
    for what, suffix, params in of_a_kind[3:5]:
        yield f"zipccl_{what}_u8{suffix}", Kernel(THREADS[what], SHARED_BYTES[what][1], params)
    for what, params in (("hash", jobs.HashJobs), ("find_rows", jobs.FindRows)):
        yield f"zipccl_{what}", Kernel(THREADS[what], SHARED_BYTES[what][1], params)
    for family in lossy.KERNELS:
        for dtype in family.dtypes:
            name, shared_bytes = (
                f"zipccl_{family.what}_{DTYPES[dtype]}{family.suffix}",
                SHARED_BYTES[family.what][dtype.itemsize],
            )
            yield name, Kernel(THREADS[family.what], shared_bytes, family.params)


#: Every kernel of csrc/cuda/kernels.cuh.
KERNELS = dict(_kernels())


class Launcher(Protocol):
    """Starts a kernel of :data:`KERNELS` by name."""

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Put a grid of ``grid[0]`` times ``grid[1]`` blocks of the kernel's threads on ``stream`` of the current device; does not wait.

        ``params`` is read before this call returns, and may be written over afterwards. The memory that it names stays allocated by the
        rules of a stream alone: the caller may free a tensor at once, because only later work of the same stream gets its memory.

        Raises:
            RuntimeError: the driver refused.
        """
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch, as the observer is told of it."""

    kernel: str
    device: torch.device
    #: The number of the stream, ``cuda_stream`` in torch; 0 for a device without streams.
    stream: int
    #: Tensors that the kernel reads alone.
    reads: Sequence[torch.Tensor]
    #: Tensors that the kernel writes, or reads and writes; temporaries of the call are among them.
    writes: Sequence[torch.Tensor]


#: Called by the launching thread just before each launch, so that a detector of races sees launches that do not go through torch.
observer: Callable[[Launch], None] | None = None


class Own(NamedTuple):
    """A summand without a header: plain words, which are the summand number ``at``."""

    words: torch.Tensor
    at: int


class CudaRoute(FrameCalls, RowCalls, LossyCalls):
    """Route for CUDA tensors; see :class:`ds_zipccl.kernels.Route`. :class:`FrameCalls` has its calls for whole frames, and the rules of
    memory, streams and lifetime; :class:`RowCalls` those for rows, :class:`LossyCalls` those of lossy codecs.

    ``multiprocessors``: their number; None: that of the tensors' device.
    """

    def __init__(self, launcher: Launcher, device_type: str = "cuda", multiprocessors: int | None = None) -> None:
        super().__init__(device_type, multiprocessors)
        self._launcher = launcher

    # --- payloads; these calls wait for the device

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        return self._encode_payloads(segments, None, code, block, outs)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._encode_payloads([words], [base], "delta", block, [out])[0]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._decode_payload(payload, None, block, words)

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._decode_payload(payload, [base], block, words)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype, sums.device)
        self.decode(payload, block, values)
        self.add(values, sums)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        add(words, sums)

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        halves = tensors.empty(2, torch.int64, data.device)
        self.hash_regions([data], halves, key)
        first, second = (half & (1 << 64) - 1 for half in halves.tolist())
        return first, second

    def decode_sum_frames(
        self,
        slots: Sequence[torch.Tensor] | torch.Tensor,
        block: int,
        dtype: torch.dtype,
        sums: torch.Tensor,
        status: torch.Tensor,
        own: Own | None = None,
    ) -> None:
        """Add summands in fp32, in their order, and write each sum once to ``sums``, which has ``dtype`` (rounded) or float32.

        The order is that of the summands: ``((x[0] + x[1]) + x[2]) + ...``. The sum of one summand is that summand. A NaN sum of bfloat16
        is 0x7fc0, whatever the summands. One launch adds any number of summands.

        Args:
            slots: flat frames of ``dtype``, as for :meth:`decode_frames`: up to 48 slots anywhere; or a matrix of uint8 whose rows are
                slots, any number of them, at a regular distance (a multiple of 16 bytes). A matrix of ``dtype`` has plain words
                in its rows.
            own: one summand as plain words of ``dtype``, which may be ``sums``. With a list of slots it comes before slot ``own.at``. In a
                matrix it stands for row ``own.at``, which is not read.
        """
        arguments.choice("sums of", dtype, SUMMED)
        arguments.choice("sums in", sums.dtype, (dtype, torch.float32))
        numel, device = sums.numel(), self._device(sums)
        arguments.frames([numel], dtype.itemsize, block)
        (out,) = arguments.addresses([sums], "sums", sums.dtype, device)
        job = jobs.SumJob(
            sums=out, numel=numel, status=arguments.word(status, "status", torch.int64, device), block=block, dtype=DTYPE_IDS[dtype],
            fp32_sums=sums.dtype != dtype, own_at=jobs.NONE,
        )  # fmt: skip
        if isinstance(slots, torch.Tensor):
            jobs.regular_summands(job, slots, dtype, device)
            reads = [slots]
        else:
            jobs.listed_summands(job, slots, None if own is None else own.at, device)
            reads = list(slots)
        if own is not None:
            (job.own,) = arguments.addresses([own.words], "own words", dtype, device)
            arguments.as_many("own words", own.words.numel(), "sums", numel)
            if not 0 <= own.at < job.count:
                raise ValueError(
                    f"got {own.at} as the place of the own words, there are {job.count} summands; give a place among them"
                )
            job.own_at = own.at
            reads.append(own.words)
        if not job.count:
            raise ValueError("got no summand; give slots, or own words")
        if numel:
            chunks = -(-numel // (block * CHUNK_BLOCKS))
            job.split = self._split("decode_sum", dtype.itemsize, chunks, device)
            grid = (chunks << job.split, 1)
            self._launch("decode_sum", DTYPES[dtype], dtype.itemsize, grid, job, device, reads, [sums, status])

    def hash_regions(self, regions: Sequence[torch.Tensor], out: torch.Tensor, key: tuple[int, int] = (0, 0)) -> None:
        """Write both halves of each region's hash (FORMAT.md section 5) to ``out``: int64, two elements for each region."""
        if not regions:
            return
        device = self._device(regions[0])
        arguments.as_many("elements of hashes", out.numel(), "regions", len(regions), 2)
        (result,) = arguments.addresses([out], "hashes", torch.int64, device)
        rows = jobs.table(
            jobs.HASH,
            {
                "data": arguments.addresses(regions, "region", None, device),
                "bytes": [region.numel() * region.itemsize for region in regions],
            },
            len(regions),
        )
        items = np.clip((rows["bytes"] + 8191) // 8192, 1, HASH_GRID)
        rows["items"] = items
        for first, part, grid in jobs.launches(rows, items):
            work = tensors.filled(3 * len(part), 0, torch.int64, device)
            params = jobs.HashJobs(work=work.data_ptr(), result=result + 16 * first, key=key)
            jobs.fill(params, jobs.HASH, part)
            self._launch("hash", "", 1, (grid, 1), params, device, regions, [out, work])

    def _encode_payloads(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
    ) -> list[int]:
        sizes = tensors.empty(len(segments), torch.int64, segments[0].device)
        rows, places = self._payload_rows(segments, bases, code, block, outs, sizes)
        self._encode(rows, segments[0], code, block, None, [*segments, *(bases or ())], [*places, sizes])
        result: list[int] = sizes.tolist()
        arguments.return_payloads(places, outs, result)
        return result

    def _payload_rows(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
        sizes: torch.Tensor,
    ) -> tuple[jobs.Rows, list[torch.Tensor]]:
        """Return rows for payloads of segments, and where they are written: ``outs``, or memory that is aligned. ``sizes``: for theirs."""
        rows = self._segments(segments, bases, code, block)
        places = [
            out if out.data_ptr() % 16 == 0 else tensors.empty(out.numel(), out.dtype, out.device) for out in outs
        ]
        rows["payload"], rows["capacity"] = arguments.slots(places, "payload", 0, segments[0].device)
        rows["bytes"] = sizes.data_ptr() + 8 * np.arange(len(segments), dtype=np.uint64)
        return rows, places

    def _decode_payload(
        self,
        payload: torch.Tensor,
        bases: Sequence[torch.Tensor] | None,
        block: int,
        words: torch.Tensor,
        suffix: str = "",
    ) -> None:
        if payload.data_ptr() % 16:
            payload = payload.clone()
        status, device = new_status(words.device), self._device(words)
        arguments.frames([words.numel()], words.itemsize, block)
        rows = jobs.table(
            jobs.DECODE,
            {
                "payload": arguments.addresses([payload], "payload", torch.uint8, device),
                "bytes": payload.numel(),
                "words": arguments.addresses([words], "output", words.dtype, device),
                "base": 0 if bases is None else arguments.addresses(bases, "base", words.dtype, device),
                "numel": words.numel() * jobs.words_of(words.dtype, bases is not None).per_element,
            },
            1,
        )
        params = jobs.DecodeJobs(block=block, dtype=DTYPE_IDS[words.dtype], skip=jobs.NONE)
        items = jobs.items_of(rows["numel"], block)
        reads = [payload, *(bases or ())]
        self._decode(rows, items, params, 1, words.dtype, bases is not None, status, reads, [words], suffix)
        raise_failure(status)

    def _is_observed(self) -> bool:
        return observer is not None

    def _launch(
        self,
        what: str,
        kind: str,
        itemsize: int,
        grid: tuple[int, int],
        params: ctypes.Structure,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        kernel = "_".join(filter(None, ("zipccl", what, kind)))
        with _current(device) as stream:
            if observer is not None:
                observer(Launch(kernel, device, stream, reads, writes))
            self._launcher.launch(kernel, grid, SHARED_BYTES[what][itemsize], params, stream)


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int]:
    """Make the device current and give its current stream."""
    runtime = devices.runtime(device)
    if runtime is None:  # the tests' emulation
        yield 0
        return
    with runtime.device(device):
        yield runtime.current_stream(device).cuda_stream
