"""Exchanges of frames in fragments: while one fragment is on the wire, the next one is compressed and an earlier one decompressed.

Sender and receiver cut a tensor at the same elements (:func:`ds_zipccl.policy.wire.fragment_numel`), and each fragment becomes a frame.
Work goes in steps (:func:`run_pipeline`): step i posts fragment i and takes fragment i - PIPELINE_DEPTH. Consider a rank at the lowest
step of all ranks: its peers have already posted the messages that the rank waits for. So no ranks wait in a circle. The pipeline depth
bounds the memory of a rank; the size of the message does not matter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs.memory import overlapping
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.spans import length, within
from ds_zipccl.frame import parse
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import ranges

#: Failed exchanges that are kept (seed). Their handles hold connections open that other ranks may still use. Dropping a handle first takes
#: its buffer back from gloo, so that gloo does not write to freed memory; the connection is unusable afterwards.
ABANDONED = 8
_abandoned: deque[object] = deque(maxlen=ABANDONED)


def run_pipeline(steps: int, *stages: Callable[[int], None]) -> None:
    """Call every stage with steps 0 to ``steps`` - 1. Each stage runs PIPELINE_DEPTH steps after the stage before it."""
    depth = wire.PIPELINE_DEPTH
    for step in range(steps + depth * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            if 0 <= step - depth * number < steps:
                stage(step - depth * number)


class SpanView(Sequence[torch.Tensor]):
    """Spans of a flat tensor laid end to end, with the methods of a flat tensor that :class:`Fragments` uses; and, after :meth:`split`, the
    fragments. A fragment is made at each access: a view if the fragment lies in one span, otherwise a copy."""

    def __init__(self, flat: torch.Tensor, spans: Sequence[slice]) -> None:
        self._flat, self._spans, self._each = flat, spans, 1
        self.element_size = flat.element_size

    def numel(self) -> int:
        """Return the number of elements of all spans."""
        return sum(map(length, self._spans))

    def split(self, numel: int) -> SpanView:
        """Return fragments of ``numel`` elements; the last fragment may be shorter."""
        self._each = numel
        return self

    def __len__(self) -> int:
        return -(-self.numel() // self._each)

    def __getitem__(self, step: int) -> torch.Tensor:  # type: ignore[override]
        parts = [self._flat[span] for span in within(self._spans, step * self._each, (step + 1) * self._each)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Fragments(list[Sequence[torch.Tensor]]):
    """The fragments of flat tensors. ``exchanges``: exchanges in flight, which share the memory for frames."""

    def __init__(self, ctx: OpContext, flats: Sequence[torch.Tensor | SpanView], exchanges: int = 1) -> None:
        super().__init__(
            flat.split(ctx.fragment_numel(flat.numel(), flat.element_size(), exchanges)) if flat.numel() else ()
            for flat in flats
        )
        self.steps = max(map(len, self), default=0)

    def at(self, step: int) -> list[torch.Tensor]:
        """Return fragment ``step`` of every tensor; an empty tensor where a tensor has fewer fragments."""
        return [fragments[step] if step < len(fragments) else tensors.empty(0, torch.uint8) for fragments in self]


class _Posted(NamedTuple):
    peer: int
    handle: dist.Work
    frame: torch.Tensor
    buffers: PooledBuffers


@contextmanager
def open_exchange(
    ctx: OpContext, index: int = 0, coder: FrameCoder | None = None, *, control: bool = False
) -> Iterator[Exchange]:
    """Open an :class:`Exchange`; leaving blocks until every send is done. After an error the exchange waits for nothing and raises at
    once."""
    exchange = Exchange(ctx, index, coder, control=control)
    try:
        yield exchange
        exchange.flush()
    except BaseException:
        abandon(exchange)
        raise


def abandon(exchange: object) -> None:
    """Keep the object that has the handles of a failed exchange. The last :data:`ABANDONED` such objects are kept."""
    _abandoned.append(exchange)


class Exchange:
    """The frames of one tag. Frames of one pair of ranks arrive in the order of sending; empty tensors are not sent.

    ``coder``: makes and reads the frames; None: the operation's own. ``control``: the messages are not part of the tensors, and plain
    collectives do not send them; they are raw and exact, and count as wire bytes only. ``tag``: None: that of exchange ``index``; otherwise
    that of a message by itself, which has a frame also where the tensor is empty.
    """

    def __init__(
        self,
        ctx: OpContext,
        index: int,
        coder: FrameCoder | None = None,
        *,
        control: bool = False,
        tag: int | None = None,
    ) -> None:
        self._ctx, self._control, self._tag = ctx, control, ctx.tag(index) if tag is None else tag
        self._coder = coder or FrameCoder(ctx, raw=control, exact=control)
        self._takes_empty = tag is not None
        self._sends: deque[list[_Posted]] = deque([[]])
        self._receives: defaultdict[int, deque[_Posted]] = defaultdict(deque)

    def next_step(self) -> None:
        """Begin a step of sends. Blocks until the frames of more than two pipeline depths ago are sent, and takes their memory back."""
        while len(self._sends) > 2 * wire.PIPELINE_DEPTH:
            self._retire()
        self._sends.append([])

    def post_recv(self, peer: int, out: torch.Tensor) -> None:
        """Post the receive of the frame that :meth:`recv` will decompress into flat ``out``. Does not block, and does not write ``out``."""
        if out.numel() or self._takes_empty:
            buffer = self._coder.recv_buffer(out.numel(), out.dtype, buffers := PooledBuffers())
            with self._ctx.naming("receiving from", peer):
                handle = self._ctx.transport.post_recv(buffer, peer, self._tag)
            self._receives[peer].append(_Posted(peer, handle, buffer, buffers))

    def send(
        self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None, own_place: torch.Tensor | None = None
    ) -> None:
        """Compress ``flat`` once and post the frame to every peer. With ``base``, which all peers hold, the frame is a difference.
        ``flat`` may be overwritten afterwards. ``own_place``: see :meth:`ds_zipccl.comm.host.frames.FrameCoder.compress`."""
        peers = tuple(peer for peer in peers if flat.numel() and not self._send_own(flat, peer))
        if peers:
            frame = self._coder.compress(flat, buffers := PooledBuffers(), base, own_place)
            self.post(frame, flat.nbytes, peers, buffers)

    def send_each(self, flats: Sequence[torch.Tensor] | Mapping[int, torch.Tensor], peers: Sequence[int]) -> None:
        """Send ``flats[peer]`` to each of ``peers``, in this order. Small tensors are compressed in one call, large tensors one by one."""
        chosen = [peer for peer in peers if flats[peer].numel() and not self._send_own(flats[peer], peer)]
        some = [flats[peer] for peer in chosen]
        if wire.encode_together([flat.nbytes for flat in some]):
            frames = self._coder.compress_each(some, buffers := PooledBuffers())
            for flat, peer, frame in zip(some, chosen, frames, strict=True):
                self.post(frame, flat.nbytes, [peer], buffers)
        else:
            for flat, peer in zip(some, chosen, strict=True):
                self.post(self._coder.compress(flat, buffers := PooledBuffers()), flat.nbytes, [peer], buffers)

    def _send_own(self, flat: torch.Tensor, peer: int) -> bool:
        """Send the frame of ``flat`` that is for ``peer`` alone; return False where there is none."""
        found = self._coder.own_frame(peer, flat)
        if found is not None:
            self.post(found[0], flat.nbytes, [peer], found[1])
        return found is not None

    def post(self, frame: torch.Tensor, nbytes: int, peers: Sequence[int], buffers: PooledBuffers) -> None:
        """Post a frame of ``nbytes`` of a tensor, in memory of ``buffers``, to every peer."""
        for peer in peers:
            with self._ctx.naming("sending to", peer):
                handle = self._ctx.transport.post_send(frame, peer, self._tag)
            self._sends[-1].append(_Posted(peer, handle, frame, buffers))
            self._ctx.count(0 if self._control else nbytes, frame.nbytes)

    def recv(
        self, peer: int, out: torch.Tensor, base: torch.Tensor | None = None, earlier: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decompress the next frame of ``peer`` into flat ``out`` and return ``out``; blocks until the frame arrives. ``base``: the base of
        a frame that is a difference. ``earlier``: the received part of the segment, directly in front of ``out`` in memory."""
        if out.numel() or self._takes_empty:
            with self._arrived(peer) as posted:
                self._coder.decompress(posted.frame, peer, out, base, earlier)
        return out

    def forward(self, peer: int, out: torch.Tensor, to: Exchange, peers: Sequence[int]) -> None:
        """As :meth:`recv` with the contents of ``out`` as the base. Then post the unchanged frame to ``peers``, in exchange ``to``."""
        if out.numel():
            with self._arrived(peer, keep=True) as posted:
                self._coder.decompress(posted.frame, peer, out, out)
            frame = posted.frame[: parse(posted.frame).frame_bytes]
            to.post(frame, out.nbytes, peers, posted.buffers)

    def recv_add(self, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the next frame of ``peer``, whose dtype is ``dtype``, to flat ``sums`` of that dtype or float32. Blocks until the frame
        arrives."""
        if sums.numel():
            with self._arrived(peer) as posted:
                self._coder.decompress_add(posted.frame, peer, dtype, sums)

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add flat ``values`` of this rank to flat ``sums`` of the same dtype or float32."""
        self._coder.add(values, sums)

    @contextmanager
    def _arrived(self, peer: int, keep: bool = False) -> Iterator[_Posted]:
        """Wait for the next frame of ``peer``. Its memory goes back afterwards unless ``keep``."""
        posted = self._receives[peer][0]
        self._wait(posted, "receiving from")
        self._receives[peer].popleft()
        yield posted
        if not keep:
            posted.buffers.release()

    def flush(self, timeout: timedelta | None = None) -> None:
        """End the exchange: block until every send is done. ``timeout``: of each send; None: that of the group."""
        self._coder.end()
        while self._sends:
            self._retire(timeout)

    def _retire(self, timeout: timedelta | None = None) -> None:
        """Block until the sends of the oldest step are done, and take their memory back."""
        for posted in self._sends[0]:
            self._wait(posted, "sending to", timeout)
        for posted in self._sends.popleft():
            posted.buffers.release()

    def _wait(self, posted: _Posted, doing: str, timeout: timedelta | None = None) -> None:
        with self._ctx.naming(doing, posted.peer):
            wait(posted.handle, timeout)


def wait(handle: dist.Work, timeout: timedelta | None) -> None:
    """Wait for a handle of the transport; the group's own timeout counts where ``timeout`` is None."""
    with ranges.inside(ranges.WIRE):
        handle.wait() if timeout is None else handle.wait(timeout)


def detached(
    sources: Sequence[torch.Tensor], written: Sequence[torch.Tensor], homes: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return ``sources``, with copies of those that share memory with tensors in ``written``, which are written during the sends.

    Source i may be exactly ``homes[i]`` without a copy: a fragment of ``homes[i]`` is written only after the same fragment is compressed.
    """
    shared = overlapping(sources, written, homes)
    return [flat.clone() if hit else flat for flat, hit in zip(sources, shared, strict=True)]


def swap(
    ctx: OpContext, index: int, peers: Sequence[int], leaving: torch.Tensor | Iterable[torch.Tensor], nbytes: int
) -> dict[int, torch.Tensor]:
    """Send ``nbytes`` bytes to each of ``peers``, the same or each its own; return those that each sends. A control exchange; blocks."""
    coming = {peer: tensors.empty(nbytes, torch.uint8) for peer in peers}
    with open_exchange(ctx, index, control=True) as exchange:
        for peer, out in coming.items():
            exchange.post_recv(peer, out)
        if isinstance(leaving, torch.Tensor):
            exchange.send(leaving, *peers)
        else:
            for peer, mine in zip(peers, leaving, strict=True):
                exchange.send(mine, peer)
        for peer, out in coming.items():
            exchange.recv(peer, out)
    return coming
