"""Exchanges of frames in pieces: while one piece is on the wire, the next one is encoded and an earlier one decoded.

A tensor is cut where both sides can tell (:func:`ds_zipccl.policy.wire.fragment_numel`), and a frame is made of each piece. Work goes in
turns
(:func:`pump`): turn i posts piece i and takes piece i - WINDOW. A rank at the lowest turn of all finds what it waits for already posted
by the others, so nobody waits in a circle, and what a rank holds at a time is bounded by the window, not by the message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.comm.reduction_order import within
from ds_zipccl.frame import parse
from ds_zipccl.policy import wire

if TYPE_CHECKING:
    from ds_zipccl.comm.frames import Link

#: Failed exchanges that are kept (seed). Their handles hold connections open on which other ranks may still be at work. A handle that is
#: let go takes its memory from gloo first, so that nothing is written there any more; the connection is of no use afterwards.
ABANDONED = 8
_abandoned: deque[object] = deque(maxlen=ABANDONED)


def pump(turns: int, *stages: Callable[[int], None]) -> None:
    """Call every stage for 0 to ``turns`` - 1, the first at once and each other policy.WINDOW turns after the one before it."""
    for turn in range(turns + wire.PIPELINE_DEPTH * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            if 0 <= turn - wire.PIPELINE_DEPTH * number < turns:
                stage(turn - wire.PIPELINE_DEPTH * number)


class Laid:
    """Spans of a flat tensor laid end to end, like a flat tensor whose pieces are made when they are asked for: views where a piece lies in
    one span, otherwise copies."""

    def __init__(self, flat: torch.Tensor, spans: Sequence[slice]) -> None:
        self._flat, self._spans = flat, spans
        self.element_size = flat.element_size

    def numel(self) -> int:
        return sum(span.stop - span.start for span in self._spans)

    def split(self, numel: int) -> Sequence[torch.Tensor]:
        """All of it in pieces of ``numel`` elements; the last one may be shorter."""
        return _LaidPieces(self._flat, self._spans, numel, -(-self.numel() // numel))


class _LaidPieces(Sequence[torch.Tensor]):
    def __init__(self, flat: torch.Tensor, spans: Sequence[slice], numel: int, count: int) -> None:
        self._flat, self._spans, self._numel, self._count = flat, spans, numel, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, turn: int) -> torch.Tensor:  # type: ignore[override]
        parts = [self._flat[span] for span in within(self._spans, turn * self._numel, (turn + 1) * self._numel)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Pieces(list[Sequence[torch.Tensor]]):
    """Flat tensors, each as its pieces; ``rounds``: exchanges of them that go on at a time."""

    def __init__(self, link: Link, flats: Sequence[torch.Tensor | Laid], rounds: int = 1) -> None:
        super().__init__(
            flat.split(link.piece_numel(flat.numel(), flat.element_size(), rounds)) if flat.numel() else ()
            for flat in flats
        )
        self.turns = max(map(len, self), default=0)

    def at(self, turn: int) -> list[torch.Tensor]:
        """The piece of every tensor; an empty one of those that have no more."""
        return [pieces[turn] if turn < len(pieces) else tensors.empty(0, torch.uint8) for pieces in self]


class _Posted(NamedTuple):
    peer: int
    handle: dist.Work
    buffer: torch.Tensor
    lease: Lease


@contextmanager
def posting(link: Link, index: int = 0, *, ours: bool = False) -> Iterator[Round]:
    """One exchange; on leaving, every send is out. After an error nothing is waited for, so that it shows at once.

    ``ours``: of messages that plain collectives do not send.
    """
    exchange = Round(link, index, ours)
    try:
        yield exchange
        exchange.flush()
    except BaseException:
        abandoned(exchange)
        raise


def abandoned(exchange: Round) -> None:
    """Keep an exchange that nobody will wait for, one of the last :data:`ABANDONED`."""
    _abandoned.append(exchange)


class Round:
    """Frames of one tag. Frames of one pair of ranks arrive in the order they were sent; empty tensors are not sent."""

    def __init__(self, link: Link, index: int, ours: bool) -> None:
        self._link = link
        self._ours = ours
        self._tag = link.tag(index)
        self._sends: deque[list[_Posted]] = deque([[]])
        self._receives: defaultdict[int, deque[_Posted]] = defaultdict(deque)

    def turn(self) -> None:
        """Begin a turn of posting: waits until the frames of long ago are out, and takes their memory back."""
        while len(self._sends) > 2 * wire.PIPELINE_DEPTH:
            self._retire()
        self._sends.append([])

    def expect(self, peer: int, out: torch.Tensor) -> None:
        """Post the receive for what :meth:`receive` will decode into flat ``out``; nothing is written to ``out`` yet."""
        if out.numel():
            buffer = self._link.landing(out, lease := Lease())
            with self._link.naming("receiving from", peer):
                handle = self._link.group.recv([buffer], peer, self._tag)
            self._receives[peer].append(_Posted(peer, handle, buffer, lease))

    def send(self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None) -> None:
        """Encode once, send to every peer; with ``base``, which all of them hold, as a difference. ``flat`` may be overwritten
        afterwards."""
        if flat.numel():
            frame = self._link.encode(flat, lease := Lease(), base)
            self._post(frame, flat, peers, lease)

    def scatter(self, flats: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
        """Send each of ``peers`` its own of ``flats``, in this order. Small ones are encoded in one call, large ones as they go out."""
        chosen = [peer for peer in peers if flats[peer].numel()]
        if wire.encode_together([flats[peer].nbytes for peer in chosen]):
            frames = self._link.encode_all([flats[peer] for peer in chosen], lease := Lease())
            for peer, frame in zip(chosen, frames, strict=True):
                self._post(frame, flats[peer], [peer], lease)
        else:
            for peer in chosen:
                self.send(flats[peer], peer)

    def _post(self, frame: torch.Tensor, flat: torch.Tensor, peers: Sequence[int], lease: Lease) -> None:
        for peer in peers:
            with self._link.naming("sending to", peer):
                handle = self._link.group.send([frame], peer, self._tag)
            self._sends[-1].append(_Posted(peer, handle, frame, lease))
            self._link.count(0 if self._ours else flat.nbytes, frame.nbytes)

    def receive(self, peer: int, out: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the next frame of ``peer`` and decode it, against ``base`` if it is a difference, into flat ``out``, which it
        returns."""
        if out.numel():
            with self._arrived(peer) as posted:
                self._link.decode(posted.buffer, peer, out, base)
        return out

    def hand_on(self, peer: int, out: torch.Tensor, to: Round, peers: Sequence[int]) -> None:
        """As :meth:`receive` with what stands in ``out`` as its base, and send the frame as it is to ``peers``, in round ``to``."""
        if out.numel():
            with self._arrived(peer, keep=True) as posted:
                self._link.decode(posted.buffer, peer, out, out)
            frame = posted.buffer[: parse(posted.buffer).frame_bytes]
            to._post(frame, out, peers, posted.lease)

    def receive_add(self, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Wait for the next frame of ``peer``, which holds ``dtype``, and add it to flat ``sums`` of that dtype or float32."""
        if sums.numel():
            with self._arrived(peer) as posted:
                self._link.decode_add(posted.buffer, peer, dtype, sums)

    @contextmanager
    def _arrived(self, peer: int, keep: bool = False) -> Iterator[_Posted]:
        """The next frame of ``peer``; its memory goes back afterwards unless it is to be kept."""
        posted = self._receives[peer][0]
        with self._link.naming("receiving from", peer):
            posted.handle.wait()
        self._receives[peer].popleft()
        yield posted
        if not keep:
            posted.lease.release()

    def flush(self) -> None:
        """Wait until every send is out."""
        while self._sends:
            self._retire()

    def _retire(self) -> None:
        """Wait until the frames of the oldest turn are out."""
        for posted in self._sends[0]:
            with self._link.naming("sending to", posted.peer):
                posted.handle.wait()
        for posted in self._sends.popleft():
            posted.lease.release()
