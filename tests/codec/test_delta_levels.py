"""Every level of the native route against the reference, on differences of every density, size and form of a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import variants

from ds_zipccl import kernels
from ds_zipccl.codecs import exponent
from ds_zipccl.frame import FrameError

LEVELS = [variant for variant in variants.ALL if variant.level and not variant.why_not()]
WORDS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.uint8: np.uint8}
#: Share of the words that change, and how many words a change spans.
DENSITIES = [
    (0, 1),
    (0.0005, 1),
    (0.01, 1),
    (0.1, 1),
    (0.13, 1),
    (0.2, 1),
    (0.26, 1),
    (0.6, 1),
    (1, 1),
    (0.002, 60),
    (0.01, 25),
]


def _case(dtype: torch.dtype, numel: int, share: float, span: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and their base. Changes have all sizes: single units, several, and some that are escaped."""
    draw = np.random.default_rng(seed)
    word = WORDS[dtype]
    if dtype is torch.uint8:
        base = draw.integers(0, 256, numel).astype(word)
    else:
        base = (torch.from_numpy(draw.standard_normal(numel)) * 0.02).to(dtype).view(torch.uint8).numpy().view(word)
    changed = np.zeros(numel, bool)
    for start in np.flatnonzero(draw.random(numel) < share):
        changed[start : start + span] = True
    size = draw.geometric((0.95, 0.6, 0.2)[seed % 3], numel)
    size = np.where(draw.random(numel) < 0.01, draw.integers(1, 100, numel), size)
    moved = base.astype(np.int64) + np.where(draw.random(numel) < 0.5, size, -size)
    words = np.where(changed, moved, base).astype(word)
    return torch.from_numpy(words.view(np.uint8)).view(dtype), torch.from_numpy(base.view(np.uint8)).view(dtype)


def _cases() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Block size, words and base."""
    seed = 0
    for dtype in WORDS:
        for share, span in DENSITIES:
            block = (128, 256, 512, 1024)[seed % 4]
            for numel in (16 * block, 16 * block + 7 * seed % 127 + 1, seed % 70 + 1):
                seed += 1
                yield block, *_case(dtype, numel, share, span, seed)


def _payload(route: kernels.KernelBackend, words: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    # RAW blocks are the worst case, with 4 bytes a block for the table and 20 a chunk for the index and paddings.
    blocks = -(-words.numel() // block)
    out = torch.full((words.nbytes + 64 * blocks + 4096,), 0xA5, dtype=torch.uint8)
    return out[: route.encode_delta(words, base, block, out)]


def forms(payload: torch.Tensor, numel: int, block: int) -> list[str]:
    """Form of each chunk (FORMAT.md 2.3)."""
    chunks = -(-numel // (16 * block))
    entries = payload[: 4 * chunks].numpy().view(np.uint32)
    ends = [*(entries[1:] & 0x7FFFFFFF), payload.numel() // 16]
    return [
        "LIST" if entry >> 31 else "SAME" if entry & 0x7FFFFFFF == end else "TABLE"
        for entry, end in zip(entries, ends, strict=True)
    ]


def test_levels_write_the_bytes_of_the_reference() -> None:
    reference, seen = kernels.route("numba"), set()
    for block, words, base in _cases():
        wanted = _payload(reference, words, base, block)
        seen |= {(words.dtype, form) for form in forms(wanted, words.numel(), block)}
        for level in LEVELS:
            with level.in_use() as name:
                route = kernels.route(name)
                assert torch.equal(_payload(route, words, base, block), wanted), (level, words.dtype, words.numel())
                back, own = torch.empty_like(words), base.clone()
                route.decode_delta(wanted, base, block, back)
                route.decode_delta(wanted, own, block, own)
            for got in (back, own):
                assert torch.equal(got.view(torch.uint8), words.view(torch.uint8)), (level, words.dtype, words.numel())
    assert seen == {(dtype, form) for dtype in WORDS for form in ("SAME", "LIST", "TABLE")}


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_levels_refuse_a_list_that_contradicts_itself(level: variants.Variant) -> None:
    block = 128
    words, base = _case(torch.bfloat16, 16 * block, 0.02, 1, 3)
    with level.in_use() as name:
        route = kernels.route(name)
        good = _payload(route, words, base, block)
        assert forms(good, words.numel(), block) == ["LIST"]
        head = 16  # after the index
        m = int(good[head + 1]) | int(good[head + 2]) << 8

        def refused(at: int, value: int) -> bool:
            bad = good.clone()
            bad[at] = value
            try:
                route.decode_delta(bad, base, block, torch.empty_like(words))
            except FrameError as error:
                return error.code.name == "BLOCK"
            return False

        assert not refused(head, int(good[head]))  # the control
        assert refused(head, 0) and refused(head, 7)  # levels
        assert refused(head + 1, m + 1) and refused(head + 1, m - 1) and refused(head + 1, 0)  # ones of the unary part
        assert refused(head + 2, 0xFF)  # more than a quarter of the words
        assert refused(head + 3, 14)  # r
        assert refused(len(good) - 1, int(good[-1]) | 0x80)  # a one behind the last
        longer = torch.cat([good, good.new_zeros(16)])
        back = torch.empty_like(words)
        route.decode_delta(longer, base, block, back)  # zeros may follow
        assert torch.equal(back, words)


def test_runs_of_unchanged_chunks_on_threads() -> None:
    """Threads place the chunks in order; chunks without bytes take no place."""
    block = 128
    words, base = _case(torch.bfloat16, 1 << 21, 0, 1, 1)
    words = words.clone()
    for at in (0, 700_001, 700_002, words.numel() - 1):
        words.view(torch.int16)[at] ^= 1
    route = kernels.route("native")
    one = _payload(route, words, base, block)
    assert one.numel() < exponent.payload_bound(words.numel(), words.dtype, block)
    torch.set_num_threads(3)
    try:
        assert torch.equal(_payload(route, words, base, block), one)
        own = base.clone()
        route.decode_delta(one, own, block, own)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(own, words)
