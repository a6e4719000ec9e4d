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

An operation that fails leaves the ends apart. The receiver then refuses the hash, by name. No wrong word passes, unless two
hashes of 16 bytes collide; they are no defence against data that were made to collide.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ds_zipccl.codecs.api import open_frame
from ds_zipccl.codecs.known import FRAME_BYTES, known_frame
from ds_zipccl.comm.buffer_pool import Latest, PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import of_all_groups
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header
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


class Segment:
    """A segment that this rank has sent or received. One thread adds fragments, and sets ``ended``; others read afterwards. If fragments
    are missing then, the operation has failed.

    ``digests``: the hash of each fragment, in order. ``frames``: of the receiver, the frame of each fragment. ``counted``: their bytes, as
    far as the memory counts them; None where the memory has dropped the segment.
    """

    def __init__(self, nbytes: int, words: Words) -> None:
        self.nbytes, self.words = nbytes, words
        self.digests: list[bytes] = []
        self.frames: list[torch.Tensor] = []
        self.ended = threading.Event()
        self.counted: int | None = 0
        self._left = nbytes

    def add(self, digest: bytes, nbytes: int, frame: torch.Tensor | None = None) -> None:
        """Add the next fragment, of ``nbytes`` bytes of words."""
        self._left -= nbytes
        self.digests.append(digest)
        if frame is not None:
            self.frames.append(frame)

    def begins(self, digests: Sequence[bytes], seconds: float) -> bool:
        """Return whether the segment is complete and begins with the fragments of ``digests``. Blocks until its operation has ended, for
        ``seconds`` at most."""
        ended = self.ended.wait(seconds)
        return ended and not self._left and self.digests[: len(digests)] == list(digests)


#: Segments of one direction of a pair of ranks, by identity.
_Window = Latest[int, Segment]


class RepeatMemory:
    """The segments that a rank keeps of one group. ``nbytes``: of the frames in those whose operation has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By peer, the segments sent, and those received.
        self._windows = defaultdict[int, _Window](_Window), defaultdict[int, _Window](_Window)
        #: By kind, the messages in backward passes: after some that have repeated nothing, the next ones are not hashed.
        self._misses = defaultdict[str, Backoff](lambda: Backoff(wire.UNHASHED, wire.REPEAT_MISSES))
        self.nbytes = 0

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
            found = Repeats(self, self._misses[kind], words, again, seconds)
            for index, places in enumerate(exchanges):
                for windows, sizes, side in zip(self._windows, places, found.sides, strict=True):
                    for peer, numels in sizes.items():
                        for nbytes in (numel * words.dtype.itemsize for numel in numels):
                            keep = not again and wire.RAW_BELOW_BYTES <= nbytes <= limit
                            kept = self._reserve(windows[peer], nbytes, words, limit) if keep else None
                            side.slots[index, peer].append(Slot(nbytes, kept))
                        if again:
                            side.seen[peer] = windows[peer].newest_first()
        return found

    def _reserve(self, window: _Window, nbytes: int, words: Words, limit: int) -> Segment:
        """Add a segment of ``nbytes``, at most ``limit``; the oldest ones go."""
        segment = Segment(nbytes, words)
        for gone in window.put(id(segment), segment, nbytes, limit):
            self._forget(gone)
        return segment

    def _forget(self, segment: Segment) -> None:
        """Count the frames of a segment no more. An operation that has seen the segment may still use it."""
        self.nbytes -= segment.counted or 0
        segment.counted = None

    def count(self, segments: Iterable[Segment]) -> None:
        """Count the frames of segments that have ended."""
        with self._lock:
            for segment in segments:
                if segment.counted is not None:
                    segment.counted = sum(frame.nbytes for frame in segment.frames)
                    self.nbytes += segment.counted

    def drop(self, sent: Iterable[tuple[int, Segment]], received: Iterable[tuple[int, Segment]]) -> None:
        """Forget segments, each with its peer, where they are kept."""
        with self._lock:
            for windows, segments in zip(self._windows, (sent, received), strict=True):
                for peer, segment in segments:
                    if windows[peer].drop(id(segment)) is not None:
                        self._forget(segment)

    def clear(self) -> None:
        """Forget all segments."""
        with self._lock:
            for windows in self._windows:
                for window in windows.values():
                    for segment in window.newest_first():
                        self._forget(segment)
                windows.clear()


class Slot(NamedTuple):
    """The place of one segment in its operation: its bytes, and where the segment is kept, if it is."""

    nbytes: int
    kept: Segment | None


class Side:
    """One direction of an operation. ``slots``: exchange and peer -> the segments that have not begun. ``seen``: peer -> the segments that
    were kept when the operation was opened, the newest first. ``repeated``: those that it has repeated, each with its peer."""

    def __init__(self, words: Words, seconds: float) -> None:
        self._words, self._seconds = words, seconds
        self.slots: defaultdict[tuple[int, int], deque[Slot]] = defaultdict(deque)
        self.seen: dict[int, Sequence[Segment]] = {}
        self.repeated: list[tuple[int, Segment]] = []

    def alike(self, peer: int, nbytes: int) -> Iterator[Segment]:
        """Return the segments of ``nbytes`` of the operation's words that were kept, the newest first."""
        kind = nbytes, self._words
        return (segment for segment in self.seen.get(peer, ()) if (segment.nbytes, segment.words) == kind)

    def newest(self, peer: int, nbytes: int, digests: Sequence[bytes]) -> Segment | None:
        """Return the newest segment of ``nbytes`` whose first fragments are those of ``digests``, if there is one."""
        return next((one for one in self.alike(peer, nbytes) if one.begins(digests, self._seconds)), None)


