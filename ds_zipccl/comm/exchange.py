"""Frames between the ranks of one group: tags, posting, receiving, errors.

Frames are bytes that travel by paired sends and receives on the caller's own group. gloo accepts a receive buffer larger than
what was sent, so a receive is posted with the bound of the frame and no sizes are exchanged: the header has the true length.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_zipccl import policy
from ds_zipccl.codecs import CODECS, compress, compress_bound, compress_segments, decompress, decompress_add
from ds_zipccl.comm import staging
from ds_zipccl.comm.buffers import Lease
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameError

#: Tags in each of our ranges (admission). The ranges lie above the tags that programs use and below 2**31.
TAGS = 1 << 28
COLLECTIVE_TAG = 1 << 30
P2P_TAG = COLLECTIVE_TAG + TAGS
SHADOW_TAG = P2P_TAG + TAGS
#: Exchanges of one collective (admission: all_reduce has two).
ROUNDS = 2

#: Operations issued so far on each group; goes with the group, so that a group made anew starts afresh on all ranks.
_issued: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_issued_lock = threading.Lock()

#: Buffers of failed operations: the transport may still read and write them, so they must outlive the error.
_abandoned: list[object] = []


def next_tag(group: dist.ProcessGroup) -> int:
    """Tag of the next collective of ``group``: the first of ROUNDS tags. To be called in program order."""
    with _issued_lock:
        issued = _issued.setdefault(group, count())
        return COLLECTIVE_TAG + next(issued) * ROUNDS % TAGS


class Link:
    """One coded operation of this rank: its group, its tag, its codec, and what it has sent.

    ``rank``, ``peers`` and all ranks below are ranks of the group. ``peers`` is the order in which to receive, nearest below
    first; it is also the order in which gloo's ring adds. ``raw_bytes`` and ``wire_bytes`` count what was sent. ``lease`` is
    staging memory for the time of the operation.
    """

    def __init__(
        self, op: str, group: dist.ProcessGroup, config: ZipcclConfig, role: str, codec: str, tag: int | None = None
    ) -> None:
        self.op = op
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.peers = [(self.rank - step) % self.size for step in range(1, self.size)]
        self.lease = Lease()
        self.raw_bytes = 0
        self.wire_bytes = 0
        self._config = config
        self._role = role
        self._codec = codec
        self._tag = next_tag(group) if tag is None else tag

    @contextmanager
    def round(self, index: int = 0) -> Iterator[Round]:
        """One exchange; on leaving, every send is out. After an error nothing is waited for, so that it shows at once."""
        exchange = Round(self, self._tag + index)
        try:
            yield exchange
            exchange.flush()
        except BaseException:
            _abandoned.append(exchange)
            raise
        exchange.lease.release()

    def error(self, what: str) -> CommError:
        """``what`` went wrong, with where."""
        name = getattr(self.group, "group_name", "?")
        where = f"group {name!r} of {self.size} ranks, role {self._role}, global rank {dist.get_rank()}"
        return CommError(f"{self.op} ({where}): {what}")

    def global_rank(self, peer: int) -> int:
        """Rank in the default group of a rank of this group."""
        return dist.get_global_rank(self.group, peer)

    def encode(self, flat: torch.Tensor, lease: Lease, base: torch.Tensor | None = None) -> torch.Tensor:
        """Frame of a flat tensor, a difference if there is a base."""
        codec = policy.frame_codec(self._codec, flat.nbytes) if base is None else "delta"
        block = self._config.block
        if staging.is_staged(flat):
            return staging.encode(flat, codec, block, self._config.route, lease)
        buffer = lease.bytes(compress_bound(flat.numel(), flat.dtype, codec, block=block))
        route = self._config.route
        return compress(flat, codec, base=base, out=buffer, block=block, shaped=False, checksum=False, route=route)

    def encode_all(self, flats: Sequence[torch.Tensor], lease: Lease) -> list[torch.Tensor]:
        """Frames of flat tensors of one dtype, in one call of the kernels."""
        block = self._config.block
        if staging.is_staged(flats[0]):
            return [staging.encode(flat, self._codec, block, self._config.route, lease) for flat in flats]
        buffers = [lease.bytes(compress_bound(flat.numel(), flat.dtype, self._codec, block=block)) for flat in flats]
        return compress_segments(flats, buffers, self._codec, block=block, route=self._config.route)

    def landing(self, flat: torch.Tensor, lease: Lease) -> torch.Tensor:
        """Buffer that holds any frame of as many elements as ``flat``, whatever codec the sender chooses."""
        block = self._config.block
        bounds = (compress_bound(flat.numel(), flat.dtype, codec, block=block) for codec in CODECS)
        return lease.bytes(max(bounds))

    def decode(
        self, frame: torch.Tensor, peer: int, out: torch.Tensor, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode the frame of ``peer`` into flat ``out``; ``base`` is for frames that are differences.

        Raises:
            CommError: from FrameError: it is damaged, or holds another dtype or number of elements.
        """
        with self._refusing(peer):
            if staging.is_staged(out):
                return staging.decode(frame, out, self._config.route)
            return decompress(frame, out, base=base, route=self._config.route)

    def decode_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add what the frame of ``peer`` holds, of ``dtype``, to flat ``sums``.

        Raises:
            CommError: as :meth:`decode`.
        """
        with self._refusing(peer):
            if staging.is_staged(sums):
                return staging.decode_add(frame, dtype, sums, self._config.route)
            decompress_add(frame, sums, dtype=dtype, route=self._config.route)

    @contextmanager
    def _refusing(self, peer: int) -> Iterator[None]:
        try:
            yield
        except FrameError as error:
            raise self.error(f"frame from global rank {self.global_rank(peer)} refused: {error}") from error

    def count(self, flat: torch.Tensor, frame: torch.Tensor) -> None:
        """Account for one frame sent."""
        self.raw_bytes += flat.nbytes
        self.wire_bytes += frame.nbytes

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Give errors of the transport a place.

        Raises:
            CommError: from what the transport raised.
        """
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            raise self.error(f"{doing}: {error}") from error


