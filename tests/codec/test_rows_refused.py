"""Row frames by hand: the good one is decoded, and each contradiction is refused with its code, before anything else is written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import from_format
import from_format_rows
import pytest
import torch
import variants

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.frame import FrameErrorCode

route = variants.each(variants.COMPILED)


def bf16_bytes(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(2, "little") for word in words)


def header(codec: int, numel: int, payload: bytes, dtype: int = 1, log2: int = 0, flags: int = 0) -> bytes:
    return (
        struct.pack("<4s8BIQQ", b"ZCCL", 2, codec, dtype, flags, 0, log2, 0, 0, 0, numel, 32 + len(payload)) + payload
    )


@dataclass
class Hand:
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
        nested = self.literal(header(0, len(literal), bf16_bytes(literal), self.dtype))
        payload += nested + bytes(-len(nested) % 16)
        if self.scaled:
            base = [word - 0x80 for word in literal[6:10]]
            payload += self.deltas(from_format.encode(base, 1, 128, None, False, base=base))
        payload += self.end
        return torch.tensor(list(header(7, self.numel, payload, self.dtype)), dtype=torch.uint8)


def other(at: int, value: int) -> Callable[[bytes], bytes]:
    return lambda frame: frame[:at] + bytes([value]) + frame[at + 1 :]


REFUSED: dict[str, tuple[Hand, FrameErrorCode]] = {
    "width 0": (Hand(width=0), FrameErrorCode.ROWS),
    "another width": (Hand(width=3), FrameErrorCode.ROWS),
    "a width of 2^32 - 1": (Hand(width=(1 << 32) - 1), FrameErrorCode.ROWS),
    "a head as wide as a row": (Hand(head=4), FrameErrorCode.ROWS),
    "another head": (Hand(head=3, numel=28), FrameErrorCode.ROWS),
    "a head longer than the frame": (Hand(width=100, head=28, repeats=0, scaled=0), FrameErrorCode.ROWS),
    "a byte that is not zero": (Hand(rest=bytes(13) + b"\1"), FrameErrorCode.ROWS),
    "more repeats than rows": (Hand(repeats=7), FrameErrorCode.ROWS),
    "2^32 - 1 repeats": (Hand(repeats=(1 << 32) - 1), FrameErrorCode.ROWS),
    "repeats and scaled rows more than rows": (Hand(repeats=5, scaled=2), FrameErrorCode.ROWS),
    "fewer repeats than the map": (Hand(repeats=2), FrameErrorCode.ROWS),
    "more repeats than the map": (Hand(repeats=4), FrameErrorCode.ROWS),
    "more scaled rows than the map": (Hand(scaled=2), FrameErrorCode.ROWS),
    "no scaled row in the map": (Hand(map="010101" + "000" + "100" + "010" + "001" + "1"), FrameErrorCode.ROWS),
    "33 bits": (Hand(bits=(33, 1)), FrameErrorCode.ROWS),
    "255 bits of a scaled row": (Hand(bits=(3, 255)), FrameErrorCode.ROWS),
    "32 bits, for which the map is too short": (Hand(bits=(32, 32)), FrameErrorCode.ROWS),
    "scaled rows of float64": (Hand(dtype=4), FrameErrorCode.ROWS),
    "scaled rows of float8": (Hand(dtype=14), FrameErrorCode.ROWS),
    "a source in front of the history": (Hand(map="010101" + "001" + "011" + "010" + "001" + "1"), FrameErrorCode.ROWS),
    "a source that lies partly in front of it": (
        Hand(map="010101" + "001" + "110" + "010" + "001" + "1"),
        FrameErrorCode.ROWS,
    ),
    "a repeat of a repeat": (Hand(map="010101" + "001" + "100" + "100" + "001" + "1"), FrameErrorCode.ROWS),
    "a prediction from a repeat": (Hand(map="010101" + "001" + "100" + "010" + "001" + "0"), FrameErrorCode.ROWS),
    "a factor of 0": (Hand(factor=0), FrameErrorCode.ROWS),
    "a denormal factor": (Hand(factor=0x807FFFFF), FrameErrorCode.ROWS),
    "an infinite factor": (Hand(factor=0xFF800000), FrameErrorCode.ROWS),
    "a factor that is no number": (Hand(factor=0x7FC00000), FrameErrorCode.ROWS),
    "literals of another number": (Hand(literal_numel=12), FrameErrorCode.ROWS),
    "literals of another dtype": (Hand(literal=other(6, 2)), FrameErrorCode.ROWS),
    "literals by rows": (Hand(literal=lambda frame: header(7, 11, frame[32:] + bytes(80))), FrameErrorCode.ROWS),
    "literals by delta": (Hand(literal=lambda frame: header(2, 11, frame[32:] + bytes(80), 1, 7)), FrameErrorCode.ROWS),
    "literals with a shape": (Hand(literal=other(7, 2)), FrameErrorCode.ROWS),
    "literals with a checksum": (Hand(literal=other(7, 1)), FrameErrorCode.ROWS),
    "overflowed literals": (Hand(literal=other(7, 4)), FrameErrorCode.OVERFLOWED),
    "literals without their magic": (Hand(literal=other(0, 0)), FrameErrorCode.MAGIC),
    "literals of version 1": (Hand(literal=other(4, 1)), FrameErrorCode.VERSION),
    "literals by an unknown codec": (Hand(literal=other(5, 77)), FrameErrorCode.CODEC),
    "literals of blocks": (Hand(literal=other(9, 7)), FrameErrorCode.RESERVED),
    "literals that end too early": (Hand(literal=other(24, 50)), FrameErrorCode.SIZE),
    "literals longer than the payload": (Hand(literal=other(26, 1)), FrameErrorCode.TRUNCATED),
    "deltas of another number": (Hand(deltas=other(16, 5)), FrameErrorCode.ROWS),
    "deltas by exponent": (Hand(deltas=other(5, 1)), FrameErrorCode.ROWS),
    "deltas with a bad index": (Hand(deltas=other(32, 9)), FrameErrorCode.INDEX),
    "bytes behind the deltas": (Hand(end=bytes(16)), FrameErrorCode.ROWS),
    "an elementwise monster": (Hand(width=1, head=0, numel=1 << 40, repeats=1 << 31), FrameErrorCode.ROWS),
}


def decoded(frame: torch.Tensor, route: str, numel: int = 27) -> torch.Tensor:
    """The words of a frame behind 7 words of history, with proof that nothing else is written."""
    dtype = framing.DTYPES[int(frame[6])]
    history = torch.arange(0x3F00, 0x3F07, dtype=torch.int16).view(torch.uint8).repeat(4)[: 7 * dtype.itemsize]
    guard = torch.full((40,), 0x5C, dtype=torch.uint8)
    words = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8)
    memory = torch.cat([guard, history, words, guard])
    at = 40 + history.nbytes
    inside = memory[40 : at + words.nbytes].view(dtype)
    try:
        codecs.decompress(frame, inside[7:], earlier=inside[:7], route=route)
    finally:
        assert torch.equal(memory[:40], guard) and torch.equal(memory[at + words.nbytes :], guard)
        assert torch.equal(memory[40:at], history)
    return inside[7:]


def test_the_frame_by_hand_is_good(route: str) -> None:
    frame = Hand().frame()
    words = decoded(frame, route)
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
        Hand(repeats=0, scaled=0, map="000000", literal_numel=27, bits=(0, 0)),
        Hand(width=100, head=0, repeats=0, scaled=0, map="", literal_numel=27, bits=(32, 32)),
        Hand(width=100, head=27, repeats=0, scaled=0, map="", literal_numel=27, bits=(0, 0)),
        Hand(width=5, head=0, repeats=0, scaled=0, map="", numel=0, literal_numel=0),
    ],
    ids=["all literal", "no whole row", "head alone", "empty"],
)
def test_frames_that_no_encoder_sends_are_taken(hand: Hand, route: str) -> None:
    frame = hand.frame()
    wanted = [0x3F80 + i for i in range(hand.numel)]
    assert decoded(frame, route, hand.numel).view(torch.int16).tolist() == wanted
    assert codecs.decompress(frame, route=route).view(torch.int16).tolist() == wanted
    assert from_format_rows.decode(frame.numpy().tobytes(), []) == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_code(name: str, route: str) -> None:
    hand, wanted = REFUSED[name]
    frame = hand.frame()
    for numel in (hand.numel,) if hand.numel < 100 else ():
        with pytest.raises(ds_zipccl.FrameError) as caught:
            decoded(frame, route, numel)
        assert caught.value.code is wanted, caught.value
    with pytest.raises(ds_zipccl.FrameError) as caught:  # no output is allocated before the sizes are proven
        codecs.decompress(frame, route=route)
    if hand.numel >= 100:
        assert caught.value.code is wanted
    if wanted is FrameErrorCode.ROWS:
        with pytest.raises(from_format_rows.Contradiction):
            from_format_rows.decode(frame.numpy().tobytes(), list(range(7)))
