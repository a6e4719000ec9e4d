"""Sends and receives by frames: a message is posted on the calling thread, and ends in the handle's ``wait()``.

A message carries one tensor between two ranks. It has one part on the caller's tag, whatever its size, so that receives are matched as
those of plain sends: in order, by tag, from any rank. A tensor of one fragment is that part: a frame. A larger tensor is announced: the
announcement names the kind of the body and the number of the send, which gives the tag of the body. No two messages share such a tag, so
that threads, further messages of the caller's tag and receives from any rank need no agreement. The announcement leaves before the first
fragment is compressed: the receiver posts the body meanwhile.

The sender alone chooses the kind of a message, because the first bytes name the kind. All that arrives is checked before use.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import codecs, tensors
from ds_zipccl.codecs import known
from ds_zipccl.comm.buffer_pool import POOL, PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host.frames import FrameCoder, written_as
from ds_zipccl.comm.host.p2p import choice
from ds_zipccl.comm.host.p2p import known as p2p_known
from ds_zipccl.comm.host.p2p.choice import Way
from ds_zipccl.comm.host.p2p.known import Receipt, Sent
from ds_zipccl.comm.host.pipeline import Exchange, abandon, run_pipeline, wait
from ds_zipccl.comm.request import Change, Post, logical_order
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import BODY_TAGS, TagRange
from ds_zipccl.comm.work import PointToPointWork, PostedWork, Work
from ds_zipccl.frame import DTYPE_IDS, parse
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters, ranges

_MAGIC = b"ZCAN"
#: magic, version, kind of the body, dtype, whether a report is asked for, number of the send, zero, elements.
_LAYOUT = struct.Struct("<4s4BIIQ")
_VERSION = 1
#: Bytes of an announcement (admission: as many as a header of a frame, so that any receive buffer holds one).
ANNOUNCEMENT_BYTES = 32
#: Timeout of a receive in the background: its ``wait()`` has the group's own timeout, which must not end before the program waits. gloo
#: closes the connection where a wait ends without a message.
_NO_END = timedelta(days=3650)


class Body(IntEnum):
    """The kind of a body: a frame for each fragment; the bytes of the tensor, in one piece, straight into the receiver's tensor; or one
    frame of the whole tensor, for factors, which have no fragments."""

    FRAMES = 0
    BYTES = 1
    FRAME = 2


class Announcement(NamedTuple):
    """``number``: of the send on its rank, below BODY_TAGS. ``report``: the sender wants the receiver's time."""

    body: Body
    dtype: torch.dtype
    numel: int
    number: int
    report: bool = False

    @property
    def tag(self) -> int:
        """The tag of the body."""
        return TagRange.BODY + self.number

    def pack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Write the announcement to the start of ``buffer``, 1-D uint8 in host memory, and return its bytes."""
        view = buffer.numpy().data
        view[:ANNOUNCEMENT_BYTES] = bytes(ANNOUNCEMENT_BYTES)
        _LAYOUT.pack_into(
            view, 0, _MAGIC, _VERSION, self.body, DTYPE_IDS[self.dtype], self.report, self.number, 0, self.numel
        )  # fmt: skip
        return buffer[:ANNOUNCEMENT_BYTES]


def parse_announcement(part: torch.Tensor) -> Announcement:
    """Return the announcement in the first bytes of ``part``.

    Raises:
        ValueError: a field is not one that :meth:`Announcement.pack` writes.
    """
    content = bytes(part[:ANNOUNCEMENT_BYTES].numpy())
    _, version, body, dtype_id, report, number, zero, numel = _LAYOUT.unpack_from(content)
    if version != _VERSION:
        raise ValueError(f"version {version}, wanted {_VERSION}: use the same ds_zipccl on all ranks")
    dtype = next((one for one, known_id in DTYPE_IDS.items() if known_id == dtype_id), None)
    wrong = body not in tuple(Body) or number >= BODY_TAGS or report > 1 or zero or any(content[_LAYOUT.size :])
    if dtype is None or wrong:
        raise ValueError(f"got the bytes {content.hex()}, no announcement has them")
    return Announcement(Body(body), dtype, numel, number, bool(report))


def _fragment_numel(ctx: OpContext, numel: int, itemsize: int) -> int:
    """Return the elements of each fragment of a send of ``numel`` elements, equal on both sides. The last fragment may be shorter."""
    return wire.fragment_numel(numel, itemsize, 2, ctx.config.staging)


class Outgoing:
    """A tensor that goes to rank ``peer`` of the group. ``flat``: flat and contiguous, on the context's device. The context's first tag is
    that of the message.

    ``way``: coded or not; a send whose time counts for later ones is announced, whatever its size. ``bounded``: posting blocks until the
    frames of more than two pipeline depths ago are sent, so that memory for them is bounded, and ``flat`` stays as it is until :meth:`wait`
    has returned. Otherwise posting does not block on the peer, and ``flat`` may be overwritten as soon as :meth:`post` has returned.
    ``change``: a coded message carries the factors, if any.
    """

    def __init__(self, ctx: OpContext, flat: torch.Tensor, peer: int, bounded: bool, way: Way, change: Change) -> None:
        self._ctx, self._flat, self._peer, self._bounded, self._way = ctx, flat, peer, bounded, way
        self._coder = FrameCoder(ctx, way.raw)
        self._factored = None if way.raw or ctx.codec == "raw" else change.factored
        self._piece = _fragment_numel(ctx, flat.numel(), flat.element_size())
        self._first = Exchange(ctx, 0, self._coder)
        self._body: Exchange | None = None

    def post(self, hashes: Sent | None) -> None:
        """Post all parts of the message. ``hashes``: those of the channel of a tensor that both sides remember."""
        flat = self._flat
        if hashes is None:
            self._post_rest(self._post_first())
            return
        kind, digest = (flat.dtype, flat.numel()), region_hash(flat, self._ctx.hash_key, route=self._ctx.config.route)
        with hashes.lock:
            if hashes.get(kind) == digest:
                rest = None
                buffer = (buffers := PooledBuffers()).take(known.FRAME_BYTES)
                self._first.post(codecs.known_frame(*kind, digest, buffer), flat.nbytes, [self._peer], buffers)
            else:
                rest = self._post_first()
            hashes.put(kind, digest, flat.nbytes, p2p_known.limit(self._ctx.config))
        self._post_rest(rest)

    def _post_first(self) -> Announcement | None:
        """Post the part on the caller's tag. Return the announcement of a body that is to follow, None without one."""
        flat, ctx, trial = self._flat, self._ctx, self._way.trial
        if flat.numel() <= self._piece and trial is None:
            self._send(flat, self._first)
            return None
        number = ctx.state.next_body()
        announcement = Announcement(self._body_kind(), flat.dtype, flat.numel(), number, trial is not None)
        if trial is not None:
            trial.expect(ctx.transport, self._peer, number, self._way.raw)
        buffer = (buffers := PooledBuffers()).take(ANNOUNCEMENT_BYTES)
        self._first.post(announcement.pack(buffer), 0, [self._peer], buffers)
        return announcement

    def _body_kind(self) -> Body:
        if self._factored is not None:
            return Body.FRAME
        raw = self._way.raw or (self._ctx.codec == "raw" and self._flat.dtype != torch.bool)
        # projected values would need memory for all
        whole = raw and self._ctx.staging is None and self._coder.exact
        return Body.BYTES if whole else Body.FRAMES

    def _post_rest(self, announcement: Announcement | None) -> None:
        if announcement is None:
            return
        self._body = body = Exchange(self._ctx, 0, self._coder, tag=announcement.tag)
        if announcement.body == Body.BYTES:
            buffers, content = PooledBuffers(), self._flat.view(torch.uint8)
            if not self._bounded:
                content = buffers.take(content.nbytes).copy_(content)
            body.post(content, content.nbytes, [self._peer], buffers)
            return
        piece = self._flat.numel() if announcement.body == Body.FRAME else self._piece
        for fragment in self._flat.split(piece):
            if self._bounded:
                body.next_step()
            self._send(fragment, body)

    def _send(self, flat: torch.Tensor, exchange: Exchange) -> None:
        buffers, frame = PooledBuffers(), None
        if self._factored is not None:
            with ranges.inside(ranges.ENCODE):
                frame = self._factored.frame(self._ctx.config.block, self._coder.route, buffers)
        elif flat.dtype == torch.bool and self._ctx.staging is None:
            with ranges.inside(ranges.ENCODE):
                frame = codecs.bits_frame(flat, buffers.take(known.bits_frame_bytes(flat.numel())))
        frame = self._coder.compress(flat, buffers) if frame is None else frame
        exchange.post(frame, flat.nbytes, [self._peer], buffers)

    def wait(self, timeout: timedelta | None) -> None:
        """Block until all parts are sent. ``timeout`` is that of each part."""
        self._first.flush(timeout)
        if self._body is not None:
            self._body.flush(timeout)


