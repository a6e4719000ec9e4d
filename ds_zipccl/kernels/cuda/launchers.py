"""The two launchers of the CUDA kernels: a library of nvcc, and functions of CuPy.

Both load every kernel on a device, and launch it there on no work, before the first launch with work. CUDA would otherwise load a kernel
when it is first launched, and wait for the device meanwhile: beside a kernel of NCCL that waits for another rank, that wait has no end.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ds_zipccl.kernels.c_functions import bind
from ds_zipccl.kernels.cuda import cupy_kernels
from ds_zipccl.kernels.cuda.interface import KERNELS, SIGNATURES


class Launcher(Protocol):
    """Starts a kernel of :data:`KERNELS` by name."""

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Put a grid of ``grid[0]`` times ``grid[1]`` blocks of the kernel's threads on ``stream`` of the current device; does not wait.

        ``params`` is read before this call returns, and may be written over afterwards. The memory that it names stays allocated by the
        rules of a stream alone: the caller may free a tensor at once, because only later work of the same stream gets its memory.

        Raises:
            RuntimeError: the driver refused.
        """


class Loading:
    """The part of a launcher that loads the kernels, once on each device."""

    def __init__(self) -> None:
        self._loaded: set[int] = set()
        self._lock = threading.Lock()

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        if kernel not in KERNELS:
            raise RuntimeError(f"{kernel} was not started: no kernel of that name; known: {', '.join(KERNELS)}")
        device = self._device()
        if device not in self._loaded:
            self.load(stream)
        self._start(device, kernel, grid, shared_bytes, params, stream)

    def load(self, stream: int) -> None:
        """Load every kernel on the current device, and put a launch of each on no work on ``stream``; does not wait for them.

        Raises:
            BuildError: the kernels cannot be compiled for this device.
            RuntimeError: the driver refused.
        """
        device = self._device()
        with self._lock:
            if device in self._loaded:
                return
            self._load(device)
            for name, kernel in KERNELS.items():
                self._start(device, name, (1, 1), kernel.shared_bytes, kernel.params(), stream)
            self._loaded.add(device)

    def _device(self) -> int:
        """Return the number of the current device."""
        raise NotImplementedError

    def _load(self, device: int) -> None:
        """Load every kernel, and allow it the shared memory that it needs, on the current device, which is ``device``."""
        raise NotImplementedError

    def _start(
        self, device: int, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Put a launch on ``stream`` of the current device, which is ``device``."""
        raise NotImplementedError


class LibraryLauncher(Loading):
    """Launcher over the C interface of csrc/cuda/interface.h."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        functions = bind(library, SIGNATURES, SIGNATURES)
        self._find_device, self._load_kernel = functions["zipccl_cuda_device"], functions["zipccl_cuda_load"]
        self._start_kernel, self._error = functions["zipccl_cuda_start"], functions["zipccl_cuda_error"]
        find = functions["zipccl_cuda_kernel"]
        self._entries: dict[str, int] = {name: find(name.encode()) for name in KERNELS}
        missing = [name for name, entry in self._entries.items() if not entry]
        if missing:
            raise RuntimeError(f"the library of the CUDA kernels lacks {', '.join(missing)}")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: {self._error(status).decode()}")

    def _device(self) -> int:
        device = ctypes.c_int32()
        self._check(self._find_device(ctypes.byref(device)), "there is no current device")
        return device.value

    def _load(self, device: int) -> None:
        for name, kernel in KERNELS.items():
            self._check(
                self._load_kernel(self._entries[name], kernel.shared_bytes), f"{name} was not loaded on device {device}"
            )

    def _start(
        self, device: int, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        at, threads = ctypes.addressof(params), KERNELS[kernel].threads
        status = self._start_kernel(self._entries[kernel], *grid, threads, shared_bytes, at, stream)
        self._check(status, f"{kernel} was not started")


class CupyLauncher(Loading):
    """Launcher over modules that CuPy compiles for each device.

    Args:
        use: make a device current in CuPy's runtime, on this thread, which may be a new one that has no context yet.
    """

    def __init__(
        self,
        use: Callable[[int], None],
        compiled: Callable[[tuple[int, int]], Sequence[bytes]] = cupy_kernels.cubins,
        current_device: Callable[[], int] = torch.cuda.current_device,
        capability: Callable[[int], tuple[int, int]] = torch.cuda.get_device_capability,
    ) -> None:
        super().__init__()
        self._use, self._compiled, self._current_device, self._capability = use, compiled, current_device, capability
        self._functions: dict[int, cupy_kernels.Functions] = {}

    def _device(self) -> int:
        return self._current_device()

    def _load(self, device: int) -> None:
        images = self._compiled(self._capability(device))
        self._use(device)
        shared = {name: kernel.shared_bytes for name, kernel in KERNELS.items()}
        self._functions[device] = cupy_kernels.Functions(images, shared)

    def _start(
        self, device: int, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        self._use(device)
        self._functions[device].launch(kernel, grid, KERNELS[kernel].threads, shared_bytes, params, stream)
