"""The nodes of a group: the ranks that reach each other without a network."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ds_zipccl import tensors


def here() -> str:
    """Return the name of this node. Ranks with the same name reach each other without a network in between."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.exists():
        parts.append(os.readlink(namespace))  # containers and namespaces are nodes of their own
    return " ".join(parts)


@tensors.undisturbed()
def find(group: dist.ProcessGroup, place: str = "") -> dict[int, int]:
    """Return a map from global rank to the number of its node, or of its ``place`` in the node. A collective on CPU tensors: every rank of
    the group calls, and blocks."""
    mine = tensors.of_buffer(bytearray(hashlib.sha256(f"{here()} {place}".encode()).digest()))
    names = [tensors.empty(mine.numel(), mine.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(names, mine, group)
    numbers: dict[bytes, int] = {}
    ranks = dist.get_process_group_ranks(group)
    return {
        rank: numbers.setdefault(bytes(name.tolist()), len(numbers)) for rank, name in zip(ranks, names, strict=True)
    }


def by_node(group: dist.ProcessGroup, found: dict[int, int]) -> list[list[int]]:
    """Return the group ranks of each node, in order; an empty list if the node of some rank is unknown."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for rank, globally in enumerate(dist.get_process_group_ranks(group)):
        if globally not in found:
            return []
        nodes[found[globally]].append(rank)
    return list(nodes.values())


def levels(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several nodes with several ranks each, and the same number of ranks on all nodes."""
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(ranks) for ranks in nodes}) == 1
