"""Proof that the tests of ``round`` can fail: each planted mistake in the rounding makes one of them fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import test_rounded
import torch

from ds_zipccl import kernels

#: What takes a word (int64), the cut bits c and the mask of its exponent field, and gives the word rounded.
Rounding = Callable[[torch.Tensor, int, int], torch.Tensor]


def _nearest(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1)) - 1 + (w >> c & 1)) >> c << c
    return torch.where(w & field == field, w, torch.where(t & field == field, t - (1 << c), t))


def _up(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1))) >> c << c
    return torch.where(w & field == field, w, torch.where(t & field == field, t - (1 << c), t))


def _to_infinity(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1)) - 1 + (w >> c & 1)) >> c << c
    return torch.where(w & field == field, w, t)


PLANTS: dict[str, Rounding] = {
    "truncation": lambda w, c, field: torch.where(w & field == field, w, w >> c << c),
    "ties away from zero": _up,
    "the largest becomes infinite": _to_infinity,
    "NaN and infinity become zero": lambda w, c, field: torch.where(w & field == field, 0, _nearest(w, c, field)),
    "NaN is rounded too": lambda w, c, field: torch.where(w & field == field, w >> c << c, _nearest(w, c, field)),
    "subnormal numbers become zero": lambda w, c, field: torch.where(
        w & field == 0, w & ~0x7FFF, _nearest(w, c, field)
    ),
    "a zero loses its sign": lambda w, c, field: torch.where(w & 0x7FFF == 0, 0, _nearest(w, c, field)),
    "one bit too few": lambda w, c, field: _nearest(w, c + 1, field),
}


class Rounds:
    """A route whose words of 16 bits are rounded in its own way, before its encoder sees them."""

    def __init__(self, rounding: Rounding, good: kernels.LossyBackend) -> None:
        self._rounding, self._good = rounding, good
        self.decode_rounded, self.decode_rounded_add = good.decode_rounded, good.decode_rounded_add

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        bits, field = (7, 0x7F80) if words.dtype == torch.bfloat16 else (10, 0x7C00)
        w = words.view(torch.int16).long() & 0xFFFF
        out.view(torch.int16).copy_(self._rounding(w, bits - mantissa, field).to(torch.int16))

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        rounded = [torch.empty_like(words) for words in segments]
        for words, out in zip(segments, rounded, strict=True):
            self.round_words(words, mantissa, out)
        return self._good.encode_rounded(rounded, 6, block, outs)


def _every_pattern(name: str) -> None:
    test_rounded.test_every_pattern_is_rounded_exactly("auto", name, 3)


def test_the_right_rounding_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    good = kernels.lossy_route("auto", "cpu", "encode_rounded")
    monkeypatch.setattr(kernels, "lossy_route", lambda name, device, function: Rounds(_nearest, good))
    for name in ("bf16", "fp16"):
        _every_pattern(name)


@pytest.mark.parametrize("mistake", PLANTS)
def test_a_planted_mistake_fails_the_test_of_every_pattern(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = kernels.lossy_route("auto", "cpu", "encode_rounded")
    monkeypatch.setattr(kernels, "lossy_route", lambda name, device, function: Rounds(PLANTS[mistake], good))
    for name in ("bf16", "fp16"):
        with pytest.raises(AssertionError, match="words differ"):
            _every_pattern(name)


def test_a_wrong_trim_fails_the_test_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that takes the trim of the rounding for every block: a NaN loses its low bits."""

    class Trims(Rounds):
        def encode_rounded(
            self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
        ) -> list[tuple[int, int]]:
            cut = [(words.view(torch.int16) >> 4 << 4).view(words.dtype) for words in segments]
            return self._good.encode_rounded(cut, mantissa, block, outs)

    good = kernels.lossy_route("auto", "cpu", "encode_rounded")
    monkeypatch.setattr(kernels, "lossy_route", lambda name, device, function: Trims(_nearest, good))
    with pytest.raises(AssertionError, match="words differ"):
        _every_pattern("bf16")
    with pytest.raises(AssertionError):
        test_rounded.test_each_block_has_its_own_trim("auto")
