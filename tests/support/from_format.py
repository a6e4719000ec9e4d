"""A third codec, written from FORMAT.md alone and slow on purpose: its agreement proves that the document is enough."""

from __future__ import annotations

import struct
import zlib
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from from_format_delta import decode_change, decode_list, demand, encode_change, encode_list, form_of, width

FIELDS = {1: (8, 7), 2: (5, 10), 3: (8, 23), 13: (4, 3), 14: (5, 2)}  # dtype id -> E, M
BYTES = (0, 0)  # E, M of the words of a delta frame that are bytes
SUMMED = (1, 2, 3)  # the dtypes whose words in a delta frame are numbers
FILL, RAW, CASCADE, SPARSE, WIDE, CHANGE = range(6)
#: mode -> tier -> k, or "zero", of the codes below the escape
NAMED: dict[int, tuple[tuple[int | str, ...], ...]] = {
    CASCADE: ((4, 5, 6), (3, 7, 8), (9, 10, 11), (2, 12, "zero")),
    WIDE: ((3, 4, 5, 6, 7, 8, 9), (10, 2, 11), (12, 1, 13), (14, 0, "zero")),
}
PLANES = {CASCADE: 2, WIDE: 3}
MODES = {"cascade": CASCADE, "wide": WIDE}
CHUNK = 16
#: checksum_id -> checksum of a whole frame (1.3); the last one is that of encoders
CHECKSUMS = {0: zlib.crc32, 1: lambda frame: xxhash.xxh3_64_intdigest(frame) % (1 << 32)}
LAYOUT = "<4s8BIQQ"
#: The fields of section 1, in the order of LAYOUT.
Header = namedtuple("Header", "magic version codec dtype flags ndim log2 checksum_id reserved checksum numel size")


