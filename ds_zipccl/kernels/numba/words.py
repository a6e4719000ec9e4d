"""Tensors as the arrays of the numba kernels."""

from __future__ import annotations

import numpy as np
import torch

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
