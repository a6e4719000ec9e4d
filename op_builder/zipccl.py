"""DeepSpeed op builders for the CPU and CUDA kernels. They build plain C interfaces: ``load()`` returns a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes

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
        return [str(cache.CSRC / name) for name in cache.CPU.sources]

    def include_paths(self) -> list[str]:
        return [str(cache.CSRC)]

    def cxx_args(self) -> list[str]:
        # Not super().cxx_args(): it asks py-cpuinfo, which takes seconds, and adds flags these sources do not need.
        return list(cache.CPU.flags)

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
        return ctypes.CDLL(str(cache.build(cache.CPU)))

    jit_load = load


class ZipcclCUDABuilder(CUDAOpBuilder):  # type: ignore[misc]
    """The CUDA kernels behind a C interface. Built at first use in less than a minute; kept by content (see :mod:`.cache`).

    Architectures: ``TORCH_CUDA_ARCH_LIST`` as torch reads it, else those of the devices that torch sees.
    """

    BUILD_VAR = "DS_BUILD_ZIPCCL_CUDA"
    NAME = "zipccl_cuda"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_zipccl.{self.NAME}"

    def sources(self) -> list[str]:
        return [str(cache.CSRC / name) for name in cache.cuda(()).sources]

    def include_paths(self) -> list[str]:
        return [str(cache.CSRC)]

    def nvcc_args(self) -> list[str]:
        return list(self.recipe().flags)

    def recipe(self) -> cache.Recipe:
        """What is built here.

        Raises:
            BuildError: no device to build for.
        """
        return cache.cuda(cache.architectures())

    def is_compatible(self, verbose: bool = False) -> bool:
        try:
            self.recipe()
            cache.nvcc()
        except cache.BuildError as error:
            if verbose:
                self.warning(str(error))
            return False
        return True

    def load(self, verbose: bool = True) -> ctypes.CDLL:
        """Build if needed and load.

        Raises:
            BuildError: no nvcc, no device, or see :func:`.cache.build`.
        """
        return ctypes.CDLL(str(cache.build(self.recipe())))

    jit_load = load


BUILDERS = {builder.NAME: builder for builder in (ZipcclCPUBuilder, ZipcclCUDABuilder)}
