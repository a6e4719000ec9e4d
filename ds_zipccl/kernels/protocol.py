"""The functions of a kernel backend: words to payload bytes and back (FORMAT.md section 2), and those for lossy codecs.

Row calls see a flat tensor as rows of ``width`` elements: row r begins at element ``head + r * width``. ``head`` is 0 where a call has no
such argument. Lists of rows are contiguous int32 tensors on the device of the words. Callers prove that every row lies in the words;
a backend does not examine rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_zipccl.frame import CHUNK_BLOCKS, pad16
from ds_zipccl.lossy import Int, TacoFp8

#: The codecs with scaled payloads (FORMAT.md 2.10).
ScaledCodec = TacoFp8 | Int


def scale_dtype(codec: ScaledCodec) -> torch.dtype:
    return torch.int16 if isinstance(codec, Int) else torch.uint8


def group_bytes(codec: ScaledCodec) -> int:
    """Bytes of the codes of a group."""
    return codec.group * codec.bits // 8


def raw_bound(words: int, itemsize: int, table: int, block: int) -> int:
    """Bytes of a payload of RAW blocks, with all paddings: no payload of so many words has more.

    Args:
        words: their number.
        itemsize: bytes of a word.
        table: bytes of a block's entry in the table of its chunk.
        block: words of a block.
    """
    full, rest = divmod(words, block)
    bodies = full * block * itemsize + pad16(rest * itemsize)
    return index_and_tables(words, table, block) + bodies + 16 * -(-words // (block * CHUNK_BLOCKS))


def index_and_tables(words: int, table: int, block: int) -> int:
    """Bytes of the index and the tables of a payload; arguments as for :func:`raw_bound`."""
    chunk = block * CHUNK_BLOCKS
    full, rest = divmod(words, chunk)
    return pad16(4 * -(-words // chunk)) + full * pad16(table * CHUNK_BLOCKS) + pad16(table * -(-rest // block))


class KernelBackend(Protocol):
    """Kernels for tensors of one device type.

    Every call blocks and releases the interpreter lock while it works. Words are flat contiguous tensors of the backend's device,
    payloads flat uint8 tensors of that device. A decoder raises FrameError where a payload contradicts itself; its output is then
    undefined.
    """

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        """Encode each segment (at least one, all of one dtype) with ``code``, "cascade" or "wide", into its place in ``outs``
        (``payload_bound`` bytes each), and return the bytes of each payload."""

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        """Decode ``payload`` into ``words``; with ``adds``, as all decoders have it, add the words of that dtype to ``words``, which are
        of the same dtype (each sum is rounded to it) or float32."""

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``words`` to ``sums``, with the dtypes of :meth:`decode`.

        On a CPU the calling thread, or threads that it starts, do the additions: they flush denormals where the calling thread does.
        """

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Return both halves of the hash of ``data`` (uint8; FORMAT.md section 5) with a key of two u64."""


class DeltaBackend(KernelBackend, Protocol):
    """A kernel backend with the functions of differences (:func:`ds_zipccl.kernels.delta_route`)."""

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        """Encode ``words`` against ``base``, of the same dtype (bfloat16, float16, float32 or uint8) and size, into ``out``
        (``payload_bound`` bytes), and return the payload's bytes."""

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """Decode ``payload`` against ``base`` into ``words``, which may be the base's memory or apart from it."""


