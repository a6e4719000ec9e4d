"""Checks of tensors before a launch: an address that a kernel cannot use would end the CUDA context, and the program with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ds_zipccl.frame import BLOCK_LOG2, CodecId

#: Codes of :meth:`.backend.CudaBackend.encode_frames`. A raw frame is the header and the words.
CODES = ("cascade", "wide", "raw", "delta")
#: Elements of a block, in coded frames.
BLOCKS = tuple(1 << log2 for log2 in BLOCK_LOG2[CodecId.EXPONENT])
#: Bytes of words in one frame: the chunk offsets of a payload reach 64 GiB, those of a delta payload 32 GiB, tables and paddings included.
MAX_FRAME_WORD_BYTES, MAX_DELTA_WORD_BYTES = 60 << 30, 30 << 30


def addresses(tensors: Sequence[torch.Tensor], name: str, dtype: torch.dtype | None, device: torch.device) -> list[int]:
    """Return the addresses of contiguous tensors of one dtype (None: of any) and device.

    Raises:
        ValueError: a tensor is something else; the message has ``name`` and the tensor's number.
    """
    found = []
    for number, tensor in enumerate(tensors):
        if (dtype and tensor.dtype is not dtype) or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} {number}: got {describe(tensor)}, wanted contiguous {dtype or 'memory'} on {device}; use .to() or .contiguous()"
            )
        found.append(tensor.data_ptr())
    return found


def slots(
    tensors: Sequence[torch.Tensor], name: str, least_bytes: int, device: torch.device
) -> tuple[list[int], list[int]]:
    """Return addresses and bytes of slots for frames.

    Raises:
        ValueError: a slot is not at a multiple of 16 bytes, or shorter than ``least_bytes``, or no contiguous uint8 tensor of the device.
    """
    found, sizes = addresses(tensors, name, torch.uint8, device), [tensor.numel() for tensor in tensors]
    for number, (at, size) in enumerate(zip(found, sizes, strict=True)):
        if at % 16:
            raise ValueError(
                f"{name} {number}: frames start at multiples of 16 bytes, got address {at:#x}; cut the staging buffer at such offsets"
            )
        if size < least_bytes:
            raise ValueError(
                f"{name} {number}: a slot holds at least the {least_bytes} bytes of a header, got {size}; make it longer"
            )
    return found, sizes


def return_payloads(places: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    """Copy payloads of ``sizes`` bytes from the places where kernels wrote them to ``outs``, which mostly are these places.

    Raises:
        ValueError: a payload does not fit.
    """
    for place, out, size in zip(places, outs, sizes, strict=True):
        if size > out.numel():
            raise ValueError(f"a payload of {size} bytes does not fit in {out.numel()}; use compress_bound()")
        if place is not out:
            out[:size].copy_(place[:size])


def word(tensor: torch.Tensor, name: str, dtype: torch.dtype, device: torch.device) -> int:
    """Return the address of one element that kernels write with atomics: memory of the device, or pinned memory of the host.

    Raises:
        ValueError: the tensor is something else.
    """
    if tensor.dtype is not dtype or tensor.numel() != 1 or not (tensor.device == device or tensor.is_pinned()):
        raise ValueError(
            f"{name}: got {describe(tensor)}, wanted one element of {dtype} on {device} or in pinned memory; use new_status(), "
            "or zeros for a counter"
        )
    return tensor.data_ptr()


def as_many(name: str, got: int, of: str, wanted: int, each: int = 1) -> None:
    """Accept ``each`` of one thing for every one of another.

    Raises:
        ValueError: there are more or fewer.
    """
    if got != each * wanted:
        raise ValueError(f"got {got} {name} for {wanted} {of}; give {each} for each")


def bases(
    tensors: Sequence[torch.Tensor], numels: Sequence[int], of: str, dtype: torch.dtype, device: torch.device
) -> list[int]:
    """Return the addresses of bases, one for each ``of``, whose elements are ``numels``.

    Raises:
        ValueError: a base is something else.
    """
    as_many("bases", len(tensors), f"{of}s", len(numels))
    for number, (base, numel) in enumerate(zip(tensors, numels, strict=True)):
        as_many(f"words of base {number}", base.numel(), f"words of its {of}", numel)
    return addresses(tensors, "base", dtype, device)


def choice(name: str, got: object, table: Collection[object]) -> None:
    """Accept a value that kernels exist for.

    Raises:
        ValueError: there are none.
    """
    if got not in table:
        raise ValueError(f"no kernel for {name} {got}; choose one of {', '.join(map(str, table))}")


def frames(numels: Sequence[int], itemsize: int, block: int, delta: bool = False) -> None:
    """Accept sizes of frames.

    Raises:
        ValueError: no frame has this block, or a frame cannot hold so many words.
    """
    choice("block", block, BLOCKS)
    most = MAX_DELTA_WORD_BYTES if delta else MAX_FRAME_WORD_BYTES
    if numels and max(numels) * itemsize > most:
        raise ValueError(f"got {max(numels) * itemsize} bytes of words for a frame, at most {most} fit; cut the tensor")


def describe(tensor: torch.Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"
    return f"{tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}, {layout}"
