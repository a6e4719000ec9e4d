"""Rounded literals of row frames by backends whose kernels take words side by side; see :class:`ds_zipccl.kernels.LossyBackend`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels import row_moves


class RoundedRows(abc.ABC):
    """The row functions of the codec ``round``, over those for flat words: literals are copied to one place first, or from it at last."""

    @abc.abstractmethod
    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]: ...

    @abc.abstractmethod
    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None: ...

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
        """See :meth:`ds_zipccl.kernels.LossyBackend.encode_rounded_rows`."""
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        row_moves.gather(words, width, head, rows, literals)
        return self.encode_rounded([literals], mantissa, block, [out])[0][0]

    def decode_rounded_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        """See :meth:`ds_zipccl.kernels.LossyBackend.decode_rounded_rows`."""
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype, words.device)
        self.decode_rounded(payload, block, literals)
        row_moves.spread(literals, words, width, head, rows)
