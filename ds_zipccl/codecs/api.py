"""Tensors to frames and back: the calls of the package's users and of :mod:`ds_zipccl.comm`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ds_zipccl import frame as framing
from ds_zipccl import tensors
from ds_zipccl.codecs import memory
from ds_zipccl.codecs.exponent import projected
from ds_zipccl.codecs.known import NO_KEY, hashed
from ds_zipccl.codecs.memory import admit, write_header
from ds_zipccl.codecs.registry import BASE_CODECS, DECODERS, codec_spec, lossy_spec, spec_for
from ds_zipccl.codecs.row_segment import RowSegment
from ds_zipccl.codecs.spec import CodecSpec, Coded, LossySpec, PayloadSpec, Tensors, check_payload
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header
from ds_zipccl.lossy import LossyCodec

#: dtypes that decompress_add adds.
SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.lru_cache(maxsize=1 << 14)  # a program repeats its sizes, and a receive asks for every codec
def compress_bound(
    numel: int,
    dtype: torch.dtype,
    codec: str | LossyCodec = "cascade",
    *,
    lossy: bool = False,
    ndim: int | None = None,
    block: int = 1024,
) -> int:
    """Largest frame of any ``numel`` elements of ``dtype``, in bytes; ``ndim`` None is a flat frame.

    Raises:
        ValueError: unknown codec, a lossy one without ``lossy=True``, or a dtype that no frame holds or that the lossy codec does not take.
    """
    spec = _spec(codec, dtype, lossy)
    return framing.payload_offset(ndim) + spec.payload_bound(numel, dtype, spec.block(block))


def compress(
    tensor: torch.Tensor,
    codec: str | LossyCodec = "cascade",
    *,
    lossy: bool = False,
    dtype: torch.dtype | None = None,
    base: torch.Tensor | None = None,
    row_width: int | None = None,
    out: torch.Tensor | None = None,
    block: int = 1024,
    shaped: bool = True,
    checksum: bool = True,
    route: str = "auto",
) -> torch.Tensor:
    """Code a tensor as one frame (FORMAT.md) on its device, CPU or CUDA; blocks, on CUDA for the current stream.

    Without a base bfloat16, float16, float32, float8_e4m3fn and float8_e5m2 are exponent coded, and any other dtype becomes a raw
    frame. With a base every dtype is coded as differences: of the words of bfloat16, float16 and float32, of the bytes of any other
    dtype. Lossless for every bit pattern, unless the codec is a lossy one.

    Args:
        tensor: any shape; a non-contiguous tensor is copied first. ``ds_zipccl.compress`` also takes an array of numpy, CuPy, JAX or
            another library with DLPack, whose memory is read in place; the frame is then an array of that library.
        codec: "cascade" (best ratio), "wide" (faster), or "raw"; or "delta", for tensors that have changed a little since the receiver
            got ``base``, or not at all. Or a value such as ``Round(3)``, for bfloat16, float16 and float32: the frame then decodes to
            what :func:`project` gives, and is a lossless frame of that where no other would be smaller.
        lossy: allow such a codec, which changes values.
        dtype: of the elements of ``tensor`` and ``base``, for a library that lacks it: bfloat16 in numpy is an array of uint16 with
            ``dtype=torch.bfloat16``, or one of ``ml_dtypes.bfloat16``. None: that of ``tensor``.
        base: for "delta" and no other codec: tensor of the dtype, device and number of elements of ``tensor``; the receiver must hold
            the same bits (compare :func:`region_hash`).
        row_width: elements of a row: rows that equal earlier rows of the tensor, bit for bit, are left out, if that makes the frame
            smaller. None: no row is looked for. Not with "delta" and not with a lossy codec.
        out: 1-D contiguous uint8 buffer of at least :func:`compress_bound` bytes on the tensor's device; the frame is written to its
            start, which must be apart from ``tensor`` and ``base``.
        block: words of a block, the unit of statistics: 128, 256, 512 or 1024. A word is an element, or a byte of it where "delta"
            codes bytes.
        shaped: put the shape into the frame; without it :func:`decompress` gives a flat tensor.
        checksum: add a checksum, so that a damaged frame is refused and not decoded; from CUDA the frame goes by way of the host for it.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Returns:
        1-D uint8 tensor: a view of ``out``, or a new tensor of the frame's size.

    Raises:
        ValueError: unknown codec, block or route; a lossy codec without ``lossy=True``; a dtype that no frame holds, or that the lossy
            codec does not take; a ``dtype`` of another size; a buffer that does not fit or overlaps ``tensor`` or ``base``; a tensor that
            is neither on the CPU nor on CUDA, is not dense (sparse, nested, MKLDNN, quantized), or has no data of its own (fake, DTensor,
            traced, transformed, a storage that was freed); a base that is missing, superfluous or of another kind; a row_width below 1,
            or with a codec that takes none.
        TypeError: ``tensor``, ``base`` or ``out`` is no tensor, or ``row_width`` no int.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        admit("tensor", tensor)
        if dtype is not None:
            tensor = memory.viewed("tensor", tensor, dtype)
            base = None if base is None else memory.viewed("base", base, dtype)
        if tensor.dim() > framing.MAX_DIMS and shaped:
            raise ValueError(
                f"a frame holds at most {framing.MAX_DIMS} dimensions, got {tensor.dim()}; pass shaped=False"
            )
        spec = _spec(codec, tensor.dtype, lossy)
        unit = spec.block(block)
        words = memory.flatten(tensor)
        bases = _bases(codec, words, base)
        if row_width is not None and (bases or isinstance(spec, LossySpec)):
            raise ValueError(f"codec {str(codec)!r} takes no row_width, got {row_width}; leave one of them out")
        shape = tuple(tensor.shape) if shaped else None
        payload_at = framing.payload_offset(None if shape is None else len(shape))
        bound = payload_at + spec.payload_bound(words.numel(), words.dtype, unit)
        buffer = memory.frame_buffer(out, bound, words.device, (words, *bases))
        room, size = buffer[payload_at:bound], None
        if row_width is not None and isinstance(spec, CodecSpec):
            size = RowSegment(words, row_width, block=block, route=route).payload(0, words.numel(), room, spec)
        rows = None if size is None else Coded(CodecId.ROWS, 0, size)
        coded = rows or _encode(spec, [words], bases, unit, [room], route)[0]
        size, kind = payload_at + coded.size, framing.CHECKSUM if checksum else None
        header = Header(coded.frame_id, words.dtype, words.numel(), size, coded.block, shape, kind)
        frame = write_header(header, buffer)
        return frame.clone() if out is None else frame


