"""Row, scaled, low-rank and ZFP frames by hand: the good ones are decoded, and each contradiction is refused with its code, before anything
else is written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import from_format
import from_format_rows
import pytest
import torch
import variants
from corpus import assert_same_bits
from test_frame import Raw
from test_fuzz import Receiver
from test_lowrank import factors, frame_of

import ds_zipccl
from ds_zipccl import codecs, kernels, tensors
from ds_zipccl import frame as framing
from ds_zipccl.codecs import decompress, decompress_add, lowrank
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode
from ds_zipccl.lossy import Int, Round, TacoFp8, Zfp

route = variants.each(variants.COMPILED)
RESERVED, SIZE, BLOCK, CODEC, MISMATCH, ROWS = (
    FrameErrorCode.RESERVED, FrameErrorCode.SIZE, FrameErrorCode.BLOCK, FrameErrorCode.CODEC, FrameErrorCode.MISMATCH, FrameErrorCode.ROWS
)  # fmt: skip


def refuses(codes: set[FrameErrorCode], read: Callable[..., object], *arguments: object, route: str) -> None:
    with pytest.raises(FrameError) as caught:
        read(*arguments, route=route)
    assert caught.value.code in codes, (read.__name__, str(caught.value))


# --- rows


def header(codec: int, numel: int, payload: bytes, dtype: int = 1, log2: int = 0) -> bytes:
    return Raw(codec=codec, dtype=dtype, log2=log2, numel=numel, payload=payload).bytes()


@dataclass
class Rows:
    """A row frame by hand, bf16, width 4, head 2, 6 rows, tail 1: row 1 repeats row -1 (one element of the history, the head), row 3 and 5
    repeat row 0, row 4 is row 2 by 0.5. The history has 7 elements."""

    width: int = 4
    head: int = 2
    repeats: int = 3
    scaled: int = 1
    bits: tuple[int, int] = (3, 1)
    rest: bytes = bytes(14)
    map: str = "010101" + "001" + "100" + "010" + "001" + "1"
    factor: int = 0x3F000000
    literal_numel: int = 2 + 2 * 4 + 1
    literal: Callable[[bytes], bytes] = lambda frame: frame
    deltas: Callable[[bytes], bytes] = lambda frame: frame
    end: bytes = b""
    numel: int = 27
    dtype: int = 1

    def frame(self) -> torch.Tensor:
        packed = int(self.map[::-1] or "0", 2).to_bytes(-(-len(self.map) // 128) * 16, "little")
        payload = (
            struct.pack("<4I2B", self.width, self.head, self.repeats, self.scaled, *self.bits) + self.rest + packed
        )
        payload += struct.pack("<I", self.factor) + bytes(12) if self.scaled else b""
        literal = [0x3F80 + i for i in range(self.literal_numel)]
        nested = self.literal(header(0, len(literal), struct.pack(f"<{len(literal)}H", *literal), self.dtype))
        payload += nested + bytes(-len(nested) % 16)
        if self.scaled:
            base = [word - 0x80 for word in literal[6:10]]
            payload += self.deltas(from_format.encode(base, 1, 128, None, False, base=base))
        payload += self.end
        return torch.tensor(list(header(7, self.numel, payload, self.dtype)), dtype=torch.uint8)


def other(at: int, value: int) -> Callable[[bytes], bytes]:
    return lambda frame: frame[:at] + bytes([value]) + frame[at + 1 :]


#: Name -> the frame, refused with the code ROWS, or the frame and its code.
BY_ROWS: dict[str, Rows | tuple[Rows, FrameErrorCode]] = {
    "width 0": Rows(width=0),
    "another width": Rows(width=3),
    "a width of 2^32 - 1": Rows(width=(1 << 32) - 1),
    "a head as wide as a row": Rows(head=4),
    "another head": Rows(head=3, numel=28),
    "a head longer than the frame": Rows(width=100, head=28, repeats=0, scaled=0),
    "a byte that is not zero": Rows(rest=bytes(13) + b"\1"),
    "more repeats than rows": Rows(repeats=7),
    "2^32 - 1 repeats": Rows(repeats=(1 << 32) - 1),
    "repeats and scaled rows more than rows": Rows(repeats=5, scaled=2),
    "fewer repeats than the map": Rows(repeats=2),
    "more repeats than the map": Rows(repeats=4),
    "more scaled rows than the map": Rows(scaled=2),
    "no scaled row in the map": Rows(map="010101" + "000" + "100" + "010" + "001" + "1"),
    "33 bits": Rows(bits=(33, 1)),
    "255 bits of a scaled row": Rows(bits=(3, 255)),
    "32 bits, for which the map is too short": Rows(bits=(32, 32)),
    "scaled rows of float64": Rows(dtype=4),
    "scaled rows of float8": Rows(dtype=14),
    "a source in front of the history": Rows(map="010101" + "001" + "011" + "010" + "001" + "1"),
    "a source that lies partly in front of it": Rows(map="010101" + "001" + "110" + "010" + "001" + "1"),
    "a repeat of a repeat": Rows(map="010101" + "001" + "100" + "100" + "001" + "1"),
    "a prediction from a repeat": Rows(map="010101" + "001" + "100" + "010" + "001" + "0"),
    "a factor of 0": Rows(factor=0),
    "a denormal factor": Rows(factor=0x807FFFFF),
    "an infinite factor": Rows(factor=0xFF800000),
    "a factor that is no number": Rows(factor=0x7FC00000),
    "literals of another number": Rows(literal_numel=12),
    "literals of another dtype": Rows(literal=other(6, 2)),
    "literals by rows": Rows(literal=lambda frame: header(7, 11, frame[32:] + bytes(80))),
    "literals by delta": Rows(literal=lambda frame: header(2, 11, frame[32:] + bytes(80), 1, 7)),
    "literals with a shape": Rows(literal=other(7, 2)),
    "literals with a checksum": Rows(literal=other(7, 1)),
    "overflowed literals": (Rows(literal=other(7, 4)), FrameErrorCode.OVERFLOWED),
    "literals without their magic": (Rows(literal=other(0, 0)), FrameErrorCode.MAGIC),
    "literals of version 1": (Rows(literal=other(4, 1)), FrameErrorCode.VERSION),
    "literals by an unknown codec": (Rows(literal=other(5, 77)), FrameErrorCode.CODEC),
    "literals of blocks": (Rows(literal=other(9, 7)), RESERVED),
    "literals that end too early": (Rows(literal=other(24, 50)), SIZE),
    "literals longer than the payload": (Rows(literal=other(26, 1)), FrameErrorCode.TRUNCATED),
    "deltas of another number": Rows(deltas=other(16, 5)),
    "deltas by exponent": Rows(deltas=other(5, 1)),
    "deltas with a bad index": (Rows(deltas=other(32, 9)), FrameErrorCode.INDEX),
    "bytes behind the deltas": Rows(end=bytes(16)),
    "an elementwise monster": Rows(width=1, head=0, numel=1 << 40, repeats=1 << 31),
}


def decoded(frame: torch.Tensor, numel: int, route: str) -> torch.Tensor:
    """The words of a frame behind 7 words of history, with proof that nothing else is written."""
    dtype = framing.DTYPES[int(frame[6])]
    history = torch.arange(0x3F00, 0x3F07, dtype=torch.int16).view(torch.uint8).repeat(4)[: 7 * dtype.itemsize]
    receiver = Receiver(history.view(dtype), torch.empty(numel, dtype=dtype))
    try:
        decompress(frame, receiver.out, earlier=receiver.earlier, route=route)
    finally:
        assert receiver.intact()
    return receiver.out


def test_the_row_frame_by_hand_is_good(route: str) -> None:
    frame = Rows().frame()
    words = decoded(frame, 27, route)
    history = list(range(0x3F00, 0x3F07))
    literal = [0x3F80 + i for i in range(11)]
    row = literal[2:6]
    crossing = [*history[-2:], *literal[:2]]
    wanted = [
        *literal[:2],
        *row,
        *crossing,
        *literal[6:10],
        *row,
        *(word - 0x80 for word in literal[6:10]),
        *row,
        literal[10],
    ]
    assert [word & 0xFFFF for word in words.view(torch.int16).tolist()] == wanted
    assert from_format_rows.decode(frame.numpy().tobytes(), history) == wanted


@pytest.mark.parametrize(
    "hand",
    [
        Rows(repeats=0, scaled=0, map="000000", literal_numel=27, bits=(0, 0)),
        Rows(width=100, head=0, repeats=0, scaled=0, map="", literal_numel=27, bits=(32, 32)),
        Rows(width=100, head=27, repeats=0, scaled=0, map="", literal_numel=27, bits=(0, 0)),
        Rows(width=5, head=0, repeats=0, scaled=0, map="", numel=0, literal_numel=0),
    ],
    ids=["all literal", "no whole row", "head alone", "empty"],
)
def test_frames_that_no_encoder_sends_are_taken(hand: Rows, route: str) -> None:
    frame = hand.frame()
    wanted = [0x3F80 + i for i in range(hand.numel)]
    assert decoded(frame, hand.numel, route).view(torch.int16).tolist() == wanted
    assert decompress(frame, route=route).view(torch.int16).tolist() == wanted
    assert from_format_rows.decode(frame.numpy().tobytes(), []) == wanted


def _refused_rows(name: str, route: str) -> None:
    found = BY_ROWS[name]
    hand, code = found if isinstance(found, tuple) else (found, ROWS)
    frame = hand.frame()
    refuses(
        {code} if hand.numel >= 100 else {*FrameErrorCode}, decompress, frame, route=route
    )  # before it allocates an output
    if hand.numel < 100:
        refuses({code}, decoded, frame, hand.numel, route=route)
    if code is ROWS:
        with pytest.raises(from_format_rows.Contradiction):
            from_format_rows.decode(frame.numpy().tobytes(), list(range(7)))


# --- scaled codes


@dataclass(frozen=True)
class Scaled:
    """A scaled frame by hand: 3 groups of 32, of which the second is zero."""

    kind: int = 1
    bits: int = 8
    log2: int = 5
    flags: int = 0
    zeros: int = 0
    code_bytes: int = 64
    scales: bytes = bytes((127, 0, 120)) + bytes(13)
    codes: bytes = bytes(range(64))
    numel: int = 90
    block_log2: int = 0
    dtype: int = 3

    def frame(self) -> torch.Tensor:
        payload = struct.pack("<4BIQ", self.kind, self.bits, self.log2, self.flags, self.zeros, self.code_bytes)
        payload += self.scales + self.codes
        return Raw(codec=4, dtype=self.dtype, log2=self.block_log2, numel=self.numel, payload=payload).tensor()


INTEGERS = Scaled(
    kind=2, bits=4, code_bytes=32, scales=struct.pack("<3H", 0x3F80, 0, 0x0001) + bytes(10), codes=bytes(32)
)
STAGED = replace(Scaled(), flags=2, block_log2=7)
SCALED: dict[str, tuple[Scaled, FrameErrorCode]] = {
    "unknown flag": (Scaled(flags=4), RESERVED),
    "stage 2 of integers": (replace(INTEGERS, flags=2, block_log2=7), RESERVED),
    "stage 2 without blocks": (Scaled(flags=2), RESERVED),
    "blocks without stage 2": (Scaled(block_log2=7), RESERVED),
    "blocks of no frame": (Scaled(block_log2=6), RESERVED),
    "zeros": (Scaled(zeros=1 << 24), RESERVED),
    "kind 0": (Scaled(kind=0), BLOCK),
    "kind 3": (Scaled(kind=3), BLOCK),
    "e4m3 of 6 bits": (Scaled(bits=6), BLOCK),
    "integers of 5 bits": (replace(INTEGERS, bits=5), BLOCK),
    "groups of 16": (Scaled(log2=4), BLOCK),
    "groups of 1024": (Scaled(log2=10), BLOCK),
    "groups of 2^200": (Scaled(log2=200), BLOCK),
    "scale 255": (Scaled(scales=bytes((255, 0, 120)) + bytes(13)), BLOCK),
    "scale 247": (Scaled(scales=bytes((247, 0, 120)) + bytes(13)), BLOCK),
    "scale 242 with a transform": (Scaled(flags=1, scales=bytes((242, 0, 120)) + bytes(13)), BLOCK),
    "a negative scale": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 0x8001) + bytes(10)), BLOCK),
    "a scale of -0": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0x8000, 1) + bytes(10)), BLOCK),
    "an infinite scale": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 0x7F80) + bytes(10)), BLOCK),
    "a scale too large": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 252 << 7) + bytes(10)), BLOCK),
    "a NaN": (Scaled(codes=bytes(63) + b"\x7f"), BLOCK),
    "a negative NaN": (Scaled(codes=b"\xff" + bytes(63)), BLOCK),
    "a number above 2m": (replace(INTEGERS, codes=(b"\x80" + bytes(3)) * 4 + bytes(16)), BLOCK),
    "a code too few": (Scaled(codes=bytes(63), code_bytes=63), SIZE),
    "a group too many": (Scaled(codes=bytes(96), code_bytes=96), SIZE),
    "code_bytes too small": (Scaled(code_bytes=63), SIZE),
    "code_bytes of 2^64 - 1": (Scaled(code_bytes=(1 << 64) - 1), SIZE),
    "no room for scales": (Scaled(numel=700), SIZE),
    "elements without end": (Scaled(numel=(1 << 62) + 1), SIZE),
    "stage 2 too short": (replace(STAGED, codes=bytes(16), code_bytes=16), SIZE),
    "stage 2 too long": (replace(STAGED, codes=bytes(400), code_bytes=400), SIZE),
    "stage 2 without an index": (STAGED, FrameErrorCode.INDEX),
    "another dtype": (Scaled(dtype=4), CODEC),
}


def _refused_codes(name: str, route: str) -> None:
    hand, code = SCALED[name]
    refuses({code}, decompress, hand.frame(), route=route)
    out = torch.zeros(hand.numel if hand.numel < 1000 else 90, dtype=framing.DTYPES[hand.dtype])
    refuses({code, MISMATCH}, decompress, hand.frame(), out, route=route)
    if hand.dtype == 3 and hand.numel == 90:
        refuses({code}, decompress_add, hand.frame(), out, route=route)


def test_good_scaled_frames_by_hand(route: str) -> None:
    """The frames that the refused ones differ from, and the largest scales."""
    values = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    wanted = torch.cat([values[:32], torch.zeros(32), values[32:58] * 2.0**-7])
    assert torch.equal(decompress(Scaled().frame(), route=route), wanted)
    wanted = torch.cat([torch.full((32,), -7.0), torch.zeros(32), torch.full((26,), -7 * 2.0**-133)])
    assert torch.equal(decompress(INTEGERS.frame(), route=route), wanted)
    for dtype, hadamard in ((1, 0), (1, 1), (3, 0), (3, 1)):
        top = 241 if hadamard else 246
        hand = Scaled(flags=hadamard, scales=bytes((top, 0, top)) + bytes(13), codes=b"\x7e" * 64, dtype=dtype)
        kept = decompress(hand.frame(), route=route)
        assert kept.isfinite().all() and kept[0] == 448 * 2.0 ** (top - 127)
    hand = Scaled(scales=bytes((150, 0, 150)) + bytes(13), codes=b"\x7e\xfe" * 32, dtype=2)
    assert decompress(hand.frame(), route=route)[:2].tolist() == [65504.0, -65504.0]


# --- low-rank factors


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 2.0**126])
def test_factors_beyond_float32_have_no_frame(value: float) -> None:
    p, q = factors(30, 40, 3)
    p[4, 1] = value
    with pytest.raises(ValueError, match="must be finite"):
        lowrank.product(p, q, torch.empty(30, 40))
    with pytest.raises(ValueError, match="must be finite; send the matrix itself"):
        frame_of(p, q, torch.bfloat16)
    assert not lowrank.bounded(p, q) and lowrank.bounded(*factors(30, 40, 3))


def test_arguments_of_another_kind_are_refused() -> None:
    p, q = factors(30, 40, 3)
    for wrong in (p.double(), p.t(), p.reshape(-1), p[:, :2].contiguous(), torch.empty(30, 0)):
        with pytest.raises(ValueError, match=r"two dimensions|equally many columns"):
            frame_of(wrong, q, torch.bfloat16)
    for dtype, shape in ((torch.float64, None), (torch.bfloat16, (30, 41)), (torch.bfloat16, (1200, *[1] * 64))):
        with pytest.raises(ValueError, match=r"low-rank frames hold|elements is wanted"):
            frame_of(p, q, dtype, shape=shape)
    with pytest.raises(ValueError, match="out must be a contiguous tensor of 1200 elements"):
        lowrank.product(p, q, torch.empty(30, 41))
    memory = torch.zeros(1200 + 10)
    with pytest.raises(ValueError, match="of an output are also in an input"):
        lowrank.product(memory[:90].view(30, 3), torch.ones(40, 3), memory[10:].view(30, 40))
    with pytest.raises(ValueError, match="needs a q of 9 rows, got 40"):
        lowrank.power_step(torch.ones(4, 9), q)
    with pytest.raises(ValueError, match="no route 'rocm'"):
        lowrank.orthonormalize(torch.ones(3, 1), route="rocm")


#: Case -> place in the payload, form, value, code.
LOWRANK = {
    "rows": (0, "<I", 41, BLOCK),
    "rows and columns that overflow": (0, "<I", 0xFFFFFFFF, BLOCK),
    "columns": (4, "<I", 0, BLOCK),
    "rows and columns the other way": (0, "<Q", 50 | 40 << 32, SIZE),
    "other rows of as many elements": (0, "<Q", 2000 | 1 << 32, BLOCK),
    "no rank": (8, "<I", 0, BLOCK),
    "a rank above the rows": (8, "<I", 41, BLOCK),
    "a rank with more values than the matrix": (8, "<I", 23, BLOCK),
    "a rank that the factors do not have": (8, "<I", 4, SIZE),
    "a reserved field": (12, "<I", 1, RESERVED),
    "magic of P": (16, "<B", 0, FrameErrorCode.MAGIC),
    "codec of P": (21, "<B", CodecId.LOWRANK, RESERVED),
    "another codec of P": (21, "<B", CodecId.DELTA, CODEC),
    "dtype of P": (22, "<B", 1, CODEC),
    "a shape of P": (23, "<B", 2, RESERVED),
    "a checksum of P": (23, "<B", 1, RESERVED),
    "an overflowed P": (23, "<B", 4, FrameErrorCode.OVERFLOWED),
    "elements of P": (32, "<Q", 121, SIZE),
    "very many elements of P": (32, "<Q", 1 << 62, SIZE),
    "bytes of P": (40, "<Q", 1 << 40, FrameErrorCode.TRUNCATED),
    "bytes of P below its header": (40, "<Q", 31, FrameErrorCode.TRUNCATED),
}


def _refused_factors(name: str, route: str) -> None:
    """A good frame of 40 by 50 elements and rank 3 with another value in its payload."""
    at, form, value, code = LOWRANK[name]
    damaged = bytearray(frame_of(*factors(40, 50, 3), torch.bfloat16).numpy().tobytes())
    struct.pack_into(form, damaged, 32 + at, value)
    frame = torch.frombuffer(damaged, dtype=torch.uint8)
    refuses({code}, decompress, frame, route=route)
    refuses({code}, decompress_add, frame, torch.zeros(2000), route=route)


def _raw(p: torch.Tensor, q: torch.Tensor) -> bytearray:
    """A frame of raw factors, as an encoder that codes nothing would write it."""
    frames = (codecs.compress(one, "raw", shaped=False, checksum=False).numpy().tobytes() for one in (p, q))
    nested = b"".join(one.ljust(-(-len(one) // 16) * 16, b"\0") for one in frames)
    payload = struct.pack("<4I", len(p), len(q), p.shape[1], 0) + nested
    return bytearray(header(CodecId.LOWRANK, len(p) * len(q), payload))


def test_raw_factors_are_read_and_values_that_are_not_finite_refused() -> None:
    p, q = torch.randn(40, 4), torch.randn(48, 4)
    good = torch.frombuffer(_raw(p, q), dtype=torch.uint8)
    wanted = lowrank.product(p, q, torch.empty(1920, dtype=torch.bfloat16))
    assert_same_bits(decompress(good), wanted)
    for place, value in ((p, torch.inf), (q, torch.nan), (q, 2.0**126)):
        before = float(place[3, 2])
        place[3, 2] = value
        for variant in variants.usable(variants.CPP):
            with variant.in_use() as route, pytest.raises(FrameError, match=r"BLOCK: .* not finite"):
                decompress(torch.frombuffer(_raw(p, q), dtype=torch.uint8), route=route)
        place[3, 2] = before
    frame = _raw(p, q)
    frame[32 + 16 + 32 + 640 + 32 :] += bytes(16)
    struct.pack_into("<Q", frame, 24, len(frame))
    with pytest.raises(FrameError, match=r"SIZE: .* whose parts have"):
        decompress(torch.frombuffer(frame, dtype=torch.uint8))


def test_padding_of_nested_frames_is_zero() -> None:
    p, q = torch.randn(41, 3), torch.randn(53, 3)
    frame = _raw(p, q)
    wanted = lowrank.product(p, q, torch.empty(41 * 53, dtype=torch.bfloat16))
    assert_same_bits(decompress(torch.frombuffer(bytearray(frame), dtype=torch.uint8)), wanted)
    for at in (32 + 16 + 32 + p.nbytes, len(frame) - 1):
        one = bytearray(frame)
        one[at] = 1
        with pytest.raises(FrameError, match=r"RESERVED: .* padding"):
            decompress(torch.frombuffer(one, dtype=torch.uint8))


def test_nothing_is_allocated_for_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that says 2^60 elements, and factors of very many: refused before there is memory for either."""
    asked: list[int] = []
    real = tensors.empty
    monkeypatch.setattr(tensors, "empty", lambda numel, *more: asked.append(numel) or real(min(numel, 4096), *more))
    frame = bytearray(frame_of(*factors(40, 50, 3), torch.bfloat16).numpy().tobytes())
    asked.clear()
    for place, form, values in ((16, "<Q", (1 << 60,)), (32, "<2I", (1 << 30, 1 << 30)), (32, "<I", (41,))):
        one = bytearray(frame)
        struct.pack_into(form, one, place, *values)
        with pytest.raises(FrameError, match="BLOCK"):
            decompress(torch.frombuffer(one, dtype=torch.uint8))
    assert asked == []


