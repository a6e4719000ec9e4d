"""The messages of a forward pass that a group keeps: activation checkpointing runs the forward again inside of the backward pass, and sends
the same messages again, bit for bit. A message that repeats a kept one goes as hashes.

A message consists of segments, each from one rank to another one. The sender keeps a hash of each fragment of a segment, the receiver the
frames that arrived, and the hashes of the words in them. In a backward pass the sender looks for a kept segment with the same hashes, and
sends the hashes alone. The receiver decodes the frames that it keeps, and compares the hashes of the words again.

The two ends must know the same segments, without a message about them. All that either end forgets follows from the order of calls, which
is one order on all ranks of a group:

* A segment is reserved when its operation is opened, in the caller's thread. The oldest ones then go until the segments of this direction
  of this pair of ranks fit their limit. Sizes alone decide.
* An operation of a backward pass sees the segments that are kept when it is opened. If some are not complete, because an asynchronous
  operation is still in flight, it waits for them: contents alone decide which one is repeated, the newest that fits.
* A segment that a blocking operation has repeated goes when the operation ends. One that an asynchronous operation has repeated stays.
* The end of an optimizer step drops all, and so does the end of a group.

An operation that fails leaves the ends apart. The receiver then refuses the hash, by name. No wrong words pass, but for a collision of two
hashes of 16 bytes, which are no defence against data that were made to collide.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch

from ds_zipccl.policy import wire
from ds_zipccl.policy.wire import Backoff
from ds_zipccl.telemetry import counters


class Words(NamedTuple):
    """The words of an operation's segments. A kept frame holds words of one dtype, in memory of one type of device."""

    dtype: torch.dtype
    device: str


class Places(NamedTuple):
    """The segments of one exchange, in the order in which they go: group rank of the peer -> elements of each segment. Both ends of a pair
    must have one list. Segments have at least one element."""

    leaving: Mapping[int, Sequence[int]]
    coming: Mapping[int, Sequence[int]]


class _Tally:
    """The bytes of the frames that are kept of one group."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.lock = threading.Lock()


class Segment:
    """A segment that this rank has sent or received. One thread adds fragments, and ends the segment; others read afterwards.

    ``digests``: the hash of each fragment, in order. ``frames``: of the receiver, the frame of each fragment.
    """

    def __init__(self, nbytes: int, words: Words, tally: _Tally) -> None:
        self.nbytes, self.words = nbytes, words
        self.digests: list[bytes] = []
        self.frames: list[torch.Tensor] = []
        self._left = nbytes
        self._tally, self._counted, self._dropped = tally, 0, False
        self._ended = threading.Event()

    def add(self, digest: bytes, nbytes: int, frame: torch.Tensor | None = None) -> None:
        """Add the next fragment, of ``nbytes`` bytes of words."""
        self._left -= nbytes
        self.digests.append(digest)
        if frame is not None:
            self.frames.append(frame)
            self._count(frame.nbytes)

    def drop(self) -> None:
        """Count the frames no more. An operation that has seen the segment may still use it."""
        with self._tally.lock:
            self._tally.nbytes -= self._counted
            self._counted, self._dropped = 0, True

    def _count(self, nbytes: int) -> None:
        with self._tally.lock:
            if not self._dropped:
                self._counted += nbytes
                self._tally.nbytes += nbytes

    def end(self) -> None:
        """End the segment; if fragments are missing, its operation has failed."""
        self._ended.set()

    def begins(self, digests: Sequence[bytes], seconds: float) -> bool:
        """Return whether the segment is complete and begins with the fragments of ``digests``. Blocks until its operation has ended, for
        ``seconds`` at most."""
        ended = self._ended.wait(seconds)
        return ended and not self._left and self.digests[: len(digests)] == list(digests)


class _Window:
    """The segments that are kept of one direction of a pair of ranks, the oldest first."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}  # by identity
        self._nbytes = 0

    def reserve(self, nbytes: int, words: Words, limit: int, tally: _Tally) -> Segment:
        """Add a segment of ``nbytes``, at most ``limit``; the oldest ones go."""
        segment = Segment(nbytes, words, tally)
        self._segments[id(segment)] = segment
        self._nbytes += nbytes
        while self._nbytes > limit:
            self.drop(next(iter(self._segments.values())))
        return segment

    def drop(self, segment: Segment) -> None:
        """Forget a segment, if it is kept."""
        if self._segments.pop(id(segment), None) is not None:
            self._nbytes -= segment.nbytes
            segment.drop()

    def newest_first(self) -> tuple[Segment, ...]:
        """Return the segments."""
        return tuple(reversed(self._segments.values()))


_memories: WeakSet[RepeatMemory] = WeakSet()
_making = threading.Lock()
_peak = 0


