"""The nodes of a group: the ranks that reach each other without a network."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

_PREFIX, _SECRET = "ds_zipccl/texts", "ds_zipccl/hash key"
#: Seconds between two messages about missing ranks (seed).
PATIENCE = 30.0


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


def pause(store: Store, key: str, seconds: float) -> None:
    """Let other threads use the store before the next look for a key."""
    time.sleep(seconds)


class _Life:
    """The exchanges of texts of one group, in the rendezvous store: a group of one backend may take no CPU tensors.

    The store may outlive the group, and another group may get its name. So every exchange is under a token of this group's life, which its
    lowest rank draws. The other ranks draw numbers and ask with them; the answer to a number lies under a key with that number, where no
    other life finds or leaves one. The lowest rank may first find the question of an earlier life, and therefore looks until all ranks
    have sent a text.

    A client of the store has one lock, which torch holds while it waits for a key. So nothing here waits in the store: other threads of
    this process may have to use it before a peer can come.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks, self._me = dist.get_process_group_ranks(group), dist.get_rank()
        self._prefix, self._number = f"{_PREFIX}/{group.group_name}", secrets.token_hex(16)
        self._leads = self._me == min(self._ranks)
        self._token = self._number if self._leads else ""
        self._answered: dict[int, bytes] = {}
        self._rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        _get_default_store().set(f"{self._prefix}/{self._me}", self._number)

    def exchange(
        self, kind: str, text: str, timeout: timedelta, late: Callable[[list[int]], None] | None
    ) -> tuple[dict[int, str], list[int]]:
        """See :func:`collect`."""
        store, end = _get_default_store(), time.monotonic() + timeout.total_seconds()
        round_, answer = next(self._rounds[kind]), f"{self._prefix}/{self._me}/{self._number}"
        if not self._token and self._comes(store, answer, end, late, self._prefix):
            self._token = store.get(answer).decode()
        if not self._token:
            return {}, self._missing(store, self._prefix)
        prefix = f"{self._prefix}/{self._token}/{kind}/{round_}"
        store.set(f"{prefix}/{self._me}", text)
        if store.add(f"{prefix}/count", 1) == len(self._ranks):
            store.set(f"{prefix}/all", "")
        complete = self._comes(store, f"{prefix}/all", end, late, prefix)
        missing = [] if complete else self._missing(store, prefix)
        came = [rank for rank in self._ranks if rank not in missing]
        texts = store.multi_get([f"{prefix}/{rank}" for rank in came])
        return {rank: said.decode(errors="replace") for rank, said in zip(came, texts, strict=True)}, missing

    def _comes(self, store: Store, key: str, end: float, late: Callable[[list[int]], None] | None, prefix: str) -> bool:
        """Return whether a key comes before ``end``. Blocks."""
        begin = said = now = time.monotonic()
        while not store.check([key]):
            unasked, now = self._answer(store) if self._leads else "", time.monotonic()
            if now >= end:
                return False
            if late is not None and now - said >= PATIENCE:
                said = now
                late(self._missing(store, prefix))
            pause(store, unasked or key, min(max(1e-3, (now - begin) / 10), 0.05))
        return True

    def _answer(self, store: Store) -> str:
        """Answer the questions of other ranks with the token, and return the key of one that has not come; "" where all have."""
        unasked = ""
        for rank in self._ranks:
            key = f"{self._prefix}/{rank}"
            if not store.check([key]):
                unasked = key
            elif (number := store.get(key)) != self._answered.get(rank):
                self._answered[rank] = number
                store.set(f"{key}/{number.decode()}", self._token)
        return unasked

    def _missing(self, store: Store, prefix: str) -> list[int]:
        """Return the ranks with no key under ``prefix``; the lowest one where it has not answered."""
        missing = [rank for rank in self._ranks if not store.check([f"{prefix}/{rank}"])]
        return missing if missing or self._token else [min(self._ranks)]


_lives: WeakKeyDictionary[dist.ProcessGroup, _Life] = WeakKeyDictionary()


def collect(
    group: dist.ProcessGroup,
    text: str,
    kind: str,
    timeout: timedelta | None = None,
    late: Callable[[list[int]], None] | None = None,
) -> tuple[dict[int, str], list[int]]:
    """Exchange texts between all ranks of a group. Every rank of the group calls, and blocks until all have called, for ``timeout`` at
    most; without one for that of the store.

    Args:
        kind: ranks get the texts of the other ranks' call of the same kind, the n-th of the n-th.
        late: is called with the global ranks that are missing, every :data:`PATIENCE` seconds.

    Returns:
        A map from global rank to the text of that rank; and the ranks whose text is missing after the timeout.

    Raises:
        RuntimeError: the store does not answer.
    """
    store: Any = _get_default_store()  # torch's types lack its timeout
    try:
        if group not in _lives:
            _lives[group] = _Life(group)
        return _lives[group].exchange(kind, text, timeout or store.timeout, late)
    except RuntimeError as error:
        raise RuntimeError(
            f"the rendezvous store does not answer; see the output of the rank that hosts it, often 0: {error}"
        ) from error


def tell(group: dist.ProcessGroup, text: str) -> dict[int, str]:
    """Return a map from global rank to the text that this rank tells. Every rank of the group calls, and blocks until all have called.

    Raises:
        RuntimeError: a rank did not call within the timeout of the store, or the store does not answer.
    """
    said, late = collect(group, text, "texts")
    if late:
        raise RuntimeError(f"ranks {late} did not come within the timeout of the rendezvous store; see their output")
    return said


def secret() -> bytes:
    """Return 16 random bytes, the same on all ranks of the job: those of the first to ask. Blocks for the rendezvous store alone."""
    store: Any = _get_default_store()
    with contextlib.suppress(AttributeError, RuntimeError):  # older torch and stores of users have no clone()
        store = store.clone()  # torch may hold the lock of the client until a peer comes, in another thread
    found: bytes = store.compare_set(_SECRET, "", secrets.token_hex(16))
    return bytes.fromhex(found.decode())


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

    @property
    def turns(self) -> Sequence[Sequence[int]]:
        """All nodes, the own one last: every rank begins with another node, so that not all frames enter one node at a time."""
        return [*self.nodes[self.node + 1 :], *self.nodes[: self.node + 1]]


def levels(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several nodes with several ranks each, and the same number of ranks on all nodes."""
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(ranks) for ranks in nodes}) == 1


def is_grid(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of a group follow each other node by node, or local rank by local rank. Nodes have equally many ranks."""
    by_node, by_local_rank = itertools.chain(*nodes), itertools.chain(*zip(*nodes, strict=True))
    return list(range(len(nodes) * len(nodes[0]))) in (list(by_node), list(by_local_rank))


def grid(rows: torch.Tensor, nodes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return rows of all ranks, which :func:`is_grid`, as a view ``[nodes, local ranks, ...]``."""
    shape = len(nodes), len(nodes[0])
    return rows.view(*shape, -1) if nodes[0][1] == 1 else rows.view(*shape[::-1], -1).transpose(0, 1)


def ascending(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of every node and of every local rank ascend, as those of a group do. Nodes have equally many ranks."""
    return all(list(ranks) == sorted(ranks) for ranks in (*nodes, *zip(*nodes, strict=True)))
