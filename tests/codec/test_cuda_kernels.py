"""The CUDA kernels where only they go: slots, words at any address, launches of many jobs, orders of threads.

Emulated, and on a GPU if there is one. What every route must do is in the other tests, which run these kernels like any route.
"""

from __future__ import annotations

import random

import corpus
import emulation
import mutations
import pytest
import tiers
import torch
from corpus import assert_same_sums
from cuda_frames import CPU, GUARD, Kernel, assert_guarded, at_offset, bits, frame_of, offsets, round_trip, slot, words
from test_cuda_sums import in_order

from ds_zipccl.codecs import compress_bound, decompress
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, parse
from ds_zipccl.kernels.cuda.backend import NO_FAILURE, CudaBackend, new_status, raise_failure


@pytest.mark.parametrize("dtype", [kind.dtype for kind in corpus.FLOATS.values()], ids=corpus.FLOATS)
def test_frames_in_slots(kernel: Kernel, dtype: torch.dtype) -> None:
    """Whole frames, header included, equal those of the CPU; more jobs than a launch takes, some of them empty."""
    tensors = [words(dtype, numel, numel) for numel in (0, 1, 5000, 16384, 16385, *range(3, 300, 4))]
    assert len(tensors) > 48
    round_trip(*kernel, tensors)


@pytest.mark.parametrize("code", ["cascade", "wide"])
def test_slots_that_are_too_small(kernel: Kernel, code: str) -> None:
    """The header shows an overflow, a counter counts it, and the kernel writes inside the slot alone, however small the slot."""
    route, device = kernel
    tensor = words(torch.bfloat16, 40_000)
    size = frame_of(tensor, code).numel()
    overflows = torch.zeros(1, dtype=torch.int32, device=device)
    capacities = [32, 48, 64, 80, 1024, 30_000, size - 16, size - 1, size, size + 16]
    for count, capacity in enumerate(capacities, 1):
        at, memory = slot(capacity, device)
        route.encode_frames([tensor.to(device)], code, 1024, [at], overflows)
        assert_guarded(memory, at)
        fits = capacity >= size
        assert overflows.item() == min(count, capacities.index(size))
        out, status = torch.empty_like(tensor, device=device), new_status(device)
        route.decode_frames([at], 1024, [out], status)
        if fits:
            raise_failure(status)
            assert torch.equal(out.cpu(), tensor)
        else:
            with pytest.raises(FrameError) as raised:
                raise_failure(status)
            assert raised.value.code == FrameErrorCode.OVERFLOWED
            with pytest.raises(FrameError, match=f"would have had {size} bytes"):
                parse(at.cpu())


def test_short_slots_are_refused(kernel: Kernel) -> None:
    """A slot without room for a header, even one without a byte, which has no address; also where no words are wanted."""
    route, device = kernel
    at, _ = slot(64, device)
    for size in (0, 16, 31):
        for numel in (0, 5, 20_000):
            out, status = torch.zeros(numel, dtype=torch.bfloat16, device=device), new_status(device)
            route.decode_frames([at[:size]], 1024, [out], status)
            with pytest.raises(FrameError) as raised:
                raise_failure(status)
            assert raised.value.code == FrameErrorCode.TRUNCATED, (size, numel)
            assert out.isnan().all()


def test_damaged_frames_in_slots_and_sums(kernel: Kernel) -> None:
    """The kernels read the header and refuse every frame that the host's parser and decoders refuse; they write inside the output alone."""
    route, device = kernel
    rng = random.Random(5)
    bases = [
        base for base in mutations.bases(checksum=False) if base.tensor.dtype in (torch.bfloat16, torch.float32) and base.tensor.dim() == 1
    ]  # fmt: skip
    seen = set()
    for turn in range(1500):
        base = rng.choice(bases)
        _, damaged = mutations.damaged(rng, base)
        frame = torch.frombuffer(bytearray(damaged or b"\0"), dtype=torch.uint8)
        try:
            header = parse(frame)
            flat = header.shape is None and header.checksum is None
        except FrameError:
            header, flat = None, True
        if not flat or (header and header.block not in (0, base.block)):
            continue  # shapes and checksums are not for kernels, which are told the block
        numel, dtype = base.tensor.numel(), base.tensor.dtype
        try:
            wanted, code = decompress(frame, torch.empty(numel, dtype=dtype)), None
        except FrameError as error:
            wanted, code = None, error.code
        at, _ = slot(frame.numel() + 16, device)
        at = at[: frame.numel()]
        at.copy_(frame)
        out, memory = slot(base.tensor.nbytes, device)
        out, status = out.view(dtype), new_status(device)
        if turn % 2:
            route.decode_frames([at], base.block or 1024, [out], status)
        else:
            route.decode_sum_frames([at], base.block or 1024, dtype, out, status)
        assert_guarded(memory, out)
        refused = status.item() != NO_FAILURE and status.item() & 255
        seen.add(refused)
        in_slots = header is None or header.codec in (
            CodecId.RAW,
            CodecId.EXPONENT,
        )  # kernels of slots refuse other formats
        if code in (None, FrameErrorCode.INDEX, FrameErrorCode.BLOCK) and numel and in_slots:
            assert refused == (code or 0), (code, damaged.hex())
        elif numel:
            assert refused, (code, damaged.hex())
        if not refused and wanted is not None and turn % 2:
            assert torch.equal(bits(out), bits(wanted))
    assert len(seen) > 6, seen


