"""Frames of messages of bytes that are words of a coded dtype, such as the ``uint8`` views by which DeepSpeed broadcasts parameters.

The sender looks at a sample and decides alone: the frame's header names the dtype. The receiver takes a frame of bytes, or one of another
coded dtype with the same bytes. No frame is larger than that of the bytes, so that receive buffers are those of bytes.
"""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import compress
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.frame import HEADER_BYTES, FrameError, parse
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import CODED_DTYPES

#: Bytes of a sample (seed: three compressions of it take some 50 us, a fragment of a megabyte takes ten times as long).
SAMPLE_BYTES = 32 << 10


class ByteCoder(FrameCoder):
    """The frames of messages of bytes: flat contiguous uint8 tensors in host memory, at any address and of any size."""

    def __init__(self, ctx: OpContext) -> None:
        super().__init__(ctx)
        self._raw = FrameCoder(ctx, raw=True)  # bytes that are no words say nothing about the next message

    def compress(
        self,
        flat: torch.Tensor,
        buffers: PooledBuffers,
        base: torch.Tensor | None = None,
        own_place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a frame of ``flat`` or of its words, in memory of ``buffers``. ``base`` and ``own_place`` are not used: bytes of a
        broadcast have no base, and are exact."""
        dtype = self._words_of(flat)
        if dtype is not None:
            frame = super().compress(_viewed(flat, dtype), buffers)
            if frame.nbytes <= HEADER_BYTES + flat.nbytes:
                return frame
        return self._raw.compress(flat, buffers)

    def _words_of(self, flat: torch.Tensor) -> torch.dtype | None:
        """Return the dtype whose words make the smallest frame of a sample from the middle; None if none is smaller than the bytes."""
        if self._chosen == "raw" or wire.frame_codec(self._chosen, flat.nbytes) == "raw":
            return None
        begin = max(0, flat.numel() - SAMPLE_BYTES) // 2 // 16 * 16
        sample = flat[begin : begin + SAMPLE_BYTES]
        sizes = {
            dtype: compress(
                _viewed(sample[: sample.numel() // dtype.itemsize * dtype.itemsize], dtype),
                self._chosen,
                block=self._block,
                shaped=False,
                checksum=False,
                route=self._route,
            ).numel()
            for dtype in CODED_DTYPES
            if flat.numel() % dtype.itemsize == 0
        }
        best = min(sizes, key=lambda dtype: sizes[dtype], default=None)
        return best if best is not None and not wire.incompressible(sample.numel(), sizes[best]) else None

    def decompress(
        self,
        frame: torch.Tensor,
        peer: int,
        out: torch.Tensor,
        base: torch.Tensor | None = None,
        earlier: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decompress the frame of ``peer``, of bytes or of words, into ``out`` and return ``out``. ``base`` and ``earlier`` are not used.

        Raises:
            CommError: from FrameError: the frame is damaged, or its size in bytes is not that of ``out``.
        """
        dtype = _dtype_of(frame, out.numel())
        if dtype is None:
            return super().decompress(frame, peer, out)
        words = _viewed(out, dtype)
        super().decompress(frame, peer, words)
        if words.data_ptr() != out.data_ptr():
            out.copy_(words.view(torch.uint8))
        return out


def _dtype_of(frame: torch.Tensor, nbytes: int) -> torch.dtype | None:
    """Return the coded dtype of a frame of ``nbytes``; None for any other frame, damaged ones among them."""
    try:
        header = parse(frame)
    except FrameError:
        return None
    return header.dtype if header.dtype in CODED_DTYPES and header.numel * header.dtype.itemsize == nbytes else None


def _viewed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as words: a view, or a copy where the bytes do not lie at an address of the dtype."""
    aligned = flat.storage_offset() % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0
    return (flat if aligned else tensors.empty(flat.numel(), torch.uint8).copy_(flat)).view(dtype)