def compress_segments(
    segments: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    codec: str | LossyCodec = "cascade",
    *,
    lossy: bool = False,
    block: int = 1024,
    route: str = "auto",
) -> list[torch.Tensor]:
    """Code each of several tensors of one dtype and device as a flat frame without a checksum, in one call of the kernels; blocks.

    Args:
        segments: tensors of any shapes.
        outs: a buffer for each segment, as ``out`` of :func:`compress`, apart from all segments and all other buffers.
        codec: as for :func:`compress`, without a base.
        lossy: as for :func:`compress`.
        block: as for :func:`compress`.
        route: as for :func:`compress`.

    Returns:
        The frames, views of ``outs``.

    Raises:
        ValueError, TypeError: as :func:`compress`; ValueError also where the dtypes or devices differ, or the number of buffers is not the
            number of segments.
        RouteUnavailable: no kernels here.
    """
    with tensors.undisturbed():
        if isinstance(codec, str) and codec_spec(codec).needs_base:
            raise ValueError(
                f"compress_segments takes no base, which codec {codec!r} needs; call compress for each segment"
            )
        if not segments:
            return []
        for segment in segments:
            admit("segment", segment)
        dtype = segments[0].dtype
        kinds = {(segment.dtype, segment.device) for segment in segments}
        if len(kinds) != 1 or len(segments) != len(outs):
            raise ValueError(
                f"wanted tensors of one dtype and device and a buffer for each, got {len(segments)} of {sorted(map(str, kinds))} "
                f"and {len(outs)} buffers"
            )
        spec = _spec(codec, dtype, lossy)
        block = spec.block(block)
        flats = [memory.flatten(segment) for segment in segments]
        at = framing.payload_offset(None)
        bounds = [at + spec.payload_bound(flat.numel(), dtype, block) for flat in flats]
        buffers = [
            memory.frame_room(out, bound, flat.device) for flat, out, bound in zip(flats, outs, bounds, strict=True)
        ]
        memory.keep_apart(list(map(memory.span, buffers, bounds)), list(map(memory.span, flats)))
        payloads = _encode(spec, flats, (), block, [buffer[at:] for buffer in buffers], route)
        return [
            write_header(Header(payload.frame_id, dtype, flat.numel(), at + payload.size, payload.block), buffer)
            for flat, buffer, payload in zip(flats, buffers, payloads, strict=True)
        ]


