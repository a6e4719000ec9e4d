"""Memory for frames that is used again: fresh memory costs more to touch than a frame costs to make."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ds_zipccl import tensors

#: Free memory kept for later, per process (seed, bytes: the frames of two all-reduces of 64 MiB).
KEEP_BYTES = 256 << 20
#: Blocks smaller than this are not worth keeping (seed, bytes): the allocator keeps those itself.
_SMALLEST = 64 << 10


class BufferPool:
    """Free blocks of bytes, the last one returned first; beyond ``keep`` bytes the longest unused ones go."""

    def __init__(self, keep: int = KEEP_BYTES) -> None:
        self._keep = keep
        self._free: deque[torch.Tensor] = deque()
        self._free_bytes = 0
        self._used_bytes = 0
        self._lock = threading.RLock()  # PooledBuffers may be collected as garbage, and come here, at any allocation
        self.peak = 0  # most bytes that were in use at a time

    def take(self, nbytes: int) -> torch.Tensor:
        """A block of at least ``nbytes``, uint8, contents undefined. To be called under inference_mode."""
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
        """A block is in use no more, and not to be used again."""
        with self._lock:
            self._used_bytes -= block.numel()

    def give(self, block: torch.Tensor) -> None:
        """Return a block that nobody uses any more."""
        with self._lock:
            self._used_bytes -= block.numel()
            if block.numel() < _SMALLEST:
                return
            self._free.append(block)
            self._free_bytes += block.numel()
            while self._free_bytes > self._keep:
                self._free_bytes -= self._free.popleft().numel()


def _rounded(nbytes: int) -> int:
    """Up to the next of eight sizes per power of two, so that messages of nearly one size share blocks."""
    step = 1 << max(6, nbytes.bit_length() - 4)
    return (nbytes + step - 1) // step * step


#: The blocks of this process.
POOL = BufferPool()


class PooledBuffers:
    """Memory for the frames of one operation. Dropping it unreleased is safe: the blocks are then not used again."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """1-D uint8 tensor, contents undefined."""
        self._blocks.append(POOL.take(nbytes))
        return self._blocks[-1][:nbytes]

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1-D tensor of ``numel`` elements on ``device``, contents undefined."""
        if device.type != "cpu":  # torch keeps the memory of other devices itself
            return tensors.empty(numel, dtype, device)
        return self.take(numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Give everything back; tensors taken from here must not be used any more."""
        while self._blocks:
            POOL.give(self._blocks.pop())

    def __del__(self) -> None:
        while self._blocks:
            POOL.lose(self._blocks.pop())
