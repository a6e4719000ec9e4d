"""Frames inside of a payload: flat, without a checksum, and padded to 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zipccl import frame as framing
from ds_zipccl import tensors
from ds_zipccl.codecs.exponent import CASCADE
from ds_zipccl.codecs.raw import RAW
from ds_zipccl.codecs.spec import PayloadSpec, check_payload
from ds_zipccl.frame import HEADER_BYTES, CodecId, FrameErrorCode, Header, pad16

#: Codec byte of a nested frame of words as they are -> its format.
LITERALS: dict[CodecId, PayloadSpec] = {RAW.frame_id: RAW, CASCADE.frame_id: CASCADE}


@dataclass(frozen=True)
class Nested:
    """A nested frame whose header and size are proven; ``end``: where it ends in the payload, without padding."""

    spec: PayloadSpec
    block: int
    payload: torch.Tensor
    end: int


def finish(header: Header, out: torch.Tensor, at: int) -> int:
    """Write the header of the nested frame at ``at``, and zeros behind the frame; return where the next part begins."""
    if out.device.type == "cpu":
        framing.pack(header, out[at:])
    else:
        start = tensors.of_buffer(bytearray(HEADER_BYTES))
        framing.pack(header, start)
        out[at : at + HEADER_BYTES].copy_(start)
    end = at + header.frame_bytes
    if end % 16:
        out[end : pad16(end)].zero_()
    return pad16(end)


def header_at(payload: torch.Tensor, at: int, flagged: FrameErrorCode) -> Header:
    """The header of the frame that begins at ``at``.

    Raises:
        FrameError: as :func:`ds_zipccl.frame.parse_nested`.
    """
    return framing.parse_nested(payload[at : at + HEADER_BYTES].cpu(), payload.numel() - at, flagged)


def part(payload: torch.Tensor, at: int, header: Header, spec: PayloadSpec) -> Nested:
    """The frame with ``header`` that begins at ``at``, of a format that the caller allows.

    Raises:
        FrameError: it cannot have that size.
    """
    check_payload(header, spec)
    end = at + header.frame_bytes
    return Nested(spec, header.block, payload[at + HEADER_BYTES : end], end)
