"""compress and decompress: every bit comes back, sizes keep their promises, and all routes write the same bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import corpus
import numpy as np
import pytest
import torch
import variants
from corpus import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_zipccl
from ds_zipccl import codecs, kernels
from ds_zipccl import frame as framing
from ds_zipccl.kernels import build

FLOATS = list(corpus.FLOATS.values())
MILLION = 1 << 20


def roundtrip(tensor: torch.Tensor, route: str, **arguments: object) -> torch.Tensor:
    """The frame, in a buffer of exactly its bound, after proof that it holds ``tensor``."""
    block = arguments.get("block", 1024)
    bound = ds_zipccl.compress_bound(tensor.numel(), tensor.dtype, ndim=tensor.dim(), block=block)
    buffer = torch.full((bound + 64,), 0xA5, dtype=torch.uint8)
    frame = ds_zipccl.compress(tensor, out=buffer[:bound], route=route, **arguments)
    assert (buffer[bound:] == 0xA5).all(), f"wrote past the bound at {tensor.numel()} words"
    assert_same_bits(ds_zipccl.decompress(frame, route=route), tensor)
    return frame


# --- every bit pattern


@pytest.mark.parametrize("code", corpus.CODES)
@pytest.mark.parametrize("block", corpus.BLOCKS)
@pytest.mark.parametrize("kind", FLOATS[:2], ids=["bf16", "fp16"])
def test_all_patterns_of_16_bits(route: str, kind: corpus.Float, block: int, code: str) -> None:
    ordered = np.arange(1 << 16).astype(np.uint16)
    by_mantissa = np.argsort(ordered & ((1 << kind.mantissa) - 1), kind="stable").astype(np.uint16)
    shuffled = ordered[np.argsort(corpus.hashes(1 << 16, 5))]
    for words in (ordered, by_mantissa, shuffled):
        assert len(np.unique(words)) == 1 << 16
        roundtrip(corpus.tensor(words, kind), route, codec=code, block=block)


@pytest.mark.full("emulated", reason="a minute; all patterns of 16 bits run on the emulation in the test above")
@pytest.mark.parametrize("code", corpus.CODES)
@pytest.mark.parametrize("kind", FLOATS[:2], ids=["bf16", "fp16"])
def test_every_pattern_among_ordinary_words(route: str, kind: corpus.Float, code: str) -> None:
    """Each pattern alone in a block of common values, where it must take an escape rather than RAW. On the slow emulation among three."""
    words = corpus.bell(1024 * 128, kind, 3).reshape(1024, 128)
    columns = [11, 50, 77, 127] if route == "emulated" else [50]
    for start in range(0, 1 << 16, 1024 * len(columns)):
        words[:, columns] = np.arange(start, start + 1024 * len(columns)).reshape(len(columns), 1024).T
        tensor = corpus.tensor(words.reshape(-1), kind)
        frame = ds_zipccl.compress(tensor, code, block=128, shaped=False, checksum=False, route=route)
        assert frame.numel() < tensor.numel() * 2
        assert_same_bits(ds_zipccl.decompress(frame, route=route), tensor)


@pytest.mark.parametrize("code", corpus.CODES)
@pytest.mark.parametrize("kind", FLOATS, ids=corpus.FLOATS)
def test_windows_at_the_largest_exponents(route: str, kind: corpus.Float, code: str) -> None:
    """Whole blocks of a few neighbouring exponents up to the largest one, with which k = (top + 3 - e) mod 256 wraps."""
    blocks = []
    for below in range(4):
        for width in (1, 2, 3, 6, 10):
            seed = 16 * below + width
            steps = corpus.hashes(1024, seed) % np.uint64(width)
            exponents = np.maximum(kind.largest_exponent - below - steps.astype(np.int64), 1)
            blocks.append(corpus.with_exponents(corpus.random_words(1024, kind, seed), exponents, kind))
    tensor = corpus.tensor(np.concatenate(blocks), kind)
    frame = roundtrip(tensor, route, codec=code)
    assert torch.equal(frame, ds_zipccl.compress(tensor, codec=code, route="native"))


@pytest.mark.full("numba", "emulated", reason="twenty seconds; other tests have random words of fewer millions")
def test_ten_million_random_fp32_words(route: str) -> None:
    for seed in range(10):
        roundtrip(corpus.tensor(corpus.random_words(1_000_000, corpus.FP32, seed), corpus.FP32), route, checksum=False)


# --- sizes


@pytest.mark.parametrize("block", corpus.BLOCKS)
@pytest.mark.parametrize("kind", FLOATS, ids=corpus.FLOATS)
def test_random_words_never_grow_by_more_than_a_percent(kind: corpus.Float, block: int, route: str) -> None:
    for size in (1 << 16, (1 << 16) + kind.dtype.itemsize, 100_000, 1 << 20):
        words = corpus.random_words(size // kind.dtype.itemsize, kind, size)
        frame = ds_zipccl.compress(corpus.tensor(words, kind), block=block, route=route)
        # A table entry is 3 bytes, index and padding take another: that is over a percent of a short block.
        limit = max(0.01, 4 / (block * kind.dtype.itemsize))
        assert frame.numel() <= (1 + limit) * words.nbytes


@pytest.mark.parametrize("kind", FLOATS, ids=corpus.FLOATS)
def test_zeros_shrink_a_hundredfold(kind: corpus.Float, route: str) -> None:
    for size in (1 << 16, 1 << 20):
        zeros = torch.zeros(size // kind.dtype.itemsize, dtype=kind.dtype)
        assert 100 * ds_zipccl.compress(zeros, route=route).numel() < size


@pytest.mark.full(
    "emulated", reason="36 frames of a million words; the bytes are those of the native route, which stays"
)
def test_gaussian_bf16_ratio(route: str) -> None:
    """Over scales from 1e-6 to 1e3 and, in between, over all positions of the binades' borders."""
    normal = torch.randn(MILLION, generator=torch.Generator().manual_seed(1))
    sigmas = [1e-6, 3e-5, 1e-3, 0.02, 42.0, 1e3, *(2 ** (step / 12) for step in range(12))]
    ratios = {
        code: [2 * MILLION / ds_zipccl.compress((normal * s).bfloat16(), code, route=route).numel() for s in sigmas]
        for code in corpus.CODES
    }
    assert min(ratios["cascade"]) >= 1.485 and sum(ratios["cascade"]) >= 1.49 * len(sigmas)
    assert min(ratios["wide"]) >= 1.42