# ------------------------------------------------------------------------------------------------- words at any address

#: Whole blocks, parts of blocks, more than a chunk, and sizes whose raw payload ends within a word of memory.
NUMELS = (1, 3, 1023, 1024, 1027, 5 * 1024, 17 * 1024 + 517)


def check_addresses(
    route: CudaBackend, device: torch.device, kind: corpus.Float, numels: tuple[int, ...] = NUMELS, block: int = 1024
) -> None:
    """The same frames, words and sums as from aligned memory, and nothing written beside them."""
    for numel in numels:
        tensor = corpus.tensor(corpus.mixed(numel, kind, block, numel), kind)
        wanted = frame_of(tensor, "cascade", block)
        frame = wanted.to(device)
        raw = frame_of(tensor, "raw").to(device)
        places = offsets(kind.dtype)
        # The bytes beside the words differ from place to place; the frames must not.
        segments = [at_offset(tensor, place, device, 17 * place & 255)[0] for place in places]
        slots = [
            torch.empty(compress_bound(numel, kind.dtype, block=block), dtype=torch.uint8, device=device)
            for _ in places
        ]
        route.encode_frames(segments, "cascade", block, slots)
        for place, at in zip(places, slots, strict=True):
            assert torch.equal(at[: wanted.numel()].cpu(), wanted), (numel, place)
        for what in (frame, raw):
            outs = [at_offset(torch.zeros_like(tensor), place, device, GUARD) for place in places]
            route.decode_frames([what] * len(places), block, [out for out, _ in outs], status := new_status(device))
            raise_failure(status)
            for place, (out, memory) in zip(places, outs, strict=True):
                assert torch.equal(bits(out), bits(tensor)), (numel, place)
                assert_guarded(memory, out)
        for sums_dtype in {kind.dtype, torch.float32} if kind.dtype.itemsize > 1 else ():
            for place in offsets(sums_dtype):
                sums, memory = at_offset(torch.zeros(numel, dtype=sums_dtype), place, device, GUARD)
                route.decode_sum_frames([frame, raw], block, kind.dtype, sums, status := new_status(device))
                raise_failure(status)
                assert_same_sums(sums, in_order([tensor, tensor], sums_dtype))
                assert_guarded(memory, sums)


@pytest.mark.parametrize("kind", corpus.FLOATS.values(), ids=corpus.FLOATS)
def test_words_at_any_address(kernel: Kernel, kind: corpus.Float) -> None:
    check_addresses(*kernel, kind)


def test_small_blocks_at_any_address(kernel: Kernel) -> None:
    check_addresses(*kernel, corpus.BF16, (700, 2048 + 129), 128)


# ------------------------------------------------------------------------------------- orders of threads, emulated only


def _round_trips(route: CudaBackend) -> None:
    tensor = words(torch.bfloat16, 5 * 2048 + 77, 1)
    tensor[1000:1500] = 0
    tensor[3000:3300] *= torch.exp(torch.randn(300, generator=torch.Generator().manual_seed(2)) * 9)
    tensor[5000:6000][torch.rand(1000, generator=torch.Generator().manual_seed(3)) < 0.3] = -0.0
    whole = words(torch.bfloat16, 20_000, 4)
    for words_, block in ((tensor, 128), (whole, 1024)):
        (frame,) = round_trip(route, CPU, [words_], block)
        sums, status = torch.empty_like(words_), new_status(CPU)
        route.decode_sum_frames([frame, frame], block, torch.bfloat16, sums, status)
        raise_failure(status)
        assert torch.equal(sums, words_ + words_)


def test_any_order_of_threads(ordered: emulation.EmulatedLauncher, request: pytest.FixtureRequest) -> None:
    """Frames of several chunks with every mode in them, and a sum; whole chunks and parts."""
    for seed in range(3 if tiers.is_short(request.config) else 12):
        ordered.seed(seed)
        for multiprocessors in (1, 8):
            _round_trips(CudaBackend(ordered, "cpu", multiprocessors))
