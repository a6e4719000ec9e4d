"""Versions of ZeRO-3's parameters on groups that exchange messages: times in which a parameter's base holds its words.

A parameter whose base is *valid* is gathered by a local copy: no message, no hash. Which parameters are copied decides which collectives
run, so that it may follow only from values that all ranks have agreed on:

- A gather fills the base. From then on the base may hold the parameter's words.
- The next gather finds that parameter, and an *agreement* follows: one small message to each rank, for all such parameters together. Each
  rank compares its own shard word for word with its own row of the base, and tells the result, the base's number and the gather that has
  filled it. A parameter of which all ranks say the same, and none a change, is valid.
- After an optimizer step the parameters that the step changes are filled anew, and all others are agreed on anew.
- Before the step all ranks tell whether a parameter has changed since the agreement, and all of them stop if one has.
- No step follows the copies of an evaluation. There each forward pass begins with an agreement.

So each copy of a base lies between two comparisons of the owner, and a parameter that was written to in between stops all ranks. The owner
compares at each copy too, so that words that are back before the second comparison stop all ranks as well. A write between two such
brackets, or between two passes of an evaluation, is a miss: the parameter is gathered by messages once. The comparison reads the words
themselves, so that a write through ``.data``, which moves no version counter, is found too. Rows of other ranks are not compared: where
ranks have copies of their own, the first agreement after a gather hashes the whole base, and each later one another part. After a miss it
hashes all bases whole.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER, NOTHING_THERE, SOMETHING_ELSE, Versioned, Way
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host.pipeline import swap
from ds_zipccl.comm.work import CommError, Work
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

#: Copies of one base between two comparisons (seed: more than a step of four batches makes; a program without steps looks as often).
COPIES = 16
#: Agreements in which a whole base is hashed once, part by part, and the least bytes of a part (seeds: hashing costs less than comparing).
AUDITS, AUDIT_BYTES = 64, 64 << 10
#: Reasons for which a parameter is gathered by messages again, beside those of :mod:`ds_zipccl.comm.bases.state`.
CHANGED, VERSION = "own shard changed", "version differs"
#: A claim that is no version: the own shard is not the base's row; the last gather has failed; the own shard was not the base's row when
#: other ranks copied the base.
_CHANGED, _UNFILLED, _BROKEN = -1, -2, -3
#: Elements that are converted at a time to compare a shard of another dtype (seed).
_CHUNK = 1 << 20
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Kept(Versioned):
    """A parameter whose base may be valid: then the next gather is a copy, and an agreement may make it valid while ``way`` is DELTA.

    Args:
        name: of the parameter, for messages.
        shard: returns this rank's shard as the next gather would send it, of any shape; None if it is not in memory.
    """

    def __init__(self, name: str, shard: Callable[[], torch.Tensor | None], keeper: Keeper) -> None:
        super().__init__(name)
        self.keeper = keeper
        #: Copies of the base since the last comparison.
        self.copies = 0
        self._shard = shard
        self._used = False  # the base was copied since it was filled
        self._in_step = False  # one of the copies since the last comparison is part of a step; equal on all ranks
        #: The base was copied, in this version or an earlier one, and no comparison came since; equal on all ranks.
        self.unchecked = False
        self._broken = False  # the own shard was not the base's when other ranks copied the base
        self._told = False  # all ranks were stopped for this parameter in its version; equal on all ranks
        self._proven = False  # the base was hashed whole since it was filled
        self._turn = 0
        self._filling: weakref.ref[Work] | None = None
        keeper.parameters.append(self)

    def forget(self) -> None:
        """See :meth:`.Versioned.forget`. Copies that were wrong are still told, if they were not told before."""
        super().forget()
        self.copies = 0
        if self._told:
            self._told = self._broken = self.unchecked = False

    def refresh(self) -> None:
        """Let the next gather agree anew. Does not block."""
        if self.way is Way.COPY:
            self.way = Way.DELTA

    def prove(self) -> None:
        """Begin a version, after an agreement."""
        self.way, self._proven = Way.COPY, True
        self.checked()

    def checked(self) -> None:
        """Note that all ranks have compared, and found no change."""
        self.copies, self.unchecked, self._in_step = 0, False, False

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
        """Copy the shards of all ranks to the rows of an output, ``[ranks, numel]``. Blocks.

        ``own``: the shard that this rank would send. If its words are not the base's, other ranks copy wrong ones: they learn of that with
        the next comparison, even if the old words are back by then.
        """
        slot = self.slot()
        assert slot is not None  # the caller has looked
        self._broken |= not same_words(own, slot.memory[rank])
        rows[:rank].copy_(slot.memory[:rank])
        rows[rank + 1 :].copy_(slot.memory[rank + 1 :])
        if rows[rank].data_ptr() != own.data_ptr():
            rows[rank].copy_(own)
        self.copies, self._used, self.unchecked = self.copies + 1, True, True
        self._in_step |= self.keeper.steps

    def claim(self, rank: int) -> int:
        """Return what this rank says of its base: not negative if the base's own row has the words of the own shard. Blocks.

        After the end of a version the shard may have other words; only copies that were made before may be wrong.
        """
        if self._broken:
            return _BROKEN
        if self.way is Way.FULL:
            return 0
        slot = self.slot()
        if slot is None or not slot.filled:
            return _UNFILLED
        shard = self._shard()
        same = shard is not None and same_words(shard.reshape(-1), slot.memory[rank])
        return slot.version << 24 | slot.serial if same else _CHANGED

    def audit(self, whole: bool = False) -> int:
        """Return the hash of a part of the base, another part with each call, or of the whole base, as in the first call after a gather;
        0 where all ranks share the memory."""
        slot = self.slot()
        self._turn += 1
        if slot is None or len(slot.node_ranks) == len(slot.memory):
            return 0
        words = slot.memory.view(-1).view(torch.uint8)
        most = words.numel() if whole or not self._proven else max(-(-words.numel() // AUDITS), AUDIT_BYTES)
        part = self._turn % max(1, -(-words.numel() // max(1, most)))
        return int.from_bytes(region_hash(words[part * most : (part + 1) * most])[:8], "little", signed=True)

    def weigh(self, claims: Sequence[int], audits: Sequence[int] = ()) -> str:
        """Return the reason why the parameter's base is not valid, by what all ranks say; "" if it is.

        Raises:
            CommError: the base was copied while it may have held wrong words. All ranks raise.
        """
        reason = ""
        if _CHANGED in claims or _BROKEN in claims:
            reason = CHANGED
        elif _UNFILLED in claims:
            reason = NOTHING_THERE
        elif len(set(claims)) > 1:
            reason = VERSION
        elif len(set(audits)) > 1:
            reason = SOMETHING_ELSE
        # Each copy found the owner's words, or the claim is _BROKEN: a change is younger than the copies.
        late = self.copies and (reason != CHANGED or self._in_step)
        if reason and (late or _BROKEN in claims or (reason == SOMETHING_ELSE and self._used)):
            ranks = [rank for rank, claim in enumerate(claims) if claim in (_CHANGED, _BROKEN)] or "?"
            said = f"the shard of group ranks {ranks} was gathered before, and changed since"
            if reason != CHANGED:
                said = f"the copies that ranks gather from are not the same any more ({reason})"
            self._told = True
            mixed = "the gathers since the last step may mix old and new words"
            raise self.keeper.error(f'{self.name}: {said}; {mixed}; {self.keeper.remedy}, or set "zero3_base": "off"')
        return reason


class Keeper:
    """The parameters of one engine and group whose bases may be valid, in an order that is equal on all ranks.

    Args:
        copies: copies of one base between two comparisons. 1 where no optimizer step ever checks the copies.
        remedy: when a program of the caller's kind may write to parameters, for messages.

    ``steps``: an optimizer step checks the copies that are made now, and a write after them is an error. Otherwise it is a miss, which the
    next agreement finds. Equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, config: ZipcclConfig, remedy: str, *, copies: int = COPIES) -> None:
        self._group, self._config, self._role, self.copies = group, config, "zero_param", copies
        self.steps, self.remedy = copies > 1, remedy
        self.parameters: list[Kept] = []

    def refresh(self) -> None:
        """Let the next gather agree on all parameters anew. Does not block."""
        for one in self.parameters:
            one.refresh()

    def agree(self, wanted: Sequence[Kept]) -> None:
        """Prove the bases of all parameters that were filled, if one of ``wanted`` is among them. A collective then; blocks.

        Raises:
            CommError: a parameter was written to within a version, or the transport failed. All ranks raise.
        """
        if any(one.copies >= self.copies for one in wanted):
            self.refresh()
        if not any(one.way is Way.DELTA for one in wanted):
            return
        found = [one for one in self.parameters if one.way is Way.DELTA]
        for one in found:
            one.finish()
        reasons = self._weigh(found)
        if any(reasons):  # whatever has happened to one base may have happened to others
            reasons = self._weigh(found, whole=True)
        for one, reason in zip(found, reasons, strict=True):
            if reason:
                one.forget()
                counters.record_difference(self._role, GATHER, reason)
            else:
                one.prove()

    def _weigh(self, found: Sequence[Kept], *, whole: bool = False, audits: bool = True) -> list[str]:
        """Return for each parameter the reason why its base is not valid, "" where it is. A collective; blocks.

        Args:
            whole: hash bases whole. audits: hash bases at all.
        """
        words = [_claims(found, dist.get_rank(self._group))]
        if audits:
            words.append([one.audit(whole) for one in found])
        with torch.inference_mode(), tensors.undisturbed():
            ctx = OpContext(AGREEMENT, self._group, self._config, self._role, "raw", tensors.CPU)
            mine = tensors.of_numbers(list(zip(*words, strict=True)), torch.int64)
            own = mine.view(-1).view(torch.uint8)
            heard = swap(ctx, 0, ctx.peers, own, own.numel()) | {ctx.rank: own}
            counters.record(self._role, AGREEMENT, 0, ctx.wire_bytes)
            ranks = torch.stack([heard[rank] for rank in range(ctx.size)]).view(torch.int64)
            said = ranks.view(ctx.size, *mine.shape).transpose(0, 1).tolist()  # [parameters, ranks, numbers]
        return [one.weigh(*zip(*numbers, strict=True)) for one, numbers in zip(found, said, strict=True)]

    def check(self) -> None:
        """Raise if a parameter has changed since its base was copied. A collective if a base was copied since the last one; blocks.

        Raises:
            CommError: a parameter was written to within a version, or the transport failed. All ranks raise.
        """
        found = [one for one in self.parameters if one.unchecked]
        if found:
            self._weigh(found, audits=False)
        for one in found:
            one.checked()

    def error(self, problem: str) -> CommError:
        """Return an error with the group, this rank and the problem."""
        return Call(AGREEMENT, self._group, self._config, self._role).error(problem)


def _claims(found: Sequence[Kept], rank: int) -> list[int]:
    """Return :meth:`Kept.claim` of each parameter, by as many threads as torch uses: a single one is slower than the copies."""
    workers = min(torch.get_num_threads(), len(found))
    if workers < 2:
        return [one.claim(rank) for one in found]
    with ThreadPoolExecutor(workers, "ds_zipccl-compare") as pool:
        return list(pool.map(lambda one: one.claim(rank), found))


def same_words(shard: torch.Tensor, row: torch.Tensor) -> bool:
    """Return whether a flat shard, in the dtype of a row of a base, has the row's bits. Ends at the first difference; makes no copy."""
    if shard.numel() != row.numel():
        return False
    shard = shard.detach()
    if shard.dtype is row.dtype and shard.device == row.device and shard.is_contiguous():
        return int(_memcmp(shard.data_ptr(), row.data_ptr(), row.nbytes)) == 0
    pairs = zip(shard.split(_CHUNK), row.split(_CHUNK), strict=True)
    return all(same_words(part.to(words).contiguous(), words) for part, words in pairs)