class Repeats:
    """One operation: the segments that it keeps in a forward pass, or those that it may repeat in a backward pass (``again``)."""

    def __init__(self, memory: RepeatMemory, misses: Backoff, words: Words, again: bool, seconds: float) -> None:
        self._memory, self._misses, self.again = memory, misses, again
        self._hashing = again and not misses.skips()  # the sender looks for repeats
        self.sides = self.leaving, self.coming = Side(words, seconds), Side(words, seconds)
        self._kept: list[Segment] = []
        self._hashed = False

    @property
    def count(self) -> int:
        """Return the number of segments that this rank has sent as hashes."""
        return len(self.leaving.repeated)

    def begin(self, side: Side, index: int, peer: int) -> Slot:
        """Return the next segment of ``leaving`` or ``coming``, which begins."""
        slot = side.slots[index, peer].popleft()
        if slot.kept is not None:
            self._kept.append(slot.kept)
        return slot

    def like(self, peer: int, nbytes: int) -> bool:
        """Return whether hashes of a segment of ``nbytes`` to ``peer`` may be those of a kept one."""
        return self._hashing and any(True for _ in self.leaving.alike(peer, nbytes))

    def repeats(self, side: Side, peer: int, nbytes: int, digests: Sequence[bytes]) -> bool:
        """Return whether the segment of ``digests`` repeats a kept one. The kept one goes with the end of the operation."""
        self._hashed |= side is self.leaving
        found = side.newest(peer, nbytes, digests)
        if found is not None:
            side.repeated.append((peer, found))
        return found is not None

    def kept(self, peer: int, nbytes: int, digests: Sequence[bytes]) -> torch.Tensor | None:
        """Return the frame of the last of the fragments of ``digests``, the first ones of a segment of ``nbytes`` from ``peer``; None where
        no such segment is kept."""
        found = self.coming.newest(peer, nbytes, digests)
        return None if found is None else found.frames[len(digests) - 1]

    def end(self, drop: bool) -> None:
        """End the operation, also one that has failed. ``drop``: the segments that it has repeated go."""
        global _peak
        for side in self.sides:
            self._kept += [slot.kept for queue in side.slots.values() for slot in queue if slot.kept is not None]
        for segment in self._kept:
            segment.ended.set()
        if self._hashed:
            self._misses.note(bool(self.count))
        if drop:
            self._memory.drop(self.leaving.repeated, self.coming.repeated)
        for side in self.sides:
            side.seen = {}  # an operation that has failed is kept, and must not keep frames
        if self._kept:
            self._memory.count(self._kept)
            with _measuring:
                _peak = max(_peak, sum(memory.nbytes for memory in of_all_groups(RepeatMemory)))


_measuring = threading.Lock()
_peak = 0


def forget() -> None:
    """Drop the kept messages of all groups: an optimizer step has ended, and no recomputation repeats them. All ranks call at one moment of
    the program."""
    for memory in of_all_groups(RepeatMemory):
        memory.clear()


counters.count_memory("messages kept for recomputations, at most", lambda: _peak)


# ---- the frames of an operation


class _Arriving:
    """The segment of ``nbytes`` that arrives. ``digests``: those of its fragments so far, None if one has come in full."""

    def __init__(self, nbytes: int, kept: Segment | None) -> None:
        self.nbytes = self.left = nbytes
        self.kept = kept
        self.digests: list[bytes] | None = []


