"""The GPU for the programs of this folder, and the CPU in its place for a dry run of the same code (``ZIPCCL_DRY=1``)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda.backend import CudaBackend


class OnCpu:
    """The emulated kernels on small tensors; everything is done when a call returns, and the host makes no graphs."""

    device, backend = torch.device("cpu"), "slots"

    def route(self, name: str) -> CudaBackend:
        """The route over the kernels of csrc/cuda."""
        import emulation

        return emulation.load()

    def size(self, numel: int) -> int:
        """The number of elements to take where a GPU takes ``numel``."""
        return max(1, min(numel, 5000 + numel % 1000))

    def streams(self, count: int) -> Sequence[Any]:
        """New streams."""
        return range(count)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work of the context goes to ``stream``."""
        return contextlib.nullcontext()

    def finish(self, seconds: float = 30.0) -> None:
        """Wait for the current stream, not for the device.

        Raises:
            AssertionError: its work did not end in time.
        """

    def captured(self, calls: Callable[[], object]) -> Callable[[], object]:
        """``calls`` as a graph: a function that replays it."""
        return calls

    def spinning(self) -> AbstractContextManager[int]:
        """All multiprocessors but one are held meanwhile; their number."""
        return contextlib.nullcontext(0)


class OnGpu(OnCpu):
    """The same on a GPU."""

    device, backend = torch.device("cuda"), "nccl"

    def route(self, name: str) -> CudaBackend:
        found: Any = kernels.route(name, "cuda")
        return found  # type: ignore[no-any-return]

    def size(self, numel: int) -> int:
        return numel

    def streams(self, count: int) -> Sequence[Any]:
        torch.cuda.synchronize()  # what the default stream made may be used there
        return [torch.cuda.Stream() for _ in range(count)]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def finish(self, seconds: float = 30.0) -> None:
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + seconds
        while not done.query():
            assert time.monotonic() < deadline, f"the work of a stream did not end in {seconds:.0f} s"
            time.sleep(0.001)

    def captured(self, calls: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads of NCCL may call the driver meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        return graph.replay

    def spinning(self) -> AbstractContextManager[int]:
        import spin

        return spin.spinning()


#: Whether the CPU stands for the GPU.
DRY = bool(os.environ.get("ZIPCCL_DRY"))
#: Factor of every limit of time: the CPU is slow, and other tests run beside a dry run.
PATIENCE = 4 if DRY else 1
HERE = OnCpu() if DRY else OnGpu()


def missing() -> str:
    """Why nothing can run here, or ""."""
    return "" if DRY or torch.cuda.is_available() else "there is no GPU"
