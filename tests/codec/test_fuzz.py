"""Damaged frames: each is refused with a code or, without a checksum, gives a tensor of the right size, the same by all routes. Never
anything else, and never a byte outside of the output."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import corpus
import mutations
import pytest
import row_cases
import test_lowrank
import test_scaled
import test_zfp
import tiers
import torch
import variants
from mutations import Base, Kind
from places import TESTS

from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.codecs import lowrank
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode
from ds_zipccl.kernels import RouteUnavailable
from ds_zipccl.lossy import Int, Round, TacoFp8

#: Damaged frames of a test, by tier.
COUNTS = (15_000, 100_000)
#: Codes that one of some ten thousand ordinary frames has, if any; ROWS is that of the family "rows".
RARE = {FrameErrorCode.OVERFLOWED, FrameErrorCode.ROWS}
#: One frame in so many goes to the emulated CUDA kernels, which start 256 threads for each.
RARELY = 25
ROUTES = tuple(dict.fromkeys(variant.route for variant in variants.ALL))
GUARD = 64
Answer = tuple[object, ...]


class Receiver:
    """The output of frames like a base behind its history, with guards on both sides in the same memory."""

    def __init__(self, history: torch.Tensor, like: torch.Tensor) -> None:
        self._before = torch.full((GUARD,), 0x5C, dtype=torch.uint8)
        self._front = torch.cat([self._before, history.view(torch.uint8)])
        self._memory = torch.cat([self._front, torch.zeros(like.nbytes + GUARD, dtype=torch.uint8)])
        self._end = len(self._front) + like.nbytes
        inside = self._memory[GUARD : self._end].view(like.dtype)
        self.earlier, self.out = inside[: history.numel()], inside[history.numel() :]
        self._memory[self._end :] = 0x5C

    def intact(self) -> bool:
        front = self._memory[: len(self._front)]
        return torch.equal(front, self._front) and bool((self._memory[self._end :] == 0x5C).all())


def answer(frame: bytearray, receiver: Receiver | None, route: str, base: torch.Tensor | None = None) -> Answer:
    """The code; or dtype, shape and bits. Any other exception is a failure of the test."""
    data = torch.frombuffer(bytearray(frame), dtype=torch.uint8) if frame else torch.empty(0, dtype=torch.uint8)
    earlier = receiver.earlier if receiver and receiver.earlier.numel() else None
    out = receiver.out if receiver else None
    try:
        found = codecs.decompress(data, out, base=base, earlier=earlier, route=route)
    except FrameError as error:
        return (error.code,)
    except RouteUnavailable:
        assert _lacks(route, frame)
        return (None,)
    assert out is None or found is out
    return None, found.dtype, found.shape, found.reshape(-1).view(torch.uint8).numpy().tobytes()


def _lacks(route: str, frame: bytearray) -> bool:
    """Return whether the route has no kernels of such frames."""
    return route == "numba" and frame[5:6] == bytes([CodecId.DELTA])


def _lost_its_checksum(frame: bytearray) -> bool:
    """Return whether flag, id and value are gone: no decoder can tell such a frame from a frame without a checksum."""
    return len(frame) >= 16 and not frame[7] & 1 and not frame[10] and not any(frame[12:16])


@pytest.mark.parametrize("route", ROUTES)
def test_damaged_frames_with_a_checksum_are_refused(route: str, request: pytest.FixtureRequest) -> None:
    if reason := variants.Variant(route).why_not():
        pytest.skip(f"{route} is not usable here: {reason}")
    rng = random.Random(1)
    bases = mutations.bases(checksum=True)
    kinds, codes = Counter(), Counter()
    for _ in range(COUNTS[not tiers.is_short(request.config)] // (RARELY if route == "emulated" else 1)):
        base = rng.choice(bases)
        kind, frame = mutations.damaged(rng, base)
        code, *_ = answer(frame, None, route, base.against)
        assert code or _lost_its_checksum(frame), f"{kind.name} was accepted: {frame.hex()}"
        kinds[kind.name] += 1
        codes[code] += 1
    tried = sum(codes.values())
    assert codes[None] < tried / 1000, codes
    assert set(kinds) == {kind.name for kind in mutations.KINDS}
    assert codes[FrameErrorCode.CHECKSUM] > tried / 4, codes


@pytest.mark.full(reason="interpreted, ten seconds")
def test_the_reference_indexes_inside_its_arrays() -> None:
    """Compiled numba checks no index. Interpreted, an index outside an array is an error: interpreted.py runs it that way."""
    script = TESTS / "fuzz" / "interpreted.py"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", str(script), "1500"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    refused, accepted = map(int, result.stdout.split())
    assert refused > 500 and accepted > 60, result.stdout


#: Ways to damage a frame of a codec that has ways of its own, of mutations.py.
ANY_FRAME = (
    "cut", "cut_and_say_so", "extend", "wrong_frame_bytes", "noise_behind_a_good_header", "codec", "dtype", "numel", "flip", "random_bytes",
    "flip_in_the_payload", "move_bytes", "lose_bytes", "block_log2",
)  # fmt: skip
Damage = Callable[[random.Random, bytearray], None]

# --- rows


def parts(frame: bytes) -> tuple[int, int, int, int]:
    """Offsets of the map, the factors, the literals and the deltas in a good frame."""
    width, head, repeats, scaled, repeat_bits, scaled_bits = struct.unpack_from("<4I2B", frame, 32)
    rows = (struct.unpack_from("<Q", frame, 16)[0] - head) // width
    bits = rows + (rows - repeats if scaled else 0) + repeats * repeat_bits + scaled * scaled_bits
    factors = 64 + framing.pad16(-(-bits // 8))
    literals = factors + framing.pad16(4 * scaled)
    return 64, factors, literals, literals + framing.pad16(struct.unpack_from("<Q", frame, literals + 24)[0])


def _row_field(rng: random.Random, frame: bytearray) -> None:
    """A number of the fields: near its value, near 2^32, or any."""
    at = 32 + 4 * rng.randrange(4)
    value = struct.unpack_from("<I", frame, at)[0]
    value = rng.choice(
        (value + rng.choice((-2, -1, 1, 2)), rng.getrandbits(32), rng.randrange(100), (1 << 32) - 1 - rng.randrange(3))
    )
    struct.pack_into("<I", frame, at, value % (1 << 32))


def _row_bits(rng: random.Random, frame: bytearray) -> None:
    frame[48 + rng.randrange(2)] = rng.choice((rng.randrange(40), rng.randrange(256)))


def _row_zeros(rng: random.Random, frame: bytearray) -> None:
    frame[50 + rng.randrange(14)] ^= 1 << rng.randrange(8)


def _row_map(rng: random.Random, frame: bytearray) -> None:
    start, end, _, _ = parts(frame)
    frame[rng.randrange(start, end)] ^= 1 << rng.randrange(8)


def _row_swap(rng: random.Random, frame: bytearray) -> None:
    """Two bits of the map, so that the numbers of rows may stay."""
    start, end, _, _ = parts(frame)
    bits = [rng.randrange(8 * start, 8 * end) for _ in range(2)]
    values = [frame[bit // 8] >> bit % 8 & 1 for bit in bits]
    for bit, value in zip(bits, values[::-1], strict=True):
        frame[bit // 8] = frame[bit // 8] & ~(1 << bit % 8) | value << bit % 8


def _row_factor(rng: random.Random, frame: bytearray) -> None:
    _, start, end, _ = parts(frame)
    if start < end:
        struct.pack_into(
            "<I",
            frame,
            rng.randrange(start, end, 4),
            rng.choice((0, 1 << 31, 0x7F800000, 0xFFC00000, rng.getrandbits(32))),
        )


def _row_nested(rng: random.Random, frame: bytearray) -> None:
    """A byte of a nested header, or of the index behind it."""
    _, _, literals, deltas = parts(frame)
    at = rng.choice((literals, deltas)) + rng.randrange(40)
    if at < len(frame):
        frame[at] = rng.choice((rng.randrange(20), rng.randrange(256), frame[at] ^ 1))


# --- scaled codes


def _scaled_bases() -> list[Base]:
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


def _size_at(rng: random.Random, frame: bytearray, at: int) -> None:
    """A size, near its value or any."""
    value = struct.unpack_from("<Q", frame, at)[0]
    value = rng.choice((value + rng.choice((-16, -1, 1, 16)), rng.getrandbits(64), 1 << rng.randrange(64)))
    struct.pack_into("<Q", frame, at, value % (1 << 64))


def _scaled_scale(rng: random.Random, frame: bytearray) -> None:
    at = rng.randrange(48, min(len(frame), 48 + 30))
    frame[at] = rng.choice((0, 1, 128, 240, 255, rng.randrange(256)))


def _scaled_code(rng: random.Random, frame: bytearray) -> None:
    at = rng.randrange(48, len(frame))
    frame[at] = rng.choice((0x7F, 0xFF, 0x80, rng.randrange(256)))


# --- low-rank factors


def _lowrank_bases() -> list[Base]:
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


def _lowrank_sides(rng: random.Random, frame: bytearray) -> None:
    """Rows and columns with the same product, or very large ones."""
    rows, columns = struct.unpack_from("<2I", frame, 32)
    factor = rng.choice((2, 5, 10, 1 << 16))
    sides = rng.choice(
        ((rows * factor, columns // factor), (columns, rows), (rng.getrandbits(32), rng.getrandbits(32)))
    )
    struct.pack_into("<2I", frame, 32, *(side % (1 << 32) for side in sides))


def _lowrank_nested_header(rng: random.Random, frame: bytearray) -> None:
    at = rng.choice((48, min(_second(frame), len(frame) - 32))) + rng.randrange(32)
    frame[at] = rng.choice((frame[at] ^ 1 << rng.randrange(8), rng.randrange(256), rng.randrange(4)))


def _lowrank_nested_size(rng: random.Random, frame: bytearray) -> None:
    _size_at(rng, frame, rng.choice((48, min(_second(frame), len(frame) - 32))) + rng.choice((16, 24)))


def _lowrank_content(rng: random.Random, frame: bytearray) -> None:
    frame[rng.randrange(80, len(frame))] = rng.choice((0, 0xFF, 0x7F, rng.randrange(256)))


# --- ZFP


def _zfp_bases() -> list[Base]:
    found = []
    for seed in range(30):
        dtype, rate, numel = codecs.LOSSY_DTYPES[seed % 3], (4, 5, 8, 12)[seed % 4], (1, 5, 40, 130, 300)[seed % 5]
        words = test_zfp._finite(numel, dtype, seed)
        found.append(Base(test_zfp._frame(words, rate, "auto").numpy().tobytes(), words, False))
    return found


def _zfp_byte(rng: random.Random, frame: bytearray) -> None:
    frame[rng.randrange(4, len(frame))] = rng.getrandbits(8)


def _zfp_bytes(rng: random.Random, frame: bytearray) -> None:
    for _ in range(3):
        _zfp_byte(rng, frame)


def _zfp_tail(rng: random.Random, frame: bytearray) -> None:
    _zfp_byte(rng, frame)
    frame[rng.randrange(len(frame)) :] = rng.randbytes(rng.randrange(20))


# --- rounded words, which any kind of damage to blocks fits


def _rounded_bases() -> list[mutations.Base]:
    """Rounded frames without a checksum, of every block size and mode."""
    found = []
    for seed, (name, block) in enumerate([(name, block) for name in ("bf16", "fp16") for block in corpus.BLOCKS] * 3):
        kind, numel = corpus.FLOATS[name], (5 + block, 700, 17 * 128 + 3)[seed % 3]
        tensor = corpus.tensor(corpus.mixed(numel, kind, block, seed), kind)
        frame = codecs.compress(tensor, Round(1 + seed % 6), lossy=True, block=block, shaped=False, checksum=False)
        if frame[5] == CodecId.ROUNDED:
            found.append(mutations.Base(frame.numpy().tobytes(), tensor, True, 32, block))
    assert len(found) > 15
    return found


# --- one loop for all


@dataclass(frozen=True)
class Family:
    """Frames of a codec with their histories, the ways to damage them (none: all of mutations.py), the codes that must be seen, and ways of
    damage -> one in how many frames at least passes as another good one.

    ``kinds``: the routes of the codec. ``counts``: damaged frames, by tier. ``largest``: elements of an output that the decoder allocates.
    """

    bases: Callable[[], Sequence[tuple[Base, torch.Tensor]]]
    damage: Mapping[str, Damage]
    codes: str
    passing: Mapping[str, int]
    kinds: Sequence[variants.Variant] = variants.COMPILED
    counts: tuple[int, int] = (1000, 4000)
    largest: int = 1 << 20

    def damaged(self, rng: random.Random, base: Base) -> tuple[Kind, bytearray | None]:
        if not self.damage:
            return mutations.damaged(rng, base)
        kind = rng.choice([*(_own(name, damage) for name, damage in self.damage.items()), ANY])
        return kind, kind.mutate(rng, base, bytearray(base.frame))


def _own(name: str, damage: Damage) -> Kind:
    def mutate(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
        damage(rng, frame)
        return frame

    return Kind(name, mutate, mutations.ANY, True)


GENERIC = [kind for kind in mutations.KINDS if kind.name in ANY_FRAME]
ANY = Kind("any", lambda rng, *given: rng.choice(GENERIC).mutate(rng, *given), mutations.ANY, True)


def _alone(bases: Sequence[Base]) -> Sequence[tuple[Base, torch.Tensor]]:
    return [(base, base.tensor.reshape(-1)[:0]) for base in bases]


FAMILIES = {
    "frames without a checksum": Family(
        lambda: _alone(mutations.bases(checksum=False)), {}, " ".join(code.name for code in FrameErrorCode if code not in RARE),
        {"flip_in_the_payload": 80}, variants.ALL, COUNTS, 1 << 64,  # without a checksum most bytes are mantissas
    ),
    "rounded": Family(lambda: _alone(_rounded_bases()), {}, "INDEX BLOCK", {}, counts=(4000, 4000), largest=1 << 64),
    "rows": Family(
        lambda: [
            (Base(case.frame().numpy().tobytes(), case.part, False), case.arriving[: case.begin])
            for case in row_cases.CASES.values()
        ],
        {
            "field": _row_field, "bits": _row_bits, "zeros": _row_zeros, "map": _row_map, "swap": _row_swap, "factor": _row_factor,
            "nested": _row_nested,
        },
        "TRUNCATED MAGIC CODEC RESERVED SIZE MISMATCH INDEX BLOCK ROWS",
        dict.fromkeys(("swap", "map", "factor"), 1 << 20),
    ),
    "scaled": Family(
        lambda: _alone(_scaled_bases()),
        {"field": _field, "code_bytes": lambda *given: _size_at(*given, 40), "scale": _scaled_scale, "code": _scaled_code},
        "TRUNCATED CODEC RESERVED SIZE MISMATCH BLOCK",
        dict.fromkeys(("scale", "code", "any"), 60),
    ),
    "lowrank": Family(
        lambda: _alone(_lowrank_bases()),
        {
            "field": _field, "sides": _lowrank_sides, "nested_header": _lowrank_nested_header, "nested_size": _lowrank_nested_size,
            "content": _lowrank_content,
        },
        "TRUNCATED MAGIC CODEC RESERVED SIZE MISMATCH BLOCK",
        dict.fromkeys(("content", "any"), 80),
        variants.CPP,
    ),
    "zfp": Family(
        lambda: _alone(_zfp_bases()),
        {"byte": _zfp_byte, "bytes": _zfp_bytes, "tail": _zfp_tail},
        "TRUNCATED CODEC RESERVED SIZE MISMATCH",
        dict.fromkeys(("byte", "any"), 80),
        variants.ONCE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_frames(family: str, request: pytest.FixtureRequest) -> None:
    """Every variant gives the same answer. Every route sees every frame, the native one at its best level; every fourth frame also goes to
    the other levels."""
    found, count = FAMILIES[family], FAMILIES[family].counts[not tiers.is_short(request.config)]
    rng, bases, usable = random.Random(count), found.bases(), variants.usable(found.kinds)
    receivers = [Receiver(history, base.tensor) for base, history in bases]
    assert len(usable) > 1
    best = {variant.route: variant.level for variant in reversed(usable)}
    tried, codes, passed = Counter[str](), Counter[object](), Counter[str]()
    for turn in range(count):
        at = rng.randrange(len(bases))
        base = bases[at][0]
        kind, frame = found.damaged(rng, base)
        if frame is None:
            continue
        numel = struct.unpack_from("<Q", frame, 16)[0] if len(frame) >= 32 else 0
        receiver = receivers[at] if numel > found.largest or rng.random() < 0.6 else None
        answers = []
        for variant in usable:
            if (variant.route == "emulated" and turn % RARELY) or (variant.level != best[variant.route] and turn % 4):
                continue
            if _lacks(variant.route, frame):
                continue
            with variant.in_use() as route:
                answers.append(answer(frame, receiver, route, base.against))
            assert receiver is None or receiver.intact(), f"{variant} wrote outside, {kind.name}: {frame.hex()}"
        assert answers.count(answers[0]) == len(answers), f"{kind.name}: {[a[0] for a in answers]} {frame.hex()}"
        code = answers[0][0]
        wanted = kind.codes if receiver is None else kind.codes | {FrameErrorCode.MISMATCH}
        assert code in wanted or (code is None and kind.may_pass), f"{code!r} for {kind.name}: {frame.hex()}"
        tried[kind.name] += 1
        codes[code] += 1
        passed[kind.name] += code is None
    must = {FrameErrorCode[name] for name in found.codes.split()}
    if count == found.counts[1]:
        must |= {"lowrank": {FrameErrorCode.INDEX}, "frames without a checksum": {FrameErrorCode.OVERFLOWED}}.get(
            family, set()
        )
    assert set(codes) >= {None, *must}, codes
    assert all(passed[name] > count // part for name, part in found.passing.items()), passed
    assert family != "rows" or codes[FrameErrorCode.ROWS] > count / 6, codes
    assert passed["sides"] <= passed["content"], passed
    of_blocks = {"trim", "top", "unknown_mode", "chunk_offset", "codec"}
    names = {
        "frames without a checksum": {kind.name for kind in mutations.KINDS},
        "rounded": of_blocks | {name for name in tried if not name.endswith("a_list")},
    }
    assert set(tried) == names.get(family, {*found.damage, "any"}), tried


@pytest.mark.parametrize("family", ["scaled", "lowrank"])
def test_damage_does_not_make_the_values_infinite(family: str) -> None:
    """Whatever scales, codes and factors arrive, values are finite, or the frame is refused."""
    rng, refused = random.Random(4), 0
    for base, _ in FAMILIES[family].bases():
        for _ in range(40):
            frame = bytearray(base.frame)
            for at in range(48, 48 + 20) if family == "scaled" else ():
                if rng.random() < 0.4:
                    frame[at] = rng.randrange(256)
            for _ in range(0 if family == "scaled" else 6):
                _lowrank_content(rng, frame)
            code, *_ = answer(frame, None, "auto")
            refused += code is not None
            if code is None:
                assert codecs.decompress(torch.frombuffer(frame, dtype=torch.uint8)).isfinite().all()
    assert refused


assert {type(codec) for codec in test_scaled.CODECS.values()} == {Int, TacoFp8}
