"""The lossless codecs: the exponent codecs (FORMAT.md section 2), words against a base (2.3), the bytes as they are (1.2); and ``round``
(2.9), whose words are rounded on their own grid and then exponent coded.

Sizes are here, words and payload bytes in :mod:`ds_zipccl.kernels`. A base is a tensor that sender and receiver both hold. bfloat16,
float16 and float32 are words of the format against it; a tensor of any other dtype is coded as its bytes.
"""

from __future__ import annotations

from functools import partial

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.spec import CodecSpec, Coded, Encode, PayloadSpec, Project, Tensors, lossy_format
from ds_zipccl.frame import BLOCK_LOG2, CHUNK_BLOCKS, DELTA_WORDS, DTYPE_IDS, CodecId, pad16
from ds_zipccl.kernels.protocol import index_and_tables, raw_bound
from ds_zipccl.lossy import Round

BLOCKS = tuple(1 << log2 for log2 in BLOCK_LOG2[CodecId.EXPONENT])
_TABLE_BYTES = {
    torch.bfloat16: 3, torch.float16: 3, torch.float32: 4, torch.float8_e4m3fn: 3, torch.float8_e5m2: 3
}  # per block # fmt: skip
#: Bytes that the chunk offsets of a payload reach.
MAX_PAYLOAD = 16 << 32  # chunk offsets are 32 bits in units of 16 bytes
_MAX_DELTA_PAYLOAD = 16 << 31  # 31 bits
_DELTA_BYTE_TABLE = 3  # bytes of a block's entry where the words of a delta payload are bytes
_ROUNDED_TABLE = 4


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


# --- the exponent codecs


def _encoder(code: str) -> Encode:
    def encode(segments: Tensors, bases: Tensors, block: int, outs: Tensors, route: str) -> list[int]:
        for words in segments:
            check_size(words, block)
        if not segments:
            return []
        return kernels.route(route, segments[0].device.type).encode(segments, code, block, outs)

    return encode


def _decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    kernels.route(route, words.device.type).decode(payload, block, words)


def _decode_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    kernels.route(route, sums.device.type).decode(payload, block, sums, dtype)


