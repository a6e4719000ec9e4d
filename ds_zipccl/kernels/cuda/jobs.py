"""Parameters of the CUDA kernels: the structs of csrc/cuda, tables of jobs, and the table of a gather.

A table is a numpy array with a row for each job, filled a column at a time: a ctypes object for each job would take longer than the launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_zipccl.frame import CHUNK_BLOCKS, DELTA_WORDS, DTYPE_IDS, HEADER_BYTES
from ds_zipccl.kernels.cuda import arguments
from ds_zipccl.kernels.protocol import ScaledCodec
from ds_zipccl.lossy import Int

DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip
#: The dtypes whose frames kernels add.
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
#: The dtypes with rounded payloads: exponent payloads of float32 have trims already.
TRIMMED = (torch.bfloat16, torch.float16)
ZFP_RATES = range(3, 33)
#: Jobs of one launch: kMaxJobs and kMaxFrames of the kernels.
MAX_JOBS = 48
#: Ranks of one call: a row of the grid for each, and 16 bits in a status word.
MAX_RANKS = 65535
#: kNone of the kernels.
NONE = 0xFFFFFFFF

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64
#: Rows of a table.
Rows = npt.NDArray[Any]


class EncodeJob(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("base", _u64), ("payload", _u64), ("header", _u64), ("bytes", _u64),
        ("numel", _u64), ("capacity", _u64), ("first_item", _u32), ("raw", _u32),
    ]  # fmt: skip


class EncodeJobs(ctypes.Structure):
    _fields_ = [
        ("job", EncodeJob * MAX_JOBS), ("count", _u32), ("block", _u32), ("dtype", _u32), ("split", _u32),
        ("element_log2", _u32), ("mantissa", _u32), ("ticket", _u64), ("places", _u64), ("sizes", _u64), ("overflows", _u64),
    ]  # fmt: skip


class DecodeJob(ctypes.Structure):
    _fields_ = [
        ("payload", _u64), ("header", _u64), ("bytes", _u64), ("words", _u64), ("base", _u64),
        ("numel", _u64), ("stride", _u64), ("first_item", _u32), ("unused", _u32),
    ]  # fmt: skip


class DecodeJobs(ctypes.Structure):
    _fields_ = [
        ("job", DecodeJob * MAX_JOBS), ("rank_bytes", _u64), ("status", _u64), ("count", _u32), ("block", _u32),
        ("dtype", _u32), ("split", _u32), ("first_frame", _u32), ("ranked", _u32), ("skip", _u32), ("element_log2", _u32),
    ]  # fmt: skip


class SumJob(ctypes.Structure):
    _fields_ = [
        ("frame", _u64 * MAX_JOBS), ("capacity", _u64 * MAX_JOBS), ("stride", _u64), ("own", _u64), ("sums", _u64),
        ("numel", _u64), ("status", _u64), ("count", _u32), ("block", _u32), ("dtype", _u32), ("own_at", _u32),
        ("plain", _u32), ("fp32_sums", _u32), ("split", _u32),
    ]  # fmt: skip


class HashJob(ctypes.Structure):
    _fields_ = [("data", _u64), ("bytes", _u64), ("first_item", _u32), ("items", _u32)]


class HashJobs(ctypes.Structure):
    _fields_ = [("job", HashJob * MAX_JOBS), ("work", _u64), ("result", _u64), ("key", _u64 * 2), ("count", _u32)]


class FindRows(ctypes.Structure):
    _fields_ = [
        ("data", _u64), ("row_bytes", _u64), ("sources", _u64), ("table", _u64), ("repeats", _u64), ("first", _u32), ("count", _u32),
        ("mask", _u32), ("unit", _u32), ("naming", _u32),
    ]  # fmt: skip


class RowPairs(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("width", _u64), ("rows", _u64), ("sources", _u64), ("factors", _u64), ("out", _u64), ("count", _u32),
    ]  # fmt: skip


class RoundJob(ctypes.Structure):
    _fields_ = [("words", _u64), ("out", _u64), ("numel", _u64), ("mantissa", _u32)]


class UntrimmedJob(ctypes.Structure):
    _fields_ = [
        ("payload", _u64), ("bytes", _u64), ("untrimmed", _u64), ("numel", _u64), ("capacity", _u64), ("first_item", _u32),
        ("unused", _u32),
    ]  # fmt: skip


class UntrimmedJobs(ctypes.Structure):
    _fields_ = [("job", UntrimmedJob * MAX_JOBS), ("count", _u32), ("block", _u32)]


class ScaledJob(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("out", _u64), ("scales", _u64), ("codes", _u64), ("places", _u64), ("status", _u64), ("numel", _u64),
        ("integers", _u32), ("bits", _u32), ("log2", _u32), ("hadamard", _u32),
    ]  # fmt: skip


class ZfpJob(ctypes.Structure):
    _fields_ = [
        ("words", _u64), ("out", _u64), ("codes", _u64), ("status", _u64), ("numel", _u64), ("rate", _u32),
    ]  # fmt: skip


#: Rows of the tables, as numpy sees the jobs.
ENCODE, DECODE, HASH, UNTRIMMED = map(np.dtype, (EncodeJob, DecodeJob, HashJob, UntrimmedJob))


class Words(NamedTuple):
    """The words of a tensor, as a kernel takes them."""

    #: Their name in the kernel's name.
    kind: str
    itemsize: int
    #: Words of an element: a power of two.
    per_element: int

    @property
    def element_log2(self) -> int:
        return self.per_element.bit_length() - 1


def words_of(dtype: torch.dtype, delta: bool) -> Words:
    """Return the words of frames of a dtype. ``delta``: of frames against a base, or of raw frames of a dtype that is not coded without."""
    if dtype in DELTA_WORDS or not delta:
        return Words(DTYPES[dtype], dtype.itemsize, 1)
    return Words("u8", 1, dtype.itemsize)


def table(kind: np.dtype[Any], columns: dict[str, Any], count: int) -> Rows:
    """Return ``count`` rows with these columns, and zeros in the other columns."""
    rows = np.zeros(count, kind)
    for name, values in columns.items():
        rows[name] = values
    return rows


def items_of(numel: Rows, block: int) -> Rows:
    """Return the work items of each frame: its chunks, or one for a frame without words."""
    chunk = block * CHUNK_BLOCKS
    return np.maximum((numel + (chunk - 1)) // chunk, 1)  # type: ignore[no-any-return]


def launches(rows: Rows, items: Rows) -> Iterator[tuple[int, Rows, int]]:
    """Give each launch the number of its first job, its jobs with their first items, and its number of items."""
    for at in range(0, len(rows), MAX_JOBS):
        part, counts = rows[at : at + MAX_JOBS], items[at : at + MAX_JOBS]
        ends = np.cumsum(counts)
        part["first_item"] = ends - counts
        yield at, part, int(ends[-1])


def fill(params: Any, rows: Rows) -> Rows:
    """Copy rows into the jobs of a struct of parameters, and set their count. Return the rows there, which keep the struct alive."""
    there = np.frombuffer(params, rows.dtype, len(rows))
    there[:] = rows
    params.count = len(rows)
    return there


class Parameter(NamedTuple):
    """One of the tensors that a gather collects from every rank; sizes in words but for the slot."""

    #: Words of a rank's shard.
    numel: int
    #: Bytes of its slot in each rank's part of the staging buffer: a multiple of 16, at least the header's 32.
    slot_bytes: int
    #: Words from the shard of a rank to that of the next rank in the output; None: ``numel``.
    stride: int | None = None
    #: First word of rank 0's shard in the output.
    start: int = 0
    #: Its frames are raw: the encoder copies the words.
    raw: bool = False


class GatherLayout:
    """What is the same in all gathers of ``parameters``, each without the bytes of its slot, over ``ranks``. Kept by programs, which repeat
    their gathers with other sizes: see :func:`layout_of`. ``launches``: those that no call uses, by what they do.

    Raises:
        ValueError: a size is impossible; the message names the parameter.
    """

    def __init__(
        self, parameters: Sequence[tuple[int, int | None, int, bool]], dtype: torch.dtype, block: int, ranks: int
    ) -> None:
        arguments.choice("dtype", dtype, DTYPE_IDS)
        arguments.frames([numel for numel, *_ in parameters], dtype.itemsize, block)
        per_element = words_of(dtype, delta=dtype not in DTYPES).per_element
        self.numels, self.needs, starts = [], [], []
        #: Elements from a rank's shard to that of the next rank, for each parameter.
        self.strides: list[int] = []
        for number, (numel, stride, start, _) in enumerate(parameters):
            apart = numel if stride is None else stride
            if numel < 0 or start < 0 or (apart < numel and ranks > 1):
                raise ValueError(
                    f"parameter {number}: got {numel} words from word {start} on, {apart} from rank to rank; shards must not overlap"
                )
            self.numels.append(numel)
            self.strides.append(apart)
            starts.append(start * dtype.itemsize)
            self.needs.append(start + (ranks - 1) * apart + numel)
        #: Elements that a single output for all has at least, and a single shard.
        self.need, self.ends = max(self.needs), max(start + numel for numel, _, start, _ in parameters)
        numels = np.array(self.numels, np.uint64) * np.uint64(per_element)
        strides = np.array(self.strides, np.uint64) * np.uint64(per_element)
        raw = [raw for *_, raw in parameters]
        self.raw = all(raw)
        self.starts: Rows = np.array(starts, np.uint64)
        self.items = items_of(numels, block)
        self.encode_rows = table(ENCODE, {"numel": numels, "raw": raw}, len(parameters))
        self.decode_rows = table(DECODE, {"numel": numels, "stride": strides}, len(parameters))
        for rows in (self.encode_rows, self.decode_rows, self.items, self.starts):
            rows.setflags(write=False)
        self._launches: dict[Hashable, list[Any]] = {}

    def take(self, kind: Hashable) -> Any:
        """Take launches that no other thread may use meanwhile, of which addresses are missing; None where there are none."""
        try:
            return self._launches.setdefault(kind, []).pop()
        except IndexError:
            return None

    def give(self, kind: Hashable, launches: Any) -> None:
        """Give launches back, for later calls."""
        self._launches[kind].append(launches)


#: Layouts of gathers (limit: more than a model has; each keeps some KiB of launches).
layout_of = functools.lru_cache(maxsize=4096)(GatherLayout)


class GatherTable:
    """The layout of a gather of ``parameters`` over ``ranks``, for :meth:`CudaBackend.encode_gather` and ``decode_gather``.

    The staging buffer is the parts of all ranks, in the order of the ranks. A part is the slots of the parameters, in their order,
    without gaps. A table is never written to after it is made: keep it as long as the sizes of slots hold, and use it from any thread.

    Raises:
        ValueError: a size is impossible; the message names the parameter.
    """

    def __init__(self, parameters: Sequence[Parameter], dtype: torch.dtype, block: int, ranks: int) -> None:
        if not parameters or not 1 <= ranks <= MAX_RANKS:
            raise ValueError(
                f"a gather has parameters and 1 to {MAX_RANKS} ranks; got {len(parameters)} parameters, {ranks} ranks"
            )
        self.dtype, self.block, self.ranks, self.count = dtype, block, ranks, len(parameters)
        found = [parameter.slot_bytes for parameter in parameters]
        for number, slot_bytes in enumerate(found):
            if slot_bytes % 16 or slot_bytes < HEADER_BYTES:
                raise ValueError(
                    f"slot of parameter {number}: got {slot_bytes} bytes, wanted a multiple of 16, at least {HEADER_BYTES}; round up"
                )
        self.layout = layout_of(tuple((one[0], *one[2:]) for one in parameters), dtype, block, ranks)
        self.numels, self.needs = self.layout.numels, self.layout.needs
        #: Bytes of the slots, and where they begin in a rank's part of the staging buffer.
        self.sizes: Rows = np.array(found, np.uint64)
        ends = np.cumsum(self.sizes, dtype=np.uint64)
        self.slots: Rows = ends - self.sizes
        self.rooms: Rows = self.sizes - np.uint64(HEADER_BYTES)
        #: Bytes of a rank's part of the staging buffer.
        self.part_bytes = int(ends[-1])

    def addresses(self, outs: Sequence[torch.Tensor] | torch.Tensor, name: str, device: torch.device) -> Rows:
        """Return the address of rank 0's shard of each parameter, in an output for each or in a single one for all.

        Raises:
            ValueError: an output is no contiguous tensor of the device and the table's dtype, or is too short.
        """
        found = [outs] if isinstance(outs, torch.Tensor) else outs
        needs = [self.layout.need] if isinstance(outs, torch.Tensor) else self.needs
        arguments.as_many(f"{name}s", len(found), "parameters", len(needs))
        places = arguments.addresses(found, name, self.dtype, device)
        for number, (out, need) in enumerate(zip(found, needs, strict=True)):
            if out.numel() < need:
                raise ValueError(
                    f"{name} {number}: got {out.numel()} words, the shards of {self.ranks} ranks end at word {need}; make it longer"
                )
        return np.array(places, np.uint64) + self.layout.starts

    def shard(self, own: Sequence[torch.Tensor] | torch.Tensor, name: str, device: torch.device) -> Rows:
        """Return the address of each parameter's words of one rank: tensors of their own, or a single one for all.

        Raises:
            ValueError: as for :meth:`addresses`, or a tensor has other words.
        """
        if isinstance(own, torch.Tensor):
            (at,), ends = arguments.addresses([own], name, self.dtype, device), self.layout.ends
            if own.numel() < ends:
                raise ValueError(f"{name}s: got {own.numel()} words, the last one ends at word {ends}; make it longer")
            return np.add(self.layout.starts, at, dtype=np.uint64)
        arguments.as_many(f"{name}s", len(own), "parameters", self.count)
        places = arguments.addresses(own, name, self.dtype, device)
        for number, (words, numel) in enumerate(zip(own, self.numels, strict=True)):
            if words.numel() != numel:
                raise ValueError(
                    f"{name} {number}: got {words.numel()} words, the table has {numel}; make a table for these shards"
                )
        return np.array(places, np.uint64)

    def shards(self, outs: Sequence[torch.Tensor] | torch.Tensor, skip: int | None) -> list[torch.Tensor]:
        """Return a view of the shard of each rank but ``skip`` of each parameter, in outputs as for :meth:`addresses`."""
        found = [outs] * self.count if isinstance(outs, torch.Tensor) else outs
        ranks = [rank for rank in range(self.ranks) if rank != skip]
        rows = zip(
            found,
            self.numels,
            map(int, self.layout.starts // self.dtype.itemsize),
            self.layout.strides,
            strict=True,
        )
        return [out.view(-1)[start + rank * stride :][:numel] for out, numel, start, stride in rows for rank in ranks]


def regular_summands(job: SumJob, matrix: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Put the rows of a matrix into the parameters of a sum: frames, or plain words of ``dtype``.

    Raises:
        ValueError: the matrix is something else.
    """
    plain = matrix.dtype is dtype
    unit = matrix.itemsize if plain else 16
    regular = matrix.dim() == 2 and matrix.shape[0] > 0 and matrix.shape[1] > 0 and matrix.stride(1) == 1
    apart = matrix.stride(0) * matrix.itemsize if regular else 0
    if (
        not regular or matrix.device != device or not (plain or matrix.dtype is torch.uint8) or matrix.data_ptr() % unit
        or (matrix.shape[0] > 1 and (apart % unit or apart < matrix.shape[1] * matrix.itemsize))
    ):  # fmt: skip
        raise ValueError(
            f"summands: got {arguments.describe(matrix)}, wanted a matrix on {device} of uint8 with rows at multiples of 16 bytes, or of "
            f"{dtype}, whose rows do not overlap; cut it out of one staging buffer"
        )
    if plain:
        arguments.as_many("words in a row", matrix.shape[1], "sums", job.numel)
    job.count, job.plain, job.stride = matrix.shape[0], plain, max(apart, unit)
    job.frame[0], job.capacity[0] = matrix.data_ptr(), matrix.shape[1] * matrix.itemsize


