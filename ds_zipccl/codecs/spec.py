"""The entry of a codec: its place in a frame, what it promises, and its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_zipccl import kernels
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header
from ds_zipccl.lossy import LossyCodec

#: dtypes that lossy codecs take.
LOSSY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Tensors = Sequence[torch.Tensor]
#: (elements, dtype, block) -> bytes of a payload.
PayloadSize = Callable[[int, torch.dtype, int], int]


def any_size(numel: int, dtype: torch.dtype, block: int) -> int:
    """The ``payload_bound`` of a format whose parts prove the size: none."""
    return (1 << 63) - 1


class Encode(Protocol):
    """Encode each of ``segments`` into its place in ``outs``; blocks.

    Segments are flat contiguous tensors of one dtype and device. ``bases`` has one base for each segment where the codec needs a base,
    else it is empty. An out is a flat uint8 tensor of ``payload_bound`` bytes on that device.

    Returns:
        Bytes of each payload.

    Raises:
        ValueError: a segment has more elements than a frame holds.
    """

    def __call__(self, segments: Tensors, bases: Tensors, block: int, outs: Tensors, route: str) -> list[int]: ...


class Decode(Protocol):
    """Decode ``payload`` (flat uint8) into ``words`` (flat, contiguous, same device); blocks.

    ``base`` has the dtype and size of ``words`` and may be ``words`` itself; None where the codec needs no base. Of a codec that takes
    earlier words, it is those: of the dtype of ``words``, any number, directly in front of ``words`` in the same memory; or None.

    Raises:
        FrameError: the payload contradicts itself; the words are then undefined.
    """

    def __call__(
        self, payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str
    ) -> None: ...


class Prove(Protocol):
    """Examine ``payload`` as far as needed to prove that it has the elements of ``header``.

    Raises:
        FrameError: it has not.
    """

    def __call__(self, payload: torch.Tensor, header: Header) -> object: ...


class DecodeAdd(Protocol):
    """Add the words of ``dtype`` in ``payload`` to ``sums``, of that dtype or float32; blocks.

    Raises:
        FrameError: the payload contradicts itself; the sums are then undefined.
    """

    def __call__(
        self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str, /
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PayloadSpec:
    """One payload format: its place in a frame and its decoder. :mod:`ds_zipccl.codecs.registry` lists it."""

    name: str
    #: Codec byte of the frames.
    frame_id: CodecId
    #: dtypes that frames of this format hold.
    dtypes: tuple[torch.dtype, ...]
    #: Sender and receiver hold a tensor that the words are coded against.
    needs_base: bool = False
    #: The words may refer to words in front of them that the receiver holds.
    takes_earlier: bool = False
    #: The largest payload of so many elements, also the room that an encoder needs.
    payload_bound: PayloadSize
    #: The smallest payload of so many elements.
    payload_floor: PayloadSize
    #: For a format whose ``payload_floor`` proves nothing, and that needs no base: called before an output is allocated.
    prove: Prove | None = None
    decode: Decode
    #: None: frames of this format cannot be added.
    decode_add: DecodeAdd | None = None


def lossy_format(
    kernel_call: Callable[[torch.Tensor, int, int, str], tuple[str, tuple[Any, ...]]], **fields: Any
) -> PayloadSpec:
    """The format of a lossy codec, decoded and added by a call of its kernels.

    Args:
        kernel_call: (payload, elements, block, route) -> the call, and its arguments in front of the words.
        fields: the other fields of the entry; ``dtypes`` are those of lossy codecs unless given.
    """

    def into(payload: torch.Tensor, block: int, adds: torch.dtype | None, words: torch.Tensor, route: str) -> None:
        call, given = kernel_call(payload, words.numel(), block, route)
        getattr(kernels.lossy_route(route, words.device.type, call), call)(*given, words, adds)

    def decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
        into(payload, block, None, words, route)

    return PayloadSpec(decode=decode, decode_add=into, **{"dtypes": LOSSY_DTYPES, **fields})


@dataclass(frozen=True, kw_only=True)
class CodecSpec(PayloadSpec):
    """One codec that callers choose by its name. Its module makes the entry, :mod:`ds_zipccl.codecs.registry` lists it.

    Codecs that share a ``frame_id`` write one payload format and share its decoder; they differ in what their encoder chooses.
    Tensors of a dtype that is not in ``dtypes`` become raw frames.
    A parameter of a codec, such as a number of bits, is bound into ``encode`` by the codec's module.
    """

    #: Block size of the header for the block size that the caller wants; raises ValueError for an impossible one.
    block: Callable[[int], int]
    encode: Encode
    #: Names that the codec had before; they raise an error that has the name of today.
    former_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coded:
    """A payload that an encoder has written: how its frame names it, and its bytes."""

    frame_id: CodecId
    block: int
    size: int


class EncodeLossy(Protocol):
    """As :class:`Encode`, without bases; each payload may be of another format, and is lossless where no other is smaller."""

    def __call__(self, segments: Tensors, block: int, outs: Tensors, route: str) -> list[Coded]: ...


class Project(Protocol):
    """Write the values that the frame of ``words`` (flat, contiguous) decodes to, to ``out``, of the same kind; it may be ``words``."""

    def __call__(self, words: torch.Tensor, out: torch.Tensor, route: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LossySpec:
    """A lossy codec with its settings. Its module has the functions, from which :mod:`ds_zipccl.codecs.registry` makes the entry.

    It codes tensors of :data:`LOSSY_DTYPES`.
    """

    codec: LossyCodec
    #: Block size for the block size that the caller wants; raises ValueError for an impossible one.
    block: Callable[[int], int]
    #: The largest payload of so many elements, also the room that the encoder needs.
    payload_bound: PayloadSize
    encode: EncodeLossy
    project: Project


def check_payload(header: Header, spec: PayloadSpec) -> None:
    """Accept a frame's header if its payload, of ``spec``'s format, can have its size and elements.

    Raises:
        FrameError: it cannot.
    """
    if header.dtype not in spec.dtypes:
        raise FrameError(FrameErrorCode.CODEC, f"codec {header.codec.name} does not hold {header.dtype}")
    size = header.frame_bytes - header.payload_at
    floor = spec.payload_floor(header.numel, header.dtype, header.block)
    bound = spec.payload_bound(header.numel, header.dtype, header.block)
    if not floor <= size <= bound:
        raise FrameError(
            FrameErrorCode.SIZE, f"{size} bytes of payload for {header.numel} {header.dtype}: {floor} to {bound} fit"
        )
