"""Memory: staging buffers are used again, never by two, and bounded; outputs that share memory with inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import corpus
import pytest
import ranks as runner
import torch
from corpus import assert_same_bits
from moves import CODED

import ds_zipccl
from ds_zipccl import comm
from ds_zipccl.comm.buffer_pool import POOL, BufferPool, PooledBuffers

MIB = 1 << 20
address = torch.Tensor.data_ptr


def test_a_block_is_used_again_for_nearly_the_same_size_alone() -> None:
    pool = BufferPool()
    for first, second in ((MIB, MIB), (MIB, MIB - 1000), (3 * MIB + 5, 3 * MIB + 100)):
        block = pool.take(first)
        assert first <= block.numel() <= first * 9 // 8 + 64 and block.dtype == torch.uint8
        pool.give(block)
        assert address(pool.take(second)) == address(block)
        assert address(pool.take(second)) != address(block)
    pool.give(pool.take(4 * MIB))
    assert pool.take(2 * MIB).numel() < 3 * MIB


def test_memory_is_bounded_and_the_longest_unused_goes() -> None:
    pool = BufferPool(keep=4 * MIB)
    blocks = [pool.take(MIB) for _ in range(5)] + [pool.take(MIB // 2)]
    for block in blocks:
        pool.give(block)
    assert pool._free_bytes == sum(block.numel() for block in pool._free) <= 4 * MIB
    again = [address(pool.take(MIB)) for _ in range(3)]
    assert again == [address(block) for block in blocks[4:1:-1]], "the last one returned may still be in the cache"
    assert address(pool.take(MIB // 2)) == address(blocks[5])


def test_small_blocks_are_left_to_the_allocator() -> None:
    pool = BufferPool()
    for nbytes, kept in ((100, 0), (60_000, 0), (64 << 10, 1)):
        pool.give(pool.take(nbytes))
        assert len(pool._free) == kept and pool._used_bytes == 0


def test_the_peak_is_the_most_at_a_time() -> None:
    pool = BufferPool()
    first, second = pool.take(MIB), pool.take(MIB)
    pool.give(first)
    pool.lose(second)
    pool.take(MIB)
    assert pool.peak == 2 * MIB and pool._used_bytes == MIB
    pool.take(4 * MIB)
    assert pool.peak == 5 * MIB


def test_threads_never_share_a_block() -> None:
    pool = BufferPool()

    def use(mark: int) -> None:
        for _ in range(300):
            block = pool.take(100_000)
            block[:8] = mark
            assert block[:8].tolist() == [mark] * 8
            pool.give(block)

    runner.at_once(*(partial(use, mark) for mark in range(4)))


def test_lease() -> None:
    lease = PooledBuffers()
    frame, words = lease.take(100_001), lease.empty(70_000, torch.bfloat16, torch.device("cpu"))
    assert (frame.shape, frame.dtype) == ((100_001,), torch.uint8)
    assert (words.shape, words.dtype) == ((70_000,), torch.bfloat16) and words.is_contiguous()
    assert address(frame) != address(words)
    lease.release()
    lease.release()
    assert address(POOL.take(100_001)) == address(frame)


@runner.together(3, "match")
@runner.together(3, "fp32")
def memory_is_used_again(rank: int, ranks: int, reduction: str) -> None:
    """The second round of the same operations takes no new memory."""
    config = replace(CODED, reduction=reduction)
    tensor = corpus.tensor(corpus.bell(300_000, corpus.BF16, rank), corpus.BF16)
    whole = torch.empty(300_000 * ranks, dtype=torch.bfloat16)

    def operations() -> list[int]:
        comm.all_reduce(tensor.clone(), config=config)
        comm.reduce(tensor.clone(), 0, config=config)
        comm.reduce_scatter_tensor(torch.empty(300_000 // ranks, dtype=torch.bfloat16), tensor, config=config)
        comm.all_gather_into_tensor(whole, tensor, config=config)
        comm.all_to_all_single(torch.empty_like(tensor), tensor, config=config)
        if rank < 2:
            comm.send(tensor, 1 - rank, config=config) if rank else comm.recv(tensor.clone(), 1, config=config)
        return sorted(map(address, POOL._free))

    first = operations()
    assert first and operations() == first


@runner.together(2)
def memory_of_frames_in_flight(rank: int, ranks: int) -> None:
    """A frame's memory is not given back before the frame is out."""
    tensor = corpus.tensor(corpus.bell(300_000, corpus.BF16, 1), corpus.BF16)
    if rank == 0:
        work = comm.broadcast(tensor, 0, async_op=True, config=CODED)
        time.sleep(0.5)
        with torch.inference_mode():
            for size in range(300_000, 700_000, 20_000):
                POOL.take(size).fill_(255)
        work.wait()
    else:
        time.sleep(1.5)
        got = torch.empty_like(tensor)
        comm.broadcast(got, 0, config=CODED)
        corpus.assert_same_bits(got, tensor)