def listed_summands(job: SumJob, slots: Sequence[torch.Tensor], own_at: int | None, device: torch.device) -> None:
    """Put slots that lie anywhere, and a gap for the own words, into the parameters of a sum.

    Raises:
        ValueError: there are too many of them, or a slot is wrong.
    """
    found, sizes = arguments.slots(slots, "slot", 0, device)
    if own_at is not None:
        found.insert(own_at, 0)
        sizes.insert(own_at, 0)
    if len(found) > MAX_JOBS:
        raise ValueError(
            f"got {len(found)} summands in a list, at most {MAX_JOBS}; put the slots into one staging buffer and give it as a matrix"
        )
    job.count = len(found)
    job.frame[: len(found)], job.capacity[: len(found)] = found, sizes


def scaled_job(words: torch.Tensor, codec: ScaledCodec) -> ScaledJob:
    arguments.choice("scaled payloads of", words.dtype, SUMMED)
    log2 = codec.group.bit_length() - 1
    return ScaledJob(
        numel=words.numel(), integers=isinstance(codec, Int), bits=codec.bits, log2=log2, hadamard=codec.hadamard
    )


def as_many_groups(scales: int, numel: int, codec: ScaledCodec) -> None:
    arguments.as_many("scales", scales, f"groups of {codec.group} words", -(-numel // codec.group))


def check_zfp(words: torch.Tensor, rate: int, codes: torch.Tensor) -> None:
    """Accept words and as many codes as they have.

    Raises:
        ValueError: they have others.
    """
    arguments.choice("ZFP of", words.dtype, SUMMED)
    arguments.choice("rate", rate, ZFP_RATES)
    wanted = -(-4 * rate * -(-words.numel() // 4) // 64)
    arguments.as_many("bytes of codes", codes.numel(), "words of codes", wanted, 8)


def frame_bytes(slots: torch.Tensor) -> torch.Tensor:
    """Return the ``frame_bytes`` of the headers that the rows of ``slots`` begin with, as a view: int64 on the same device.

    ``slots``: uint8, a matrix whose rows begin at multiples of 8 bytes: headers of :meth:`CudaBackend.frame_sizes`, or slots. A header with
    the overflow flag has the size that the frame would have had.
    """
    return slots[:, 24:32].view(torch.int64)[:, 0]
