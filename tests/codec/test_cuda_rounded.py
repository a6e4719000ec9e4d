"""The kernels of the codec ``round`` where only CUDA goes: words at any address, many jobs, cut chunks, any order of threads."""

from __future__ import annotations

from collections.abc import Sequence

import corpus
import emulation
import pytest
import torch
from cuda_frames import CPU, GUARD, Kernel, NoLauncher, bits, words
from test_cuda_misaligned import assert_guarded, at_offset, offsets

from ds_zipccl import kernels
from ds_zipccl.codecs.exponent import ROUNDED
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import CudaBackend

TRIMMED = [corpus.BF16, corpus.FLOATS["fp16"]]


def places_of(segments: Sequence[torch.Tensor], block: int, device: torch.device) -> list[torch.Tensor]:
    """Memory for the rounded payloads of segments."""
    sizes = [ROUNDED.payload_bound(words.numel(), words.dtype, block) for words in segments]
    return [torch.full((size,), GUARD, dtype=torch.uint8, device=device) for size in sizes]


def expected(segments: Sequence[torch.Tensor], mantissa: int, block: int) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """The payloads of the C++ route, and the sizes that it tells."""
    outs = places_of(segments, block, CPU)
    sizes = kernels.lossy_route("native", "cpu", "encode_rounded").encode_rounded(segments, mantissa, block, outs)
    return [(out[:size], (size, other)) for out, (size, other) in zip(outs, sizes, strict=True)]


def check(kernel: Kernel, segments: Sequence[torch.Tensor], mantissa: int, block: int) -> None:
    """Demand the payloads and sizes of the C++ route, and their words."""
    route, device = kernel
    outs = places_of(segments, block, device)
    sizes = route.encode_rounded([segment.to(device) for segment in segments], mantissa, block, outs)
    for segment, out, got, (payload, size) in zip(
        segments, outs, sizes, expected(segments, mantissa, block), strict=True
    ):
        assert got == size, f"{segment.numel()} words have {got} bytes, with and without trims, wanted {size}"
        assert torch.equal(out[: size[0]].cpu(), payload) and (out[size[0] :] == GUARD).all(), segment.numel()
        if segment.dtype != torch.float32:
            back, rounded = torch.empty_like(segment, device=device), torch.empty_like(segment, device=device)
            route.decode_rounded(out[: size[0]], block, back)
            route.round_words(segment.to(device), mantissa, rounded)
            assert torch.equal(bits(back), bits(rounded)), segment.numel()


@pytest.mark.parametrize("kind", TRIMMED, ids=["bf16", "fp16"])
def test_every_number_of_mantissa_bits(kernel: Kernel, kind: corpus.Float) -> None:
    for mantissa in range(1, 7):
        check(kernel, [corpus.tensor(corpus.mixed(2048 + 130, kind, 128, mantissa), kind)], mantissa, 128)


@pytest.mark.parametrize("name", corpus.SUMMED)
def test_whole_blocks_with_the_largest_exponents(kernel: Kernel, name: str) -> None:
    """One word in each whole block is NaN, infinity, or a finite number that the rounding must not make infinite."""
    kind = corpus.FLOATS[name]
    infinity = kind.largest_exponent << kind.mantissa
    specials = [
        infinity,
        infinity + 1,
        2 * infinity - 1 & (kind.sign - 1),
        infinity - 1,
        infinity - (1 << kind.mantissa),
        0,
        kind.sign,
    ]
    found = corpus.bell(1024 * len(specials), kind, 3)
    for block, special in enumerate(specials):
        found[block * 1024 + 77 * block] = special | (kind.sign if block % 2 else 0)
    for mantissa in (1, 6):
        check(kernel, [corpus.tensor(found, kind)], mantissa, 1024)


def test_more_segments_than_a_launch_takes(kernel: Kernel) -> None:
    check(kernel, [words(torch.bfloat16, numel, numel) for numel in (*range(60), 3000, 0, 17 * 128)], 3, 128)


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_whole_chunks_and_parts(multiprocessors: int) -> None:
    route = CudaBackend(emulation.launcher(), "cpu", multiprocessors)
    tensor = words(torch.bfloat16, 40_000, 4)
    tensor[20_000:30_000][torch.rand(10_000, generator=torch.Generator().manual_seed(3)) < 0.3] = -0.0
    check((route, CPU), [tensor, words(torch.bfloat16, 700, 5)], 3, 1024)
    check((route, CPU), [tensor.float()], 5, 512)


@pytest.mark.parametrize("name", corpus.SUMMED)
def test_words_at_any_address(kernel: Kernel, name: str) -> None:
    route, device = kernel
    kind = corpus.FLOATS[name]
    tensor = corpus.tensor(corpus.mixed(2 * 1024 + 517, kind, 1024, 7), kind)
    ((payload, (size, _)),) = expected([tensor], 2, 1024)
    wanted = torch.empty_like(tensor)
    kernels.lossy_route("native", "cpu", "round_words").round_words(tensor, 2, wanted)
    for place in offsets(kind.dtype):
        segment, _ = at_offset(tensor, place, device, 17 * place & 255)
        out = torch.full(
            (ROUNDED.payload_bound(tensor.numel(), kind.dtype, 1024) + place,), GUARD, dtype=torch.uint8, device=device
        )[place:]
        assert route.encode_rounded([segment], 2, 1024, [out])[0][0] == size
        assert torch.equal(out[:size].cpu(), payload), place
        rounded, memory = at_offset(tensor, (3 * place + 1) % len(offsets(kind.dtype)), device, GUARD)
        route.round_words(segment, 2, rounded)
        assert torch.equal(bits(rounded), bits(wanted)), place
        assert_guarded(memory, rounded)
        route.round_words(segment, 2, segment)
        assert torch.equal(bits(segment), bits(wanted)), place
        if kind in TRIMMED:
            back, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
            route.decode_rounded(out[:size], 1024, back)
            assert torch.equal(bits(back), bits(wanted)), place
            assert_guarded(memory, back)


