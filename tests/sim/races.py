"""Races, by vector clocks and ranges of bytes.

Every stream and every host is an actor with a clock: the number of the last access of each actor that its next access comes after. A
record of an event keeps the clock of its stream; a wait takes it over; a launch comes after everything that its host has waited for. Two
accesses of one byte, one of them a write, must be ordered. This is the model of torch's own sanitizer (torch.cuda._sanitizer, "CUDA
Stream Sanitizer" in torch's documentation). Two things differ. The sanitizer knows tensors by the address of their first element, and so
takes a staging buffer and a slot in it for different memory; here every byte counts. The sanitizer forgets freed memory; here a reuse of
freed memory is one more access, so that a free before the last reader shows. ``test_races.py`` compares both on programs without views.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sim.scheduler import Place

#: Actor -> number of its last access (or launch) that is known to have ended.
Clock = dict[str, int]


def take_over(clock: Clock, other: Clock) -> None:
    """Order the owner of ``clock`` after everything that ``other`` is ordered after."""
    for actor, number in other.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of an actor."""

    actor: str
    number: int
    writes: bool
    label: str
    place: Place

    def __str__(self) -> str:
        return f"{self.label} ({'writes' if self.writes else 'reads'}; {self.actor}) at {self.place}"


class _Cell:
    """The accesses of a range of bytes since, and with, the last write."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None = None, reads: dict[str, Access] | None = None) -> None:
        self.write = write
        self.reads = reads or {}


class History:
    """The accesses of the memory that a rank can reach: its GPU's and its pinned host memory."""

    def __init__(self) -> None:
        # cell i covers the bytes from starts[i] to starts[i + 1]
        self._starts = [0, 1 << 63]
        self._cells = [_Cell(), _Cell()]

    def add(self, access: Access, spans: Sequence[tuple[int, int]], clock: Clock) -> tuple[Access, int] | None:
        """Add an access of [begin, end) ranges by an actor whose clock is ``clock``, and return an earlier access that conflicts and
        the address; None if there is none."""
        for begin, end in spans:
            first, last = self._split(begin), self._split(end)
            for at in range(first, last):
                cell = self._cells[at]
                for earlier in (cell.write, *(cell.reads.values() if access.writes else ())):
                    if (
                        earlier is not None
                        and earlier.actor != access.actor
                        and clock.get(earlier.actor, 0) < earlier.number
                    ):
                        return earlier, max(begin, self._starts[at])
                if not access.writes:
                    cell.reads[access.actor] = access
            if access.writes and last > first:
                self._starts[first:last] = [begin]
                self._cells[first:last] = [_Cell(access)]
        return None

    def _split(self, address: int) -> int:
        """Return the number of the cell that begins at ``address``, after splitting one if needed."""
        at = bisect_left(self._starts, address)
        if self._starts[at] != address:
            old = self._cells[bisect_right(self._starts, address) - 1]
            self._starts.insert(at, address)
            self._cells.insert(at, _Cell(old.write, dict(old.reads)))
        return at
