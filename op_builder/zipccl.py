"""DeepSpeed op builders for the CPU and CUDA kernels. They build plain C interfaces: ``load()`` returns a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes
from typing import Any

from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ds_zipccl.op_builder import cache


class ZipcclCPUBuilder(CPUOpBuilder):  # type: ignore[misc]
    """The C++ route. Built at first use in about five seconds; kept by content (see :mod:`.cache`)."""

    BUILD_VAR = "DS_BUILD_ZIPCCL_CPU"
    NAME = "zipccl_cpu"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_zipccl.{self.NAME}"

    def sources(self) -> list[str]:
        return [str(cache.CSRC / name) for name in cache.CPU_SOURCES]

    def include_paths(self) -> list[str]:
        return [str(cache.CSRC)]

    def cxx_args(self) -> list[str]:
        # Not super().cxx_args(): it asks py-cpuinfo, which takes seconds, and adds flags these sources do not need.
        return list(cache.CPU_FLAGS)

    def is_compatible(self, verbose: bool = False) -> bool:
        try:
            cache.compiler()
        except cache.BuildError as error:
            if verbose:
                self.warning(str(error))
            return False
        return True

    def load(self, verbose: bool = True) -> ctypes.CDLL:
        """Build if needed and load.

        Raises:
            BuildError: see :func:`.cache.build`.
        """
        return ctypes.CDLL(str(cache.build(cache.CPU_SOURCES, self.cxx_args())))

    jit_load = load


class ZipcclCUDABuilder(CUDAOpBuilder):  # type: ignore[misc]
    """The CUDA route's place in the table; this release has no CUDA kernels, so it is never compatible."""

    BUILD_VAR = "DS_BUILD_ZIPCCL_CUDA"
    NAME = "zipccl_cuda"
    REASON = "this release of ds_zipccl has no CUDA kernels; CUDA tensors pass through uncoded"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_zipccl.{self.NAME}"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        if verbose:
            self.warning(self.REASON)
        return False

    def load(self, verbose: bool = True) -> Any:
        raise cache.BuildError(self.REASON)


BUILDERS = {builder.NAME: builder for builder in (ZipcclCPUBuilder, ZipcclCUDABuilder)}