class RepeatMemory:
    """The segments that a rank keeps of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[int, _Window] = defaultdict(_Window)
        self._received: defaultdict[int, _Window] = defaultdict(_Window)
        #: By kind, the messages in backward passes: after some that have repeated nothing, the next ones are not hashed.
        self._misses = defaultdict[str, Backoff](lambda: Backoff(wire.UNHASHED, wire.REPEAT_MISSES))
        self.tally = _Tally()
        with _making:
            _memories.add(self)

    def open(
        self, exchanges: Sequence[Places], words: Words, limit: int, again: bool, kind: str, seconds: float
    ) -> Repeats:
        """Open an operation of ``exchanges``, in the caller's thread and in program order.

        Args:
            limit: :func:`ds_zipccl.policy.wire.kept_bytes`.
            again: :attr:`ds_zipccl.comm.request.Request.again`.
            kind: of the messages, for the count of messages that repeat nothing.
            seconds: for which the operation waits for earlier ones.
        """
        with self._lock:
            misses = self._misses[kind]
            found = Repeats(self, misses, words, again, again and not misses.skips(), seconds)
            for index, places in enumerate(exchanges):
                for windows, sizes, slots, seen in (
                    (self._sent, places.leaving, found.leaving, found.sent),
                    (self._received, places.coming, found.coming, found.received),
                ):
                    for peer, numels in sizes.items():
                        window = windows[peer]
                        for numel in numels:
                            nbytes = numel * words.dtype.itemsize
                            keep = not again and wire.RAW_BELOW_BYTES <= nbytes <= limit
                            kept = window.reserve(nbytes, words, limit, self.tally) if keep else None
                            slots[index, peer].append(Slot(nbytes, kept))
                        if again:
                            seen[peer] = window.newest_first()
        return found

    def drop(self, sent: Iterable[tuple[int, Segment]], received: Iterable[tuple[int, Segment]]) -> None:
        """Forget segments, each with its peer."""
        with self._lock:
            for windows, segments in ((self._sent, sent), (self._received, received)):
                for peer, segment in segments:
                    windows[peer].drop(segment)

    def clear(self) -> None:
        """Forget all segments."""
        with self._lock:
            for window in (*self._sent.values(), *self._received.values()):
                for segment in window.newest_first():
                    window.drop(segment)


class Slot(NamedTuple):
    """The place of one segment in its operation: its bytes, and where the segment is kept, if it is."""

    nbytes: int
    kept: Segment | None


class Repeats:
    """One operation: the segments that it keeps in a forward pass, or those that it may repeat in a backward pass (``again``).

    ``leaving`` and ``coming``: exchange and peer -> the segments that have not begun. ``sent`` and ``received``: peer -> the segments that
    were kept when the operation was opened, the newest first. ``hashing``: whether the sender looks for repeats.
    """

    def __init__(
        self, memory: RepeatMemory, misses: Backoff, words: Words, again: bool, hashing: bool, seconds: float
    ) -> None:
        self._memory, self._misses, self._words, self._seconds = memory, misses, words, seconds
        self.again, self.hashing = again, hashing
        self.leaving: defaultdict[tuple[int, int], deque[Slot]] = defaultdict(deque)
        self.coming: defaultdict[tuple[int, int], deque[Slot]] = defaultdict(deque)
        self.sent: dict[int, Sequence[Segment]] = {}
        self.received: dict[int, Sequence[Segment]] = {}
        self._kept: list[Segment] = []
        self._repeated: tuple[list[tuple[int, Segment]], list[tuple[int, Segment]]] = [], []
        self._hashed = False

    @property
    def count(self) -> int:
        """Return the number of segments that this rank has sent as hashes."""
        return len(self._repeated[0])

    def begin(self, slots: Mapping[tuple[int, int], deque[Slot]], index: int, peer: int) -> Slot:
        """Return the next segment of ``leaving`` or ``coming``, which begins."""
        slot = slots[index, peer].popleft()
        if slot.kept is not None:
            self._kept.append(slot.kept)
        return slot

    def like(self, peer: int, nbytes: int) -> bool:
        """Return whether hashes of a segment of ``nbytes`` to ``peer`` may be those of a kept one."""
        return self.hashing and any(self._alike(segment, nbytes) for segment in self.sent.get(peer, ()))

    def repeats(self, peer: int, nbytes: int, digests: Sequence[bytes]) -> bool:
        """Return whether the segment to ``peer`` repeats a kept one. The kept one goes with the end of the operation."""
        self._hashed = True
        found = self._newest(self.sent.get(peer, ()), nbytes, digests)
        if found is not None:
            self._repeated[0].append((peer, found))
        return found is not None

    def kept(self, peer: int, nbytes: int, digests: Sequence[bytes]) -> torch.Tensor | None:
        """Return the frame of the last of the fragments of ``digests``, the first ones of a segment of ``nbytes`` from ``peer``; None where
        no such segment is kept."""
        found = self._newest(self.received.get(peer, ()), nbytes, digests)
        return None if found is None else found.frames[len(digests) - 1]

    def taken(self, peer: int, nbytes: int, digests: Sequence[bytes]) -> None:
        """Note that the segment of ``digests`` has come as hashes. The kept one goes with the end of the operation."""
        found = self._newest(self.received.get(peer, ()), nbytes, digests)
        if found is not None:
            self._repeated[1].append((peer, found))

    def _newest(self, segments: Iterable[Segment], nbytes: int, digests: Sequence[bytes]) -> Segment | None:
        alike = (segment for segment in segments if self._alike(segment, nbytes))
        return next((segment for segment in alike if segment.begins(digests, self._seconds)), None)

    def _alike(self, segment: Segment, nbytes: int) -> bool:
        return (segment.nbytes, segment.words) == (nbytes, self._words)

    def end(self, drop: bool) -> None:
        """End the operation, also one that has failed. ``drop``: the segments that it has repeated go."""
        global _peak
        for slots in (self.leaving, self.coming):
            self._kept += [slot.kept for queue in slots.values() for slot in queue if slot.kept is not None]
        for segment in self._kept:
            segment.end()
        if self._hashed:
            self._misses.note(bool(self.count))
        if drop:
            self._memory.drop(*self._repeated)
        self.sent, self.received = {}, {}  # an operation that has failed is kept, and must not keep frames
        if self._kept:
            with _making:
                _peak = max(_peak, sum(memory.tally.nbytes for memory in _memories))


def forget() -> None:
    """Drop the kept messages of all groups: an optimizer step has ended, and no recomputation repeats them. All ranks call at one moment of
    the program."""
    with _making:
        found = list(_memories)
    for memory in found:
        memory.clear()


counters.count_memory("messages kept for recomputations, at most", lambda: _peak)
