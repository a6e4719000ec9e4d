"""The state of a parameter that is gathered again and again: one machine, in which each engine proves bases in its own way.

A *version* is the time in which no rank changes its shard. In a version the state goes to copies: by an agreement that begins the version
and the gather after it (:mod:`.device.bases.agreed`), or by a gather and the agreement after it (:mod:`.host.versions`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

from ds_zipccl.comm.bases.shared import BaseSlot

#: Name of agreements in messages and counters, and the operation whose differences are counted.
AGREEMENT, GATHER = "agreement", "all_gather_into_tensor"
#: Reasons for which shards go in full.
NOTHING_THERE, SOMETHING_ELSE = "nothing was gathered there", "a rank holds something else"


class Way(Enum):
    """How the next gather gives a parameter: by its words, by what differs from the base, or as a copy of the base, without a message."""

    FULL = "full"
    DELTA = "delta"
    COPY = "copy"


class Versioned:
    """A parameter with versions. Every rank of its group has such an object for its own shard. Calls are equal on all ranks, in program
    order, and so is ``way``, the way of the next gather. ``name``: of the parameter, for messages. ``slot`` returns the base, None if there
    is none."""

    slot: Callable[[], BaseSlot | None]

    def __init__(self, name: str) -> None:
        self.name, self.slot, self.way = name, lambda: None, Way.FULL

    def hold(self, base: BaseSlot) -> None:
        """Have a base, as long as it lives. All ranks of the group call. Differences must be wanted, see :class:`.ZipcclConfig`."""
        self.slot, self.way = weakref.ref(base), Way.FULL

    def forget(self) -> None:
        """End the version: the shard changes. All ranks of the group call, before one of them uses the changed shard. Does not block."""
        self.way = Way.FULL
