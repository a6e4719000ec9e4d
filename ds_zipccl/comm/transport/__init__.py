"""Transports: how bytes travel between the ranks of one group. One table for each protocol: backend name -> transport."""

from __future__ import annotations

from ds_zipccl.comm.transport.gloo import GlooTransport
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.comm.transport.protocol import CollectiveTransport, Transport

#: Backend name of torch.distributed -> its transport.
TRANSPORTS: dict[str, type[Transport]] = {"gloo": GlooTransport}
#: Backend name -> its transport in stream order.
COLLECTIVE_TRANSPORTS: dict[str, type[CollectiveTransport]] = {"nccl": NcclTransport}
