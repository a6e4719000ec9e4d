"""The CUDA kernels compiled at run time by NVRTC, which needs no compiler on the machine: ctypes on libnvrtc.

torch's own interface to NVRTC, ``torch.cuda._compile_kernel``, does not suffice: it is private, torch has it since 2.8, it compiles the
whole text for each kernel, and its launches take numbers and tensors, while our kernels take a struct by value.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ds_zipccl.kernels import build, capabilities

#: Warnings 177 and 186 as in build.cuda.
OPTIONS = ("--std=c++17", "--diag-suppress=177,186")


@functools.cache
def source() -> str:
    """Return the text of csrc/cuda/kernels.cuh with all its includes expanded."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (build.CSRC / name).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "([a-z0-9_/]+\.cuh)"\n', lambda found: expand(found[1]), text)

    return expand("cuda/kernels.cuh")


class Nvrtc:
    """The compiler in a library.

    Raises:
        OSError: the library cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        library, pointer, size = ctypes.CDLL(path), ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        text, integer, number = ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
        for name, arguments in {
            "nvrtcVersion": [number, number],
            "nvrtcGetNumSupportedArchs": [number],
            "nvrtcGetSupportedArchs": [number],
            "nvrtcCreateProgram": [ctypes.POINTER(pointer), text, text, integer, pointer, pointer],
            "nvrtcDestroyProgram": [ctypes.POINTER(pointer)],
            "nvrtcCompileProgram": [pointer, integer, ctypes.POINTER(text)],
            "nvrtcGetProgramLogSize": [pointer, size],
            "nvrtcGetProgramLog": [pointer, text],
            "nvrtcGetCUBINSize": [pointer, size],
            "nvrtcGetCUBIN": [pointer, text],
        }.items():
            getattr(library, name).argtypes = arguments
        library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [integer], text
        self._library, self.path = library, path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(major, minor))
        self.version = f"{major.value}.{minor.value}"

    def _check(self, status: int) -> None:
        if status:
            raise build.BuildError(f"NVRTC of {self.path}: {self._library.nvrtcGetErrorString(status).decode()}")

    def architecture(self, capability: tuple[int, int]) -> str:
        """Return the architecture, such as sm_90, whose code runs on devices of a compute capability.

        Raises:
            BuildError: this NVRTC has none.
        """
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(count))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        major, minor = capability
        # Code runs on later devices of the same major number.
        fitting = [number for number in numbers if number // 10 == major and number % 10 <= minor]
        if not fitting:
            known = ", ".join(f"{number // 10}.{number % 10}" for number in numbers)
            raise build.BuildError(
                f"NVRTC {self.version} compiles for compute capabilities {known}, not for {major}.{minor}"
            )
        return f"sm_{max(fitting)}"

    def compile(self, text: str, options: Sequence[str]) -> bytes:
        """Return the cubin of a text.

        Raises:
            BuildError: NVRTC failed; the message has its log.
        """
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._library.nvrtcCreateProgram(program, text.encode(), b"zipccl.cu", 0, None, None))
        try:
            words = [option.encode() for option in options]
            status = self._library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
            if status:
                self._check(self._library.nvrtcGetProgramLogSize(program, size))
                log = ctypes.create_string_buffer(size.value)
                self._check(self._library.nvrtcGetProgramLog(program, log))
                said = self._library.nvrtcGetErrorString(status).decode()
                raise build.BuildError(
                    f"NVRTC {self.version} {' '.join(options)} failed: {said}\n{log.value.decode(errors='replace').strip()}"
                )
            self._check(self._library.nvrtcGetCUBINSize(program, size))
            cubin = ctypes.create_string_buffer(size.value)
            self._check(self._library.nvrtcGetCUBIN(program, cubin))
            return cubin.raw
        finally:
            self._library.nvrtcDestroyProgram(program)


def candidates() -> Iterator[str]:
    """Yield the places of NVRTC, best first: that of torch's CUDA, as the driver fits it, before others."""
    major = (torch.version.cuda or "").partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    toolkits = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    for wanted in dict.fromkeys((major, "")):
        for wheel in wheels:  # nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12
            yield from _libraries(wheel.glob(f"*/lib/libnvrtc.so.{wanted}*"))
        yield f"libnvrtc.so.{wanted}" if wanted else "libnvrtc.so"
        for toolkit in toolkits:
            yield from _libraries(toolkit.glob(f"lib64/libnvrtc.so.{wanted}*"))


def _libraries(paths: Iterator[Path]) -> list[str]:
    return [str(path) for path in sorted(paths, reverse=True)]


@functools.cache
def nvrtc() -> Nvrtc:
    """Return NVRTC.

    Raises:
        BuildError: there is none.
    """
    for path in candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError):  # no library there, or one that is too old
            continue
    raise build.BuildError(
        "no NVRTC (libnvrtc) among the packages of torch, on the library path or in /usr/local/cuda; pip install nvidia-cuda-nvrtc"
    )


def cubins(capability: tuple[int, int]) -> list[bytes]:
    """Return the kernels compiled for devices of a compute capability, a cubin for each of :data:`build.CUDA_PARTS`.

    They are kept by content, as libraries are; the first call takes up to a minute.

    Raises:
        BuildError: the devices are too old or too new, there is no NVRTC or it failed, or the cache folder cannot be written.
    """
    if not capabilities.is_supported(capability):
        raise build.BuildError(capabilities.needs_capability("{}.{}".format(*capability)))
    compiler = nvrtc()
    architecture = compiler.architecture(capability)
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    digest = hashlib.sha256("\0".join((compiler.version, *options, *map(str, build.CUDA_PARTS), source())).encode())

    def make(target: Path) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # ctypes lets go of the interpreter lock
            made = list(
                pool.map(
                    lambda part: compiler.compile(source(), (*options, f"-DZIPCCL_PARTS={part}")), build.CUDA_PARTS
                )
            )
        with zipfile.ZipFile(target, "w") as archive:
            for part, cubin in zip(build.CUDA_PARTS, made, strict=True):
                archive.writestr(f"{part}.cubin", cubin)

    target = build.cache_root() / f"zipccl_nvrtc_{architecture}_{digest.hexdigest()[:20]}.zip"
    kept = build.publish(target, make, f"NVRTC {compiler.version}").read_bytes()
    with zipfile.ZipFile(io.BytesIO(kept)) as archive:
        return [archive.read(f"{part}.cubin") for part in build.CUDA_PARTS]
