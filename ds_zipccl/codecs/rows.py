"""Row frames (FORMAT.md 2.6): rows that repeat earlier rows, or are scaled copies of them. Here the payload, in :mod:`.row_segment`
the sender's choices."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent, memory
from ds_zipccl.codecs.exponent import DELTA, RAW, ROUNDED
from ds_zipccl.codecs.memory import Nested
from ds_zipccl.codecs.spec import PayloadSpec, any_size
from ds_zipccl.frame import DELTA_WORDS, DTYPE_IDS, HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header, pad16
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.cpp.backend import CppBackend

#: Gives a flat tensor of so many elements of a dtype on a device, contents undefined.
Scratch = Callable[[int, torch.dtype, torch.device], torch.Tensor]
#: Codec byte of a frame of literals -> its format.
LITERALS: dict[CodecId, PayloadSpec] = {**exponent.LITERALS, ROUNDED.frame_id: ROUNDED}


# --- the fields and the map, as numbers of numpy

_FIELDS = struct.Struct("<4I2B14s")
FIELDS_BYTES = _FIELDS.size
#: Rows of a frame, and the largest distance: kernels count rows in 31 bits.
MOST_ROWS = 1 << 30
_MOST_BITS = 32


@dataclass(frozen=True)
class Fields:
    """The first bytes of a row payload, and the sizes that follow from them for a frame of ``numel`` elements."""

    numel: int
    width: int
    head: int
    repeats: int
    scaled: int
    repeat_bits: int
    scaled_bits: int

    @property
    def rows(self) -> int:
        """Whole rows of the frame."""
        return (self.numel - self.head) // self.width

    @property
    def map_bits(self) -> int:
        """Bits of the map and the distances."""
        second = self.rows - self.repeats if self.scaled else 0
        return self.rows + second + self.repeats * self.repeat_bits + self.scaled * self.scaled_bits

    @property
    def factors_at(self) -> int:
        """Offset of the factors in the payload."""
        return FIELDS_BYTES + pad16(-(-self.map_bits // 8))

    @property
    def literals_at(self) -> int:
        """Offset of the nested frame of literals in the payload."""
        return self.factors_at + pad16(4 * self.scaled)

    @property
    def literal_numel(self) -> int:
        """Elements that are neither in a repeated nor in a scaled row."""
        return self.numel - (self.repeats + self.scaled) * self.width

    def pack(self) -> bytes:
        """The first bytes of the payload."""
        bits = (self.repeat_bits, self.scaled_bits)
        return _FIELDS.pack(self.width, self.head, self.repeats, self.scaled, *bits, bytes(14))


def contradiction(complaint: str) -> FrameError:
    """The refusal of a row frame."""
    return FrameError(FrameErrorCode.ROWS, complaint)


def read_fields(payload: torch.Tensor, numel: int, dtype: torch.dtype) -> Fields:
    """The fields in the first bytes of a payload.

    Raises:
        FrameError: they contradict each other or the header, or the payload has no room for the map, the factors and a nested header.
    """
    *numbers, rest = _FIELDS.unpack(payload[:FIELDS_BYTES].cpu().numpy().tobytes())
    width, head, repeats, scaled, repeat_bits, scaled_bits = numbers
    if width == 0 or head >= width or head > numel or any(rest):
        raise contradiction(f"rows of {width} elements, of which the first begins at element {head} of {numel}")
    fields = Fields(numel, width, head, repeats, scaled, repeat_bits, scaled_bits)
    if fields.rows > MOST_ROWS or repeats + scaled > fields.rows or max(repeat_bits, scaled_bits) > _MOST_BITS:
        raise contradiction(
            f"{repeats} repeated and {scaled} scaled rows of {fields.rows}, distances of {repeat_bits} and {scaled_bits} bits"
        )
    if scaled and dtype not in DELTA_WORDS:
        raise contradiction(f"{scaled} scaled rows of {dtype}")
    if fields.literals_at + HEADER_BYTES > payload.numel():
        raise contradiction(f"{payload.numel()} bytes of payload hold no map of {fields.map_bits} bits")
    return fields


@dataclass(frozen=True)
class RowMap:
    """Rows of a frame by their numbers from its first whole row on, int64 and ascending; ``sources`` may be negative: rows in front."""

    literals: np.ndarray
    repeated: np.ndarray
    repeat_sources: np.ndarray
    scaled: np.ndarray
    scaled_sources: np.ndarray

    @property
    def reach(self) -> int:
        """Rows in front of the frame's first whole row that are the source of a row."""
        both = (self.repeat_sources, self.scaled_sources)
        return max(0, -min((int(some.min()) for some in both if len(some)), default=0))


