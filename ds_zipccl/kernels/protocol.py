"""The functions that a route has: words to payload bytes and back (FORMAT.md section 2).

Row calls see a flat tensor as rows of ``width`` elements: row r begins at element ``head + r * width``. ``head`` is 0 where a call has no
such argument. Lists of rows are contiguous int32 tensors on the device of the words. Callers prove that every row lies in the words;
a route does not examine rows again.
"""

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

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Return both halves of the hash of ``data`` (uint8; FORMAT.md section 5) with a key of two u64."""
        ...


class RowRoute(Route, Protocol):
    """A route with the functions of row frames (:func:`ds_zipccl.kernels.row_route`)."""

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        """Find the rows of a segment that equal earlier rows, byte for byte.

        Calls of one segment come in the order of the rows, none left out. For each of ``len(sources)`` rows from ``first`` on, this
        writes to ``sources`` the number of the first row of the segment with the same bytes, which is its own number where there is none.
        All routes find the same.

        Args:
            data: the segment's bytes, from its first row on; rows behind those of this call are not read.
            row_bytes: bytes of a row, at least 1.
            table: int32, contiguous, ``2^k`` elements, at least twice the rows of the segment; zeros before the first call of a segment.
                Its contents belong to the route.

        Returns:
            How many of the rows are repeats.
        """
        ...

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return for each i the factor, float32, by which row ``rows[i]`` (b) is best predicted from row ``sources[i]`` (a).

        It is the sum of a b, divided by the sum of a a, rounded to float32; 0 where that is not a finite normal number. Both sums are of
        float64 numbers: lane j of 32 adds the products of elements j, j + 32, ... in order, from 0.0 on; then the lanes are added in order
        from lane 0 on. No product is fused with an addition. Words are bfloat16, float16 or float32.
        """
        ...

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the prediction (FORMAT.md 2.6) from row ``sources[i]`` by ``factors[i]`` to row i of ``out``, for each i.

        ``factors`` are float32, finite and normal. ``out`` is flat, of the words' dtype, bfloat16, float16 or float32, of
        ``len(sources) * width`` elements, apart from ``words``.
        """
        ...

    def encode_rows(
        self,
        words: torch.Tensor,
        width: int,
        head: int,
        rows: torch.Tensor,
        code: str,
        block: int,
        out: torch.Tensor,
    ) -> int:
        """Encode the literals of ``words``: the first ``head`` elements, the rows ``rows`` (ascending), and the elements behind the last
        whole row. Otherwise as :meth:`encode` of one segment of these elements."""
        ...

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        """Decode a payload of :meth:`encode_rows` to the places of its elements in ``words``; no other row is written."""
        ...

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy row ``sources[i]`` of ``words`` (any dtype of a frame) to row ``rows[i]``, for each i. No source is one of ``rows``."""
        ...