def decompress(
    frame: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    base: torch.Tensor | None = None,
    earlier: torch.Tensor | None = None,
    route: str = "auto",
) -> torch.Tensor:
    """Decode the tensor in ``frame``; blocks.

    Args:
        frame: 1-D uint8 tensor as :func:`compress` gives it; bytes after the frame's own length are ignored. ``ds_zipccl.decompress`` also
            takes such an array of another library; all other tensors may then be arrays too, with unsigned integers for words of a dtype
            that the library lacks.
        out: contiguous tensor on the frame's device, of the frame's dtype and number of elements, of any shape; written in place, which
            autograd sees as it sees ``out.copy_()``.
        base: the base of a delta frame, bit for bit: contiguous tensor on the frame's device, ``out`` itself or apart from it. Frames of
            other codecs ignore it.
        earlier: the words of the segment in front of a row frame, decoded already: contiguous tensor of the frame's dtype that ends where
            ``out`` begins, in the same storage. Frames of other codecs do not read it. Without it a row frame has only itself to repeat.

    Returns:
        ``out``, or a new tensor of the frame's dtype and shape (flat if the frame has no shape), for an array one of its library.

    Raises:
        FrameError: the frame is damaged, foreign, or not of the dtype and size of ``out`` and ``base``, or a delta frame without
            ``base``; ``out`` is then undefined. It is a ValueError.
        ValueError: ``out`` overlaps a part of ``base``, or ``frame``; nothing is written.
        TypeError: ``frame`` is not a contiguous 1-D uint8 tensor on the CPU or CUDA, or ``out`` or ``base`` is not a contiguous tensor on
            its device, or ``earlier`` does not end where ``out`` begins; or one of them is no dense tensor with data of its own, as for
            :func:`compress`.
        RuntimeError: ``out`` is a leaf that requires grad, or a view of one, while gradients are recorded; or an inference tensor outside
            of inference mode; nothing is written.
        RouteUnavailable: no kernels of the frame's codec here.
    """
    with tensors.undisturbed():
        admit("frame", frame, TypeError)
        header, spec = open_frame(frame)
        # Before the output is allocated: a few bytes of a delta frame stand for many words, which the base proves.
        against = _base_words(base, header, frame.device) if spec.needs_base else None
        payload = frame[header.payload_at : header.frame_bytes]
        if out is None:
            if spec.prove is not None:
                spec.prove(payload, header)
            room = tensors.empty(header.numel, header.dtype, frame.device)
            result = room if header.shape is None else room.view(header.shape)
        else:
            admit("out", out, TypeError)
            memory.decoded_room(out, header, (header.dtype,), frame.device)
            memory.keep_apart([memory.span(out)], [memory.span(frame, header.frame_bytes)])
            result = room = out
        words = memory.flat_view(room)
        if against is not None:
            if 0 < abs(against.data_ptr() - words.data_ptr()) < words.nbytes:
                raise ValueError("base and out overlap in part; pass the same memory for both, or a clone of the base")
        elif spec.takes_earlier:
            against = memory.earlier_words(earlier, words)
        if room is out:
            memory.note_write(out)
        spec.decode(payload, against, header.block, words, route)
        return result


