"""The kernels of lossy codecs where only CUDA goes: words and codes at any address, cut chunks, refusals, any order of threads.

What the C++ route writes, tells and reads is demanded of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import corpus
import emulation
import pytest
import test_zfp
import torch
from cuda_frames import CPU, GUARD, Kernel, NoLauncher, assert_guarded, at_offset, bits, offsets, words

from ds_zipccl import kernels
from ds_zipccl.codecs.exponent import ROUNDED
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.lossy import Int, TacoFp8

TACO = TacoFp8(128, True)
#: What is coded, and whatever else a route tells of it; None where a codec leaves the words alone.
Coded = tuple[list[torch.Tensor], object] | None

# --- codecs with their settings, by the calls of a route; of the memory for what is coded, the last place may begin at any address


@dataclass(frozen=True)
class Rounded:
    """Payloads of rounded words."""

    mantissa: int = 3
    block: int = 128
    method = "encode_rounded"
    launched = ("encode_bf16_rounded", "untrimmed_bf16", "decode_bf16_rounded", "round_bf16")

    def memory(self, words: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros(ROUNDED.payload_bound(words.numel(), words.dtype, self.block), dtype=torch.uint8)]

    def encode(self, route: Any, words: torch.Tensor, outs: Sequence[torch.Tensor]) -> Coded:
        ((size, untrimmed),) = route.encode_rounded([words], self.mantissa, self.block, outs)
        return [outs[0][:size]], untrimmed

    def decode(self, route: Any, coded: Sequence[torch.Tensor], words: torch.Tensor) -> None:
        route.decode_rounded(coded[0], self.block, words)

    def project(self, route: Any, words: torch.Tensor, out: torch.Tensor) -> None:
        route.round_words(words, self.mantissa, out)


@dataclass(frozen=True)
class Scaled:
    """Scales, and codes of the groups that have some."""

    codec: TacoFp8 | Int = TACO
    method = "encode_scaled"
    launched = ("scaled_encode_bf16", "scaled_decode_bf16", "scaled_project_bf16")

    @property
    def group_bytes(self) -> int:
        return self.codec.group * (self.codec.bits if isinstance(self.codec, Int) else 8) // 8

    def memory(self, words: torch.Tensor) -> list[torch.Tensor]:
        groups = -(-words.numel() // self.codec.group)
        scales = torch.zeros(groups, dtype=torch.int16 if isinstance(self.codec, Int) else torch.uint8)
        return [scales, torch.zeros(groups * self.group_bytes, dtype=torch.uint8)]

    def encode(self, route: Any, words: torch.Tensor, outs: Sequence[torch.Tensor]) -> Coded:
        coded = route.encode_scaled(words, self.codec, *outs)
        return None if coded is None else ([outs[0], outs[1][: coded * self.group_bytes]], coded)

    def decode(self, route: Any, coded: Sequence[torch.Tensor], words: torch.Tensor) -> None:
        route.decode_scaled(*coded, self.codec, words)

    def project(self, route: Any, words: torch.Tensor, out: torch.Tensor) -> None:
        route.project_scaled(words, self.codec, out)


@dataclass(frozen=True)
class Zfp:
    """Codes of blocks of four."""

    rate: int = 8
    method = "encode_zfp"
    launched = ("zfp_encode_bf16", "zfp_decode_bf16", "zfp_project_bf16")

    def memory(self, words: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros(8 * -(-4 * self.rate * -(-words.numel() // 4) // 64), dtype=torch.uint8)]

    def encode(self, route: Any, words: torch.Tensor, outs: Sequence[torch.Tensor]) -> Coded:
        return (list(outs), True) if route.encode_zfp(words, self.rate, outs[0]) else None

    def decode(self, route: Any, coded: Sequence[torch.Tensor], words: torch.Tensor) -> None:
        route.decode_zfp(coded[0], self.rate, words)

    def project(self, route: Any, words: torch.Tensor, out: torch.Tensor) -> None:
        route.project_zfp(words, self.rate, out)


Codec = Rounded | Scaled | Zfp


def expected(codec: Codec, tensor: torch.Tensor) -> tuple[Coded, torch.Tensor]:
    """What the C++ route codes, and the values of the words."""
    route = kernels.lossy_route("native", "cpu", codec.method)
    coded, values = codec.encode(route, tensor, codec.memory(tensor)), torch.empty_like(tensor)
    codec.project(route, tensor, values)
    return coded, values


def check(kernel: Kernel, tensor: torch.Tensor, codec: Codec, place: int = 0) -> None:
    """Demand what the C++ route codes, tells and gives; words and codes are ``place`` elements and bytes past an aligned address."""
    (route, device), (wanted, values) = kernel, expected(codec, tensor)
    case = codec, tensor.dtype, tensor.numel(), place
    segment, _ = at_offset(tensor, place, device, 17 * place & 255)
    *outs, last = codec.memory(tensor)
    outs = [out.to(device) for out in outs]
    last, memory = at_offset(torch.full_like(last, GUARD), place, device, GUARD)
    found = codec.encode(route, segment, [*outs, last])
    assert (found is None) == (wanted is None), case
    assert_guarded(memory, last)
    if found and wanted:
        assert found[1] == wanted[1], case
        for one, other in zip(found[0], wanted[0], strict=True):
            assert torch.equal(one.cpu(), other), case
        assert not isinstance(codec, Rounded) or (last[len(wanted[0][0]) :] == GUARD).all(), case
        if (
            not isinstance(codec, Rounded) or tensor.dtype != torch.float32
        ):  # whose payloads have no trims, and another decoder
            back, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
            codec.decode(route, found[0], back)
            assert torch.equal(bits(back), bits(values)), case
            assert_guarded(memory, back)
    out, memory = at_offset(torch.zeros_like(tensor), (3 * place + 1) % len(offsets(tensor.dtype)), device, GUARD)
    for to in (out, segment):
        codec.project(route, segment, to)
        assert torch.equal(bits(to), bits(values)), case
    assert_guarded(memory, out)


def bells(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Bells of several scales with zero groups, subnormals and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    for at, scale in enumerate((1.0, 2.0**-9, info.tiny * 8, 0.0, 60.0)):
        found[600 * at : 600 * (at + 1)] *= scale
    found = found.to(dtype)
    found[torch.rand(numel, generator=generator) < 0.02] = -0.0
    return found


Cases = Iterator[tuple[torch.Tensor, Codec]]


def _rounded_mantissa_bits(kind: corpus.Float) -> Cases:
    for mantissa in range(1, 7):
        yield corpus.tensor(corpus.mixed(2048 + 130, kind, 128, mantissa), kind), Rounded(mantissa)


def _rounded_largest_exponents(kind: corpus.Float) -> Cases:
    """One word in each whole block is NaN, infinity, or a finite number that the rounding must not make infinite."""
    infinity = kind.largest_exponent << kind.mantissa
    nans, finite = (infinity + 1, 2 * infinity - 1 & (kind.sign - 1)), (infinity - 1, infinity - (1 << kind.mantissa))
    specials = [infinity, *nans, *finite, 0, kind.sign]
    found = corpus.bell(1024 * len(specials), kind, 3)
    for block, special in enumerate(specials):
        found[block * 1024 + 77 * block] = special | (kind.sign if block % 2 else 0)
    for mantissa in (1, 6):
        yield corpus.tensor(found, kind), Rounded(mantissa, 1024)


def _scaled_groups(kind: corpus.Float) -> Cases:
    """Every size of a group, and all bits of a code."""
    for numel in (0, 1, 127, 128, 129, 3001):
        yield bells(numel, kind.dtype, numel), Scaled()
    e4m3 = [TacoFp8(32, False), TacoFp8(512, True), TacoFp8(64, True)]
    for codec in (*e4m3, Int(8, 128, True), Int(6, 32, True), Int(4, 256, False), Int(8, 512, True), Int(4, 64, True)):
        for numel in (129, 3001):
            yield bells(numel, kind.dtype, numel), Scaled(codec)


def _zfp_rates_and_sizes(kind: corpus.Float) -> Cases:
    """Parts of blocks, of units and of words of 64 bits; several units for a warp."""
    sizes = {1: 3, 2: 8, 3: 16, 127: 7, 128: 3, 129: 13, 4: 17, 3001: 31, 3002: 32, 5003: 15, 0: 8}
    for numel, rate in sizes.items():
        yield test_zfp._finite(numel, kind.dtype, numel + rate), Zfp(rate)


@pytest.mark.parametrize("kind", corpus.SUMMED.values(), ids=corpus.SUMMED)
@pytest.mark.parametrize(
    "cases", [_rounded_mantissa_bits, _rounded_largest_exponents, _scaled_groups, _zfp_rates_and_sizes]
)
def test_cases(kernel: Kernel, cases: Callable[[corpus.Float], Cases], kind: corpus.Float) -> None:
    for tensor, codec in cases(kind):
        check(kernel, tensor, codec)


@pytest.mark.parametrize("kind", corpus.SUMMED.values(), ids=corpus.SUMMED)
@pytest.mark.parametrize("codec", ["rounded", "scaled", "zfp"])
def test_any_address(kernel: Kernel, codec: str, kind: corpus.Float) -> None:
    for place in offsets(kind.dtype):
        if codec == "rounded":
            check(kernel, corpus.tensor(corpus.mixed(2 * 1024 + 517, kind, 1024, 7), kind), Rounded(2, 1024), place)
        elif codec == "zfp":
            check(kernel, test_zfp._finite(517, kind.dtype, place), Zfp((9, 16, 5, 20)[place % 4]), place)
        else:
            tensor = bells(1501, kind.dtype, 3)
            tensor[256:512] = 0
            check(kernel, tensor, Scaled(), place)
            check(kernel, tensor, Scaled(Int(6, 64, False)), place)


@pytest.mark.parametrize("codec", [Rounded(), Scaled(TacoFp8(32, True)), Scaled(Int(6, 512, True)), Zfp(5)], ids=repr)
def test_any_order_of_threads(codec: Codec, ordered: emulation.EmulatedLauncher) -> None:
    """Whole chunks and parts."""
    rounded = isinstance(codec, Rounded)
    tensor = corpus.tensor(corpus.mixed(5 * 2048 + 77, corpus.BF16, 128, 1), corpus.BF16) if rounded else None
    for seed in range(6):
        ordered.seed(seed)
        for multiprocessors in (1, 8) if rounded else (1,):
            route = CudaBackend(ordered, "cpu", multiprocessors)
            check((route, CPU), bells(3001, torch.bfloat16, seed) if tensor is None else tensor, codec)
            if tensor is not None and not seed:
                check((route, CPU), tensor.float(), Rounded(5, 512))


def test_the_observer_is_told_of_each_tensor(launches: list[backend.Launch]) -> None:
    route, tensor = CudaBackend(emulation.launcher(), "cpu"), words(torch.bfloat16, 700, 1)
    for codec in (Rounded(), Scaled(), Zfp()):
        launches.clear()
        outs, back, kept = codec.memory(tensor), torch.empty_like(tensor), torch.empty_like(tensor)
        found = codec.encode(route, tensor, outs)
        assert found
        codec.decode(route, found[0], back)
        codec.project(route, tensor, kept)
        assert torch.equal(back, kept)
        assert [launch.kernel for launch in launches] == [f"zipccl_{name}" for name in codec.launched]
        encoded, *_, decoded, projected = launches
        assert encoded.reads[0] is tensor and all(any(out is one for one in encoded.writes) for out in outs)
        assert all(any(part is one for one in decoded.reads) for part in found[0])
        assert decoded.writes[0] is back and projected.reads[0] is tensor and projected.writes[0] is kept


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    launcher = NoLauncher()
    route, half, tensor = CudaBackend(launcher, "cpu"), torch.zeros(300, dtype=torch.bfloat16), torch.zeros(300)
    (out,), (codes,) = Rounded().memory(half), Zfp().memory(tensor)
    scales, numbers = torch.ones(3, dtype=torch.uint8), torch.zeros(384, dtype=torch.uint8)
    float8 = torch.float8_e4m3fn
    for call, refused in {
        route.round_words: [
            (half, 7, half), (half, 0, half), (half.long(), 3, half.long()), (half, 3, half[:299]), (half, 3, half.half()),
            (half[::2], 3, half[:150]),
        ],
        route.encode_rounded: [
            ([half], 7, 128, [out]), ([half], 3, 100, [out]), ([half.to(float8)], 3, 128, [out]),
            ([half, half.half()], 3, 128, [out, out]),
        ],
        route.decode_rounded: [(out, 128, tensor), (out, 100, half)],
        route.encode_scaled: [
            (tensor, TACO, scales[:2], numbers), (tensor, TACO, scales, numbers[:383]), (tensor, TACO, scales.short(), numbers),
            (tensor, Int(8, 128), scales, numbers), (tensor.double(), TACO, scales, numbers),
        ],
        route.decode_scaled: [
            (scales, numbers[:-128], TACO, tensor), (torch.zeros_like(scales), numbers, TACO, tensor),
            (scales, numbers.view(float8), TACO, tensor), (scales, numbers, TACO, tensor[:100]), (scales, numbers, TACO, tensor.int()),
        ],
        route.project_scaled: [(tensor, TACO, tensor[:299]), (tensor, TACO, tensor.half()), (torch.zeros(600)[::2], TACO, tensor)],
        route.encode_zfp: [
            (tensor, 2, codes), (tensor, 33, codes), (tensor, 9, codes), (tensor.int(), 8, codes), (tensor, 8, codes.to(torch.int8)),
        ],
        route.decode_zfp: [(codes[:-8], 8, tensor), (codes, 8, tensor[:150]), (codes, 8, tensor.double())],
        route.project_zfp: [(tensor, 2, tensor), (tensor, 8, tensor[:299]), (tensor, 8, tensor.half())],
    }.items():  # fmt: skip
        for number, arguments in enumerate(refused):
            with pytest.raises(ValueError, match=r"got|no kernel for"):
                pytest.fail(f"{call.__name__} took case {number}, and gave {call(*arguments)}")
    assert not launcher.names


# --- rounded words


def test_more_segments_than_a_launch_takes(kernel: Kernel) -> None:
    (route, device), codec = kernel, Rounded()
    segments = [words(torch.bfloat16, numel, numel) for numel in (*range(60), 3000, 0, 17 * 128)]
    outs = [codec.memory(segment)[0].to(device) for segment in segments]
    sizes = route.encode_rounded([segment.to(device) for segment in segments], codec.mantissa, codec.block, outs)
    for segment, out, (size, untrimmed) in zip(segments, outs, sizes, strict=True):
        (payload,), wanted = expected(codec, segment)[0] or ([], 0)
        assert untrimmed == wanted and torch.equal(out[:size].cpu(), payload), segment.numel()


def test_a_payload_that_does_not_fit(kernel: Kernel) -> None:
    """Nothing is written outside its place, and the call says so."""
    route, device = kernel
    memory = torch.full((512,), GUARD, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"a payload of \d+ bytes does not fit in 256; use compress_bound"):
        route.encode_rounded([words(torch.bfloat16, 3000).to(device)], 3, 128, [memory[:256]])
    assert (memory == GUARD).all()


def test_rounded_payloads_that_are_refused(kernel: Kernel) -> None:
    """A trim above M, of a block with a body and of one without, a mode that there is not, a chunk that ends early, and bytes behind."""
    route, device = kernel
    tensor = words(torch.bfloat16, 700, 1)
    tensor[:128] = 1
    (payload,), _ = expected(Rounded(), tensor)[0] or ([], 0)
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
            route.decode_rounded(damaged.to(device), 128, torch.zeros(700, device=device), torch.bfloat16)
    for wrong in (payload[:-16], torch.cat((payload, torch.zeros(16, dtype=torch.uint8))), payload[:8]):
        with pytest.raises(FrameError):
            route.decode_rounded(wrong.to(device), 128, out)


# --- scaled payloads and ZFP


def test_scaled_groups_that_stay_as_they_are(kernel: Kernel) -> None:
    for special in (float("nan"), float("inf"), 3e38):
        tensor = bells(1501, torch.float32)
        tensor[1000] = special
        for codec in (Scaled(), Scaled(Int(8, 128, True))):
            assert expected(codec, tensor)[0] is None
            check(kernel, tensor, codec)


def test_scaled_codes_that_are_refused(kernel: Kernel) -> None:
    """A NaN, and a number above 2m, in the last value of a group and behind the tensor's end."""
    route, device = kernel
    tensor = bells(250, torch.float32)
    planes = {15 + 16 * plane: 0x80 for plane in range(4)}
    for codec, damage in ((TACO, {255: 0x7F}), (TacoFp8(32, False), {31: 0xFF}), (Int(4, 128), planes)):
        (scales, codes), _ = expected(Scaled(codec), tensor)[0] or ([], 0)
        for at, value in damage.items():
            codes[at] = codes[at] | value if isinstance(codec, Int) else value
        there = scales.to(device), codes.to(device)
        with pytest.raises(FrameError) as refused:
            route.decode_scaled(*there, codec, torch.empty(250, device=device))
        assert refused.value.code == FrameErrorCode.BLOCK
        with pytest.raises(FrameError):
            route.decode_scaled(*there, codec, torch.zeros(250, device=device), torch.float32)


