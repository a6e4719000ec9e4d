"""The codecs ``taco_fp8`` and ``int``: identities, the document, errors and sizes, and what is not finite."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import corpus
import from_format_scaled
import numpy as np
import pytest
import tiers
import torch
import variants
from corpus import assert_same_bits, words_of
from from_format_scaled import Settings

from ds_zipccl import codecs, kernels
from ds_zipccl import frame as framing
from ds_zipccl.codecs.scaled import FIELDS
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import GROUPS, Int, TacoFp8

KINDS = corpus.SUMMED
#: Every kind of code, with and without the transform.
CODECS: dict[str, TacoFp8 | Int] = {
    "e4m3": TacoFp8(128, False),
    "e4m3 hadamard": TacoFp8(128, True),
    "e4m3 32": TacoFp8(32, False),
    "e4m3 512 hadamard": TacoFp8(512, True),
    "int8": Int(8, 128),
    "int6 32": Int(6, 32),
    "int6 hadamard": Int(6, 128, True),
    "int4 64 hadamard": Int(4, 64, True),
    "int8 256 hadamard": Int(8, 256, True),
}


route = variants.each(variants.COMPILED)


def settings(codec: TacoFp8 | Int) -> Settings:
    if isinstance(codec, Int):
        return Settings(from_format_scaled.INT, codec.bits, codec.group, codec.hadamard)
    return Settings(from_format_scaled.E4M3, 8, codec.group, codec.hadamard)


def gaussian(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def codes_of(route: str, words: torch.Tensor, codec: TacoFp8 | Int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of words of which no group stays as it is."""
    groups = -(-words.numel() // codec.group)
    bits = codec.bits if isinstance(codec, Int) else 8
    scales = torch.zeros(groups, dtype=torch.int16 if isinstance(codec, Int) else torch.uint8)
    codes = torch.zeros(groups * codec.group * bits // 8, dtype=torch.uint8)
    coded = kernels.lossy_route(route, "cpu", "encode_scaled").encode_scaled(words, codec, scales, codes)
    assert coded is not None
    return scales, codes[: coded * codec.group * bits // 8]


def decoded(route: str, scales: torch.Tensor, codes: torch.Tensor, codec: TacoFp8 | Int, numel: int) -> torch.Tensor:
    words = torch.empty(numel)
    kernels.lossy_route(route, "cpu", "decode_scaled").decode_scaled(scales, codes, codec, words)
    return words


def hard_words(kind: corpus.Float, numel: int, seed: int) -> Iterator[torch.Tensor]:
    """Tensors of finite words: textures, zero groups, tiny and huge values, denormals, negative zeros; then some that are not finite."""
    rng = np.random.default_rng(seed)
    finite = corpus.mixed(
        numel, kind, 128, seed, ("bell", "zeros", "outliers", "sparse_signed", "spread", "negative_zeros")
    )
    infinite = (kind.largest_exponent) << kind.mantissa
    finite = np.where(finite & kind.word(infinite) == infinite, 0, finite).astype(kind.word)
    yield corpus.tensor(finite, kind)
    for low, high in ((0, 12), (kind.largest_exponent - 9, kind.largest_exponent)):
        e = rng.integers(low, high, numel)
        words = rng.integers(0, 1 << 32, numel).astype(np.uint32).astype(kind.word)
        words = (words & kind.word(np.iinfo(kind.word).max ^ infinite)) | (e << kind.mantissa).astype(kind.word)
        yield corpus.tensor(words, kind)
    some = finite.copy()
    some[rng.integers(0, numel, 3)] = [infinite, infinite | 1, infinite | kind.sign][seed % 3]
    yield corpus.tensor(some, kind)
    yield corpus.tensor(corpus.TEXTURES["random"](numel, kind, seed), kind)
    yield (torch.arange(numel) * 0.1).to(
        kind.dtype
    )  # zero after the transform, but for roundings: the order of strides shows


# --- the document


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("which", tiers.mostly_full(CODECS, ("e4m3 hadamard", "int6 32"), "other groups and bits"))
def test_frames_follow_the_document(route: str, which: str, name: str) -> None:
    """All routes and levels write the document's bytes and read its values; NaN, infinities, denormals and the largest are among them."""
    kind, codec = KINDS[name], CODECS[which]
    dtype, s = framing.DTYPE_IDS[kind.dtype], settings(codec)
    shown = set()
    for seed, numel in enumerate((1500, 1, 33)):
        for words in hard_words(kind, numel, seed):
            frame = codecs.compress(words, codec, lossy=True, block=128, shaped=False, checksum=False, route=route)
            wanted = from_format_scaled.encode(words_of(words), dtype, s, 128, None, False)
            assert frame.numpy().tobytes() == wanted, f"{numel} words, seed {seed}: {words_of(words)}"
            kept = from_format_scaled.project(words_of(words), dtype, s)
            arrived = codecs.decompress(frame, route=route)
            assert words_of(arrived) == kept
            for before, after in zip(words.split(codec.group), arrived.split(codec.group), strict=True):
                assert after.isfinite().all() or not before.isfinite().all(), "a group became infinite or NaN"
            assert words_of(codecs.project(words, codec, route=route)) == kept
            shown.add((frame[5].item(), frame[9].item()))
            if frame[5] == CodecId.SCALED:
                assert from_format_scaled.decode(wanted) == kept
    assert {frame_id for frame_id, _ in shown} == {CodecId.RAW, CodecId.EXPONENT, CodecId.SCALED}
    assert (CodecId.SCALED, 7) in shown or isinstance(codec, Int) or codec.group != 128


# --- the transform


@pytest.mark.parametrize("group", GROUPS)
def test_hadamard_identities(route: str, group: int) -> None:
    """H of a unit vector is 1 or -1 everywhere, with the signs of the bits that two indexes share; H of a constant c is (g c, 0, ...)."""
    codec = TacoFp8(group, True)
    at = 5 * group // 8 + 3
    unit = torch.zeros(group)
    unit[at] = 1.0
    scales, codes = codes_of(route, unit, codec)
    signs = [(at & i).bit_count() % 2 for i in range(group)]
    assert scales.tolist() == [119] and codes.tolist() == [0x78 | sign << 7 for sign in signs]
    assert torch.equal(decoded(route, scales, codes, codec, group), unit)
    scales, codes = codes_of(route, torch.full((group,), 3.0), codec)
    assert codes.tolist()[1:] == [0] * (group - 1)
    assert torch.equal(decoded(route, scales, codes, codec, group), torch.full((group,), 3.0))


# --- codes


def test_codes_of_e4m3_are_those_of_torch(route: str) -> None:
    """All 256 codes; every midpoint between two of them and its neighbours."""
    codec = TacoFp8(256, False)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    numbers = codes[~values.isnan()]
    padded = torch.cat([numbers, torch.zeros(2, dtype=torch.uint8)])
    found = decoded(route, torch.tensor([127], dtype=torch.uint8), padded, codec, 256)[:254]
    assert_same_bits(found, values[~values.isnan()])
    positive = torch.sort(values[values >= 0].unique())[0]
    middles = (positive[1:] + positive[:-1]) / 2
    probes = torch.cat([middles, middles * (1 + 2**-23), middles * (1 - 2**-23), positive, -middles, -positive])
    probes = torch.cat([part_with_top(part) for part in probes.split(255)])
    scales, found = codes_of(route, probes, codec)
    assert set(scales.tolist()) == {127}
    assert torch.equal(found, probes.to(torch.float8_e4m3fn).view(torch.uint8))


def part_with_top(part: torch.Tensor) -> torch.Tensor:
    """A group of 256 values, of which the last is the largest code."""
    return torch.cat([part, torch.zeros(255 - len(part)), torch.tensor([448.0])])


@pytest.mark.parametrize("group", [32, 128])
def test_the_largest_value_of_a_group(route: str, group: int) -> None:
    """448 is the code 7E, anything above doubles the scale, and 1.75 * 2^k stays."""
    x = torch.linspace(0, 1, group)
    for top, code, scale in ((448.0, 0x7E, 127), (449.0, 0x76, 128), (448.00003, 0x76, 128), (-448.0, 0xFE, 127)):
        x[7] = top
        scales, codes = codes_of(route, x, TacoFp8(group, False))
        assert (scales.tolist(), codes[7].item()) == ([scale], code), top
    for k in (-100, -7, 0, 30, 118):
        x = gaussian(group) * 2.0 ** (k - 4)
        x[3] = 1.75 * 2.0**k
        codec = TacoFp8(group, False)
        assert codes_of(route, x, codec)[1][3] == 0x7E
        assert codecs.project(x, codec, route=route)[3] == x[3]


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_scaled_input_has_the_same_codes(route: str, codec: TacoFp8 | Int) -> None:
    """A factor of 2^j changes the scales alone, by j: there is no absolute bound."""
    x = gaussian(4 * codec.group)
    scales, codes = codes_of(route, x, codec)
    for j in (-90, -40, -1, 1, 90):
        scaled, same = codes_of(route, x * 2.0**j, codec)
        assert torch.equal(same, codes), j
        step = 128 * j if isinstance(codec, Int) else j
        assert torch.equal(scaled.int(), scales.int() + step), j


# --- sizes


@pytest.mark.parametrize("numel", [1 << 14, (1 << 14) + 5])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_sizes_are_those_of_the_formula(codec: TacoFp8 | Int, numel: int) -> None:
    """16 + pad16(G s) + G' g b / 8 without stage 2; stage 2 saves 3 % at least."""
    x = gaussian(numel)
    x[1024:3072] = 0
    frame = codecs.compress(x, codec, lossy=True, shaped=False, checksum=False)
    groups, bits = -(-numel // codec.group), codec.bits if isinstance(codec, Int) else 8
    coded = groups - 2048 // codec.group
    wanted = 16 + framing.pad16(groups * (2 if isinstance(codec, Int) else 1)) + coded * codec.group * bits // 8
    payload = frame.numel() - framing.HEADER_BYTES
    if isinstance(codec, Int):
        assert payload == wanted and frame[9] == 0
    else:
        assert 0.7 * wanted < payload <= 0.97 * wanted and frame[9] == 10


def test_stage_2_is_left_out_where_it_saves_nothing(route: str) -> None:
    """Codes whose exponents are all equally likely."""
    random = torch.arange(1 << 14) * 40503 % 65521
    codes = (random % 127 + 128 * (random // 127 % 2)).to(torch.uint8)
    codes[::128] = 0x7E
    x = codes.view(torch.float8_e4m3fn).float()
    frame = codecs.compress(x, TacoFp8(128, False), lossy=True, shaped=False, checksum=False, route=route)
    assert (frame[5], frame[9]) == (CodecId.SCALED, 0)
    assert frame.numel() == 32 + 16 + 128 + (1 << 14)
    assert torch.equal(codecs.decompress(frame, route=route), x)


def test_a_failure_of_stage_2_comes_before_a_code_that_is_no_number(route: str) -> None:
    """A chunk in front has such a code; the index of a later chunk is wrong."""
    words, plain = gaussian(10_231).bfloat16(), {"block": 128, "shaped": False, "checksum": False}
    frame = codecs.compress(words, TacoFp8(32), lossy=True, **plain)
    at = framing.HEADER_BYTES + FIELDS.size + framing.pad16(-(-words.numel() // 32))
    code = torch.full((words.numel() + 9,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stage_2 = codecs.compress(code, "cascade", **plain)[framing.HEADER_BYTES :]
    bad = torch.cat((frame[:at], stage_2))
    struct.pack_into("<Q", bad.numpy(), framing.HEADER_BYTES + 8, stage_2.numel())
    struct.pack_into("<Q", bad.numpy(), 24, bad.numel())
    broken = bad.clone()
    broken[at + 13] ^= 0x40
    for damaged, wanted in ((bad, framing.FrameErrorCode.BLOCK), (broken, framing.FrameErrorCode.INDEX)):
        with pytest.raises(framing.FrameError) as error:
            codecs.decompress(damaged, torch.empty_like(words), route=route)
        assert error.value.code == wanted
