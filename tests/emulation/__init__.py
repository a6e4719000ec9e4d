"""The CUDA kernels on the CPU: their own source, compiled against emulation.h, behind the route that CUDA tensors use."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from builds import Binary, Change

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda.backend import CudaBackend

#: ZIPCCL_PARTS with the kernels of every dtype, of bfloat16 alone, of bytes, of hashes and the search for rows, of rounded words, of scaled
#: payloads and of ZFP.
EVERY_PART = sum(build.CUDA_PARTS)
BF16, BYTES, HASH, ROUNDED, SCALED, ZFP = 1, 8, 16, 32, 64, 128
#: The name of a variable of the environment: where it is set, every emulation of the process is compiled with AddressSanitizer and UBSan.
SANITIZED = "DS_ZIPCCL_TEST_SANITIZED"
#: Without optimization, as compiling takes longer than the tests.
SANITIZERS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
#: Of the emulated device.
MULTIPROCESSORS = 2


def binary(changes: Mapping[str, tuple[Change, ...]] | None = None, parts: int = EVERY_PART) -> Binary:
    """The emulation as a library, with ``changes`` to files of csrc. ``parts``: bits of csrc/cuda/kernels.cuh; fewer compile faster."""
    checks = SANITIZERS if os.environ.get(SANITIZED) else ()
    return Binary(
        "emulation",
        {"csrc": build.CSRC, "emulation": Path(__file__).parent},
        {"emulation/emulated.cpp": ()},
        (
            "-O2" if parts == EVERY_PART else "-O0",
            "-std=c++17",
            "-fPIC",
            "-fno-semantic-interposition",
            "-ffp-contract=off",
            f"-DZIPCCL_PARTS={parts}",
            *checks,
        ),
        ("-shared", *checks),
        {f"csrc/{file}": changed for file, changed in (changes or {}).items()},
    )


def sanitized_environment() -> dict[str, str]:
    """The environment of a process in which emulations have sanitizers; Python itself has none, so their libraries are loaded first.

    Raises:
        BuildError: no compiler, or the compiler has no sanitizers.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [*build.compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
        if not os.path.isabs(path):
            raise build.BuildError(f"{' '.join(command)} says {path!r}: the compiler has no such library")
        found.append(path)
    # No search for leaks: Python leaves memory at its end.
    return {
        **os.environ,
        SANITIZED: "1",
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


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

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        status = self._library.zipccl_cuda_launch(kernel.encode(), *grid, shared_bytes, ctypes.byref(params), None)
        if status:
            raise RuntimeError(f"no kernel {kernel}")


def launcher(changes: Mapping[str, tuple[Change, ...]] | None = None, parts: int = EVERY_PART) -> EmulatedLauncher:
    """The emulation, with ``changes`` to files of csrc; ``parts`` as for :func:`binary`.

    Raises:
        AssertionError: a text to be changed is not in its file.
        BuildError: no compiler, or the compiler failed.
    """
    return EmulatedLauncher(ctypes.CDLL(str(binary(changes, parts).path())))


def load() -> CudaBackend:
    """The route, for CPU tensors: of few multiprocessors, so that small messages are cut and larger ones are not."""
    return CudaBackend(launcher(), "cpu", MULTIPROCESSORS)
