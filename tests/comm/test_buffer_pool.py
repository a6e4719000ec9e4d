"""Staging memory: used again, never by two, bounded."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import corpus
import pytest
import ranks as runner
import torch

from ds_zipccl import comm
from ds_zipccl.comm.host.buffer_pool import POOL, BufferPool, PooledBuffers
from ds_zipccl.config import ZipcclConfig

MIB = 1 << 20


def address(block: torch.Tensor) -> int:
    return block.data_ptr()


def test_a_block_is_used_again_for_nearly_the_same_size() -> None:
    pool = BufferPool()
    for first, second in ((MIB, MIB), (MIB, MIB - 1000), (3 * MIB + 5, 3 * MIB + 100)):
        block = pool.take(first)
        assert first <= block.numel() <= first * 9 // 8 + 64 and block.dtype == torch.uint8
        pool.give(block)
        assert address(pool.take(second)) == address(block)
        assert address(pool.take(second)) != address(block)


def test_a_block_is_not_used_for_a_much_smaller_size() -> None:
    pool = BufferPool()
    block = pool.take(4 * MIB)
    pool.give(block)
    assert pool.take(2 * MIB).numel() < 3 * MIB


def test_memory_is_bounded_and_the_longest_unused_goes() -> None:
    pool = BufferPool(keep=4 * MIB)
    blocks = [pool.take(MIB) for _ in range(5)] + [pool.take(MIB // 2)]
    for block in blocks:
        pool.give(block)
    assert pool._free_bytes == sum(block.numel() for block in pool._free) <= 4 * MIB
    again = {address(pool.take(MIB)) for _ in range(3)}
    assert again == {address(block) for block in blocks[2:5]}
    assert address(pool.take(MIB // 2)) == address(blocks[5])


def test_the_last_one_returned_is_the_first_used() -> None:
    """It may still be in the cache."""
    pool = BufferPool()
    blocks = [pool.take(MIB) for _ in range(3)]
    for block in blocks:
        pool.give(block)
    assert [address(pool.take(MIB)) for _ in range(3)] == [address(block) for block in blocks[::-1]]


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
    pool, wrong = BufferPool(), []

    def use(mark: int) -> None:
        for _ in range(300):
            block = pool.take(100_000)
            block[:8] = mark
            if block[:8].tolist() != [mark] * 8:
                wrong.append(mark)
            pool.give(block)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lease() -> None:
    lease = PooledBuffers()
    frame, words = lease.take(100_001), lease.empty(70_000, torch.bfloat16, torch.device("cpu"))
    assert (frame.shape, frame.dtype) == ((100_001,), torch.uint8)
    assert (words.shape, words.dtype) == ((70_000,), torch.bfloat16) and words.is_contiguous()
    assert address(frame) != address(words)
    lease.release()
    lease.release()
    assert address(POOL.take(100_001)) == address(frame)


CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)


def steady(rank: int, ranks: int, reduction: str) -> None:
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


@pytest.mark.parametrize("reduction", ["match", "fp32"])
def test_memory_is_used_again(reduction: str) -> None:
    runner.run(steady, 3, reduction)


def late(rank: int, ranks: int) -> None:
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


def test_memory_of_frames_in_flight() -> None:
    runner.run(late, 2)
