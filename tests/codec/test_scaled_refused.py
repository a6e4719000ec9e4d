"""Scaled frames by hand: the good ones are decoded, and each contradiction is refused with its code."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import pytest
import torch
import variants
from test_frame import Raw
from test_scaled import gaussian

from ds_zipccl import codecs
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.lossy import Int, LossyCodec, TacoFp8

route = variants.each(variants.COMPILED)


@dataclass(frozen=True)
class Hand:
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


INTEGERS = Hand(
    kind=2, bits=4, code_bytes=32, scales=struct.pack("<3H", 0x3F80, 0, 0x0001) + bytes(10), codes=bytes(32)
)
STAGED = replace(Hand(), flags=2, block_log2=7)
RESERVED, SIZE, BLOCK, CODEC, MISMATCH = (
    FrameErrorCode.RESERVED, FrameErrorCode.SIZE, FrameErrorCode.BLOCK, FrameErrorCode.CODEC, FrameErrorCode.MISMATCH
)  # fmt: skip
REFUSED: dict[str, tuple[Hand, FrameErrorCode]] = {
    "unknown flag": (Hand(flags=4), RESERVED),
    "stage 2 of integers": (replace(INTEGERS, flags=2, block_log2=7), RESERVED),
    "stage 2 without blocks": (Hand(flags=2), RESERVED),
    "blocks without stage 2": (Hand(block_log2=7), RESERVED),
    "blocks of no frame": (Hand(block_log2=6), RESERVED),
    "zeros": (Hand(zeros=1 << 24), RESERVED),
    "kind 0": (Hand(kind=0), BLOCK),
    "kind 3": (Hand(kind=3), BLOCK),
    "e4m3 of 6 bits": (Hand(bits=6), BLOCK),
    "integers of 5 bits": (replace(INTEGERS, bits=5), BLOCK),
    "groups of 16": (Hand(log2=4), BLOCK),
    "groups of 1024": (Hand(log2=10), BLOCK),
    "groups of 2^200": (Hand(log2=200), BLOCK),
    "scale 255": (Hand(scales=bytes((255, 0, 120)) + bytes(13)), BLOCK),
    "scale 247": (Hand(scales=bytes((247, 0, 120)) + bytes(13)), BLOCK),
    "scale 242 with a transform": (Hand(flags=1, scales=bytes((242, 0, 120)) + bytes(13)), BLOCK),
    "a negative scale": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 0x8001) + bytes(10)), BLOCK),
    "a scale of -0": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0x8000, 1) + bytes(10)), BLOCK),
    "an infinite scale": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 0x7F80) + bytes(10)), BLOCK),
    "a scale too large": (replace(INTEGERS, scales=struct.pack("<3H", 0x3F80, 0, 252 << 7) + bytes(10)), BLOCK),
    "a NaN": (Hand(codes=bytes(63) + b"\x7f"), BLOCK),
    "a negative NaN": (Hand(codes=b"\xff" + bytes(63)), BLOCK),
    "a number above 2m": (replace(INTEGERS, codes=(b"\x80" + bytes(3)) * 4 + bytes(16)), BLOCK),
    "a code too few": (Hand(codes=bytes(63), code_bytes=63), SIZE),
    "a group too many": (Hand(codes=bytes(96), code_bytes=96), SIZE),
    "code_bytes too small": (Hand(code_bytes=63), SIZE),
    "code_bytes of 2^64 - 1": (Hand(code_bytes=(1 << 64) - 1), SIZE),
    "no room for scales": (Hand(numel=700), SIZE),
    "elements without end": (Hand(numel=(1 << 62) + 1), SIZE),
    "stage 2 too short": (replace(STAGED, codes=bytes(16), code_bytes=16), SIZE),
    "stage 2 too long": (replace(STAGED, codes=bytes(400), code_bytes=400), SIZE),
    "stage 2 without an index": (STAGED, FrameErrorCode.INDEX),
    "another dtype": (Hand(dtype=4), CODEC),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_code(name: str, route: str) -> None:
    hand, code = REFUSED[name]
    for given in (None, torch.zeros(hand.numel if hand.numel < 1000 else 90)):
        if given is not None and name == "another dtype":
            given = given.double()
        with pytest.raises(FrameError) as caught:
            codecs.decompress(hand.frame(), given, route=route)
        assert caught.value.code in ({code, MISMATCH} if given is not None else {code})
    if hand.dtype == 3 and hand.numel == 90:
        with pytest.raises(FrameError) as caught:
            codecs.decompress_add(hand.frame(), torch.zeros(90), route=route)
        assert caught.value.code == code


def test_good_frames_by_hand(route: str) -> None:
    """The frames that the refused ones differ from, and the largest scales."""
    values = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    wanted = torch.cat([values[:32], torch.zeros(32), values[32:58] * 2.0**-7])
    assert torch.equal(codecs.decompress(Hand().frame(), route=route), wanted)
    wanted = torch.cat([torch.full((32,), -7.0), torch.zeros(32), torch.full((26,), -7 * 2.0**-133)])
    assert torch.equal(codecs.decompress(INTEGERS.frame(), route=route), wanted)
    for dtype, hadamard in ((1, 0), (1, 1), (3, 0), (3, 1)):
        top = 241 if hadamard else 246
        hand = Hand(flags=hadamard, scales=bytes((top, 0, top)) + bytes(13), codes=b"\x7e" * 64, dtype=dtype)
        kept = codecs.decompress(hand.frame(), route=route)
        assert kept.isfinite().all() and kept[0] == 448 * 2.0 ** (top - 127)
    hand = Hand(scales=bytes((150, 0, 150)) + bytes(13), codes=b"\x7e\xfe" * 32, dtype=2)
    assert codecs.decompress(hand.frame(), route=route)[:2].tolist() == [65504.0, -65504.0]


def test_lossy_codecs_need_consent() -> None:
    codec: LossyCodec
    for codec in (TacoFp8(), Int()):
        with pytest.raises(ValueError, match="lossy=True"):
            codecs.compress(gaussian(10), codec)
        with pytest.raises(ValueError, match="float64"):
            codecs.compress(gaussian(10).double(), codec, lossy=True)
