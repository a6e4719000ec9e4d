"""Frames of side tensors: known frames (FORMAT.md 2.7), a tensor that the receiver holds already, as the hash of its bytes; and bit frames
(FORMAT.md 2.8), a bool tensor, a bit for each element."""

from __future__ import annotations

import struct

import numpy as np
import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.spec import PayloadSpec
from ds_zipccl.frame import DTYPE_IDS, HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header

#: Bytes of a hash (FORMAT.md section 5).
HASH_BYTES = 16
#: The key of hashes without a key.
NO_KEY = bytes(HASH_BYTES)
#: Bytes of a known frame.
FRAME_BYTES = HEADER_BYTES + HASH_BYTES


def known_frame(dtype: torch.dtype, numel: int, digest: bytes, out: torch.Tensor) -> torch.Tensor:
    """Write the flat frame, without a checksum, of the tensor that the receiver holds and whose bytes hash to ``digest``.

    Args:
        dtype: of the tensor.
        numel: its elements.
        digest: :func:`ds_zipccl.region_hash` of the tensor. The receiver decompresses the frame with ``base=`` the tensor that it holds
            and the ``key=`` of the hash, and refuses a difference as MISMATCH.
        out: contiguous 1-D uint8 CPU tensor of at least :data:`FRAME_BYTES`.

    Returns:
        The frame, a view of ``out``.
    """
    frame = out[:FRAME_BYTES]
    frame.numpy()[HEADER_BYTES:] = memoryview(digest)
    framing.pack(Header(CodecId.KNOWN, dtype, numel, FRAME_BYTES), frame)
    return frame


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


def check_hash(payload: torch.Tensor, base: torch.Tensor, key: bytes, route: str) -> None:
    """Accept the base of a known frame whose payload is the base's hash.

    Raises:
        FrameError: MISMATCH.
    """
    found = hashed(base.view(torch.uint8), key, route)
    if found != payload.cpu().numpy().tobytes():
        raise FrameError(
            FrameErrorCode.MISMATCH,
            "the frame stands for a tensor that the receiver does not hold, as an earlier message failed; send another one of its size",
        )


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    assert base is not None  # PayloadSpec.needs_base; its hash is compared before
    if base.data_ptr() != words.data_ptr():
        words.view(torch.uint8).copy_(base.view(torch.uint8))


KNOWN = PayloadSpec(
    name="known",
    frame_id=CodecId.KNOWN,
    dtypes=tuple(DTYPE_IDS),
    needs_base=True,
    payload_bound=lambda numel, dtype, block: HASH_BYTES,
    payload_floor=lambda numel, dtype, block: HASH_BYTES,
    decode=_decode,
)


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
