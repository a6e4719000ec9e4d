"""The codec ``round``: words against exact rounding, frames against the document, error and size against their laws."""

from __future__ import annotations

from functools import cache

import corpus
import from_format
import from_format_rounded
import numpy as np
import pytest
import tiers
import torch
import variants

from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import Int, Round, TacoFp8

route = variants.each(variants.COMPILED)
KINDS = corpus.SUMMED
MANTISSAS = range(1, 7)


@cache
def exactly_rounded(name: str, k: int) -> np.ndarray:
    """Every pattern of a 16-bit dtype rounded by its value: a whole number of the least subnormal, to the nearest multiple of a step."""
    kind = KINDS[name]
    m, infinite = kind.mantissa, kind.largest_exponent << kind.mantissa
    half = []
    for word in range(kind.sign):
        e, low = word >> m, word & ((1 << m) - 1)
        if word >= infinite:
            half.append(word)
            continue
        value, step = (low, 1 << (m - k)) if e == 0 else ((1 << m | low) << (e - 1), 1 << (m - k + e - 1))
        steps, rest = divmod(value, step)
        steps += 2 * rest > step or (2 * rest == step and steps % 2 == 1)
        value = steps * step
        e = max(value.bit_length() - m, 0)
        rounded = value if e == 0 else (e << m) + (value >> (e - 1)) - (1 << m)
        half.append(min(rounded, infinite - (1 << (m - k))))
    found = np.array(half, dtype=kind.word)
    return np.concatenate((found, found | kind.word(kind.sign)))


def _words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.itemsize}")


@pytest.mark.parametrize("k", tiers.mostly_full(MANTISSAS, [1, 6], "the ends, and numbers between them"))
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_pattern_is_rounded_exactly(route: str, name: str, k: int) -> None:
    kind, wanted = KINDS[name], exactly_rounded(name, k)
    patterns = corpus.tensor(np.arange(1 << 16).astype(kind.word), kind)
    rounded = codecs.project(patterns, Round(k), route=route)
    assert np.array_equal(_words(rounded), wanted), "words differ"
    corpus.assert_same_bits(codecs.project(rounded, Round(k), route=route), rounded)
    # each pattern among ordinary words too, which have no other trim than that of the rounding
    mixed = corpus.bell(1 << 18, kind, k)
    mixed[:: 1 << 2] = _words(patterns)
    for words in (patterns, corpus.tensor(mixed, kind)):
        frame = codecs.compress(words, Round(k), lossy=True, block=128, route=route)
        corpus.assert_same_bits(codecs.decompress(frame, route=route), codecs.project(words, Round(k), route=route))


def check_error(values: np.ndarray, rounded: np.ndarray, k: int) -> None:
    """Demand of Gaussian ``values`` the largest error of a normal value, the mean one, no bias and no gain."""
    error = rounded - values
    normal = np.abs(values) > 1e-4
    assert (np.abs(error[normal]) <= 2.0 ** -(k + 1) * np.abs(values[normal])).all(), "more than half a step"
    size = np.sqrt(np.square(error).sum() / np.square(values).sum())
    assert abs(size / (0.212 * 2.0**-k) - 1) < 0.04, size
    assert abs(error.mean()) <= 1e-3 * np.sqrt(np.square(values).mean()), "a bias"
    assert k < 3 or abs((rounded * values).sum() / np.square(values).sum() - 1) < 2e-3, "a gain"


#: dtype -> the most bits whose steps are wide beside the dtype's own.
WIDE_STEPS = {"bf16": 3, "fp16": 5, "fp32": 6}


@pytest.mark.parametrize("name", KINDS)
def test_error_and_size_of_a_gaussian(route: str, name: str) -> None:
    kind = KINDS[name]
    tensor = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5)).to(kind.dtype)
    values, lossless = tensor.double().numpy(), codecs.compress(tensor, route=route).numel()
    for k in range(1, WIDE_STEPS[name] + 1):
        check_error(values, codecs.project(tensor, Round(k), route=route).double().numpy(), k)
        frame = codecs.compress(tensor, Round(k), lossy=True, route=route)
        bits, fewer = 8 * (frame.numel() - lossless) / tensor.numel(), kind.mantissa - k
        assert abs(bits + fewer) < 0.1, f"{bits} bits a value, wanted -{fewer}"


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_check_of_errors_sees_truncation(k: int) -> None:
    tensor = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5))
    values = tensor.double().numpy()
    check_error(values, codecs.project(tensor, Round(k)).double().numpy(), k)
    words = _words(tensor) >> (23 - k) << (23 - k)
    with pytest.raises(AssertionError, match="more than half a step"):
        check_error(values, words.view(np.float32).astype(np.float64), k)


