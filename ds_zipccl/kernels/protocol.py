"""The functions that a route has: words to payload bytes and back (FORMAT.md section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Route(Protocol):
    """Kernels for tensors of one device type.

    Every call blocks and releases the interpreter lock while it works. Words are flat contiguous tensors of the route's device,
    payloads flat uint8 tensors of that device. A decoder raises FrameError where a payload contradicts itself; its output is then
    undefined.
    """

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        """Encode each segment (at least one, all of one dtype) with ``code``, "cascade" or "wide", into its place in ``outs``
        (``payload_bound`` bytes each), and return the bytes of each payload."""
        ...

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """Decode ``payload`` into ``words``."""
        ...

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the words of ``dtype`` in ``payload`` to ``sums``, of the same dtype (each sum is rounded to it) or float32."""
        ...

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``words`` to ``sums``, with the dtypes of :meth:`decode_add`.

        On a CPU the calling thread, or threads that it starts, do the additions: they flush denormals where the calling thread does.
        """
        ...

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        """Encode ``words`` against ``base``, of the same dtype (bfloat16, float16 or float32) and size, into ``out``
        (``payload_bound`` bytes), and return the payload's bytes."""
        ...

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """Decode ``payload`` against ``base`` into ``words``, which may be the base's memory or apart from it."""
        ...

    def region_hash(self, data: torch.Tensor) -> tuple[int, int]:
        """Return both halves of the hash of ``data`` (uint8; FORMAT.md section 5)."""
        ...
