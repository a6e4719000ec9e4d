"""Transports: how bytes travel between the ranks of one group. One table: backend name -> transport."""

from __future__ import annotations

from ds_zipccl.comm.transport.gloo import GlooTransport
from ds_zipccl.comm.transport.protocol import Transport

#: Backend name, as torch.distributed has it -> its transport.
TRANSPORTS: dict[str, type[Transport]] = {"gloo": GlooTransport}


def documented_sums(backend: str) -> bool:
    """Return whether the order in which a backend adds is known, so that a sum of ours can have its bits."""
    return backend in TRANSPORTS and TRANSPORTS[backend].capabilities.documented_sums
