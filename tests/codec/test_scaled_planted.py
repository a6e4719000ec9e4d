"""Proof that the tests of scaled codecs can fail: kernels with one small mistake make them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import from_format_scaled
import numpy as np
import pytest
import test_scaled
import torch

from ds_zipccl import kernels
from ds_zipccl.kernels.protocol import LossyBackend, ScaledCodec
from ds_zipccl.lossy import Int


class Wrong:
    """The numba route with another call in place of one."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.good = kernels.route("numba")
        setattr(self, name, lambda *given: call(self.good, *given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)


def without_factor(
    good: LossyBackend, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor
) -> None:
    """Forgets 2^-group_log2 after the inverse transform."""
    good.decode_scaled(scales, codes, codec, words)
    if codec.hadamard:
        words *= codec.group


def with_epsilon(
    good: LossyBackend, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
) -> int | None:
    """Takes groups whose mean square is below 1e-6 for zero."""
    groups = words.view(-1, codec.group)
    kept = torch.where(groups.square().mean(1, keepdim=True) > 1e-6, groups, 0.0)
    return good.encode_scaled(kept.view(-1), codec, scales, codes)


def no_nan(
    good: LossyBackend, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
) -> int | None:
    """Makes zeros of NaN and infinity."""
    return good.encode_scaled(words.nan_to_num(0.0, 0.0, 0.0), codec, scales, codes)


def nearest_scale(
    good: LossyBackend, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
) -> int | None:
    """Rounds the scale of integers to the nearest: a maximum may be above m."""
    coded = good.encode_scaled(words, codec, scales, codes)
    if isinstance(codec, Int):
        scales -= (scales > 0).to(torch.int16)
    return coded


PLANTS: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "no 2^-group_log2": (
        "decode_scaled",
        without_factor,
        lambda: test_scaled.test_transform_and_inverse_give_small_integers_back("numba", 128),
    ),
    "an absolute epsilon": (
        "encode_scaled",
        with_epsilon,
        lambda: test_scaled.test_scaled_input_has_the_same_codes("numba", test_scaled.CODECS["e4m3 hadamard"]),
    ),
    "NaN becomes zero": (
        "encode_scaled",
        no_nan,
        lambda: test_scaled.test_frames_follow_the_document("numba", "int6 32", "bf16"),
    ),
    "a scale that is too small": (
        "encode_scaled",
        nearest_scale,
        lambda: test_scaled.test_frames_follow_the_document("numba", "int6 32", "bf16"),
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, call, check = PLANTS[name]
    check()
    wrong = Wrong(function, call)
    monkeypatch.setattr(kernels, "lossy_route", lambda name, device, function: wrong)
    with pytest.raises(AssertionError):
        check()


def _downwards(v: np.ndarray) -> np.ndarray:
    """H v by the strides g/2, ..., 2, 1: the same numbers but for their rounding."""
    stride = len(v) // 2
    while stride:
        pairs = v.reshape(-1, 2, stride)
        v = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).reshape(-1)
        stride //= 2
    return v


def test_another_order_of_strides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identities hold in any order; the bytes of the document do not."""

    def check() -> None:
        test_scaled.test_the_order_of_strides_shows_in_the_codes("numba")

    check()
    x = np.arange(128, dtype=np.float32)
    assert np.array_equal(_downwards(x), from_format_scaled.hadamard(x))
    monkeypatch.setattr(from_format_scaled, "hadamard", _downwards)
    with pytest.raises(AssertionError):
        check()
