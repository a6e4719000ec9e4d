"""The memory around coding: tensors that kernels can read, flat views, room for a frame and its header, overlap of outputs with inputs; and
frames inside of a payload, which are flat, without a checksum, and padded to 16 bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_zipccl import frame as framing
from ds_zipccl import kernels, tensors
from ds_zipccl.codecs.spec import PayloadSpec, check_payload
from ds_zipccl.frame import HEADER_BYTES, FrameError, FrameErrorCode, Header, pad16

#: Devices whose tensors are coded.
DEVICES = tuple(kernels.ROUTES)
#: torch's dispatch keys, as bits, of tensors whose elements are elsewhere or not written out: subclasses that wrap others among them.
_ELSEWHERE = sum(
    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()
    for key in "Python ZeroTensor Functionalize FuncTorchBatched FuncTorchGradWrapper NestedTensor Quantized".split()
)
#: First address, and the address after the last byte.
Span = tuple[int, int]


def has_words(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory of :data:`DEVICES`, at its address and strides: kernels know nothing else."""
    wrapped = tensors.is_traced(type(tensor)) or torch._C._dispatch_keys(tensor).raw_repr() & _ELSEWHERE
    if wrapped or tensor.layout is not torch.strided or tensor.device.type not in DEVICES:
        return False
    last, numel = tensor.storage_offset() + tensor.numel() - 1, tensor.numel()
    if not tensor.is_contiguous():
        last = tensor.storage_offset() + sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    # a storage may have been resized under its tensors, as FSDP does
    there = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0  # torch's tensors of zeros have no address
    return not numel or (last + 1) * tensor.itemsize <= there


def admit(name: str, tensor: torch.Tensor, error: type[Exception] = ValueError) -> None:
    """Accept an argument whose words kernels can read: the door of all calls that take tensors.

    Raises:
        TypeError: it is no tensor.
        ValueError: :func:`has_words` says no; ``error`` in place of ValueError where that is given.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not has_words(tensor):
        raise error(
            f"{name} must be a dense tensor on {' or '.join(DEVICES)} with data of its own, got a {type(tensor).__name__} of "
            f"{tensor.dtype}, {tensor.layout} on {tensor.device}; pass .to_dense(), .cpu() or .to_local(), outside of traces"
        )


def viewed(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The words of ``tensor`` as elements of ``dtype``.

    Raises:
        TypeError, ValueError: as :func:`admit`; ValueError also where ``dtype`` has another size.
    """
    admit(name, tensor)
    if tensor.itemsize != dtype.itemsize:
        raise ValueError(
            f"dtype={dtype} has {dtype.itemsize} bytes, the elements of {tensor.dtype} have {tensor.itemsize}; leave it out"
        )
    return tensor.view(dtype)


def note_write(out: torch.Tensor, *, adds: bool = False) -> None:
    """Tell autograd, before ``out`` is written at its address, that all of it gets other values, or with ``adds`` that constants are added.

    Raises:
        RuntimeError: torch's own, where ``out.copy_()`` raises: a leaf that requires grad or a view of one while gradients are recorded,
            or an inference tensor outside of inference mode.
    """
    # To add constants is the identity for gradients, as is a write to no element.
    seen = out.view(-1)[:0] if adds else out
    seen.copy_(seen.detach())  # moves nothing: torch leaves out copies of a tensor to itself


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension, in the order of the shape; a copy unless they are contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,))  # view(-1) may keep a stride of 0


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in one dimension, in the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def frame_room(out: torch.Tensor, bound: int, device: torch.device) -> torch.Tensor:
    """``out``, if a frame of ``bound`` bytes fits in it.

    Raises:
        ValueError: it does not fit, or :func:`admit` raises.
    """
    admit("out", out)
    fits = (out.dtype, out.dim(), out.device) == (torch.uint8, 1, device) and out.is_contiguous()
    if not fits or out.numel() < bound:
        raise ValueError(
            f"out must be a contiguous 1-D uint8 tensor of at least {bound} bytes on {device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}; compress_bound() gives its size"
        )
    return out


