"""The layout of a message, version 1: a head, then records. All integers are little-endian.

**Head**: 80 bytes, then the manifest.

| bytes | field | meaning |
|---|---|---|
| 0-3 | magic | ``5A 53 59 4E`` ("ZSYN") |
| 4 | layout | 1 |
| 5 | kind | 1 full: needs no base; 2 delta |
| 6 | flags | bit 0: manifest present, always in a full message; bit 1, in a delta message with a manifest: partial |
| 7 | | zero |
| 8-15 | version | of the new state, at least 1 |
| 16-23 | base version | zero in a full message |
| 24-39 | id | of the new state: 16 random bytes |
| 40-55 | base id | zero in a full message |
| 56-63 | manifest bytes | zero without a manifest |
| 64-67 | records | their number |
| 68-71 | | zero |
| 72-79 | checksum | XXH3-64, seed 0, of bytes 0 to 71 and the manifest |

**Manifest**: the tensors of the new state, in order; in a partial message those of the message alone, and all tensors of the base
that it does not name stay. Without a manifest the tensors are those of the base. u32 number of tensors; for each:

    u16 bytes of the name | name, UTF-8 | u8 dtype | then either u8 ndim, ndim times u64 size; or, if dtype is 0, u32 index

dtype is an id of FORMAT.md 1.1, or 64 and more for :data:`BYTE_DTYPES`. dtype 0 is a tensor that shares its words with the one of
this index, which has a dtype of its own.

**Streams**: the words of a message are streams. A tensor whose name, dtype and shape are also in the base is a difference; any
other, and each of a full message, is whole. The differences of a dtype are a stream, and so are its whole tensors: differences
before whole tensors, the dtypes by id. In a stream the tensors stand by their number of elements, the smallest first; of equals the
first in the state first. So small tensors stand together, and one record holds many of them.

**Record**: 48 bytes, then a frame of FORMAT.md, flat, without a checksum.

| bytes | field | meaning |
|---|---|---|
| 0-3 | magic | ``5A 53 59 52`` ("ZSYR") |
| 4-7 | index | 0, 1, ... |
| 8-15 | frame bytes | |
| 16-31 | hash | of the new words, FORMAT.md section 5 |
| 32-39 | message | the first 8 bytes of the id of the new state |
| 40-47 | checksum | XXH3-64, seed 0, of bytes 0 to 39 and the frame |

A record has the next elements of its stream, as many as its frame says, at most :data:`MAX_FRAGMENT` bytes of them. No record
crosses from one stream into the next. The frame of a difference is a delta frame against the same elements of the base, or of any
codec without a base.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ds_zipccl import frame as framing
from ds_zipccl.sync.errors import SyncError, SyncErrorCode

MAGIC, RECORD_MAGIC, LAYOUT = b"ZSYN", b"ZSYR", 1
FULL, DELTA = 1, 2
_HAS_MANIFEST, _PARTIAL = 1, 2
_HEAD = struct.Struct("<4s4BQQ16s16sQIIQ")
_RECORD = struct.Struct("<4sIQ16s8sQ")
HEAD_BYTES, RECORD_BYTES = _HEAD.size, _RECORD.size
_CHECKSUM = struct.Struct("<Q")

#: Bytes of words that one record may hold, of a manifest, and of a record's frame: no frame of so many words is longer.
MAX_FRAGMENT = 128 << 20
MAX_MANIFEST = 64 << 20
#: Tensors of a state; parsing as many takes seconds.
MAX_TENSORS = 1 << 20
MAX_FRAME = MAX_FRAGMENT + (MAX_FRAGMENT >> 4) + 4096
_MAX_NAME = (1 << 16) - 1
#: A state in records of fewer bytes than these would cost more in headers than in words.
_LEAST_FRAGMENT = 64 << 10

#: dtypes without an id in FORMAT.md, of as many bytes as their words have; they travel as uint8.
_MORE = {64: "float8_e4m3fnuz", 65: "float8_e5m2fnuz", 66: "float8_e8m0fnu", 67: "float4_e2m1fn_x2", 68: "complex32"}
BYTE_DTYPES: dict[int, torch.dtype] = {key: getattr(torch, name) for key, name in _MORE.items() if hasattr(torch, name)}
DTYPES: dict[int, torch.dtype] = {**framing.DTYPES, **BYTE_DTYPES}
DTYPE_IDS = {dtype: key for key, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """A tensor of a state. ``tied_to``: name of the tensor whose words it shares, which has the same dtype and shape; None: its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the words; zero where they are another tensor's."""
        return 0 if self.tied_to is not None else math.prod(self.shape) * self.dtype.itemsize

    @property
    def words(self) -> tuple[torch.dtype, int]:
        """dtype and number of the elements as a frame has them."""
        if self.dtype in framing.DTYPE_IDS:
            return self.dtype, math.prod(self.shape)
        return torch.uint8, math.prod(self.shape) * self.dtype.itemsize