NUMEL = 5000
SIZE = 2 * NUMEL
BOUND = ds_zipccl.compress_bound(NUMEL, torch.bfloat16)
#: First bytes of 2 * SIZE + 2 * BOUND bytes at which a tensor lies.
AT = SIZE + BOUND


def values() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def arena(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory, and a tensor of NUMEL words ``at`` bytes from its start, which holds values()."""
    memory = torch.zeros(2 * SIZE + 2 * BOUND, dtype=torch.uint8)
    tensor = memory[at : at + SIZE].view(torch.bfloat16)
    return memory, tensor.copy_(values())


def refused(call: Callable[[], object], memory: torch.Tensor) -> None:
    before = memory.clone()
    with pytest.raises(ValueError, match=r"bytes of an output are also in an input .* pass another out") as caught:
        call()
    assert not isinstance(caught.value, ds_zipccl.FrameError)
    assert torch.equal(memory, before), "something was written"


@pytest.mark.parametrize("start", [AT - BOUND + 1, AT - 2, AT, AT + 2, AT + SIZE - 1])
def test_compress_over_its_tensor(start: int) -> None:
    memory, tensor = arena(AT)
    refused(lambda: ds_zipccl.compress(tensor, out=memory[start : start + BOUND], shaped=False), memory)


@pytest.mark.parametrize("start", [AT - BOUND, AT + SIZE])
def test_compress_beside_its_tensor(start: int) -> None:
    """Bytes of the buffer after the largest frame are not written, so they may be the tensor's."""
    memory, tensor = arena(AT)
    frame = ds_zipccl.compress(tensor, out=memory[start:], shaped=False)
    assert_same_bits(ds_zipccl.decompress(frame), values())
    assert_same_bits(tensor, values())


def test_compress_over_its_base_and_over_a_copied_tensor() -> None:
    """Elements that do not lie one after the other are copied first: they do not count."""
    memory, tensor = arena(AT)
    bound = ds_zipccl.compress_bound(NUMEL, torch.bfloat16, "delta")
    place = memory[AT : AT + bound]
    refused(lambda: ds_zipccl.compress(values(), "delta", base=tensor, out=place, shaped=False), memory)
    wanted = tensor[::2].clone()
    assert_same_bits(ds_zipccl.decompress(ds_zipccl.compress(tensor[::2], out=memory[AT - 8 :])), wanted)


def test_segments() -> None:
    memory, tensor = arena(0)
    parts = tensor.split(NUMEL // 5)
    bound = ds_zipccl.compress_bound(NUMEL // 5, torch.bfloat16)
    outs = [torch.empty(bound, dtype=torch.uint8) for _ in parts]
    wanted = [frame.clone() for frame in ds_zipccl.compress_segments(parts, outs)]
    beside = [memory[SIZE + i * bound :] for i in range(5)]
    for frame, expected in zip(ds_zipccl.compress_segments(parts, beside), wanted, strict=True):
        assert torch.equal(frame, expected)
    for wrong in (memory[SIZE - 1 :], memory[: bound + 1], outs[0]):
        own = [*outs[:3], wrong, outs[4]]
        refused(lambda own=own: ds_zipccl.compress_segments(parts, own), memory)
    swapped = [*outs[:4], memory[SIZE // 5 :]]  # apart from its own segment, over another one
    refused(lambda: ds_zipccl.compress_segments([parts[4], *parts[:4]], swapped), memory)
    repeated = [parts[0], parts[0], parts[0].new_empty(0)]
    assert len(ds_zipccl.compress_segments(repeated, outs[:3])) == 3, "inputs may share memory, and be empty"


@pytest.mark.parametrize("codec", ["cascade", "raw"])
def test_decompress_over_its_frame(codec: str) -> None:
    frame = ds_zipccl.compress(values(), codec, shaped=False)
    memory = torch.zeros(2 * AT, dtype=torch.uint8)
    memory[AT : AT + frame.numel()] = frame
    frame = memory[AT : AT + frame.numel()]
    for start in (AT - SIZE + 2, AT, AT + 64, AT + frame.numel() // 2 * 2 - 2):
        out = memory[start : start + SIZE].view(torch.bfloat16)
        refused(lambda out=out: ds_zipccl.decompress(frame, out), memory)
        refused(lambda out=out: ds_zipccl.decompress_add(frame, out), memory)
    for start in (AT - SIZE, AT + frame.numel() // 2 * 2 + 2):
        out = memory[start : start + SIZE].view(torch.bfloat16)
        assert_same_bits(ds_zipccl.decompress(memory[AT:], out), values())
        assert_same_bits(ds_zipccl.decompress_add(memory[AT:], out), values() + values())


def test_nothing_overlaps_nothing() -> None:
    frame = ds_zipccl.compress(torch.empty(0))
    out = frame[8:8].view(torch.float32)
    assert ds_zipccl.decompress(frame, out) is out


test_programs = runner.programs(__name__)
