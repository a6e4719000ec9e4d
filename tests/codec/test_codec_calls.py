"""decompress_add, compress_segments and threads give the bits of compress and decompress."""

from __future__ import annotations

import corpus
import numpy as np
import pytest
import torch
from corpus import assert_same_bits, assert_same_sums

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl.frame import HEADER_BYTES, FrameErrorCode, parse

FLOATS = list(corpus.SUMMED.values())


def sample(numel: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    return corpus.tensor(corpus.mixed(numel, kind, 128, seed), kind)


def added(sums: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """By definition: in fp32 (fp16 and bf16 sums are exact enough there), rounded once to the type of ``sums``."""
    return (sums.float() + values.float()).to(sums.dtype)


# --- decompress_add


@pytest.mark.parametrize("code", [*corpus.CODES, "raw"])
@pytest.mark.parametrize("kind", FLOATS, ids=corpus.SUMMED)
def test_sums_are_those_of_the_definition(kind: corpus.Float, code: str, route: str) -> None:
    for seed, numel in enumerate((0, 1, 5, 127, 128, 1025, 20_000)):
        values = sample(numel, kind, seed)
        frame = ds_zipccl.compress(values, code, block=128, route=route)
        for sums in (sample(numel, kind, seed + 50), sample(numel, corpus.FP32, seed + 50)):
            wanted = added(sums, values)
            assert ds_zipccl.decompress_add(frame, sums, route=route) is sums
            assert_same_sums(sums, wanted)


def test_all_sums_of_bf16_and_fp16_patterns(route: str) -> None:
    """Every pattern plus a few: rounding of ties, carries into infinity, subnormals, NaNs of every payload."""
    for kind in FLOATS[:2]:
        values = corpus.tensor(np.arange(1 << 16).astype(np.uint16), kind)
        frame = ds_zipccl.compress(values, route=route)
        for word in (0, 1, 2, kind.sign, kind.sign | 1, 0x3C00, 0x3C01, 0x0400, 0x7BFF, 0x7F7F, 0x7C00, 0xFF80, 0x0080):
            sums = corpus.tensor(np.full(1 << 16, word, np.uint16), kind)
            wanted = added(sums, values)
            assert_same_sums(ds_zipccl.decompress_add(frame, sums, route=route), wanted)


def test_what_decompress_add_refuses(route: str) -> None:
    frame = ds_zipccl.compress(torch.ones(10, dtype=torch.bfloat16), route=route)
    for sums, dtype in (
        (torch.zeros(9), None),
        (torch.zeros(10, dtype=torch.float16), None),
        (torch.zeros(10, dtype=torch.float64), None),
        (torch.zeros(10), torch.float16),
    ):
        with pytest.raises(ds_zipccl.FrameError, match="wanted") as caught:
            ds_zipccl.decompress_add(frame, sums, dtype=dtype, route=route)
        assert caught.value.code is FrameErrorCode.MISMATCH
    whole = ds_zipccl.compress(torch.arange(10), route=route)
    with pytest.raises(ds_zipccl.FrameError, match="int64"):
        ds_zipccl.decompress_add(whole, torch.zeros(10, dtype=torch.int64), route=route)
    with pytest.raises(TypeError, match="contiguous"):
        ds_zipccl.decompress_add(frame, torch.zeros(20)[::2], route=route)
    broken = ds_zipccl.compress(corpus.tensor(corpus.bell(4096, corpus.BF16, 1), corpus.BF16), checksum=False)
    broken[HEADER_BYTES + 18] ^= 0x40  # in the first chunk's table
    with pytest.raises(ds_zipccl.FrameError):
        ds_zipccl.decompress_add(broken, torch.zeros(4096), route=route)


# --- compress_segments


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("sizes", [(), (0,), (5,), (0, 7, 0), (128, 128, 128), (3000, 1, 40_000, 17)])
def test_segments_are_frames_of_their_own(sizes: tuple[int, ...], codec: str, route: str) -> None:
    tensor = sample(sum(sizes), corpus.BF16, len(sizes))
    outs = [torch.empty(ds_zipccl.compress_bound(n, tensor.dtype, codec), dtype=torch.uint8) for n in sizes]
    parts = tensor.split(list(sizes)) if sizes else ()
    frames = ds_zipccl.compress_segments(parts, outs, codec, route=route)
    assert len(frames) == len(sizes)
    for part, frame, out in zip(parts, frames, outs, strict=True):
        assert frame.data_ptr() == out.data_ptr()
        assert torch.equal(frame, ds_zipccl.compress(part, codec, shaped=False, checksum=False, route=route))
        assert_same_bits(ds_zipccl.decompress(frame, route=route), part)


def test_what_compress_segments_refuses() -> None:
    tensor, out = torch.ones(10), torch.empty(1000, dtype=torch.uint8)
    for segments in ([tensor], [tensor, tensor.half()], [tensor, tensor.to("meta")]):
        with pytest.raises(ValueError, match=r"2 buffers|on meta"):
            ds_zipccl.compress_segments(segments, [out, out])
    with pytest.raises(ValueError, match="at least"):
        ds_zipccl.compress_segments([tensor], [out[:20]])


# --- threads


many_threads = pytest.mark.parametrize("threads", [2, 3, 7])


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return sample(300_011, corpus.BF16, 77).repeat(20)


@many_threads
def test_threads_change_no_byte(threads: int, large: torch.Tensor) -> None:
    segments = large.split([1_000_000, 0, 5_000_208, 12])
    outs = [torch.empty(ds_zipccl.compress_bound(len(one), large.dtype), dtype=torch.uint8) for one in segments]
    alone = [ds_zipccl.compress(one, shaped=False, checksum=False) for one in (large, *segments)]
    for _ in range(3):
        with corpus.threads(threads):
            frame = ds_zipccl.compress(large, shaped=False, checksum=False)
            parts = ds_zipccl.compress_segments(segments, outs)
            back = ds_zipccl.decompress(frame)
            sums = ds_zipccl.decompress_add(frame, torch.ones(large.numel()))
        assert all(map(torch.equal, (frame, *parts), alone))
        assert_same_bits(back, large)
        assert_same_sums(sums, large.float() + 1)


@many_threads
def test_the_first_bad_chunk_is_reported_whatever_thread_finds_it(threads: int, large: torch.Tensor) -> None:
    """An index that contradicts itself early wins over a table that does late."""

    def code() -> FrameErrorCode:
        with corpus.threads(threads), pytest.raises(ds_zipccl.FrameError) as caught:
            ds_zipccl.decompress(frame)
        return caught.value.code

    frame = ds_zipccl.compress(large, shaped=False, checksum=False)
    chunks = -(-large.numel() // (corpus.CHUNK_BLOCKS * parse(frame).block))
    offsets = frame[HEADER_BYTES : HEADER_BYTES + 4 * chunks].numpy().view("<u4")
    late = HEADER_BYTES + 16 * int(offsets[-2]) + 17  # the mode of a block
    frame[late] |= 0xE0
    assert code() is FrameErrorCode.BLOCK
    offsets[3] = 1 << 31
    assert code() is FrameErrorCode.INDEX


# --- past the cache


@pytest.mark.full("emulated", reason="half a minute, and stores past the cache are the native route's")
@pytest.mark.parametrize("name", corpus.FLOATS)
def test_large_outputs_wherever_they_begin(name: str, route: str) -> None:
    """From 8 MiB on words are written past the cache, where the output begins at a cache line."""
    kind = corpus.FLOATS[name]
    size = kind.dtype.itemsize
    piece = sample(300_000 // size, kind, 5)
    tensor = piece.repeat(30 * size)[: 9_000_000 // size + 5]
    frame = ds_zipccl.compress(tensor, shaped=False, checksum=False, route=route)
    memory = torch.empty(tensor.nbytes + 192, dtype=torch.uint8)
    line = -memory.data_ptr() % 64
    for begin in (line, line + 64 - size):
        out = memory.fill_(0x5C)[begin : begin + tensor.nbytes].view(kind.dtype)
        assert_same_bits(ds_zipccl.decompress(frame, out, route=route), tensor)
        assert (memory[:begin] == 0x5C).all() and (memory[begin + tensor.nbytes :] == 0x5C).all()
