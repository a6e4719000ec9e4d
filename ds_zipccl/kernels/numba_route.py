"""The numba route: compiled on the machine by numba, no C++ compiler needed."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from ds_zipccl.frame import FrameError

#: dtype -> exponent bits, mantissa bits, numpy word
_FLOATS = {
    torch.bfloat16: (8, 7, np.uint16),
    torch.float16: (5, 10, np.uint16),
    torch.float32: (8, 23, np.uint32),
}


class NumbaRoute:
    """Route over :mod:`ds_zipccl.kernels.reference`; see :class:`ds_zipccl.kernels.Route`."""

    def __init__(self, reference: ModuleType) -> None:
        self._reference = reference

    def encode(self, words: torch.Tensor, block: int, out: torch.Tensor) -> int:
        exponent, mantissa, word = _FLOATS[words.dtype]
        return int(self._reference.encode(_array(words, word), exponent, mantissa, block, out.numpy()))

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        exponent, mantissa, word = _FLOATS[words.dtype]
        status = self._reference.decode(payload.numpy(), exponent, mantissa, block, _array(words, word))
        if status:
            raise FrameError(status, "the payload contradicts itself")


def _array(words: torch.Tensor, word: type) -> np.ndarray:
    return words.detach().view(torch.uint8).numpy().view(word)


def load() -> NumbaRoute:
    """The route; imports numba (about a second).

    Raises:
        ImportError: numba is not installed.
    """
    from ds_zipccl.kernels import reference

    return NumbaRoute(reference)
