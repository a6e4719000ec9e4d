"""Sums of the CUDA route: any number of summands in one launch, own words among them, rounded once by the kernel.

Emulated, and on a GPU if there is one.
"""

from __future__ import annotations

import corpus
import pytest
import torch
from corpus import assert_same_sums
from cuda_frames import GUARD, Kernel, assert_guarded, frame_of, pad, slot, slot_bytes, words

from ds_zipccl.frame import FrameErrorCode
from ds_zipccl.kernels.cpp.slots import SlotBackend
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import Failure, Own, failure_of, new_status, raise_failure

BLOCK = 128
SUMMED = [kind.dtype for kind in corpus.SUMMED.values()]


def in_order(summands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The documented sum."""
    total = summands[0].float()
    for summand in summands[1:]:
        total = total + summand.float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", SUMMED, ids=corpus.SUMMED)
@pytest.mark.parametrize(
    ("count", "own", "kind"),
    [
        (70, 0, "frames"), (100, 51, "frames"), (3, 2, "frames"), (60, 13, "words"), (1, None, "words"), (1, 0, "frames"),
        (1, None, "listed"), (3, None, "listed"), (48, None, "listed"),
    ],
)  # fmt: skip
def test_sums_of_rows(
    kernel: Kernel, dtype: torch.dtype, count: int, own: int | None, kind: str, launches: list[backend.Launch]
) -> None:
    """Any number of rows of a staging buffer, or of frames in a list, in one launch, with own words in their place; rounded once, and as
    floats, and in place."""
    route, device = kernel
    numel = 2500 if count < 10 else 700  # blocks for a second turn of the warps, and chunks
    summands = [words(dtype, numel, seed) * (1 + seed % 5) for seed in range(count)]
    for number, summand in enumerate(summands):
        summand[0] = -0.0
        summand[1:4] = torch.tensor([1000.0, 1.0, -1000.0]).roll(number)  # the order shows
    special = torch.tensor([0.0, float("inf"), float("-inf"), float("nan"), 1e-40])
    summands[-1][4:9] = special
    summands[0][4:9] = special.flip(0)
    if kind != "words":
        staging = torch.zeros((count, pad(slot_bytes(numel, dtype), 512)), dtype=torch.uint8)
        for number, (row, summand) in enumerate(zip(staging, summands, strict=True)):
            frame = frame_of(summand, ("cascade", "wide", "raw")[number % 3], BLOCK)
            row[: frame.numel()] = frame
        slots = staging.to(device)[:, : slot_bytes(numel, dtype)]
        slots = [*slots] if kind == "listed" else slots
    else:
        slots = torch.zeros((count, numel + 5), dtype=dtype)
        slots[:, :numel] = torch.stack(summands)
        slots = slots.to(device)[:, :numel]
    if own is not None:
        slots[own] = GUARD  # is not read
    for sums_dtype in {dtype, torch.float32}:
        mine = None if own is None else Own(summands[own].to(device), own)
        sums, memory = slot(numel * sums_dtype.itemsize, device)
        launches.clear()
        route.decode_sum_frames(slots, BLOCK, dtype, sums.view(sums_dtype), status := new_status(device), mine)
        raise_failure(status)
        assert len(launches) == 1
        assert_same_sums(sums.view(sums_dtype), in_order(summands, sums_dtype))
        assert_guarded(memory, sums)
    if own is not None:
        here = summands[own].to(device, copy=True)
        route.decode_sum_frames(slots, BLOCK, dtype, here, status, Own(here, own))
        assert_same_sums(here, in_order(summands, dtype))


def test_own_words_among_listed_slots(kernel: Kernel) -> None:
    """At every place, from any address of a word."""
    route, device = kernel
    summands = [words(torch.bfloat16, 1111, seed) * 3**seed for seed in range(4)]
    for own in range(4):
        memory = torch.empty(1112, dtype=torch.bfloat16, device=device)
        memory[1:] = summands[own]
        slots = [frame_of(summand).to(device) for number, summand in enumerate(summands) if number != own]
        route.decode_sum_frames(
            slots, 1024, torch.bfloat16, memory[1:], status := new_status(device), Own(memory[1:], own)
        )
        raise_failure(status)
        assert_same_sums(memory[1:], in_order(summands, torch.bfloat16))


@pytest.mark.parametrize("numel", [3000, 5000], ids=["in parts", "whole chunks"])  # where warps take two turns
def test_a_refused_summand(kernel: Kernel, numel: int) -> None:
    """Its number is that among all summands, past the first group too; its sums are NaN, and those of other chunks are right."""
    route, device = kernel
    summands = [words(torch.bfloat16, numel, seed) for seed in range(80)]
    staging = torch.zeros((80, slot_bytes(numel, torch.bfloat16)), dtype=torch.uint8)
    for row, summand in zip(staging, summands, strict=True):
        frame = frame_of(summand, "cascade", BLOCK)
        row[: frame.numel()] = frame
    second = int(staging[77][32:].view(torch.int32)[1]) * 16 + 32
    staging[77][second : second + 40] = 255  # the table of the second chunk
    sums = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    own = Own(summands[5].to(device), 5)
    route.decode_sum_frames(staging.to(device), BLOCK, torch.bfloat16, sums, status := new_status(device), own)
    if isinstance(route, SlotBackend):  # which knows no chunks
        assert failure_of(int(status.item())) == Failure(None, 77, 0, FrameErrorCode.BLOCK)
        assert (sums.view(torch.int16) == -1).all()
        return
    assert failure_of(int(status.item())) == Failure(None, 77, 1, FrameErrorCode.BLOCK)
    wanted = in_order(summands, torch.bfloat16)
    assert_same_sums(sums[:2048], wanted[:2048])
    assert (sums[2048:4096].view(torch.int16) == -1).all()
    assert_same_sums(sums[4096:], wanted[4096:])
