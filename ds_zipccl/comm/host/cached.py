"""Parameters whose bases stand for gathers, on groups that exchange messages.

A gather fills the base. Every later gather *asks* first: one small message to each rank, for all of its parameters together. Each rank
compares the shard that it would send with its own row of the base, bit by bit, and tells the result, the base's number and the gather that
has filled it. A parameter of which all ranks say the same, and none a change, is copied from the base. The others are gathered by messages,
and fill their bases anew.

So a program may write to a shard between any two gathers, on any rank, by any means: the next gather of that parameter sees it. What else a
rank does (train, evaluate, skip a step, call a part of the model) decides nothing. A message per gather costs less than it seems: a rule
that asks once per pass must compare all shards once more in that pass.

Rows of other ranks are not compared. Where ranks have copies of their own, the first question after a gather hashes the whole base, and
later ones another part now and then: a damaged copy that gathers were copied from stops all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.shared import copy_others, same_bits
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER, NOTHING_THERE, SOMETHING_ELSE, GatheredParameter, Way
from ds_zipccl.comm.context import Call, OpContext, Told
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.work import Work
from ds_zipccl.telemetry import counters

#: Parts in which a base is hashed, the least bytes of a part, and the questions from one part to the next (default, not tuned).
AUDITS, AUDIT_BYTES, AUDIT_EACH = 64, 64 << 10, 8
#: Reasons for which a parameter is gathered by messages again, beside those of :mod:`ds_zipccl.comm.bases.state`.
CHANGED, VERSION = "own shard changed", "version differs"
#: An answer that names no base: the own shard is not the base's row; the last gather has failed.
_CHANGED, _UNFILLED = -1, -2
#: Bytes of shards from which on several threads compare them (default, not tuned: starting them takes as long as a few MB).
_MUCH = 16 << 20


class CachedParameter(GatheredParameter):
    """A parameter that may be copied from its base. ``way`` is DELTA once a gather has filled the base; every gather asks then.
    ``trained``: optimizer steps change it, so that a change is no event to count. Ranks may differ."""

    def __init__(self, name: str, numel: int, dtype: torch.dtype | None = None, *, trained: bool = False) -> None:
        super().__init__(name, numel, dtype)
        self.trained = trained
        #: Since it was filled, the base was copied; was hashed whole. Equal on all ranks.
        self._used = self._proven = False
        self._turn = 0
        self._filling: weakref.ref[Work] | None = None

    def forget(self) -> None:
        """Do nothing: the next gather asks whatever has happened to the shard."""

    def fill(self) -> None:
        """Note that the next gather fills the base. Blocks until an earlier gather into the base has ended."""
        self.finish()
        self.way, self._used, self._proven = Way.DELTA, False, False

    def filled_by(self, work: Work | None) -> None:
        """Note the handle of the gather that fills the base; None: it has ended. The handle's tensors are not kept alive."""
        self._filling = None if work is None else weakref.ref(work)

    def finish(self) -> None:
        """Block until the gather that fills the base has ended, in whatever way. A handle that is gone has ended."""
        work = None if self._filling is None else self._filling()
        if work is not None:
            work.join()
        self._filling = None

    def copy(self, rows: torch.Tensor, rank: int, own: torch.Tensor) -> None:
        """Copy the shards of all ranks to the rows of an output, ``[ranks, numel]``. ``own``: the shard of this rank. Blocks."""
        slot = self.slot()
        assert slot is not None  # all ranks have said that it is filled
        copy_others(slot.memory, rows, rank)
        if rows[rank].data_ptr() != own.data_ptr():
            rows[rank].copy_(own)
        self._used = self._proven = True

    def answer(self, shard: torch.Tensor, rank: int) -> int:
        """Return what this rank says of its base: not negative if its own row has the bits of ``shard``, flat. Blocks."""
        slot = self.slot()
        if slot is None or not slot.filled:
            return _UNFILLED
        return slot.version << 24 | slot.serial if same_bits(shard, slot.memory[rank]) else _CHANGED

    def audit(self) -> int:
        """Return the hash of a part of the base, another part each time, or of the whole base in the first call after a gather; 0 in most
        calls, and where all ranks share the memory."""
        slot = self.slot()
        self._turn += 1
        if slot is None or len(slot.node_ranks) == len(slot.memory) or (self._proven and self._turn % AUDIT_EACH):
            return 0
        octets = slot.memory.view(-1).view(torch.uint8)
        most = max(-(-octets.numel() // AUDITS), AUDIT_BYTES) if self._proven else octets.numel()
        part = self._turn // AUDIT_EACH % max(1, -(-octets.numel() // max(1, most)))
        return int.from_bytes(region_hash(octets[part * most : (part + 1) * most])[:8], "little", signed=True)

    def reason(self, call: Call, answers: Sequence[int], audits: Sequence[int]) -> str:
        """Return the reason why the base does not hold the shards of all ranks, by what all ranks say; "" if it does.

        Raises:
            CommError: copies of the base that were used differ between ranks. All ranks raise.
        """
        if _CHANGED in answers:
            return CHANGED
        if _UNFILLED in answers:
            return NOTHING_THERE
        if len(set(answers)) > 1:
            return VERSION
        if len(set(audits)) == 1:
            return ""
        if self._used:
            raise call.error(
                f"{self.name}: the copies in host memory that ranks gather from are not the same any more; gathers since the last step "
                'may have wrong words: test the memory of these nodes, and restart from a checkpoint, or set "zero3_base": "off"'
            )
        return SOMETHING_ELSE


def ask(call: Call, found: Sequence[tuple[CachedParameter, torch.Tensor]]) -> list[bool]:
    """Return for each parameter whether the base holds the shards of all ranks; equal on all ranks. A collective; blocks.

    Args:
        found: the parameters of a gather whose ``way`` is DELTA, with the own shards, flat; in the order of the gather.

    Raises:
        CommError: see :meth:`CachedParameter.reason`, or the transport failed.
    """
    for one, _ in found:
        one.finish()
    with torch.inference_mode(), tensors.undisturbed():
        answers = _answers(found, call.rank)
        ctx = OpContext(AGREEMENT, call.group, call.config, call.role, "raw")
        mine = tensors.of_numbers(list(zip(answers, (one.audit() for one, _ in found), strict=True)), torch.int64)
        # in an order of this rank's own: none counts
        ranks = Told(ctx, mine, "the answers to a question", ctx.tag(0)).all()
        counters.record(call.role, AGREEMENT, 0, len(ctx.peers) * mine.nbytes)
        said = ranks.transpose(0, 1).tolist()  # [parameters, ranks, numbers]
    reasons = [one.reason(ctx, *zip(*numbers, strict=True)) for (one, _), numbers in zip(found, said, strict=True)]
    for (one, _), reason in zip(found, reasons, strict=True):
        if reason and not (one.trained and reason == CHANGED):
            counters.record_difference(call.role, GATHER, reason)
    return [not reason for reason in reasons]


def _answers(found: Sequence[tuple[CachedParameter, torch.Tensor]], rank: int) -> list[int]:
    """Return :meth:`CachedParameter.answer` of each parameter, by several threads where one is slower than the copies."""
    workers = min(torch.get_num_threads(), len(found))
    if workers < 2 or sum(shard.nbytes for _, shard in found) < _MUCH:
        return [one.answer(shard, rank) for one, shard in found]
    with ThreadPoolExecutor(workers, "ds_zipccl-compare") as pool:
        return list(pool.map(lambda pair: pair[0].answer(pair[1], rank), found))