def test_a_payload_that_does_not_fit(kernel: Kernel) -> None:
    """Nothing is written outside its place, and the call says so."""
    route, device = kernel
    memory = torch.full((512,), GUARD, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"a payload of \d+ bytes does not fit in 256; use compress_bound"):
        route.encode_rounded([words(torch.bfloat16, 3000).to(device)], 3, 128, [memory[:256]])
    assert (memory == GUARD).all()


def test_refused_payloads(kernel: Kernel) -> None:
    """A trim above M, of a block with a body and of one without, a mode that there is not, a chunk that ends early, and bytes behind."""
    route, device = kernel
    tensor = words(torch.bfloat16, 700, 1)
    tensor[:128] = 1
    ((payload, _),) = expected([tensor], 3, 128)
    blocks, out = 6, torch.empty(700, dtype=torch.bfloat16, device=device)
    for at, value, code in (
        (16 + 3 * blocks, 8, FrameErrorCode.BLOCK),
        (16 + 3 * blocks + 1, 8, FrameErrorCode.BLOCK),
        (16 + blocks + 1, 0xA0, FrameErrorCode.BLOCK),
        (0, 2, FrameErrorCode.INDEX),
    ):
        damaged = payload.clone()
        damaged[at] = value
        with pytest.raises(FrameError) as refused:
            route.decode_rounded(damaged.to(device), 128, out)
        assert refused.value.code == code
        with pytest.raises(FrameError):
            route.decode_rounded_add(damaged.to(device), 128, torch.bfloat16, torch.zeros(700, device=device))
    for wrong in (payload[:-16], torch.cat((payload, torch.zeros(16, dtype=torch.uint8))), payload[:8]):
        with pytest.raises(FrameError):
            route.decode_rounded(wrong.to(device), 128, out)


def test_the_observer_is_told_of_each_tensor(launches: list[backend.Launch]) -> None:
    route, tensor = CudaBackend(emulation.launcher(), "cpu"), words(torch.bfloat16, 700)
    out = places_of([tensor], 128, CPU)
    ((size, _),) = route.encode_rounded([tensor], 3, 128, out)
    route.decode_rounded(out[0][:size], 128, tensor)
    route.round_words(tensor, 3, rounded := torch.empty_like(tensor))
    assert [launch.kernel for launch in launches] == [
        "zipccl_encode_bf16_rounded", "zipccl_untrimmed_bf16", "zipccl_decode_bf16_rounded", "zipccl_round_bf16",
    ]  # fmt: skip
    assert launches[0].reads[0] is tensor and any(each is out[0] for each in launches[0].writes)
    assert launches[1].reads[0] is out[0] and launches[2].writes[0] is tensor and launches[3].writes[0] is rounded


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    launcher = NoLauncher()
    route, tensor = CudaBackend(launcher, "cpu"), torch.zeros(300, dtype=torch.bfloat16)
    out = places_of([tensor], 128, CPU)
    for refused in (
        lambda: route.round_words(tensor, 7, tensor),
        lambda: route.round_words(tensor, 0, tensor),
        lambda: route.round_words(tensor.long(), 3, tensor.long()),
        lambda: route.round_words(tensor, 3, tensor[:299]),
        lambda: route.round_words(tensor, 3, tensor.half()),
        lambda: route.round_words(tensor[::2], 3, tensor[:150]),
        lambda: route.encode_rounded([tensor], 7, 128, out),
        lambda: route.encode_rounded([tensor], 3, 100, out),
        lambda: route.encode_rounded([tensor.to(torch.float8_e4m3fn)], 3, 128, out),
        lambda: route.encode_rounded([tensor, tensor.half()], 3, 128, [*out, *out]),
        lambda: route.decode_rounded(out[0], 128, tensor.float()),
        lambda: route.decode_rounded(out[0], 100, tensor),
    ):
        with pytest.raises(ValueError, match=r"got|no kernel for"):
            refused()
    assert not launcher.names


def trial(seed: int, launcher: emulation.EmulatedLauncher) -> None:
    """Payloads of several chunks with every mode, with threads in the order of ``seed``; whole chunks and parts."""
    launcher.seed(seed)
    tensor = corpus.tensor(corpus.mixed(5 * 2048 + 77, corpus.BF16, 128, 1), corpus.BF16)
    for multiprocessors in (1, 8):
        check((CudaBackend(launcher, "cpu", multiprocessors), CPU), [tensor, tensor[:700]], 3, 128)


def test_any_order_of_threads() -> None:
    launcher = emulation.launcher()
    try:
        for seed in range(6):
            trial(seed, launcher)
    finally:
        launcher.seed(0)
