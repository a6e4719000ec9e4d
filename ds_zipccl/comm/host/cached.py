"""Parameters whose bases stand for gathers, on groups that exchange messages.

A gather fills the base. Every later gather *asks* first: one small message to each rank, for all of its parameters together. Each rank
compares the shard that it would send with its own row of the base, bit by bit, and tells the result, the base's number and the gather that
has filled it. A parameter of which all ranks say the same, and none a change, is copied from the base. The others are gathered by messages,
and fill their bases anew. All this is the job of the call's handle, so that ranks wait for each other only where they wait for the handle.

So a program may write to a shard between any two gathers, on any rank, by any means: the next gather of that parameter sees it. What else a
rank does (train, evaluate, skip a step, call a part of the model) decides nothing. A message per gather costs less than it seems: a rule
that asks once per pass must compare all shards once more in that pass.

Rows of other ranks are not compared. Where ranks have copies of their own, the first question after a gather hashes the whole base, and
later ones another part now and then: a damaged copy that gathers were copied from stops all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.shared import BaseSlot, copy_others, same_bits
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER, NOTHING_THERE, SOMETHING_ELSE, GatheredParameter
from ds_zipccl.comm.context import Call, OpContext, SmallGather
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.telemetry import counters

#: Parts in which a base is hashed, the least bytes of a part, and the questions from one part to the next (default, not tuned).
AUDITS, AUDIT_BYTES, AUDIT_EACH = 64, 64 << 10, 8
#: Reasons for which a parameter is gathered by messages again, beside those of :mod:`ds_zipccl.comm.bases.state`.
CHANGED, VERSION = "own shard changed", "version differs"
#: An answer that names no base: the own shard is not the base's row; the last gather has failed.
_CHANGED, _UNFILLED = -1, -2


class CachedParameter(GatheredParameter):
    """A parameter that may be copied from its base. ``source`` is DELTA once a gather is to fill the base; every later one asks.
    ``trained``: optimizer steps change it, so that a change is no event to count. Ranks may differ."""

    def __init__(self, name: str, numel: int, dtype: torch.dtype | None = None, *, trained: bool = False) -> None:
        super().__init__(name, numel, dtype)
        self.trained = trained
        #: Since it was filled, the base was copied; was hashed whole. Equal on all ranks.
        self.used = self.proven = False
        self.turn = 0

    def forget(self) -> None:
        """Do nothing: the next gather asks whatever has happened to the shard."""

    def fill(self) -> None:
        """Note that a gather fills the base."""
        self.used = self.proven = False

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
        if self.used:
            raise call.error(
                f"{self.name}: the copies in host memory that ranks gather from are not the same any more; gathers since the last step "
                'may have wrong words: test the memory of these nodes, and restart from a checkpoint, or set "zero3_base": "off"'
            )
        return SOMETHING_ELSE


class BasedShard(NamedTuple):
    """A parameter of a gather that has a base, the base, and the own shard, flat."""

    parameter: CachedParameter
    slot: BaseSlot
    shard: torch.Tensor

    def answer(self, rank: int) -> int:
        """Return what this rank says of its base: not negative if its own row has the bits of the shard. Blocks."""
        if not self.slot.filled:
            return _UNFILLED
        same = same_bits(self.shard, self.slot.memory[rank])
        return self.slot.version << 24 | self.slot.serial if same else _CHANGED

    def audit(self, key: bytes) -> int:
        """Return the hash of a part of the base, another part each time, or of the whole base in the first call after a gather; 0 in most
        calls, and where all ranks share the memory."""
        one, memory = self.parameter, self.slot.memory
        one.turn += 1
        if len(self.slot.node_ranks) == len(memory) or (one.proven and one.turn % AUDIT_EACH):
            return 0
        octets = memory.view(-1).view(torch.uint8)
        most = max(-(-octets.numel() // AUDITS), AUDIT_BYTES) if one.proven else octets.numel()
        part = one.turn // AUDIT_EACH % max(1, -(-octets.numel() // max(1, most)))
        return int.from_bytes(region_hash(octets[part * most : (part + 1) * most], key)[:8], "little", signed=True)

    def copy(self, rows: torch.Tensor, rank: int) -> None:
        """Copy the shards of all ranks to the rows of an output, ``[ranks, numel]``. Blocks."""
        copy_others(self.slot.memory, rows, rank)
        if rows[rank].data_ptr() != self.shard.data_ptr():
            rows[rank].copy_(self.shard)
        self.parameter.used = self.parameter.proven = True


def ask(ctx: OpContext, asked: Sequence[BasedShard]) -> list[bool]:
    """Return for each parameter whether the base holds the shards of all ranks; equal on all ranks. A collective; blocks.

    Args:
        ctx: its first tag is that of the question.
        asked: in the order of the gather.

    Raises:
        CommError: see :meth:`CachedParameter.reason`, or the transport failed.
    """
    if not asked:
        return []
    mine = tensors.of_numbers([(one.answer(ctx.rank), one.audit(ctx.hash_key)) for one in asked], torch.int64)
    # in an order of this rank's own: none counts
    ranks = SmallGather(ctx, mine, "the answers to a question", ctx.tag(0)).all()
    counters.record(ctx.role, AGREEMENT, 0, len(ctx.peers) * mine.nbytes)
    said = ranks.transpose(0, 1).tolist()  # [parameters, ranks, numbers]
    reasons = [one.parameter.reason(ctx, *zip(*numbers, strict=True)) for one, numbers in zip(asked, said, strict=True)]
    for one, reason in zip(asked, reasons, strict=True):
        if reason and not (one.parameter.trained and reason == CHANGED):
            counters.record_difference(ctx.role, GATHER, reason)
    return [not reason for reason in reasons]
