"""The fields and the map of a row frame (FORMAT.md 2.6), as numbers of numpy."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from ds_zipccl.frame import DELTA_WORDS, HEADER_BYTES, FrameError, FrameErrorCode, pad16

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


def read_fields(data: bytes, numel: int, dtype: torch.dtype, payload_bytes: int) -> Fields:
    """The fields in the first bytes of a payload of ``payload_bytes``.

    Raises:
        FrameError: they contradict each other or the header, or the payload has no room for the map, the factors and a nested header.
    """
    *numbers, rest = _FIELDS.unpack(data)
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
    if fields.literals_at + HEADER_BYTES > payload_bytes:
        raise contradiction(f"{payload_bytes} bytes of payload hold no map of {fields.map_bits} bits")
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
