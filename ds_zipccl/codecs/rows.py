"""Row frames (FORMAT.md 2.6): rows that repeat earlier rows, or are scaled copies of them. Here the payload, in :mod:`.row_segment` the
sender's choices, in :mod:`.row_map` the map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import exponent, nested, row_map
from ds_zipccl.codecs.delta import DELTA
from ds_zipccl.codecs.nested import Nested
from ds_zipccl.codecs.raw import RAW
from ds_zipccl.codecs.rounded import ROUNDED
from ds_zipccl.codecs.row_map import FIELDS_BYTES, MOST_ROWS, Fields, RowMap, contradiction
from ds_zipccl.codecs.spec import PayloadSpec, any_size
from ds_zipccl.frame import DTYPE_IDS, HEADER_BYTES, CodecId, FrameErrorCode, Header, pad16
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.cpp.backend import CppBackend

#: Gives a flat tensor of so many elements of a dtype on a device, contents undefined.
Scratch = Callable[[int, torch.dtype, torch.device], torch.Tensor]
#: Codec byte of a frame of literals -> its format.
LITERALS: dict[CodecId, PayloadSpec] = {**nested.LITERALS, ROUNDED.frame_id: ROUNDED}


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
    words: torch.Tensor, rows: RowMap, fields: Fields, factors: torch.Tensor, literals: Literals, out: torch.Tensor
) -> int | None:
    """Write the payload of a row frame up to its literals to ``out``; blocks.

    Args:
        words: the frame's elements, flat.
        factors: float32, one for each scaled row.
        out: flat uint8, as much as the payload may have.

    Returns:
        Where the deltas begin, or the payload ends if there are none; None if the payload might not fit in ``out``.
    """
    if not _fits(fields, literals, words.dtype, out):
        return None
    front = np.zeros(fields.literals_at, dtype=np.uint8)
    front[: fields.factors_at] = row_map.write_map(fields, rows)
    out[: len(front)].copy_(tensors.of_buffer(front))
    if fields.scaled:
        out[fields.factors_at : fields.factors_at + 4 * fields.scaled].copy_(factors.view(torch.uint8))
    return _encode_literals(words, row_list(rows.literals, words.device), fields, literals, out)


def encode_repeats(
    words: torch.Tensor, literal: torch.Tensor, fields: Fields, literals: Literals, out: torch.Tensor
) -> int | None:
    """As :func:`encode`, on the CPU, for a frame without scaled rows, whose map is in ``out`` already if it fits there.

    Args:
        literal: the literal rows, int32, from the frame's first whole row on.

    Returns:
        Bytes of the payload; None if it might not fit in ``out``.
    """
    if not _fits(fields, literals, words.dtype, out):
        return None
    out.numpy()[:FIELDS_BYTES] = np.frombuffer(fields.pack(), dtype=np.uint8)
    return _encode_literals(words, literal, fields, literals, out)


def _fits(fields: Fields, literals: Literals, dtype: torch.dtype, out: torch.Tensor) -> bool:
    """Whether ``out`` has room for the payload up to its deltas, whatever the literals are."""
    room = out.numel() - fields.literals_at - HEADER_BYTES
    return pad16(literals.spec.payload_bound(fields.literal_numel, dtype, literals.block)) <= room


def _encode_literals(
    words: torch.Tensor, literal: torch.Tensor, fields: Fields, literals: Literals, out: torch.Tensor
) -> int:
    at, numel, dtype = fields.literals_at, fields.literal_numel, words.dtype
    spec, block, width, head = literals.spec, literals.block, fields.width, fields.head
    room = out[at + HEADER_BYTES :]
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
        size = _coded(words, literal, fields, literals, room)
    return nested.finish(Header(spec.frame_id, dtype, numel, HEADER_BYTES + size, block), out, at)


def _coded(words: torch.Tensor, literal: torch.Tensor, fields: Fields, literals: Literals, room: torch.Tensor) -> int:
    width, head, block, device = fields.width, fields.head, literals.block, words.device.type
    if not literals.mantissa:
        kernel = kernels.route(literals.route, device)
        return kernel.encode_rows(words, width, head, literal, literals.code, block, room)
    rounding = kernels.lossy_route(literals.route, device, "encode_rounded_rows")
    return rounding.encode_rounded_rows(words, width, head, literal, literals.mantissa, block, room)


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
    return nested.finish(Header(DELTA.frame_id, words.dtype, words.numel(), HEADER_BYTES + size, block), out, at)


# --- decoding


@dataclass(frozen=True)
class _Parsed:
    fields: Fields
    rows: RowMap
    factors: torch.Tensor
    literals: Nested
    deltas: Nested | None


def _nested(
    payload: torch.Tensor, at: int, specs: dict[CodecId, PayloadSpec], dtype: torch.dtype, numel: int
) -> Nested:
    """The frame that begins at ``at``; it must be of one of ``specs`` and of these elements."""
    header = nested.header_at(payload, at, FrameErrorCode.ROWS)
    if header.codec not in specs or (header.dtype, header.numel) != (dtype, numel):
        raise contradiction(
            f"a nested {header.codec.name} frame of {header.numel} {header.dtype}, wanted {numel} {dtype} "
            f"by {' or '.join(codec.name for codec in specs)}"
        )
    return nested.part(payload, at, header, specs[header.codec])


def _parse(payload: torch.Tensor, earlier: int, numel: int, dtype: torch.dtype) -> _Parsed:
    """Every part of a payload, proven; ``earlier``: elements that the receiver holds in front of the frame."""
    fields = row_map.read_fields(payload[:FIELDS_BYTES].cpu().numpy().tobytes(), numel, dtype, payload.numel())
    data = payload[FIELDS_BYTES : fields.factors_at].cpu().numpy()
    rows = row_map.read_map(fields, data, (earlier + fields.head) // fields.width)
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
    return _Parsed(fields, rows, factors, literals, deltas)


def _prove(payload: torch.Tensor, header: Header) -> None:
    _parse(payload, 0, header.numel, header.dtype)


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    front = 0 if base is None else base.numel()
    compiled = kernels.compiled(route, words.device.type)
    if compiled is not None and _decode_repeats(payload, front, words, compiled, route):
        return
    parsed = _parse(payload, front, words.numel(), words.dtype)
    fields, rows, literals = parsed.fields, parsed.rows, parsed.literals
    width, head, device = fields.width, fields.head, words.device
    literal = row_list(rows.literals, device)
    kernel = kernels.route(route, device.type)
    if literals.spec is RAW:
        item = words.itemsize
        row_moves.spread(literals.payload, words.view(torch.uint8), width * item, head * item, literal)
    else:
        _decode_literals(literals, words, fields, literal, route)
    reach = rows.reach
    start = words.storage_offset() + head - reach * width
    grid = words.as_strided(((reach + fields.rows) * width,), (1,), start)
    if parsed.deltas is not None:
        deltas = tensors.empty(fields.scaled * width, words.dtype, device)
        kernel.predict_rows(grid, width, row_list(rows.scaled_sources + reach, device), parsed.factors, deltas)
        DELTA.decode(parsed.deltas.payload, deltas, parsed.deltas.block, deltas, route)
        scaled = row_list(rows.scaled + reach, device).long()
        row_moves.matrix(grid, width).index_copy_(0, scaled, row_moves.matrix(deltas, width))
    if fields.repeats:
        repeated, sources = (row_list(some + reach, device) for some in (rows.repeated, rows.repeat_sources))
        kernel.copy_rows(grid, width, repeated, sources)


def _decode_literals(literals: Nested, words: torch.Tensor, fields: Fields, literal: torch.Tensor, route: str) -> None:
    """Decode literals that are not raw; a refusal is before any other word is written."""
    where = literals.payload, literals.block, words, fields.width, fields.head, literal
    if literals.spec is ROUNDED:
        kernels.lossy_route(route, words.device.type, "decode_rounded_rows").decode_rounded_rows(*where)
    else:
        kernels.route(route, words.device.type).decode_rows(*where)


def _decode_repeats(payload: torch.Tensor, earlier: int, words: torch.Tensor, compiled: CppBackend, route: str) -> bool:
    """Decode a payload without scaled rows, and with a literal frame that is not raw, if nothing in it contradicts itself."""
    start = payload[:FIELDS_BYTES].numpy().tobytes()
    fields = row_map.read_fields(start, words.numel(), words.dtype, payload.numel())
    width, head, at = fields.width, fields.head, fields.literals_at
    reach = min((earlier + head) // width, MOST_ROWS)
    if fields.scaled:
        return False
    numbers = compiled.unpack_repeats(payload[FIELDS_BYTES:], fields.rows, fields.repeats, fields.repeat_bits, reach)
    if numbers is None:
        raise contradiction(
            f"the map does not mark {fields.repeats} repeated rows, or the source of one is not held or itself repeated"
        )
    literals = _nested(payload, at, LITERALS, words.dtype, fields.literal_numel)
    if literals.spec is RAW or pad16(literals.end) != payload.numel():
        return False
    literal, repeated, sources = numbers
    _decode_literals(literals, words, fields, literal, route)
    front = words.storage_offset() + head - reach * width
    grid = words.as_strided(((reach + fields.rows) * width,), (1,), front)
    compiled.copy_rows(grid, width, repeated, sources)
    return True


def _block(wanted: int) -> int:
    return 0


def _payload_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    return FIELDS_BYTES + HEADER_BYTES


ROWS = PayloadSpec(
    name="rows",
    frame_id=CodecId.ROWS,
    dtypes=tuple(DTYPE_IDS),
    needs_base=False,
    takes_earlier=True,
    payload_bound=any_size,
    payload_floor=_payload_floor,
    prove=_prove,
    decode=_decode,
    decode_add=None,
)
