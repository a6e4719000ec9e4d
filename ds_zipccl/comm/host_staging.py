"""Frames of tensors on a GPU: coded there, carried through host memory, which is all that gloo's sends and receives take.

Where no CUDA kernels work on a rank, it codes on the host: which of both it does is its own affair, as frames are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import compress, compress_bound, decompress, decompress_add
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.frame import parse

#: Device types whose frames go through host memory.
STAGED = {"cuda"}


def is_staged(tensor: torch.Tensor) -> bool:
    return tensor.device.type in STAGED


@functools.cache
def _codes(device: str, route: str) -> bool:
    """Whether ``route`` has kernels on the device; the first call may build them."""
    try:
        kernels.route(route, device)
    except (kernels.RouteUnavailable, ValueError):  # the latter: a route of another device was asked for
        return False
    return True


def encode(flat: torch.Tensor, codec: str, block: int, route: str, lease: Lease) -> torch.Tensor:
    """Frame of a flat tensor on a GPU, in host memory of ``lease``; blocks."""
    if not _codes(flat.device.type, route):
        flat, route = flat.cpu(), "auto"
    bound = compress_bound(flat.numel(), flat.dtype, codec, block=block)
    there = tensors.empty(bound, torch.uint8, flat.device)
    frame = compress(flat, codec, out=there, block=block, shaped=False, checksum=False, route=route)
    return lease.bytes(frame.numel()).copy_(frame)


def decode(frame: torch.Tensor, out: torch.Tensor, route: str) -> torch.Tensor:
    """Decode a frame in host memory into flat ``out`` on a GPU; blocks. Raises FrameError."""
    if _codes(out.device.type, route):
        return decompress(_moved(frame, out), out, route=route)
    return out.copy_(decompress(frame, tensors.empty(out.numel(), out.dtype)))


def decode_add(frame: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    """Add what a frame in host memory holds to flat ``sums`` on a GPU; blocks. Raises FrameError."""
    if _codes(sums.device.type, route):
        decompress_add(_moved(frame, sums), sums, dtype=dtype, route=route)
    else:
        sums.copy_(decompress_add(frame, sums.cpu(), dtype=dtype))


def _moved(frame: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The frame, without what stands behind it, on the device of ``like``."""
    size = parse(frame).frame_bytes
    return tensors.empty(size, torch.uint8, like.device).copy_(frame[:size])


def callers_stream(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Gives a context for a job that may run in another thread: what it puts on the device comes after what the caller, now, has put
    there, and is done when the context ends."""
    if tensor.device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(tensor.device)

    @contextmanager
    def context() -> Iterator[None]:
        with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    return context
