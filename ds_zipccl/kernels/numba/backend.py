"""The numba backend: numba compiles the reference on the machine, without a C++ compiler. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import row_moves
from ds_zipccl.kernels.numba.lossy import NumbaLossy
from ds_zipccl.kernels.numba.lowrank_backend import NumbaLowRank
from ds_zipccl.kernels.numba.words import WORDS, array
from ds_zipccl.kernels.sums import add


class NumbaBackend(NumbaLossy, NumbaLowRank):
    """Kernel backend over the reference kernels; see :class:`ds_zipccl.kernels.KernelBackend`."""

    def __init__(self, encoder: ModuleType, decoder: ModuleType, hasher: ModuleType, rows: ModuleType) -> None:
        self._encoder, self._decoder, self._hasher, self._rows = encoder, decoder, hasher, rows
        self._modes = {"cascade": encoder.CASCADE, "wide": encoder.WIDE}

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        return [
            self._encode(words, words[:0], self._modes[code], block, out)
            for words, out in zip(segments, outs, strict=True)
        ]

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._encode(words, base, self._modes["cascade"], block, out)

    def _encode(self, words: torch.Tensor, base: torch.Tensor, mode: int, block: int, out: torch.Tensor) -> int:
        trims, bits = words.dtype == torch.float32, WORDS[words.dtype][:2]
        return int(self._encoder.encode(array(words), array(base), mode, trims, *bits, block, out.numpy()))

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self.decode_delta(payload, words[:0], block, words)

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        trims, bits = words.dtype == torch.float32, WORDS[words.dtype][:2]
        status = self._decoder.decode(payload.numpy(), array(base), trims, *bits, block, array(words))
        if status:
            raise FrameError(status, "the payload contradicts itself")

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        first, second = self._hasher.region_hash(data.numpy(), *map(np.uint64, key))
        return int(first), int(second)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        values = tensors.empty(sums.numel(), dtype)
        self.decode(payload, block, values)
        self.add(values, sums)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        add(words, sums)

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        return int(self._rows.find_rows(data.numpy(), row_bytes, first, sources.numpy(), table.numpy()))

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        factors = tensors.empty(len(rows), torch.float32)
        self._rows.row_factors(words.float().numpy(), width, rows.numpy(), sources.numpy(), factors.numpy())
        return factors

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        exponent, mantissa, _ = WORDS[words.dtype]
        bits = factors.view(torch.uint8).numpy().view(np.uint32)
        self._rows.predict_rows(array(words), width, sources.numpy(), bits, exponent, mantissa, array(out))

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
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype)
        row_moves.gather(words, width, head, rows, literals)
        return self.encode([literals], code, block, [out])[0]

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        literals = tensors.empty(row_moves.literal_numel(words, width, head, rows), words.dtype)
        self.decode(payload, block, literals)
        row_moves.spread(literals, words, width, head, rows)

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        matrix = row_moves.matrix(words, width)
        matrix.index_copy_(0, rows.long(), matrix.index_select(0, sources))


def load() -> NumbaBackend:
    """Return the backend; imports numba (about a second).

    Raises:
        ImportError: numba is not installed.
    """
    from ds_zipccl.kernels.numba import decode, encode, region_hash, rows

    return NumbaBackend(encode, decode, region_hash, rows)