class Round:
    """Frames of one tag. Frames of one pair of ranks arrive in the order they were sent; empty tensors are not sent.

    ``lease`` has the memory of the frames.
    """

    def __init__(self, link: Link, tag: int) -> None:
        self._link = link
        self._tag = tag
        self.lease = Lease()
        self._sends: list[tuple[int, dist.Work, torch.Tensor]] = []
        self._receives: defaultdict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)

    def expect(self, peer: int, out: torch.Tensor) -> None:
        """Post the receive for what :meth:`receive` will decode into flat ``out``; nothing is written to ``out`` yet."""
        if out.numel():
            buffer = self._link.landing(out, self.lease)
            with self._receiving(peer):
                self._receives[peer].append((self._link.group.recv([buffer], peer, self._tag), buffer))

    def send(self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None) -> None:
        """Encode once, send to every peer; with ``base``, which all of them hold, as a difference. ``flat`` may be overwritten
        afterwards."""
        if flat.numel():
            frame = self._link.encode(flat, self.lease, base)
            for peer in peers:
                self._post(peer, flat, frame)

    def _post(self, peer: int, flat: torch.Tensor, frame: torch.Tensor) -> None:
        with self._sending(peer):
            self._sends.append((peer, self._link.group.send([frame], peer, self._tag), frame))
        self._link.count(flat, frame)

    def scatter(self, flats: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
        """Send each of ``peers`` its own of ``flats``, in this order. Small ones are encoded in one call, large ones as they go out."""
        chosen = [peer for peer in peers if flats[peer].numel()]
        if policy.encode_together([flats[peer].nbytes for peer in chosen]):
            frames = self._link.encode_all([flats[peer] for peer in chosen], self.lease)
            for peer, frame in zip(chosen, frames, strict=True):
                self._post(peer, flats[peer], frame)
        else:
            for peer in chosen:
                self.send(flats[peer], peer)

    def receive(self, peer: int, out: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the next frame of ``peer`` and decode it, against ``base`` if it is a difference, into flat ``out``, which it
        returns."""
        if out.numel():
            self._link.decode(self._arrived(peer), peer, out, base)
        return out

    def receive_add(self, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Wait for the next frame of ``peer``, which holds ``dtype``, and add it to flat ``sums`` of that dtype or float32."""
        if sums.numel():
            self._link.decode_add(self._arrived(peer), peer, dtype, sums)

    def _arrived(self, peer: int) -> torch.Tensor:
        handle, buffer = self._receives[peer].popleft()
        with self._receiving(peer):
            handle.wait()
        return buffer

    def flush(self) -> None:
        """Wait until every send is out."""
        while self._sends:
            peer, handle, _ = self._sends[-1]
            with self._sending(peer):
                handle.wait()
            self._sends.pop()

    def _sending(self, peer: int) -> AbstractContextManager[None]:
        return self._link.naming(f"sending to global rank {self._link.global_rank(peer)}")

    def _receiving(self, peer: int) -> AbstractContextManager[None]:
        return self._link.naming(f"receiving from global rank {self._link.global_rank(peer)}")
