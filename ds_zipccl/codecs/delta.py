"""The delta codec (FORMAT.md 2.3): words against a base that sender and receiver both hold.

bfloat16, float16 and float32 are words of the format; a tensor of any other dtype is coded as its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import exponent
from ds_zipccl.codecs.spec import CodecSpec
from ds_zipccl.frame import CHUNK_BLOCKS, DELTA_WORDS, DTYPE_IDS, CodecId, pad16

_BYTE_TABLE = 3  # bytes of a block's entry where words are bytes
_MAX_PAYLOAD = 16 << 31  # chunk offsets are 31 bits in units of 16 bytes


def payload_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every word is the base's: the index."""
    words = numel if dtype in DELTA_WORDS else numel * dtype.itemsize
    return pad16(4 * -(-words // (block * CHUNK_BLOCKS)))


def payload_bound(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is as large as raw, with all paddings; a LIST is never larger than that."""
    if dtype in DELTA_WORDS:
        return exponent.payload_bound(numel, dtype, block)
    return exponent.raw_bound(numel * dtype.itemsize, 1, _BYTE_TABLE, block)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a flat tensor as kernels take them, in the same memory."""
    return tensor if tensor.dtype in DELTA_WORDS else tensor.view(torch.uint8)


def _encode(
    segments: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    block: int,
    outs: Sequence[torch.Tensor],
    route: str,
) -> list[int]:
    sizes = []
    for segment, base, out in zip(segments, bases, outs, strict=True):
        exponent.check_bound(segment, payload_bound(segment.numel(), segment.dtype, block), _MAX_PAYLOAD)
        kernel = kernels.route(route, segment.device.type)
        sizes.append(kernel.encode_delta(_words(segment), _words(base), block, out))
    return sizes


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    assert base is not None  # CodecSpec.needs_base
    kernels.route(route, words.device.type).decode_delta(payload, _words(base), block, _words(words))


DELTA = CodecSpec(
    name="delta",
    frame_id=CodecId.DELTA,
    dtypes=tuple(DTYPE_IDS),
    lossless=True,
    stateful=False,
    needs_base=True,
    block=exponent.block_size,
    payload_bound=payload_bound,
    payload_floor=payload_floor,
    encode=_encode,
    decode=_decode,
    decode_add=None,
)
