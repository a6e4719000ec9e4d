"""The delta codec: words come back against their base, in place too; all routes write the same bytes; wrong bases are refused."""

from __future__ import annotations

from functools import cache

import corpus
import from_format
import numpy as np
import pytest
import torch
import variants
from corpus import assert_same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_frame import code
from test_gap_list import CHUNK, KINDS, PLAIN, forms, roundtrip

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.codecs import exponent
from ds_zipccl.frame import FrameErrorCode

route = variants.each(variants.COMPILED)
FLOATS = list(corpus.SUMMED.values())


def pair(numel: int, kind: corpus.Float, block: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and their base, of every texture and way of changing."""
    words = corpus.mixed(numel, kind, block, seed)
    return corpus.tensor(words, kind), corpus.tensor(corpus.before(words, kind, block, seed), kind)


@pytest.mark.full("emulated", reason="fourteen seconds")
@pytest.mark.parametrize("change", corpus.BASES)
@pytest.mark.parametrize("kind", FLOATS, ids=corpus.SUMMED)
def test_every_texture_and_every_change(route: str, kind: corpus.Float, change: str) -> None:
    for seed, texture in enumerate(corpus.TEXTURES.values()):
        for n in (0, 1, 2, 17, 63, 64, 65, 127, 129, 300):
            words = texture(n, kind, seed)
            base = corpus.BASES[change](words, kind, seed)
            roundtrip(corpus.tensor(words, kind), corpus.tensor(base, kind), route, block=128, shaped=False)


@pytest.mark.parametrize("block", corpus.BLOCKS)
@pytest.mark.parametrize("kind", FLOATS[:2], ids=["bf16", "fp16"])
def test_all_patterns_of_16_bits_against_each_other(route: str, kind: corpus.Float, block: int) -> None:
    ordered = np.arange(1 << 16).astype(np.uint16)
    for seed, base in enumerate((ordered, ordered + np.uint16(1), ordered[::-1].copy(), ordered * np.uint16(40503))):
        shuffled = np.argsort(corpus.hashes(1 << 16, seed))
        for words, before in ((ordered, base), (ordered[shuffled], base[shuffled])):
            roundtrip(corpus.tensor(words, kind), corpus.tensor(before, kind), route, block=block)


@st.composite
def changed(draw: st.DrawFn) -> tuple[corpus.Float, int, np.ndarray, np.ndarray]:
    """Float type, block size, words near a block or chunk border and their base, of several textures or wholly arbitrary."""
    kind = draw(st.sampled_from(FLOATS))
    block = draw(st.sampled_from(corpus.BLOCKS))
    if draw(st.booleans()):
        data = draw(st.binary(max_size=800))
        words = np.frombuffer(data[: len(data) // 8 * 8], kind.word)
        return kind, block, words[: len(words) // 2], words[len(words) // 2 :]
    border = draw(st.sampled_from([0, block, 2 * block, corpus.CHUNK_BLOCKS * block]))
    numel = max(0, border + draw(st.integers(-17, 70)))
    names = tuple(draw(st.lists(st.sampled_from(sorted(corpus.TEXTURES)), min_size=1, max_size=4)))
    changes = tuple(draw(st.lists(st.sampled_from(sorted(corpus.BASES)), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 9999))
    words = corpus.mixed(numel, kind, block, seed, names)
    return kind, block, words, corpus.before(words, kind, block, seed, changes)


@st.composite
def few_changes(draw: st.DrawFn) -> tuple[corpus.Float, int, np.ndarray, np.ndarray]:
    """Words of every texture of which about a quarter or fewer change: single ones or runs, by little or by much."""
    kind = draw(st.sampled_from(list(KINDS.values())))
    block = draw(st.sampled_from(corpus.BLOCKS))
    border = draw(st.sampled_from([0, block, corpus.CHUNK_BLOCKS * 128, 2 * corpus.CHUNK_BLOCKS * 128]))
    numel = max(1, border + draw(st.integers(-17, 70)))
    seed = draw(st.integers(0, 9999))
    words = corpus.mixed(numel, kind, block, seed)
    count = min(numel, draw(st.integers(0, 8) | st.integers(0, numel // 3 + 1)))
    places = corpus.some_places(numel, count, seed, draw(st.sampled_from([1, 1, 2, 5, 60])))
    units = corpus.changes(len(places), seed, draw(st.sampled_from([1, 2, 6, 40])))
    base = corpus.moved(words, kind, places, units)
    far = places[: draw(st.integers(0, len(places)))]
    base[far] = corpus.random_words(len(far), kind, seed + 1) if draw(st.booleans()) else base[far]
    return kind, block, words, base


def every_way(kind: corpus.Float) -> tuple[corpus.Float, int, np.ndarray, np.ndarray]:
    words = corpus.mixed(3 * CHUNK, kind, 128, 2)
    return kind, 128, words, corpus.before(words, kind, 128, 2)


@pytest.mark.full(reason="eight seconds")
@given(changed() | few_changes())
@example(every_way(corpus.BF16))
@example(every_way(corpus.FP16))
@example(every_way(corpus.FP32))
@settings(max_examples=250)
def test_every_block_takes_the_fewest_bytes(case: tuple[corpus.Float, int, np.ndarray, np.ndarray]) -> None:
    """Of all forms that an encoder may choose, as the document does: all routes and levels write its bytes."""
    kind, block, words, before = case
    dtype = framing.DTYPE_IDS[kind.dtype]
    wanted = from_format.encode(words.tolist(), dtype, block, None, False, base=before.tolist())
    assert from_format.decode(wanted, before.tolist())[2] == words.tolist()
    tensor, base = corpus.tensor(words, kind), corpus.tensor(before, kind)
    for variant in variants.usable(variants.COMPILED):
        with variant.in_use() as route:
            assert roundtrip(tensor, base, route, block=block, **PLAIN).numpy().tobytes() == wanted, variant


def test_threads_change_nothing() -> None:
    """Threads place the chunks in order; chunks without a change take no place."""
    words = corpus.bell(1 << 21, corpus.BF16, 1)
    before = words.copy()
    before[[0, 700_001, 700_002, -1]] ^= 1
    few = corpus.tensor(words, corpus.BF16), corpus.tensor(before, corpus.BF16)
    for tensor, base in (pair(3 << 20, corpus.BF16, 1024, 5), few):
        one = roundtrip(tensor, base, "native", block=128)
        with corpus.threads(3):
            assert torch.equal(roundtrip(tensor, base, "native", block=128), one)


# --- sizes


@cache
def short_changes(name: str) -> list[tuple[torch.Tensor, torch.Tensor, bytes]]:
    """Words and base of which a form without the base is shorter than even a part of the changes, and the document's frame."""
    kind, found = corpus.SUMMED[name], []
    for count in range(10, 130, 5):
        words = np.zeros(2048, kind.word)  # of which one half makes the chunk a TABLE
        words[1024:] = corpus.bell(1024, kind, count + 1)
        words[: 1024 : 1024 // count] = corpus.bell(1024, kind, count)[:: 1024 // count]
        few = corpus.bell(2048, kind, count) >> kind.mantissa << kind.mantissa
        for here, before in ((words, np.zeros_like(words)), (few, corpus.BASES["units"](few, kind, count))):
            dtype = framing.DTYPE_IDS[kind.dtype]
            wanted = from_format.encode(here.tolist(), dtype, 1024, None, False, base=before.tolist())
            found.append((corpus.tensor(here, kind), corpus.tensor(before, kind), wanted))
    return found


@pytest.mark.parametrize("name", corpus.SUMMED)
def test_short_changes_lose_against_shorter_blocks(route: str, name: str) -> None:
    for at, (tensor, base, wanted) in enumerate(short_changes(name)):
        frame = ds_zipccl.compress(tensor, "delta", base=base, block=1024, route=route, **PLAIN)
        assert frame.numpy().tobytes() == wanted, at


@pytest.mark.parametrize(
    "rate, share, floor", [(2.4e-7, 0.01, 66), (1e-5, 0.2, 12.2), (8e-5, 0.65, 5.2), (2e-4, 0.83, 3.7)]
)
def test_steps_of_an_optimizer_keep_their_scale(rate: float, share: float, floor: float) -> None:
    master = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    step = rate * torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))
    base, words = master.bfloat16(), (master + step).bfloat16()
    assert (words != base).float().mean().item() == pytest.approx(share, rel=0.15)
    assert words.nbytes / ds_zipccl.compress(words, "delta", base=base).numel() >= floor


