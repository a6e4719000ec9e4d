"""The functions of torch.cuda, for the simulated GPU of the calling thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sim import races
from sim.device import machine, mine
from sim.streams import Event, Stream

__all__ = ["Event", "Stream"]


def current_stream(device: Any = None) -> Stream:
    gpu = mine() if device is None else machine().gpu(device)
    return Stream(gpu.device, lane=gpu.current)


def default_stream(device: Any = None) -> Stream:
    gpu = mine() if device is None else machine().gpu(device)
    return Stream(gpu.device, lane=gpu.default)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    gpu = stream.gpu
    before, gpu.current = gpu.current, stream.lane
    try:
        yield
    finally:
        gpu.current = before


def set_stream(stream: Stream) -> None:
    stream.gpu.current = stream.lane


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    machine().gpu(device)  # refuses another rank's
    yield


def set_device(device: Any) -> None:
    machine().gpu(device)


def current_device() -> int:
    return mine().rank


def device_count() -> int:
    return machine().ranks  # type: ignore[no-any-return]


def is_available() -> bool:
    return True


def cudart() -> SimpleNamespace:
    """Return the functions that lock pages of host memory: streams copy from and to it while the host goes on."""
    locked = mine().locked

    def register(address: int, nbytes: int, flags: int) -> int:
        locked[address] = nbytes
        return 0

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: locked.pop(address, None))


def synchronize(device: Any = None) -> None:
    gpu = mine() if device is None else machine().gpu(device)
    clock: races.Clock = {}
    for lane in gpu.lanes:
        races.take_over(clock, lane.clock)
    gpu.wait(lambda: gpu.scheduler.pending(gpu.rank) == 0, "torch.cuda.synchronize", clock)


def is_current_stream_capturing() -> bool:
    return mine().capture is not None


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    gpu = mine() if device is None else machine().gpu(device)
    return SimpleNamespace(
        name="simulated", major=9, minor=0, multi_processor_count=132, total_memory=gpu.allocator.arena_bytes
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    allocator = mine().allocator
    return allocator.arena_bytes - allocator.live, allocator.arena_bytes


def memory_allocated(device: Any = None) -> int:
    return mine().allocator.live


def max_memory_allocated(device: Any = None) -> int:
    return mine().allocator.peak


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """torch calls this before it makes a tensor of the GPU."""


#: Names that a simulation replaces in torch.cuda.
REPLACED = (
    "Event Stream cudart current_device current_stream default_stream device device_count get_device_capability "
    "get_device_properties is_available max_memory_allocated memory_allocated "
    "is_current_stream_capturing is_initialized mem_get_info set_device set_stream stream synchronize _lazy_init"
).split()
assert all(hasattr(torch.cuda, name) for name in REPLACED)