def header_at(data: bytes, at: int = 0) -> Header:
    return Header(*struct.unpack_from(LAYOUT, data, at))


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def _up(count: int, unit: int) -> int:
    return -(-count // unit)


def _bits(data: bytes) -> list[int]:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()


def _plane(bits: list[int]) -> bytes:
    return np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes()


def _cuts(numel: int, size: int) -> list[int]:
    return [min(size, numel - at) for at in range(0, numel, size)]


# --- section 2, words <- payload


def _first_bytes(mode: int, m: int, r: int) -> int:
    return r // 8 * m + (r % 8 + PLANES[mode]) * _up(m, 8)


def _decode_elements(
    mode: int, first: bytes, second: bytes, m: int, t: int, z: int, e_bits: int, m_bits: int
) -> list[int]:
    r, plane = 1 + m_bits - z, _up(m, 8)
    v = [sum(first[byte * m + i] << 8 * byte for byte in range(r // 8)) for i in range(m)]
    at = r // 8 * m
    planes = [_bits(first[at + plane * p : at + plane * (p + 1)]) for p in range(r % 8 + PLANES[mode])]
    for p in range(r % 8):
        v = [value | planes[p][i] << (r // 8 * 8 + p) for i, value in enumerate(v)]
    planes = planes[r % 8 :]
    stream, position, left = _bits(second), 0, list(range(m))
    exponent = [0] * m
    for tier, named in enumerate(NAMED[mode]):
        if tier:
            demand(position + 2 * len(left) <= len(stream), "a tier ends after the tail")
            planes = [stream[position + p * len(left) : position + (p + 1) * len(left)] for p in range(2)]
            position += 2 * len(left)
        escaped = []
        for entry, i in enumerate(left):
            code = sum(bits[entry] << p for p, bits in enumerate(planes))
            if code == len(named):
                escaped.append(i)
            elif named[code] != "zero":
                exponent[i] = t + 3 - named[code]
        left = escaped
    position = _up(position, 8)
    demand(position + len(left) == len(second), "the tail is not used up exactly")
    for i, e in zip(left, second[position:], strict=True):
        exponent[i] = e
    words = []
    for value, e in zip(v, exponent, strict=True):
        value <<= z
        mantissa = value & ((1 << m_bits) - 1)
        words.append((value >> m_bits) << (e_bits + m_bits) | (e % (1 << e_bits)) << m_bits | mantissa)
    return words


def _decode_sparse(tail: bytes, n: int, t: int, z: int, e_bits: int, m_bits: int) -> list[int]:
    at = 1 + _up(n, 8)
    demand(len(tail) >= at, "no room for the zero map")
    demand(tail[0] < 2, "unknown flags")
    zero = _bits(tail[1:at])[:n]
    signs = [0] * n
    if tail[0]:
        signs = _bits(tail[at:])
        at += _up(sum(zero), 8)
    m = n - sum(zero)
    first = at + _first_bytes(CASCADE, m, 1 + m_bits - z)
    demand(first <= len(tail), "no room for the first part")
    others = iter(_decode_elements(CASCADE, tail[at:first], tail[first:], m, t, z, e_bits, m_bits))
    minus = iter(signs)
    return [next(minus) << (e_bits + m_bits) if is_zero else next(others) for is_zero in zero]


def _decode_chunk(
    chunk: bytes, lengths: list[int], trimmed: bool, e_bits: int, m_bits: int, base: list[int] | None = None
) -> list[int]:
    item, b = width(e_bits, m_bits) // 8, len(lengths)
    body = _up((4 if trimmed else 3) * b, 16) * 16
    demand(body <= len(chunk), "no room for the table")
    tops, entries = chunk[:b], struct.unpack(f"<{b}H", chunk[b : 3 * b])
    trims = chunk[3 * b : 4 * b] if trimmed else bytes(b)
    sizes = []
    for n, entry, z in zip(lengths, entries, trims, strict=True):
        mode = entry >> 13
        known = (FILL, RAW, CHANGE) if m_bits == 0 else range(CHANGE if base is None else CHANGE + 1)
        demand(mode in known and z <= m_bits, "unknown mode or trim")
        coded = _first_bytes(mode, n, 1 + m_bits - z) if mode in NAMED else 0
        sizes.append(_up(n * item if mode == RAW else coded, 16) * 16)
    tail = body + sum(sizes)
    words: list[int] = []
    for n, entry, t, z, size in zip(lengths, entries, tops, trims, sizes, strict=True):
        mode, length = entry >> 13, entry & 8191
        demand(tail + length <= len(chunk), "a tail outside the chunk")
        first, second = chunk[body : body + size], chunk[tail : tail + length]
        body, tail = body + size, tail + length
        if mode in NAMED:
            words += _decode_elements(mode, first, second, n, t, z, e_bits, m_bits)
        elif mode == CHANGE:
            words += decode_change(second, base[len(words) : len(words) + n], t, e_bits, m_bits)
        elif mode == SPARSE:
            words += _decode_sparse(second, n, t, z, e_bits, m_bits)
        elif mode == RAW:
            demand(not second, "a raw block with a tail")
            words += [int.from_bytes(first[i * item : (i + 1) * item], "little") for i in range(n)]
        else:
            demand(len(second) in (0, item), "a fill that is neither zero nor a word")
            words += [int.from_bytes(second, "little")] * n
    demand(_up(tail, 16) * 16 == len(chunk), "bytes left in the chunk")
    return words


def fields(dtype: int, delta: bool) -> tuple[int, int]:
    """E and M of the words of a frame."""
    return FIELDS[dtype] if dtype in SUMMED or not delta else BYTES


def decode_payload(
    payload: bytes, numel: int, dtype: int, block: int, base: list[int] | None = None, rounded: bool = False
) -> list[int]:
    """``numel`` and ``base`` count words."""
    lengths = _cuts(numel, block)
    chunks = [lengths[i : i + CHUNK] for i in range(0, len(lengths), CHUNK)]
    entries = struct.unpack_from(f"<{len(chunks)}I", payload)
    lists = [base is not None and entry >> 31 == 1 for entry in entries]
    starts = [16 * (entry % (1 << 31) if base is not None else entry) for entry in entries]
    bounds = [*starts, len(payload)]
    demand(bounds[0] == _up(4 * len(chunks), 16) * 16, "the index does not end where the chunks begin")
    demand(bounds == sorted(bounds), "chunks out of order")
    e_bits, m_bits = fields(dtype, base is not None)
    words: list[int] = []
    for here, is_list, start, end in zip(chunks, lists, starts, bounds[1:], strict=True):
        before = None if base is None else base[len(words) : len(words) + sum(here)]
        if is_list:
            words += decode_list(payload[start:end], before, e_bits, m_bits)
        elif before is not None and start == end:
            words += before
        else:
            words += _decode_chunk(payload[start:end], here, rounded or dtype == 3, e_bits, m_bits, before)
    return words


def decode(frame: bytes, base: list[int] | None = None) -> tuple[int, tuple[int, ...] | None, list[int]]:
    """dtype id, shape, and words of a valid exponent or rounded frame, or with ``base`` of a delta frame.

    The words of a delta frame and its base are bytes, where the dtype is not one of SUMMED.
    """
    h = header_at(frame)
    demand((h.magic, h.version) == (b"ZCCL", 2), "no frame")
    demand(h.codec in ((1, 3) if base is None else (2,)), "a frame of another kind")
    frame = frame[: h.size]
    if h.flags & 1:
        demand(CHECKSUMS[h.checksum_id](frame[:12] + bytes(4) + frame[16:]) == h.checksum, "checksum")
    shape = struct.unpack_from(f"<{h.ndim}Q", frame, 32) if h.flags & 2 else None
    words = h.numel if base is None or h.dtype in SUMMED else len(base)
    payload = frame[32 + _up(8 * h.ndim, 16) * 16 :]
    return h.dtype, shape, decode_payload(payload, words, h.dtype, 1 << h.log2, base, h.codec == 3)


# --- sections 2 and 3, words -> payload


def _encode_elements(mode: int, words: list[int], t: int, z: int, e_bits: int, m_bits: int) -> tuple[bytes, bytes, int]:
    """First part, second part, and how many elements escape tier 1."""
    r, e_mask = 1 + m_bits - z, (1 << e_bits) - 1
    v = [(w >> (e_bits + m_bits) << m_bits | w & ((1 << m_bits) - 1)) >> z for w in words]
    left = [w >> m_bits & e_mask for w in words]
    first = b"".join(bytes(value >> 8 * byte & 255 for value in v) for byte in range(r // 8))
    first += b"".join(_plane([value >> (r // 8 * 8 + p) & 1 for value in v]) for p in range(r % 8))
    stream: list[int] = []
    escapes = 0
    for tier, named in enumerate(NAMED[mode]):
        code_of = {name: code for code, name in enumerate(named)}
        zero = code_of.get("zero", len(named))
        codes = [code_of.get((t + 3 - e) % 256, len(named) if e else zero) for e in left]
        left = [e for e, code in zip(left, codes, strict=True) if code == len(named)]
        planes = [[code >> p & 1 for code in codes] for p in range(2 if tier else PLANES[mode])]
        if tier:
            stream += [bit for plane in planes for bit in plane]
        else:
            first += b"".join(map(_plane, planes))
            escapes = len(left)
    return first, _plane(stream) + bytes(left), escapes


def _encode_block(
    words: list[int], mode: int, trimmed: bool, e_bits: int, m_bits: int
) -> tuple[int, int, int, bytes, bytes]:
    """mode, top, trim, body with padding, tail."""
    item, n, sign = width(e_bits, m_bits) // 8, len(words), 1 << (e_bits + m_bits)
    if len(set(words)) == 1:
        return FILL, 0, 0, b"", words[0].to_bytes(item, "little") if words[0] else b""
    raw = _pad(b"".join(w.to_bytes(item, "little") for w in words))
    if mode == RAW:
        return RAW, 0, 0, raw, b""
    others = [w for w in words if w % sign]
    exponents = [w >> m_bits & ((1 << e_bits) - 1) for w in others]
    c = len(others)

    def top(bias: int) -> int:
        return min(max(exponents), (8 * sum(exponents) + bias * c) // (8 * c)) if c else 0

    z = 0
    if trimmed:
        while z < m_bits and not any(w >> z & 1 for w in words):
            z += 1
    if 16 * (n - c) >= n:
        zero = [int(w % sign == 0) for w in words]
        minus = [int(w != 0) for w in words if w % sign == 0]
        first, second, _ = _encode_elements(CASCADE, others, top(23), z, e_bits, m_bits)
        signs = _plane(minus) if any(minus) else b""
        form = SPARSE, top(23), z, b"", bytes([any(minus)]) + _plane(zero) + signs + first + second
    else:
        t = top(23 if mode == CASCADE else 20)
        first, second, escapes = _encode_elements(mode, words, t, z, e_bits, m_bits)
        if mode == CASCADE and 8 * escapes > 3 * n:
            mode, t = WIDE, top(28)
            first, second, _ = _encode_elements(mode, words, t, z, e_bits, m_bits)
        form = mode, t, z, _pad(first), second
    return form if len(form[3]) + len(form[4]) < len(raw) else (RAW, 0, 0, raw, b"")


def _encode_against(words: list[int], base: list[int], e_bits: int, m_bits: int) -> tuple[int, int, int, bytes, bytes]:
    if words == base:
        return CHANGE, 0, 0, b"", b""
    alone = _encode_block(words, CASCADE if m_bits else RAW, m_bits == 23, e_bits, m_bits)
    if alone[0] == FILL:
        return alone
    t, tail = encode_change(words, base, e_bits, m_bits)
    return (CHANGE, t, 0, b"", tail) if len(tail) < len(alone[3]) + len(alone[4]) else alone


def _table(blocks: list[tuple[int, int, int, bytes, bytes]], trimmed: bool) -> bytes:
    """The chunk of these blocks."""
    modes, tops, trims, bodies, tails = zip(*blocks, strict=True)
    entries = (mode << 13 | len(tail) for mode, tail in zip(modes, tails, strict=True))
    table = bytes(tops) + b"".join(struct.pack("<H", entry) for entry in entries) + (bytes(trims) if trimmed else b"")
    return _pad(_pad(table) + b"".join(bodies) + b"".join(tails))


def _delta_chunk(words: list[int], base: list[int], block: int, e_bits: int, m_bits: int) -> tuple[bytes, bool]:
    """A chunk, and whether it is a LIST."""
    form = form_of(words, base, block, e_bits, m_bits)
    if form == "SAME":
        return b"", False
    changes = encode_list(words, base, e_bits, m_bits) if form != "TABLE" else b""
    if form == "LIST":
        return changes, True
    cuts = [slice(at, at + block) for at in range(0, len(words), block)]
    blocks = [_encode_against(words[cut], base[cut], e_bits, m_bits) for cut in cuts]
    table = _table(blocks, width(e_bits, m_bits) == 32)
    return (changes, True) if form == "shorter" and len(changes) <= len(table) else (table, False)


def encode_payload(
    words: list[int], dtype: int, block: int, code: str, base: list[int] | None = None, rounded: bool = False,
    raw_as_rounded: bool = False,
) -> bytes:  # fmt: skip
    """The payload of these words; ``raw_as_rounded``: blocks are RAW where those of the rounded payload are."""
    e_bits, m_bits = fields(dtype, base is not None)
    trimmed = rounded or dtype == 3
    chunks = []
    for at in range(0, len(words), CHUNK * block):
        here = words[at : at + CHUNK * block]
        if base is None:
            cuts = [here[i : i + block] for i in range(0, len(here), block)]
            blocks = [_encode_block(cut, MODES[code], trimmed, e_bits, m_bits) for cut in cuts]
            if raw_as_rounded:
                forms = [_encode_block(cut, MODES[code], True, e_bits, m_bits)[0] for cut in cuts]
                blocks = [
                    _encode_block(cut, RAW, False, e_bits, m_bits) if form == RAW else one
                    for cut, form, one in zip(cuts, forms, blocks, strict=True)
                ]
            chunks.append((_table(blocks, trimmed), False))
        else:
            chunks.append(_delta_chunk(here, base[at : at + CHUNK * block], block, e_bits, m_bits))
    offset = _up(4 * len(chunks), 16)
    index = b""
    for chunk, is_list in chunks:
        index += struct.pack("<I", is_list << 31 | offset)
        offset += len(chunk) // 16
    return _pad(index) + b"".join(chunk for chunk, _ in chunks)


def encode(
    words: list[int], dtype: int, block: int, shape: tuple[int, ...] | None, checksum: bool, code: str = "cascade",
    base: list[int] | None = None, numel: int | None = None,
) -> bytes:  # fmt: skip
    """The exponent frame of these words, or the delta frame where there is a base: of bytes, where the dtype is not one of SUMMED.

    ``numel`` is needed where the words are bytes of larger elements.
    """
    payload, codec = encode_payload(words, dtype, block, code, base), 1 if base is None else 2
    return framed(payload, codec, dtype, block, shape, checksum, len(words) if numel is None else numel)


def framed(
    payload: bytes, codec: int, dtype: int, block: int, shape: tuple[int, ...] | None, checksum: bool, elements: int
) -> bytes:
    """The frame of a payload; ``block`` is 1 for a codec without blocks."""
    dims = _pad(struct.pack(f"<{len(shape or ())}Q", *(shape or ())))
    flags, size = checksum + 2 * (shape is not None), 32 + len(dims) + len(payload)
    log2 = block.bit_length() - 1
    header = Header(b"ZCCL", 2, codec, dtype, flags, len(shape or ()), log2, 0, 0, 0, elements, size)
    frame = struct.pack(LAYOUT, *header) + dims + payload
    return with_checksum(frame, max(CHECKSUMS)) if checksum else frame


def with_checksum(frame: bytes, kind: int) -> bytes:
    """Return ``frame`` with the checksum of this id in place of any other."""
    bare = frame[:7] + bytes([frame[7] | 1]) + frame[8:10] + bytes([kind]) + frame[11:12] + bytes(4) + frame[16:]
    return bare[:12] + struct.pack("<I", CHECKSUMS[kind](bare)) + bare[16:]


@dataclass(frozen=True)
class Raw:
    """A frame by its fields, for tests: none of them is checked; ``size`` None stands for the true length."""

    magic: bytes = b"ZCCL"
    version: int = 2
    codec: int = 0
    dtype: int = 6
    flags: int = 0
    ndim: int = 0
    log2: int = 0
    checksum_id: int = 0
    reserved: int = 0
    checksum: int = 0
    numel: int = 4
    size: int | None = None
    dims: tuple[int, ...] = ()
    padding: bytes | None = None
    payload: bytes = b"abcd"

    def bytes(self) -> bytes:
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        dims += bytes(-len(dims) % 16) if self.padding is None else self.padding
        size = 32 + len(dims) + len(self.payload) if self.size is None else self.size
        fields = (self.magic, self.version, self.codec, self.dtype, self.flags, self.ndim, self.log2, self.checksum_id)
        return struct.pack(LAYOUT, *fields, self.reserved, self.checksum, self.numel, size) + dims + self.payload

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.bytes()), dtype=torch.uint8)
