"""The numba backend: numba compiles the reference on the machine, without a C++ compiler. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.self_test import proven
from ds_zipccl.kernels.sums import add

#: dtype -> exponent bits, mantissa bits, numpy word
WORDS = {
    torch.bfloat16: (8, 7, np.uint16),
    torch.float16: (5, 10, np.uint16),
    torch.float32: (8, 23, np.uint32),
    torch.float8_e4m3fn: (4, 3, np.uint8),
    torch.float8_e5m2: (5, 2, np.uint8),
}


def array(words: torch.Tensor) -> np.ndarray:
    """The words of a flat tensor, in the same memory."""
    return words.detach().view(torch.uint8).numpy().view(WORDS[words.dtype][2])


def _form(dtype: torch.dtype) -> tuple[bool, int, int]:
    """Whether tables have the trim of each block; exponent bits, mantissa bits."""
    exponent, mantissa, _ = WORDS[dtype]
    return dtype == torch.float32, exponent, mantissa


class NumbaBackend:
    """Kernel backend over the reference kernels; see :class:`ds_zipccl.kernels.KernelBackend`. It has no differences, row
    frames and lossy codecs."""

    def __init__(self, encoder: ModuleType, decoder: ModuleType, hasher: ModuleType) -> None:
        self._encoder, self._decoder, self._hasher = encoder, decoder, hasher
        self._modes = {"cascade": encoder.CASCADE, "wide": encoder.WIDE}

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        form = self._modes[code], *_form(segments[0].dtype), block
        return [
            int(self._encoder.encode(array(words), *form, out.numpy()))
            for words, out in zip(segments, outs, strict=True)
        ]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        values = words if adds is None else tensors.empty(words.numel(), adds)
        status = self._decoder.decode(payload.numpy(), *_form(values.dtype), block, array(values))
        if status:
            raise FrameError(status, "the payload contradicts itself")
        if values is not words:
            self.add(values, words)

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        first, second = self._hasher.region_hash(data.numpy(), *map(np.uint64, key))
        return int(first), int(second)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        add(words, sums)


def load() -> NumbaBackend:
    """Return the backend; imports numba (about a second), and compiles its kernels (a minute) unless the cache has them.

    Raises:
        ImportError: numba is not installed.
        SelfTestError: the kernels are wrong on this machine.
    """
    from ds_zipccl.kernels.numba import decode, encode, layout, region_hash

    return proven(lambda: NumbaBackend(encode, decode, region_hash), "numba", layout.identity())
