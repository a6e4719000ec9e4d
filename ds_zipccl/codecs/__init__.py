"""Tensors to frames and back. One table: codec name -> codec; raw is a codec like any other."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from ds_zipccl import frame as framing
from ds_zipccl.codecs import exponent, raw
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header


class Codec(Protocol):
    """A payload format. ``words`` are flat contiguous CPU tensors, payloads flat uint8 tensors; calls block."""

    ID: CodecId
    DTYPES: tuple[torch.dtype, ...]

    def block(self, wanted: int) -> int: ...
    def payload_bound(self, numel: int, dtype: torch.dtype, block: int) -> int: ...
    def payload_floor(self, numel: int, dtype: torch.dtype, block: int) -> int: ...
    def encode(self, words: torch.Tensor, block: int, out: torch.Tensor, route: str) -> int: ...
    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None: ...


CODECS: dict[str, Codec] = {"raw": raw.RawCodec(), "exponent": exponent.ExponentCodec()}
_BY_ID = {codec.ID: codec for codec in CODECS.values()}
CODED_DTYPES = CODECS["exponent"].DTYPES


def _codec(name: str, dtype: torch.dtype) -> Codec:
    if name not in CODECS:
        raise ValueError(f"no codec {name!r}; known codecs: {', '.join(CODECS)}")
    if dtype not in framing.DTYPE_IDS:
        raise ValueError(
            f"{dtype} has no place in a frame; view the tensor as one of {', '.join(map(str, framing.DTYPE_IDS))}"
        )
    codec = CODECS[name]
    return codec if dtype in codec.DTYPES else CODECS["raw"]


def compress_bound(
    numel: int, dtype: torch.dtype, codec: str = "exponent", *, ndim: int | None = None, block: int = 512
) -> int:
    """Largest frame of any ``numel`` elements of ``dtype``, in bytes; ``ndim`` None is a flat frame.

    Raises:
        ValueError: unknown codec, or a dtype that no frame holds.
    """
    chosen = _codec(codec, dtype)
    return framing.payload_offset(ndim) + chosen.payload_bound(numel, dtype, chosen.block(block))


def compress(
    tensor: torch.Tensor,
    codec: str = "exponent",
    *,
    out: torch.Tensor | None = None,
    block: int = 512,
    shaped: bool = True,
    checksum: bool = True,
    route: str = "auto",
) -> torch.Tensor:
    """Code a CPU tensor as one frame (FORMAT.md); blocks.

    bfloat16, float16 and float32 are exponent coded, any other dtype becomes a raw frame. Lossless for every bit pattern.

    Args:
        tensor: any shape; a non-contiguous one is copied first.
        out: 1-D contiguous uint8 buffer of at least :func:`compress_bound` bytes; the frame is written to its start.
        block: elements that share a window: 128, 256, 512 or 1024.
        shaped: put the shape into the frame; without it :func:`decompress` gives a flat tensor.
        checksum: add a CRC-32, so that a damaged frame is refused rather than decoded (about 1 GB/s).
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Returns:
        1-D uint8 tensor: a view of ``out``, or a new tensor of the frame's size.

    Raises:
        ValueError: unknown codec, block or route, a dtype that no frame holds, a buffer that does not fit, or a tensor that is
            not on the CPU.
        RouteUnavailable: no kernels here.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"compress takes CPU tensors, got one on {tensor.device}; move it with .cpu()")
    if tensor.dim() > framing.MAX_DIMS and shaped:
        raise ValueError(f"a frame holds at most {framing.MAX_DIMS} dimensions, got {tensor.dim()}; pass shaped=False")
    chosen = _codec(codec, tensor.dtype)
    block = chosen.block(block)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    words = plain.as_strided((plain.numel(),), (1,))  # view(-1) may keep a stride of 0
    shape = tuple(tensor.shape) if shaped else None
    payload_at = framing.payload_offset(None if shape is None else len(shape))
    bound = payload_at + chosen.payload_bound(words.numel(), words.dtype, block)
    if out is None:
        buffer = torch.empty(bound, dtype=torch.uint8)
    elif (
        (out.dtype, out.dim(), out.device.type) == (torch.uint8, 1, "cpu")
        and out.is_contiguous()
        and out.numel() >= bound
    ):
        buffer = out
    else:
        raise ValueError(
            f"out must be a contiguous 1-D uint8 CPU tensor of at least {bound} bytes, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    size = payload_at + chosen.encode(words, block, buffer[payload_at:], route)
    header = Header(chosen.ID, words.dtype, words.numel(), size, block, shape, 0 if checksum else None)
    framing.pack(header, buffer)
    return buffer[:size].clone() if out is None else buffer[:size]


def decompress(frame: torch.Tensor, out: torch.Tensor | None = None, *, route: str = "auto") -> torch.Tensor:
    """The tensor in ``frame``; blocks.

    Args:
        frame: 1-D uint8 CPU tensor as :func:`compress` gives it; bytes after the frame's own length are ignored.
        out: contiguous CPU tensor of the frame's dtype and number of elements, of any shape; written in place.

    Returns:
        ``out``, or a new tensor of the frame's dtype and shape (flat if the frame has no shape).

    Raises:
        FrameError: the frame is damaged, foreign, or not of ``out``'s dtype and size; ``out`` is then undefined.
        TypeError: ``frame`` is not a 1-D uint8 CPU tensor, or ``out`` is not a contiguous CPU tensor.
    """
    header = framing.parse(frame)
    codec = _BY_ID[header.codec]
    if header.dtype not in codec.DTYPES:
        raise FrameError(FrameErrorCode.CODEC, f"codec {header.codec.name} does not hold {header.dtype}")
    size = header.frame_bytes - header.payload_at
    floor = codec.payload_floor(header.numel, header.dtype, header.block)
    bound = codec.payload_bound(header.numel, header.dtype, header.block)
    if not floor <= size <= bound:
        raise FrameError(
            FrameErrorCode.SIZE, f"{size} bytes of payload for {header.numel} {header.dtype}: {floor} to {bound} fit"
        )
    if out is None:
        out = torch.empty(header.numel, dtype=header.dtype)
        result = out if header.shape is None else out.view(header.shape)
    else:
        if out.device.type != "cpu" or not out.is_contiguous() or out.is_conj() or out.is_neg():
            kind = "a conjugate or negative view" if out.is_conj() or out.is_neg() else f"strides {out.stride()}"
            raise TypeError(f"out must be a contiguous CPU tensor, got {kind} on {out.device}")
        if out.dtype != header.dtype or out.numel() != header.numel:
            wanted = f"{math.prod(out.shape)} {out.dtype}"
            raise FrameError(FrameErrorCode.MISMATCH, f"frame holds {header.numel} {header.dtype}, wanted {wanted}")
        result = out
    words = out.detach().as_strided((out.numel(),), (1,))
    codec.decode(frame[header.payload_at : header.frame_bytes], header.block, words, route)
    return result
