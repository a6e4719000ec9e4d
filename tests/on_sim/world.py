"""Runs of the simulator with the package on it: its kernels for CUDA tensors are emulated, and its tensors are those of the simulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sim import mistakes, world
from sim.scheduler import Fault
from sim.tensor import Simulated
from sim.world import ALL_MODES, Machine, Modes, Outcome, replacing

from ds_zipccl import devices, kernels, tensors
from ds_zipccl.codecs import memory
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import streams
from ds_zipccl.kernels import KernelBackend
from ds_zipccl.kernels.cuda import launches
from ds_zipccl.telemetry import counters
from on_sim.launcher import observe

__all__ = ["ALL_MODES", "Fault", "Machine", "Modes", "Outcome", "noticed", "replacing", "run"]


def run(
    function: Callable[..., Any], ranks: int, *arguments: Any, route: KernelBackend | None = None, **options: Any
) -> Outcome:
    """:func:`sim.world.run` for programs that call the package, whose counts begin anew: they are those of this run.

    Args:
        route: the kernels that the package finds for CUDA tensors; see :func:`on_sim.launcher.route`.
    """
    counters.reset()
    return world.run(function, ranks, *arguments, installed=functools.partial(_installed, route), **options)


noticed = functools.partial(mistakes.noticed, run=run)


class _Runtime:
    """The functions of torch.cuda. Each run has its own object, so that state which the package keeps for a runtime, such as streams, does
    not go from one run to the next."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@contextlib.contextmanager
def _installed(route: KernelBackend | None) -> Iterator[None]:
    """Replace the package's tensors, its runtime of CUDA and its kernels for GPUs."""
    traced = tensors.is_traced

    def is_traced(kind: type[torch.Tensor]) -> bool:
        return traced(torch.Tensor if issubclass(kind, Simulated) else kind)

    has_words = memory.has_words
    runtime = _Runtime()
    replaced = [
        (tensors, "_original", world.Constructors(torch._C._VariableFunctions)),
        (tensors, "is_traced", is_traced),
        (memory, "has_words", lambda tensor: isinstance(tensor, Simulated) or has_words(tensor)),
        (launches, "observer", observe),
        (topology, "pause", lambda store, key, seconds: store.wait([key])),  # the scheduler sees who waits for what
    ]
    routes = kernels.ROUTES["cuda"]
    try:
        devices.RUNTIMES["cuda"] = runtime
        kernels.ROUTES["cuda"] = {} if route is None else {"simulated": lambda: route}
        kernels._loaded.pop(("cuda", "simulated"), None)
        with replacing(replaced):
            yield
    finally:
        kernels.ROUTES["cuda"] = routes
        devices.RUNTIMES["cuda"] = torch.cuda
        # Streams and staging buffers that the package keeps for a runtime hold the machine, and its memory.
        streams._streams.pop(runtime, None)