# --- ZFP


GOOD_ZFP = header(CodecId.ZFP1, 40, struct.pack("<I12x", 8) + bytes(40), 3)


def _wrong_fields() -> dict[str, tuple[bytes, FrameErrorCode]]:
    """Frames of 40 float32 words at rate 8, each wrong in one field."""

    def changed(at: int, form: str, value: int, cut: int = len(GOOD_ZFP)) -> bytes:
        frame = bytearray(GOOD_ZFP[:cut])
        struct.pack_into(form, frame, at, value)
        struct.pack_into("<Q", frame, 24, len(frame)) if at != 24 else None
        return bytes(frame)

    return {
        **{f"byte {at} of the fields": (changed(at, "B", 1), RESERVED) for at in range(36, 48)},
        "rate 0": (changed(32, "<I", 0), BLOCK),
        "rate 2": (changed(32, "<I", 2), BLOCK),
        "rate 33": (changed(32, "<I", 33), BLOCK),
        "rate of 32 bits": (changed(32, "<I", 0x80000008), BLOCK),
        "rate 6": (changed(32, "<I", 6), SIZE),
        "rate 9": (changed(32, "<I", 9), SIZE),
        "a word less": (changed(36, "B", 0, 80), SIZE),
        "no codes": (changed(36, "B", 0, 48), SIZE),
        "no fields": (changed(8, "B", 0, 40), SIZE),
        "five elements more": (changed(16, "<Q", 45), SIZE),
        "most elements": (changed(16, "<Q", (1 << 64) - 1), SIZE),
        "a block": (changed(9, "B", 8), RESERVED),
        "int8": (changed(6, "B", 5), CODEC),
        "float64": (changed(6, "B", 4), CODEC),
    }


