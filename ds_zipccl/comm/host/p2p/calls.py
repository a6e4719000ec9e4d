"""Sends and receives that go by frames: the message is posted on the calling thread, and ends in the handle's ``wait()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import codecs, tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.p2p import choice
from ds_zipccl.comm.host.p2p import known as p2p_known
from ds_zipccl.comm.host.p2p.known import Receipt
from ds_zipccl.comm.host.p2p.message import Incoming, Outgoing
from ds_zipccl.comm.host.pipeline import abandon
from ds_zipccl.comm.lossy.factors import Factored
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.request import Post, logical_order
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import TagRange
from ds_zipccl.comm.work import PostedWork, Work
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.telemetry import counters

#: Timeout of a receive in the background: its ``wait()`` has the group's own timeout, which must not end before the program waits. gloo
#: closes the connection where a wait ends without a message.
_NO_END = timedelta(days=3650)


def send(post: Post, lossy: LossyCodec | Factored | None, *, bounded: bool) -> Work:
    """Post the frames of a message. ``lossy``: the codec, or the factors whose product the tensor is. With ``bounded``, posting may block
    on the peer, so that memory is bounded, and the tensor must stay as it is."""
    tensor, group, tag, peer, config, role, decision = post
    assert peer is not None  # a send names its receiver
    codec, factored = (lossy, None) if isinstance(lossy, LossyCodec) else (None, lossy)
    to = dist.get_global_rank(group, peer)
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("send", group, config, role, decision.codec, tensor.device, tag=first)
    ctx.rounding = None if codec is None else LossyFrames(ctx, codec)
    doing, beside = f"sending to global rank {to}", None
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing), ctx.working():
        flat = logical_order(tensor.resolve_conj().resolve_neg())  # the words that the receiver reads
        if config.check == "shadow":
            carried = flat.clone() if codec is None else codecs.project(flat, codec)
            beside = dist.isend(carried, to, group, TagRange.SHADOW + tag)
        message = Outgoing(ctx, flat, peer, bounded, choice.next_way(ctx, peer, flat, factored is not None), factored)
        known = p2p_known.remembers(flat.dtype, flat.numel(), tag, config)
        with _kept_on_error(message):
            message.post(p2p_known.sent_channel(ctx.state, peer, tag) if known else None)

    def finish(timeout: timedelta | None) -> None:
        with ctx.naming(doing), _kept_on_error(message):
            message.wait(timeout)
            if beside is not None:
                beside.wait()
        counters.record(role, "send", ctx.logical_bytes, ctx.wire_bytes, POOL.peak)

    return PostedWork("send", [tensor], finish, _no_source)


def receive(post: Post, *, blocking: bool) -> Work:
    """Post the receive of a message. With ``blocking``, the caller waits for it at once."""
    tensor, group, tag, peer, config, role, decision = post
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

    kind, receipt = (tensor.dtype, tensor.numel()), None
    known = p2p_known.remembers(*kind, tag, config)
    inbox = p2p_known.inbox(ctx.state, tag) if known else None
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing), inbox.lock if inbox else nullcontext():
        message = Incoming(ctx, tensor.numel(), tensor.dtype, peer)
        shadow = beside(peer) if config.check == "shadow" and peer is not None else None
        if inbox is not None:
            receipt = Receipt(inbox, peer, kind, p2p_known.limit(config))
        handle: Work = (
            work.start_recv([tensor], lambda: finish(_NO_END), message.source, ctx.transport.timeout())
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