class Incoming:
    """A tensor that arrives, from rank ``peer`` of the group or, where that is None, from any rank. The constructor posts the receive of
    the part on the context's first tag; it does not block.

    As with gloo's own receives, the sender's tensor may have another dtype, and fewer bytes: it then is the first bytes of this one.
    """

    def __init__(self, ctx: OpContext, numel: int, dtype: torch.dtype, peer: int | None, tag: int) -> None:
        self._ctx, self._numel, self._peer, self._tag = ctx, numel, peer, tag
        self._coder = FrameCoder(ctx)
        self._piece = _fragment_numel(ctx, numel, dtype.itemsize)
        self._buffers, nbytes = PooledBuffers(), numel * dtype.itemsize
        # of a sender whose tensor is one fragment, whatever its dtype; frames of bf16 are the largest
        most = max(size * _fragment_numel(ctx, -(-nbytes // size), size) for size in (1, 2, 4, 8))
        self._part = self._coder.recv_buffer(-(-min(most, nbytes) // 2), torch.bfloat16, self._buffers)
        self._handle = ctx.transport.post_recv(self._part, peer, ctx.tag(0))
        #: An attribute: gloo may still write to the buffers of a body that has failed.
        self._body: object = None

    @property
    def may_have_body(self) -> bool:
        """Whether the sender may announce a body: it then needs this rank before the program here waits for the tensor."""
        return self._numel > self._piece or self._ctx.config.mode_of(self._ctx.role) == "auto"

    def source(self) -> int:
        """Return the group rank of the sender, after :meth:`wait`."""
        return self._handle._source_rank() if self._peer is None else self._peer

    def wait(self, timeout: timedelta | None) -> None:
        """Block until the part on the caller's tag has arrived."""
        wait(self._handle, timeout)
        self._arrived = time.perf_counter()

    def write(self, out: torch.Tensor, receipt: Receipt | None = None) -> None:
        """Write the tensor to flat ``out``, after :meth:`wait`; blocks until a body has arrived. ``receipt``: the place of the receive of
        a tensor that both sides remember.

        Raises:
            CommError: an announcement or a frame is refused, or the sender or the transport failed.
        """
        ctx, source = self._ctx, self.source()
        if receipt is not None:
            receipt.take_turn(source)
        announced = bytes(self._part[: len(_MAGIC)].numpy()) == _MAGIC
        try:
            with ctx.refusing(source):
                sent = parse_announcement(self._part) if announced else parse(self._part)
            kind, nbytes = (sent.dtype, sent.numel), sent.numel * sent.dtype.itemsize
            if nbytes > out.nbytes:
                wanted = f"at most the {out.nbytes} of {out.numel()} elements of {out.dtype}: pass a longer tensor to the receive"
                raise ValueError(f"{sent.numel} elements of {sent.dtype} have {nbytes} bytes, wanted {wanted}")
        except ValueError as error:
            what = "announcement" if announced else "frame"
            raise ctx.error(f"{what} from global rank {ctx.global_rank(source)} refused: {error}") from error
        with written_as(out, *kind) as words:
            if isinstance(sent, Announcement):
                with ctx.naming("receiving from", source):
                    self._take_body(sent, source, words)
            else:
                self._coder.decompress(self._part, source, words, receipt.copy(source, kind) if receipt else None)
            if receipt is not None and p2p_known.remembers(*kind, self._tag, ctx.config):
                receipt.keep(source, words)
        self._buffers.release()

    def _take_body(self, sent: Announcement, source: int, words: torch.Tensor) -> None:
        if sent.body == Body.BYTES:
            self._take_bytes(sent.tag, source, words.view(torch.uint8))
        else:
            whole = sent.body == Body.FRAME
            piece = sent.numel if whole else _fragment_numel(self._ctx, sent.numel, sent.dtype.itemsize)
            self._take_frames(sent.tag, source, words.split(piece))
        if sent.report:
            choice.report(self._ctx, source, sent.number, time.perf_counter() - self._arrived)

    def _take_frames(self, tag: int, source: int, fragments: Sequence[torch.Tensor]) -> None:
        self._body = body = Exchange(self._ctx, 0, self._coder, tag=tag)

        def take(step: int) -> None:
            body.recv(source, fragments[step])

        run_pipeline(len(fragments), lambda step: body.post_recv(source, fragments[step]), take)

    def _take_bytes(self, tag: int, source: int, out: torch.Tensor) -> None:
        buffers = PooledBuffers()
        buffer = out if self._ctx.staging is None else buffers.take_pinned(out.numel())
        handle = self._ctx.transport.post_recv(buffer, source, tag)
        self._body = handle, buffer
        wait(handle, None)
        if buffer is not out:
            out.copy_(buffer)
        buffers.release()


# ---- calls -----------------------------------------------------------------------------------------------------------


def send(post: Post, *, bounded: bool) -> Work:
    """Post the frames of a message. With ``bounded``, posting may block on the peer, so that memory is bounded, and the tensor must stay
    as it is."""
    tensor, group, tag, peer, config, role, decision, change = post
    assert peer is not None  # a send names its receiver
    to = dist.get_global_rank(group, peer)
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("send", group, config, role, decision.codec, tensor.device, tag=first)
    ctx.rounding = change.frames(ctx)
    doing, beside = f"sending to global rank {to}", None
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing), ctx.working():
        flat = logical_order(tensor)
        if config.check == "shadow":
            beside = dist.isend(change.carried(flat), to, group, TagRange.SHADOW + tag)
        way = choice.next_way(ctx, peer, flat, change.factored is not None)
        message = Outgoing(ctx, flat, peer, bounded, way, change)
        remembered = p2p_known.remembers(flat.dtype, flat.numel(), tag, config)
        with _kept_on_error(message):
            message.post(p2p_known.sent(ctx.state, peer, tag) if remembered else None)

    def finish(timeout: timedelta | None) -> None:
        with ctx.naming(doing), _kept_on_error(message):
            message.wait(timeout)
            if beside is not None:
                beside.wait()
        counters.record(role, "send", ctx.logical_bytes, ctx.wire_bytes, POOL.peak)

    return PostedWork("send", [tensor], finish, _no_source)


def receive(post: Post, *, blocking: bool) -> Work:
    """Post the receive of a message. With ``blocking``, the caller waits for it at once."""
    tensor, group, tag, peer, config, role, decision, _ = post
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("recv", group, config, role, decision.codec, tensor.device, tag=first)

    def beside(source: int) -> Shadow:
        def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
            return dist.irecv(outputs[0], ctx.global_rank(source), group, TagRange.SHADOW + tag)

        return Shadow(plain, [], [tensor.contiguous()], "bits", ctx.size)

    doing = "receiving from " + ("any rank" if peer is None else f"global rank {ctx.global_rank(peer)}")

    @torch.inference_mode()
    @tensors.undisturbed()
    def finish(timeout: timedelta | None) -> None:
        try:
            with _kept_on_error(message):
                with ctx.naming(doing):
                    message.wait(timeout)
                with ctx.working():
                    flat = logical_order(tensor)
                    message.write(flat, receipt)
                    if not tensor.is_contiguous():
                        tensor.copy_(flat.view(tensor.shape))
        finally:
            if receipt is not None:
                receipt.end()
        if config.check == "shadow":
            (shadow or beside(message.source())).compare([tensor], ctx.error)
        counters.record(role, "recv", 0, 0, POOL.peak)

    receipt = None
    ordered = p2p_known.remembers(tensor.dtype, tensor.numel(), tag, config)
    inbox = p2p_known.inbox(ctx.state, tag) if tag < p2p_known.TAGS else None
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing), inbox.lock if inbox else nullcontext():
        message = Incoming(ctx, tensor.numel(), tensor.dtype, peer, tag)
        shadow = beside(peer) if config.check == "shadow" and peer is not None else None
        if inbox is not None:
            receipt = Receipt(inbox, peer, p2p_known.limit(config), ordered)
        handle: Work = (
            PointToPointWork("recv", [tensor], message.source, ctx.transport.timeout()).begin(lambda: finish(_NO_END))
            if message.may_have_body and not blocking
            else PostedWork("recv", [tensor], finish, message.source)
        )
        if receipt is not None:
            receipt.work = handle
    return handle


@contextmanager
def _kept_on_error(message: Incoming | Outgoing) -> Iterator[None]:
    """Keep a message that has failed: the transport may still use its memory."""
    try:
        yield
    except BaseException:
        abandon(message)
        raise


def _no_source() -> int:
    raise RuntimeError("source_rank() is for receives, this is send; call it on the handle of irecv")
