"""Which ranks share a node. Found out through the rendezvous store: every rank says where it is before it asks where others are."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "ds_zipccl/node/"


def here() -> str:
    """Names this node: ranks with the same name reach each other without a network in between."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.exists():
        parts.append(os.readlink(namespace))  # containers and namespaces are nodes of their own
    return " ".join(parts)


def publish() -> None:
    """Tell the other ranks of the world where this one is; does not wait for any."""
    _get_default_store().set(f"{_KEY}{dist.get_rank()}", here())


def nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """The group's ranks by node, in order. Blocks until every rank of the group has called :func:`publish`."""
    store = _get_default_store()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, globally in enumerate(dist.get_process_group_ranks(group)):
        found[store.get(f"{_KEY}{globally}").decode()].append(rank)
    return list(found.values())


def levels(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether there are several nodes with several ranks each, as many on every one."""
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(ranks) for ranks in nodes}) == 1
