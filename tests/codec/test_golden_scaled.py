"""Scaled frames of earlier versions: every route still writes exactly these bytes and reads them; see test_golden.py."""

from __future__ import annotations

import corpus
import from_format_scaled
import lossy_routes
import numpy as np
import pytest
import test_scaled
import torch
from corpus import assert_same_bits
from places import TESTS

from ds_zipccl import codecs
from ds_zipccl.lossy import Int, TacoFp8

FOLDER = TESTS / "golden"
CASES: dict[str, tuple[str, TacoFp8 | Int]] = {
    "scaled_bf16_e4m3": ("bf16", TacoFp8(128, False)),
    "scaled_bf16_e4m3_hadamard": ("bf16", TacoFp8(128, True)),
    "scaled_fp16_e4m3_hadamard_32": ("fp16", TacoFp8(32, True)),
    "scaled_fp32_e4m3_hadamard_512": ("fp32", TacoFp8(512, True)),
    "scaled_fp32_e4m3_64": ("fp32", TacoFp8(64, False)),
    "scaled_bf16_int8": ("bf16", Int(8, 128)),
    "scaled_fp16_int6_hadamard": ("fp16", Int(6, 128, True)),
    "scaled_fp32_int4_32": ("fp32", Int(4, 32)),
}
NAMES = set(CASES)


def _tensor(name: str) -> torch.Tensor:
    """Finite words: bell-shaped, with outliers, zero groups, denormals and negative zeros."""
    kind = corpus.SUMMED[CASES[name][0]]
    words = corpus.mixed(1100, kind, 128, 11, ("bell", "outliers", "zeros", "sparse_signed"))
    infinite = kind.word(kind.largest_exponent << kind.mantissa)
    words = np.where(words & infinite == infinite, 0, words).astype(kind.word)
    words[520:530] = np.arange(10)
    return corpus.tensor(words, kind)


@pytest.mark.parametrize("name", CASES)
def test_golden_scaled_frame(name: str, route: str, request: pytest.FixtureRequest) -> None:
    lossy_routes.need(route, "encode_scaled")
    tensor, path = _tensor(name), FOLDER / f"{name}.bin"
    frame = codecs.compress(tensor, CASES[name][1], lossy=True, block=128, shaped=False, checksum=False, route=route)
    if request.config.getoption("--update-golden") and route == "numba":
        path.write_bytes(frame.numpy().tobytes())
    golden = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"
    assert_same_bits(codecs.decompress(golden, route=route), codecs.project(tensor, CASES[name][1], route=route))


@pytest.mark.parametrize("name", CASES)
def test_golden_scaled_frames_follow_the_document(name: str) -> None:
    golden, tensor = (FOLDER / f"{name}.bin").read_bytes(), _tensor(name)
    kept = from_format_scaled.decode(golden)
    assert kept == from_format_scaled.project(
        test_scaled.words_of(tensor), golden[6], test_scaled.settings(CASES[name][1])
    )


def test_golden_scaled_frames_show_everything() -> None:
    frames = [(FOLDER / f"{name}.bin").read_bytes() for name in CASES]
    assert {frame[5] for frame in frames} == {4} and {frame[6] for frame in frames} == {1, 2, 3}
    assert {frame[32] for frame in frames} == {1, 2} and {frame[33] for frame in frames} == {8, 6, 4}
    assert {frame[35] for frame in frames} >= {0, 1, 2, 3}, "stage 2 and the transform"