class RepeatedSegments:
    """The frames of exchange ``index`` of an operation: those of ``coder``, and hashes in place of frames."""

    def __init__(self, repeats: Repeats, index: int, coder: FrameCoder) -> None:
        self._repeats, self._index, self._coder = repeats, index, coder
        self.compress, self.compress_each, self.end = coder.compress, coder.compress_each, coder.end
        self.recv_buffer, self.add = coder.recv_buffer, coder.add
        self._known: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._arriving: dict[int, _Arriving] = {}

    def announce(self, fragments: Sequence[torch.Tensor], peers: Sequence[int]) -> bool:
        """Begin the next segment for each of ``peers``, which has ``fragments``: keep their hashes, or find out whether the segment goes
        as hashes. Return whether all segments do."""
        nbytes = sum(fragment.nbytes for fragment in fragments)
        digests: list[bytes] = []
        for peer in peers:
            slot = self._repeats.begin(self._repeats.leaving, self._index, peer)
            assert slot.nbytes == nbytes, f"a segment of {nbytes} bytes, and {slot.nbytes} were reserved"
            if slot.kept is None and not self._repeats.like(peer, nbytes):
                continue
            digests = digests or [self._coder.hash(fragment) for fragment in fragments]
            if slot.kept is not None:
                for digest, fragment in zip(digests, fragments, strict=True):
                    slot.kept.add(digest, fragment.nbytes)
            elif self._repeats.repeats(self._repeats.leaving, peer, nbytes, digests):
                self._known[peer].extend(digests)
        return all(self._known[peer] for peer in peers)

    def own_frame(self, peer: int, flat: torch.Tensor) -> tuple[torch.Tensor, PooledBuffers] | None:
        """As :meth:`.frames.FrameCoder.own_frame`, and the hash of ``flat`` where its segment goes as hashes."""
        digest = self.next_hash(peer)
        if digest is None:
            return self._coder.own_frame(peer, flat)
        buffers = PooledBuffers()
        return known_frame(flat.dtype, flat.numel(), digest, buffers.take(FRAME_BYTES)), buffers

    def next_hash(self, peer: int) -> bytes | None:
        """Return the hash that goes to ``peer`` in place of the next fragment; None where the fragment goes in full."""
        known = self._known[peer]
        return known.popleft() if known else None

    def decompress(
        self,
        frame: torch.Tensor,
        peer: int,
        out: torch.Tensor,
        base: torch.Tensor | None = None,
        earlier: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`.frames.FrameCoder.decompress`, for the next fragment of ``peer``; keep its frame, or take the frame that
        is kept in place of a hash. ``base`` is not used: no frame of such an operation is a difference.

        Raises:
            CommError: also where the frame is the hash of a fragment that this rank does not keep.
        """
        arriving = self._segment(peer)
        with self._coder.refusing(peer):
            header = open_frame(frame)[0]
        arriving.left -= out.nbytes
        if self._repeats.again and header.codec is CodecId.KNOWN:
            with self._coder.refusing(peer):
                self._decompress_kept(frame, header, peer, out, earlier)
            if not arriving.left and arriving.digests:
                self._repeats.repeats(self._repeats.coming, peer, arriving.nbytes, arriving.digests)
            return out
        self._coder.decompress(frame, peer, out, earlier=earlier)
        arriving.digests = None
        if arriving.kept is not None:
            arriving.kept.add(self._coder.hash(out), out.nbytes, frame[: header.frame_bytes].clone())
        return out

    def decompress_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """As :meth:`ds_zipccl.comm.host.frames.FrameCoder.decompress_add`, and as :meth:`decompress`."""
        buffers = PooledBuffers()
        taken = buffers.empty(sums.numel(), dtype, sums.device)
        self._coder.add(self.decompress(frame, peer, taken), sums)
        buffers.release()

    def _decompress_kept(
        self, frame: torch.Tensor, header: Header, peer: int, out: torch.Tensor, earlier: torch.Tensor | None
    ) -> None:
        arriving = self._arriving[peer]
        if (header.dtype, header.numel) != (out.dtype, out.numel()):
            raise FrameError(
                FrameErrorCode.MISMATCH,
                f"the hash is that of {header.numel} {header.dtype}, wanted {out.numel()} {out.dtype}",
            )
        digest = frame[header.payload_at : header.frame_bytes].numpy().tobytes()
        digests = None if arriving.digests is None else [*arriving.digests, digest]
        kept = None if digests is None else self._repeats.kept(peer, arriving.nbytes, digests)
        if kept is None:
            raise FrameError(
                FrameErrorCode.MISMATCH,
                f"the frame is the hash {digest.hex()} of a message of the forward pass that this rank does not keep, as an earlier "
                "message failed or the ranks have made different calls; make the same calls on all ranks, or switch recompute_base off",
            )
        self._coder.decompress_kept(kept, peer, out, earlier)
        if self._coder.hash(out) != digest:
            raise FrameError(FrameErrorCode.MISMATCH, "the words of the frame that this rank keeps have another hash")
        arriving.digests = digests

    def _segment(self, peer: int) -> _Arriving:
        """Return the segment of ``peer`` that arrives."""
        arriving = self._arriving.get(peer)
        if arriving is None or not arriving.left:
            arriving = self._arriving[peer] = _Arriving(*self._repeats.begin(self._repeats.coming, self._index, peer))
        return arriving


def places_of_shards(
    ctx: OpContext, numels: Sequence[int], itemsize: int, exchanges: int = 1, gathered: bool = False
) -> Places:
    """Return the places of the contributions to sums of shards, ``numels[r]`` elements for rank r: each fragment is a segment; or those of
    a gather, ``numels[r]`` elements from rank r. ``exchanges``: as for :class:`ds_zipccl.comm.host.pipeline.Fragments`."""
    sizes = []
    for numel in numels:
        each = ctx.fragment_numel(numel, itemsize, exchanges)
        sizes.append([min(each, numel - at) for at in range(0, numel, each)])
    of_peers, own = {peer: sizes[peer] for peer in ctx.peers}, dict.fromkeys(ctx.peers, sizes[ctx.rank])
    return Places(own, of_peers) if gathered else Places(of_peers, own)
