"""Statistics of the exponent field: histograms, entropies, and the ratio that an entropy allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl.frame import CHUNK_BLOCKS

#: Block modes by number (FORMAT.md section 2).
MODES = ("FILL", "RAW", "CASCADE", "SPARSE", "WIDE")
_TAIL_BITS = 13
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE_BLOCKS = 4096  # blocks counted together; bounds the extra memory


@dataclass(frozen=True)
class Fields:
    """Bits of the fields of a float dtype: ``exponent`` and ``mantissa``; the sign has one bit."""

    exponent: int
    mantissa: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Fields:
        """Return the fields of a dtype.

        Raises:
            TypeError: the dtype is not a real float.
        """
        info = torch.finfo(dtype)
        mantissa = round(-np.log2(info.eps))
        return cls(info.bits - 1 - mantissa, mantissa)

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    def ratio(self, entropy: float) -> float:
        """Ratio of a code that sends sign and mantissa whole and each exponent in ``entropy`` bits."""
        return self.bits / (1 + self.mantissa + entropy)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense CPU tensor as integers of their size, flat; a copy only if the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_WORDS[tensor.dtype.itemsize])


def differing(got: torch.Tensor, wanted: torch.Tensor, *, any_nan: bool = False) -> int:
    """Number of elements whose bits differ, in tensors of equal dtype and size. ``any_nan``: NaNs equal each other."""
    unequal = words(got) != words(wanted)
    if any_nan:
        unequal &= ~(got.isnan() & wanted.isnan()).view(-1)
    return int(torch.count_nonzero(unequal))


def exponent_blocks(tensor: torch.Tensor, block: int) -> Iterator[np.ndarray]:
    """Yield exponent fields as int64 arrays of shape (blocks, ``block``); a last, shorter block has shape (1, rest)."""
    fields = Fields.of(tensor.dtype)
    flat = words(tensor).numpy()
    whole = len(flat) // block * block
    step = _SLICE_BLOCKS * block
    cuts = [(at, min(at + step, whole), block) for at in range(0, whole, step)]
    if whole < len(flat):
        cuts.append((whole, len(flat), len(flat) - whole))
    for start, end, size in cuts:
        yield (flat[start:end].astype(np.int64) >> fields.mantissa & (1 << fields.exponent) - 1).reshape(-1, size)


def entropy(counts: np.ndarray) -> np.ndarray:
    """Entropy, in bits per symbol, of the histograms in the last dimension."""
    total = counts.sum(axis=-1, keepdims=True)
    shares = counts / np.maximum(total, 1)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    bits: np.ndarray = -(shares * logs).sum(axis=-1) + 0.0  # + 0.0 turns -0.0 into 0.0
    return bits


@dataclass(frozen=True)
class Exponents:
    """``counts``: int64 histogram of the exponent field. ``within_blocks``: mean entropy within blocks, in bits."""

    counts: np.ndarray
    within_blocks: float

    @property
    def entropy(self) -> float:
        """Entropy of the whole tensor in bits; larger than ``within_blocks`` if the scales of blocks differ."""
        return float(entropy(self.counts))


def exponents(tensor: torch.Tensor, block: int = 1024) -> Exponents:
    """Return the statistics of a float CPU tensor; the entropy of an empty tensor is 0.

    A few hundred samples have less entropy than their distribution. Each block therefore gets the Miller-Madow
    correction, (kinds - 1) / 2 nats per block; without it the entropy of a Gaussian is 0.02 bit too small.
    """
    values = 1 << Fields.of(tensor.dtype).exponent
    counts = np.zeros(values, dtype=np.int64)
    bits = 0.0
    for part in exponent_blocks(tensor, block):
        cells = part + values * np.arange(len(part))[:, None]
        histograms = np.bincount(cells.reshape(-1), minlength=values * len(part)).reshape(-1, values)
        counts += histograms.sum(axis=0)
        kinds = np.count_nonzero(histograms, axis=-1)
        bits += float(entropy(histograms).sum()) * part.shape[1] + float((kinds - 1).sum()) / 2 / math.log(2)
    return Exponents(counts, bits / max(1, tensor.numel()))


def block_modes(frame: torch.Tensor) -> np.ndarray:
    """Modes (uint8) of the blocks of an exponent frame (FORMAT.md section 2, table of a chunk)."""
    header = framing.parse(frame)
    payload = frame[header.payload_at : header.frame_bytes].numpy()
    blocks = -(-header.numel // header.block)
    chunks = -(-blocks // CHUNK_BLOCKS)
    modes = []
    for chunk, at in enumerate(payload[: 4 * chunks].view("<u4").astype(np.int64) * framing.ALIGN):
        count = min(CHUNK_BLOCKS, blocks - chunk * CHUNK_BLOCKS)
        modes.append(payload[at + count : at + 3 * count].view(np.uint8).reshape(-1, 2)[:, 1] >> _TAIL_BITS - 8)
    return np.concatenate(modes)
