"""Runtimes of devices: streams, events, and whether a graph is being captured.

Code that orders work on a device takes the runtime from :data:`RUNTIMES` and does not name ``torch.cuda``: the tests put a simulated
runtime into the table.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Runtime(Protocol):
    """The functions of ``torch.cuda`` that this package uses, with the meaning that they have there."""

    #: ``Stream(device, priority=0)``: a new stream; a lower number is a higher priority.
    Stream: Any
    #: ``Event(enable_timing=False)``.
    Event: Any

    def current_stream(self, device: torch.device) -> Any:
        """Return the calling thread's current stream of ``device``."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which ``stream``, and its device, are current for the calling thread."""

    def device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which ``device`` is current for the calling thread."""

    def is_current_stream_capturing(self) -> bool:
        """Return whether the current stream records a graph; nothing may wait for the device then."""

    def cudart(self) -> Any:
        """Return the functions of the CUDA runtime; ``cudaHostRegister`` and ``cudaHostUnregister`` are two of them."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes of memory of ``device`` that are free, and all."""

    def memory_reserved(self, device: torch.device) -> int:
        """Return the bytes of memory of ``device`` that torch's allocator has, in use or not."""

    def memory_allocated(self, device: torch.device) -> int:
        """Return the bytes of memory of ``device`` that tensors use."""

    def get_device_properties(self, device: torch.device) -> Any:
        """Return the properties of ``device``; ``multi_processor_count`` is one of them."""


#: device type -> runtime. A device that is not here has no streams: its work is done when a call returns.
RUNTIMES: dict[str, Runtime] = {"cuda": torch.cuda}


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of ``device`` that new tensors may have; None for a device without a runtime."""
    found = runtime(device)
    if found is None:
        return None
    return found.mem_get_info(device)[0] + found.memory_reserved(device) - found.memory_allocated(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the calling thread's current stream of ``device`` records a graph."""
    found = runtime(device)
    if found is None:
        return False
    with found.device(device):
        return found.is_current_stream_capturing()


def lock_pages(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Lock the pages of host memory, so that a device copies from and to the memory while the host goes on. Blocks for the pages.

    Returns:
        A function that unlocks the pages. It must be called before the memory is unmapped.

    Raises:
        RuntimeError: the driver refused.
    """
    found = runtime(device)
    if found is None:
        return lambda: None
    address, functions = memory.data_ptr(), found.cudart()
    with found.device(device):
        code = int(functions.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        raise RuntimeError(
            f"cudaHostRegister of {memory.nbytes} bytes returned error {code}; allow more locked memory (ulimit -l)"
        )

    def unlock() -> None:
        functions.cudaHostUnregister(address)

    return unlock


def runtime(device: torch.device) -> Runtime | None:
    """Return the runtime of a device, None for a device without streams."""
    return RUNTIMES.get(device.type)
