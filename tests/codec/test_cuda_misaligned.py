"""The CUDA kernels on words at any address: the same frames, words and sums as from aligned memory, and nothing written beside them."""

from __future__ import annotations

import corpus
import planted
import pytest
import torch
from cuda_frames import GUARD, frame_of

from ds_zipccl.codecs import compress, compress_bound
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status, raise_failure

#: Whole blocks, parts of blocks, more than a chunk, and sizes whose raw payload ends within a word of memory.
NUMELS = (1, 3, 1023, 1024, 1027, 5 * 1024, 17 * 1024 + 517)


def offsets(dtype: torch.dtype) -> range:
    """Every distance, in elements, from a multiple of 16 bytes."""
    return range(16 // dtype.itemsize)


def at_offset(tensor: torch.Tensor, offset: int, device: torch.device, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``tensor`` that many elements after a multiple of 16 bytes, and the memory around it, bytes of ``fill``."""
    begin = 64 + offset * tensor.itemsize
    memory = torch.full((begin + tensor.nbytes + 64,), fill, dtype=torch.uint8, device=device)
    assert memory.data_ptr() % 16 == 0
    memory[begin : begin + tensor.nbytes].copy_(tensor.view(torch.uint8))
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype), memory


def assert_guarded(memory: torch.Tensor, inside: torch.Tensor) -> None:
    begin = inside.data_ptr() - memory.data_ptr()
    assert (memory[:begin] == GUARD).all() and (memory[begin + inside.nbytes :] == GUARD).all()


def check(
    route: CudaBackend, device: torch.device, kind: corpus.Float, numels: tuple[int, ...] = NUMELS, block: int = 1024
) -> None:
    for numel in numels:
        tensor = corpus.tensor(corpus.mixed(numel, kind, block, numel), kind)
        wanted = frame_of(tensor, "cascade", block)
        frame = wanted.to(device)
        raw = compress(tensor, "raw", shaped=False, checksum=False).to(device)
        places = offsets(kind.dtype)
        # The bytes beside the words differ from place to place; the frames must not.
        segments = [at_offset(tensor, place, device, 17 * place & 255)[0] for place in places]
        slots = [
            torch.empty(compress_bound(numel, kind.dtype, block=block), dtype=torch.uint8, device=device)
            for _ in places
        ]
        route.encode_frames(segments, "cascade", block, slots)
        for place, slot in zip(places, slots, strict=True):
            assert torch.equal(slot[: wanted.numel()].cpu(), wanted), (numel, place)
        for what in (frame, raw):
            outs = [at_offset(torch.zeros_like(tensor), place, device, GUARD) for place in places]
            status = new_status(device)
            route.decode_frames([what] * len(places), block, [out for out, _ in outs], status)
            raise_failure(status)
            for place, (out, memory) in zip(places, outs, strict=True):
                assert torch.equal(out.cpu().view(torch.uint8), tensor.view(torch.uint8)), (numel, place)
                assert_guarded(memory, out)
        if kind.dtype.itemsize > 1:
            check_sums(route, device, tensor, [frame, raw], block)


def check_sums(
    route: CudaBackend, device: torch.device, tensor: torch.Tensor, frames: list[torch.Tensor], block: int
) -> None:
    wanted = tensor.float() + tensor.float()
    for sums_dtype in {tensor.dtype, torch.float32}:
        rounded = wanted.to(sums_dtype)
        bits = torch.int16 if rounded.itemsize == 2 else torch.int32
        for place in offsets(sums_dtype):
            sums, memory = at_offset(torch.zeros_like(rounded), place, device, GUARD)
            status = new_status(device)
            route.decode_sum_frames(frames, block, tensor.dtype, sums, status)
            raise_failure(status)
            equal = (sums.cpu().view(bits) == rounded.view(bits)) | (sums.cpu().isnan() & rounded.isnan())
            assert equal.all(), (tensor.numel(), place, sums_dtype)
            assert_guarded(memory, sums)


@pytest.mark.parametrize("kind", corpus.FLOATS.values(), ids=corpus.FLOATS)
def test_words_at_any_address(kernel: tuple[CudaBackend, torch.device], kind: corpus.Float) -> None:
    check(*kernel, kind)


def test_small_blocks_at_any_address(kernel: tuple[CudaBackend, torch.device]) -> None:
    check(*kernel, corpus.BF16, (700, 2048 + 129), 128)


@pytest.mark.parametrize("kind", [corpus.BF16, corpus.FP32], ids=["bf16", "fp32"])
def test_differences_at_any_address(kernel: tuple[CudaBackend, torch.device], kind: corpus.Float) -> None:
    """Words and base at different addresses; CHANGE blocks and others."""
    route, device = kernel
    numel = 3 * 1024 + 517
    new = corpus.mixed(numel, kind, 1024, 7)
    tensor, base = corpus.tensor(new, kind), corpus.tensor(corpus.before(new, kind, 1024, 8), kind)
    payloads = []
    for place in offsets(kind.dtype):
        words, _ = at_offset(tensor, place, device, 17 * place)
        old, _ = at_offset(base, (place * 3 + 1) % len(offsets(kind.dtype)), device, 29 * place & 255)
        out = torch.empty(compress_bound(numel, kind.dtype), dtype=torch.uint8, device=device)
        payloads.append(out[: route.encode_delta(words, old, 1024, out)].clone())
        back, memory = at_offset(torch.zeros_like(tensor), place, device, GUARD)
        route.decode_delta(payloads[0], old, 1024, back)
        assert torch.equal(back.cpu().view(torch.uint8), tensor.view(torch.uint8))
        assert_guarded(memory, back)
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)


#: Mistakes in the shifts and at the ends: file, text, mistake, and a dtype that shows it.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "16-bit words are shifted by a byte": ("cuda/words.cuh", "__funnelshift_r(b, c, 16)", "__funnelshift_r(b, c, 8)", "bf16"),
    "the last word is missing": ("cuda/words.cuh", "uint32_t(from[7]) << 16", "uint32_t(from[6]) << 16", "bf16"),
    "bytes are shifted by a wrong phase": (
        "cuda/words.cuh",
        "__funnelshift_r(middle[0], after, 8 * phase)",
        "__funnelshift_r(middle[0], after, 8 * head)",
        "e4m3",
    ),
    "vectors at any address": ("cuda/decode.cuh", "copy_bytes<kWhole ? 4 : 1>(", "copy_bytes<kWhole ? 4 : 1>(8 + ", "bf16"),
    "words at the end are written twice": (
        "cuda/warp.cuh",
        "words = (bytes - head) / 4;",
        "words = (bytes - head + 3) / 4;",
        "e4m3",
    ),
    "a raw frame is shifted the other way": ("cuda/frame.cuh", "source[i + 1], 8 * phase)", "source[i + 1], 32 - 8 * phase)", "e4m3"),
    "a raw frame's end is rounded up": ("cuda/frame.cuh", "words = (bytes - head) / 4;", "words = (bytes - head + 3) / 4;", "bf16"),
    "sums stay in the scratch": ("cuda/sum.cuh", "    if (staged) {", "    if (false) {", "bf16"),
}  # fmt: skip
#: Parts of the kernels with a dtype.
PARTS = {"bf16": 1, "e4m3": 8}


@pytest.mark.full(reason="each compiles an emulation")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    file, good, bad, kind = MISTAKES[mistake]
    program = f"""
import corpus, emulation, test_cuda_misaligned, torch
from ds_zipccl.kernels.cuda.backend import CudaBackend
route = CudaBackend(emulation.launcher({{{file!r}: ({(good, bad)!r},)}}, {PARTS[kind]}), "cpu")
test_cuda_misaligned.check(route, torch.device("cpu"), corpus.FLOATS[{kind!r}])
"""
    planted.assert_noticed(program, ("AssertionError",), seconds=240)
