"""Tensors to frames and back. One table: codec name -> codec; raw is a codec like any other."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import delta, exponent, raw
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header


class Codec(Protocol):
    """A payload format. Words are flat contiguous tensors, payloads flat uint8 tensors of the same device; calls block."""

    ID: CodecId
    DTYPES: tuple[torch.dtype, ...]

    def block(self, wanted: int) -> int: ...
    def payload_bound(self, numel: int, dtype: torch.dtype, block: int) -> int: ...
    def payload_floor(self, numel: int, dtype: torch.dtype, block: int) -> int: ...
    def encode(
        self, segments: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], route: str
    ) -> list[int]: ...
    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None: ...
    def decode_add(
        self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str
    ) -> None: ...


CODECS: dict[str, Codec] = {
    "raw": raw.RawCodec(),
    "cascade": exponent.ExponentCodec("cascade"),
    "wide": exponent.ExponentCodec("wide"),
}
#: Codecs of a tensor against another one, its base; they too have what a Codec has.
BASED_CODECS: dict[str, delta.DeltaCodec] = {"delta": delta.DeltaCodec()}
_NAMED: dict[str, Codec | delta.DeltaCodec] = {**CODECS, **BASED_CODECS}
_DECODERS: dict[CodecId, Codec | delta.DeltaCodec] = {
    CodecId.RAW: CODECS["raw"],
    CodecId.EXPONENT: CODECS["cascade"],
    CodecId.DELTA: BASED_CODECS["delta"],
}
CODED_DTYPES = CODECS["cascade"].DTYPES
#: Where tensors are coded.
DEVICES = ("cpu", "cuda")


def _codec(name: str, dtype: torch.dtype) -> Codec | delta.DeltaCodec:
    if name not in _NAMED:
        raise ValueError(f"no codec {name!r}; known codecs: {', '.join(_NAMED)}")
    if dtype not in framing.DTYPE_IDS:
        raise ValueError(
            f"{dtype} has no place in a frame; view the tensor as one of {', '.join(map(str, framing.DTYPE_IDS))}"
        )
    codec = _NAMED[name]
    return codec if dtype in codec.DTYPES else CODECS["raw"]


def compress_bound(
    numel: int, dtype: torch.dtype, codec: str = "cascade", *, ndim: int | None = None, block: int = 1024
) -> int:
    """Largest frame of any ``numel`` elements of ``dtype``, in bytes; ``ndim`` None is a flat frame.

    Raises:
        ValueError: unknown codec, or a dtype that no frame holds.
    """
    chosen = _codec(codec, dtype)
    return framing.payload_offset(ndim) + chosen.payload_bound(numel, dtype, chosen.block(block))


@tensors.undisturbed()
def compress(
    tensor: torch.Tensor,
    codec: str = "cascade",
    *,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: int = 1024,
    shaped: bool = True,
    checksum: bool = True,
    route: str = "auto",
) -> torch.Tensor:
    """Code a tensor as one frame (FORMAT.md) on its device, CPU or CUDA; blocks, on CUDA for the current stream.

    bfloat16, float16, float32, float8_e4m3fn and float8_e5m2 are exponent coded, any other dtype becomes a raw frame. Lossless
    for every bit pattern.

    Args:
        tensor: any shape; a non-contiguous one is copied first.
        codec: "cascade" (best ratio), "wide" (faster), or "raw"; or "delta", for parameters that have changed a little since the
            receiver got ``base``: bfloat16, float16 and float32, other dtypes become raw frames.
        base: for "delta" and no other codec: tensor of the dtype, device and number of elements of ``tensor``; the receiver must hold
            the same bits (compare :func:`region_hash`).
        out: 1-D contiguous uint8 buffer of at least :func:`compress_bound` bytes on the tensor's device; the frame is written to its
            start, which must be apart from ``tensor`` and ``base``.
        block: elements that share a window: 128, 256, 512 or 1024.
        shaped: put the shape into the frame; without it :func:`decompress` gives a flat tensor.
        checksum: add a CRC-32, so that a damaged frame is refused rather than decoded (about 1 GB/s; from CUDA by way of the host).
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Returns:
        1-D uint8 tensor: a view of ``out``, or a new tensor of the frame's size.

    Raises:
        ValueError: unknown codec, block or route, a dtype that no frame holds, a buffer that does not fit or overlaps what is read, a
            tensor that is neither on the CPU nor on CUDA, or a base that is missing, not wanted or of another kind.
        RouteUnavailable: no kernels here.
    """
    if tensor.device.type not in DEVICES:
        raise ValueError(
            f"compress takes tensors on {' and '.join(DEVICES)}, got one on {tensor.device}; move it with .cpu()"
        )
    if tensor.dim() > framing.MAX_DIMS and shaped:
        raise ValueError(f"a frame holds at most {framing.MAX_DIMS} dimensions, got {tensor.dim()}; pass shaped=False")
    chosen = _codec(codec, tensor.dtype)
    block = chosen.block(block)
    words = _flat(tensor)
    against = _base_of(codec, words, base)
    shape = tuple(tensor.shape) if shaped else None
    payload_at = framing.payload_offset(None if shape is None else len(shape))
    bound = payload_at + chosen.payload_bound(words.numel(), words.dtype, block)
    buffer = tensors.empty(bound, torch.uint8, words.device) if out is None else _room(out, bound, words.device)
    if out is not None:
        _keep_apart([_span(buffer, bound)], [_span(words)] if against is None else [_span(words), _span(against)])
    if against is not None and isinstance(chosen, delta.DeltaCodec):
        size = payload_at + chosen.encode_against(words, against, block, buffer[payload_at:], route)
    else:
        size = payload_at + chosen.encode([words], block, [buffer[payload_at:]], route)[0]
    header = Header(chosen.ID, words.dtype, words.numel(), size, block, shape, framing.CHECKSUM if checksum else None)
    _pack(header, buffer)
    return buffer[:size].clone() if out is None else buffer[:size]


@tensors.undisturbed()
def compress_segments(
    segments: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    codec: str = "cascade",
    *,
    block: int = 1024,
    route: str = "auto",
) -> list[torch.Tensor]:
    """Code each of several tensors of one dtype and device as a flat frame without a checksum; blocks.

    One call of the kernels for all of them, as an all-to-all wants it. ``outs`` are a buffer for each, of :func:`compress_bound`
    bytes, apart from each other and from all segments; the other arguments are those of :func:`compress`, without a base. Returns a
    view of each buffer, its frame.

    Raises:
        ValueError: as :func:`compress`; or the dtypes differ, or the number of buffers is not that of the segments.
        RouteUnavailable: no kernels here.
    """
    if codec in BASED_CODECS:
        raise ValueError(
            f"compress_segments takes no base, which codec {codec!r} needs; call compress for each segment"
        )
    if not segments:
        return []
    dtype = segments[0].dtype
    kinds = {(segment.dtype, segment.device) for segment in segments}
    if len(kinds) != 1 or segments[0].device.type not in DEVICES or len(segments) != len(outs):
        raise ValueError(
            f"wanted tensors of one dtype and device and a buffer for each, got {len(segments)} of {sorted(map(str, kinds))} "
            f"and {len(outs)} buffers"
        )
    chosen = _codec(codec, dtype)
    block = chosen.block(block)
    flats = [_flat(segment) for segment in segments]
    at = framing.payload_offset(None)
    bounds = [at + chosen.payload_bound(flat.numel(), dtype, block) for flat in flats]
    buffers = [_room(out, bound, flat.device) for flat, out, bound in zip(flats, outs, bounds, strict=True)]
    _keep_apart(list(map(_span, buffers, bounds)), list(map(_span, flats)))
    payloads = chosen.encode(flats, block, [buffer[at:] for buffer in buffers], route)
    frames = []
    for flat, buffer, payload in zip(flats, buffers, payloads, strict=True):
        _pack(Header(chosen.ID, dtype, flat.numel(), at + payload, block), buffer)
        frames.append(buffer[: at + payload])
    return frames


@tensors.undisturbed()
def decompress(
    frame: torch.Tensor, out: torch.Tensor | None = None, *, base: torch.Tensor | None = None, route: str = "auto"
) -> torch.Tensor:
    """The tensor in ``frame``; blocks.

    Args:
        frame: 1-D uint8 tensor as :func:`compress` gives it; bytes after the frame's own length are ignored.
        out: contiguous tensor on the frame's device, of the frame's dtype and number of elements, of any shape; written in place.
        base: what a delta frame was coded against, bit for bit: contiguous tensor on the frame's device, ``out`` itself or apart from
            it. Other frames do not look at it.

    Returns:
        ``out``, or a new tensor of the frame's dtype and shape (flat if the frame has no shape).

    Raises:
        FrameError: the frame is damaged, foreign, or not of the dtype and size of ``out`` and ``base``, or a delta frame without
            ``base``; ``out`` is then undefined. It is a ValueError.
        ValueError: ``out`` overlaps a part of ``base``, or ``frame``; nothing is written.
        TypeError: ``frame`` is not a 1-D uint8 tensor, or ``out`` or ``base`` is not a contiguous one on its device.
    """
    header, codec = _open(frame)
    if out is None:
        out = tensors.empty(header.numel, header.dtype, frame.device)
        result = out if header.shape is None else out.view(header.shape)
    else:
        result = _wanted(out, header, (header.dtype,), frame.device)
        _keep_apart([_span(out)], [_span(frame, header.frame_bytes)])
    words = out.detach().as_strided((out.numel(),), (1,))
    payload = frame[header.payload_at : header.frame_bytes]
    if isinstance(codec, delta.DeltaCodec):
        codec.decode_against(payload, _held(base, header, words), header.block, words, route)
    else:
        codec.decode(payload, header.block, words, route)
    return result


@tensors.undisturbed()
def decompress_add(
    frame: torch.Tensor, sums: torch.Tensor, *, dtype: torch.dtype | None = None, route: str = "auto"
) -> torch.Tensor:
    """Add the tensor in ``frame`` to ``sums``, in one pass over it; blocks.

    Args:
        frame: as for :func:`decompress`, of bfloat16, float16 or float32.
        sums: contiguous tensor on the frame's device, of the frame's number of elements: of its dtype, and each sum is rounded to
            that (to nearest, ties to even), or float32. NaN sums of bfloat16 are 0x7fc0, as gloo makes them; other NaN
            payloads are left open.
        dtype: what the frame must hold; None: ``sums``' dtype, or any of those if that is float32.

    Returns:
        ``sums``.

    Raises:
        FrameError, TypeError: as :func:`decompress`; ``sums`` is then undefined. Delta frames cannot be added.
        ValueError: ``sums`` overlaps ``frame``; nothing is written.
    """
    header, codec = _open(frame)
    if isinstance(codec, delta.DeltaCodec):
        raise FrameError(FrameErrorCode.CODEC, "a delta frame cannot be added; decompress it with its base first")
    if header.dtype not in SUMMED_DTYPES or dtype not in (None, header.dtype):
        wanted = dtype or ", ".join(map(str, SUMMED_DTYPES))
        raise FrameError(FrameErrorCode.MISMATCH, f"frame holds {header.dtype}, wanted {wanted}")
    flat = _wanted(sums, header, (header.dtype, torch.float32), frame.device).detach().as_strided((sums.numel(),), (1,))
    _keep_apart([_span(flat)], [_span(frame, header.frame_bytes)])
    codec.decode_add(frame[header.payload_at : header.frame_bytes], header.block, header.dtype, flat, route)
    return sums


@tensors.undisturbed()
def region_hash(tensor: torch.Tensor, *, route: str = "auto") -> bytes:
    """16 bytes that tell whether two tensors hold the same bits (FORMAT.md section 5), as both ends of a delta frame must; blocks.

    Not for tensors that somebody may have made to collide. Dtype and shape do not count, only the contiguous tensor's bytes.

    Raises:
        TypeError: ``tensor`` is not a contiguous CPU or CUDA tensor.
        RouteUnavailable: no kernels here.
    """
    if tensor.device.type not in DEVICES or not tensor.is_contiguous():
        raise TypeError(
            f"region_hash takes a contiguous tensor on {' or '.join(DEVICES)}, got strides {tensor.stride()} on {tensor.device}"
        )
    first, second = kernels.route(route, tensor.device.type).region_hash(_flat(tensor).view(torch.uint8))
    return struct.pack("<QQ", first, second)


#: What decompress_add adds.
SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they are stored; a copy where they do not lie one after the other."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,))  # view(-1) may keep a stride of 0


def _base_of(codec: str, words: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor | None:
    """The base's elements as they are stored, or None for a codec without one."""
    if (base is None) is (codec in BASED_CODECS):
        raise ValueError(
            f"codec {codec!r} {'needs a' if base is None else 'takes no'} base; 'delta' is the one with a base"
        )
    if base is None:
        return None
    if (base.dtype, base.numel(), base.device) != (words.dtype, words.numel(), words.device):
        raise ValueError(
            f"base must be a tensor of {words.numel()} {words.dtype} on {words.device}, "
            f"got {base.numel()} {base.dtype} on {base.device}"
        )
    return _flat(base)


