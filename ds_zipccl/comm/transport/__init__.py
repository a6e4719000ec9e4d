"""Transports: how bytes travel between the ranks of one group. One table: backend name -> transport."""

from __future__ import annotations

from ds_zipccl.comm.transport.gloo import GlooTransport
from ds_zipccl.comm.transport.protocol import Transport

#: Backend name of torch.distributed -> its transport.
TRANSPORTS: dict[str, type[Transport]] = {"gloo": GlooTransport}


def documented_sums(backend: str) -> bool:
    """Return whether the order of a backend's sums is known, so that our sums can have the same bits."""
    return backend in TRANSPORTS and TRANSPORTS[backend].capabilities.documented_sums