def test_zfp_blocks_that_are_not_finite(kernel: Kernel) -> None:
    """The encoder says so; a projection leaves these blocks alone."""
    for at in (0, 515, 516):
        tensor = test_zfp._finite(517, torch.float32, at)
        _, values = expected(Zfp(), tensor)
        tensor[at] = torch.nan
        block = slice(at // 4 * 4, at // 4 * 4 + 4)
        values[block] = tensor[block]
        coded, kept = expected(Zfp(), tensor)
        assert coded is None and torch.equal(bits(kept), bits(values))
        check(kernel, tensor, Zfp())


def test_zfp_codes_of_any_content(kernel: Kernel) -> None:
    route, device = kernel
    for codec in (Zfp(3), Zfp(10), Zfp(32)):
        for kind in corpus.SUMMED.values():
            wanted, found = torch.empty(1001, dtype=kind.dtype), torch.empty(1001, dtype=kind.dtype, device=device)
            generator = torch.Generator().manual_seed(codec.rate)
            codes = torch.randint(256, codec.memory(wanted)[0].shape, dtype=torch.uint8, generator=generator)
            codec.decode(kernels.lossy_route("native", "cpu", "decode_zfp"), [codes], wanted)
            codec.decode(route, [codes.to(device)], found)
            assert torch.equal(bits(found), bits(wanted)) and wanted.isfinite().all()
