"""Differences whose chunks are SAME or LIST, and differences of any dtype by bytes, on the CUDA kernels; emulated, and on a GPU.

The frames are those of the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import emulation
import pytest
import tiers
import torch
from cuda_frames import CPU, GUARD, Kernel, assert_guarded, at_offset, bits, changed, frame_of, offsets, slot, words
from test_gap_list import chunk, forms, listed

from ds_zipccl import codecs
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda.backend import (
    CudaBackend,
    failure_of,
    frame_bytes,
    new_status,
    raise_failure,
)

BLOCK, CHUNK = 128, 2048
#: Floats, whose elements are words, and some of the dtypes that are coded as bytes.
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool,
)  # fmt: skip
SHORT = ("torch.bfloat16", "torch.uint8", "torch.int64")
BY_NAME = {str(dtype): dtype for dtype in DTYPES}
#: Share of the words that change, and the largest change in units.
CHANGES = ((0, 1), (0.003, 3), (0.05, 1), (0.1, 9), (0.18, 2), (0.22, 40), (0.5, 3))


def pair(dtype: torch.dtype, words: int, share: float, reach: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of so many words, and its base: ``share`` of the words differ, by up to ``reach`` units."""
    draw = torch.Generator().manual_seed(seed)
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        base = torch.randn(words, generator=draw).to(dtype)
        numbers = base.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    else:
        size = words // dtype.itemsize * dtype.itemsize
        numbers = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)
        base = numbers.view(dtype)
    units = torch.randint(1, reach + 1, numbers.shape, generator=draw)
    units *= 1 - 2 * torch.randint(0, 2, numbers.shape, generator=draw)
    units *= torch.rand(numbers.shape, generator=draw) < share
    moved = numbers + units.to(numbers.dtype)
    if dtype is torch.bool:  # copies of other bytes than 0 and 1 may change them
        moved, base = moved & 1, (numbers & 1).view(dtype)
    return moved.view(dtype), base


def coded(
    route: CudaBackend,
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    block: int = BLOCK,
) -> list[torch.Tensor]:
    """Their frames, after proof that they are those of the CPU, and that they give the tensors apart from the bases and in place."""
    wanted = [frame_of(tensor, "delta", block, base) for tensor, base in zip(tensors, bases, strict=True)]
    there, lasts = [tensor.to(device) for tensor in tensors], [base.to(device, copy=True) for base in bases]
    slots = [slot(frame.numel() + 16 * (i % 2), device) for i, frame in enumerate(wanted)]
    overflows = torch.zeros(1, dtype=torch.int32, device=device)
    route.encode_frames(there, "delta", block, [at for at, _ in slots], overflows, lasts)
    assert overflows.item() == 0
    for number, (frame, (at, memory)) in enumerate(zip(wanted, slots, strict=True)):
        assert torch.equal(at[: frame.numel()].cpu(), frame), number
        assert_guarded(memory, at[: frame.numel()])
    headers = torch.full((len(wanted), 32), GUARD, dtype=torch.uint8, device=device)
    route.frame_sizes(there, "delta", block, headers, lasts)
    assert frame_bytes(headers).tolist() == [frame.numel() for frame in wanted]
    outs, status = [torch.empty_like(base) for base in lasts], new_status(device)
    route.decode_frames([at for at, _ in slots], block, outs, status, lasts)
    route.decode_frames([at for at, _ in slots], block, lasts, status, lasts)
    raise_failure(status)
    for tensor, out, place in zip(tensors, outs, lasts, strict=True):
        assert torch.equal(bits(out), bits(tensor))
        assert torch.equal(bits(place), bits(tensor))
    return wanted


