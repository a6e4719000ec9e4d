"""Launches of the package's CUDA kernels in the simulator."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from sim import scheduler
from sim.device import memory_of, mine

from ds_zipccl.kernels.cuda.backend import CudaBackend

scheduler.skip(__file__)

_told = threading.local()


def observe(launch: Any) -> None:
    """Keep what ``ds_zipccl.kernels.cuda.launches`` says about the launch that follows: the tensors that it reads and writes."""
    _told.launch = launch


class SimulatedLauncher:
    """Puts kernels on streams of the simulated GPU; ``launcher`` runs one when its turn has come, with a copy of the parameters."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher

    def launch(self, kernel: str, grid: Any, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        gpu, told = mine(), _told.launch
        _told.launch = None
        lane = next(lane for lane in gpu.lanes if lane.number == stream)
        assert told.kernel == kernel and lane is gpu.current, (told, kernel, stream)
        copy = type(params).from_buffer_copy(params)
        reads, writes = ([memory_of(tensor) for tensor in some] for some in (told.reads, told.writes))

        def body() -> None:
            self._launcher.launch(kernel, grid, shared_bytes, copy, 0)

        gpu.launch("kernel", kernel, body, reads, writes)


def route() -> CudaBackend:
    """The package's CUDA kernels, emulated, behind the route of CUDA tensors."""
    import emulation

    return CudaBackend(SimulatedLauncher(emulation.launcher()), multiprocessors=emulation.MULTIPROCESSORS)
