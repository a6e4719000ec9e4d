"""The header of a frame on any device: written over a finished payload, and read with the codec that decodes the payload."""

from __future__ import annotations

import torch

from ds_zipccl import frame as framing
from ds_zipccl.codecs.registry import DECODERS
from ds_zipccl.codecs.spec import CodecSpec
from ds_zipccl.frame import FrameError, FrameErrorCode, Header


def write_header(header: Header, buffer: torch.Tensor) -> None:
    """Write ``header`` to the start of ``buffer`` (1-D uint8), which holds the payload already.

    From CUDA, the header goes by way of the host, with a checksum the whole frame does; that waits for the device.
    """
    if buffer.device.type == "cpu":
        framing.pack(header, buffer)
        return
    host = buffer[: header.payload_at if header.checksum is None else header.frame_bytes].cpu()
    framing.pack(header, host)
    buffer[: header.payload_at].copy_(host[: header.payload_at])


def open_frame(frame: torch.Tensor) -> tuple[Header, CodecSpec]:
    """The header of ``frame`` (1-D uint8) and the codec that decodes its payload; waits for the device.

    Raises:
        FrameError: the frame is damaged or foreign, or its payload cannot have that size.
        TypeError: ``frame`` is not a 1-D contiguous uint8 tensor.
    """
    header = _parse(frame)
    spec = DECODERS[header.codec]
    if header.dtype not in spec.dtypes:
        raise FrameError(FrameErrorCode.CODEC, f"codec {header.codec.name} does not hold {header.dtype}")
    size = header.frame_bytes - header.payload_at
    floor = spec.payload_floor(header.numel, header.dtype, header.block)
    bound = spec.payload_bound(header.numel, header.dtype, header.block)
    if not floor <= size <= bound:
        raise FrameError(
            FrameErrorCode.SIZE, f"{size} bytes of payload for {header.numel} {header.dtype}: {floor} to {bound} fit"
        )
    return header, spec


def _parse(frame: torch.Tensor) -> Header:
    if frame.device.type == "cpu" or frame.dim() != 1:
        return framing.parse(frame)
    start = frame[: framing.MAX_HEADER_BYTES].cpu()
    return framing.parse(frame.cpu()) if framing.has_checksum(start) else framing.parse(start, frame.numel())
