"""The CUDA kernels on words at any address: the same frames, words and sums as from aligned memory, and nothing written beside them."""

from __future__ import annotations

import corpus
import pytest
import torch
from cuda_frames import GUARD, assert_guarded, at_offset, frame_of, offsets

from ds_zipccl.codecs import compress, compress_bound
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status, raise_failure

#: Whole blocks, parts of blocks, more than a chunk, and sizes whose raw payload ends within a word of memory.
NUMELS = (1, 3, 1023, 1024, 1027, 5 * 1024, 17 * 1024 + 517)


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
