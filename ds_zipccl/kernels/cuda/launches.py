"""Launches of the CUDA kernels: tables of jobs cut into launches, on the device's current torch stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

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
_NOTHING = nullcontext()


def observed() -> bool:
    """Return whether the observer wants the tensors of each launch."""
    return observer is not None


class Prepared:
    """A launch of which addresses and sizes of slots may still be missing. It may be started again when these were written over.

    ``first``: the number of its first job. ``rows``: its jobs, memory of ``params``; ``columns``: each field of them by name.
    """

    def __init__(
        self,
        what: str,
        kind: str,
        itemsize: int,
        grid: tuple[int, int],
        params: Any,
        rows: jobs.Rows | None = None,
        first: int = 0,
    ) -> None:
        self.kernel, self.shared = "_".join(filter(None, ("zipccl", what, kind))), SHARED_BYTES[what][itemsize]
        self.grid, self.params, self.first = grid, params, first
        if rows is not None:
            filled = jobs.fill(params, rows)
            self.part = slice(first, first + len(rows))
            self.columns = {name: filled[name] for name in rows.dtype.names or ()}


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

    def start(
        self,
        launch: Prepared,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Put a launch on the device's current stream."""
        runtime = devices.runtime(device)
        with _NOTHING if runtime is None else runtime.device(device):
            stream = 0 if runtime is None else runtime.current_stream(device).cuda_stream  # 0: the tests' emulation
            if observer is not None:
                observer(Launch(launch.kernel, device, stream, reads, writes))
            self._launcher.launch(launch.kernel, launch.grid, launch.shared, launch.params, stream)

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
        last = self.bases(bases, code, code == "raw", dtype, device, numels)
        if last is not None:
            rows["base"] = last
        return rows

    def bases(
        self,
        bases: Sequence[torch.Tensor] | None,
        code: str,
        raw: bool,
        dtype: torch.dtype,
        device: torch.device,
        numels: Sequence[int],
    ) -> list[int] | None:
        """Return the addresses of bases, None for a code without them. ``raw``: all frames are."""
        if (bases is not None) != (code == "delta"):
            raise ValueError(
                f"got {'no ' if bases is None else ''}bases for code {code}; bases belong to the code delta"
            )
        if bases is not None:
            return arguments.bases(bases, numels, "segment", dtype, device)
        if not raw:
            arguments.choice("dtype", dtype, DTYPES)
        return None

    def encoders(
        self,
        rows: jobs.Rows,
        dtype: torch.dtype,
        code: str,
        block: int,
        device: torch.device,
        items: jobs.Rows | None = None,
        mantissa: int = 0,
    ) -> list[Prepared]:
        """Return the launches that encode the jobs of a table. ``items``: of each job, None: see :func:`.jobs.items_of`."""
        delta = code == "delta" or dtype not in DTYPES  # whose raw frames no other kernel copies
        words = jobs.words_of(dtype, delta)
        kind, found = f"{words.kind}_{'delta' if delta else 'cascade' if code == 'raw' else code}", []
        for first, part, chunks in jobs.launches(rows, jobs.items_of(rows["numel"], block) if items is None else items):
            split = self.split("encode", words.itemsize, chunks, device)
            params = jobs.EncodeJobs(
                block=block, dtype=DTYPE_IDS[dtype], split=split, element_log2=words.element_log2, mantissa=mantissa
            )
            found.append(Prepared("encode", kind, words.itemsize, (chunks << split, 1), params, part, first))
        return found

    def encode(
        self,
        launches: Sequence[Prepared],
        device: torch.device,
        overflows: torch.Tensor | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Start launches of :meth:`encoders`."""
        counter = 0 if overflows is None else arguments.word(overflows, "overflows", torch.int32, device)
        for one in launches:
            (grid, _), params = one.grid, one.params
            chunks = grid >> params.split
            work = tensors.filled(2 + chunks + (grid if params.split else 0), 0, torch.int64, device)
            params.ticket, params.places, params.overflows = work.data_ptr(), work.data_ptr() + 16, counter
            params.sizes = params.places + 8 * chunks if params.split else 0
            written = [*writes, work] if overflows is None else [*writes, work, overflows]
            self.start(one, device, reads, written)

    def decoders(
        self,
        rows: jobs.Rows,
        dtype: torch.dtype,
        block: int,
        delta: bool,
        device: torch.device,
        ranks: int = 1,
        items: jobs.Rows | None = None,
        suffix: str = "",
        **more: int,
    ) -> list[Prepared]:
        """Return the launches that decode the jobs of a table, of so many ranks each. ``items``: as for :meth:`encoders`. ``more``: further
        fields of :class:`.jobs.DecodeJobs`."""
        delta = delta or dtype not in DTYPES
        words = jobs.words_of(dtype, delta)
        kind, found = words.kind + ("_delta" if delta else suffix), []
        items = jobs.items_of(rows["numel"], block) if items is None else items
        for first, part, chunks in jobs.launches(rows, items) if ranks else ():
            split = self.split("decode", words.itemsize, chunks * ranks, device)
            params = jobs.DecodeJobs(
                block=block, dtype=DTYPE_IDS[dtype], split=split, element_log2=words.element_log2, first_frame=first,
                **{"skip": jobs.NONE, **more},
            )  # fmt: skip
            found.append(Prepared("decode", kind, words.itemsize, (chunks << split, ranks), params, part, first))
        return found

    def decode(
        self,
        launches: Sequence[Prepared],
        device: torch.device,
        status: torch.Tensor,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Start launches of :meth:`decoders`."""
        report = arguments.word(status, "status", torch.int64, device)
        for one in launches:
            one.params.status = report
            self.start(one, device, reads, [*writes, status])

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
        self.encode(
            self.encoders(rows, segments[0].dtype, code, block, segments[0].device), segments[0].device, None,
            [*segments, *(bases or ())], [*places, sizes],
        )  # fmt: skip
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
        launches = self.decoders(rows, words.dtype, block, bases is not None, device, suffix=suffix)
        self.decode(launches, device, status, [payload, *(bases or ())], [words])
        raise_failure(status)
