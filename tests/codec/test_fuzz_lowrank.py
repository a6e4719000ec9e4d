"""Damaged low-rank frames: all routes give the same code or the same words, and write no byte outside the output."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import mutations
import pytest
import test_lowrank
import torch
import variants
from mutations import Base
from test_fuzz_scaled import ANY_FRAME, SMALL, answer

from ds_zipccl import codecs
from ds_zipccl.codecs import lowrank
from ds_zipccl.frame import FrameErrorCode


def _bases() -> list[Base]:
    """Frames whose factors are exponent frames, and one in which Q is raw."""
    found = []
    for seed, (rows, columns, rank) in enumerate(((40, 50, 3), (33, 70, 9), (64, 32, 4), (9, 300, 2))):
        p, q = test_lowrank.factors(rows, columns, rank, seed)
        if seed == 2:
            q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(2)) * 2.0 ** torch.arange(rank) ** 2
        dtype = codecs.LOSSY_DTYPES[seed % 3]
        frame = lowrank.compress_factors(p, q, dtype, checksum=False, block=128)
        assert frame[5] == 5
        words = lowrank.product(p, q, torch.empty(rows * columns, dtype=dtype))
        found.append(Base(frame.numpy().tobytes(), words, False))
    return found


def _second(frame: bytearray) -> int:
    """Where the frame of Q begins."""
    return 48 + -(-struct.unpack_from("<Q", frame, 48 + 24)[0] // 16) * 16


def _field(rng: random.Random, frame: bytearray) -> None:
    """A byte of the fields, near its value or any."""
    at = 32 + rng.randrange(16)
    frame[at] = rng.choice((frame[at] ^ 1 << rng.randrange(8), rng.randrange(256), rng.randrange(10)))


def _sides(rng: random.Random, frame: bytearray) -> None:
    """Rows and columns with the same product, or very large ones."""
    rows, columns = struct.unpack_from("<2I", frame, 32)
    factor = rng.choice((2, 5, 10, 1 << 16))
    sides = rng.choice(
        ((rows * factor, columns // factor), (columns, rows), (rng.getrandbits(32), rng.getrandbits(32)))
    )
    struct.pack_into("<2I", frame, 32, *(side % (1 << 32) for side in sides))


def _nested_header(rng: random.Random, frame: bytearray) -> None:
    at = rng.choice((48, min(_second(frame), len(frame) - 32))) + rng.randrange(32)
    frame[at] = rng.choice((frame[at] ^ 1 << rng.randrange(8), rng.randrange(256), rng.randrange(4)))


def _nested_size(rng: random.Random, frame: bytearray) -> None:
    at = rng.choice((48, min(_second(frame), len(frame) - 32))) + rng.choice((16, 24))
    value = struct.unpack_from("<Q", frame, at)[0]
    value = rng.choice((value + rng.choice((-16, -1, 1, 16)), rng.getrandbits(64), 1 << rng.randrange(64)))
    struct.pack_into("<Q", frame, at, value % (1 << 64))


def _content(rng: random.Random, frame: bytearray) -> None:
    frame[rng.randrange(80, len(frame))] = rng.choice((0, 0xFF, 0x7F, rng.randrange(256)))


KINDS: dict[str, Callable[[random.Random, bytearray], None]] = {
    "field": _field, "sides": _sides, "nested_header": _nested_header, "nested_size": _nested_size, "content": _content,
}  # fmt: skip


@pytest.mark.parametrize("count", [800, pytest.param(4000, marks=pytest.mark.full(reason="the same with more damage"))])
def test_damaged_low_rank_frames(count: int) -> None:
    rng = random.Random(count)
    generic = [kind for kind in mutations.KINDS if kind.name in ANY_FRAME]
    bases, codes, passed = _bases(), Counter(), Counter()
    usable = variants.usable(variants.CPP)
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
        for variant in usable if turn % 4 == 0 else [v for v in usable if v.level in ("", variants.SHORTEST)]:
            with variant.in_use() as route:
                answers.append(answer(torch.frombuffer(bytearray(frame), dtype=torch.uint8), like, route))
        assert answers.count(answers[0]) == len(answers), f"{name}: {[a[0] for a in answers]} {frame.hex()}"
        codes[answers[0][0]] += 1
        passed[name] += answers[0][0] is None
    names = ("TRUNCATED", "MAGIC", "CODEC", "RESERVED", "SIZE", "MISMATCH", "BLOCK", *["INDEX"][: count > 800])
    assert set(codes) >= {None, *(FrameErrorCode[name] for name in names)}, codes
    assert min(passed["content"], passed["any"]) > count / 80, passed
    assert passed["sides"] <= passed["content"], passed


def test_damage_does_not_make_the_values_infinite() -> None:
    """Whatever factors arrive, values are finite, or the frame is refused."""
    rng = random.Random(4)
    refused = 0
    for base in _bases():
        for _ in range(40):
            frame = bytearray(base.frame)
            for _ in range(6):
                _content(rng, frame)
            found = answer(torch.frombuffer(frame, dtype=torch.uint8), base.tensor, "auto")
            refused += found[0] is not None
            if found[0] is None:
                assert codecs.decompress(torch.frombuffer(frame, dtype=torch.uint8)).isfinite().all()
    assert refused