def decompress_add(
    frame: torch.Tensor, sums: torch.Tensor, *, dtype: torch.dtype | None = None, route: str = "auto"
) -> torch.Tensor:
    """Add the tensor in ``frame`` to ``sums``, in one pass over ``sums``; blocks.

    Args:
        frame: as for :func:`decompress`, of bfloat16, float16 or float32.
        sums: contiguous tensor on the frame's device, of the frame's number of elements: of its dtype, and each sum is rounded to
            that (to nearest, ties to even), or float32. NaN sums of bfloat16 are 0x7fc0, as gloo makes them; other NaN
            payloads are left open. Autograd sees the addition of a constant in place.
        dtype: dtype that the frame must hold; None: ``sums``' dtype, or any of those if that is float32.

    Returns:
        ``sums``.

    Raises:
        FrameError: as :func:`decompress`; ``sums`` is then undefined. Delta frames cannot be added.
        TypeError, RuntimeError: as :func:`decompress`.
        ValueError: ``sums`` overlaps ``frame``; nothing is written.
    """
    with tensors.undisturbed():
        admit("frame", frame, TypeError)
        header, spec = open_frame(frame)
        if spec.decode_add is None:
            raise FrameError(FrameErrorCode.CODEC, f"a {spec.name} frame cannot be added; decompress it first")
        if header.dtype not in SUMMED_DTYPES or dtype not in (None, header.dtype):
            wanted = dtype or ", ".join(map(str, SUMMED_DTYPES))
            raise FrameError(FrameErrorCode.MISMATCH, f"frame holds {header.dtype}, wanted {wanted}")
        admit("sums", sums, TypeError)
        memory.decoded_room(sums, header, (header.dtype, torch.float32), frame.device)
        flat = memory.flat_view(sums)
        memory.keep_apart([memory.span(flat)], [memory.span(frame, header.frame_bytes)])
        memory.note_write(sums, adds=True)
        spec.decode_add(frame[header.payload_at : header.frame_bytes], header.block, header.dtype, flat, route)
        return sums