#: Name -> tensor, in the order of the state dict.
Layout = Mapping[str, Spec]


@dataclass(frozen=True)
class Head:
    """The head of a message. ``layout`` is None where the tensors are those of the base."""

    kind: int
    version: int
    id: bytes
    records: int
    base_version: int = 0
    base_id: bytes = bytes(16)
    layout: Layout | None = None
    partial: bool = False


@dataclass(frozen=True)
class Stream:
    """Tensors whose words follow each other: differences or whole tensors, of one dtype of words."""

    delta: bool
    dtype: torch.dtype
    names: tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of a tensor."""

    name: str
    start: int
    stop: int


def streams(new: Layout, names: Sequence[str], base: Layout | None) -> list[Stream]:
    """The streams of a message with the tensors ``names`` of ``new``; ``base``: the base's layout, None for a full message."""
    found: dict[tuple[bool, int], list[str]] = {}
    for name in names:
        spec = new[name]
        if spec.tied_to is None:
            whole = base is None or base.get(name) != spec
            found.setdefault((whole, framing.DTYPE_IDS[spec.words[0]]), []).append(name)
    return [
        Stream(not whole, framing.DTYPES[key], tuple(sorted(group, key=lambda name: new[name].words[1])))
        for (whole, key), group in sorted(found.items())
    ]


def new_layout(head: Head, base: Layout | None) -> dict[str, Spec]:
    """The layout of the state after a message.

    Raises:
        SyncError: MANIFEST, a tensor that a partial message leaves out is tied to one whose dtype or shape the message changes.
    """
    if head.layout is None:
        return dict(base or {})
    merged = {**(base or {}), **head.layout} if head.partial else dict(head.layout)
    for name, spec in merged.items():
        other = None if spec.tied_to is None else merged.get(spec.tied_to)
        if spec.tied_to is not None and other != Spec(spec.dtype, spec.shape):
            raise SyncError(
                SyncErrorCode.MANIFEST,
                f"{name!r} is tied to {spec.tied_to!r}, which a partial message changed to another kind: pack both, or the whole state",
            )
    return merged


def pack_head(head: Head) -> bytes:
    """The bytes of head and manifest.

    Raises:
        SyncError: STATE, a name or the manifest is too long.
    """
    manifest = b"" if head.layout is None else _pack_manifest(head.layout)
    flags = (_HAS_MANIFEST if head.layout is not None else 0) | (_PARTIAL if head.partial else 0)
    start = _HEAD.pack(
        MAGIC, LAYOUT, head.kind, flags, 0, head.version, head.base_version, head.id, head.base_id, len(manifest),
        head.records, 0, 0,
    )[:-8]  # fmt: skip
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + manifest)) + manifest


def _pack_manifest(layout: Layout) -> bytes:
    parts = [struct.pack("<I", len(layout))]
    index = {name: i for i, name in enumerate(layout)}
    for name, spec in layout.items():
        text = name.encode("utf-8", "surrogatepass")
        if len(text) > _MAX_NAME:
            raise SyncError(
                SyncErrorCode.STATE, f"a name has {len(text)} bytes, at most {_MAX_NAME}: {name[:40]!r}..., shorten it"
            )
        parts.append(struct.pack("<H", len(text)) + text)
        if spec.tied_to is not None:
            parts.append(struct.pack("<BI", 0, index[spec.tied_to]))
        else:
            sizes = spec.shape
            parts.append(struct.pack(f"<BB{len(sizes)}Q", DTYPE_IDS[spec.dtype], len(sizes), *sizes))
    manifest = b"".join(parts)
    if len(manifest) > MAX_MANIFEST:
        raise SyncError(
            SyncErrorCode.STATE,
            f"names and shapes of {len(layout)} tensors take {len(manifest)} bytes, at most {MAX_MANIFEST}: pack parts of the state",
        )
    return manifest


