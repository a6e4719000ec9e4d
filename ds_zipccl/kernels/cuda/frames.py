"""Calls of the CUDA route that take whole flat frames. No call here waits for the device or brings a word to the host."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.frame import DTYPE_IDS, HEADER_BYTES
from ds_zipccl.kernels.cuda import arguments, jobs, waves
from ds_zipccl.kernels.cuda.jobs import DTYPES, GatherTable
from ds_zipccl.kernels.cuda.launching import Launching

#: Codes of :meth:`FrameCalls.encode_frames`. A raw frame is the header and the words.
CODES = ("cascade", "wide", "raw")


class FrameCalls(Launching):
    """The calls that schedules are made of. :class:`ds_zipccl.kernels.cuda.backend.CudaRoute` has them.

    =========================  ======================================================================================
    ``encode_frames``          segments to flat frames in slots
    ``decode_frames``          flat frames in slots to tensors
    ``encode_delta_frames``    the same, against bases
    ``decode_delta_frames``
    ``encode_gather``          own shards to this rank's part of a slab
    ``decode_gather``          the slots of all ranks to the gathered parameters, in one launch
    ``decode_sum_frames``      frames, or plain words, and own words to their sum
    ``frame_sizes``            headers alone: the bytes that frames would have
    ``hash_regions``           hashes to a tensor of the device
    =========================  ======================================================================================

    None of these waits for the device or brings a word to the host. A launch takes 48 jobs; a call with more of them is several launches.

    *Dtypes.* The codes "cascade" and "wide" take those of :data:`.jobs.DTYPES`, "delta" and "raw" every dtype of a frame.
    A gather's table says the dtype; differences of any but bfloat16, float16 and float32 are those of its bytes (FORMAT.md 1.1).

    *Memory.* Segments, outputs, bases and own words start at any address of an element; slots, slabs and payloads start at multiples of 16
    bytes. Every tensor is contiguous and on one device. A wrong tensor is refused before the launch with a ValueError. Tensors that a call
    writes must not overlap each other or what the call reads, unless the call says so: this is not checked.

    *Streams.* A call puts its work on the stream that is current for the tensors' device in the calling thread, and returns. Its inputs are
    ready when earlier work of this stream is done; its outputs are ready for later work of this stream. With several streams the caller
    orders them with events.

    *Lifetime.* Work space (``16 + 8 * chunks`` bytes of zeros for an encoding launch, and 8 for each part of a chunk where chunks are cut
    as :mod:`ds_zipccl.kernels.cuda.waves` says; 24 bytes for each hash) is allocated under that
    stream and freed before the call returns. The allocator gives it to later work of the same stream alone. For a caller's tensor the
    same holds only if it was allocated under this stream. Else keep a reference until the stream of the allocation has waited for an event
    of this stream. A captured graph must keep its tensors; its replays write to the same work space, which the graph's pool keeps.

    *Refused frames.* Decoding calls take a status word from :func:`ds_zipccl.kernels.cuda.status.new_status`, in which the kernels keep the
    first failure; several calls may share it. Words or sums that a refused frame should have given are NaN (all bits set), so that no
    wrong word passes for a right one.
    """

    def _split(self, what: str, itemsize: int, chunks: int, device: torch.device) -> int:
        """Return how often the chunks of a launch are halved."""
        count = self._multiprocessors or waves.multiprocessors(device)
        return waves.split(chunks, waves.RESIDENT[what][itemsize], count)

    @abc.abstractmethod
    def _is_observed(self) -> bool:
        """Return whether an observer wants the tensors of each launch."""
        ...

    def encode_frames(
        self,
        segments: Sequence[torch.Tensor],
        code: str,
        block: int,
        slots: Sequence[torch.Tensor],
        overflows: torch.Tensor | None = None,
    ) -> None:
        """Code each segment as a flat frame into its slot (uint8, at least the header's 32 bytes, of any such size).

        A frame that does not fit leaves its header, with the overflow flag and the true ``frame_bytes``, and writes nothing outside its
        slot. ``overflows`` (int32, one element; pinned host memory or memory of the device) counts such frames.
        """
        arguments.choice("code", code, CODES)
        self._encode_slots(segments, None, code, block, slots, overflows)

    def encode_delta_frames(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor],
        block: int,
        slots: Sequence[torch.Tensor],
        overflows: torch.Tensor | None = None,
    ) -> None:
        """Code each segment against its base as :meth:`encode_frames` does."""
        self._encode_slots(segments, bases, "delta", block, slots, overflows)

    def frame_sizes(
        self,
        segments: Sequence[torch.Tensor],
        code: str,
        block: int,
        headers: torch.Tensor,
        bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Write the header of each segment's frame, as :meth:`encode_frames` would into a slot of 32 bytes, to a row of ``headers``.

        ``headers``: uint8, a row of 32 bytes for each segment. The headers have the overflow flag; :func:`frame_bytes` shows the sizes.
        Each word is read, and nothing but headers is written. ``bases`` are for the code "delta".
        """
        arguments.choice("code", code, (*CODES, "delta"))
        rows = self._segments(segments, bases, code, block)
        if not segments:
            return
        device = segments[0].device
        (at,), (size,) = arguments.slots([headers], "headers", HEADER_BYTES, device)
        arguments.as_many("bytes of headers", size, "segments", len(segments), HEADER_BYTES)
        rows["header"] = at + HEADER_BYTES * np.arange(len(segments))
        rows["payload"] = rows["header"] + HEADER_BYTES
        self._encode(rows, segments[0], code, block, None, [*segments, *(bases or ())], [headers])

    def decode_frames(
        self, slots: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], status: torch.Tensor
    ) -> None:
        """Decode the flat frame in each slot, raw or coded in blocks of ``block``, to its ``outs``.

        ``status``: int64, one element, :data:`NO_FAILURE` before; see :func:`raise_failure`.
        """
        self._decode_slots(slots, None, block, outs, status)

    def decode_delta_frames(
        self,
        slots: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor],
        block: int,
        outs: Sequence[torch.Tensor],
        status: torch.Tensor,
    ) -> None:
        """Decode frames against bases as :meth:`decode_frames` does; ``outs`` may be the bases."""
        self._decode_slots(slots, bases, block, outs, status)

    def encode_gather(
        self,
        segments: Sequence[torch.Tensor],
        code: str,
        table: GatherTable,
        part: torch.Tensor,
        overflows: torch.Tensor | None = None,
        bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Code this rank's shards, a segment for each parameter of the table, into ``part``: its part of the slab, uint8.

        Parameters that the table says are raw get raw frames, whatever the code. Other arguments and slots that are too small are as for
        :meth:`encode_frames`; ``bases`` are for the code "delta".
        """
        arguments.choice("code", code, (*CODES, "delta"))
        arguments.as_many("segments", len(segments), "parameters", table.count)
        device = self._device(segments[0])
        rows = table.encode_rows.copy()
        rows["words"] = arguments.addresses(segments, "segment", table.dtype, device)
        for number, (words, numel) in enumerate(zip(segments, table.numels, strict=True)):
            if words.numel() != numel:
                raise ValueError(
                    f"segment {number}: got {words.numel()} words, the table has {numel}; make a table for these shards"
                )
        if bases is not None:
            arguments.frames(table.numels, table.dtype.itemsize, table.block, delta=True)
        (at,), _ = arguments.slots([part], "part", table.part_bytes, device)
        rows["header"] += at
        rows["payload"] += at
        if code == "raw":
            rows["raw"] = 1
        self._against(rows, bases, code, table.dtype, device, table.numels)
        self._encode(rows, segments[0], code, table.block, overflows, [*segments, *(bases or ())], [part], table.items)

    def decode_gather(
        self,
        slab: torch.Tensor,
        table: GatherTable,
        outs: Sequence[torch.Tensor] | torch.Tensor,
        skip: int | None,
        status: torch.Tensor,
        bases: Sequence[torch.Tensor] | torch.Tensor | None = None,
    ) -> None:
        """Decode the frames of all ranks but ``skip`` to the gathered parameters, in one launch for each 48 parameters.

        Args:
            slab: uint8, the parts of all ranks in the order of the ranks.
            outs: an output for each parameter, or a single one for all; the table says where in it the shards begin.
            skip: the rank whose shards are in their places already, mostly the own one; None: no rank.
            status: as for :meth:`decode_frames`; a failure names the rank, and the parameter as the frame.
            bases: for differences, with the layout of ``outs``; may be ``outs``.
        """
        device = self._device(slab)
        if skip is not None and not 0 <= skip < table.ranks:
            raise ValueError(f"got rank {skip} to skip, the table has {table.ranks} ranks; give one of them, or None")
        (at,), _ = arguments.slots([slab], "slab", table.part_bytes * table.ranks, device)
        rows = table.decode_rows.copy()
        rows["header"] += at
        rows["payload"] += at
        rows["words"] = table.addresses(outs, "output", device)
        if bases is not None:
            arguments.frames(table.numels, table.dtype.itemsize, table.block, delta=True)
            rows["base"] = table.addresses(bases, "base", device)
        reads, writes = [slab], []
        if self._is_observed():
            # Shards of the rank to skip are neither read nor written: an encoder may read them meanwhile.
            writes = table.shards(outs, skip)
            reads += [] if bases is None else table.shards(bases, skip)
        params = jobs.DecodeJobs(
            rank_bytes=table.part_bytes, ranked=1, skip=jobs.NONE if skip is None else skip, dtype=DTYPE_IDS[table.dtype], block=table.block
        )  # fmt: skip
        ranks = table.ranks - (skip is not None)
        self._decode(rows, table.items, params, ranks, table.dtype, bases is not None, status, reads, writes)

    # --- rows of jobs

    def _segments(
        self, segments: Sequence[torch.Tensor], bases: Sequence[torch.Tensor] | None, code: str, block: int
    ) -> jobs.Rows:
        """Return rows with the words, bases and sizes of segments."""
        if not segments:
            return jobs.table(jobs.ENCODE, {}, 0)
        dtype, device = segments[0].dtype, self._device(segments[0])
        delta = code == "delta"
        arguments.choice("dtype", dtype, DTYPE_IDS)
        numels = [words.numel() for words in segments]
        arguments.frames(numels, dtype.itemsize, block, delta)
        per_element = jobs.words_of(dtype, delta or dtype not in DTYPES).per_element
        columns = {"words": arguments.addresses(segments, "segment", dtype, device), "raw": code == "raw"}
        columns["numel"] = [numel * per_element for numel in numels]
        rows = jobs.table(jobs.ENCODE, columns, len(segments))
        self._against(rows, bases, code, dtype, device, numels)
        return rows

    def _against(
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

    def _encode_slots(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        code: str,
        block: int,
        slots: Sequence[torch.Tensor],
        overflows: torch.Tensor | None,
    ) -> None:
        arguments.as_many("slots", len(slots), "segments", len(segments))
        rows = self._segments(segments, bases, code, block)
        if not segments:
            return
        at, sizes = arguments.slots(slots, "slot", HEADER_BYTES, segments[0].device)
        rows["header"] = at
        rows["payload"] = rows["header"] + HEADER_BYTES
        rows["capacity"] = np.array(sizes, np.uint64) - HEADER_BYTES
        self._encode(rows, segments[0], code, block, overflows, [*segments, *(bases or ())], slots)

    def _decode_slots(
        self,
        slots: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor] | None,
        block: int,
        outs: Sequence[torch.Tensor],
        status: torch.Tensor,
    ) -> None:
        arguments.as_many("outputs", len(outs), "slots", len(slots))
        if not slots:
            return
        dtype, device = outs[0].dtype, self._device(outs[0])
        arguments.choice("dtype", dtype, DTYPE_IDS)
        at, sizes = arguments.slots(slots, "slot", 0, device)
        numels = [words.numel() for words in outs]
        arguments.frames(numels, dtype.itemsize, block, bases is not None)
        words = jobs.words_of(dtype, bases is not None or dtype not in DTYPES)
        rows = jobs.table(
            jobs.DECODE,
            {
                # An empty slot has no address, and no header stands for a payload alone. The kernels read nothing of an empty slot.
                "header": [place or HEADER_BYTES for place in at],
                "bytes": sizes,
                "words": arguments.addresses(outs, "output", dtype, device),
                "numel": [numel * words.per_element for numel in numels],
            },
            len(slots),
        )
        rows["payload"] = rows["header"] + HEADER_BYTES
        if bases is not None:
            rows["base"] = arguments.bases(bases, numels, "output", dtype, device)
        params = jobs.DecodeJobs(block=block, dtype=DTYPE_IDS[dtype], skip=jobs.NONE)
        items = jobs.items_of(rows["numel"], block)
        self._decode(rows, items, params, 1, dtype, bases is not None, status, [*slots, *(bases or ())], outs)

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
    ) -> None:
        dtype, device = like.dtype, like.device
        counter = 0 if overflows is None else arguments.word(overflows, "overflows", torch.int32, device)
        delta = code == "delta" or dtype not in DTYPES  # whose raw frames no other kernel copies
        words = jobs.words_of(dtype, delta)
        kind = f"{words.kind}_{'delta' if delta else 'cascade' if code == 'raw' else code}"
        for _, part, chunks in jobs.launches(rows, jobs.items_of(rows["numel"], block) if items is None else items):
            split = self._split("encode", words.itemsize, chunks, device)
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
            self._launch("encode", kind, words.itemsize, (grid, 1), params, device, reads, written)

    def _decode(
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
            params.split = self._split("decode", words.itemsize, chunks * ranks, device)
            jobs.fill(params, jobs.DECODE, part)
            kind = words.kind + ("_delta" if delta else suffix)
            grid = (chunks << params.split, ranks)
            self._launch("decode", kind, words.itemsize, grid, params, device, reads, [*writes, status])


def frame_bytes(slots: torch.Tensor) -> torch.Tensor:
    """Return the ``frame_bytes`` of the headers that the rows of ``slots`` begin with, as a view: int64 on the same device.

    ``slots``: uint8, a matrix whose rows begin at multiples of 8 bytes: headers of :meth:`FrameCalls.frame_sizes`, or slots. A header with
    the overflow flag has the size that the frame would have had.
    """
    return slots[:, 24:32].view(torch.int64)[:, 0]
