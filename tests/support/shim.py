"""Groups in stream order on CPUs: gloo under a backend name of its own, on which the package runs its schedules of NCCL groups.

The schedules, their sizes and agreements, and the emulated CUDA kernels are those of GPUs; the backend's collectives are gloo's. A CPU
has no streams, so that all work is done when a call returns: :mod:`sim` is for the order of streams.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.policy import admission

#: Name of the backend.
NAME = "shim"


def install() -> None:
    """Give this process the backend, for good. For processes of one rank: tests of another backend need kernels that are not emulated."""
    if NAME in COLLECTIVE_TRANSPORTS:
        return
    import emulation

    dist.Backend.register_backend(NAME, _gloo, devices=["cpu"])
    COLLECTIVE_TRANSPORTS[NAME] = NcclTransport
    admission.CODED_BACKENDS["cpu"] += (NAME,)
    admission.STREAM_BACKENDS += (NAME,)
    kernels.ROUTES["cpu"] = {"emulated": emulation.load}


def build() -> None:
    """Build the emulated kernels, so that ranks do not all wait for the compiler."""
    import emulation

    emulation.binary().path()


def _gloo(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)
