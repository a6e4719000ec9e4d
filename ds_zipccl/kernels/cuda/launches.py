"""Launches of the CUDA kernels: tables of jobs cut into launches, on the device's current torch stream."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds_zipccl import devices, tensors
from ds_zipccl.frame import DTYPE_IDS
from ds_zipccl.kernels.cuda import arguments, jobs, waves
from ds_zipccl.kernels.cuda.interface import SHARED_BYTES
from ds_zipccl.kernels.cuda.jobs import DTYPES
from ds_zipccl.kernels.cuda.launchers import Launcher
from ds_zipccl.kernels.cuda.status import new_status, raise_failure


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


def observed() -> bool:
    """Return whether the observer wants the tensors of each launch."""
    return observer is not None


class Launches:
    """Puts kernels with their parameters on the stream of a device.

    Args:
        launcher: starts a kernel by name.
        device_type: of tensors.
        multiprocessors: of the device, None: ask it.
    """

    def __init__(self, launcher: Launcher, device_type: str, multiprocessors: int | None) -> None:
        self._launcher, self._device_type, self._multiprocessors = launcher, device_type, multiprocessors

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of ``tensor``, which must be one of this backend."""
        device = tensor.device
        if device.type != self._device_type:
            raise ValueError(
                f"got {arguments.describe(tensor)}, these kernels work on {self._device_type} tensors; copy it there with .to()"
            )
        return device

    def split(self, what: str, itemsize: int, chunks: int, device: torch.device) -> int:
        """Return how often the chunks of a launch are halved."""
        count = self._multiprocessors or waves.multiprocessors(device)
        return waves.split(chunks, waves.RESIDENT[what][itemsize], count)

    def launch(
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

    def segment_rows(
        self, segments: Sequence[torch.Tensor], bases: Sequence[torch.Tensor] | None, code: str, block: int
    ) -> jobs.Rows:
        """Return rows with the words, bases and sizes of segments."""
        if not segments:
            return jobs.table(jobs.ENCODE, {}, 0)
        dtype, device = segments[0].dtype, self.device(segments[0])
        delta = code == "delta"
        arguments.choice("dtype", dtype, DTYPE_IDS)
        numels = [words.numel() for words in segments]
        arguments.frames(numels, dtype.itemsize, block, delta)
        per_element = jobs.words_of(dtype, delta or dtype not in DTYPES).per_element
        columns = {"words": arguments.addresses(segments, "segment", dtype, device), "raw": code == "raw"}
        columns["numel"] = [numel * per_element for numel in numels]
        rows = jobs.table(jobs.ENCODE, columns, len(segments))
        self.put_bases(rows, bases, code, dtype, device, numels)
        return rows

    def put_bases(
        self,
        rows: jobs.Rows,
        bases: Sequence[torch.Tensor] | None,
        code: str,
        dtype: torch.dtype,
        device: torch.device,
        numels: Sequence[int],
    ) -> None:
        """Put the addresses of bases into the rows."""
        if (bases is not None) != (code == "delta"):
            raise ValueError(
                f"got {'no ' if bases is None else ''}bases for code {code}; bases belong to the code delta"
            )
        if bases is not None:
            rows["base"] = arguments.bases(bases, numels, "segment", dtype, device)
        elif not rows["raw"].all():
            arguments.choice("dtype", dtype, DTYPES)

    def encode(
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
    ) -> None:
        dtype, device = like.dtype, like.device
        counter = 0 if overflows is None else arguments.word(overflows, "overflows", torch.int32, device)
        delta = code == "delta" or dtype not in DTYPES  # whose raw frames no other kernel copies
        words = jobs.words_of(dtype, delta)
        kind = f"{words.kind}_{'delta' if delta else 'cascade' if code == 'raw' else code}"
        for _, part, chunks in jobs.launches(rows, jobs.items_of(rows["numel"], block) if items is None else items):
            split = self.split("encode", words.itemsize, chunks, device)
            grid = chunks << split
            work = tensors.filled(2 + chunks + (grid if split else 0), 0, torch.int64, device)
            ticket, places = work.data_ptr(), work.data_ptr() + 16
            sizes = places + 8 * chunks if split else 0
            params = jobs.EncodeJobs(
                block=block, dtype=DTYPE_IDS[dtype], split=split, element_log2=words.element_log2, ticket=ticket, places=places,
                sizes=sizes, overflows=counter, mantissa=mantissa,
            )  # fmt: skip
            jobs.fill(params, jobs.ENCODE, part)
            written = [*writes, work] if overflows is None else [*writes, work, overflows]
            self.launch("encode", kind, words.itemsize, (grid, 1), params, device, reads, written)

    def decode(
        self,
        rows: jobs.Rows,
        items: jobs.Rows,
        params: jobs.DecodeJobs,
        ranks: int,
        dtype: torch.dtype,
        delta: bool,
        status: torch.Tensor,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        suffix: str = "",
    ) -> None:
        device = reads[0].device
        params.status = arguments.word(status, "status", torch.int64, device)
        if not ranks:
            return
        delta = delta or dtype not in DTYPES
        words = jobs.words_of(dtype, delta)
        params.element_log2 = words.element_log2
        for first, part, chunks in jobs.launches(rows, items):
            params.first_frame = first
            params.split = self.split("decode", words.itemsize, chunks * ranks, device)
            jobs.fill(params, jobs.DECODE, part)
            kind = words.kind + ("_delta" if delta else suffix)
            grid = (chunks << params.split, ranks)
            self.launch("decode", kind, words.itemsize, grid, params, device, reads, [*writes, status])

    def encode_payloads(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
    ) -> list[int]:
        sizes = tensors.empty(len(segments), torch.int64, segments[0].device)
        rows, places = self.payload_rows(segments, bases, code, block, outs, sizes)
        self.encode(rows, segments[0], code, block, None, [*segments, *(bases or ())], [*places, sizes])
        result: list[int] = sizes.tolist()
        arguments.return_payloads(places, outs, result)
        return result

    def payload_rows(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        outs: Sequence[torch.Tensor],
        sizes: torch.Tensor,
    ) -> tuple[jobs.Rows, list[torch.Tensor]]:
        """Return rows for payloads of segments, and where they are written: ``outs``, or memory that is aligned. ``sizes``: for theirs."""
        rows = self.segment_rows(segments, bases, code, block)
        places = [
            out if out.data_ptr() % 16 == 0 else tensors.empty(out.numel(), out.dtype, out.device) for out in outs
        ]
        rows["payload"], rows["capacity"] = arguments.slots(places, "payload", 0, segments[0].device)
        rows["bytes"] = sizes.data_ptr() + 8 * np.arange(len(segments), dtype=np.uint64)
        return rows, places

    def decode_payload(
        self,
        payload: torch.Tensor,
        bases: Sequence[torch.Tensor] | None,
        block: int,
        words: torch.Tensor,
        suffix: str = "",
    ) -> None:
        if payload.data_ptr() % 16:
            payload = payload.clone()
        status, device = new_status(words.device), self.device(words)
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
        self.decode(rows, items, params, 1, words.dtype, bases is not None, status, reads, [words], suffix)
        raise_failure(status)


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int]:
    """Make the device current and give its current stream."""
    runtime = devices.runtime(device)
    if runtime is None:  # the tests' emulation
        yield 0
        return
    with runtime.device(device):
        yield runtime.current_stream(device).cuda_stream