def head_bytes(start: bytes) -> int:
    """Bytes of the whole head that begins with ``start``, of :data:`HEAD_BYTES`.

    Raises:
        SyncError: TRUNCATED, FORMAT or LIMIT.
    """
    if len(start) < HEAD_BYTES:
        raise SyncError(SyncErrorCode.TRUNCATED, f"{len(start)} bytes, the head of a message has {HEAD_BYTES} or more")
    magic, layout, *_ = fields = _HEAD.unpack_from(start)
    if magic != MAGIC:
        raise SyncError(SyncErrorCode.FORMAT, f"starts with {magic!r}, a message starts with {MAGIC!r}")
    if layout != LAYOUT:
        raise SyncError(
            SyncErrorCode.FORMAT,
            f"layout {layout} of a message, this package reads {LAYOUT}: install one ds_zipccl on both sides",
        )
    size: int = fields[9]
    if size > MAX_MANIFEST:
        raise SyncError(SyncErrorCode.LIMIT, f"a manifest of {size} bytes, at most {MAX_MANIFEST}")
    return HEAD_BYTES + size


def parse_head(data: bytes) -> Head:
    """The head of a message, which is the whole of ``data``.

    Raises:
        SyncError: TRUNCATED, FORMAT, DAMAGED, LIMIT or MANIFEST.
    """
    size = head_bytes(data[:HEAD_BYTES])
    if len(data) != size:
        raise SyncError(SyncErrorCode.TRUNCATED, f"{len(data)} bytes of head and manifest, the head says {size}")
    fields = _HEAD.unpack_from(data)
    _, _, kind, flags, zero, version, base_version, new_id, base_id, manifest_bytes, records, zeros, checksum = fields
    if _checksum(data, HEAD_BYTES) != checksum:
        raise SyncError(SyncErrorCode.DAMAGED, "the head was damaged on its way: have the message sent again")
    full, has_manifest, partial = kind == FULL, bool(flags & _HAS_MANIFEST), bool(flags & _PARTIAL)
    sound = kind in (FULL, DELTA) and flags <= (_HAS_MANIFEST | _PARTIAL) and not zero and not zeros and version
    sound = sound and (has_manifest or not (full or partial or manifest_bytes)) and not (full and partial)
    if not sound or full != (base_version == 0) or (full and any(base_id)):
        raise SyncError(SyncErrorCode.FORMAT, "fields of the head contradict each other")
    layout = _parse_manifest(data[HEAD_BYTES:]) if has_manifest else None
    return Head(kind, version, new_id, records, base_version, base_id, layout, partial)


def most_records(layout: Layout) -> int:
    """No message of these tensors has more records."""
    return 2 * len(layout) + sum(spec.nbytes for spec in layout.values()) // _LEAST_FRAGMENT


