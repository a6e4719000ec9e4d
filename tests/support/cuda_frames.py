"""Words, slots with guards around them, and frames of the CPU, for tests of the CUDA kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ds_zipccl import codecs
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status, raise_failure

Kernel = tuple[CudaBackend, torch.device]
CPU = torch.device("cpu")

GUARD = 0x5C


def words(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values[torch.rand(numel, generator=generator) < 0.02] = 0
    return values.to(dtype)


def slot(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot of ``size`` bytes, and the memory around it, all guards."""
    memory = torch.full((size + 64,), GUARD, dtype=torch.uint8, device=device)
    return memory[32 : 32 + size], memory


def frame_of(
    tensor: torch.Tensor, code: str = "cascade", block: int = 1024, base: torch.Tensor | None = None
) -> torch.Tensor:
    """The flat frame of the CPU."""
    return codecs.compress(tensor, code, base=base, block=block, shaped=False, checksum=False, route="native")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the CPU."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def pad(size: int, unit: int = 16) -> int:
    return -(-size // unit) * unit


def slot_bytes(numel: int, dtype: torch.dtype, block: int = 128) -> int:
    return pad(codecs.compress_bound(numel, dtype, block=block))


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with some words changed a little, or some bytes of a dtype that is no float of 16 or 32 bits."""
    if tensor.dtype not in codecs.SUMMED_DTYPES:
        moved = bits(tensor) + (words(torch.float32, tensor.nbytes, 7) > 1.5).byte()
        return moved.view(tensor.dtype)
    moved = (tensor.float() * 1.01).to(tensor.dtype)
    return torch.where(words(torch.float32, tensor.numel(), 7) > 1, moved, tensor)


def offsets(dtype: torch.dtype) -> range:
    """Every distance, in elements, from a multiple of 16 bytes."""
    return range(16 // dtype.itemsize)


def at_offset(tensor: torch.Tensor, offset: int, device: torch.device, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``tensor`` that many elements after a multiple of 16 bytes, and the memory around it, bytes of ``fill``."""
    begin = 64 + offset * tensor.itemsize
    memory = torch.full((begin + tensor.nbytes + 64,), fill, dtype=torch.uint8, device=device)
    assert memory.data_ptr() % 16 == 0
    memory[begin : begin + tensor.nbytes].copy_(tensor.view(torch.uint8))
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype), memory


def assert_guarded(memory: torch.Tensor, inside: torch.Tensor) -> None:
    begin = inside.data_ptr() - memory.data_ptr()
    assert (memory[:begin] == GUARD).all() and (memory[begin + inside.nbytes :] == GUARD).all()


def round_trip(
    route: CudaBackend, device: torch.device, tensors: Sequence[torch.Tensor], block: int = 1024
) -> list[torch.Tensor]:
    """The frames of tensors in slots, after proof that they are those of the CPU, give the words, and lie inside of their slots."""
    slots = [slot(codecs.compress_bound(tensor.numel(), tensor.dtype, block=block), device) for tensor in tensors]
    frames = [at for at, _ in slots]
    overflows = torch.zeros(1, dtype=torch.int32, device=device)
    route.encode_frames([tensor.to(device) for tensor in tensors], "cascade", block, frames, overflows)
    for tensor, (at, memory) in zip(tensors, slots, strict=True):
        wanted = frame_of(tensor, block=block)
        assert torch.equal(at[: wanted.numel()].cpu(), wanted), tensor.numel()
        assert_guarded(memory, at)
    assert overflows.item() == 0
    outs, status = [torch.empty_like(tensor, device=device) for tensor in tensors], new_status(device)
    route.decode_frames(frames, block, outs, status)
    raise_failure(status)
    for tensor, out in zip(tensors, outs, strict=True):
        assert torch.equal(bits(out), bits(tensor)), tensor.numel()
    return frames


class NoLauncher:
    """Starts nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        self.names.append(kernel)
