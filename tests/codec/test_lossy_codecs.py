"""What every lossy codec of values promises: frames decode to the projection, sums are those of its values, threads change nothing."""

from __future__ import annotations

import math
import re
from functools import cache

import corpus
import pytest
import torch
import variants
from corpus import assert_same_bits
from test_scaled import gaussian

from ds_zipccl import codecs
from ds_zipccl.frame import CodecId
from ds_zipccl.kernels.sums import flushing
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

route = variants.each(variants.COMPILED)
DTYPES = {name: kind.dtype for name, kind in corpus.SUMMED.items()}
#: Each value by itself, groups, groups that are transformed, blocks.
CODECS = (Round(3), TacoFp8(32), TacoFp8(512), Int(6, 32), Int(4, 64, True), Zfp(6))
FRAMES = {Round: CodecId.ROUNDED, TacoFp8: CodecId.SCALED, Int: CodecId.SCALED, Zfp: CodecId.ZFP1}
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def slow(route: str, codec: LossyCodec) -> bool:
    """The emulated kernels of zfp, whose threads take turns."""
    return route == "emulated" and isinstance(codec, Zfp)


@cache
def written(
    route: str, codec: LossyCodec, name: str, numel: int, empty: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, of which some are zeros, and their frame by a route."""
    words = gaussian(numel).to(DTYPES[name])
    words[slice(*empty)] *= 0
    return words, codecs.compress(words, codec, lossy=True, block=128, route=route)


@pytest.mark.parametrize("name", DTYPES)
@each_codec
def test_added_values_are_the_decoded_ones(route: str, codec: LossyCodec, name: str) -> None:
    """A frame, the same one of all routes, and a lossless frame of its values give the same sums, in the dtype and in float32.

    Of 128 elements are a block, of 2048 a chunk of stage 2: groups of zeros are at both ends, and around the ends of chunks.
    """
    # The emulated route, which has all codes of a payload in one place, is the reference of the native one, which codes chunk by chunk.
    other = "emulated" if route == "native" and not slow("emulated", codec) else "native"
    for numel in (257,) if slow(route, codec) else (1, 255, 257, 10_231):
        for empty in ((0, 0), (0, 70), (5000, numel), (2048 - 64, 2048 + 6000)):
            words, wanted = written(other, codec, name, numel, empty)
            frame = codecs.compress(words, codec, lossy=True, block=128, route=route)
            assert torch.equal(frame, wanted), f"{numel} words, zeros {empty}"
            assert numel < 300 or frame[5] == FRAMES[type(codec)] or (name, type(codec)) == ("fp32", Round)
            values = codecs.decompress(frame, route=route)
            assert_same_bits(values, codecs.project(words, codec, route=route))
            lossless = codecs.compress(values, route=route)
            for dtype in (words.dtype, torch.float32):
                sums = [gaussian(numel, 2).to(dtype) for _ in range(2)]
                for one, total in zip((frame, lossless), sums, strict=True):
                    codecs.decompress_add(one, total, dtype=words.dtype, route=route)
                assert_same_bits(*sums)


@pytest.mark.parametrize("name", DTYPES)
@each_codec
def test_every_frame_decodes_to_the_projection(route: str, codec: LossyCodec, name: str) -> None:
    """Whatever frame it is, of any shape, with and without values that are not finite."""
    for numel in (0, 6, 500) if slow(route, codec) else (0, 1, 6, 1000, 5003):
        words = gaussian(numel, numel).to(DTYPES[name])
        for special in (None, math.nan, math.inf, -math.inf):
            if special is not None and numel:
                words[numel // 2] = special
            projected = codecs.project(words, codec, route=route)
            frame = codecs.compress(words.view(-1, 1), codec, lossy=True, route=route)
            assert_same_bits(codecs.decompress(frame, route=route), projected.view(-1, 1))
            finite = projected.isfinite()
            assert finite.sum() + (special is not None and numel > 0) == numel
            assert_same_bits(projected[~finite], words[~finite])


@each_codec
def test_projections_go_to_memory_of_the_caller(route: str, codec: LossyCodec) -> None:
    words = gaussian(1200).view(40, 30)
    wanted = codecs.project(words, codec, route=route)
    assert wanted.shape == words.shape and not torch.equal(wanted, words)
    assert_same_bits(codecs.project(words.t().contiguous().t(), codec, route=route), wanted)
    out = torch.empty_like(words)
    assert codecs.project(words, codec, out=out, route=route) is out and torch.equal(out, wanted)
    assert codecs.project(words, codec, out=words, route=route) is words and torch.equal(words, wanted)
    memory = torch.zeros(1300)
    with pytest.raises(ValueError, match="bytes of an output are also in an input"):
        codecs.project(memory[:1200].view(40, 30), codec, out=memory[4:1204].view(40, 30), route=route)
    with pytest.raises(ValueError, match=r"out must be a contiguous tensor of .* and shape"):
        codecs.project(words, codec, out=out.view(-1), route=route)


@each_codec
def test_segments_are_frames_of_their_own(route: str, codec: LossyCodec) -> None:
    tensors = [gaussian(size, size).bfloat16() for size in ((0, 3, 300) if slow(route, codec) else (0, 3, 700, 20_000))]
    bounds = [codecs.compress_bound(x.numel(), x.dtype, codec, lossy=True, block=128) for x in tensors]
    outs = [torch.full((bound,), 0x5A, dtype=torch.uint8) for bound in bounds]
    frames = codecs.compress_segments(tensors, outs, codec, lossy=True, block=128, route=route)
    for tensor, frame in zip(tensors, frames, strict=True):
        arguments = {"lossy": True, "block": 128, "shaped": False, "checksum": False, "route": route}
        assert torch.equal(frame, codecs.compress(tensor, codec, **arguments))
    assert frames[0][5] == CodecId.RAW and frames[-1][5] == FRAMES[type(codec)]


@pytest.mark.parametrize("name", DTYPES)
@each_codec
def test_cuts_threads_and_flushed_denormals_change_nothing(route: str, codec: LossyCodec, name: str) -> None:
    """Values up to the cut are ordinary ones and zeros, those behind it are denormals."""
    cut, tail = (3 << 19, 5077) if route == "native" else (2048, 77)  # a thread takes 1 MiB or more
    words = torch.cat((gaussian(cut), gaussian(tail) * (2.0**-13 if name == "fp16" else 2.0**-135))).to(DTYPES[name])
    words[:cut].view(-1, 2048)[::3, :600] = 0
    frame, kept = codecs.compress(words, codec, lossy=True, route=route), codecs.project(words, codec, route=route)
    assert_same_bits(torch.cat([codecs.project(part, codec, route=route) for part in words.split(cut // 4)]), kept)
    with corpus.threads(3), flushing(True):
        again = codecs.compress(words, codec, lossy=True, route=route)
        projected = codecs.project(words, codec, route=route)
        decoded = codecs.decompress(frame, route=route)
    assert torch.equal(again, frame)
    assert_same_bits(projected, kept)
    assert_same_bits(decoded, kept)


#: Relative L2 error on a Gaussian.
ERRORS = {
    Round(3): 0.0265, TacoFp8(128, False): 0.0265, TacoFp8(128): 0.0265, Int(8, 128): 0.0065, Int(6, 128): 0.0266, Int(4, 128): 0.118,
    Zfp(8): 5.5e-2, Zfp(12): 3.4e-3, Zfp(16): 2.1e-4,
}  # fmt: skip


@pytest.mark.parametrize("codec", ERRORS, ids=str)
def test_error_bias_and_gain(codec: LossyCodec) -> None:
    x = gaussian(1 << 19)
    kept, x = codecs.project(x, codec).double(), x.double()
    error = (kept - x).norm() / x.norm()
    assert error == pytest.approx(ERRORS[codec], rel=0.02)
    if codec != Zfp(8):
        assert (kept - x).mean().abs() <= 1e-3 * x.square().mean().sqrt()
        assert abs((kept * x).sum() / x.square().sum() - 1) < 2e-3


@each_codec
def test_a_lossy_codec_is_named_twice(codec: LossyCodec) -> None:
    x = torch.ones(8)
    for call in (
        lambda: codecs.compress(x, codec),
        lambda: codecs.compress_bound(8, x.dtype, codec),
        lambda: codecs.compress_segments([x], [torch.empty(999, dtype=torch.uint8)], codec),
    ):
        with pytest.raises(ValueError, match=re.escape(f"codec '{codec}' changes values; pass lossy=True to allow it")):
            call()
    for dtype in (torch.int64, torch.float64):
        with pytest.raises(ValueError, match=rf"{codec} codes torch.bfloat16, .*, got {dtype}"):
            codecs.compress(x.to(dtype), codec, lossy=True)
    with pytest.raises(ValueError, match="takes no row_width"):
        codecs.compress(x, codec, lossy=True, row_width=2)
    with pytest.raises(ValueError, match="takes no base"):
        codecs.compress(x, codec, lossy=True, base=x)
    assert_same_bits(codecs.decompress(codecs.compress(x, "cascade", lossy=True)), x)