@pytest.mark.parametrize("dtype, ratio", [(torch.float16, 1.165), (torch.float32, 1.195), (torch.float8_e4m3fn, 1.2)])
def test_gaussian_ratio_of_other_floats(dtype: torch.dtype, ratio: float, route: str) -> None:
    tensor = torch.randn(MILLION, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert tensor.nbytes / ds_zipccl.compress(tensor, route=route).numel() >= ratio


def test_fp32_that_came_from_bf16_shrinks_more_than_twofold(route: str) -> None:
    tensor = torch.randn(MILLION, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    assert 4 * MILLION / roundtrip(tensor, route).numel() > 2.9


@pytest.mark.parametrize("texture", corpus.TEXTURES)
@pytest.mark.parametrize("kind", FLOATS, ids=corpus.FLOATS)
def test_bound_holds_for_every_length(route: str, kind: corpus.Float, texture: str) -> None:
    """Every length of one short block, then the last of several blocks."""
    for n in (*range(40), 63, 64, 65, 127, 128, 129, 511, 513, 4095, 4097):
        roundtrip(corpus.tensor(corpus.TEXTURES[texture](n, kind, n), kind), route, block=128)


# --- routes


@st.composite
def coded(draw: st.DrawFn, kinds: Sequence[corpus.Float] = FLOATS) -> tuple[corpus.Float, int, np.ndarray]:
    """Float type, block size, and words near a block or chunk border, of several textures or wholly arbitrary."""
    kind = draw(st.sampled_from(kinds))
    block = draw(st.sampled_from(corpus.BLOCKS))
    if draw(st.booleans()):
        data = draw(st.binary(max_size=600))
        return kind, block, np.frombuffer(data[: len(data) // 4 * 4], kind.word)
    border = draw(st.sampled_from([0, block, 2 * block, corpus.CHUNK_BLOCKS * block]))
    numel = max(0, border + draw(st.integers(-17, 70)))
    names = tuple(draw(st.lists(st.sampled_from(sorted(corpus.TEXTURES)), min_size=1, max_size=4)))
    return kind, block, corpus.mixed(numel, kind, block, draw(st.integers(0, 9999)), names)


@given(coded(), st.sampled_from(corpus.CODES), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_routes_agree(case: tuple[corpus.Float, int, np.ndarray], code: str, shaped: bool, checksum: bool) -> None:
    kind, block, words = case
    tensor = corpus.tensor(words, kind)
    bound = ds_zipccl.compress_bound(len(words), kind.dtype, ndim=1 if shaped else None, block=block)
    frames = {}
    for variant in variants.usable():
        with variant.in_use() as route:
            arguments = {"codec": code, "block": block, "shaped": shaped, "checksum": checksum, "route": route}
            frames[variant] = ds_zipccl.compress(tensor, **arguments)
            assert torch.equal(frames[variant], ds_zipccl.compress(tensor, **arguments)), f"{variant} does not repeat"
            assert frames[variant].numel() <= bound
            assert_same_bits(ds_zipccl.decompress(frames[variant], route=route), tensor)
    first, *others = frames
    for other in others:
        assert torch.equal(frames[first], frames[other]), f"{first} and {other} give different bytes"


def test_routes_of_this_machine() -> None:
    """numba is a dependency; without a C++ compiler the native route says so."""
    reasons = kernels.why()
    assert list(reasons) == list(dict.fromkeys(variant.route for variant in variants.ALL))
    assert reasons["numba"] == ""
    assert reasons["native"] == "" or "BuildError" in reasons["native"]
    with pytest.raises(ValueError, match=r"no route 'gpu'.*native, numba"):
        ds_zipccl.compress(torch.zeros(3), route="gpu")


def test_every_level_is_under_test() -> None:
    """A level that csrc has and variants lacks would go untested; one without a recipe would be in no library."""
    sources = "".join(path.read_text() for path in build.CSRC.glob("cpu/*.cpp"))
    levels = set(re.findall(r"^ZIPCCL_LEVEL\((\w+),", sources, re.MULTILINE))
    assert levels == {variants.PORTABLE, *itertools.chain(*variants.LEVELS.values())}
    for machine, own in variants.LEVELS.items():
        assert {f"cpu/{level}.cpp" for level in (*own, variants.PORTABLE)} <= set(build.cpu(machine).sources)


# --- tensors and buffers of all kinds


def test_shapes_come_back(route: str) -> None:
    for shape in ((), (1,), (0,), (3, 0, 2), (5, 7), (2, 1, 3, 1), (1,) * 64):
        for dtype in (*codecs.CODED_DTYPES, torch.int64):
            roundtrip(torch.full(shape, 3, dtype=dtype), route)
    flat = ds_zipccl.decompress(ds_zipccl.compress(torch.ones(2, 3), shaped=False, route=route), route=route)
    assert flat.shape == (6,)


def _strided() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0, dtype=torch.bfloat16).view(6, 10) + 1
    return {
        "transposed": base.t(),
        "every third": base[:, ::3],
        "column": base[:, 4],
        "expanded": base[:, :1].expand(6, 9),
        "expanded scalar": torch.tensor(2.5, dtype=torch.bfloat16).expand(1),
        "one of a column": base[:1, 4],
        "flipped": base.flip(0),
        "odd storage offset": base.view(-1)[1:],
        "from numpy, empty": torch.from_numpy(np.zeros(0, np.float32)),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wants a gradient": torch.nn.Parameter(torch.ones(7)),
        "negative view": torch.tensor([1 + 2j]).conj().imag,
        "conjugate view": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("name", _strided())
def test_strided_tensors(name: str, codec: str, route: str) -> None:
    tensor = _strided()[name]
    frame = ds_zipccl.compress(tensor, codec, route=route)
    wanted = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert_same_bits(ds_zipccl.decompress(frame, route=route), wanted)


@pytest.mark.parametrize("dtype", framing.DTYPE_IDS, ids=str)
def test_other_dtypes_become_raw_frames(dtype: torch.dtype, route: str) -> None:
    data = torch.from_numpy(corpus.hashes(240, 3).view(np.uint8).copy())
    tensor = (data > 99)[:77] if dtype == torch.bool else data.view(dtype)[:77]
    for codec in codecs.CODECS:
        frame = ds_zipccl.compress(tensor, codec) if codec == "raw" else roundtrip(tensor, route, codec=codec)
        assert_same_bits(ds_zipccl.decompress(frame), tensor)
        header = framing.parse(frame)
        if codec != "raw" and dtype in codecs.CODED_DTYPES:
            assert header.codec is framing.CodecId.EXPONENT
        else:
            assert header.codec is framing.CodecId.RAW
            assert torch.equal(frame[header.payload_at :], tensor.view(torch.uint8)), "the bytes as they are"
            assert frame.numel() == ds_zipccl.compress_bound(77, dtype, "raw", ndim=1)


@pytest.mark.parametrize("kind", FLOATS, ids=corpus.FLOATS)
def test_unaligned_memory(kind: corpus.Float, route: str) -> None:
    words = corpus.mixed(1300, kind, 128, 11)
    raw = bytearray(b"\x77" + words.tobytes())
    tensor = torch.frombuffer(raw, dtype=kind.dtype, offset=1)
    assert tensor.data_ptr() % 2 == 1
    bound = ds_zipccl.compress_bound(1300, kind.dtype, ndim=1, block=128)
    aligned = ds_zipccl.compress(corpus.tensor(words, kind), block=128, route=route)
    for offset in (0, 1, 3, 7):
        buffer = torch.zeros(bound + 8, dtype=torch.uint8)
        frame = ds_zipccl.compress(tensor, out=buffer[offset : offset + bound], block=128, route=route)
        assert frame.data_ptr() == buffer.data_ptr() + offset
        assert torch.equal(frame, aligned)
        into = torch.frombuffer(bytearray(1 + words.nbytes), dtype=kind.dtype, offset=1)
        assert ds_zipccl.decompress(frame, into, route=route) is into
        assert into.view(torch.uint8).numpy().tobytes() == words.tobytes()


def test_out_of_decompress(route: str) -> None:
    tensor = corpus.tensor(corpus.mixed(600, corpus.BF16, 128, 4), corpus.BF16)
    frame = ds_zipccl.compress(tensor, block=128, route=route)
    for out in (torch.empty(600, dtype=torch.bfloat16), torch.empty(2, 300, dtype=torch.bfloat16)):
        assert ds_zipccl.decompress(frame, out, route=route) is out
        assert_same_bits(out.view(-1), tensor)
    part = torch.zeros(1000, dtype=torch.bfloat16)
    ds_zipccl.decompress(frame, part[200:800], route=route)
    assert_same_bits(part[200:800], tensor)
    assert not part[:200].any() and not part[800:].any()
    for wrong in (torch.empty(599, dtype=torch.bfloat16), torch.empty(600, dtype=torch.float16), torch.empty(0)):
        with pytest.raises(ds_zipccl.FrameError, match=r"600 torch\.bfloat16") as caught:
            ds_zipccl.decompress(frame, wrong, route=route)
        assert caught.value.code is framing.FrameErrorCode.MISMATCH
    gaps, elsewhere = torch.empty(600, 2, dtype=torch.bfloat16)[:, 0], torch.empty(600, device="meta")
    for wrong in (gaps, elsewhere, torch.zeros(1, dtype=torch.complex64).conj().imag):
        with pytest.raises(TypeError, match=r"(contiguous|dense) tensor on cpu"):
            ds_zipccl.decompress(frame, wrong, route=route)


def test_out_of_one_element_with_any_stride(route: str) -> None:
    for codec in codecs.CODECS:
        frame = ds_zipccl.compress(torch.tensor([3.5]), codec, route=route)
        column = torch.zeros(5, 7)
        ds_zipccl.decompress(frame, column[:1, 3], route=route)
        assert column[0, 3] == 3.5 and column.sum() == 3.5
        nothing = ds_zipccl.compress(torch.zeros(0), codec, route=route)
        assert ds_zipccl.decompress(nothing, torch.from_numpy(np.zeros(0, np.float32)), route=route).numel() == 0


def test_frames_in_longer_buffers(route: str) -> None:
    """Frames one after another, found by their own lengths."""
    tensors = [corpus.tensor(corpus.mixed(100 * i, corpus.FP16, 128, i), corpus.FP16) for i in range(5)]
    stream = torch.cat(
        [ds_zipccl.compress(t, route=route) for t in tensors] + [torch.full((99,), 255, dtype=torch.uint8)]
    )
    at = 0
    for tensor in tensors:
        assert_same_bits(ds_zipccl.decompress(stream[at:], route=route), tensor)
        at += framing.parse(stream[at:]).frame_bytes
    assert stream.numel() - at == 99


def test_out_of_compress(route: str) -> None:
    tensor = torch.ones(3, 5)
    bound = ds_zipccl.compress_bound(15, torch.float32, ndim=2)
    buffer = torch.zeros(bound + 10, dtype=torch.uint8)
    frame = ds_zipccl.compress(tensor, out=buffer, route=route)
    assert frame.data_ptr() == buffer.data_ptr() and frame.numel() <= bound
    short, signed, flat = buffer[: bound - 1], buffer[:bound].view(torch.int8), buffer.expand(2, -1)
    for out in (short, signed, flat, buffer.repeat(2)[::2], buffer.to("meta")):
        with pytest.raises(ValueError, match=rf"at least {bound} bytes|on meta"):
            pytest.fail(f"accepted {ds_zipccl.compress(tensor, out=out, route=route)} in {out}")


def test_what_compress_refuses() -> None:
    tensor = torch.zeros(8)
    for arguments, words in (
        ({"codec": "zstd"}, "no codec 'zstd'; known codecs: raw, cascade, wide, delta"),
        ({"block": 100}, "block 100 .* 128, 256, 512, 1024"),
        ({"block": 2048}, "block 2048"),
    ):
        with pytest.raises(ValueError, match=words):
            ds_zipccl.compress(tensor, **arguments)
    with pytest.raises(ValueError, match=r"meta.*\.cpu\(\)"):
        ds_zipccl.compress(tensor.to("meta"))
    with pytest.raises(ValueError, match="float8_e8m0fnu has no place in a frame"):
        ds_zipccl.compress(torch.zeros(8, dtype=torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match="64"):
        ds_zipccl.compress(torch.zeros((1,) * 65))


def test_public_names() -> None:
    assert set(ds_zipccl.__all__) >= {"compress", "decompress", "compress_bound", "FrameError"}
    with pytest.raises(AttributeError, match="no attribute 'compres'; it has compress"):
        _ = ds_zipccl.compres
