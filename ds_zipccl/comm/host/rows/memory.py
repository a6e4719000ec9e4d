"""The memory that a rank keeps of the rows in its messages of a group: kinds of messages without repeated rows, and maps of repeated rows.

A token that goes to several experts of a rank is a repeated row. Its gradients come back as multiples of each other, each weighted by a
gate. So the map of repeated rows in one message predicts rows of a later message of the same size. A rank remembers and forgets by itself;
its peers know nothing of that.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch

from ds_zipccl.policy import wire
from ds_zipccl.policy.wire import Backoff


class MapKey(NamedTuple):
    """The segments that a map may fit: of ``numel`` elements, in rows of ``width`` elements, to group rank ``peer``."""

    peer: int
    numel: int
    width: int


class RowPairs(NamedTuple):
    """Rows of a segment by their numbers, ascending, and the earlier row that is the source of each; both int32."""

    rows: torch.Tensor
    sources: torch.Tensor

    def nbytes(self) -> int:
        """Return the bytes of both lists."""
        return self.rows.nbytes + self.sources.nbytes


class RowMemory:
    """The maps of repeated rows of one group. Asynchronous operations of the group share it, each from its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backoffs: dict[tuple[str, str], Backoff] = {}
        self._maps: dict[int, tuple[MapKey, RowPairs]] = {}  # by number, the oldest first
        self._numbers: defaultdict[MapKey, list[int]] = defaultdict(list)
        self._issued = count()
        self._nbytes = 0

    def backoff(self, search: str, kind: str) -> Backoff:
        """Return the backoff of a search in messages of ``kind``. The result in a whole message counts, all of its segments."""
        patience = wire.SEARCH_MISSES if kind else wire.MISSES_OF_UNKNOWN
        with self._lock:
            return self._backoffs.setdefault((search, kind), Backoff(wire.UNSEARCHED, patience))

    def remember(self, key: MapKey, pairs: RowPairs) -> None:
        """Keep a map. The oldest maps go where there are too many."""
        with self._lock:
            number = next(self._issued)
            self._maps[number] = key, pairs
            self._numbers[key].append(number)
            self._nbytes += pairs.nbytes()
            while self._nbytes > wire.MAP_BYTES or len(self._maps) > wire.MAPS:
                self._drop(next(iter(self._maps)))

    def newest(self, key: MapKey) -> Sequence[tuple[int, RowPairs]]:
        """Return the newest maps of a key with their numbers, the newest first, at most MAP_TRIALS."""
        with self._lock:
            numbers = self._numbers.get(key, [])[: -wire.MAP_TRIALS - 1 : -1]
            return [(number, self._maps[number][1]) for number in numbers]

    def forget(self, number: int) -> None:
        """Drop a map that has served: in a backward pass, the next message of its key belongs to an older map."""
        with self._lock:
            if number in self._maps:
                self._drop(number)

    def _drop(self, number: int) -> None:
        key, pairs = self._maps.pop(number)
        self._nbytes -= pairs.nbytes()
        self._numbers[key].remove(number)
        if not self._numbers[key]:
            del self._numbers[key]