def _held(base: torch.Tensor | None, header: Header, words: torch.Tensor) -> torch.Tensor:
    """The receiver's base, flat, if a delta frame can be decoded against it to ``words``."""
    if base is None:
        raise FrameError(FrameErrorCode.CODEC, "a delta frame needs the base it was coded against: pass base=")
    flat = _wanted(base, header, (header.dtype,), words.device).detach().as_strided((base.numel(),), (1,))
    apart = abs(flat.data_ptr() - words.data_ptr())
    if 0 < apart < words.numel() * words.itemsize:
        raise ValueError("base and out overlap in part; they must be the same memory or apart")
    return flat


def _room(out: torch.Tensor, bound: int, device: torch.device) -> torch.Tensor:
    """``out``, if a frame of ``bound`` bytes can be written to it."""
    fits = (out.dtype, out.dim(), out.device) == (torch.uint8, 1, device) and out.is_contiguous()
    if not fits or out.numel() < bound:
        raise ValueError(
            f"out must be a contiguous 1-D uint8 tensor of at least {bound} bytes on {device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    return out


def _span(tensor: torch.Tensor, size: int | None = None) -> tuple[int, int]:
    """First address of a contiguous tensor, and the one after its first ``size`` bytes (None: all)."""
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes if size is None else size)


