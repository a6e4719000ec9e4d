"""The backend ``slots``: groups in stream order on CPUs, on which the package runs its schedules of NCCL groups.

gloo carries the collectives, the C++ kernels make and read the frames. Schedules, sizes, agreements and host waits are
those of GPUs. A CPU has no streams: all work is done when a call returns, and times say nothing about GPUs.

``python -m ds_zipccl.benchmarks.links.slots SCRIPT [OPTIONS]`` runs a script that makes its default group by the name
``slots``, such as those of ``examples/``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.benchmarks.links import COUNTED, NODE, SLOTS
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import group_nodes
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.kernels import KernelBackend
from ds_zipccl.kernels.cpp import slots
from ds_zipccl.policy import admission

#: Name of the backend in torch.distributed.
NAME = SLOTS


class Transport(NcclTransport):
    """That of NCCL groups; gloo has no exchange of lists. ``between``: bytes that the node of this rank has sent to
    other nodes in this process, if all its ranks send as this one; a collective of the backend is one ring."""

    between = 0

    def _count(self, ring: int, sizes: Mapping[int, int] | None = None) -> None:
        nodes, rank = group_nodes(self._group), dist.get_rank(self._group)
        own = next((ranks for ranks in nodes if rank in ranks), range(self._group.size()))
        if len(own) < self._group.size():
            afar = ring if sizes is None else len(own) * sum(size for peer, size in sizes.items() if peer not in own)
            Transport.between += afar

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self._count(whole.nbytes - part.nbytes)
        super().all_gather(whole, part)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        ranks = self._group.size()
        sizes = [sent.numel() // ranks] * ranks if sent_sizes is None else sent_sizes
        self._count(0, {peer: size * sent.itemsize for peer, size in enumerate(sizes)})
        super().all_to_all(received, sent, received_sizes, sent_sizes)

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        coming, leaving = (
            [some[rank] if rank in some else torch.empty(0, dtype=torch.uint8) for rank in range(self._group.size())]
            for some in (received, sent)
        )
        parts = [[one.view(torch.uint8) for one in some] for some in (coming, leaving)]
        arrived = torch.empty(sum(map(len, parts[0])), dtype=torch.uint8)
        self.all_to_all(arrived, torch.cat(parts[1]), *([len(one) for one in some] for some in parts))
        for one, found in zip(parts[0], arrived.split([len(one) for one in parts[0]]), strict=True):
            one.copy_(found)

    def max(self, words: torch.Tensor) -> None:
        self._count(2 * words.nbytes)
        super().max(words)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp) -> None:
        self._count(whole.nbytes - part.nbytes)
        super().reduce_scatter(part, whole, op)


def install(backends: Mapping[str, Callable[[], KernelBackend]] | None = None) -> None:
    """Give this process the backend, for good, before its first call on CPU tensors. ``backends``: kernel backends of
    CPU tensors by name, with the calls of :class:`ds_zipccl.kernels.cuda.backend.CudaBackend`; None: the C++ one."""
    if NAME in COLLECTIVE_TRANSPORTS:
        return
    dist.Backend.register_backend(NAME, _gloo, devices=["cpu"])
    COLLECTIVE_TRANSPORTS[NAME] = Transport
    admission.CODED_BACKENDS["cpu"] += (NAME,)
    admission.STREAM_BACKENDS += (NAME,)
    kernels.ROUTES["cpu"] = dict(backends or {"native": slots.load})
    if node := os.environ.get(NODE):
        topology.here = lambda: f"node {node}"


def _gloo(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)


def main(script: str) -> None:
    """Run a script with the backend."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    install()
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if (file := os.environ.get(COUNTED)) and os.environ.get("RANK") == "0":
            Path(file).write_text(json.dumps(Transport.between))


if __name__ == "__main__":
    from ds_zipccl.benchmarks.links import slots as module  # not __main__: one module, one counter

    sys.argv = sys.argv[1:]
    module.main(sys.argv[0])
