"""Matrices that go as two factors: the values that arrive are the product of the factors.

The factors depend on earlier messages, so that the sender keeps a state. The state changes once a message, whatever way the message takes:
a :class:`Factoring` is asked once, after admission, and never for a message that goes exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ds_zipccl.codecs.lowrank import compress_factors, compress_factors_bound
from ds_zipccl.comm.buffer_pool import PooledBuffers


class Factored(NamedTuple):
    """A matrix as factors. ``p``: [n, r], ``q``: [m, r], float32, contiguous. ``values``: their product, with the shape and dtype of the
    tensor that is sent, contiguous."""

    p: torch.Tensor
    q: torch.Tensor
    values: torch.Tensor

    def frame(self, block: int, route: str, buffers: PooledBuffers) -> torch.Tensor:
        """Return a frame that decodes to the values, in memory of ``buffers``; blocks."""
        dtype = self.values.dtype
        bound = compress_factors_bound(len(self.p), len(self.q), self.q.shape[1], dtype, block=block)
        return compress_factors(
            self.p, self.q, dtype, out=buffers.take(bound), block=block, checksum=False, route=route
        )


class Factoring(ABC):
    """Makes factors of the tensors of one link, in the place of a codec. Its text is that of the codec, for the counters."""

    @abstractmethod
    def factored(self, tensor: torch.Tensor, op: str, route: str) -> Factored | None:
        """Return the factors of ``tensor``, which is about to be sent, and change the state; None where the tensor goes exact. Blocks.

        Args:
            op: the name of the operation, for the counters.
            route: kernels to use.
        """