@pytest.mark.parametrize(
    "name", tiers.mostly_full(BY_NAME, SHORT, "slow emulation; kernels of these words are in the short tier")
)
def test_forms_of_chunks(kernel: Kernel, name: str) -> None:
    """Every form, in whole chunks and the last one; sizes without a frame; more than one chunk in a frame."""
    route, device = kernel
    words = (CHUNK, CHUNK + 520, 3 * CHUNK - 8, 160)
    cases = [
        (size, pair(BY_NAME[name], size, share, reach, seed))
        for seed, (share, reach) in enumerate(CHANGES)
        for size in (words[seed % 4], words[(seed + 1) % 4])
    ]
    frames = coded(route, device, [tensor for _, (tensor, _) in cases], [base for _, (_, base) in cases])
    seen = {form for frame, (size, _) in zip(frames, cases, strict=True) for form in forms(frame)}
    assert seen == {"SAME", "LIST", "TABLE"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_more_differences_than_a_launch_takes(kernel: Kernel, dtype: torch.dtype) -> None:
    """Some of them empty; and one that does not fit is counted."""
    route, device = kernel
    tensors = [words(dtype, numel, numel) for numel in (0, 1, 3000, *range(100, 150))]
    coded(route, device, tensors, [changed(tensor) for tensor in tensors])
    overflows, (at, _) = torch.zeros(1, dtype=torch.int32, device=device), slot(64, device)
    base = changed(tensors[2]).to(device)
    route.encode_frames([tensors[2].to(device)], "delta", BLOCK, [at], overflows, [base])
    assert overflows.item() == 1


@pytest.mark.parametrize("block", [256, pytest.param(1024, marks=pytest.mark.full(reason="chunks of 16384 words"))])
def test_larger_blocks(kernel: Kernel, block: int) -> None:
    route, device = kernel
    words = 16 * block + 100
    for dtype in (torch.bfloat16, torch.uint8):
        cases = [pair(dtype, words, share, reach, block) for share, reach in ((0.02, 2), (0.12, 7), (0.2, 1))]
        frames = coded(route, device, [tensor for tensor, _ in cases], [base for _, base in cases], block)
        assert "LIST" in {form for frame in frames for form in forms(frame)}


def test_a_list_of_as_many_bytes_as_a_table(kernel: Kernel) -> None:
    """Three of 32 words change, by one unit, by five and by a sign; and a run of changes, where a LIST is larger."""
    base = torch.tensor([1.0] * 21 + [0.5, 1.0] + [0.5] * 9).bfloat16()
    tensor = torch.tensor([1.0] * 20 + [1.0078125, 0.51953125, -1.0] + [0.5] * 9).bfloat16()
    run = torch.randn(CHUNK, generator=torch.Generator().manual_seed(1)).bfloat16()
    moved = run.clone()
    moved.view(torch.int16)[300:700] += torch.arange(400, dtype=torch.int16) % 9
    frames = coded(*kernel, [tensor, moved], [base, run])
    assert [forms(frames[0]), forms(frames[1])] == [["LIST"], ["TABLE"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_words_and_bases_at_any_address(kernel: Kernel, dtype: torch.dtype) -> None:
    route, device = kernel
    places = offsets(dtype)
    for share in (0, 0.02, 0.5):
        tensor, base = pair(dtype, CHUNK + 301, share, 7, 5)
        wanted = frame_of(tensor, "delta", BLOCK, base)
        for place in places[::3]:
            words, _ = at_offset(tensor, place, device, 17 * place & 255)
            last, _ = at_offset(base, (place * 3 + 1) % len(places), device, 29 * place & 255)
            out, memory = at_offset(torch.zeros_like(tensor), (place + 2) % len(places), device, GUARD)
            at, _ = slot(wanted.numel(), device)
            route.encode_frames([words], "delta", BLOCK, [at], bases=[last])
            assert torch.equal(at.cpu(), wanted), (share, place)
            route.decode_frames([at], BLOCK, [out], status := new_status(device), [last])
            raise_failure(status)
            assert torch.equal(bits(out), bits(tensor)), (share, place)
            assert_guarded(memory, out)


def test_raw_frames_of_any_dtype_and_a_base_that_is_not_there(kernel: Kernel) -> None:
    route, device = kernel
    tensor, base = pair(torch.int32, 4 * 600, 0.01, 2, 3)
    frames = [frame_of(tensor, "raw"), frame_of(tensor, "delta", BLOCK, base)]
    at, _ = slot(frames[0].numel(), device)
    route.encode_frames([tensor.to(device)], "raw", BLOCK, [at])
    assert torch.equal(at.cpu(), frames[0])
    out = torch.zeros_like(tensor, device=device)
    route.decode_frames([at], BLOCK, [out], status := new_status(device))
    raise_failure(status)
    assert torch.equal(out.cpu(), tensor)
    route.decode_frames([frames[1].to(device)], BLOCK, [out], status)
    assert failure_of(int(status.item())).code == FrameErrorCode.CODEC
    assert (out == -1).all()


# ------------------------------------------------------------------------------------------------------ lists that are refused


def refused(kernel: Kernel, frame: torch.Tensor, base: torch.Tensor) -> int:
    """The code with which a kernel refuses a frame of one chunk, or zero; as the CPU, and without a byte beside the output."""
    route, device = kernel
    try:
        wanted, code = codecs.decompress(frame.clone(), base=base, route="native"), 0
    except FrameError as error:
        wanted, code = None, int(error.code)
    at, _ = slot(frame.numel(), device)
    at.copy_(frame)
    out, memory = slot(base.nbytes, device)
    route.decode_frames([at], BLOCK, [out.view(base.dtype)], status := new_status(device), [base.to(device)])
    assert_guarded(memory, out)
    failure = failure_of(int(status.item()))
    got = 0 if failure is None else int(failure.code)
    assert got == code, frame[:100].tolist()
    assert torch.equal(out.cpu(), torch.full_like(out.cpu(), 255) if wanted is None else bits(wanted))
    return code


def list_frame(levels: list[tuple[int, int]], text: list[int], behind: int = 0) -> torch.Tensor:
    """A frame of one LIST, of bfloat16: m and r of each level, its string of bits, and bytes of zeros behind them."""
    return listed(chunk(levels, "".join(map(str, text))) + bytes(behind), numel=CHUNK).tensor()


def test_lists_at_their_limits(kernel: Kernel) -> None:
    """The last place, and the place behind it; low bits and zeros alone reach it; bits far behind the string."""
    _, base = pair(torch.bfloat16, CHUNK, 0, 1, 1)
    last, good, bad = CHUNK - 1, 0, FrameErrorCode.BLOCK
    low = [last >> i & 1 for i in range(13)]
    cases = [
        (list_frame([(1, 0)], [1, *[0] * last, 1]), good),
        (list_frame([(1, 0)], [1, *[0] * (last + 1), 1]), bad),
        (list_frame([(1, 13)], [*low, 0, 1]), good),
        (list_frame([(1, 13)], [*[1] * 13, 0, 1]), bad),
        (list_frame([(1, 13)], [*low, 0, 0, 1]), bad),
        (list_frame([(1, 13)], [*[0] * 13, 0, *[0] * 30_000, 1]), bad),
        (list_frame([(1, 14)], [*low, 0, 0, 1]), bad),
        (list_frame([(2, 0)], [0, 1, 1, *[0] * (last - 1), 1]), good),
        (list_frame([(2, 0)], [0, 1, 1, *[0] * last, 1]), bad),
        (list_frame([(2, 0), (1, 0)], [0, 0, 1, 1, 0, 1]), good),
        (list_frame([(2, 0), (1, 0)], [0, 0, 1, 1, 0, 0, 1]), bad),
        (list_frame([(1, 0), (2, 0)], [0, 1, 1, 1]), bad),
        (list_frame([(0, 0)], [1]), bad),
        (list_frame([], [1]), bad),
        (list_frame([(1, 0)] * 7, [0, *[1] * 7]), bad),
        (list_frame([(512, 0)], [*[1] * 512, *[1] * 512]), good),
        (list_frame([(513, 0)], [*[1] * 513, *[1] * 513]), bad),
        (list_frame([(512, 8)], [1]), bad),
        (list_frame([(1, 0)], [1, 1], behind=4144), good),
        (list_frame([(1, 0)], [1, 1], behind=4160), FrameErrorCode.SIZE),
        (list_frame([(1, 0)], [1, 1, *[0] * 32_000, 1]), bad),
        (list_frame([(1, 0)], [1, 1, *[0] * 300_000, 1]), FrameErrorCode.SIZE),
        (list_frame([(1, 0)], [1, 1, *[0] * 90, 1]), bad),
        (list_frame([(1, 0)], [1, 0]), bad),
    ]
    for number, (frame, wanted) in enumerate(cases):
        assert refused(kernel, frame, base) == wanted, number
    entry = list_frame([(1, 0)], [1, 1])[:48]
    entry[24] = 48  # a LIST of no bytes
    assert refused(kernel, entry, base) == bad


def test_damaged_lists(kernel: Kernel) -> None:
    """Bits and bytes of a LIST changed at random: the kernels refuse what the CPU refuses, and give its words otherwise."""
    rng, seen = random.Random(3), set()
    cases = [
        pair(dtype, CHUNK - 100, share, 8, 9)
        for dtype in (torch.bfloat16, torch.float32, torch.uint8)
        for share in (0.01, 0.08)
    ]
    for turn in range(90):
        tensor, base = cases[turn % len(cases)]
        frame = frame_of(tensor, "delta", BLOCK, base)
        for _ in range(1 + turn % 2):
            at = rng.randrange(48, frame.numel()) if turn % 3 else rng.randrange(44, 70)
            frame[at] = int(frame[at]) ^ (1 << rng.randrange(8)) if turn % 4 else rng.randrange(256)
        seen.add(refused(kernel, frame, base))
    assert {0, FrameErrorCode.BLOCK} <= seen


# ------------------------------------------------------------------------------------- orders of threads, emulated only


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.full(reason="slow emulation"))], ids=str
)
def test_any_order_of_threads(seeds: range, ordered: emulation.EmulatedLauncher) -> None:
    """Frames with every form, with little room; whole chunks and parts."""
    for seed in seeds:
        ordered.seed(seed)
        ordered.residents(1 + seed % 3)
        cases = [pair(torch.bfloat16, 2 * CHUNK + 77, share, reach, seed) for share, reach in CHANGES[1:6]]
        mixed, base = pair(torch.bfloat16, 4 * CHUNK, 0.03, 9, seed)
        mixed[:CHUNK] = base[:CHUNK]
        mixed[2 * CHUNK : 3 * CHUNK] = base[2 * CHUNK : 3 * CHUNK] * 1.02
        tensors, bases = zip(*cases, (mixed, base), strict=True)
        for multiprocessors in (1, 8):
            *_, last = coded(CudaBackend(ordered, "cpu", multiprocessors), CPU, tensors, bases)
        assert forms(last) == ["SAME", "LIST", "TABLE", "LIST"]
