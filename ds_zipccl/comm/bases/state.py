"""The state of a parameter that is gathered again and again: one machine, in which each engine proves bases in its own way.

A *version* is the time in which no rank changes its shard. Groups in the order of streams agree on a version ahead, and all gathers of the
version follow from it (:mod:`.device.bases.agreed`). Groups that exchange messages ask at each gather (:mod:`.host.cached`).
"""

from __future__ import annotations

from enum import Enum

import torch

from ds_zipccl.comm.bases.shared import BaseSlot

#: Name of agreements in messages and counters, and the operation whose differences are counted.
AGREEMENT, GATHER = "agreement", "all_gather_into_tensor"
#: Reasons for which shards go in full.
NOTHING_THERE, SOMETHING_ELSE = "nothing was gathered there", "a rank holds something else"
NO_KERNELS = "a rank has no kernels of differences"


class Source(Enum):
    """What gives a parameter to the next gather: its words, what differs from the base, or a copy of the base, without a message."""

    FULL = "full"
    DELTA = "delta"
    COPY = "copy"


class GatheredParameter:
    """A parameter that is gathered again and again; an engine makes it (:func:`ds_zipccl.comm.parameter`). Every rank of its group has such
    an object for its own shard. Calls are equal on all ranks, in program order, and so is ``source``, that of the next gather.

    Args:
        name: of the parameter, for messages.
        numel: elements of a rank's shard, equal on all ranks.
        dtype: in which shards are gathered; None: that of the shards.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype | None = None) -> None:
        self.name, self.numel, self.dtype, self.source = name, numel, dtype, Source.FULL
        self._base: BaseSlot | None = None

    def hold(self, base: BaseSlot) -> None:
        """Have a base, until a call of all ranks frees it: if its life hung on references, garbage collection on one rank would decide how
        all ranks gather. All ranks of the group call. Differences must be wanted, see :class:`.ZipcclConfig`."""
        self._base, self.source = base, Source.FULL

    def slot(self) -> BaseSlot | None:
        """Return the base, None if there is none. Equal on all ranks."""
        return self._base if self._base is not None and not self._base.freed else None

    def fitting(self, ranks: int, dtype: torch.dtype) -> BaseSlot | None:
        """Return the base of gathers over so many ranks in a dtype, None if there is none. Equal on all ranks."""
        found = self.slot()
        return found if found is not None and self.numel and found.fits(ranks, self.numel, dtype) else None

    def forget(self) -> None:
        """End the version: the shard changes. All ranks of the group call, before one of them uses the changed shard. Does not block."""
        self.source = Source.FULL