class RowBackend(KernelBackend, Protocol):
    """A kernel backend with the functions of row frames (:func:`ds_zipccl.kernels.row_route`)."""

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        """Find the rows of a segment that equal earlier rows, byte for byte.

        Calls of one segment come in the order of the rows, none left out. For each of ``len(sources)`` rows from ``first`` on, this
        writes to ``sources`` the number of the first row of the segment with the same bytes, which is its own number where there is none.
        All backends find the same.

        Args:
            data: the segment's bytes, from its first row on; rows behind those of this call are not read.
            row_bytes: bytes of a row, at least 1.
            table: int32, contiguous, ``2^k`` elements, at least twice the rows of the segment; zeros before the first call of a segment.
                Its contents belong to the backend.

        Returns:
            How many of the rows are repeats.
        """

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return for each i the factor, float32, by which row ``rows[i]`` (b) is best predicted from row ``sources[i]`` (a).

        It is the sum of a b, divided by the sum of a a, rounded to float32; 0 where that is not a finite normal number. Both sums are of
        float64 numbers: lane j of 32 adds the products of elements j, j + 32, ... in order, from 0.0 on; then the lanes are added in order
        from lane 0 on. No product is fused with an addition. Words are bfloat16, float16 or float32.
        """

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the prediction (FORMAT.md 2.6) from row ``sources[i]`` by ``factors[i]`` to row i of ``out``, for each i.

        ``factors`` are float32, finite and normal. ``out`` is flat, of the words' dtype, bfloat16, float16 or float32, of
        ``len(sources) * width`` elements, apart from ``words``.
        """

    def encode_rows(
        self,
        words: torch.Tensor,
        width: int,
        head: int,
        rows: torch.Tensor,
        code: str,
        block: int,
        out: torch.Tensor,
        mantissa: int = 0,
    ) -> int:
        """Encode the literals of ``words``: the first ``head`` elements, the rows ``rows`` (ascending), and the elements behind the last
        whole row. Otherwise as :meth:`encode` of one segment of these elements; with ``mantissa`` as :meth:`LossyBackend.encode_rounded`.
        """

    def decode_rows(
        self,
        payload: torch.Tensor,
        block: int,
        words: torch.Tensor,
        width: int,
        head: int,
        rows: torch.Tensor,
        rounded: bool = False,
    ) -> None:
        """Decode a payload of :meth:`encode_rows` to the places of its elements in ``words``; no other row is written. ``rounded``: the
        payload is one of :meth:`LossyBackend.decode_rounded`."""

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy row ``sources[i]`` of ``words`` (any dtype of a frame) to row ``rows[i]``, for each i. No source is one of ``rows``."""


class LossyBackend(Protocol):
    """Lossy kernels for tensors of one device type; a backend may have some of them (:func:`ds_zipccl.kernels.lossy_route`).

    Words are bfloat16, float16 or float32, and all backends write the same bytes. Otherwise as :class:`KernelBackend` says.
    """

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        """Write ``words``, rounded to ``mantissa`` bits, 1 to 6 (FORMAT.md 2.9), to ``out``, which may be ``words``."""

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        """Encode each segment, rounded to ``mantissa`` bits, with the code "cascade" into its place in ``outs`` (``payload_bound`` bytes
        each): as a rounded payload, or of float32 as an exponent payload.

        Returns:
            For each segment the bytes of its payload, and the bytes that the exponent payload of the rounded words has.
        """

    def decode_rounded(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None
    ) -> None:
        """Decode a rounded payload of bfloat16 or float16 as :meth:`KernelBackend.decode` does."""

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

    def decode_scaled(
        self,
        scales: torch.Tensor,
        codes: torch.Tensor,
        codec: ScaledCodec,
        words: torch.Tensor,
        adds: torch.dtype | None = None,
    ) -> None:
        """Write the values to ``words``, or add them as :meth:`KernelBackend.decode` does. The caller has proven the scales, their number,
        and the number of codes, not the codes."""

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        """Write the decoded values of ``words`` to ``out``, which may be ``words``; a group that stays as it is, as it is."""

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        """Write the words that :meth:`decode_zfp` gives for the codes of ``words`` to ``out``, which may be ``words``. Of a block of four
        words among which is a NaN or an infinity, the words themselves are written."""

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        """Encode ``words`` with ``rate`` bits each, 3 to 32 (FORMAT.md 2.11), to ``codes`` (uint8, as many bytes as the codes have).

        Returns:
            Whether all words are finite; if not, ``codes`` are undefined.
        """

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        """Decode ``codes``, as many bytes as ``words`` need, as :meth:`KernelBackend.decode` does. Every content of the codes has words."""

    def multiply(self, p: torch.Tensor, q: torch.Tensor, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        """Write the product of ``p`` with the transpose of ``q`` (FORMAT.md 2.12) to ``words``, flat, or add it as
        :meth:`KernelBackend.decode` does.

        Args:
            p, q: float32, contiguous, of n rows and of m rows, with as many columns. The caller has proven that no sum is beyond float32.
        """

    def orthonormalize(self, columns: torch.Tensor) -> None:
        """Make the columns of ``columns``, contiguous float32 of any shape [n, r], orthonormal, in place.

        Modified Gram-Schmidt in float64: the columns in front are taken out of a column, one after the other, and then once more; so the
        columns are orthogonal even where they were almost dependent. A column is then divided by its length, or becomes zeros if 2^-30 of
        its first length or less is left. A scalar product has 16 sums, each of the elements i, i + 16, i + 32 and so on; then sums that
        are 8, 4, 2 and 1 apart are added.
        """
