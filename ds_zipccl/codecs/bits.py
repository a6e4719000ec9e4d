"""Bit frames (FORMAT.md 2.8): bool tensors, a bit for each element."""

from __future__ import annotations

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import tensors
from ds_zipccl.codecs.spec import PayloadSpec
from ds_zipccl.frame import HEADER_BYTES, CodecId, Header


def frame_bytes(numel: int) -> int:
    """Bytes of the flat frame of ``numel`` elements."""
    return HEADER_BYTES + _payload_bytes(numel, torch.bool, 0)


def bits_frame(words: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Write the flat frame, without a checksum, of a bool tensor; None, and nothing is written, if some byte of it is neither 0 nor 1.

    Args:
        words: flat contiguous bool CPU tensor. Programs make other bytes only by views of other dtypes; a raw frame holds them.
        out: contiguous 1-D uint8 CPU tensor of at least :func:`frame_bytes`.

    Returns:
        The frame, a view of ``out``.
    """
    data = words.view(torch.uint8).numpy()
    if data.size and int(data.max()) > 1:
        return None
    frame = out[: frame_bytes(words.numel())]
    frame.numpy()[HEADER_BYTES:] = np.packbits(data, bitorder="little")
    framing.pack(Header(CodecId.BITS, torch.bool, words.numel(), frame.numel()), frame)
    return frame


def _payload_bytes(numel: int, dtype: torch.dtype, block: int) -> int:
    return -(-numel // 8)


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    bits = np.unpackbits(payload.cpu().numpy(), count=words.numel(), bitorder="little")
    if bits.size:
        words.view(torch.uint8).copy_(tensors.of_buffer(bits))


BITS = PayloadSpec(
    name="bits",
    frame_id=CodecId.BITS,
    dtypes=(torch.bool,),
    needs_base=False,
    payload_bound=_payload_bytes,
    payload_floor=_payload_bytes,
    decode=_decode,
    decode_add=None,
)
