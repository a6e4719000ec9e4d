"""Frame header: pack, parse, validate. The layout is FORMAT.md 2.7; nothing else in Python knows it."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
import xxhash

MAGIC = b"ZCCL"
VERSION = 2
#: Version of the format -> the releases that wrote it, for versions that this package refuses.
_FORMER_VERSIONS = {1: "ds_zipccl 0.1"}
HEADER = struct.Struct("<4s8BIQQ")
HEADER_BYTES = HEADER.size
MAX_DIMS = 64
ALIGN = 16
#: Blocks of a chunk, the unit of parallel work in a coded payload.
CHUNK_BLOCKS = 16
_MAX_NUMEL = (1 << 63) - 1  # torch counts elements in signed 64 bits
_FLAGS_AT = 7
_CHECKSUM_AT = 12

DTYPES: dict[int, torch.dtype] = {
    1: torch.bfloat16,
    2: torch.float16,
    3: torch.float32,
    4: torch.float64,
    5: torch.int8,
    6: torch.uint8,
    7: torch.int16,
    8: torch.int32,
    9: torch.int64,
    10: torch.bool,
    11: torch.complex64,
    12: torch.complex128,
    13: torch.float8_e4m3fn,
    14: torch.float8_e5m2,
    15: torch.uint16,
    16: torch.uint32,
    17: torch.uint64,
}
DTYPE_IDS = {dtype: key for key, dtype in DTYPES.items()}
#: dtypes whose elements are the words of a delta frame; those of any other dtype are its bytes (FORMAT.md 1.1).
DELTA_WORDS = (torch.bfloat16, torch.float16, torch.float32)


class CodecId(IntEnum):
    """Codec byte of a frame."""

    RAW = 0
    EXPONENT = 1
    DELTA = 2
    ROUNDED = 3
    SCALED = 4
    LOWRANK = 5
    ZFP1 = 6
    ROWS = 7
    BITS = 9  # 8 stays free: FORMAT.md 2.7


_CODED = (CodecId.EXPONENT, CodecId.DELTA, CodecId.ROUNDED)
#: log2 of the block sizes that the header of a codec may name; 0 for a codec without blocks.
BLOCK_LOG2: dict[int, Sequence[int]] = {codec: range(7, 11) if codec in _CODED else range(1) for codec in CodecId}
BLOCK_LOG2[CodecId.SCALED] = (0, *range(7, 11))  # its payload says which


class ChecksumId(IntEnum):
    """Which checksum guards a frame (FORMAT.md 1.3)."""

    CRC32 = 0
    XXH3 = 1


#: The checksum of new frames.
CHECKSUM = ChecksumId.XXH3


class _Flags(IntFlag):
    CHECKSUM = 1
    SHAPED = 2
    OVERFLOWED = 4


class FrameErrorCode(IntEnum):
    """Why a frame was refused (FORMAT.md section 4); numbers never change meaning."""

    TRUNCATED = 1
    MAGIC = 2
    VERSION = 3
    CODEC = 4
    DTYPE = 5
    RESERVED = 6
    SHAPE = 7
    SIZE = 8
    CHECKSUM = 9
    MISMATCH = 10
    INDEX = 11
    BLOCK = 12
    OVERFLOWED = 13
    ROWS = 14


class FrameError(ValueError):
    """A frame that must not be decoded; ``code`` is a :class:`FrameErrorCode`."""

    def __init__(self, code: int, message: str) -> None:
        self.code = FrameErrorCode(code)
        self.message = message
        super().__init__(f"{self.code.name}: {message}")

    def __reduce__(self) -> tuple[type[FrameError], tuple[int, str]]:
        return FrameError, (int(self.code), self.message)


@dataclass(frozen=True)
class Header:
    """Header of a frame; sizes in bytes and elements.

    ``shape`` is None for a flat frame, ``block`` is 0 for a codec without blocks, ``checksum`` is None for a frame without one.
    """

    codec: CodecId
    dtype: torch.dtype
    numel: int
    frame_bytes: int
    block: int = 0
    shape: tuple[int, ...] | None = None
    checksum: ChecksumId | None = None

    @property
    def payload_at(self) -> int:
        """Offset of the payload in the frame, in bytes."""
        return payload_offset(None if self.shape is None else len(self.shape))


def pad16(size: int) -> int:
    """``size`` rounded up to a multiple of 16."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def payload_offset(ndim: int | None) -> int:
    """Bytes before the payload; ``ndim`` is the number of dimensions, None for a flat frame."""
    return HEADER_BYTES + pad16(8 * (ndim or 0))