WRONG_FIELDS = _wrong_fields()


def _refused_zfp(name: str, route: str) -> None:
    assert not decompress(torch.tensor([*GOOD_ZFP], dtype=torch.uint8), route=route).any()
    frame, code = WRONG_FIELDS[name]
    received = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    refuses({code}, decompress, received, route=route)
    for read in (decompress, decompress_add):
        refuses({code, MISMATCH}, read, received, torch.zeros(40), route=route)


# --- all of them

FAMILIES = {"rows": (BY_ROWS, _refused_rows), "scaled": (SCALED, _refused_codes), "zfp": (WRONG_FIELDS, _refused_zfp)}


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, (cases, _) in FAMILIES.items() for name in cases]
)
def test_refused(family: str, name: str, route: str) -> None:
    FAMILIES[family][1](name, route)


@pytest.mark.parametrize("name", LOWRANK)
def test_refused_factors(name: str) -> None:
    """By the C++ route, the only one with kernels of low-rank frames."""
    for variant in variants.usable(variants.CPP):
        with variant.in_use() as route:
            _refused_factors(name, route)


# --- a route without the kernels


def test_numba_says_that_it_lacks_the_kernels() -> None:
    """Frames of these codecs are written, read and projected by other routes alone; the message names the function."""
    words = torch.randn(512, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, pair = words.repeat(4), factors(30, 40, 3)
    difference = codecs.compress(words, "delta", base=words)
    calls: dict[str, Callable[[], object]] = {
        "encode_delta": lambda: codecs.compress(words, "delta", base=words, route="numba"),
        "decode_delta|encode_delta": lambda: decompress(difference, base=words, route="numba"),
        "find_rows": lambda: ds_zipccl.compress(rows, row_width=512, route="numba"),
        "copy_rows|find_rows": lambda: decompress(ds_zipccl.compress(rows, row_width=512), route="numba"),
        "multiply": lambda: decompress(frame_of(*pair, torch.bfloat16), route="numba"),
        "orthonormalize": lambda: lowrank.orthonormalize(torch.ones(3, 1), route="numba"),
    }
    for codec, name in ((Round(3), "rounded"), (TacoFp8(), "scaled"), (Int(), "scaled"), (Zfp(8), "zfp")):
        frame = codecs.compress(words, codec, lossy=True)
        assert frame[5] > CodecId.DELTA
        calls[f"encode_{name}"] = lambda codec=codec: codecs.compress(words, codec, lossy=True, route="numba")
        calls[f"decode_{name}"] = lambda frame=frame: decompress(frame, route="numba")
        calls["round_words|project_"] = lambda codec=codec: codecs.project(words, codec, route="numba")
        for function in [*calls]:
            with pytest.raises(
                kernels.RouteUnavailable, match=rf"numba: it has no ({function})\w*; install a C\+\+ compiler"
            ):
                calls.pop(function)()
