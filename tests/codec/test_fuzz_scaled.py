"""Damaged scaled frames: all routes give the same code or the same words, and write no byte outside the output."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import mutations
import pytest
import test_fuzz
import test_scaled
import torch
import variants
from mutations import Base

from ds_zipccl import codecs
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.lossy import Int, TacoFp8

#: Ways to damage any frame, of mutations.py.
ANY_FRAME = (
    "cut", "cut_and_say_so", "extend", "wrong_frame_bytes", "noise_behind_a_good_header", "codec", "dtype", "numel", "flip", "random_bytes",
    "flip_in_the_payload", "move_bytes", "lose_bytes", "block_log2",
)  # fmt: skip
GUARD = 64
#: Outputs are allocated by the decoder for frames of at most this many elements.
SMALL = 1 << 20


def _bases() -> list[Base]:
    found = []
    for seed, codec in enumerate(test_scaled.CODECS.values()):
        words = test_scaled.gaussian(700 + seed, seed).to((torch.bfloat16, torch.half, torch.float32)[seed % 3])
        words[128:384] = 0
        frame = codecs.compress(words, codec, lossy=True, block=128, shaped=False, checksum=False)
        assert frame[5] == 4
        found.append(Base(frame.numpy().tobytes(), codecs.project(words, codec), False))
    return found


def _field(rng: random.Random, frame: bytearray) -> None:
    """A byte of the fields, near its value or any."""
    at = 32 + rng.randrange(16)
    frame[at] = rng.choice((frame[at] ^ 1 << rng.randrange(8), rng.randrange(256), rng.randrange(10)))


def _code_bytes(rng: random.Random, frame: bytearray) -> None:
    value = struct.unpack_from("<Q", frame, 40)[0]
    value = rng.choice((value + rng.choice((-16, -1, 1, 16, 32)), rng.getrandbits(64), 1 << rng.randrange(64)))
    struct.pack_into("<Q", frame, 40, value % (1 << 64))


def _scale(rng: random.Random, frame: bytearray) -> None:
    at = rng.randrange(48, min(len(frame), 48 + 30))
    frame[at] = rng.choice((0, 1, 128, 240, 255, rng.randrange(256)))


def _code(rng: random.Random, frame: bytearray) -> None:
    at = rng.randrange(48, len(frame))
    frame[at] = rng.choice((0x7F, 0xFF, 0x80, rng.randrange(256)))


KINDS: dict[str, Callable[[random.Random, bytearray], None]] = {
    "field": _field, "code_bytes": _code_bytes, "scale": _scale, "code": _code,
}  # fmt: skip


def answer(frame: torch.Tensor, like: torch.Tensor | None, route: str) -> tuple[object, ...]:
    """The code; or dtype and bits. Any other exception is a failure of the test."""
    memory, out = None, None
    if like is not None:
        memory = torch.full((GUARD + like.nbytes + GUARD,), 0x5C, dtype=torch.uint8)
        out = memory[GUARD : GUARD + like.nbytes].view(like.dtype)
    try:
        found = codecs.decompress(frame, out, route=route)
        said: tuple[object, ...] = (None, found.dtype, found.view(torch.uint8).numpy().tobytes())
    except FrameError as error:
        said = (error.code,)
    if memory is not None:
        assert (memory[:GUARD] == 0x5C).all() and (memory[-GUARD:] == 0x5C).all(), "written outside"
    return said


@pytest.mark.parametrize("count", [800, pytest.param(4000, marks=pytest.mark.full(reason="the same with more damage"))])
def test_damaged_scaled_frames(count: int) -> None:
    rng = random.Random(count)
    generic = [kind for kind in mutations.KINDS if kind.name in ANY_FRAME]
    assert len(generic) == len(ANY_FRAME)
    bases, codes, passed = _bases(), Counter(), Counter()
    usable = variants.usable(variants.COMPILED)
    for turn in range(count):
        base, name = rng.choice(bases), rng.choice([*KINDS, "any"])
        if name == "any":
            frame = rng.choice(generic).mutate(rng, base)
        else:
            frame = bytearray(base.frame)
            KINDS[name](rng, frame)
        if not frame:
            continue
        numel = struct.unpack_from("<Q", frame, 16)[0] if len(frame) >= 32 else 0
        like = base.tensor if numel > SMALL or rng.random() < 0.7 else None
        answers = []
        levels = {"", variants.SHORTEST} if turn % 4 else {variant.level for variant in usable}
        left_out = "emulated" if turn % test_fuzz.RARELY else ""
        for variant in [each for each in usable if each.level in levels and each.route != left_out]:
            with variant.in_use() as route:
                answers.append(answer(torch.frombuffer(bytearray(frame), dtype=torch.uint8), like, route))
        assert answers.count(answers[0]) == len(answers), f"{name}: {[a[0] for a in answers]} {frame.hex()}"
        codes[answers[0][0]] += 1
        passed[name] += answers[0][0] is None
    names = ("TRUNCATED", "CODEC", "RESERVED", "SIZE", "MISMATCH", "BLOCK")
    assert set(codes) >= {None, *(FrameErrorCode[name] for name in names)}, codes
    assert min(passed["scale"], passed["code"], passed["any"]) > count / 60, passed


def test_damage_does_not_make_the_values_infinite() -> None:
    """Whatever scales and codes arrive, values are finite."""
    rng = random.Random(4)
    for base in _bases():
        for _ in range(20):
            frame = bytearray(base.frame)
            for at in range(48, 48 + 20):
                if rng.random() < 0.4:
                    frame[at] = rng.randrange(256)
            if answer(torch.frombuffer(frame, dtype=torch.uint8), base.tensor, "auto")[0] is None:
                kept = codecs.decompress(torch.frombuffer(frame, dtype=torch.uint8))
                assert kept.isfinite().all()


assert {type(codec) for codec in test_scaled.CODECS.values()} == {Int, TacoFp8}