def _spec(code: str, former_names: tuple[str, ...] = ()) -> CodecSpec:
    return CodecSpec(
        name=code,
        frame_id=CodecId.EXPONENT,
        dtypes=tuple(_TABLE_BYTES),
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


# --- the bytes as they are


def _raw_bytes(numel: int, dtype: torch.dtype, block: int) -> int:
    return numel * dtype.itemsize


def _encode_raw(segments: Tensors, bases: Tensors, block: int, outs: Tensors, route: str) -> list[int]:
    for words, out in zip(segments, outs, strict=True):
        out[: words.nbytes].copy_(words.view(torch.uint8))
    return [words.nbytes for words in segments]


def _decode_raw(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
    words.view(torch.uint8).copy_(payload)


def _decode_raw_add(payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    values = tensors.empty(sums.numel(), dtype, sums.device)  # a copy, because a payload may lie at any address
    _decode_raw(payload, None, block, values, route)
    kernels.adder(route, sums.device.type)(values, sums)


RAW = CodecSpec(
    name="raw",
    frame_id=CodecId.RAW,
    dtypes=tuple(DTYPE_IDS),
    block=lambda wanted: 0,
    payload_bound=_raw_bytes,
    payload_floor=_raw_bytes,
    encode=_encode_raw,
    decode=_decode_raw,
    decode_add=_decode_raw_add,
)
#: Codec byte of a nested frame of words as they are -> its format.
LITERALS: dict[CodecId, PayloadSpec] = {RAW.frame_id: RAW, CASCADE.frame_id: CASCADE}


def encode_lossless(words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> Coded:
    """Write the payload of flat ``words`` by CASCADE, or RAW where that is no larger, to ``out``; blocks."""
    size = CASCADE.encode([words], (), block, [out], route)[0]
    if size < words.nbytes:
        return Coded(CASCADE.frame_id, block, size)
    return Coded(RAW.frame_id, 0, RAW.encode([words], (), 0, [out], route)[0])


def projected(project: Project, words: torch.Tensor, route: str) -> torch.Tensor:
    """What a frame of flat ``words`` decodes to by the lossy codec of ``project``, in new memory; blocks."""
    kept = tensors.empty(words.numel(), words.dtype, words.device)
    project(words, kept, route)
    return kept


# --- words against a base


def _delta_floor(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every word is the base's: the index."""
    words = numel if dtype in DELTA_WORDS else numel * dtype.itemsize
    return pad16(4 * -(-words // (block * CHUNK_BLOCKS)))


def _delta_bound(numel: int, dtype: torch.dtype, block: int) -> int:
    """Bytes of a payload in which every block is as large as raw, with all paddings; a LIST is never larger than that."""
    if dtype in DELTA_WORDS:
        return payload_bound(numel, dtype, block)
    return raw_bound(numel * dtype.itemsize, 1, _DELTA_BYTE_TABLE, block)


def _delta_words(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a flat tensor as kernels take them, in the same memory."""
    return tensor if tensor.dtype in DELTA_WORDS else tensor.view(torch.uint8)


def _encode_delta(segments: Tensors, bases: Tensors, block: int, outs: Tensors, route: str) -> list[int]:
    sizes = []
    for segment, base, out in zip(segments, bases, outs, strict=True):
        check_bound(segment, _delta_bound(segment.numel(), segment.dtype, block), _MAX_DELTA_PAYLOAD)
        kernel = kernels.delta_route(route, segment.device.type)
        sizes.append(kernel.encode_delta(_delta_words(segment), _delta_words(base), block, out))
    return sizes


def _decode_delta(
    payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str
) -> None:
    assert base is not None  # CodecSpec.needs_base
    kernel = kernels.delta_route(route, words.device.type)
    kernel.decode_delta(payload, _delta_words(base), block, _delta_words(words))


DELTA = CodecSpec(
    name="delta",
    frame_id=CodecId.DELTA,
    dtypes=tuple(DTYPE_IDS),
    needs_base=True,
    block=block_size,
    payload_bound=_delta_bound,
    payload_floor=_delta_floor,
    encode=_encode_delta,
    decode=_decode_delta,
)


# --- rounded words


def _rounded_bound(numel: int, dtype: torch.dtype, block: int) -> int:
    return raw_bound(numel, dtype.itemsize, _ROUNDED_TABLE, block)


def project_rounded(codec: Round, words: torch.Tensor, out: torch.Tensor, route: str) -> None:
    kernels.lossy_route(route, words.device.type, "round_words").round_words(words, codec.mantissa, out)


def encode_rounded(codec: Round, segments: Tensors, block: int, outs: Tensors, route: str) -> list[Coded]:
    for words in segments:
        check_bound(words, _rounded_bound(words.numel(), words.dtype, block), MAX_PAYLOAD)
    if not segments:
        return []
    kernel = kernels.lossy_route(route, segments[0].device.type, "encode_rounded")
    own = CodecId.EXPONENT if segments[0].dtype == torch.float32 else CodecId.ROUNDED
    sizes = kernel.encode_rounded(segments, codec.mantissa, block, outs)
    found = []
    for words, out, (size, untrimmed) in zip(segments, outs, sizes, strict=True):
        unit, lossless = block, None
        if min(size, untrimmed) >= words.nbytes:
            unit, lossless = 0, RAW
        elif untrimmed <= size and own is CodecId.ROUNDED:
            lossless = CASCADE
        if lossless is not None:
            kept = projected(partial(project_rounded, codec), words, route)
            size = lossless.encode([kept], (), unit, [out], route)[0]
        found.append(Coded(own if lossless is None else lossless.frame_id, unit, size))
    return found


ROUNDED = lossy_format(
    lambda payload, numel, block, route: ("decode_rounded", (payload, block)),
    name="rounded",
    frame_id=CodecId.ROUNDED,
    payload_bound=_rounded_bound,
    payload_floor=lambda numel, dtype, block: index_and_tables(numel, _ROUNDED_TABLE, block),
    dtypes=(torch.bfloat16, torch.float16),
)
