"""The CUDA kernel backend: one set of kernels (csrc/cuda), started by a library of nvcc or by CuPy.

All work goes on the device's current torch stream. The calls of :class:`ds_zipccl.kernels.KernelBackend` wait for it, unless their
docstrings say that they do not. The calls that take whole frames or write hashes never wait, and never bring a word to the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.frame import CHUNK_BLOCKS, DTYPE_IDS, HEADER_BYTES
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.cuda import arguments, jobs
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED, TRIMMED, GatherTable, Parameter, frame_bytes
from ds_zipccl.kernels.cuda.launchers import Launcher
from ds_zipccl.kernels.cuda.launches import Launch, Launches, Prepared, observed
from ds_zipccl.kernels.cuda.status import NO_FAILURE, Failure, failure_of, new_status, raise_failure
from ds_zipccl.kernels.protocol import ScaledCodec, group_bytes, scale_dtype
from ds_zipccl.kernels.sums import add

__all__ = [
    "DTYPES", "NO_FAILURE", "CudaBackend", "Failure", "GatherTable", "Launch", "Launcher", "Own", "Parameter", "failure_of",
    "frame_bytes", "new_status", "raise_failure",
]  # fmt: skip
MANTISSAS = range(1, 7)
#: Most blocks of threads of a launch that hashes; each takes 8 KiB at a time.
HASH_GRID = 1024
#: Most blocks of threads of a launch on rows, or of a lossy codec, and the rows, groups, words or values that each takes at a time.
_GRID = 2048
_ROWS_OF_BLOCK = _WARPS = 8
_WORDS_OF_ROUNDING, _WORDS_OF_ZFP = 2048, 1024
#: Bytes that a lane reads of rows at a time, best first.
_UNITS = (16, 4, 2, 1)
#: Kernels read and write codes and planes by words of so many bytes.
_ALIGNED = 4


class Own(NamedTuple):
    """A summand without a header: plain words, which are the summand number ``at``."""

    words: torch.Tensor
    at: int


class CudaBackend:
    """Kernel backend for CUDA tensors; see :class:`ds_zipccl.kernels.KernelBackend` and :class:`ds_zipccl.kernels.LossyBackend`, of which
    it lacks the functions of codecs without CUDA kernels. Schedules are made of these calls:

    =========================  ======================================================================================
    ``encode_frames``          segments to flat frames in slots, also against bases
    ``decode_frames``          flat frames in slots to tensors
    ``encode_gather``          own shards to this rank's part of a staging buffer
    ``decode_gather``          the slots of all ranks to the gathered parameters, in one launch
    ``decode_sum_frames``      frames, or plain words, and own words to their sum
    ``frame_sizes``            headers alone: the bytes that frames would have
    ``hash_regions``           hashes to a tensor of the device
    =========================  ======================================================================================

    None of them waits for the device or brings a word to the host. A launch takes 48 jobs; a call with more of them is several launches.

    *Dtypes.* The codes "cascade" and "wide" take those of :data:`.jobs.DTYPES`, "delta" and "raw" every dtype of a frame.
    A gather's table says the dtype; differences of any but bfloat16, float16 and float32 are those of its bytes (FORMAT.md 1.1).

    *Memory.* Segments, outputs, bases and own words start at any address of an element; slots, staging buffers and payloads start at
    multiples of 16 bytes. Every tensor is contiguous and on one device. A wrong tensor is refused before the launch with a ValueError.
    Tensors that a call writes must not overlap each other or what the call reads, unless the call says so: this is not checked.

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

    def __init__(self, launcher: Launcher, device_type: str = "cuda", multiprocessors: int | None = None) -> None:
        self._launches = Launches(launcher, device_type, multiprocessors)

    # --- frames

    def encode_frames(
        self,
        segments: Sequence[torch.Tensor],
        code: str,
        block: int,
        slots: Sequence[torch.Tensor],
        overflows: torch.Tensor | None = None,
        bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Code each segment as a flat frame into its slot (uint8, at least the header's 32 bytes, of any such size).

        A frame that does not fit leaves its header, with the overflow flag and the true ``frame_bytes``, and writes nothing outside its
        slot. ``overflows`` (int32, one element; pinned host memory or memory of the device) counts such frames. ``bases``, one for each
        segment, are for the code "delta".
        """
        arguments.choice("code", code, arguments.CODES)
        arguments.as_many("slots", len(slots), "segments", len(segments))
        rows = self._launches.segment_rows(segments, bases, code, block)
        if not segments:
            return
        at, sizes = arguments.slots(slots, "slot", HEADER_BYTES, segments[0].device)
        rows["header"] = at
        rows["payload"] = rows["header"] + HEADER_BYTES
        rows["capacity"] = np.array(sizes, np.uint64) - HEADER_BYTES
        self._encode(rows, segments, bases, code, block, overflows, slots)

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
        arguments.choice("code", code, arguments.CODES)
        rows = self._launches.segment_rows(segments, bases, code, block)
        if not segments:
            return
        device = segments[0].device
        (at,), (size,) = arguments.slots([headers], "headers", HEADER_BYTES, device)
        arguments.as_many("bytes of headers", size, "segments", len(segments), HEADER_BYTES)
        rows["header"] = at + HEADER_BYTES * np.arange(len(segments))
        rows["payload"] = rows["header"] + HEADER_BYTES
        self._encode(rows, segments, bases, code, block, None, [headers])

    def _encode(
        self, rows: jobs.Rows, segments: Sequence[torch.Tensor], bases: Sequence[torch.Tensor] | None, code: str, block: int,
        overflows: torch.Tensor | None, writes: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        dtype, device = segments[0].dtype, segments[0].device
        launches = self._launches.encoders(rows, dtype, code, block, device)
        self._launches.encode(launches, device, overflows, [*segments, *(bases or ())], writes)

    def decode_frames(
        self,
        slots: Sequence[torch.Tensor],
        block: int,
        outs: Sequence[torch.Tensor],
        status: torch.Tensor,
        bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Decode the flat frame in each slot, raw or coded in blocks of ``block``, to its ``outs``.

        ``status``: int64, one element, :data:`NO_FAILURE` before; see :func:`raise_failure`. ``bases``: of frames with the code "delta",
        one for each; ``outs`` may be the bases.
        """
        arguments.as_many("outputs", len(outs), "slots", len(slots))
        if not slots:
            return
        dtype, device = outs[0].dtype, self._launches.device(outs[0])
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
        launches = self._launches.decoders(rows, dtype, block, bases is not None, device)
        self._launches.decode(launches, device, status, [*slots, *(bases or ())], outs)

    def encode_gather(
        self,
        segments: Sequence[torch.Tensor] | torch.Tensor,
        code: str,
        table: GatherTable,
        part: torch.Tensor,
        overflows: torch.Tensor | None = None,
        bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Code this rank's shards into ``part``: its part of the staging buffer, uint8. ``segments``: one for each parameter of the table,
        or a single tensor for all, in which the table says where a shard begins.

        Parameters that the table says are raw get raw frames, whatever the code. Other arguments and slots that are too small are as for
        :meth:`encode_frames`; ``bases`` are for the code "delta".
        """
        arguments.choice("code", code, arguments.CODES)
        device = self._launches.device(part)
        words = table.shard(segments, "segment", device)
        (at,), _ = arguments.slots([part], "part", table.part_bytes, device)
        if bases is not None:
            arguments.frames(table.numels, table.dtype.itemsize, table.block, delta=True)
        raw, key, layout = code == "raw" or table.layout.raw, ("encode", code, self._launches, device), table.layout
        last = self._launches.bases(bases, code, raw, table.dtype, device, table.numels)
        launches = layout.take(key)
        if not launches:
            rows = layout.encode_rows.copy()
            rows["raw"] |= code == "raw"
            launches = self._launches.encoders(rows, table.dtype, code, table.block, device, layout.items)
        for one in launches:
            columns, its = one.columns, one.part
            columns["words"][:], columns["capacity"][:] = words[its], table.rooms[its]
            np.add(table.slots[its], at, out=columns["header"])
            np.add(columns["header"], HEADER_BYTES, out=columns["payload"])
            if last is not None:
                columns["base"][:] = last[its]
        reads = [segments] if isinstance(segments, torch.Tensor) else segments
        self._launches.encode(launches, device, overflows, [*reads, *(bases or ())], [part])
        layout.give(key, launches)

    def decode_gather(
        self,
        staging: torch.Tensor,
        table: GatherTable,
        outs: Sequence[torch.Tensor] | torch.Tensor,
        skip: int | None,
        status: torch.Tensor,
        bases: Sequence[torch.Tensor] | torch.Tensor | None = None,
    ) -> None:
        """Decode the frames of all ranks but ``skip`` to the gathered parameters, in one launch for each 48 parameters.

        Args:
            staging: uint8, the parts of all ranks in the order of the ranks.
            outs: an output for each parameter, or a single one for all; the table says where in it the shards begin.
            skip: the rank whose shards are in their places already, mostly the own one; None: no rank.
            status: as for :meth:`decode_frames`; a failure names the rank, and the parameter as the frame.
            bases: for differences, with the layout of ``outs``; may be ``outs``.
        """
        device = self._launches.device(staging)
        if skip is not None and not 0 <= skip < table.ranks:
            raise ValueError(f"got rank {skip} to skip, the table has {table.ranks} ranks; give one of them, or None")
        (at,), _ = arguments.slots([staging], "staging", table.part_bytes * table.ranks, device)
        words, base = table.addresses(outs, "output", device), None
        if bases is not None:
            arguments.frames(table.numels, table.dtype.itemsize, table.block, delta=True)
            base = table.addresses(bases, "base", device)
        reads, writes = [staging], []
        if observed():
            # Shards of the rank to skip are neither read nor written: an encoder may read them meanwhile.
            writes = table.shards(outs, skip)
            reads += [] if bases is None else table.shards(bases, skip)
        key, layout = ("decode", skip, base is not None, self._launches, device), table.layout
        launches = layout.take(key)
        if not launches:
            launches = self._launches.decoders(
                layout.decode_rows.copy(), table.dtype, table.block, base is not None, device, table.ranks - (skip is not None),
                layout.items, ranked=1, skip=jobs.NONE if skip is None else skip,
            )  # fmt: skip
        for one in launches:
            columns, its = one.columns, one.part
            one.params.rank_bytes = table.part_bytes
            columns["words"][:], columns["bytes"][:] = words[its], table.sizes[its]
            np.add(table.slots[its], at, out=columns["header"])
            np.add(columns["header"], HEADER_BYTES, out=columns["payload"])
            if base is not None:
                columns["base"][:] = base[its]
        self._launches.decode(launches, device, status, reads, writes)
        layout.give(key, launches)

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
        numel, device = sums.numel(), self._launches.device(sums)
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
            job.split = self._launches.split("decode_sum", dtype.itemsize, chunks, device)
            grid = (chunks << job.split, 1)
            launch = Prepared("decode_sum", DTYPES[dtype], dtype.itemsize, grid, job)
            self._launches.start(launch, device, reads, [sums, status])

    def hash_regions(self, regions: Sequence[torch.Tensor], out: torch.Tensor, key: tuple[int, int] = (0, 0)) -> None:
        """Write both halves of each region's hash (FORMAT.md section 5) to ``out``: int64, two elements for each region."""
        if not regions:
            return
        device = self._launches.device(regions[0])
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
            self._launches.start(Prepared("hash", "", 1, (grid, 1), params, part), device, regions, [out, work])

    # --- payloads; these calls wait for the device

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        return self._launches.encode_payloads(segments, None, code, block, outs)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._launches.encode_payloads([words], [base], "delta", block, [out])[0]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        self._write_or_add(words, adds, partial(self._launches.decode_payload, payload, None, block))

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._launches.decode_payload(payload, [base], block, words)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        add(words, sums)

    def _write_or_add(
        self, words: torch.Tensor, adds: torch.dtype | None, decode: Callable[[torch.Tensor], None]
    ) -> None:
        """Let ``decode`` write ``words``, or add the words of ``adds`` that it writes to them."""
        values = words if adds is None else tensors.empty(words.numel(), adds, words.device)
        decode(values)
        if values is not words:
            self.add(values, words)

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        halves = tensors.empty(2, torch.int64, data.device)
        self.hash_regions([data], halves, key)
        first, second = (half & (1 << 64) - 1 for half in halves.tolist())
        return first, second

    # --- rows; these calls wait for the device where they return a number

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        """Here an entry of the table is the first of some equal rows, plus one."""
        device, count, slots = self._launches.device(data), sources.numel(), table.numel()
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
            self._start("find_rows", job, None, count, _ROWS_OF_BLOCK, [data], [sources, table, repeats])
        return int(repeats.item())

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Does not wait."""
        sums = tensors.empty(2 * rows.numel(), torch.float64, words.device)
        (numbers,) = arguments.addresses([rows], "rows", torch.int32, self._launches.device(words))
        arguments.as_many("rows", rows.numel(), "sources", sources.numel())
        self._pairs("row_sums", words, width, sources, sums, [rows], rows=numbers)
        ab, aa = sums.view(-1, 2).unbind(1)
        factors = (ab / aa).to(torch.float32)
        usable = factors.isfinite() & (factors.abs() >= torch.finfo(torch.float32).tiny)
        return factors.masked_fill(~usable, 0.0)

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Does not wait."""
        device = self._launches.device(words)
        (numbers,) = arguments.addresses([factors], "factors", torch.float32, device)
        arguments.addresses([out], "output", words.dtype, device)
        arguments.as_many("factors", factors.numel(), "sources", sources.numel())
        arguments.as_many("words of predictions", out.numel(), "sources", sources.numel(), width)
        self._pairs("predict_rows", words, width, sources, out, [factors], factors=numbers)

    def encode_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, code: str, block: int, out: torch.Tensor,
        mantissa: int = 0,
    ) -> int:  # fmt: skip
        """The literals are copied to one place, because the kernels take words side by side."""
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        row_moves.gather(words, width, head, rows, literals)
        if mantissa:
            return self.encode_rounded([literals], mantissa, block, [out])[0][0]
        return self.encode([literals], code, block, [out])[0]

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor,
        rounded: bool = False,
    ) -> None:  # fmt: skip
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        (self.decode_rounded if rounded else self.decode)(payload, block, literals)
        row_moves.spread(literals, words, width, head, rows)

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Does not wait."""
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
        device = self._launches.device(words)
        (at,) = arguments.addresses([words], "words", words.dtype, device)
        (places,) = arguments.addresses([sources], "sources", torch.int32, device)
        if width < 1:
            raise ValueError(f"got rows of {width} words, wanted at least 1; give the width of a row")
        count = sources.numel()
        job = jobs.RowPairs(words=at, width=width, sources=places, out=out.data_ptr(), count=count, **numbers)
        self._start(what, job, words.dtype, count, _ROWS_OF_BLOCK, [words, sources, *more], [out])

    def _start(
        self,
        what: str,
        job: ctypes.Structure,
        dtype: torch.dtype | None,
        count: int,
        each: int,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Launch a kernel on ``count`` rows, groups or words, of which a block of threads takes ``each`` at a time; none: no launch."""
        if count:
            kind, itemsize = ("", 1) if dtype is None else (DTYPES[dtype], dtype.itemsize)
            grid = min(-(-count // each), _GRID), 1
            self._launches.start(Prepared(what, kind, itemsize, grid, job), reads[0].device, reads, writes)

    def _project(
        self,
        what: str,
        job: jobs.RoundJob | jobs.ScaledJob | jobs.ZfpJob,
        count: int,
        each: int,
        words: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch a kernel that writes a word to ``out`` for each of ``words``."""
        arguments.as_many("words of output", out.numel(), "words", words.numel())
        device = self._launches.device(words)
        job.words, job.out = arguments.addresses([words, out], "words or output", words.dtype, device)
        self._start(what, job, words.dtype, count, each, [words], [out])

    # --- rounded words and payloads (FORMAT.md 2.9)

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        arguments.choice("words of", words.dtype, SUMMED)
        arguments.choice("mantissa", mantissa, MANTISSAS)
        job = jobs.RoundJob(numel=words.numel(), mantissa=mantissa)
        self._project("round", job, words.numel(), _WORDS_OF_ROUNDING, words, out)

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        """Sizes without trims are read off the payloads."""
        arguments.choice("words of", segments[0].dtype, SUMMED)
        arguments.choice("mantissa", mantissa, MANTISSAS)
        count, dtype = len(segments), segments[0].dtype
        sizes = tensors.filled(2 * count, 0, torch.int64, segments[0].device)
        rows, places = self._launches.payload_rows(segments, None, "rounded", block, outs, sizes)
        launches = self._launches.encoders(rows, dtype, "rounded", block, segments[0].device, mantissa=mantissa)
        self._launches.encode(launches, segments[0].device, None, segments, [*places, sizes])
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
        table = jobs.table(jobs.UNTRIMMED, columns, len(rows))
        for _, part, chunks in jobs.launches(table, jobs.items_of(table["numel"], block)):
            params = jobs.UntrimmedJobs(block=block)
            grid = -(-chunks // _WARPS), 1
            launch = Prepared("untrimmed", DTYPES[like.dtype], like.itemsize, grid, params, part)
            self._launches.start(launch, like.device, places, [sizes])

    def decode_rounded(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None
    ) -> None:
        arguments.choice("rounded payloads of", adds or words.dtype, TRIMMED)
        decode = partial(self._launches.decode_payload, payload, None, block, suffix="_rounded")
        self._write_or_add(words, adds, decode)

    # --- scaled payloads (FORMAT.md 2.10)

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        device, job = self._launches.device(words), jobs.scaled_job(words, codec)
        groups, size = scales.numel(), group_bytes(codec)
        jobs.as_many_groups(groups, words.numel(), codec)
        arguments.as_many("bytes of codes", codes.numel(), "groups", groups, size)
        (job.words,) = arguments.addresses([words], "words", words.dtype, device)
        (job.scales,) = arguments.addresses([scales], "scales", scale_dtype(codec), device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        all_codes = codes if codes.data_ptr() % _ALIGNED == 0 else tensors.empty(codes.numel(), torch.uint8, device)
        stays = tensors.filled(1, 0, torch.int64, device)
        job.codes, job.status = all_codes.data_ptr(), stays.data_ptr()
        self._start("scaled_encode", job, words.dtype, groups, _WARPS, [words], [scales, all_codes, stays])
        if stays.item():
            return None
        coded = int(torch.count_nonzero(scales))
        if coded < groups:  # those without codes leave gaps
            codes[: coded * size].view(coded, size).copy_(all_codes.view(groups, size)[scales != 0])
        elif all_codes is not codes:
            codes.copy_(all_codes)
        return coded

    def decode_scaled(
        self,
        scales: torch.Tensor,
        codes: torch.Tensor,
        codec: ScaledCodec,
        words: torch.Tensor,
        adds: torch.dtype | None = None,
    ) -> None:
        """Raises:
        FrameError: a code is no number.
        """
        self._write_or_add(words, adds, partial(self._decode_scaled, scales, codes, codec))

    def _decode_scaled(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor
    ) -> None:
        device, job = self._launches.device(words), jobs.scaled_job(words, codec)
        groups = scales.numel()
        jobs.as_many_groups(groups, words.numel(), codec)
        coded = int(torch.count_nonzero(scales))
        arguments.as_many("bytes of codes", codes.numel(), "groups with codes", coded, group_bytes(codec))
        (job.out,) = arguments.addresses([words], "output", words.dtype, device)
        (job.scales,) = arguments.addresses([scales], "scales", scale_dtype(codec), device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        if codes.data_ptr() % _ALIGNED:
            codes = codes.clone()
        places = None if coded == groups else torch.cumsum(scales != 0, 0)
        status = new_status(device)
        job.codes, job.status = codes.data_ptr(), status.data_ptr()
        job.places = 0 if places is None else places.data_ptr()
        reads = [scales, codes, *([] if places is None else [places])]
        self._start("scaled_decode", job, words.dtype, groups, _WARPS, reads, [words, status])
        raise_failure(status)

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        groups = -(-words.numel() // codec.group)
        self._project("scaled_project", jobs.scaled_job(words, codec), groups, _WARPS, words, out)

    # --- ZFP (FORMAT.md 2.11)

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        device = self._launches.device(words)
        jobs.check_zfp(words, rate, codes)
        (at,) = arguments.addresses([words], "words", words.dtype, device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        place = codes if codes.data_ptr() % _ALIGNED == 0 else tensors.empty(codes.numel(), torch.uint8, device)
        infinite = tensors.filled(1, 0, torch.int64, device)
        job = jobs.ZfpJob(words=at, codes=place.data_ptr(), status=infinite.data_ptr(), numel=words.numel(), rate=rate)
        self._start("zfp_encode", job, words.dtype, words.numel(), _WORDS_OF_ZFP, [words], [place, infinite])
        if place is not codes:
            codes.copy_(place)
        return not infinite.item()

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        self._write_or_add(words, adds, partial(self._decode_zfp, codes, rate))

    def _decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        device = self._launches.device(words)
        jobs.check_zfp(words, rate, codes)
        (out,) = arguments.addresses([words], "output", words.dtype, device)
        arguments.addresses([codes], "codes", torch.uint8, device)
        if codes.data_ptr() % _ALIGNED:
            codes = codes.clone()
        job = jobs.ZfpJob(out=out, codes=codes.data_ptr(), numel=words.numel(), rate=rate)
        self._start("zfp_decode", job, words.dtype, words.numel(), _WORDS_OF_ZFP, [codes], [words])

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        arguments.choice("ZFP of", words.dtype, SUMMED)
        arguments.choice("rate", rate, jobs.ZFP_RATES)
        job = jobs.ZfpJob(numel=words.numel(), rate=rate)
        self._project("zfp_project", job, words.numel(), _WORDS_OF_ZFP, words, out)
