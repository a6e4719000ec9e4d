"""Exchanges of frames in fragments: while one fragment is on the wire, the next one is compressed and an earlier one decompressed.

A tensor is cut where both sides can tell (:func:`ds_zipccl.policy.wire.fragment_numel`), and each fragment becomes a frame. Work goes in
steps (:func:`run_pipeline`): step i posts fragment i and takes fragment i - PIPELINE_DEPTH. A rank at the lowest step of all finds the
messages that it waits for already posted by its peers. So nobody waits in a circle, and the memory that a rank holds is bounded by the
depth, not by the message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.frames import FrameCoder
from ds_zipccl.comm.spans import length, within
from ds_zipccl.frame import parse
from ds_zipccl.policy import wire

#: Failed exchanges that are kept (seed). Their handles hold connections open on which other ranks may still be at work. A handle that is
#: let go takes its memory from gloo first, so that nothing is written there any more; the connection is of no use afterwards.
ABANDONED = 8
_abandoned: deque[object] = deque(maxlen=ABANDONED)


def run_pipeline(steps: int, *stages: Callable[[int], None]) -> None:
    """Call every stage for 0 to ``steps`` - 1, the first at once and each other PIPELINE_DEPTH steps after the stage before it."""
    depth = wire.PIPELINE_DEPTH
    for step in range(steps + depth * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            if 0 <= step - depth * number < steps:
                stage(step - depth * number)


class SpanView:
    """Spans of a flat tensor laid end to end, cut like a flat tensor. Fragments are made when they are asked for: views where a fragment
    lies in one span, otherwise copies."""

    def __init__(self, flat: torch.Tensor, spans: Sequence[slice]) -> None:
        self._flat, self._spans = flat, spans
        self.element_size = flat.element_size

    def numel(self) -> int:
        """Return the number of elements of all spans."""
        return sum(map(length, self._spans))

    def split(self, numel: int) -> Sequence[torch.Tensor]:
        """Return all of it in fragments of ``numel`` elements; the last one may be shorter."""
        return _SpanFragments(self._flat, self._spans, numel, -(-self.numel() // numel))


class _SpanFragments(Sequence[torch.Tensor]):
    def __init__(self, flat: torch.Tensor, spans: Sequence[slice], numel: int, count: int) -> None:
        self._flat, self._spans, self._numel, self._count = flat, spans, numel, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> torch.Tensor:  # type: ignore[override]
        parts = [self._flat[span] for span in within(self._spans, step * self._numel, (step + 1) * self._numel)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Fragments(list[Sequence[torch.Tensor]]):
    """Flat tensors, each as its fragments; ``exchanges`` of them go on at a time and share the memory for frames."""

    def __init__(self, ctx: OpContext, flats: Sequence[torch.Tensor | SpanView], exchanges: int = 1) -> None:
        super().__init__(
            flat.split(ctx.fragment_numel(flat.numel(), flat.element_size(), exchanges)) if flat.numel() else ()
            for flat in flats
        )
        self.steps = max(map(len, self), default=0)

    def at(self, step: int) -> list[torch.Tensor]:
        """Return the fragment of every tensor; an empty one of tensors that have no more."""
        return [fragments[step] if step < len(fragments) else tensors.empty(0, torch.uint8) for fragments in self]


class _Posted(NamedTuple):
    peer: int
    handle: dist.Work
    frame: torch.Tensor
    buffers: PooledBuffers


@contextmanager
def open_exchange(ctx: OpContext, index: int = 0, *, control: bool = False) -> Iterator[Exchange]:
    """One exchange; on leaving, every send is out. After an error nothing is waited for, so that the error shows at once.

    ``control``: its messages are not part of the tensors, and plain collectives do not send them.
    """
    exchange = Exchange(ctx, index, control)
    try:
        yield exchange
        exchange.flush()
    except BaseException:
        abandon(exchange)
        raise


def abandon(exchange: Exchange) -> None:
    """Keep an exchange that nobody will wait for, one of the last :data:`ABANDONED`."""
    _abandoned.append(exchange)


class Exchange:
    """Frames of one tag. Frames of one pair of ranks arrive in the order they were sent; empty tensors are not sent."""

    def __init__(self, ctx: OpContext, index: int, control: bool) -> None:
        self._ctx, self._coder, self._control = ctx, FrameCoder(ctx), control
        self._tag = ctx.tag(index)
        self._sends: deque[list[_Posted]] = deque([[]])
        self._receives: defaultdict[int, deque[_Posted]] = defaultdict(deque)

    def next_step(self) -> None:
        """Begin a step of posting: wait until the frames of long ago are out, and take their memory back."""
        while len(self._sends) > 2 * wire.PIPELINE_DEPTH:
            self._retire()
        self._sends.append([])

    def post_recv(self, peer: int, out: torch.Tensor) -> None:
        """Post the receive of the frame that :meth:`recv` will decompress into flat ``out``; nothing is written to ``out`` yet."""
        if out.numel():
            buffer = self._coder.recv_buffer(out.numel(), out.dtype, buffers := PooledBuffers())
            with self._ctx.naming("receiving from", peer):
                handle = self._ctx.transport.post_recv(buffer, peer, self._tag)
            self._receives[peer].append(_Posted(peer, handle, buffer, buffers))

    def send(self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None) -> None:
        """Compress once, send to every peer; with ``base``, which all of them hold, as a difference. ``flat`` may be overwritten
        afterwards."""
        if flat.numel():
            frame = self._coder.compress(flat, buffers := PooledBuffers(), base)
            self._post(frame, flat.nbytes, peers, buffers)

    def send_each(self, flats: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
        """Send each of ``peers`` its own of ``flats``, in this order. Small ones are compressed in one call, large ones as they go out."""
        chosen = [peer for peer in peers if flats[peer].numel()]
        if wire.encode_together([flats[peer].nbytes for peer in chosen]):
            frames = self._coder.compress_each([flats[peer] for peer in chosen], buffers := PooledBuffers())
            for peer, frame in zip(chosen, frames, strict=True):
                self._post(frame, flats[peer].nbytes, [peer], buffers)
        else:
            for peer in chosen:
                self.send(flats[peer], peer)

    def _post(self, frame: torch.Tensor, nbytes: int, peers: Sequence[int], buffers: PooledBuffers) -> None:
        for peer in peers:
            with self._ctx.naming("sending to", peer):
                handle = self._ctx.transport.post_send(frame, peer, self._tag)
            self._sends[-1].append(_Posted(peer, handle, frame, buffers))
            self._ctx.count(0 if self._control else nbytes, frame.nbytes)

    def recv(self, peer: int, out: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the next frame of ``peer``, decompress it into flat ``out``, against ``base`` if it is a difference, and return
        ``out``."""
        if out.numel():
            with self._arrived(peer) as posted:
                self._coder.decompress(posted.frame, peer, out, base)
        return out

    def forward(self, peer: int, out: torch.Tensor, to: Exchange, peers: Sequence[int]) -> None:
        """As :meth:`recv` with the contents of ``out`` as its base, and send the frame as it came to ``peers``, in exchange ``to``."""
        if out.numel():
            with self._arrived(peer, keep=True) as posted:
                self._coder.decompress(posted.frame, peer, out, out)
            frame = posted.frame[: parse(posted.frame).frame_bytes]
            to._post(frame, out.nbytes, peers, posted.buffers)

    def recv_add(self, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Wait for the next frame of ``peer``, which holds ``dtype``, and add it to flat ``sums`` of that dtype or float32."""
        if sums.numel():
            with self._arrived(peer) as posted:
                self._coder.decompress_add(posted.frame, peer, dtype, sums)

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add flat ``values``, which are here already, to flat ``sums`` of their dtype or float32."""
        self._coder.add(values, sums)

    @contextmanager
    def _arrived(self, peer: int, keep: bool = False) -> Iterator[_Posted]:
        """The next frame of ``peer``; its memory goes back afterwards unless it is to be kept."""
        posted = self._receives[peer][0]
        with self._ctx.naming("receiving from", peer):
            posted.handle.wait()
        self._receives[peer].popleft()
        yield posted
        if not keep:
            posted.buffers.release()

    def flush(self) -> None:
        """Wait until every send is out."""
        while self._sends:
            self._retire()

    def _retire(self) -> None:
        """Wait until the frames of the oldest step are out."""
        for posted in self._sends[0]:
            with self._ctx.naming("sending to", posted.peer):
                posted.handle.wait()
        for posted in self._sends.popleft():
            posted.buffers.release()


def send_own(exchange: Exchange, leaving: Fragments, bases: Fragments, step: int, peers: Sequence[int]) -> None:
    """Send the own fragments of a step, as differences if there is a base, which only a single tensor may have."""
    base = next(iter(bases.at(step)), None)
    for fragment in leaving.at(step):
        exchange.send(fragment, *peers, base=base)


def detached(
    sources: Sequence[torch.Tensor], written: Sequence[torch.Tensor], homes: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return ``sources``, copied where they share memory with tensors that are written while the sources are still being sent.

    Source i may lie in ``homes[i]``, exactly: nothing is written there before the same fragment of it has left.
    """
    spans = {_span(flat) for flat in written if flat.numel()}

    def shared(flat: torch.Tensor, home: torch.Tensor) -> bool:
        begin, end = _span(flat)
        return any(begin < last and first < end for first, last in spans - ({_span(home)} & {(begin, end)}))

    return [
        flat.clone() if flat.numel() and shared(flat, home) else flat for flat, home in zip(sources, homes, strict=True)
    ]


def _span(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes
