"""Damaged row frames: all routes give the same code or the same words, and no byte of the history or behind the output changes."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import mutations
import pytest
import row_cases
import torch
import variants
from mutations import Base

from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.frame import FrameError, FrameErrorCode

#: Ways to damage any frame, of mutations.py.
ANY_FRAME = (
    "cut", "cut_and_say_so", "extend", "wrong_frame_bytes", "noise_behind_a_good_header", "codec", "dtype", "numel", "flip", "random_bytes",
    "flip_in_the_payload", "move_bytes", "lose_bytes",
)  # fmt: skip
#: One frame in so many goes to the emulated CUDA kernels.
RARELY = 50
GUARD = 64
#: Outputs are allocated by the decoder for frames of at most this many elements.
SMALL = 1 << 20


def parts(frame: bytes) -> tuple[int, int, int, int]:
    """Offsets of the map, the factors, the literals and the deltas in a good frame."""
    width, head, repeats, scaled, repeat_bits, scaled_bits = struct.unpack_from("<4I2B", frame, 32)
    rows = (struct.unpack_from("<Q", frame, 16)[0] - head) // width
    bits = rows + (rows - repeats if scaled else 0) + repeats * repeat_bits + scaled * scaled_bits
    factors = 64 + framing.pad16(-(-bits // 8))
    literals = factors + framing.pad16(4 * scaled)
    return 64, factors, literals, literals + framing.pad16(struct.unpack_from("<Q", frame, literals + 24)[0])


def _field(rng: random.Random, frame: bytearray) -> None:
    """A number of the fields: near its value, near 2^32, or any."""
    at = 32 + 4 * rng.randrange(4)
    value = struct.unpack_from("<I", frame, at)[0]
    value = rng.choice(
        (value + rng.choice((-2, -1, 1, 2)), rng.getrandbits(32), rng.randrange(100), (1 << 32) - 1 - rng.randrange(3))
    )
    struct.pack_into("<I", frame, at, value % (1 << 32))


def _bits(rng: random.Random, frame: bytearray) -> None:
    frame[48 + rng.randrange(2)] = rng.choice((rng.randrange(40), rng.randrange(256)))


def _zeros(rng: random.Random, frame: bytearray) -> None:
    frame[50 + rng.randrange(14)] ^= 1 << rng.randrange(8)


def _map(rng: random.Random, frame: bytearray) -> None:
    start, end, _, _ = parts(frame)
    frame[rng.randrange(start, end)] ^= 1 << rng.randrange(8)


def _swap(rng: random.Random, frame: bytearray) -> None:
    """Two bits of the map, so that the numbers of rows may stay."""
    start, end, _, _ = parts(frame)
    bits = [rng.randrange(8 * start, 8 * end) for _ in range(2)]
    values = [frame[bit // 8] >> bit % 8 & 1 for bit in bits]
    for bit, value in zip(bits, values[::-1], strict=True):
        frame[bit // 8] = frame[bit // 8] & ~(1 << bit % 8) | value << bit % 8


def _factor(rng: random.Random, frame: bytearray) -> None:
    _, start, end, _ = parts(frame)
    if start < end:
        struct.pack_into(
            "<I",
            frame,
            rng.randrange(start, end, 4),
            rng.choice((0, 1 << 31, 0x7F800000, 0xFFC00000, rng.getrandbits(32))),
        )


def _nested(rng: random.Random, frame: bytearray) -> None:
    """A byte of a nested header, or of the index behind it."""
    _, _, literals, deltas = parts(frame)
    at = rng.choice((literals, deltas)) + rng.randrange(40)
    if at < len(frame):
        frame[at] = rng.choice((rng.randrange(20), rng.randrange(256), frame[at] ^ 1))


ROW_KINDS: dict[str, Callable[[random.Random, bytearray], None]] = {
    "field": _field, "bits": _bits, "zeros": _zeros, "map": _map, "swap": _swap, "factor": _factor, "nested": _nested,
}  # fmt: skip


class Receiver:
    """The output of frames like that of a case behind its history, with guards on both sides in the same memory."""

    def __init__(self, case: row_cases.RowCase) -> None:
        item = case.words.itemsize
        self._before = torch.full((GUARD,), 0x5C, dtype=torch.uint8)
        history = case.arriving[: case.begin].view(torch.uint8)
        self._front = torch.cat([self._before, history])
        self._memory = torch.cat([self._front, torch.zeros(case.part.nbytes + GUARD, dtype=torch.uint8)])
        inside = self._memory[GUARD : len(self._front) + case.part.nbytes].view(case.words.dtype)
        self.earlier, self.out = inside[: case.begin], inside[case.begin :]
        self._end = len(self._front) + item * self.out.numel()
        self._memory[self._end :] = 0x5C

    def intact(self) -> bool:
        return torch.equal(self._memory[: len(self._front)], self._front) and bool(
            (self._memory[self._end :] == 0x5C).all()
        )


def answer(frame: torch.Tensor, receiver: Receiver | None, route: str) -> tuple[object, ...]:
    """The code; or dtype, shape and bits. Any other exception is a failure of the test."""
    try:
        if receiver is None:
            found = codecs.decompress(frame, route=route)
        else:
            found = codecs.decompress(frame, receiver.out, earlier=receiver.earlier, route=route)
    except FrameError as error:
        return (error.code,)
    return None, found.dtype, found.shape, found.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "count", [1200, pytest.param(4000, marks=pytest.mark.full(reason="the same with more damage"))]
)
def test_damaged_row_frames(count: int) -> None:
    rng = random.Random(count)
    generic = [kind for kind in mutations.KINDS if kind.name in ANY_FRAME]
    assert len(generic) == len(ANY_FRAME)
    cases = list(row_cases.CASES.values())
    bases = [Base(case.frame().numpy().tobytes(), case.part, False) for case in cases]
    receivers = list(map(Receiver, cases))
    codes, passed = Counter(), Counter()
    for turn in range(count):
        at = rng.randrange(len(cases))
        name = rng.choice([*ROW_KINDS, "any"])
        if name == "any":
            frame = rng.choice(generic).mutate(rng, bases[at])
        else:
            frame = bytearray(bases[at].frame)
            ROW_KINDS[name](rng, frame)
        if not frame:
            continue
        numel = struct.unpack_from("<Q", frame, 16)[0] if len(frame) >= 32 else 0
        receiver = receivers[at] if numel > SMALL or rng.random() < 0.8 else None
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        every = (
            variants.usable(variants.COMPILED)
            if turn % RARELY == 0
            else [
                v
                for v in variants.usable(variants.COMPILED)
                if v.level in ("", variants.SHORTEST) and v.route != "emulated"
            ]
        )
        answers = []
        for variant in every:
            with variant.in_use() as route:
                answers.append(answer(tensor, receiver, route))
            assert receiver is None or receiver.intact(), f"{variant} wrote outside, {name}: {frame.hex()}"
        assert answers.count(answers[0]) == len(answers), f"{name}: {[a[0] for a in answers]} {frame.hex()}"
        codes[answers[0][0]] += 1
        passed[name] += answers[0][0] is None
    names = ("TRUNCATED", "MAGIC", "CODEC", "RESERVED", "SIZE", "MISMATCH", "INDEX", "BLOCK", "ROWS")
    assert set(codes) >= {None, *(FrameErrorCode[name] for name in names)}, codes
    assert codes[FrameErrorCode.ROWS] > count / 6, codes
    assert passed["swap"] and passed["map"] and passed["factor"], passed