@pytest.mark.parametrize("kind", FLOATS, ids=corpus.SUMMED)
def test_never_larger_than_cascade(route: str, kind: corpus.Float) -> None:
    for name, change in corpus.BASES.items():
        words = corpus.bell(50_000, kind, 4)
        tensor, base = corpus.tensor(words, kind), corpus.tensor(change(words, kind, 4), kind)
        alone = ds_zipccl.compress(tensor, route=route, **PLAIN)
        against = ds_zipccl.compress(tensor, "delta", base=base, route=route, **PLAIN)
        assert against.numel() <= alone.numel(), name
        if name == "same":
            assert against.numel() < tensor.nbytes / 400
            assert set(forms(against)) == {"SAME"}


def test_unaligned_memory(route: str) -> None:
    for kind in FLOATS:
        tensor, base = pair(1300, kind, 128, 9)
        moved = torch.frombuffer(
            bytearray(b"\7" + base.view(torch.uint8).numpy().tobytes()), dtype=kind.dtype, offset=1
        )
        frame = ds_zipccl.compress(tensor, "delta", base=moved, block=128, route=route)
        assert torch.equal(frame, ds_zipccl.compress(tensor, "delta", base=base, block=128, route=route))
        assert_same_bits(ds_zipccl.decompress(frame, moved, base=moved, route=route), tensor)


