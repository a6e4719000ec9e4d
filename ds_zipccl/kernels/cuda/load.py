"""The CUDA kernel backend on this machine, over either launcher."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import capabilities
from ds_zipccl.kernels.cuda import cupy_kernels
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.cuda.launchers import CupyLauncher, LibraryLauncher, Loading
from ds_zipccl.kernels.self_test import proven

#: What loads a backend, and the machine code of its kernels.
Loader = tuple[Callable[[], CudaBackend], bytes]


def load_native() -> CudaBackend:
    """Return the backend over the library of nvcc; builds it (up to a minute) unless the cache has it. Waits for the current stream.

    Raises:
        BuildError: there is no nvcc, nvcc failed, or the devices are too old.
        RuntimeError: torch sees no device, or the kernels do not load.
        SelfTestError: the kernels are wrong on this device.
    """
    return _proven("native")


def load_cupy() -> CudaBackend:
    """Return the backend over CuPy; compiles (up to a minute) unless the cache has the kernels. Waits for the current stream.

    Raises:
        BuildError: there is no CuPy that fits torch, its NVRTC failed, or the device is too old.
        RuntimeError: torch sees no device, or the kernels do not load.
        SelfTestError: the kernels are wrong on this device.
    """
    return _proven("cupy")


def _native() -> Loader:
    path = build.build(build.cuda(capabilities.architectures()))
    return lambda: _loaded(LibraryLauncher(ctypes.CDLL(str(path)))), path.read_bytes()


def _cupy() -> Loader:
    use = cupy_kernels.cupy().cuda.runtime.setDevice
    return lambda: _loaded(CupyLauncher(use)), b"".join(cupy_kernels.cubins(torch.cuda.get_device_capability()))


#: Name of a backend -> its loader, which builds the kernels.
LOADERS: dict[str, Callable[[], Loader]] = {"native": _native, "cupy": _cupy}


def _proven(name: str) -> CudaBackend:
    _need_device()
    load, binary = LOADERS[name]()
    return proven(load, name, binary, torch.device("cuda", torch.cuda.current_device()), apart=True)


def _loaded(launcher: Loading) -> CudaBackend:
    """Return the backend over ``launcher``, with the kernels loaded on the current device."""
    torch.cuda.init()
    stream = torch.cuda.current_stream()
    launcher.load(stream.cuda_stream)
    stream.synchronize()  # an error of a launch shall be the reason why there is no such backend
    return CudaBackend(launcher)


def _need_device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA")
