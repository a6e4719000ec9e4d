"""The entry of a codec: its place in a frame, what it promises, and its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_zipccl.frame import CodecId

#: (elements, dtype, block) -> bytes of a payload.
PayloadSize = Callable[[int, torch.dtype, int], int]


class Encode(Protocol):
    """Encode each of ``segments`` into its place in ``outs``; blocks.

    Segments are flat contiguous tensors of one dtype and device. ``bases`` has one base for each segment where the codec needs a base,
    else it is empty. An out is a flat uint8 tensor of ``payload_bound`` bytes on that device.

    Returns:
        Bytes of each payload.

    Raises:
        ValueError: a segment has more elements than a frame holds.
    """

    def __call__(
        self,
        segments: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor],
        block: int,
        outs: Sequence[torch.Tensor],
        route: str,
    ) -> list[int]: ...


class Decode(Protocol):
    """Decode ``payload`` (flat uint8) into ``words`` (flat, contiguous, same device); blocks.

    ``base`` has the dtype and size of ``words`` and may be ``words`` itself; None where the codec needs no base.

    Raises:
        FrameError: the payload contradicts itself; the words are then undefined.
    """

    def __call__(
        self, payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str
    ) -> None: ...


class DecodeAdd(Protocol):
    """Add the words of ``dtype`` in ``payload`` to ``sums``, of that dtype or float32; blocks.

    Raises:
        FrameError: the payload contradicts itself; the sums are then undefined.
    """

    def __call__(
        self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """One codec. Its module makes the entry, :mod:`ds_zipccl.codecs.registry` lists it.

    Codecs that share a ``frame_id`` write one payload format and decode alike; they differ in what their encoder chooses.
    A parameter of a codec, such as a number of bits, is bound into ``encode`` by the codec's module.
    """

    name: str
    #: Codec byte of the frames.
    frame_id: CodecId
    #: Tensors of any other dtype become raw frames.
    dtypes: tuple[torch.dtype, ...]
    #: Every bit pattern arrives as it was sent. A lossy codec is only for a role that names it.
    lossless: bool
    #: The encoder keeps something from one call to the next, so that the order of calls counts.
    stateful: bool
    #: Sender and receiver hold a tensor that the words are coded against.
    needs_base: bool
    #: Block size of the header for the block size that the caller wants; raises ValueError for an impossible one.
    block: Callable[[int], int]
    #: The largest payload of so many elements, also the room that an encoder needs.
    payload_bound: PayloadSize
    #: The smallest payload of so many elements.
    payload_floor: PayloadSize
    encode: Encode
    decode: Decode
    #: None: frames of this codec cannot be added.
    decode_add: DecodeAdd | None
    #: Names that the codec had before; they raise an error that has the name of today.
    former_names: tuple[str, ...] = ()