def frame_buffer(
    out: torch.Tensor | None, bound: int, device: torch.device, inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """:func:`frame_room`, apart from ``inputs`` (contiguous), or new memory where ``out`` is None."""
    if out is None:
        return tensors.empty(bound, torch.uint8, device)
    buffer = frame_room(out, bound, device)
    keep_apart([span(buffer, bound)], list(map(span, inputs)))
    return buffer


def decoded_room(out: torch.Tensor, header: Header, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Accept ``out`` if the words of a frame with this header fit in it; ``dtypes``: the ones that ``out`` may have.

    Raises:
        TypeError: ``out`` is not a contiguous tensor on ``device``.
        FrameError: it has another dtype or number of elements.
    """
    if out.device != device or not out.is_contiguous() or out.is_conj() or out.is_neg():
        kind = "a conjugate or negative view" if out.is_conj() or out.is_neg() else f"strides {out.stride()}"
        raise TypeError(f"out must be a contiguous tensor on {device}, got {kind} on {out.device}")
    if out.dtype not in dtypes or out.numel() != header.numel:
        wanted = f"{out.numel()} {out.dtype}"
        raise FrameError(FrameErrorCode.MISMATCH, f"frame holds {header.numel} {header.dtype}, wanted {wanted}")


def span(tensor: torch.Tensor, size: int | None = None) -> Span:
    """Where the first ``size`` bytes of a contiguous tensor lie; None: all bytes."""
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes if size is None else size)


def overlapping(
    sources: Sequence[torch.Tensor], written: Sequence[torch.Tensor], homes: Sequence[torch.Tensor] = ()
) -> list[bool]:
    """Return for each source whether it shares memory with a tensor in ``written``; source i may be exactly ``homes[i]``."""
    spans, found = {span(flat) for flat in written if flat.numel()}, []
    for flat, home in itertools.zip_longest(sources, homes):
        begin, end = own = span(flat)
        others = spans - {own} if home is not None and span(home) == own else spans
        found.append(bool(flat.numel()) and any(begin < last and first < end for first, last in others))
    return found


def keep_apart(outputs: Sequence[Span], inputs: Sequence[Span]) -> None:
    """Accept outputs that share no byte with an input or with each other.

    The spans are sorted and swept over once, because an all-to-all has many of them.

    Raises:
        ValueError: they share one.
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


def write_header(header: Header, buffer: torch.Tensor) -> torch.Tensor:
    """Write ``header`` to the start of ``buffer`` (1-D uint8), which holds the payload already; return the frame, a view of ``buffer``.

    On CUDA, the header comes from the host; with a checksum the whole frame goes there first. The host waits for the device.
    """
    if buffer.device.type == "cpu":
        framing.pack(header, buffer)
    else:
        bare = header.checksum is None
        host = tensors.empty(header.payload_at, torch.uint8) if bare else buffer[: header.frame_bytes].cpu()
        framing.pack(header, host)
        buffer[: header.payload_at].copy_(host[: header.payload_at])
    return buffer[: header.frame_bytes]


def earlier_words(earlier: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor | None:
    """``earlier``, flat, if it lies directly in front of ``words`` (flat) in the same memory.

    Raises:
        TypeError: it does not, or has another dtype, or is not contiguous.
    """
    if earlier is None or not (earlier.numel() and words.numel()):  # no address then
        return None
    admit("earlier", earlier, TypeError)
    flat = flat_view(earlier)
    adjoins = flat.data_ptr() + flat.nbytes == words.data_ptr() and (
        flat.untyped_storage().data_ptr() == words.untyped_storage().data_ptr()
    )
    if (earlier.dtype, earlier.device) != (words.dtype, words.device) or not earlier.is_contiguous() or not adjoins:
        raise TypeError(
            f"earlier must be a contiguous tensor of {words.dtype} on {words.device} that ends where out begins, in the same memory, "
            f"got {earlier.dtype} with strides {earlier.stride()} on {earlier.device}: pass both as slices of one tensor"
        )
    return flat


@dataclass(frozen=True)
class Nested:
    """A nested frame whose header and size are proven; ``end``: where it ends in the payload, without padding."""

    spec: PayloadSpec
    block: int
    payload: torch.Tensor
    end: int


def finish_nested(header: Header, out: torch.Tensor, at: int) -> int:
    """Write the header of the nested frame at ``at``, and zeros behind the frame; return where the next part begins."""
    write_header(header, out[at:])
    end = at + header.frame_bytes
    if end % 16:
        out[end : pad16(end)].zero_()
    return pad16(end)


def nested_header(payload: torch.Tensor, at: int, flagged: FrameErrorCode) -> Header:
    """The header of the frame that begins at ``at``.

    Raises:
        FrameError: as :func:`ds_zipccl.frame.parse_nested`.
    """
    return framing.parse_nested(payload[at : at + HEADER_BYTES].cpu(), payload.numel() - at, flagged)


def nested_part(payload: torch.Tensor, at: int, header: Header, spec: PayloadSpec) -> Nested:
    """The frame with ``header`` that begins at ``at``, of a format that the caller allows.

    Raises:
        FrameError: it cannot have that size.
    """
    check_payload(header, spec)
    end = at + header.frame_bytes
    return Nested(spec, header.block, payload[at + HEADER_BYTES : end], end)