def _parse_manifest(data: bytes) -> dict[str, Spec]:
    at = 0

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        size = struct.calcsize(form)
        if at + size > len(data):
            raise SyncError(SyncErrorCode.MANIFEST, f"the manifest ends in a field, at byte {at}")
        at += size
        return struct.unpack_from(form, data, at - size)

    layout: dict[str, Spec] = {}
    tied: dict[str, int] = {}
    (count,) = take("<I")
    if count > MAX_TENSORS:
        raise SyncError(SyncErrorCode.LIMIT, f"the manifest has {count} tensors, at most {MAX_TENSORS} are read")
    for _ in range(count):
        (length,) = take("<H")
        text = data[at : at + length]
        at += length
        (dtype_id,) = take("<B")
        try:
            name = text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise SyncError(SyncErrorCode.MANIFEST, f"a name is not UTF-8: {error}") from None
        if name in layout:
            raise SyncError(SyncErrorCode.MANIFEST, f"{name!r} stands twice in the manifest")
        if dtype_id and dtype_id not in DTYPES:
            raise SyncError(SyncErrorCode.MANIFEST, f"{name!r} has dtype {dtype_id}, which this package does not know")
        if dtype_id == 0:
            (tied[name],) = take("<I")
            layout[name] = Spec(torch.uint8, (0,))  # replaced below
            continue
        (ndim,) = take("<B")
        if ndim > framing.MAX_DIMS:
            raise SyncError(SyncErrorCode.MANIFEST, f"{name!r} has {ndim} dimensions, at most {framing.MAX_DIMS}")
        layout[name] = spec = Spec(DTYPES[dtype_id], take(f"<{ndim}Q"))
        # A size of zero hides all other sizes in the product, but torch multiplies the sizes in signed 64 bits.
        if math.prod(filter(None, spec.shape)) * spec.dtype.itemsize >= 1 << 63:
            raise SyncError(SyncErrorCode.MANIFEST, f"{name!r} has the sizes {spec.shape}, which no tensor has")
    if at != len(data):
        raise SyncError(SyncErrorCode.MANIFEST, f"{len(data) - at} bytes after the last tensor of the manifest")
    names = list(layout)
    for name, index in tied.items():
        if index >= len(names) or names[index] in tied:
            raise SyncError(SyncErrorCode.MANIFEST, f"{name!r} is tied to tensor {index}, which has no words")
        other = layout[names[index]]
        layout[name] = Spec(other.dtype, other.shape, names[index])
    return layout


@dataclass(frozen=True)
class Record:
    """The fields of a record."""

    index: int
    frame_bytes: int
    hash: bytes
    message: bytes
    checksum: int


def write_record(buffer: torch.Tensor, index: int, words_hash: bytes, new_id: bytes) -> None:
    """Write the fields of a record before its frame; ``buffer``: the whole record, 1-D uint8 CPU tensor."""
    view = memoryview(buffer.numpy().data)
    _RECORD.pack_into(view, 0, RECORD_MAGIC, index, len(view) - RECORD_BYTES, words_hash, new_id[:8], 0)
    _CHECKSUM.pack_into(view, RECORD_BYTES - 8, _checksum(view, RECORD_BYTES))


def record_bytes(start: bytes) -> int:
    """Bytes of the whole record that begins with ``start``, of :data:`RECORD_BYTES`.

    Raises:
        SyncError: TRUNCATED, FORMAT or LIMIT.
    """
    if len(start) < RECORD_BYTES:
        raise SyncError(SyncErrorCode.TRUNCATED, f"{len(start)} bytes, a record has {RECORD_BYTES} or more")
    magic, _, size, *_ = _RECORD.unpack_from(start)
    if magic != RECORD_MAGIC:
        raise SyncError(SyncErrorCode.FORMAT, f"starts with {magic!r}, a record starts with {RECORD_MAGIC!r}")
    if size > MAX_FRAME:
        raise SyncError(SyncErrorCode.LIMIT, f"a frame of {size} bytes, at most {MAX_FRAME}")
    return RECORD_BYTES + int(size)


def parse_record(part: torch.Tensor) -> Record:
    """The fields of a record, which is the whole of ``part`` (1-D uint8 CPU tensor).

    Raises:
        SyncError: TRUNCATED, FORMAT, LIMIT or DAMAGED.
    """
    view = memoryview(part.numpy().data)
    size = record_bytes(bytes(view[:RECORD_BYTES]))
    if len(view) != size:
        raise SyncError(SyncErrorCode.TRUNCATED, f"a record of {len(view)} bytes, its fields say {size}")
    _, index, frame_bytes, words_hash, message, checksum = _RECORD.unpack_from(view)
    if _checksum(view, RECORD_BYTES) != checksum:
        raise SyncError(SyncErrorCode.DAMAGED, f"record {index} was damaged on its way: have the message sent again")
    return Record(index, frame_bytes, words_hash, message, checksum)


def _checksum(part: Any, fields: int) -> int:
    """The checksum of a part, without the checksum's own bytes: the last 8 of its first ``fields``."""
    state = xxhash.xxh3_64(part[: fields - 8])
    state.update(part[fields:])
    return state.intdigest()