def pack(header: Header, buffer: torch.Tensor, overflowed: bool = False) -> None:
    """Write header and shape to the start of ``buffer`` (1-D uint8 CPU tensor, which holds the payload already).

    The checksum that the header names is computed here, over the finished frame. ``overflowed``: the frame has not fitted, and ends here.
    """
    shape = header.shape or ()
    flags = _Flags.OVERFLOWED if overflowed else _Flags(0)
    if header.shape is not None:
        flags |= _Flags.SHAPED
    if header.checksum is not None:
        flags |= _Flags.CHECKSUM
    block_log2 = header.block.bit_length() - 1 if header.block else 0
    checksum_id = header.checksum or 0
    view = buffer.numpy().data
    HEADER.pack_into(
        view, 0, MAGIC, VERSION, header.codec, DTYPE_IDS[header.dtype], flags, len(shape), block_log2, checksum_id, 0, 0,
        header.numel, header.frame_bytes,
    )  # fmt: skip
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    view[HEADER_BYTES : header.payload_at] = dims.ljust(header.payload_at - HEADER_BYTES, b"\0")
    if header.checksum is not None:
        checksum = _CHECKSUMS[header.checksum](_checked(view, header.frame_bytes))
        struct.pack_into("<I", view, _CHECKSUM_AT, checksum)


#: No header with its shape is longer.
MAX_HEADER_BYTES = HEADER_BYTES + 8 * MAX_DIMS


def has_checksum(start: torch.Tensor) -> bool:
    """Whether the flags of a frame that begins with ``start`` (1-D uint8 CPU tensor) name a checksum; nothing else is examined."""
    return start.numel() > _FLAGS_AT and bool(int(start[_FLAGS_AT]) & _Flags.CHECKSUM)