def read_map(fields: Fields, data: np.ndarray, reach: int) -> RowMap:
    """The map in ``data``: the payload's bytes, uint8, from the fields' end to the factors. ``reach``: rows held in front.

    Raises:
        FrameError: the map contradicts the fields, or a source is not there.
    """
    bits = np.unpackbits(data, count=fields.map_bits, bitorder="little")
    marked_rows = int(np.count_nonzero(bits[: fields.rows]))
    if marked_rows != fields.repeats:
        raise contradiction(f"the map marks {marked_rows} repeated rows, the fields say {fields.repeats}")
    repeated = np.flatnonzero(bits[: fields.rows])
    others = np.flatnonzero(bits[: fields.rows] == 0)
    at = fields.rows
    scaled = others[:0]
    if fields.scaled:
        marks = bits[at : at + len(others)].astype(bool)
        at += len(others)
        scaled, others = others[marks], others[~marks]
        if len(scaled) != fields.scaled:
            raise contradiction(f"the map marks {len(scaled)} scaled rows, the fields say {fields.scaled}")
    near = at + fields.repeats * fields.repeat_bits
    repeat_sources = repeated - _numbers(bits[at:near], fields.repeat_bits, fields.repeats) - 1
    scaled_sources = scaled - _numbers(bits[near:], fields.scaled_bits, fields.scaled) - 1
    for sources, kind in ((repeat_sources, "repeated"), (scaled_sources, "scaled")):
        if len(sources) and int(sources.min()) < -min(reach, MOST_ROWS):
            raise contradiction(
                f"a {kind} row has its source {-int(sources.min())} rows in front of the frame, of {reach}"
            )
    marked = np.zeros(fields.rows, dtype=bool)
    marked[repeated] = True
    if marked[repeat_sources[repeat_sources >= 0]].any():
        raise contradiction("the source of a repeated row is itself repeated")
    marked[scaled] = True
    if marked[scaled_sources[scaled_sources >= 0]].any():
        raise contradiction("the source of a scaled row is no literal row")
    return RowMap(others, repeated, repeat_sources, scaled, scaled_sources)


def fields_of(rows: RowMap, numel: int, width: int, head: int) -> Fields:
    """The fields of a frame with this map: as few bits for a distance as the largest one needs."""
    bits = [
        int((numbers - sources - 1).max()).bit_length() if len(numbers) else 0
        for numbers, sources in ((rows.repeated, rows.repeat_sources), (rows.scaled, rows.scaled_sources))
    ]
    return Fields(numel, width, head, len(rows.repeated), len(rows.scaled), *bits)


def write_map(fields: Fields, rows: RowMap) -> np.ndarray:
    """The payload's bytes before the factors, uint8."""
    marks = np.zeros(fields.rows, dtype=np.uint8)
    marks[rows.repeated] = 1
    bits = [marks]
    if fields.scaled:
        second = np.zeros(fields.rows, dtype=np.uint8)
        second[rows.scaled] = 1
        bits.append(second[marks == 0])
    bits.append(_bits(rows.repeated - rows.repeat_sources - 1, fields.repeat_bits))
    bits.append(_bits(rows.scaled - rows.scaled_sources - 1, fields.scaled_bits))
    packed = np.packbits(np.concatenate(bits), bitorder="little")
    out = np.zeros(fields.factors_at, dtype=np.uint8)
    out[:FIELDS_BYTES] = np.frombuffer(fields.pack(), dtype=np.uint8)
    out[FIELDS_BYTES : FIELDS_BYTES + len(packed)] = packed
    return out


def _numbers(bits: np.ndarray, each: int, count: int) -> np.ndarray:
    """``count`` numbers of ``each`` bits, lowest bit first."""
    numbers = np.zeros(count, dtype=np.int64)
    columns = bits.reshape(count, each) if count else bits[:0]
    for bit in range(each if count else 0):
        numbers |= columns[:, bit].astype(np.int64) << bit
    return numbers


def _bits(numbers: np.ndarray, each: int) -> np.ndarray:
    """The bits of :func:`_numbers`."""
    return (numbers[:, None] >> np.arange(each) & 1).astype(np.uint8).reshape(-1)


