"""A pool of memory for frames: touching fresh memory costs more than making a frame."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ds_zipccl import tensors

#: Free memory kept for later, per process (seed, bytes: the frames of two all-reduces of 64 MiB).
KEEP_BYTES = 256 << 20
#: Smallest block that the pool keeps (seed, bytes). The allocator keeps smaller blocks itself.
_SMALLEST = 64 << 10


class BufferPool:
    """Free blocks of bytes; the block returned last is taken first. Beyond ``keep`` bytes, the blocks unused for longest are freed."""

    def __init__(self, keep: int = KEEP_BYTES) -> None:
        self._keep = keep
        self._free: deque[torch.Tensor] = deque()
        self._free_bytes = 0
        self._used_bytes = 0
        self._lock = threading.RLock()  # any allocation may collect PooledBuffers as garbage and enter the pool
        self.peak = 0  # most bytes in use at a time

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a block of at least ``nbytes``, uint8, contents undefined. The caller is in inference mode."""
        size = _rounded(nbytes)
        with self._lock:
            self._used_bytes += size
            self.peak = max(self.peak, self._used_bytes)
            for at in range(len(self._free) - 1, -1, -1):
                if self._free[at].numel() == size:
                    block = self._free[at]
                    del self._free[at]
                    self._free_bytes -= size
                    return block
        return tensors.empty(size, torch.uint8)

    def lose(self, block: torch.Tensor) -> None:
        """Count a block as no longer in use; the pool does not use the block again."""
        with self._lock:
            self._used_bytes -= block.numel()

    def give(self, block: torch.Tensor) -> None:
        """Give back a block that has no user any more."""
        with self._lock:
            self._used_bytes -= block.numel()
            if block.numel() < _SMALLEST:
                return
            self._free.append(block)
            self._free_bytes += block.numel()
            while self._free_bytes > self._keep:
                self._free_bytes -= self._free.popleft().numel()


def _rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to one of eight sizes per power of two, so that messages of similar size share blocks."""
    step = 1 << max(6, nbytes.bit_length() - 4)
    return (nbytes + step - 1) // step * step


#: The blocks of this process.
POOL = BufferPool()


class PooledBuffers:
    """Memory for the frames of one operation. Dropping unreleased buffers is safe: the pool then does not use their blocks again."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a 1-D uint8 tensor of ``nbytes``, contents undefined."""
        self._blocks.append(POOL.take(nbytes))
        return self._blocks[-1][:nbytes]

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device = tensors.CPU) -> torch.Tensor:
        """Return a 1-D tensor of ``numel`` elements on ``device``, contents undefined."""
        if device.type != "cpu":  # torch pools the memory of other devices itself
            return tensors.empty(numel, dtype, device)
        return self.take(numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Give all blocks back; tensors taken from these buffers must not be used any more."""
        while self._blocks:
            POOL.give(self._blocks.pop())

    def __del__(self) -> None:
        while self._blocks:
            POOL.lose(self._blocks.pop())
