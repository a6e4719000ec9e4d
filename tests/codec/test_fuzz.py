"""Damaged frames: each is refused with a code or, without a checksum, gives a tensor of the right size. Never anything else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import mutations
import numpy as np
import pytest
import tiers
import torch
import variants
from places import TESTS

from ds_zipccl.codecs import decompress
from ds_zipccl.frame import FrameError, FrameErrorCode

#: Damaged frames of a test, by tier.
COUNTS = (15_000, 100_000)
#: Codes that one of some ten thousand frames has.
RARE = {FrameErrorCode.OVERFLOWED, FrameErrorCode.ROWS}
#: One frame in so many goes to the emulated CUDA kernels, which start 256 threads for each.
RARELY = 25
ROUTES = tuple(dict.fromkeys(variant.route for variant in variants.ALL))
GUARD = b"\x5c" * 16


def outcome(
    frame: torch.Tensor, out: torch.Tensor | None, route: str, base: torch.Tensor
) -> tuple[FrameErrorCode | None, torch.Tensor | None]:
    """(code, None) or (None, tensor); any other exception is a failure of the test."""
    try:
        return None, decompress(frame, out, base=base, route=route)
    except FrameError as error:
        return error.code, None


def as_tensor(frame: bytearray) -> torch.Tensor:
    return torch.frombuffer(frame, dtype=torch.uint8) if frame else torch.empty(0, dtype=torch.uint8)


def _lost_its_checksum(frame: bytearray) -> bool:
    """Return whether flag, id and value are gone: no decoder can tell such a frame from a frame without a checksum."""
    return len(frame) >= 16 and not frame[7] & 1 and not frame[10] and not any(frame[12:16])


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return COUNTS[not tiers.is_short(request.config)]


@pytest.mark.parametrize("route", ROUTES)
def test_damaged_frames_with_a_checksum_are_refused(route: str, count: int) -> None:
    if reason := variants.Variant(route).why_not():
        pytest.skip(f"{route} is not usable here: {reason}")
    rng = random.Random(1)
    bases = mutations.bases(checksum=True)
    kinds, codes = Counter(), Counter()
    for _ in range(count // (RARELY if route == "emulated" else 1)):
        base = rng.choice(bases)
        kind, frame = mutations.damaged(rng, base)
        code, result = outcome(as_tensor(frame), None, route, base.against)
        assert result is None or _lost_its_checksum(frame), f"{kind.name} was accepted: {frame.hex()}"
        kinds[kind.name] += 1
        codes[code] += 1
    tried = sum(codes.values())
    assert codes[None] < tried / 1000, codes
    assert set(kinds) == {kind.name for kind in mutations.KINDS}
    assert codes[FrameErrorCode.CHECKSUM] > tried / 4, codes


class Guarded:
    """An output for frames like ``base``, with guards on both sides in the same memory."""

    def __init__(self, base: mutations.Base) -> None:
        size = base.tensor.nbytes
        self.memory = np.frombuffer(bytearray(GUARD + bytes(size) + GUARD), np.uint8)
        self.out = (
            torch.from_numpy(self.memory[16 : 16 + size]).view(base.tensor.dtype) if size else base.tensor.clone()
        )

    def intact(self) -> bool:
        return self.memory[:16].tobytes() == GUARD and self.memory[-16:].tobytes() == GUARD


def answers_agree(
    rng: random.Random, bases: Sequence[mutations.Base], count: int, kinds: Sequence[variants.Variant]
) -> tuple[Counter[str], Counter[FrameErrorCode | None], Counter[str]]:
    """Demand that every variant gives the same answer: the same code, or the same words, and not a byte outside them.

    Returns:
        The damaged frames of each kind, of each code, and those of each kind that passed.
    """
    outs = [Guarded(base) for base in bases]
    usable = variants.usable(kinds)
    assert len(usable) > 1
    # Every route sees every frame, the native one at its best level; every fourth frame also goes to the other levels.
    best = {variant.route: variant.level for variant in reversed(usable)}
    tried, codes, passed = Counter[str](), Counter[FrameErrorCode | None](), Counter[str]()
    for turn in range(count):
        at = rng.randrange(len(bases))
        kind, frame = mutations.damaged(rng, bases[at])
        tensor = as_tensor(frame)
        out = outs[at].out if rng.random() < 0.5 else None
        answers: list[tuple[object, ...]] = []
        for variant in usable:
            if (variant.route == "emulated" and turn % RARELY) or (variant.level != best[variant.route] and turn % 4):
                continue
            with variant.in_use() as route:
                code, result = outcome(tensor, out, route, bases[at].against)
            if result is not None:
                assert kind.may_pass, f"{kind.name} was accepted by {variant}: {frame.hex()}"
                assert out is None or result is out
                bits = result.view(-1).view(torch.uint8).numpy().tobytes()
                answers.append((None, result.dtype, result.shape, bits))
            else:
                wanted = kind.codes if out is None else kind.codes | {FrameErrorCode.MISMATCH}
                assert code in wanted, f"{code!r} for {kind.name} by {variant}: {frame.hex()}"
                answers.append((code,))
            assert out is None or outs[at].intact(), f"{variant} wrote outside, {kind.name}: {frame.hex()}"
        assert answers.count(answers[0]) == len(answers), f"{kind.name}: {frame.hex()}"
        tried[kind.name] += 1
        codes[code] += 1
        passed[kind.name] += code is None
    return tried, codes, passed


def test_damaged_frames_without_a_checksum(count: int) -> None:
    bases = mutations.bases(checksum=False)
    kinds, codes, passed = answers_agree(random.Random(2), bases, count, variants.ALL)
    assert set(kinds) == {kind.name for kind in mutations.KINDS}
    assert {None, *FrameErrorCode} - set(codes) <= (RARE if count < COUNTS[1] else set()), codes
    assert passed["flip_in_the_payload"] > kinds["flip_in_the_payload"] / 2, (
        "without a checksum most bytes are mantissas"
    )


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