def row_list(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers of rows as kernels take them."""
    if not len(numbers):
        return tensors.empty(0, torch.int32, device)
    return tensors.of_buffer(numbers.astype(np.int32)).view(torch.int32).to(device)


# --- encoding


@dataclass(frozen=True)
class Literals:
    """The format, the block of the header, the code, and the kernels of a frame's literals; they are rounded to ``mantissa`` bits unless it
    is 0, and then coded by "cascade"."""

    spec: PayloadSpec
    block: int
    route: str
    code: str = "cascade"
    mantissa: int = 0


def encode(
    words: torch.Tensor,
    rows: RowMap,
    fields: Fields,
    literals: Literals,
    out: torch.Tensor,
    factors: torch.Tensor | None = None,
) -> int | None:
    """Write the payload of a row frame up to its literals to ``out``; blocks.

    Args:
        words: the frame's elements, flat.
        rows: the map.
        out: flat uint8, as much as the payload may have.
        factors: float32, one for each scaled row.

    Returns:
        Where the deltas begin, or the payload ends if there are none; None if the payload might not fit in ``out``.
    """
    spec, block, width, head, at = literals.spec, literals.block, fields.width, fields.head, fields.literals_at
    numel, dtype, room = fields.literal_numel, words.dtype, out[at + HEADER_BYTES :]
    if pad16(spec.payload_bound(numel, dtype, block)) > out.numel() - at - HEADER_BYTES:
        return None
    front = np.zeros(at, dtype=np.uint8)
    front[: fields.factors_at] = write_map(fields, rows)
    out[:at].copy_(tensors.of_buffer(front))
    if factors is not None and fields.scaled:
        out[fields.factors_at : fields.factors_at + 4 * fields.scaled].copy_(factors.view(torch.uint8))
    literal = row_list(rows.literals, words.device)
    size = numel * words.itemsize
    if spec is RAW and literals.mantissa:
        kept = tensors.empty(numel, dtype, words.device)
        row_moves.gather(words, width, head, literal, kept)
        rounding = kernels.lossy_route(literals.route, words.device.type, "round_words")
        rounding.round_words(kept, literals.mantissa, kept)
        room[:size].copy_(kept.view(torch.uint8))
    elif spec is RAW:
        item = words.itemsize
        row_moves.gather(words.view(torch.uint8), width * item, head * item, literal, room[:size])
    else:
        exponent.check_bound(words, spec.payload_bound(words.numel(), dtype, block), exponent.MAX_PAYLOAD)
        kernel = kernels.row_route(literals.route, words.device.type)
        size = kernel.encode_rows(words, width, head, literal, literals.code, block, room, literals.mantissa)
    return memory.finish_nested(Header(spec.frame_id, dtype, numel, HEADER_BYTES + size, block), out, at)


def encode_deltas(
    words: torch.Tensor,
    base: torch.Tensor,
    literals: Literals,
    out: torch.Tensor,
    at: int,
    spill: Callable[[int], torch.Tensor],
) -> int | None:
    """Write the frame of the scaled rows' ``words`` against their predictions ``base`` to ``out`` at ``at``; blocks.

    Args:
        literals: their block and kernels count.
        spill: gives uint8 memory of so many bytes, for a payload that might not fit in ``out``.

    Returns:
        Bytes of the row payload; None if it does not fit in ``out``.
    """
    block, room = literals.block, out[at + HEADER_BYTES :]
    bound = DELTA.payload_bound(words.numel(), words.dtype, block)
    spilled = bound > room.numel()
    to = spill(bound) if spilled else room
    size = DELTA.encode([words], [base], block, [to], literals.route)[0]
    if pad16(size) > room.numel():
        return None
    if spilled:
        room[:size].copy_(to[:size])
    return memory.finish_nested(Header(DELTA.frame_id, words.dtype, words.numel(), HEADER_BYTES + size, block), out, at)


# --- decoding


def _nested(
    payload: torch.Tensor, at: int, specs: dict[CodecId, PayloadSpec], dtype: torch.dtype, numel: int
) -> Nested:
    """The frame that begins at ``at``; it must be of one of ``specs`` and of these elements."""
    header = memory.nested_header(payload, at, FrameErrorCode.ROWS)
    if header.codec not in specs or (header.dtype, header.numel) != (dtype, numel):
        raise contradiction(
            f"a nested {header.codec.name} frame of {header.numel} {header.dtype}, wanted {numel} {dtype} "
            f"by {' or '.join(codec.name for codec in specs)}"
        )
    return memory.nested_part(payload, at, header, specs[header.codec])


def _parse(
    payload: torch.Tensor, earlier: int, numel: int, dtype: torch.dtype
) -> tuple[Fields, RowMap, torch.Tensor, Nested, Nested | None]:
    """Fields, map, factors, literals and deltas of a payload, proven; ``earlier``: elements that the receiver holds in front."""
    fields = read_fields(payload, numel, dtype)
    data = payload[FIELDS_BYTES : fields.factors_at].cpu().numpy()
    rows = read_map(fields, data, (earlier + fields.head) // fields.width)
    factors = payload[fields.factors_at : fields.factors_at + 4 * fields.scaled].clone().view(torch.float32)
    exponents = factors.view(torch.int32) >> 23 & 255
    if bool(((exponents == 0) | (exponents == 255)).any()):
        raise contradiction("a factor is not a finite normal number")
    literals = _nested(payload, fields.literals_at, LITERALS, dtype, fields.literal_numel)
    deltas, end = None, pad16(literals.end)
    if fields.scaled:
        deltas = _nested(payload, end, {DELTA.frame_id: DELTA}, dtype, fields.scaled * fields.width)
        end = pad16(deltas.end)
    if end != payload.numel():
        raise contradiction(f"{payload.numel()} bytes of payload, its parts have {end}")
    return fields, rows, factors, literals, deltas


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    front = 0 if base is None else base.numel()
    compiled = kernels.compiled(route, words.device.type)
    if compiled is not None and _decode_repeats(payload, front, words, compiled, route):
        return
    fields, rows, factors, literals, deltas = _parse(payload, front, words.numel(), words.dtype)
    width, device = fields.width, words.device
    kernel = kernels.row_route(route, device.type)
    _decode_literals(literals, words, fields, row_list(rows.literals, device), route)
    reach = rows.reach
    grid = _from_reach(words, fields, reach)
    if deltas is not None:
        made = tensors.empty(fields.scaled * width, words.dtype, device)
        kernel.predict_rows(grid, width, row_list(rows.scaled_sources + reach, device), factors, made)
        DELTA.decode(deltas.payload, made, deltas.block, made, route)
        scaled = row_list(rows.scaled + reach, device).long()
        row_moves.matrix(grid, width).index_copy_(0, scaled, row_moves.matrix(made, width))
    if fields.repeats:
        repeated, sources = (row_list(some + reach, device) for some in (rows.repeated, rows.repeat_sources))
        kernel.copy_rows(grid, width, repeated, sources)


def _decode_literals(literals: Nested, words: torch.Tensor, fields: Fields, literal: torch.Tensor, route: str) -> None:
    """Decode literals to their places; a refusal is before any other word is written."""
    width, head = fields.width, fields.head
    if literals.spec is RAW:
        item = words.itemsize
        row_moves.spread(literals.payload, words.view(torch.uint8), width * item, head * item, literal)
    else:
        kernel, rounded = kernels.row_route(route, words.device.type), literals.spec is ROUNDED
        kernel.decode_rows(literals.payload, literals.block, words, width, head, literal, rounded)


def _from_reach(words: torch.Tensor, fields: Fields, reach: int) -> torch.Tensor:
    """The whole rows of a frame and the ``reach`` rows in front of them."""
    start = words.storage_offset() + fields.head - reach * fields.width
    return words.as_strided(((reach + fields.rows) * fields.width,), (1,), start)


def _decode_repeats(payload: torch.Tensor, earlier: int, words: torch.Tensor, compiled: CppBackend, route: str) -> bool:
    """Decode a payload without scaled rows, and with a literal frame that is not raw, if nothing in it contradicts itself."""
    fields = read_fields(payload, words.numel(), words.dtype)
    reach = min((earlier + fields.head) // fields.width, MOST_ROWS)
    if fields.scaled:
        return False
    numbers = compiled.unpack_repeats(payload[FIELDS_BYTES:], fields.rows, fields.repeats, fields.repeat_bits, reach)
    if numbers is None:
        raise contradiction(
            f"the map does not mark {fields.repeats} repeated rows, or the source of one is not held or itself repeated"
        )
    literals = _nested(payload, fields.literals_at, LITERALS, words.dtype, fields.literal_numel)
    if literals.spec is RAW or pad16(literals.end) != payload.numel():
        return False
    literal, repeated, sources = numbers
    _decode_literals(literals, words, fields, literal, route)
    compiled.copy_rows(_from_reach(words, fields, reach), fields.width, repeated, sources)
    return True


ROWS = PayloadSpec(
    name="rows",
    frame_id=CodecId.ROWS,
    dtypes=tuple(DTYPE_IDS),
    takes_earlier=True,
    payload_bound=any_size,
    payload_floor=lambda numel, dtype, block: FIELDS_BYTES + HEADER_BYTES,
    prove=lambda payload, header: _parse(payload, 0, header.numel, header.dtype),
    decode=_decode,
)
