"""Rows on CUDA: the first of equal rows in any order of threads. Emulated, and on a GPU.

Factors and predictions, which every route has alike, are in test_row_kernels.py.
"""

from __future__ import annotations

import emulation
import pytest
import tiers
import torch
from cuda_frames import CPU, Kernel, assert_guarded, slot
from row_cases import first_of_equals

from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import CudaBackend


def some_rows(count: int, row_bytes: int, seed: int = 0) -> torch.Tensor:
    """Rows of which a half repeats another row, a tenth is zeros, and some differ from another row in one byte, often in the last."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, generator=draw)
    for number in range(1, count):
        kind = int(torch.randint(0, 20, (1,), generator=draw))
        other = int(torch.randint(0, number, (1,), generator=draw))
        if kind < 10:
            rows[number] = rows[other]
        elif kind < 12:
            rows[number] = 0
        elif kind < 16:
            rows[number] = rows[other]
            place = int(torch.randint(0, row_bytes, (1,), generator=draw)) if kind < 14 else -1
            rows[number, place] ^= 1 + number % 255
    return rows


def found(kernel: Kernel, data: torch.Tensor, row_bytes: int, cuts: list[int], slots: int = 0) -> tuple[list[int], int]:
    """Sources and repeats of all rows, in a call for each part; the guards around the sources stay."""
    route, device = kernel
    count = data.numel() // row_bytes
    table = torch.zeros(slots or 1 << (2 * count - 1).bit_length(), dtype=torch.int32, device=device)
    sources: list[int] = []
    repeats = 0
    for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
        at, memory = slot(4 * (end - begin), device)
        repeats += route.find_rows(data, row_bytes, begin, at.view(torch.int32), table)
        assert_guarded(memory, at)
        sources += at.view(torch.int32).tolist()
    return sources, repeats


@pytest.mark.parametrize("row_bytes", [1, 3, 34, 64, 100, 512, 2048, 4098])
def test_the_first_of_equal_rows(kernel: Kernel, row_bytes: int) -> None:
    """Rows of every alignment, in one call and in several; a count for each call."""
    count = 70 if row_bytes < 512 else 24
    rows = some_rows(count, row_bytes).view(-1)
    wanted = first_of_equals(rows.numpy(), row_bytes)
    repeats = sum(source != number for number, source in enumerate(wanted))
    for offset, cuts in ((0, []), (1, [9, 10]), (2, [0, count]), (4, [count // 2])):
        data = torch.cat([rows.new_zeros(16 + offset), rows]).to(kernel[1])[16 + offset :]
        assert found(kernel, data, row_bytes, cuts) == (wanted, repeats), (offset, cuts)


def alike(count: int, row_bytes: int) -> torch.Tensor:
    """Rows that are equal but for a word near their end, which no sample reads; each comes twice."""
    rows = torch.zeros((2 * count, row_bytes), dtype=torch.uint8)
    rows[:, -17] = torch.arange(count, dtype=torch.uint8).repeat(2)
    return rows


@pytest.mark.parametrize("row_bytes", [512, 510, 513])
def test_equal_samples_and_other_words(kernel: Kernel, row_bytes: int) -> None:
    """More rows with the same samples than are compared before a row is hashed whole, in a table with no slot to spare."""
    rows = alike(32, row_bytes).view(-1)
    wanted = [*range(32), *range(32)]
    for cuts in ([], [40], [5, 32]):
        assert found(kernel, rows.to(kernel[1]), row_bytes, cuts, slots=128) == (wanted, 32)


def test_no_order_of_emulated_threads_counts(ordered: emulation.EmulatedLauncher) -> None:
    """Seeds decide which warp comes first to a slot; little room lets blocks start one after the other, in any order."""
    kernel = CudaBackend(ordered, "cpu"), CPU
    rows = torch.cat([some_rows(100, 64, 3), some_rows(1, 64, 4).repeat(40, 1)]).view(-1)
    same = alike(20, 512).view(-1)
    for seed in range(6):
        ordered.seed(seed)
        ordered.residents(1 + seed % 3)
        assert found(kernel, rows, 64, [])[0] == first_of_equals(rows.numpy(), 64), seed
        assert found(kernel, same, 512, [])[0] == first_of_equals(same.numpy(), 512), seed


@pytest.mark.parametrize("hashed", tiers.mostly_full(["sample_hash", "row_hash"], ["row_hash"], "a kernel to compile"))
def test_forced_collisions(hashed: str) -> None:
    """A hash that is the same for all rows costs time, and no row is called equal that is not."""
    text = {"sample_hash": "lane_id() < samples ? mixed(row[at], at) : 0", "row_hash": "sum += mixed(row[at], at)"}
    changed = {"sample_hash": "at >> 63", "row_hash": "sum += at >> 63"}
    launcher = emulation.launcher(
        {"cuda/rows.cuh": ((text[hashed], changed[hashed]),)}, emulation.BF16 | emulation.HASH
    )
    route = CudaBackend(launcher, "cpu")
    for rows, row_bytes in ((some_rows(60, 64), 64), (alike(20, 512), 512)):
        sources, _ = found((route, CPU), rows.view(-1), row_bytes, [30])
        assert sources == first_of_equals(rows.view(-1).numpy(), row_bytes)


def test_wrong_tensors_are_refused(kernel: Kernel, launches: list[backend.Launch]) -> None:
    """Before any launch, with words that say why."""
    route, device = kernel
    data = torch.zeros(64, dtype=torch.uint8, device=device)
    two = torch.zeros(2, dtype=torch.int32, device=device)
    four, three = two.new_zeros(4), two.new_zeros(3)
    for arguments, message in (
        ((data, 33, 0, two, four), "rows 0 to 2 of 33 bytes"),
        ((data, 0, 0, two, four), "0 bytes"),
        ((data, 8, 1, two, four), "table of 4 entries for 3 rows"),
        ((data, 8, 0, two, three), "a power of two"),
        ((data, 8, 0, two.long(), four), "wanted contiguous torch.int32"),
        ((data.view(torch.int16), 8, 0, two, four), "wanted contiguous torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            route.find_rows(*arguments)
    memory, factors = data.view(torch.bfloat16), torch.ones(2, device=device)
    for arguments, message in (
        ((memory, 0, two, factors, memory[:0]), "rows of 0 words"),
        ((memory, 4, two, factors[:1], memory[:8]), "1 factors for 2 sources"),
        ((memory, 4, two, factors, memory[:7]), "7 words of predictions"),
        ((data, 4, two, factors, data[:8]), "no kernel for rows of torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            route.predict_rows(*arguments)
    assert not launches
    assert route.find_rows(data, 8, 0, two[:0], four) == 0 and not launches