def _keep_apart(outputs: Sequence[tuple[int, int]], inputs: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError if the memory of an output is also in an input or another output.

    Spans are sorted and swept over once, because an all-to-all has many of them.
    """
    read_to = written_to = 0
    spans = [(start, end, True) for start, end in outputs] + [(start, end, False) for start, end in inputs]
    spans.sort()
    for start, end, written in spans:
        if start == end:
            continue
        taken = max(written_to, read_to) if written else written_to
        if start < taken:
            raise ValueError(
                f"{min(taken, end) - start} bytes of an output are also in an input or another output, wanted memory of its own: "
                "pass another out, or a clone of the input"
            )
        if written:
            written_to = max(written_to, end)
        else:
            read_to = max(read_to, end)


def _pack(header: Header, buffer: torch.Tensor) -> None:
    if buffer.device.type == "cpu":
        framing.pack(header, buffer)
        return
    host = buffer[: header.payload_at if header.checksum is None else header.frame_bytes].cpu()
    framing.pack(header, host)
    buffer[: header.payload_at].copy_(host[: header.payload_at])


def _parse(frame: torch.Tensor) -> Header:
    if frame.device.type == "cpu" or frame.dim() != 1:
        return framing.parse(frame)
    start = frame[: framing.MAX_HEADER_BYTES].cpu()
    return framing.parse(frame.cpu()) if framing.has_checksum(start) else framing.parse(start, frame.numel())


def _open(frame: torch.Tensor) -> tuple[Header, Codec | delta.DeltaCodec]:
    """Header of a frame and the codec that decodes it; the payload's size is possible."""
    header = _parse(frame)
    codec = _DECODERS[header.codec]
    if header.dtype not in codec.DTYPES:
        raise FrameError(FrameErrorCode.CODEC, f"codec {header.codec.name} does not hold {header.dtype}")
    size = header.frame_bytes - header.payload_at
    floor = codec.payload_floor(header.numel, header.dtype, header.block)
    bound = codec.payload_bound(header.numel, header.dtype, header.block)
    if not floor <= size <= bound:
        raise FrameError(
            FrameErrorCode.SIZE, f"{size} bytes of payload for {header.numel} {header.dtype}: {floor} to {bound} fit"
        )
    return header, codec


def _wanted(out: torch.Tensor, header: Header, dtypes: tuple[torch.dtype, ...], device: torch.device) -> torch.Tensor:
    """``out``, if what the header describes can be decoded to it."""
    if out.device != device or not out.is_contiguous() or out.is_conj() or out.is_neg():
        kind = "a conjugate or negative view" if out.is_conj() or out.is_neg() else f"strides {out.stride()}"
        raise TypeError(f"out must be a contiguous tensor on {device}, got {kind} on {out.device}")
    if out.dtype not in dtypes or out.numel() != header.numel:
        wanted = f"{math.prod(out.shape)} {out.dtype}"
        raise FrameError(FrameErrorCode.MISMATCH, f"frame holds {header.numel} {header.dtype}, wanted {wanted}")
    return out
