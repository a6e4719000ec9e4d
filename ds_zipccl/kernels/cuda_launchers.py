"""The two launchers of the CUDA kernels: a library of nvcc, and a module of NVRTC through CuPy."""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

import numpy as np
import torch

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import CudaRoute


class LibraryLauncher:
    """Launcher over the C interface of csrc/cuda/launch.cu."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
        self._launch = library.zipccl_cuda_launch
        self._launch.argtypes, self._launch.restype = [ctypes.c_char_p, u32, u32, u32, pointer, pointer], ctypes.c_int32
        self._error = library.zipccl_cuda_error
        self._error.argtypes, self._error.restype = [ctypes.c_int32], ctypes.c_char_p

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        status = self._launch(kernel.encode(), *grid, shared_bytes, ctypes.addressof(params), stream)
        if status:
            raise RuntimeError(f"{kernel} was not started: {self._error(status).decode()}")


class CupyLauncher:
    """Launcher over a module that NVRTC compiles through CuPy, in the cache of CuPy."""

    def __init__(self, cupy: Any) -> None:
        # One text without includes, because the cache of CuPy ignores included files.
        self._cupy = cupy
        self._module = cupy.RawModule(code=source(), options=NVRTC_OPTIONS, backend="nvrtc")
        self._kernels: dict[tuple[int, str], Any] = {}

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        device = torch.cuda.current_device()
        with self._cupy.cuda.Device(device), self._cupy.cuda.ExternalStream(stream, device):
            if (device, kernel) not in self._kernels:
                function = self._module.get_function(kernel)
                function.max_dynamic_shared_size_bytes = shared_bytes
                self._kernels[device, kernel] = function
            # CuPy passes an array of one element of a void type by value.
            by_value = np.frombuffer(memoryview(params), dtype=f"V{ctypes.sizeof(params)}")
            self._kernels[device, kernel](grid, (256,), (by_value,), shared_mem=shared_bytes)


NVRTC_OPTIONS = ("--std=c++17",)


@functools.cache
def source() -> str:
    """Return the text of csrc/cuda/kernels.cuh with all its includes expanded, for NVRTC."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (build.CSRC / name).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "([a-z0-9_/]+\.cuh)"\n', lambda found: expand(found[1]), text)

    return expand("cuda/kernels.cuh")


def load_native() -> CudaRoute:
    """Return the route over the library of nvcc; builds it (about a minute) unless the cache has it.

    Raises:
        BuildError: there is no CUDA device or no nvcc, or nvcc failed.
        RuntimeError: torch sees no device.
    """
    _need_device()
    return CudaRoute(LibraryLauncher(ctypes.CDLL(str(build.build(build.cuda(build.architectures()))))))


def load_nvrtc() -> CudaRoute:
    """Return the route over CuPy; needs no compiler on the machine.

    Raises:
        ImportError: CuPy is not installed.
        RuntimeError: no CUDA device.
    """
    _need_device()
    import cupy

    return CudaRoute(CupyLauncher(cupy))


def _need_device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA")
