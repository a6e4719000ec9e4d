"""Known frames (FORMAT.md 2.7): a tensor that the receiver holds already, as the hash of its bytes."""

from __future__ import annotations

import struct

import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels
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


def _payload_bytes(numel: int, dtype: torch.dtype, block: int) -> int:
    return HASH_BYTES


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
    payload_bound=_payload_bytes,
    payload_floor=_payload_bytes,
    decode=_decode,
    decode_add=None,
)
