"""Frames of CUDA tensors, compressed on the GPU and sent from host memory. gloo's sends and receives take host memory only.

A rank without working CUDA kernels compresses on the host. Each rank decides alone, because the frames are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ds_zipccl import codecs, kernels, tensors
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.frame import parse

#: Device types whose frames go through host memory.
STAGED = {"cuda"}


def is_staged(device: str) -> bool:
    """Return whether frames of tensors on a device type go through host memory."""
    return device in STAGED


@functools.cache
def _codes(device: str, route: str) -> bool:
    """Return whether ``route`` has kernels on the device; the first call may build the kernels."""
    try:
        kernels.route(route, device)
    except (kernels.RouteUnavailable, ValueError):  # ValueError: ``route`` is a route of another device
        return False
    return True


def compress(flat: torch.Tensor, codec: str, block: int, route: str, buffers: PooledBuffers) -> torch.Tensor:
    """Return the frame of a flat tensor on a GPU, in host memory of ``buffers``; blocks."""
    if not _codes(flat.device.type, route):
        flat, route = flat.cpu(), "auto"
    bound = codecs.compress_bound(flat.numel(), flat.dtype, codec, block=block)
    there = tensors.empty(bound, torch.uint8, flat.device)
    frame = codecs.compress(flat, codec, out=there, block=block, shaped=False, checksum=False, route=route)
    return buffers.take(frame.numel()).copy_(frame)


def decompress(frame: torch.Tensor, out: torch.Tensor, route: str) -> torch.Tensor:
    """Decompress a frame in host memory into flat ``out`` on a GPU; blocks. Raises FrameError."""
    if _codes(out.device.type, route):
        return codecs.decompress(_moved(frame, out), out, route=route)
    return out.copy_(codecs.decompress(frame, tensors.empty(out.numel(), out.dtype)))


def decompress_add(frame: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
    """Add the values in a frame in host memory to flat ``sums`` on a GPU; blocks. Raises FrameError."""
    if _codes(sums.device.type, route):
        codecs.decompress_add(_moved(frame, sums), sums, dtype=dtype, route=route)
    else:
        sums.copy_(codecs.decompress_add(frame, sums.cpu(), dtype=dtype))


def _moved(frame: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the frame, without the bytes behind its end, on the device of ``like``."""
    size = parse(frame).frame_bytes
    return tensors.empty(size, torch.uint8, like.device).copy_(frame[:size])


def callers_stream(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts for a job that may run in another thread. The job's work runs on the caller's current stream, after the
    work that the caller has queued there. The end of the context blocks until the job's work is done."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)

    @contextmanager
    def context() -> Iterator[None]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    return context
