"""The nodes of a group: the ranks that reach each other without a network."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PREFIX, _SECRET = "ds_zipccl/nodes", "ds_zipccl/hash key"
#: Numbers of the calls of :func:`tell` of each group, equal on all ranks of the group.
_rounds: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def here() -> str:
    """Return the name of this node. Ranks with the same name reach each other without a network in between."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.exists():
        parts.append(os.readlink(namespace))  # containers and namespaces are nodes of their own
    return " ".join(parts)


def find(group: dist.ProcessGroup, place: str = "") -> dict[int, int]:
    """Return a map from global rank to the number of its node, or of its ``place`` in the node.

    Every rank of the group calls, and blocks until all have called.

    Raises:
        RuntimeError: a rank did not call within the timeout of the store.
    """
    names = tell(group, hashlib.sha256(f"{here()} {place}".encode()).hexdigest())
    numbers: dict[str, int] = {}
    return {rank: numbers.setdefault(name, len(numbers)) for rank, name in names.items()}


class ToldTexts:
    """The texts that all ranks of a group tell each other. Texts go through the rendezvous store, because a group of one backend may take
    no CPU tensors. Every rank makes this object at the same call of the group; making waits for no other rank."""

    def __init__(self, group: dist.ProcessGroup, text: str) -> None:
        prefix = f"{_PREFIX}/{group.group_name}/{next(_rounds.setdefault(group, itertools.count()))}"
        self._keys = {rank: f"{prefix}/{rank}" for rank in dist.get_process_group_ranks(group)}
        _get_default_store().set(self._keys[dist.get_rank()], text)
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[int, str]:
        """Return a map from global rank to the text of that rank. Blocks until all have told theirs; may be called again, from any thread.

        Raises:
            RuntimeError: a rank did not tell its text within the timeout of the store.
        """
        with self._lock:
            if not self._texts:
                store = _get_default_store()
                try:
                    found = store.multi_get(list(self._keys.values()))
                except RuntimeError as error:  # it names a key
                    late = [rank for rank, key in self._keys.items() if not store.check([key])]
                    text = f"ranks {late} did not come within the timeout of the rendezvous store; see their output"
                    raise RuntimeError(text) from error
                self._texts = {
                    rank: said.decode(errors="replace") for rank, said in zip(self._keys, found, strict=True)
                }
        return self._texts


def tell(group: dist.ProcessGroup, text: str) -> dict[int, str]:
    """Return :meth:`ToldTexts.all` of a text that this rank tells. Every rank of the group calls, and blocks until all have called.

    Raises:
        RuntimeError: a rank did not call within the timeout of the store.
    """
    return ToldTexts(group, text).all()


def secret() -> bytes:
    """Return 16 random bytes, the same on all ranks of the job: those of the first to ask. Blocks for the rendezvous store alone."""
    mine = os.urandom(16).hex()
    return bytes.fromhex(_get_default_store().compare_set(_SECRET, "", mine).decode())


def by_node(group: dist.ProcessGroup, found: dict[int, int]) -> list[list[int]]:
    """Return the group ranks of each node, in order; an empty list if the node of some rank is unknown."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for rank, globally in enumerate(dist.get_process_group_ranks(group)):
        if globally not in found:
            return []
        nodes[found[globally]].append(rank)
    return list(nodes.values())


@dataclass(frozen=True)
class Levels:
    """The levels of a group, as one rank sees them.

    ``nodes``: the group ranks of each node; one level has a node for each rank. ``node`` and ``local_rank``: the place of this rank.
    ``node_ranks``: the ranks of the own node. ``peers``: the ranks of the own local_rank, in the order of the nodes, which have equally
    many ranks then.
    """

    nodes: Sequence[Sequence[int]]
    node: int
    local_rank: int

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rank: int, size: int) -> Levels:
        """Return the levels of a group of ``size`` ranks: two if ``nodes`` names the ranks of each node, one if it is empty."""
        found = nodes or [[alone] for alone in range(size)]
        return cls(found, *next((node, ranks.index(rank)) for node, ranks in enumerate(found) if rank in ranks))

    @property
    def node_ranks(self) -> Sequence[int]:
        return self.nodes[self.node]

    @property
    def peers(self) -> Sequence[int]:
        return [ranks[self.local_rank] for ranks in self.nodes]


def levels(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several nodes with several ranks each, and the same number of ranks on all nodes."""
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(ranks) for ranks in nodes}) == 1


def local_ranks(nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks of each local rank: the ranks with the same place in their nodes, in the order of the nodes. Nodes have equally
    many."""
    return [list(ranks) for ranks in zip(*nodes, strict=True)]


def ascending(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of every node and of every local rank ascend, as those of a group do. Nodes have equally many ranks."""
    return all(list(ranks) == sorted(ranks) for ranks in (*nodes, *local_ranks(nodes)))
