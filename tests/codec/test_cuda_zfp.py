"""The kernels of ZFP where only CUDA goes: words and codes at any address, units that are cut, any order of threads."""

from __future__ import annotations

import corpus
import emulation
import pytest
import test_zfp
import torch
from cuda_frames import CPU, GUARD, Kernel, NoLauncher, bits
from test_cuda_misaligned import assert_guarded, at_offset, offsets

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import CudaBackend

KINDS = list(corpus.SUMMED.values())


def code_bytes(numel: int, rate: int) -> int:
    return 8 * -(-4 * rate * -(-numel // 4) // 64)


def expected(tensor: torch.Tensor, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the values of the C++ route."""
    route = kernels.lossy_route("native", "cpu", "encode_zfp")
    codes, values = torch.zeros(code_bytes(tensor.numel(), rate), dtype=torch.uint8), torch.empty_like(tensor)
    assert route.encode_zfp(tensor, rate, codes)
    route.decode_zfp(codes, rate, values)
    return codes, values


def check(kernel: Kernel, tensor: torch.Tensor, rate: int, place: int = 0) -> None:
    """Demand the codes and values of the C++ route, from and to memory that many words and bytes past an aligned address."""
    route, device = kernel
    wanted, values = expected(tensor, rate)
    segment, _ = at_offset(tensor, place, device, 17 * place & 255)
    codes, memory = at_offset(torch.full_like(wanted, 0xA5), place, device, GUARD)
    assert route.encode_zfp(segment, rate, codes)
    assert torch.equal(codes.cpu(), wanted), (tensor.numel(), rate, place)
    assert_guarded(memory, codes)
    back, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
    route.decode_zfp(codes, rate, back)
    assert torch.equal(bits(back), bits(values)), (tensor.numel(), rate, place)
    assert_guarded(memory, back)
    route.project_zfp(segment, rate, segment)
    assert torch.equal(bits(segment), bits(values)), (tensor.numel(), rate, place)


@pytest.mark.parametrize("kind", KINDS, ids=list(corpus.SUMMED))
def test_rates_and_sizes(kernel: Kernel, kind: corpus.Float) -> None:
    """Parts of blocks, of units and of words of 64 bits; several units for a warp."""
    for numel, rate in (
        (1, 3),
        (2, 8),
        (3, 16),
        (127, 7),
        (128, 3),
        (129, 13),
        (4, 17),
        (3001, 31),
        (3002, 32),
        (5003, 15),
        (0, 8),
    ):
        check(kernel, test_zfp._finite(numel, kind.dtype, numel + rate), rate)


@pytest.mark.parametrize("kind", KINDS, ids=list(corpus.SUMMED))
def test_words_and_codes_at_any_address(kernel: Kernel, kind: corpus.Float) -> None:
    for place in offsets(kind.dtype):
        check(kernel, test_zfp._finite(517, kind.dtype, place), (9, 16, 5, 20)[place % 4], place)


def test_blocks_that_are_not_finite(kernel: Kernel) -> None:
    """The encoder says so; a projection leaves these blocks alone."""
    route, device = kernel
    for at in (0, 515, 516):
        tensor = test_zfp._finite(517, torch.float32, at)
        _, values = expected(tensor, 8)
        tensor[at] = torch.nan
        block = slice(at // 4 * 4, at // 4 * 4 + 4)
        values[block] = tensor[block]
        assert not route.encode_zfp(
            tensor.to(device), 8, torch.empty(code_bytes(517, 8), dtype=torch.uint8, device=device)
        )
        kept = tensor.to(device)
        route.project_zfp(kept, 8, kept)
        assert torch.equal(bits(kept), bits(values))


def test_codes_of_any_content(kernel: Kernel) -> None:
    route, device = kernel
    for rate in (3, 10, 32):
        codes = torch.randint(
            256, (code_bytes(1001, rate),), dtype=torch.uint8, generator=torch.Generator().manual_seed(rate)
        )
        for kind in KINDS:
            wanted, found = torch.empty(1001, dtype=kind.dtype), torch.empty(1001, dtype=kind.dtype, device=device)
            kernels.lossy_route("native", "cpu", "decode_zfp").decode_zfp(codes, rate, wanted)
            route.decode_zfp(codes.to(device), rate, found)
            assert torch.equal(bits(found), bits(wanted)) and wanted.isfinite().all()


def test_the_observer_is_told_of_each_tensor(launches: list[backend.Launch]) -> None:
    route, tensor = CudaBackend(emulation.launcher(), "cpu"), test_zfp._finite(300, torch.bfloat16, 1)
    codes, back = torch.zeros(code_bytes(300, 8), dtype=torch.uint8), torch.empty_like(tensor)
    route.encode_zfp(tensor, 8, codes)
    route.decode_zfp(codes, 8, back)
    route.project_zfp(tensor, 8, kept := torch.empty_like(tensor))
    assert [launch.kernel for launch in launches] == [
        f"zipccl_zfp_{what}_bf16" for what in ("encode", "decode", "project")
    ]
    assert launches[0].reads[0] is tensor and launches[0].writes[0] is codes
    assert launches[1].reads[0] is codes and launches[1].writes[0] is back and launches[2].writes[0] is kept


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    launcher = NoLauncher()
    route, tensor, codes = (
        CudaBackend(launcher, "cpu"),
        torch.zeros(300),
        torch.zeros(code_bytes(300, 8), dtype=torch.uint8),
    )
    for refused in (
        lambda: route.encode_zfp(tensor, 2, codes),
        lambda: route.encode_zfp(tensor, 33, codes),
        lambda: route.encode_zfp(tensor, 9, codes),
        lambda: route.encode_zfp(tensor.int(), 8, codes),
        lambda: route.encode_zfp(tensor, 8, codes.to(torch.int8)),
        lambda: route.decode_zfp(codes[:-8], 8, tensor),
        lambda: route.decode_zfp(codes, 8, tensor[:150]),
        lambda: route.decode_zfp(codes, 8, tensor.double()),
        lambda: route.project_zfp(tensor, 2, tensor),
        lambda: route.project_zfp(tensor, 8, tensor[:299]),
        lambda: route.project_zfp(tensor, 8, tensor.half()),
    ):
        with pytest.raises(ValueError, match=r"got|no kernel for"):
            refused()
    assert not launcher.names


def test_any_order_of_threads() -> None:
    launcher = emulation.launcher()
    try:
        for seed in range(6):
            launcher.seed(seed)
            check((CudaBackend(launcher, "cpu"), CPU), test_zfp._finite(3001, torch.float16, seed), 5 + seed)
    finally:
        launcher.seed(0)
