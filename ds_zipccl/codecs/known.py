"""Bits frames (FORMAT.md 2.8): a bool tensor, a bit for each element; and hashes of words (FORMAT.md section 5)."""

from __future__ import annotations

import struct

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.spec import PayloadSpec
from ds_zipccl.frame import HEADER_BYTES, CodecId, Header

#: Bytes of a hash (FORMAT.md section 5).
HASH_BYTES = 16
#: The key of hashes without a key.
NO_KEY = bytes(HASH_BYTES)


def key_words(key: bytes) -> tuple[int, int]:
    """Return a key as kernels take it: two u64.

    Raises:
        ValueError: it has not 16 bytes.
    """
    if len(key) != HASH_BYTES:
        raise ValueError(f"a key has {HASH_BYTES} bytes, got {len(key)}; use os.urandom({HASH_BYTES})")
    first, second = struct.unpack("<QQ", key)
    return first, second


def hashed(data: torch.Tensor, key: bytes, route: str) -> bytes:
    """Return the hash (FORMAT.md section 5) of ``data`` (uint8), see :func:`ds_zipccl.region_hash`."""
    return struct.pack("<QQ", *kernels.route(route, data.device.type).region_hash(data, key_words(key)))


def bits_frame_bytes(numel: int) -> int:
    """Bytes of the flat frame of ``numel`` elements."""
    return HEADER_BYTES + _bits_bytes(numel, torch.bool, 0)


def bits_frame(words: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Write the flat frame, without a checksum, of a bool tensor; None, and nothing is written, if some byte of it is neither 0 nor 1.

    Args:
        words: flat contiguous bool CPU tensor. Programs make other bytes only by views of other dtypes; a raw frame holds them.
        out: contiguous 1-D uint8 CPU tensor of at least :func:`bits_frame_bytes`.

    Returns:
        The frame, a view of ``out``.
    """
    data = words.view(torch.uint8).numpy()
    if data.size and int(data.max()) > 1:
        return None
    frame = out[: bits_frame_bytes(words.numel())]
    frame.numpy()[HEADER_BYTES:] = np.packbits(data, bitorder="little")
    framing.pack(Header(CodecId.BITS, torch.bool, words.numel(), frame.numel()), frame)
    return frame


def _bits_bytes(numel: int, dtype: torch.dtype, block: int) -> int:
    return -(-numel // 8)


def _decode_bits(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    bits = np.unpackbits(payload.cpu().numpy(), count=words.numel(), bitorder="little")
    if bits.size:
        words.view(torch.uint8).copy_(tensors.of_buffer(bits))


BITS = PayloadSpec(
    name="bits",
    frame_id=CodecId.BITS,
    dtypes=(torch.bool,),
    payload_bound=_bits_bytes,
    payload_floor=_bits_bytes,
    decode=_decode_bits,
)
