"""The CUDA kernels compiled at run time and started by CuPy, on machines without nvcc.

``cupy.RawModule`` does not serve: it loads machine code from a cache folder whose owner is not checked, under keys that leave the text of
includes out. The cubins are kept as the libraries of :mod:`.build` are. CuPy's bindings of NVRTC and of the driver serve: they need no
device to compile, and the tests run them over a driver that only notes its calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import capabilities

#: Warnings 177 and 186 as in build.cuda.
OPTIONS = ("--std=c++17", "--diag-suppress=177,186")
# Numbers of cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
#: Kernels with more bytes of shared memory get all that the multiprocessor has, as in csrc/cuda/launch.cu.
_LARGE = 32 << 10


@functools.cache
def source() -> str:
    """Return the text of csrc/cuda/kernels.cuh with all its includes expanded; its lines keep the names and numbers of their files."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((build.CSRC / name).read_text().splitlines(), 1):
            included = re.fullmatch(r'#include "([a-z0-9_/]+\.cuh)"', line)
            if included:
                lines += [expand(included[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append(line if line != "#pragma once" else "")
        return "\n".join(lines)

    return expand("cuda/kernels.cuh")


def cupy() -> Any:
    """Return the package CuPy, which is imported only where these kernels are tried.

    Raises:
        BuildError: CuPy or its NVRTC is not installed, or CuPy is built for another major version of CUDA than torch; has the line for pip.
    """
    major = (torch.version.cuda or "13").partition(".")[0]
    install = f"pip install cupy-cuda{major}x"
    try:
        import cupy
    except ImportError as error:
        raise build.BuildError(f"no CuPy ({error}); {install}") from error
    built = cupy.cuda.driver.get_build_version() // 1000
    if torch.version.cuda and built != int(major):
        said = f"CuPy {cupy.__version__} is built for CUDA {built}, torch for CUDA {torch.version.cuda}"
        raise build.BuildError(f"{said}; pip uninstall -y cupy-cuda{built}x && {install}")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # CuPy's own for a library that is missing
        package = "nvidia-cuda-nvrtc" if built > 12 else f"nvidia-cuda-nvrtc-cu{built}"
        raise build.BuildError(f"CuPy {cupy.__version__} finds no NVRTC ({error}); pip install {package}") from error
    return cupy


def version() -> str:
    """Return the versions of CuPy and of its NVRTC.

    Raises:
        BuildError: as :func:`cupy`.
    """
    found = cupy()
    return f"CuPy {found.__version__}, NVRTC {'.'.join(map(str, found.cuda.nvrtc.getVersion()))}"


def architecture(capability: tuple[int, int]) -> str:
    """Return the architecture, such as "90", whose code runs on devices of a compute capability.

    Raises:
        BuildError: the devices are too old, NVRTC knows none, or as :func:`cupy`.
    """
    if not capabilities.is_supported(capability):
        raise build.BuildError(capabilities.needs_capability("{}.{}".format(*capability)))
    major, minor = capability
    numbers = [int(number) for number in cupy().cuda.nvrtc.getSupportedArchs()]
    # Code runs on later devices of the same major number.
    fitting = [number for number in numbers if number // 10 == major and number % 10 <= minor]
    if not fitting:
        known = ", ".join(f"{number // 10}.{number % 10}" for number in numbers)
        raise build.BuildError(f"{version()} compiles for compute capabilities {known}, not for {major}.{minor}")
    return str(max(fitting))


def compiled(
    text: str, options: Sequence[str], architecture: str, told: Callable[[str], object] | None = None
) -> bytes:
    """Return the cubin of a text. CuPy's ``compile_using_nvrtc`` would ask the driver for a device, and cannot compile without one.

    Args:
        told: called with the words of the compiler.

    Raises:
        BuildError: NVRTC failed, and the message has its log; or as :func:`cupy`.
    """
    nvrtc = cupy().cuda.nvrtc
    program = nvrtc.createProgram(text, "kernels.cuh", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch=sm_{architecture}"))
        if told is not None:
            told(nvrtc.getProgramLog(program).rstrip("\0"))
        # CuPy takes the last byte, a zero of the program headers, for the end of a text.
        return bytes(nvrtc.getCUBIN(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        means = f"{version()} {' '.join(options)} for sm_{architecture}"
        raise build.BuildError(f"{means} failed: {error}\n{nvrtc.getProgramLog(program).strip()}") from error
    finally:
        nvrtc.destroyProgram(program)


def cubins(capability: tuple[int, int]) -> list[bytes]:
    """Return the kernels compiled for devices of a compute capability, a cubin for each of :data:`build.CUDA_PARTS`.

    They are kept by content, as libraries are; the first call takes up to a minute.

    Raises:
        BuildError: as :func:`architecture` and :func:`compiled`, or the cache folder cannot be written.
    """
    target_architecture, means = architecture(capability), version()
    parts = (means, *OPTIONS, target_architecture, *map(str, build.CUDA_PARTS), source())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def one(part: int) -> bytes:
        return compiled(source(), (*OPTIONS, f"-DZIPCCL_PARTS={part}"), target_architecture)

    def make(target: os.PathLike[str]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # CuPy lets go of the interpreter lock
            made = list(pool.map(one, build.CUDA_PARTS))
        with zipfile.ZipFile(target, "w") as archive:
            for part, cubin in zip(build.CUDA_PARTS, made, strict=True):
                archive.writestr(f"{part}.cubin", cubin)

    path = build.cache_root() / f"zipccl_cupy_sm_{target_architecture}_{digest}.zip"
    kept = build.publish(path, make, f"{means} compiles").read_bytes()
    with zipfile.ZipFile(io.BytesIO(kept)) as archive:
        return [archive.read(f"{part}.cubin") for part in build.CUDA_PARTS]


class Functions:
    """The kernels in the current context of the thread that makes this object: modules and functions of CuPy's binding of the driver.

    Args:
        images: cubins.
        shared_bytes: name of a kernel -> most bytes of shared memory of its launches.

    Raises:
        RuntimeError: the driver refused.
    """

    def __init__(self, images: Sequence[bytes], shared_bytes: Mapping[str, int]) -> None:
        self._driver = cupy().cuda.driver
        with self._refusal("the compiled kernels were not loaded"):
            modules = [self._driver.moduleLoadData(image) for image in images]
        self._functions = {name: self._find(modules, name) for name in shared_bytes}
        for name, most in shared_bytes.items():
            wanted = {_MAX_DYNAMIC_SHARED_SIZE_BYTES: most}
            wanted |= {_PREFERRED_SHARED_MEMORY_CARVEOUT: 100} if most > _LARGE else {}
            for attribute, value in wanted.items():
                with self._refusal(f"{name} does not get {most} bytes of shared memory"):
                    self._driver.funcSetAttribute(self._functions[name], attribute, value)

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Put a grid of ``grid[0]`` times ``grid[1]`` blocks on a stream of the current context; ``params``, the one parameter, goes by
        value."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function, at = self._functions[name], ctypes.addressof(arguments)
        try:  # without the context manager, which takes as long as the call
            self._driver.launchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, at, 0)
        except self._driver.CUDADriverError as error:
            raise RuntimeError(f"{name} was not started: {error}") from error

    def _find(self, modules: Sequence[int], name: str) -> int:
        """The function of the module that has it."""
        *others, last = modules
        for module in others:
            with contextlib.suppress(self._driver.CUDADriverError):
                return int(self._driver.moduleGetFunction(module, name))
        with self._refusal(f"{name} was not loaded"):
            return int(self._driver.moduleGetFunction(last, name))

    @contextlib.contextmanager
    def _refusal(self, said: str) -> Iterator[None]:
        try:
            yield
        except self._driver.CUDADriverError as error:
            raise RuntimeError(f"{said}: {error}") from error
