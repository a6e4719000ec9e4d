"""Chunks that are cut into parts: how full a device is then, and that the parts of a chunk fit together whatever room the device has."""

from __future__ import annotations

import ctypes
import re

import emulation
import pytest
import torch
from cuda_frames import CPU, GUARD, bits, frame_of, round_trip, slot, words

from ds_zipccl.codecs import compress_bound
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import waves
from ds_zipccl.kernels.cuda.backend import DTYPES, CudaBackend, new_status, raise_failure

H100 = 132
MIB = 1 << 20


def test_small_messages_fill_the_device() -> None:
    """How often chunks of bf16 are halved, by MiB of a message: only while the device holds all parts at a time. docs/benchmarks.md has the
    multiprocessors and warps at work then."""
    chunks = {mib: int(mib * MIB) // (2 * 16 * 1024) for mib in (0.25, 1, 4, 8, 16, 64, 256)}
    cuts = {mib: waves.split(count, 4, H100) for mib, count in chunks.items()}
    assert cuts == {0.25: 2, 1: 2, 4: 2, 8: 1, 16: 0, 64: 0, 256: 0}
    assert all(not cuts[mib] or count << cuts[mib] <= 4 * H100 for mib, count in chunks.items())


def test_the_largest_cut_that_the_device_holds() -> None:
    assert [waves.split(chunks, 4, 2) for chunks in (0, 1, 2, 3, 4, 5, 8, 9)] == [2, 2, 2, 1, 1, 0, 0, 0]
    assert waves.multiprocessors(torch.device("cpu")) == 1


def test_the_bounds_of_the_kernels() -> None:
    """The numbers of waves.py are those of the sources: types of the same size may differ in no bound."""
    sources = (build.CSRC / "cuda/kernels.cuh").read_text()
    itemsizes = {kind: dtype.itemsize for dtype, kind in DTYPES.items()}
    found: dict[str, dict[int, set[int]]] = {"encode": {}, "decode": {}, "decode_sum": {}}
    codecs = re.findall(r"ZIPCCL_CODEC\(each, (\w+), \w+, (\d+), (\d+)\)", sources)
    for what, macro in (("encode", "ROUNDED"), ("decode", "TRIMMED")):
        for kind, bound in re.findall(rf"ZIPCCL_{macro}\(each, (\w+), [^()]*, (\d+)\)", sources):
            found[what].setdefault(itemsizes[kind], set()).add(int(bound))
    assert {kind for kind, _, _ in codecs} == set(itemsizes)
    for kind, encode, decode in codecs:
        found["encode"].setdefault(itemsizes[kind], set()).add(int(encode))
        found["decode"].setdefault(itemsizes[kind], set()).add(int(decode))
    (sums,) = re.findall(r"each\((\d+), zipccl_decode_sum_##type", sources)
    for kind in re.findall(r"(?<!#define )ZIPCCL_SUMS_AND_ROWS\(each, (\w+), \w+\)", sources):
        found["decode_sum"].setdefault(itemsizes[kind], set()).add(int(sums))
    wanted = {kernel: {size: {bound} for size, bound in each.items()} for kernel, each in waves.RESIDENT.items()}
    assert found == wanted


class Recording:
    """A launcher that notes the cuts of its launches."""

    def __init__(self, launcher: emulation.EmulatedLauncher) -> None:
        self._launcher = launcher
        self.cuts: set[tuple[str, int]] = set()

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        self.cuts.add((kernel.split("_")[1], params.split))
        self._launcher.launch(kernel, grid, shared_bytes, params, stream)


def trial(seed: int, launcher: emulation.EmulatedLauncher, dtype: torch.dtype) -> set[tuple[str, int]]:
    """Frames of chunks that are whole, halved and quartered, with threads in the order of ``seed`` and little room on the device."""
    launcher.seed(seed)
    launcher.residents(1 + seed % 3)
    noted = Recording(launcher)
    numels = (0, 1, 4 * 128, 2048 + 130, 3 * 2048, 5 * 2048 - 7)
    tensors = [words(dtype, numel, numel) for numel in numels]
    tensors[-1][2000:3000] = 0
    raw = frame_of(tensors[2], "raw")
    for multiprocessors in (1, 8, 20):
        route = CudaBackend(noted, "cpu", multiprocessors)
        *_, last = round_trip(route, CPU, tensors, 128)
        out, status, overflows = torch.empty_like(tensors[2]), new_status(CPU), torch.zeros(1, dtype=torch.int32)
        route.decode_frames([raw], 128, [out], status)
        raise_failure(status)
        assert torch.equal(bits(out), bits(tensors[2]))
        if dtype.itemsize > 1:
            sums = torch.empty_like(tensors[-1])
            route.decode_sum_frames([last] * 2, 128, dtype, sums, status)
            raise_failure(status)
            assert torch.equal(sums, tensors[-1] + tensors[-1])
        # A frame that does not fit is counted once, not once for each part.
        size = frame_of(tensors[-1], "cascade", 128).numel()
        at, memory = slot(size - 1, CPU)
        route.encode_frames([tensors[-1]], "cascade", 128, [at], overflows)
        assert overflows.item() == 1 and (memory[32 + size - 1 :] == GUARD).all()
        route.decode_frames([at], 128, [torch.empty_like(tensors[-1])], status)
        with pytest.raises(FrameError) as raised:
            raise_failure(status)
        assert raised.value.code == FrameErrorCode.OVERFLOWED
    return noted.cuts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=["bf16", "fp32", "e4m3"])
def test_parts_fit_together(ordered: emulation.EmulatedLauncher, dtype: torch.dtype) -> None:
    """Also where one block of threads runs at a time: no part waits for a part that has not started."""
    cuts = set()
    for seed in range(6):
        cuts |= trial(seed, ordered, dtype)
    assert {(kernel, cut) for kernel in ("encode", "decode") for cut in (0, 1, 2)} <= cuts, cuts


def test_a_change_in_parts(ordered: emulation.EmulatedLauncher) -> None:
    base = words(torch.bfloat16, 9000, 3)
    tensor = (base.float() * (1 + 0.01 * words(torch.float32, 9000, 4))).bfloat16()
    payloads = []
    for multiprocessors in (1, 20):
        ordered.residents(1)
        noted = Recording(ordered)
        route = CudaBackend(noted, "cpu", multiprocessors)
        out = torch.full((compress_bound(9000, torch.bfloat16, block=256),), GUARD, dtype=torch.uint8)
        payloads.append(out[: route.encode_delta(tensor, base, 256, out)])
        back = torch.empty_like(tensor)
        route.decode_delta(payloads[-1], base, 256, back)
        assert torch.equal(back.view(torch.int16), tensor.view(torch.int16))
        assert noted.cuts == (
            {("encode", 0), ("decode", 0)} if multiprocessors == 1 else {("encode", 2), ("decode", 2)}
        )
    assert torch.equal(*payloads)
