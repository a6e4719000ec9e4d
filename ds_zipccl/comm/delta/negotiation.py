"""Gathers of what has changed a little since an earlier one, as differences where every rank proves to hold the same base.

Before a gather every rank tells each owner the hash of what it holds in the owner's place. An owner who knows that all of them hold what
it sent then, and has it still, sends a difference; otherwise its shard goes in full: a loaded checkpoint, an edited weight or new memory
costs one full gather, never a wrong bit. Where the base lies is up to a :class:`Base`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import tensors
from ds_zipccl.codecs import region_hash
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.schedules import gather as schedule
from ds_zipccl.comm.schedules.pipeline import posting
from ds_zipccl.telemetry import counters

HASH_BYTES = 16


class Base(Protocol):
    """What the ranks may hold of an earlier gather. ``places`` are the output's shards, flat, one per rank."""

    def begin(self, link: Link, places: Sequence[torch.Tensor], lease: Lease) -> torch.Tensor | None:
        """Put what this rank holds of every other rank's shard into its place; the own shard as the others got it, flat, or None where
        they got none. Nothing else may change either until the gather is over."""
        ...

    def end(self, link: Link, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """Hold what stands in ``places`` now: the gather has succeeded. ``last`` is what :meth:`begin` gave, and nobody else's any more."""
        ...

    def abandon(self, link: Link) -> None:
        """The gather has failed on this rank; does not block."""
        ...

    def token(self) -> Hashable:
        """Tells bases apart, in the same way on all ranks; None where it cannot."""
        ...


def gather(link: Link, own: torch.Tensor, places: Sequence[torch.Tensor], base: Base) -> None:
    """As ``gathers.gather`` of one flat shard: give every rank ``own``, and write that of rank r to ``places[r]``."""
    try:
        # what is held is put into the places first, and the own tensor may lie in one of them
        (own,) = schedule.detached([own], places, [places[link.rank]])
        last = base.begin(link, places, lease := Lease())
        reason = _objection(link, last, places)
        schedule.gather(link, 1, [own], [[place] for place in places], base=None if reason else last)
    except BaseException:
        base.abandon(link)
        raise
    base.end(link, places, last)
    lease.release()
    counters.record_difference(link.role, link.op, reason)


def _objection(link: Link, last: torch.Tensor | None, places: Sequence[torch.Tensor]) -> str:
    """Why this rank's shard must go in full; empty where every rank holds what was sent last. Round 0."""
    answers = {peer: tensors.empty(HASH_BYTES, torch.uint8) for peer in link.peers}
    with posting(link, 0, ours=True) as exchange:
        for peer in link.peers:
            exchange.expect(peer, answers[peer])
        for peer in link.peers:
            exchange.send(_hash(places[peer]), peer)
        for peer in link.peers:
            exchange.receive(peer, answers[peer])
    if last is None:
        return "nothing was gathered there"
    own = _hash(last)
    return "" if all(torch.equal(own, answer) for answer in answers.values()) else "a rank holds something else"


def _hash(region: torch.Tensor) -> torch.Tensor:
    return tensors.of_buffer(bytearray(region_hash(region)))


class _Sent(NamedTuple):
    shard: torch.Tensor
    home: StorageWeakRef  # of the output that it was gathered into
    span: range  # of the output's addresses


#: Where, how many, of what: what is gathered to one place again and again.
_Key = tuple[int, int, torch.dtype]


class InPlace:
    """The output itself, which still holds what was gathered into it last, as in ZeRO-1 and ZeRO-2.

    Each rank keeps a copy of the shard it sent, as long as the output's memory lives: one copy of the shards it owns.
    """

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _Sent]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        counters.count_memory("copies of the shards sent", self._nbytes)

    def _nbytes(self) -> int:
        with self._lock:
            self._prune()
            return sum(one.shard.nbytes for sent in self._sent.values() for one in sent.values())

    def _prune(self) -> None:
        """Let go of copies whose output is gone."""
        for sent in self._sent.values():
            for key in [key for key, one in sent.items() if one.home.expired()]:
                del sent[key]

    def begin(self, link: Link, places: Sequence[torch.Tensor], lease: Lease) -> torch.Tensor | None:
        """See :class:`Base`. The copy is out of the memory until the gather has succeeded: after an error nothing is known of the
        others."""
        with self._lock:
            self._prune()
            last = self._sent.setdefault(link.group, {}).pop(_key(places), None)
        return None if last is None else last.shard

    def end(self, link: Link, places: Sequence[torch.Tensor], last: torch.Tensor | None) -> None:
        """See :class:`Base`."""
        own = places[link.rank]
        shard = own.clone() if last is None else last.copy_(own)
        span = range(places[0].data_ptr(), places[-1].data_ptr() + places[-1].nbytes)
        with self._lock:
            sent = self._sent.setdefault(link.group, {})
            # what was gathered there in another size is overwritten
            for key in [key for key, one in sent.items() if one.span.start < span.stop and span.start < one.span.stop]:
                del sent[key]
            sent[_key(places)] = _Sent(shard, StorageWeakRef(own.untyped_storage()), span)

    def abandon(self, link: Link) -> None:
        """See :class:`Base`."""

    def token(self) -> Hashable:
        """See :class:`Base`: where memory lies may differ from rank to rank."""
        return None


def _key(places: Sequence[torch.Tensor]) -> _Key:
    return places[0].data_ptr(), places[0].numel(), places[0].dtype


#: The one for all gathers.
IN_PLACE = InPlace()
