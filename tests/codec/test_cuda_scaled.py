"""The kernels of scaled payloads where only CUDA goes: words and codes at any address, groups without codes, any order of threads."""

from __future__ import annotations

from typing import NamedTuple

import corpus
import emulation
import pytest
import torch
from cuda_frames import CPU, GUARD, Kernel, NoLauncher, bits
from test_cuda_misaligned import assert_guarded, at_offset, offsets

from ds_zipccl import kernels
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.lossy import Int, TacoFp8

KINDS = list(corpus.SUMMED.values())
#: Every size of a group, and all bits of a code.
CODECS: tuple[TacoFp8 | Int, ...] = (
    TacoFp8(128, True), TacoFp8(32, False), TacoFp8(512, True), TacoFp8(64, True), Int(8, 128, True), Int(6, 32, True), Int(4, 256, False),
    Int(8, 512, True), Int(4, 64, True),
)  # fmt: skip
NUMELS = (0, 1, 127, 128, 129, 3001)


class Scaled(NamedTuple):
    """Scales, codes of the groups that have some, and the values of words."""

    coded: int | None
    scales: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor


def words(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Bells of several scales with zero groups, subnormals and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    for at, scale in enumerate((1.0, 2.0**-9, info.tiny * 8, 0.0, 60.0)):
        found[600 * at : 600 * (at + 1)] *= scale
    found = found.to(dtype)
    found[torch.rand(numel, generator=generator) < 0.02] = -0.0
    return found


def group_bytes(codec: TacoFp8 | Int) -> int:
    return codec.group * (codec.bits if isinstance(codec, Int) else 8) // 8


def scaled(kernel: Kernel | None, tensor: torch.Tensor, codec: TacoFp8 | Int, shift: int = 0) -> Scaled:
    """All that a route makes of words, the C++ route if it is None. ``shift``: bytes of the codes from an aligned address."""
    route = kernels.lossy_route("native", "cpu", "encode_scaled") if kernel is None else kernel[0]
    device = CPU if kernel is None else kernel[1]
    groups, size = -(-tensor.numel() // codec.group), group_bytes(codec)
    scales = torch.zeros(groups, dtype=torch.int16 if isinstance(codec, Int) else torch.uint8, device=device)
    memory = torch.full((groups * size + shift + 32,), GUARD, dtype=torch.uint8, device=device)
    place = memory[shift : shift + groups * size]
    there = tensor.to(device)
    coded = route.encode_scaled(there, codec, scales, place)
    assert_guarded(memory, place)
    values = torch.empty_like(there)
    route.project_scaled(there, codec, values)
    return Scaled(coded, scales.cpu(), place[: (coded or 0) * size], values)


def check(kernel: Kernel, tensor: torch.Tensor, codec: TacoFp8 | Int, shift: int = 0) -> None:
    """Demand the scales, codes and values of the C++ route."""
    route, device = kernel
    wanted, found = scaled(None, tensor, codec), scaled(kernel, tensor, codec, shift)
    assert found.coded == wanted.coded
    assert torch.equal(bits(found.values), bits(wanted.values)), (codec, tensor.numel())
    if found.coded is None:
        return
    assert torch.equal(found.scales, wanted.scales), (codec, tensor.numel())
    assert torch.equal(found.codes.cpu(), wanted.codes), (codec, tensor.numel())
    back = torch.empty_like(tensor, device=device)
    route.decode_scaled(found.scales.to(device), found.codes, codec, back)
    assert torch.equal(bits(back), bits(wanted.values)), (codec, tensor.numel())


@pytest.mark.parametrize("kind", KINDS, ids=list(corpus.SUMMED))
def test_every_group_and_code(kernel: Kernel, kind: corpus.Float) -> None:
    for at, codec in enumerate(CODECS):
        for numel in NUMELS if at == 0 else NUMELS[-2:]:
            check(kernel, words(numel, kind.dtype, numel), codec)


@pytest.mark.parametrize("kind", KINDS, ids=list(corpus.SUMMED))
def test_words_and_codes_at_any_address(kernel: Kernel, kind: corpus.Float) -> None:
    route, device = kernel
    tensor = words(1501, kind.dtype, 3)
    tensor[256:512] = 0
    for codec in (TacoFp8(128, True), Int(6, 64, False)):
        wanted = scaled(None, tensor, codec)
        scales = wanted.scales.to(device)
        for place in offsets(kind.dtype):
            check(kernel, at_offset(tensor, place, CPU, GUARD)[0], codec, place)
            segment, _ = at_offset(tensor, place, device, 17 * place & 255)
            out, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
            route.project_scaled(segment, codec, out)
            assert torch.equal(bits(out), bits(wanted.values)), place
            assert_guarded(memory, out)
            route.project_scaled(segment, codec, segment)
            assert torch.equal(bits(segment), bits(wanted.values)), place
            codes, _ = at_offset(wanted.codes, place, device, GUARD)
            back, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
            route.decode_scaled(scales, codes, codec, back)
            assert torch.equal(bits(back), bits(wanted.values)), place
            assert_guarded(memory, back)


def test_groups_that_stay_as_they_are(kernel: Kernel) -> None:
    for special in (float("nan"), float("inf"), 3e38):
        tensor = words(1501, torch.float32)
        tensor[1000] = special
        for codec in (TacoFp8(128, True), Int(8, 128, True)):
            assert scaled(None, tensor, codec).coded is None
            check(kernel, tensor, codec)


def test_refused_codes(kernel: Kernel) -> None:
    """A NaN, and a number above 2m, in the last value of a group and behind the tensor's end."""
    route, device = kernel
    tensor = words(250, torch.float32)
    for codec, damage in (
        (TacoFp8(128, True), {255: 0x7F}),
        (TacoFp8(32, False), {31: 0xFF}),
        (Int(4, 128), {63: 0x80}),
    ):
        good = scaled(None, tensor, codec)
        codes, scales = good.codes.clone(), good.scales.to(device)
        for at, value in damage.items():
            if isinstance(codec, Int):
                for plane in range(codec.bits):
                    codes[15 + 16 * plane] |= value
            else:
                codes[at] = value
        with pytest.raises(FrameError) as refused:
            route.decode_scaled(scales, codes.to(device), codec, torch.empty(250, device=device))
        assert refused.value.code == FrameErrorCode.BLOCK
        with pytest.raises(FrameError):
            route.decode_scaled_add(scales, codes.to(device), codec, torch.float32, torch.zeros(250, device=device))


def test_the_observer_is_told_of_each_tensor(launches: list[backend.Launch]) -> None:
    route, codec = CudaBackend(emulation.launcher(), "cpu"), TacoFp8(128, True)
    tensor, scales, codes = (
        words(300, torch.bfloat16),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(384, dtype=torch.uint8),
    )
    assert route.encode_scaled(tensor, codec, scales, codes) == 3
    route.decode_scaled(scales, codes, codec, back := torch.empty_like(tensor))
    route.project_scaled(tensor, codec, kept := torch.empty_like(tensor))
    assert torch.equal(back, kept)
    assert [launch.kernel for launch in launches] == [
        f"zipccl_scaled_{what}_bf16" for what in ("encode", "decode", "project")
    ]
    assert launches[0].reads[0] is tensor and launches[0].writes[0] is scales and launches[0].writes[1] is codes
    assert launches[1].reads[:2] == [scales, codes] and launches[1].writes[0] is back and launches[2].writes[0] is kept


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    launcher = NoLauncher()
    route, tensor, codec = CudaBackend(launcher, "cpu"), torch.zeros(300), TacoFp8(128, True)
    scales, codes = torch.ones(3, dtype=torch.uint8), torch.zeros(384, dtype=torch.uint8)
    for refused in (
        lambda: route.encode_scaled(tensor, codec, scales[:2], codes),
        lambda: route.encode_scaled(tensor, codec, scales, codes[:383]),
        lambda: route.encode_scaled(tensor, codec, scales.short(), codes),
        lambda: route.encode_scaled(tensor, Int(8, 128), scales, codes),
        lambda: route.encode_scaled(tensor.double(), codec, scales, codes),
        lambda: route.decode_scaled(scales, codes[:-128], codec, tensor),
        lambda: route.decode_scaled(torch.zeros_like(scales), codes, codec, tensor),
        lambda: route.decode_scaled(scales, codes.view(torch.float8_e4m3fn), codec, tensor),
        lambda: route.decode_scaled(scales, codes, codec, tensor[:100]),
        lambda: route.decode_scaled(scales, codes, codec, tensor.int()),
        lambda: route.project_scaled(tensor, codec, tensor[:299]),
        lambda: route.project_scaled(tensor, codec, tensor.half()),
        lambda: route.project_scaled(torch.zeros(600)[::2], codec, tensor),
    ):
        with pytest.raises(ValueError, match=r"got|no kernel for"):
            refused()
    assert not launcher.names


def test_any_order_of_threads() -> None:
    launcher = emulation.launcher()
    try:
        for seed in range(6):
            launcher.seed(seed)
            for codec in (TacoFp8(32, True), Int(6, 512, True)):
                check((CudaBackend(launcher, "cpu"), CPU), words(3001, torch.bfloat16, seed), codec)
    finally:
        launcher.seed(0)