@pytest.mark.parametrize("block", [128, 1024])
@pytest.mark.parametrize("name", KINDS)
def test_frames_follow_the_document(route: str, name: str, block: int) -> None:
    kind, found = KINDS[name], set()
    dtype = framing.DTYPE_IDS[kind.dtype]
    sizes = [0, 1, 2, 7, 9, 64, 65, block - 1, block, block + 1, 5 * block + 17]
    sizes.append(17 * 128 + 5 if block == 128 else 4 * block)
    cases = [corpus.mixed(numel, kind, block, seed) for seed, numel in enumerate(sizes)]
    cases += [make(2 * 128 + 5, kind, seed) for seed, make in enumerate(corpus.TEXTURES.values())]
    for at, words in enumerate(cases):
        tensor, k, checksum = corpus.tensor(words, kind), 1 + at % 6, at % 2 == 0
        shape = (len(words), 1) if at % 3 else None
        arguments = {"block": block, "shaped": shape is not None, "checksum": checksum, "route": route}
        frame = codecs.compress(tensor if shape is None else tensor.view(shape), Round(k), lossy=True, **arguments)
        wanted = from_format_rounded.encode(words.tolist(), dtype, k, block, shape, checksum)
        assert frame.numpy().tobytes() == wanted, f"case {at}: {len(words)} words"
        rounded = [from_format_rounded.round_word(w, k, kind.exponent, kind.mantissa) for w in words.tolist()]
        assert _words(codecs.decompress(frame, route=route)).tolist() == rounded
        found.add(frame[5].item())
        if frame[5]:
            assert from_format.decode(wanted) == (dtype, shape, rounded)
    assert found == ({0, 1, 3} if name != "fp32" else {0, 1})


def test_each_block_has_its_own_trim(route: str) -> None:
    """A NaN with a low bit costs its block the trim, and no other one."""
    words = corpus.bell(5 * 128, corpus.BF16, 1)
    words[300] = 0x7FC1
    frame = codecs.compress(
        corpus.tensor(words, corpus.BF16), Round(3), lossy=True, block=128, shaped=False, checksum=False, route=route
    )
    assert frame[5] == CodecId.ROUNDED and frame[48 + 15 : 48 + 20].tolist() == [4, 4, 0, 4, 4]


#: Textures of a tensor; the rows of "embedding" are 64 words.
TENSORS = {
    "dense": lambda x: x,
    "half empty": lambda x: x * (torch.arange(len(x)) % 2048 >= 940),
    "half zeros": lambda x: x.clamp_min(0),
    "embedding": lambda x: x * (torch.arange(len(x)) // 64 % 20 == 3),
    "one in a thousand": lambda x: x * (torch.arange(len(x)) % 1000 == 0),
    "one": lambda x: x * (torch.arange(len(x)) == 7_000),
    "zeros": lambda x: x * 0,
    "constant": lambda x: x * 0 + 1.5,
    "bytes": lambda x: (x * 30).round(),
    "noise": lambda x: torch.from_numpy(corpus.random_words(len(x), corpus.FP32, 3).view(np.float32).copy()),
}


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("name", tiers.mostly_full(KINDS, ["bf16"], "the same tables for each dtype"))
def test_no_frame_is_larger_than_the_lossless_one(route: str, name: str, what: str) -> None:
    kind = KINDS[name]
    normal = torch.randn(1 << (14 if route in tiers.SLOW else 17), generator=torch.Generator().manual_seed(6))
    tensor = TENSORS[what](normal).to(kind.dtype)
    for block in (128, 1024):
        lossless = codecs.compress(tensor, block=block, route=route).numel()
        by_groups = (TacoFp8(), Int(6, 32)) if what in ("dense", "half empty", "embedding") else ()
        for codec in (Round(1), Round(3), Round(6), *by_groups):
            size = codecs.compress(tensor, codec, lossy=True, block=block, route=route).numel()
            assert size <= 1.03 * lossless, f"{codec} has {size} bytes, lossless {lossless}"
