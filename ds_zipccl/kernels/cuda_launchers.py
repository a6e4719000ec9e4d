"""The two ways to the CUDA kernels: a library that nvcc built through the DeepSpeed op builder, or NVRTC through CuPy."""

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
    """Over the C interface of csrc/cuda/launch.cu."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
        self._launch = library.zipccl_cuda_launch
        self._launch.argtypes, self._launch.restype = [ctypes.c_char_p, u32, u32, pointer, pointer], ctypes.c_int32
        self._error = library.zipccl_cuda_error
        self._error.argtypes, self._error.restype = [ctypes.c_int32], ctypes.c_char_p

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        status = self._launch(kernel.encode(), grid, shared_bytes, ctypes.addressof(params), stream)
        if status:
            raise RuntimeError(f"{kernel} was not started: {self._error(status).decode()}")


class CupyLauncher:
    """Over a module that CuPy had NVRTC compile; CuPy keeps what it compiled in its own cache."""

    def __init__(self, cupy: Any) -> None:
        # The text as a whole: CuPy's cache does not look into included files.
        self._cupy = cupy
        self._module = cupy.RawModule(code=source(), options=NVRTC_OPTIONS, backend="nvrtc")
        self._kernels: dict[tuple[int, str], Any] = {}

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        device = torch.cuda.current_device()
        with self._cupy.cuda.Device(device), self._cupy.cuda.ExternalStream(stream, device):
            if (device, kernel) not in self._kernels:
                function = self._module.get_function(kernel)
                function.max_dynamic_shared_size_bytes = shared_bytes
                self._kernels[device, kernel] = function
            # An array of one element of a type of its own is passed by value.
            by_value = np.frombuffer(memoryview(params), dtype=f"V{ctypes.sizeof(params)}")
            self._kernels[device, kernel]((grid,), (256,), (by_value,), shared_mem=shared_bytes)


NVRTC_OPTIONS = ("--std=c++17",)


@functools.cache
def source() -> str:
    """The text of csrc/cuda/kernels.cuh with everything it includes, as NVRTC wants it."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (build.CSRC / name).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "([a-z0-9_/]+\.cuh)"\n', lambda found: expand(found[1]), text)

    return expand("cuda/kernels.cuh")


def load_native() -> CudaRoute:
    """The route over nvcc's library, which is built unless it is in the cache.

    Raises:
        BuildError: no CUDA device, no nvcc, or it failed.
        RuntimeError: torch sees no device.
    """
    _need_device()
    return CudaRoute(LibraryLauncher(ctypes.CDLL(str(build.build(build.cuda(build.architectures()))))))


def load_nvrtc() -> CudaRoute:
    """The route over CuPy; needs no compiler on the machine.

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
