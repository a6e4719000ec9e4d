"""Sends and receives by frames: a message is posted on the calling thread, and ends in the handle's ``wait()``.

A message carries one tensor between two ranks. It has one part on the caller's tag, whatever its size, so that receives are matched as
those of plain sends: in order, by tag, from any rank. A tensor of one fragment is that part: a frame. A larger tensor is announced: the
announcement names the tensor and the number of the send, which gives the tag of the body, a frame for each fragment. No two messages share
such a tag, so that threads, further messages of the caller's tag and receives from any rank need no agreement. The announcement leaves
before the first fragment is compressed: the receiver posts the body meanwhile.

The first bytes tell the receiver which of both has come. All that arrives is checked before use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import codecs, tensors
from ds_zipccl.codecs import known
from ds_zipccl.comm.buffer_pool import POOL, PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder, written_as
from ds_zipccl.comm.host.pipeline import Exchange, abandon, run_pipeline, wait
from ds_zipccl.comm.lossy.factors import Factored
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.request import Post, logical_order
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import BODY_TAGS, TagRange
from ds_zipccl.comm.work import PointToPointWork, Work
from ds_zipccl.frame import DTYPE_IDS, parse
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters, ranges

_MAGIC = b"ZCAN"
_VERSION = 2
#: magic, version, whether the body is one frame, dtype, number of the send, elements. As many bytes as a header of a frame, so that any
#: receive buffer holds an announcement; those between and after the fields are 0.
_LAYOUT = struct.Struct("<4s3BxIQ12x")
#: Bytes of an element of the dtypes that a sender may have.
_ITEMSIZES = sorted({dtype.itemsize for dtype in DTYPE_IDS})
#: Timeout of a receive in the background: its ``wait()`` has the group's own timeout, which must not end before the program waits. gloo
#: closes the connection where a wait ends without a message.
_NO_END = timedelta(days=3650)


class Announcement(NamedTuple):
    """``number``: of the send on its rank, below BODY_TAGS. ``whole``: the body is one frame of the whole tensor, for factors, which have
    no fragments."""

    dtype: torch.dtype
    numel: int
    number: int
    whole: bool = False

    @property
    def tag(self) -> int:
        """The tag of the body."""
        return TagRange.BODY + self.number

    def packed(self) -> bytes:
        """Return the bytes of the message."""
        return _LAYOUT.pack(_MAGIC, _VERSION, self.whole, DTYPE_IDS[self.dtype], self.number, self.numel)


def parse_announcement(part: torch.Tensor) -> Announcement:
    """Return the announcement in the first bytes of ``part``.

    Raises:
        ValueError: they are not what :meth:`Announcement.packed` returns.
    """
    content = bytes(part[: _LAYOUT.size].numpy())
    _, version, whole, dtype_id, number, numel = _LAYOUT.unpack(content)
    if version != _VERSION:
        raise ValueError(f"version {version}, wanted {_VERSION}: use the same ds_zipccl on all ranks")
    for dtype, known_id in DTYPE_IDS.items():
        sent = Announcement(dtype, numel, number, bool(whole))
        if known_id == dtype_id and number < BODY_TAGS and sent.packed() == content:
            return sent
    raise ValueError(f"got the bytes {content.hex()}, no announcement has them")


def _fragment_numel(ctx: OpContext, numel: int, itemsize: int) -> int:
    """Return the elements of each fragment of a send of ``numel`` elements, equal on both sides. The last fragment may be shorter."""
    return wire.fragment_numel(numel, itemsize, 2, ctx.config.staging)


class Outgoing:
    """A tensor that goes to rank ``peer`` of the group. ``flat``: flat and contiguous, on the context's device. The context's first tag is
    that of the message.

    ``bounded``: posting blocks until the frames of more than two pipeline depths ago are sent, so that memory for them is bounded, and
    ``flat`` stays as it is until :meth:`wait` has returned. Otherwise posting does not block on the peer, and ``flat`` may be overwritten
    as soon as :meth:`post` has returned. ``factored``: a coded message carries these factors.
    """

    def __init__(
        self, ctx: OpContext, flat: torch.Tensor, peer: int, bounded: bool, factored: Factored | None = None
    ) -> None:
        self._ctx, self._flat, self._peer, self._bounded = ctx, flat, peer, bounded
        self._coder = FrameCoder(ctx)
        self._factored = None if ctx.codec == "raw" else factored
        self._first = Exchange(ctx, 0, self._coder)
        self._body: Exchange | None = None

    def post(self) -> None:
        """Post all parts of the message."""
        flat, whole = self._flat, self._factored is not None
        piece = _fragment_numel(self._ctx, flat.numel(), flat.element_size())
        if flat.numel() <= piece:
            self._send(flat, self._first)
            return
        announcement = Announcement(flat.dtype, flat.numel(), self._ctx.state.next_body(), whole)
        buffer = (buffers := PooledBuffers()).take(_LAYOUT.size)
        buffer.numpy()[:] = memoryview(announcement.packed())
        self._first.post(buffer, 0, [self._peer], buffers)
        self._body = body = Exchange(self._ctx, 0, self._coder, tag=announcement.tag)
        for fragment in flat.split(flat.numel() if whole else piece):
            if self._bounded:
                body.next_step()
            self._send(fragment, body)

    def _send(self, flat: torch.Tensor, exchange: Exchange) -> None:
        buffers, frame = PooledBuffers(), None
        if self._factored is not None:
            with ranges.inside(ranges.ENCODE):
                frame = self._factored.frame(self._ctx.config.block, self._coder.route, buffers)
        elif flat.dtype == torch.bool:
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
    ``may_have_body``: the sender may announce a body, for which it needs this rank before the program here waits for the tensor.
    """

    def __init__(self, ctx: OpContext, numel: int, dtype: torch.dtype, peer: int | None) -> None:
        self._ctx, self._peer = ctx, peer
        self._coder, self._buffers = FrameCoder(ctx), PooledBuffers()
        nbytes = numel * dtype.itemsize
        fragments = [size * _fragment_numel(ctx, nbytes // size, size) for size in _ITEMSIZES]
        self.may_have_body = nbytes > min(fragments)
        # frames of bf16 are the largest
        self._part = self._coder.recv_buffer(-(-min(nbytes, max(fragments)) // 2), torch.bfloat16, self._buffers)
        self._handle = ctx.transport.post_recv(self._part, peer, ctx.tag(0))
        #: An attribute: gloo may still write to the buffers of a body that has failed.
        self._body: Exchange | None = None

    def source(self) -> int:
        """Return the group rank of the sender, after :meth:`wait`."""
        return self._handle._source_rank() if self._peer is None else self._peer

    def wait(self, timeout: timedelta | None) -> None:
        """Block until the part on the caller's tag has arrived."""
        wait(self._handle, timeout)

    def write(self, out: torch.Tensor) -> None:
        """Write the tensor to flat ``out``, after :meth:`wait`; blocks until a body has arrived.

        Raises:
            CommError: an announcement or a frame is refused, or the sender or the transport failed.
        """
        ctx, source = self._ctx, self.source()
        announced = bytes(self._part[: len(_MAGIC)].numpy()) == _MAGIC
        try:
            with ctx.refusing(source):
                sent = parse_announcement(self._part) if announced else parse(self._part)
            nbytes = sent.numel * sent.dtype.itemsize
            if nbytes > out.nbytes:
                wanted = f"at most the {out.nbytes} of {out.numel()} elements of {out.dtype}: pass a longer tensor to the receive"
                raise ValueError(f"{sent.numel} elements of {sent.dtype} have {nbytes} bytes, wanted {wanted}")
        except ValueError as error:
            what = "announcement" if announced else "frame"
            raise ctx.error(f"{what} from global rank {ctx.global_rank(source)} refused: {error}") from error
        with written_as(out, sent.dtype, sent.numel) as words:
            if isinstance(sent, Announcement):
                with ctx.naming("receiving from", source):
                    self._take_body(sent, source, words)
            else:
                self._coder.decompress(self._part, source, words)
        self._buffers.release()

    def _take_body(self, sent: Announcement, source: int, words: torch.Tensor) -> None:
        piece = sent.numel if sent.whole else _fragment_numel(self._ctx, sent.numel, sent.dtype.itemsize)
        fragments = words.split(piece)
        self._body = body = Exchange(self._ctx, 0, self._coder, tag=sent.tag)

        def take(step: int) -> None:
            body.recv(source, fragments[step])

        run_pipeline(len(fragments), lambda step: body.post_recv(source, fragments[step]), take)


# ---- calls -----------------------------------------------------------------------------------------------------------


def send(post: Post, *, bounded: bool) -> Work:
    """Post the frames of a message. With ``bounded``, posting may block on the peer, so that memory is bounded, and the tensor must stay
    as it is."""
    tensor, group, tag, peer, config, role, decision, codec, factored = post
    assert peer is not None  # a send names its receiver
    to = dist.get_global_rank(group, peer)
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("send", group, config, role, decision.codec, tag=first)
    ctx.rounding = None if codec is None else LossyFrames(ctx, codec)
    doing, beside = f"sending to global rank {to}", None
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing):
        flat = logical_order(tensor)
        if config.check == "shadow":
            carried = flat.clone() if codec is None else codecs.project(flat, codec)
            beside = dist.isend(carried, to, group, TagRange.SHADOW + tag)
        message = Outgoing(ctx, flat, peer, bounded, factored)
        with _kept_on_error(message):
            message.post()

    def finish(timeout: timedelta | None) -> None:
        with ctx.naming(doing), _kept_on_error(message):
            message.wait(timeout)
            if beside is not None:
                beside.wait()
        counters.record(role, "send", ctx.logical_bytes, ctx.wire_bytes, POOL.peak)

    return PointToPointWork("send", [tensor], None, finish)


def receive(post: Post, *, blocking: bool) -> Work:
    """Post the receive of a message. With ``blocking``, the caller waits for it at once."""
    tensor, group, tag, peer, config, role, decision, *_ = post
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("recv", group, config, role, decision.codec, tag=first)

    def beside(source: int) -> Shadow:
        def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
            return dist.irecv(outputs[0], ctx.global_rank(source), group, TagRange.SHADOW + tag)

        return Shadow(plain, [], [tensor.contiguous()], "bits", ctx.size)

    doing = "receiving from " + ("any rank" if peer is None else f"global rank {ctx.global_rank(peer)}")

    @torch.inference_mode()
    @tensors.undisturbed()
    def finish(timeout: timedelta | None) -> None:
        with _kept_on_error(message):
            with ctx.naming(doing):
                message.wait(timeout)
            flat = logical_order(tensor)
            message.write(flat)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
        if config.check == "shadow":
            (shadow or beside(message.source())).compare([tensor], ctx.error)
        counters.record(role, "recv", 0, 0, POOL.peak)

    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing):
        message = Incoming(ctx, tensor.numel(), tensor.dtype, peer)
        shadow = beside(peer) if config.check == "shadow" and peer is not None else None
    if message.may_have_body and not blocking:
        limit = ctx.transport.timeout()
        return PointToPointWork("recv", [tensor], message.source, limit=limit).begin(lambda: finish(_NO_END))
    return PointToPointWork("recv", [tensor], message.source, finish)


@contextmanager
def _kept_on_error(message: Incoming | Outgoing) -> Iterator[None]:
    """Keep a message that has failed: the transport may still use its memory."""
    try:
        yield
    except BaseException:
        abandon(message)
        raise
