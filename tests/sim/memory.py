"""The memory of a simulated GPU: poisoned where nothing was written, and handed out again at once.

The allocator has the rules of torch's caching allocator (docs.pytorch.org/docs/stable/notes/cuda.html, "Memory management"): a block
belongs to the stream that was current when it was allocated; a free returns it to that stream's list, without any wait, and the next
allocation of that stream may get it; ``record_stream`` holds a freed block back until the work queued on the other stream has ended.
Unlike torch it hands out the block that was freed last whenever that one is large enough, and fills it with ``POISON`` when the stream
comes to the point of the free: later work of another stream that still uses the block reads poison.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from sim.scheduler import Fault, Place, here

#: Byte of memory that nothing was written to.
POISON = 0xA5
#: Sizes and addresses of blocks are multiples of this, as in torch (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ROUND = 512
#: A tensor with more contiguous runs than this is taken as one range.
MOST_RUNS = 4096


class Block:
    """Memory of one allocation, then of the next."""

    __slots__ = ("address", "allocated", "bytes", "freed", "memory", "name", "touched", "uses")

    def __init__(self, memory: torch.Tensor, name: str) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.bytes = memory.numel()
        #: Name of the owning stream.
        self.name = name
        self.allocated = Place(())
        self.freed: Place | None = None
        #: How often the block was handed out, and the highest such number whose work has touched the memory.
        self.uses = 0
        self.touched = 0

    def poison(self, use: int) -> None:
        """Poison the memory of a use that has ended, unless work of a later use has touched it."""
        if self.touched <= use:
            self.memory.fill_(POISON)


class Lease:
    """A block while a tensor or its views live; the end of the lease frees the block."""

    __slots__ = ("__weakref__", "_free", "block", "holders", "storage")

    def __init__(self, block: Block, free: Callable[[Block, list[object]], None]) -> None:
        self.block = block
        self._free = free
        #: Streams of ``record_stream``.
        self.holders: list[object] = []
        #: Stands for the memory in weak references of torch: operations of the simulator keep the real storage longer.
        self.storage: torch.UntypedStorage | None = None

    def __del__(self) -> None:
        self._free(self.block, self.holders)


class Allocator:
    """Blocks of one rank. Pinned host memory has a list of its own, and is never handed out twice: torch's host allocator waits for the
    copies that it knows of (aten/src/ATen/core/CachingHostAllocator.h), which hides mistakes."""

    def __init__(self, rank: int, arena_bytes: int) -> None:
        self._rank = rank
        self.arena_bytes = arena_bytes
        self._arena = torch.empty(arena_bytes + ROUND, dtype=torch.uint8)
        self._next = -self._arena.data_ptr() % ROUND
        self._free: defaultdict[str, list[Block]] = defaultdict(list)
        self._addresses: list[int] = []
        self._blocks: list[Block] = []
        self._pinned: list[Block] = []
        #: Freed blocks that wait for work of other streams: (condition, block).
        self._held: list[tuple[Callable[[], bool], Block]] = []
        self.live = self.peak = 0

    def take(self, nbytes: int, owner: str) -> Block:
        """Return a block for the stream ``owner``."""
        for held in [held for held in self._held if held[0]()]:
            self._held.remove(held)
            self._free[held[1].name].append(held[1])
        size = max(1, -(-nbytes // ROUND)) * ROUND
        blocks = self._free[owner]
        for at in reversed(range(len(blocks))):
            if size <= blocks[at].bytes <= 2 * size:
                block = blocks.pop(at)
                break
        else:
            if self._next + size > self._arena.numel():
                raise Fault(
                    "memory", f"rank {self._rank} has no {nbytes} bytes left of {self._arena.numel()}, at {here()}"
                )
            block = Block(self._arena[self._next : self._next + size], owner)
            block.memory.fill_(POISON)
            self._next += size
            self._addresses.append(block.address)
            self._blocks.append(block)
        block.uses += 1
        block.allocated, block.freed = here(), None
        self.live += block.bytes
        self.peak = max(self.peak, self.live)
        return block

    def give_back(self, block: Block, until: Callable[[], bool]) -> None:
        """Take a freed block, at once or when ``until`` is true."""
        block.freed = here()
        self.live -= block.bytes
        if until():
            self._free[block.name].append(block)
        else:
            self._held.append((until, block))

    def used(self) -> torch.Tensor:
        """Return the memory that was ever handed out."""
        return self._arena[: self._next]

    def find(self, address: int) -> Block | None:
        """Return the block of an address."""
        at = bisect.bisect_right(self._addresses, address) - 1
        for block in (*self._blocks[max(at, 0) : at + 1], *self._pinned):
            if block.address <= address < block.address + block.bytes:
                return block
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return poisoned host memory of its own."""
        block = Block(torch.full((max(1, nbytes),), POISON, dtype=torch.uint8), "host")
        block.allocated = here()
        self._pinned.append(block)
        return block.memory


def spans(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the ranges of addresses of a strided tensor's elements."""
    if not tensor.numel():
        return []
    size, begin = tensor.element_size(), tensor.data_ptr()
    if tensor.is_contiguous():
        return [(begin, begin + tensor.numel() * size)]
    run, outer = 1, []
    for length, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if length == 1 or stride == 0:
            continue
        if stride == run and not outer:
            run *= length
        else:
            outer.append([at * stride for at in range(length)])
    if math.prod(map(len, outer)) > MOST_RUNS:
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        return [(begin, begin + (last + 1) * size)]
    starts = sorted({sum(steps) for steps in itertools.product(*outer)})
    return list(_joined((begin + at * size, begin + (at + run) * size) for at in starts))


def _joined(ranges: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join ranges, in order of their begins, that touch or overlap."""
    begin, end = next(ranges)
    for more_begin, more_end in ranges:
        if more_begin > end:
            yield begin, end
            begin, end = more_begin, more_end
        end = max(end, more_end)
    yield begin, end
