"""Gathers of parameters as differences against what was gathered last, where everybody can prove to hold it.

The output of a ZeRO-1/2 gather still holds the last step's parameters, and each rank keeps a copy of the shard it sent last. Before a
gather every rank tells each owner the hash of what it has in the owner's place. An owner whose copy has that hash on all ranks sends a
difference, otherwise its shard in full: a loaded checkpoint, an edited weight or new memory costs one full gather, never a wrong bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import stats
from ds_zipccl.codecs import BASED_CODECS, region_hash
from ds_zipccl.comm import gathers, staging
from ds_zipccl.comm.exchange import Link
from ds_zipccl.comm.rounds import posting
from ds_zipccl.config import ZipcclConfig

#: Operation and role that gather parameters (admission: another's buffers do not hold what came last).
OPERATION, ROLE = "all_gather_into_tensor", "zero_param"
#: A shard smaller than this many bytes is sent in full (seed: the hashes cost a message each way).
SHARD_BYTES = 64 << 10
#: Gathers of a group that are remembered; of more, those unused the longest are forgotten (admission).
REMEMBERED = 256
HASH_BYTES = 16

#: Where, how many, of what: what is gathered to one place again and again.
_Key = tuple[int, int, torch.dtype]
#: What was sent last, and the memory it was gathered to: an engine that is gone must not leave its parameters behind.
_Sent = tuple[torch.Tensor, StorageWeakRef]
_sent: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[_Key, _Sent]] = WeakKeyDictionary()
_lock = threading.Lock()


def wanted(link: Link, config: ZipcclConfig, role: str, own: torch.Tensor) -> bool:
    """Whether a gather of shards like ``own`` goes this way. A function of what is equal on all ranks."""
    known = (link.op, role) == (OPERATION, ROLE) and config.delta == "auto" and link.codec != "raw"
    coded = own.dtype in BASED_CODECS["delta"].DTYPES and own.nbytes >= SHARD_BYTES
    return known and coded and not staging.is_staged(own)


def gather(link: Link, own: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """As ``gathers.gather`` of one flat shard: give every rank ``own``, and write that of rank r to ``places[r]``."""
    key = (places[0].data_ptr(), own.numel(), own.dtype)
    last = _take(link.group, key)
    reason = _objection(link, last, places)
    gathers.gather(link, 1, [own], [[place] for place in places], base=None if reason else last)
    own = places[link.rank]
    last = own.clone() if last is None else last.copy_(own)
    _keep(link.group, key, (last, StorageWeakRef(own.untyped_storage())))
    stats.record_difference(ROLE, OPERATION, reason)


def _objection(link: Link, last: torch.Tensor | None, places: Sequence[torch.Tensor]) -> str:
    """Why this rank's shard must go in full; empty where every rank holds what was sent last. Round 0."""
    answers = {peer: torch.empty(HASH_BYTES, dtype=torch.uint8) for peer in link.peers}
    with posting(link, 0) as exchange:
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
    return torch.frombuffer(bytearray(region_hash(region)), dtype=torch.uint8)


def _take(group: dist.ProcessGroup, key: _Key) -> torch.Tensor | None:
    """What this rank sent last. Out of the memory until the gather has succeeded: after an error nothing is known of the others."""
    with _lock:
        shard, memory = _sent.setdefault(group, OrderedDict()).pop(key, (None, None))
    return None if memory is None or memory.expired() else shard


def _keep(group: dist.ProcessGroup, key: _Key, shard: _Sent) -> None:
    with _lock:
        sent = _sent.setdefault(group, OrderedDict())
        sent[key] = shard
        for gone in [other for other, (_, memory) in sent.items() if memory.expired()]:
            del sent[gone]
        while len(sent) > REMEMBERED:
            sent.popitem(last=False)
