"""The functions that a route has for lossy codecs, beside those of :class:`ds_zipccl.kernels.Route`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_zipccl.lossy import Int, TacoFp8

#: The codecs with scaled payloads (FORMAT.md 2.10).
ScaledCodec = TacoFp8 | Int


class LossyRoute(Protocol):
    """Lossy kernels for tensors of one device type; a route may have some of them (:func:`ds_zipccl.kernels.lossy_route`).

    Words are bfloat16, float16 or float32, and all routes write the same bytes. Otherwise as :class:`ds_zipccl.kernels.Route` says.
    """

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        """Write ``words``, rounded to ``mantissa`` bits, 1 to 6 (FORMAT.md 2.9), to ``out``, which may be ``words``."""
        ...

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        """Encode each segment, rounded to ``mantissa`` bits, with the code "cascade" into its place in ``outs`` (``payload_bound`` bytes
        each): as a rounded payload, or of float32 as an exponent payload.

        Returns:
            For each segment the bytes of its payload, and the bytes that the exponent payload of the rounded words has.
        """
        ...

    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """Decode a rounded payload into ``words``, bfloat16 or float16."""
        ...

    def decode_rounded_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the words of ``dtype`` in a rounded payload to ``sums``, as :meth:`ds_zipccl.kernels.Route.decode_add` does."""
        ...

    def encode_rounded_rows(
        self,
        words: torch.Tensor,
        width: int,
        head: int,
        rows: torch.Tensor,
        mantissa: int,
        block: int,
        out: torch.Tensor,
    ) -> int:
        """Encode the literals of ``words``, as :meth:`ds_zipccl.kernels.Route.encode_rows` describes them, as :meth:`encode_rounded`
        does; return the bytes of the payload."""
        ...

    def decode_rounded_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        """Decode a rounded payload as :meth:`ds_zipccl.kernels.Route.decode_rows` does; ``words`` are bfloat16 or float16."""
        ...

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        """Write the scales and codes of ``words`` (FORMAT.md 2.10).

        Args:
            scales: one for each group, uint8 for ``TacoFp8`` and int16 for ``Int``.
            codes: uint8, room for the codes of all groups; those of groups with codes are written to the start.

        Returns:
            The number of groups with codes; None where a group stays as it is, and both outputs are undefined.
        """
        ...

    def decode_scaled(self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor) -> None:
        """Write the values to ``words``. The caller has proven the scales, their number, and the number of codes, not the codes."""
        ...

    def decode_scaled_add(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        """Add the words of ``dtype`` that :meth:`decode_scaled` gives to ``sums``, as :meth:`ds_zipccl.kernels.Route.add` does."""
        ...

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        """Write the decoded values of ``words`` to ``out``, which may be ``words``; a group that stays as it is, as it is."""
        ...

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        """Write the words that :meth:`decode_zfp` gives for the codes of ``words`` to ``out``, which may be ``words``. Of a block of four
        words among which is a NaN or an infinity, the words themselves are written."""
        ...

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        """Encode ``words`` with ``rate`` bits each, 3 to 32 (FORMAT.md 2.11), to ``codes`` (uint8, as many bytes as the codes have).

        Returns:
            Whether all words are finite; if not, ``codes`` are undefined.
        """
        ...

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        """Decode ``codes``, as many bytes as ``words`` need, into ``words``. Every content of the codes has words."""
        ...

    def decode_zfp_add(self, codes: torch.Tensor, rate: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the words of ``dtype`` in ``codes`` to ``sums``, as :meth:`ds_zipccl.kernels.Route.decode_add` does."""
        ...

    def multiply(self, p: torch.Tensor, q: torch.Tensor, words: torch.Tensor) -> None:
        """Write the product of ``p`` with the transpose of ``q`` (FORMAT.md 2.12) to ``words``, flat.

        Args:
            p, q: float32, contiguous, of n rows and of m rows, with as many columns. The caller has proven that no sum is beyond float32.
        """
        ...

    def multiply_add(self, p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the words of ``dtype`` that :meth:`multiply` gives to ``sums``, as :meth:`ds_zipccl.kernels.Route.decode_add` does."""
        ...

    def orthonormalize(self, columns: torch.Tensor) -> None:
        """Make the columns of ``columns``, contiguous float32 of any shape [n, r], orthonormal, in place.

        Modified Gram-Schmidt in float64: the columns in front are taken out of a column, one after the other, and then once more; so the
        columns are orthogonal even where they were almost dependent. A column is then divided by its length, or becomes zeros if 2^-30 of
        its first length or less is left. A scalar product has 16 sums, each of the elements i, i + 16, i + 32 and so on; then sums that
        are 8, 4, 2 and 1 apart are added.
        """
        ...