# --- refused arguments


def test_a_base_is_needed_and_only_by_delta() -> None:
    tensor, base = pair(300, corpus.BF16, 128, 1)
    frame = ds_zipccl.compress(tensor, "delta", base=base)
    with pytest.raises(ValueError, match="'delta' needs a base"):
        ds_zipccl.compress(tensor, "delta")
    with pytest.raises(ValueError, match="'cascade' takes no base"):
        ds_zipccl.compress(tensor, base=base)
    with pytest.raises(ValueError, match="takes no base, which codec 'delta' needs"):
        codecs.compress_segments([tensor], [torch.empty(9999, dtype=torch.uint8)], "delta")
    with pytest.raises(ValueError, match="a delta frame needs the base"):
        ds_zipccl.decompress(frame)
    plain = ds_zipccl.compress(tensor)
    assert_same_bits(ds_zipccl.decompress(plain, base=torch.zeros(3)), tensor)


def test_bases_of_another_kind() -> None:
    tensor, base = pair(300, corpus.BF16, 128, 1)
    frame = ds_zipccl.compress(tensor, "delta", base=base)
    for wrong in (base[:-1], base.half()):
        with pytest.raises(ValueError, match=r"base must be a tensor of 300 torch\.bfloat16 on cpu"):
            ds_zipccl.compress(tensor, "delta", base=wrong)
    for wrong in (base[:-1], base.half(), torch.empty(0)):
        assert code(frame, base=wrong) is FrameErrorCode.MISMATCH
    with pytest.raises(TypeError, match="contiguous tensor on cpu"):
        ds_zipccl.decompress(frame, base=base.repeat_interleave(2)[::2])
    longer = torch.zeros(400, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="overlap"):
        ds_zipccl.decompress(frame, longer[1:301], base=longer[:300])
    with pytest.raises(ds_zipccl.FrameError, match="cannot be added"):
        codecs.decompress_add(frame, torch.zeros(300))


@pytest.mark.parametrize("dtype", framing.DTYPE_IDS, ids=str)
def test_every_dtype(route: str, dtype: torch.dtype) -> None:
    """All dtypes but three are coded by their bytes; header and result have the dtype and shape of the tensor."""
    data = corpus.hashes(4096, 3).view(np.uint8)
    data = torch.from_numpy(data % 2 if dtype == torch.bool else data.copy())
    before = data.clone()
    before[corpus.some_places(len(data), 40, 4)] ^= 1
    for block, elements in ((128, 1001), (1024, 900), (128, 3), (256, 0)):
        tensor, base = (each.view(dtype)[:elements].view(-1, 1) for each in (data, before))
        frame = roundtrip(tensor, base, route, block=block)
        header = framing.parse(frame)
        assert (header.codec, header.dtype, header.shape) == (framing.CodecId.DELTA, dtype, (elements, 1))
        same = roundtrip(tensor, tensor, route, block=block, shaped=False)
        words = elements if dtype in codecs.SUMMED_DTYPES else tensor.nbytes
        assert exponent.DELTA.payload_bound(elements, dtype, block) >= tensor.nbytes + same.numel() - 32
        assert same.numel() == 32 + framing.pad16(4 * -(-words // (16 * block)))


def test_change_is_unknown_in_an_exponent_frame(route: str) -> None:
    words = corpus.bell(300, corpus.BF16, 1)
    base = corpus.tensor(corpus.BASES["long_steps"](words, corpus.BF16, 1), corpus.BF16)
    tensor = corpus.tensor(words, corpus.BF16)
    frame = ds_zipccl.compress(tensor, "delta", base=base, block=128, route=route, **PLAIN)
    assert frame[48 + 4] >> 5 == 5, "the first of three blocks is a CHANGE"
    frame[5] = framing.CodecId.EXPONENT
    assert code(frame, route=route) is FrameErrorCode.BLOCK


def test_strided_tensors_and_bases(route: str) -> None:
    tensor, base = (torch.randn(30, 40).bfloat16() for _ in range(2))
    frame = ds_zipccl.compress(tensor.t(), "delta", base=base.t(), route=route)
    assert_same_bits(ds_zipccl.decompress(frame, base=base.t().contiguous(), route=route), tensor.t().contiguous())
