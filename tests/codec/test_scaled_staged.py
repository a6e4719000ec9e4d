"""Stage 2 of scaled payloads chunk by chunk, as the C++ route does it, against the route that has all codes in one place."""

from __future__ import annotations

import struct

import pytest
import torch
import variants

from ds_zipccl import codecs
from ds_zipccl.codecs.scaled import FIELDS
from ds_zipccl.frame import HEADER_BYTES, FrameError, FrameErrorCode, pad16
from ds_zipccl.lossy import TacoFp8

CODEC = TacoFp8(32, hadamard=True)
#: Codes in a chunk of stage 2.
CHUNK = 16 * 128
#: Groups without codes: none; at both ends, around the ends of chunks, and more than a part that is added at a time.
EMPTY = {"none": (), "ends": (slice(0, 70), slice(5000, None)), "middle": (slice(CHUNK - 64, CHUNK + 6000),)}


def _words(empty: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    words = (torch.randn(5 * CHUNK - 9, generator=generator) * 0.02).bfloat16()
    for part in EMPTY[empty]:
        words[part] = 0
    return words


def _frame(words: torch.Tensor, route: str) -> torch.Tensor:
    return codecs.compress(words, CODEC, lossy=True, block=128, shaped=False, checksum=False, route=route)


@pytest.mark.parametrize("empty", EMPTY)
def test_chunks_give_what_the_whole_gives(empty: str) -> None:
    words, wanted = _words(empty), _frame(_words(empty), "emulated")
    assert wanted[HEADER_BYTES + 3] & 2, "the payload has stage 2"
    values = codecs.project(words, CODEC, route="emulated")
    for variant in variants.usable(variants.COMPILED):
        with variant.in_use() as route:
            assert torch.equal(_frame(words, route), wanted)
            assert torch.equal(codecs.decompress(wanted, route=route).view(torch.int16), values.view(torch.int16))
            for dtype in (torch.bfloat16, torch.float32):
                sums = torch.linspace(-1, 1, words.numel()).to(dtype)
                whole = sums + values.to(dtype)
                codecs.decompress_add(wanted, sums, route=route)
                assert torch.equal(sums, whole)


def test_a_failure_of_stage_2_comes_before_a_code_that_is_no_number() -> None:
    """A chunk in front has such a code; the index of a later chunk is wrong."""
    words = _words("none")
    frame = _frame(words, "emulated")
    at = HEADER_BYTES + FIELDS.size + pad16(-(-words.numel() // CODEC.group))
    code = torch.full((words.numel() + 9,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stage_2 = codecs.compress(code, "cascade", block=128, shaped=False, checksum=False)[HEADER_BYTES:]
    bad = torch.cat((frame[:at], stage_2))
    struct.pack_into("<Q", bad.numpy(), HEADER_BYTES + 8, stage_2.numel())
    struct.pack_into("<Q", bad.numpy(), 24, bad.numel())
    broken = bad.clone()
    broken[at + 13] ^= 0x40
    for variant in variants.usable(variants.COMPILED):
        for damaged, wanted in ((bad, FrameErrorCode.BLOCK), (broken, FrameErrorCode.INDEX)):
            with variant.in_use() as route, pytest.raises(FrameError) as error:
                codecs.decompress(damaged, torch.empty_like(words), route=route)
            assert error.value.code == wanted
