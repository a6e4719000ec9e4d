"""The exponent codecs (FORMAT.md section 2): sizes here, words and payload bytes in :mod:`ds_zipccl.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs.spec import CodecSpec, Encode
from ds_zipccl.frame import BLOCK_LOG2, CHUNK_BLOCKS, CodecId, pad16

BLOCKS = tuple(1 << log2 for log2 in BLOCK_LOG2[CodecId.EXPONENT])
_TABLE_BYTES = {
    torch.bfloat16: 3, torch.float16: 3, torch.float32: 4, torch.float8_e4m3fn: 3, torch.float8_e5m2: 3
}  # per block # fmt: skip
#: Bytes that the chunk offsets of a payload reach.
MAX_PAYLOAD = 16 << 32  # chunk offsets are 32 bits in units of 16 bytes


def _ceil(count: int, unit: int) -> int:
    return (count + unit - 1) // unit


def block_size(wanted: int) -> int:
    """``wanted``.

    Raises:
        ValueError: no frame has blocks of that size.
    """
    if wanted not in BLOCKS:
        raise ValueError(f"block {wanted} is not possible; choose one of {', '.join(map(str, BLOCKS))}")
    return wanted


def payload_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is zero: index and tables."""
    return index_and_tables(numel, _TABLE_BYTES[dtype], block)


def payload_bound(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is as large as raw, with all paddings."""
    return raw_bound(numel, dtype.itemsize, _TABLE_BYTES[dtype], block)


def raw_bound(words: int, itemsize: int, table: int, block: int) -> int:
    """Bytes of a payload of RAW blocks, with all paddings.

    Args:
        words: their number.
        itemsize: bytes of a word.
        table: bytes of a block's entry in the table of its chunk.
        block: words of a block.
    """
    full, rest = divmod(words, block)
    bodies = full * block * itemsize + pad16(rest * itemsize)
    return index_and_tables(words, table, block) + bodies + 16 * _ceil(words, block * CHUNK_BLOCKS)


def index_and_tables(words: int, table: int, block: int) -> int:
    """Bytes of the index and the tables of a payload; arguments as for :func:`raw_bound`."""
    chunk = block * CHUNK_BLOCKS
    full, rest = divmod(words, chunk)
    return pad16(4 * _ceil(words, chunk)) + full * pad16(table * CHUNK_BLOCKS) + pad16(table * _ceil(rest, block))


def check_size(words: torch.Tensor, block: int) -> None:
    """Accept ``words`` if the chunk offsets of a payload can hold its size.

    Raises:
        ValueError: they cannot.
    """
    check_bound(words, payload_bound(words.numel(), words.dtype, block), MAX_PAYLOAD)


def check_bound(words: torch.Tensor, bound: int, limit: int) -> None:
    """Accept ``words``, whose payload has at most ``bound`` bytes, if chunk offsets reach ``limit`` bytes and that is enough.

    Raises:
        ValueError: it is not.
    """
    if bound > limit:
        raise ValueError(
            f"got {words.numel()} elements, whose payload may exceed the {limit} bytes of one frame; cut the tensor"
        )


def _encoder(code: str) -> Encode:
    def encode(
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor],
        block: int,
        outs: Sequence[torch.Tensor],
        route: str,
    ) -> list[int]:
        for words in segments:
            check_size(words, block)
        if not segments:
            return []
        return kernels.route(route, segments[0].device.type).encode(segments, code, block, outs)

    return encode


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    kernels.route(route, words.device.type).decode(payload, block, words)


def _decode_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    kernels.route(route, sums.device.type).decode_add(payload, block, dtype, sums)


def _spec(code: str, former_names: tuple[str, ...] = ()) -> CodecSpec:
    return CodecSpec(
        name=code,
        frame_id=CodecId.EXPONENT,
        dtypes=tuple(_TABLE_BYTES),
        lossless=True,
        stateful=False,
        needs_base=False,
        block=block_size,
        payload_bound=payload_bound,
        payload_floor=payload_floor,
        encode=_encoder(code),
        decode=_decode,
        decode_add=_decode_add,
        former_names=former_names,
    )


#: The best ratio.
CASCADE = _spec("cascade")
#: Faster than CASCADE, and smaller where exponents spread widely.
WIDE = _spec("wide", former_names=("window",))