def project(
    tensor: torch.Tensor, codec: LossyCodec, *, out: torch.Tensor | None = None, route: str = "auto"
) -> torch.Tensor:
    """The values that a frame of ``tensor`` by ``codec`` decodes to, bit for bit; blocks.

    Args:
        tensor: bfloat16, float16 or float32, of any shape; a non-contiguous tensor is copied first.
        codec: the lossy codec; a scaled one takes the tensor's first element as the first of a group.
        out: contiguous tensor of the dtype, shape and device of ``tensor``: ``tensor`` itself, or apart from it.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Returns:
        ``out``, or a new tensor of the dtype and shape of ``tensor``.

    Raises:
        ValueError, TypeError: as :func:`ds_zipccl.compress`; ValueError also for an ``out`` of another kind, or one that overlaps a part of
            ``tensor``.
        RuntimeError: as :func:`ds_zipccl.decompress`.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        admit("tensor", tensor)
        spec = lossy_spec(codec, tensor.dtype)
        words = memory.flatten(tensor)
        if out is None:
            return projected(spec.project, words, route).view(tensor.shape)
        admit("out", out)
        kind = (tensor.dtype, tensor.shape, tensor.device)
        if (out.dtype, out.shape, out.device) != kind or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}, "
                f"got {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()} on {out.device}"
            )
        flat = memory.flat_view(out)
        if flat.data_ptr() != words.data_ptr():
            memory.keep_apart([memory.span(flat)], [memory.span(words)])
        memory.note_write(out)
        spec.project(words, flat, route)
        return out


def region_hash(tensor: torch.Tensor, *, key: bytes = NO_KEY, route: str = "auto") -> bytes:
    """Hash the bytes of a contiguous tensor to 16 bytes (FORMAT.md section 5), to compare bases on two ranks; blocks.

    Dtype and shape do not count. Without a ``key`` the hash is no defence against tensors that were made to collide: a few lines find some.

    Args:
        tensor: any dtype and shape.
        key: 16 random bytes that both ranks know, secret to whoever chooses the words.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Raises:
        ValueError: a ``key`` that has not 16 bytes.
        TypeError: ``tensor`` is not a contiguous CPU or CUDA tensor, dense and with data of its own, as for :func:`compress`.
        RouteUnavailable: no kernels here.
    """
    with tensors.undisturbed():
        admit("tensor", tensor, TypeError)
        if not tensor.is_contiguous():
            raise TypeError(f"region_hash takes a contiguous tensor, got strides {tensor.stride()}; pass .contiguous()")
        return hashed(memory.flatten(tensor).view(torch.uint8), key, route)


def open_frame(frame: torch.Tensor) -> tuple[Header, PayloadSpec]:
    """The header of ``frame`` (1-D uint8) and the codec that decodes its payload; waits for the device.

    Raises:
        FrameError: the frame is damaged or foreign, or its payload cannot have that size.
        TypeError: ``frame`` is not a 1-D contiguous uint8 tensor.
    """
    header = _parse(frame)
    spec = DECODERS[header.codec]
    check_payload(header, spec)
    return header, spec


def _parse(frame: torch.Tensor) -> Header:
    if frame.device.type == "cpu" or frame.dim() != 1:
        return framing.parse(frame)
    start = frame[: framing.MAX_HEADER_BYTES].cpu()
    return framing.parse(frame.cpu()) if framing.has_checksum(start) else framing.parse(start, frame.numel())


def _spec(codec: str | LossyCodec, dtype: torch.dtype, lossy: bool) -> CodecSpec | LossySpec:
    """The entry of ``codec``, if values may change as it changes them."""
    if not isinstance(codec, LossyCodec):
        return spec_for(codec, dtype)
    if not lossy:
        raise ValueError(f"codec {str(codec)!r} changes values; pass lossy=True to allow it")
    return lossy_spec(codec, dtype)


def _encode(
    spec: CodecSpec | LossySpec, segments: Tensors, bases: Tensors, block: int, outs: Tensors, route: str
) -> list[Coded]:
    if isinstance(spec, LossySpec):
        return spec.encode(segments, block, outs, route)
    return [Coded(spec.frame_id, block, size) for size in spec.encode(segments, bases, block, outs, route)]


def _bases(codec: str | LossyCodec, words: torch.Tensor, base: torch.Tensor | None) -> list[torch.Tensor]:
    """The flat base of ``words``; empty for a codec without a base."""
    if (base is None) is (isinstance(codec, str) and codec_spec(codec).needs_base):
        raise ValueError(
            f"codec {str(codec)!r} {'needs a' if base is None else 'takes no'} base; codecs with a base: {', '.join(BASE_CODECS)}"
        )
    if base is None:
        return []
    admit("base", base)
    if (base.dtype, base.numel(), base.device) != (words.dtype, words.numel(), words.device):
        raise ValueError(
            f"base must be a tensor of {words.numel()} {words.dtype} on {words.device}, "
            f"got {base.numel()} {base.dtype} on {base.device}"
        )
    return [memory.flatten(base)]


def _base_words(base: torch.Tensor | None, header: Header, device: torch.device) -> torch.Tensor:
    """The receiver's base, flat, if a frame on ``device`` with this header can be decoded against it."""
    if base is None:
        name = header.codec.name.lower()
        raise FrameError(FrameErrorCode.CODEC, f"a {name} frame needs the base of its encoder: pass base=")
    admit("base", base, TypeError)
    memory.decoded_room(base, header, (header.dtype,), device)
    return memory.flat_view(base)
