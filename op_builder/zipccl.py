"""DeepSpeed op builders of the CPU and CUDA kernels. The libraries have plain C interfaces: ``load()`` returns a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes

from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import capabilities


class _LibraryBuilder:
    """A builder over a recipe of :mod:`ds_zipccl.kernels.build`: built at first use and kept by content."""

    NAME: str

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)  # type: ignore[call-arg]  # the constructor of DeepSpeed's builder

    def recipe(self) -> build.Recipe:
        """Return the recipe of the library on this machine.

        Raises:
            BuildError: the machine lacks a part of it.
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
        """Load the library; the first call builds it.

        Raises:
            BuildError: there is no compiler or no device to build for; or as :func:`ds_zipccl.kernels.build.build`.
        """
        return ctypes.CDLL(str(build.build(self.recipe())))

    def jit_load(self, verbose: bool = True) -> ctypes.CDLL:
        return self.load(verbose)


class ZipcclCPUBuilder(_LibraryBuilder, CPUOpBuilder):  # type: ignore[misc]
    """Builder of the C++ route; builds in about five seconds."""

    BUILD_VAR = "DS_BUILD_ZIPCCL_CPU"
    NAME = "zipccl_cpu"

    def recipe(self) -> build.Recipe:
        return build.CPU

    def sources(self) -> list[str]:
        return [str(build.CSRC / name) for name in build.CPU.sources]

    def cxx_args(self) -> list[str]:
        # Not super().cxx_args(): py-cpuinfo takes seconds, and its flags are superfluous for these sources.
        return list(build.CPU.flags)


class ZipcclCUDABuilder(_LibraryBuilder, CUDAOpBuilder):  # type: ignore[misc]
    """Builder of the CUDA kernels behind a C interface; builds in less than a minute.

    Architectures: those of the devices that torch sees; where it sees none, ``TORCH_CUDA_ARCH_LIST`` as torch reads it.
    """

    BUILD_VAR = "DS_BUILD_ZIPCCL_CUDA"
    NAME = "zipccl_cuda"

    def recipe(self) -> build.Recipe:
        return build.cuda(capabilities.architectures())

    def sources(self) -> list[str]:
        return [str(build.CSRC / name) for name in build.cuda(()).sources]

    def nvcc_args(self) -> list[str]:
        return list(self.recipe().flags)


BUILDERS = {builder.NAME: builder for builder in (ZipcclCPUBuilder, ZipcclCUDABuilder)}
