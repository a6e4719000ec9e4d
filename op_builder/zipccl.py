"""DeepSpeed op builders for the CPU and CUDA kernels. They build plain C interfaces: ``load()`` returns a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes

from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ds_zipccl.kernels import build


class _LibraryBuilder:
    """What both builders are: a recipe of :mod:`.cache`, built at first use and kept by content."""

    NAME: str

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)  # type: ignore[call-arg]  # that of DeepSpeed's builder

    def recipe(self) -> build.Recipe:
        """How the library is made here.

        Raises:
            BuildError: it cannot be.
        """
        raise NotImplementedError

    def absolute_name(self) -> str:
        return f"ds_zipccl.{self.NAME}"

    def include_paths(self) -> list[str]:
        return [str(build.CSRC)]

    def is_compatible(self, verbose: bool = False) -> bool:
        try:
            self.recipe().compiler()
        except build.BuildError as error:
            if verbose:
                self.warning(str(error))  # type: ignore[attr-defined]
            return False
        return True

    def load(self, verbose: bool = True) -> ctypes.CDLL:
        """Build if needed and load.

        Raises:
            BuildError: no compiler, nothing to build for, or see :func:`.cache.build`.
        """
        return ctypes.CDLL(str(build.build(self.recipe())))

    def jit_load(self, verbose: bool = True) -> ctypes.CDLL:
        return self.load(verbose)


class ZipcclCPUBuilder(_LibraryBuilder, CPUOpBuilder):  # type: ignore[misc]
    """The C++ route. Built in about five seconds."""

    BUILD_VAR = "DS_BUILD_ZIPCCL_CPU"
    NAME = "zipccl_cpu"

    def recipe(self) -> build.Recipe:
        return build.CPU

    def sources(self) -> list[str]:
        return [str(build.CSRC / name) for name in build.CPU.sources]

    def cxx_args(self) -> list[str]:
        # Not super().cxx_args(): it asks py-cpuinfo, which takes seconds, and adds flags these sources do not need.
        return list(build.CPU.flags)


class ZipcclCUDABuilder(_LibraryBuilder, CUDAOpBuilder):  # type: ignore[misc]
    """The CUDA kernels behind a C interface. Built in less than a minute.

    Architectures: ``TORCH_CUDA_ARCH_LIST`` as torch reads it, else those of the devices that torch sees.
    """

    BUILD_VAR = "DS_BUILD_ZIPCCL_CUDA"
    NAME = "zipccl_cuda"

    def recipe(self) -> build.Recipe:
        return build.cuda(build.architectures())

    def sources(self) -> list[str]:
        return [str(build.CSRC / name) for name in build.cuda(()).sources]

    def nvcc_args(self) -> list[str]:
        return list(self.recipe().flags)


BUILDERS = {builder.NAME: builder for builder in (ZipcclCPUBuilder, ZipcclCUDABuilder)}
