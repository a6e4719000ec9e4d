"""Groups in stream order on CPUs: gloo under a backend name of its own, on which the package runs its schedules of NCCL groups.

The schedules, their sizes and agreements, and the emulated CUDA kernels are those of GPUs; the backend's collectives are gloo's. A CPU
has no streams, so that all work is done when a call returns: :mod:`sim` is for the order of streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.policy import admission

#: Name of the backend.
NAME = "shim"


class Transport(NcclTransport):
    """That of NCCL groups; gloo has no exchange of lists."""

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        coming, leaving = (
            [some[rank] if rank in some else torch.empty(0, dtype=torch.uint8) for rank in range(self._group.size())]
            for some in (received, sent)
        )
        parts = [[one.view(torch.uint8) for one in some] for some in (coming, leaving)]
        arrived = torch.empty(sum(map(len, parts[0])), dtype=torch.uint8)
        self.all_to_all(arrived, torch.cat(parts[1]), *([len(one) for one in some] for some in parts))
        for one, words in zip(parts[0], arrived.split([len(one) for one in parts[0]]), strict=True):
            one.copy_(words)


def install() -> None:
    """Give this process the backend, for good. For processes of one rank: tests of another backend need kernels that are not emulated."""
    if NAME in COLLECTIVE_TRANSPORTS:
        return
    import emulation

    dist.Backend.register_backend(NAME, _gloo, devices=["cpu"])
    COLLECTIVE_TRANSPORTS[NAME] = Transport
    admission.CODED_BACKENDS["cpu"] += (NAME,)
    admission.STREAM_BACKENDS += (NAME,)
    kernels.ROUTES["cpu"] = {"emulated": emulation.load}


def build() -> None:
    """Build the emulated kernels, so that ranks do not all wait for the compiler."""
    import emulation

    emulation.binary().path()


def _gloo(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)
