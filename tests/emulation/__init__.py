"""The CUDA kernels on the CPU: their own source, compiled against emulation.h, behind the route that CUDA tensors use."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from builds import Binary, Change

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import CudaRoute

#: Of the emulated device.
MULTIPROCESSORS = 2


def binary(changes: Mapping[str, tuple[Change, ...]] | None = None) -> Binary:
    """The emulation as a library, with ``changes`` to files of csrc."""
    return Binary(
        "emulation",
        {"csrc": build.CSRC, "emulation": Path(__file__).parent},
        {"emulation/emulated.cpp": ()},
        ("-O2", "-std=c++17", "-fPIC", "-ffp-contract=off"),
        ("-shared",),
        {f"csrc/{file}": changed for file, changed in (changes or {}).items()},
    )


class EmulatedLauncher:
    """Runs kernels when they are launched, one launch at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.zipccl_emulation_seed.argtypes = [ctypes.c_uint64]
        library.zipccl_emulation_residents.argtypes = [ctypes.c_uint32]

    def seed(self, value: int) -> None:
        """Draw the order in which threads run from ``value``; the same value gives the same order."""
        self._library.zipccl_emulation_seed(value)

    def residents(self, count: int) -> None:
        """Let ``count`` blocks of threads run at a time, 1 to 3; the others start when one of these ends."""
        self._library.zipccl_emulation_residents(count)

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        status = self._library.zipccl_cuda_launch(kernel.encode(), grid, shared_bytes, ctypes.byref(params), None)
        if status:
            raise RuntimeError(f"no kernel {kernel}")


def launcher(changes: Mapping[str, tuple[Change, ...]] | None = None) -> EmulatedLauncher:
    """The emulation, with ``changes`` to files of csrc.

    Raises:
        AssertionError: a text to be changed is not in its file.
        BuildError: no compiler, or the compiler failed.
    """
    return EmulatedLauncher(ctypes.CDLL(str(binary(changes).path())))


def load() -> CudaRoute:
    """The route, for CPU tensors: of few multiprocessors, so that small messages are cut and larger ones are not."""
    return CudaRoute(launcher(), MULTIPROCESSORS)
