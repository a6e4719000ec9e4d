"""Rounded frames of earlier versions: every route still writes exactly these bytes and reads them; see test_golden.py."""

from __future__ import annotations

import corpus
import from_format
import from_format_rounded
import pytest
import torch
from places import TESTS

from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.lossy import Round

FOLDER = TESTS / "golden"
#: name -> kind, elements, block, bits, textures.
CASES = {
    "rounded_bf16_mixed_128": ("bf16", 2048 + 130, 128, 3, tuple(corpus.TEXTURES)),
    "rounded_bf16_sparse_512": ("bf16", 1100, 512, 1, ("sparse", "sparse_signed", "trimmed_sparse")),
    "rounded_fp16_mixed_128": ("fp16", 2048 + 130, 128, 6, tuple(corpus.TEXTURES)),
    "rounded_fp16_wide_256": ("fp16", 700, 256, 2, ("spread", "bell", "specials")),
    "rounded_fp32_mixed_128": ("fp32", 1500, 128, 3, tuple(corpus.TEXTURES)),
    "rounded_bf16_zeros_128": ("bf16", 700, 128, 3, ("zeros", "constant")),
}


def _words(name: str) -> torch.Tensor:
    kind, numel, block, k, textures = CASES[name]
    return corpus.tensor(corpus.mixed(numel, corpus.FLOATS[kind], block, 10 + k, textures), corpus.FLOATS[kind])


@pytest.mark.parametrize("name", CASES)
def test_golden_rounded_frame(name: str, route: str, request: pytest.FixtureRequest) -> None:
    _, _, block, k, _ = CASES[name]
    frame = codecs.compress(
        _words(name), Round(k), lossy=True, block=block, shaped=False, checksum=name.endswith("512"), route=route
    )
    path = FOLDER / f"{name}.bin"
    if request.config.getoption("--update-golden") and route == "numba":  # the reference
        path.write_bytes(frame.numpy().tobytes())
    golden = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    corpus.assert_same_bits(codecs.decompress(golden, route=route), codecs.project(_words(name), Round(k), route=route))
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"


@pytest.mark.parametrize("name", CASES)
def test_golden_rounded_frames_follow_the_document(name: str) -> None:
    kind, _, _, k, _ = CASES[name]
    word = f"u{corpus.FLOATS[kind].dtype.itemsize}"
    words = _words(name).view(torch.uint8).numpy().view(word).tolist()
    bits = corpus.FLOATS[kind].exponent, corpus.FLOATS[kind].mantissa
    dtype, _, decoded = from_format.decode((FOLDER / f"{name}.bin").read_bytes())
    assert framing.DTYPES[dtype] == corpus.FLOATS[kind].dtype
    assert decoded == [from_format_rounded.round_word(w, k, *bits) for w in words]


def test_golden_rounded_frames_show_both_codecs() -> None:
    assert {(FOLDER / f"{name}.bin").read_bytes()[5] for name in CASES} == {1, 3}