def parse(frame: torch.Tensor, size: int | None = None) -> Header:
    """Read and validate the header of ``frame`` (1-D uint8 CPU tensor, may be longer than the frame).

    Args:
        frame: the frame's buffer, or its first :data:`MAX_HEADER_BYTES` where the frame has no checksum.
        size: bytes of the whole buffer; None where ``frame`` is the whole buffer.

    Raises:
        FrameError: anything FORMAT.md section 4 tells a decoder to reject before it looks into the payload.
        TypeError: ``frame`` is not a 1-D contiguous uint8 tensor on the CPU.
    """
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or frame.device.type != "cpu":
        raise TypeError(
            f"a frame is a contiguous 1-D uint8 CPU tensor, got {frame.dtype} of shape {tuple(frame.shape)} on {frame.device}"
        )
    size = frame.numel() if size is None else size
    if size < HEADER_BYTES:
        raise FrameError(FrameErrorCode.TRUNCATED, f"{size} bytes, a header alone has {HEADER_BYTES}")
    view = frame.numpy().data
    magic, version, codec, dtype_id, flags, ndim, block_log2, checksum_id, reserved, checksum, numel, frame_bytes = (
        HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise FrameError(FrameErrorCode.MAGIC, f"starts with {magic!r}, a frame starts with {MAGIC!r}")
    if version != VERSION:
        writer = f", which {_FORMER_VERSIONS[version]} wrote" if version in _FORMER_VERSIONS else ""
        raise FrameError(
            FrameErrorCode.VERSION,
            f"format version {version}{writer}; this package reads version {VERSION}: use the same ds_zipccl on all ranks",
        )
    if codec not in BLOCK_LOG2:
        raise FrameError(FrameErrorCode.CODEC, f"codec {codec}, known are {_listed(BLOCK_LOG2)}")
    if dtype_id not in DTYPES:
        raise FrameError(FrameErrorCode.DTYPE, f"dtype {dtype_id}, known are {_listed(DTYPES)}")
    if flags == _Flags.OVERFLOWED:
        raise FrameError(
            FrameErrorCode.OVERFLOWED,
            f"the frame would have had {frame_bytes} bytes and did not fit in its sender's slot",
        )
    dtype = DTYPES[dtype_id]
    shaped = bool(flags & _Flags.SHAPED)
    checked = bool(flags & _Flags.CHECKSUM)
    if (
        reserved
        or flags & ~int(_Flags.SHAPED | _Flags.CHECKSUM)
        or (ndim and not shaped)
        or ((checksum or checksum_id) and not checked)
        or block_log2 not in BLOCK_LOG2[codec]
    ):
        raise FrameError(FrameErrorCode.RESERVED, "a reserved field is not zero, or block_log2 does not fit the codec")
    if ndim > MAX_DIMS:
        raise FrameError(FrameErrorCode.SHAPE, f"{ndim} dimensions, at most {MAX_DIMS}")
    payload_at = payload_offset(ndim)
    if not payload_at <= frame_bytes <= size:
        raise FrameError(FrameErrorCode.TRUNCATED, f"frame of {frame_bytes} bytes in a buffer of {size}")
    shape = struct.unpack_from(f"<{ndim}Q", view, HEADER_BYTES) if shaped else None
    if any(view[HEADER_BYTES + 8 * ndim : payload_at]):
        raise FrameError(FrameErrorCode.RESERVED, "the padding after the shape is not zero")
    # A size of zero hides all other sizes in the product, but torch multiplies the sizes in 64 bits.
    if shape is not None and (math.prod(shape) != numel or math.prod(filter(None, shape)) > _MAX_NUMEL):
        raise FrameError(FrameErrorCode.SHAPE, f"shape {shape} does not have the {numel} elements of the header")
    if checked and checksum_id not in _CHECKSUMS:
        raise FrameError(FrameErrorCode.CHECKSUM, f"checksum_id {checksum_id}, known are {_listed(_CHECKSUMS)}")
    if checked and _CHECKSUMS[checksum_id](_checked(view, frame_bytes)) != checksum:
        raise FrameError(FrameErrorCode.CHECKSUM, "the frame was damaged on its way: have it sent again")
    return Header(
        CodecId(codec), dtype, numel, frame_bytes, 1 << block_log2 if block_log2 else 0, shape,
        ChecksumId(checksum_id) if checked else None,
    )  # fmt: skip


def parse_nested(start: torch.Tensor, size: int, flagged: FrameErrorCode) -> Header:
    """Read and validate the header of a frame inside of a payload: flat and without a checksum.

    Args:
        start: the frame's first :data:`HEADER_BYTES`, or all of a shorter rest (1-D uint8 CPU tensor).
        size: bytes from the frame's begin to the end of the payload.
        flagged: code of the refusal of a shape or a checksum.

    Raises:
        FrameError: as :func:`parse`, or ``flagged``.
    """
    if start.numel() > _FLAGS_AT and int(start[_FLAGS_AT]) & (_Flags.SHAPED | _Flags.CHECKSUM):
        raise FrameError(flagged, "a nested frame has a shape or a checksum; it has neither")
    return parse(start, size)


def _listed(table: Iterable[int]) -> str:
    return ", ".join(str(int(key)) for key in table)


def _checked(view: memoryview, frame_bytes: int) -> tuple[memoryview | bytes, ...]:
    """The frame in parts, with zeros in place of its checksum field."""
    return view[:_CHECKSUM_AT], bytes(4), view[_CHECKSUM_AT + 4 : frame_bytes]


def _crc32(parts: Iterable[memoryview | bytes]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _xxh3(parts: Iterable[memoryview | bytes]) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() & 0xFFFFFFFF


#: checksum_id -> checksum of the parts of a frame.
_CHECKSUMS: dict[int, Callable[[Iterable[memoryview | bytes]], int]] = {
    ChecksumId.CRC32: _crc32,
    ChecksumId.XXH3: _xxh3,
}
