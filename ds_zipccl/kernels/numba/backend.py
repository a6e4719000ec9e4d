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

#: dtype -> exponent bits, mantissa bits, numpy word; uint8 stands for the bytes of any other dtype
WORDS = {
    torch.bfloat16: (8, 7, np.uint16),
    torch.float16: (5, 10, np.uint16),
    torch.float32: (8, 23, np.uint32),
    torch.float8_e4m3fn: (4, 3, np.uint8),
    torch.float8_e5m2: (5, 2, np.uint8),
    torch.uint8: (0, 0, np.uint8),
}


def array(words: torch.Tensor) -> np.ndarray:
    """The words of a flat tensor, in the same memory."""
    return words.detach().view(torch.uint8).numpy().view(WORDS[words.dtype][2])


class NumbaBackend:
    """Kernel backend over the reference kernels; see :class:`ds_zipccl.kernels.KernelBackend`. It has no row frames and no lossy codecs."""

    def __init__(self, encoder: ModuleType, decoder: ModuleType, hasher: ModuleType) -> None:
        self._encoder, self._decoder, self._hasher = encoder, decoder, hasher
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

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        values = words if adds is None else tensors.empty(words.numel(), adds)
        self.decode_delta(payload, values[:0], block, values)
        if values is not words:
            self.add(values, words)

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        trims, bits = words.dtype == torch.float32, WORDS[words.dtype][:2]
        status = self._decoder.decode(payload.numpy(), array(base), trims, *bits, block, array(words))
        if status:
            raise FrameError(status, "the payload contradicts itself")

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
