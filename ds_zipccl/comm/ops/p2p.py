"""send, recv, isend, irecv: a message for each tensor, matched by peer and the caller's tag, in order.

Sender and receiver of a compressed message must have the same dtype, size and config, as with collectives.
:mod:`ds_zipccl.comm.host.p2p.message` has its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import codecs, tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide_message
from ds_zipccl.comm.group_state import group_rank, group_state, is_member, resolve_group
from ds_zipccl.comm.host.buffer_pool import POOL
from ds_zipccl.comm.host.p2p import choice
from ds_zipccl.comm.host.p2p import known as p2p_known
from ds_zipccl.comm.host.p2p.known import Receipt
from ds_zipccl.comm.host.p2p.message import Incoming, Outgoing
from ds_zipccl.comm.host.pipeline import abandon
from ds_zipccl.comm.lossy.factors import Factored, Factoring
from ds_zipccl.comm.lossy.frames import project_alone
from ds_zipccl.comm.request import logical_order, lossy_here
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import TAGS_PER_RANGE, TagRange
from ds_zipccl.comm.work import PostedWork, Work
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.telemetry import counters

#: Timeout of a receive in the background: its ``wait()`` has the group's own timeout, which must not end before the program waits. gloo
#: closes the connection where a wait ends without a message.
_NO_END = timedelta(days=3650)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    lossy: LossyCodec | Factoring | None = None,
) -> None:
    """``torch.distributed.send``: blocks until the frames are sent. ``lossy``: the receiver gets the values that this codec, or
    the product of these factors, makes of the tensor's, and names no codec.

    Raises:
        ValueError: the destination is this rank itself.
    """
    if is_member(group) and group_rank(group, dst, group_dst) == dist.get_rank(group):
        raise ValueError(
            f"send: wanted another rank as destination, got this rank itself, {dist.get_rank(group)}; copy the tensor"
        )
    if (work := _send(tensor, dst, group, tag, group_dst, config, role, lossy, bounded=True)) is not None:
        work.wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> int:
    """``torch.distributed.recv``: blocks, and returns the sender's global rank; -1 on a rank outside the group.

    With ``src`` and ``group_src`` None, a message from any rank is received.
    """
    handle = _recv(tensor, src, group, tag, group_src, config, role, blocking=True)
    if handle is None:
        return -1
    handle.wait()
    source = group_rank(group, src, group_src) if (src, group_src) != (None, None) else handle._source_rank()
    return dist.get_global_rank(resolve_group(group), source)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    lossy: LossyCodec | Factoring | None = None,
) -> Any:
    """``torch.distributed.isend``: compresses and posts on the calling thread, without blocking on the peer. ``tensor`` may be overwritten
    afterwards: the handle has the whole message in memory until it is sent."""
    return _send(tensor, dst, group, tag, group_dst, config, role, lossy, bounded=False)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.irecv``: posts the receive. With ``src`` and ``group_src`` None, a message from any rank is received.

    A tensor of one fragment is decompressed in the first ``wait()``. A larger tensor, and in mode auto every one, is received in the
    background, because its sender may block before the program here comes to ``wait()``.
    """
    return _recv(tensor, src, group, tag, group_src, config, role, blocking=False)


def _send(
    tensor: torch.Tensor,
    dst: int | None,
    group: dist.ProcessGroup | None,
    tag: int,
    group_dst: int | None,
    config: ZipcclConfig,
    role: str,
    lossy: LossyCodec | Factoring | None,
    *,
    bounded: bool,
) -> Any:
    """As :func:`isend`. With ``bounded``, posting may block on the peer, so that memory is bounded, and ``tensor`` must stay as it is."""
    if not is_member(group):
        return dist.isend(tensor, dst, group, tag)
    group = resolve_group(group)
    peer = group_rank(group, dst, group_dst)
    to = dist.get_global_rank(group, peer)
    here = lossy_here(lossy, (tensor.dtype, tensor.device), group, "send", role) is not None
    decision = _decide("send", tensor, group, tag, peer, config, role)
    codec = factored = None
    if here and isinstance(lossy, Factoring):
        factored = _factored(lossy, tensor, decision, config)
        tensor = tensor if factored is None else factored.values
    elif here and isinstance(lossy, LossyCodec):
        codec = lossy
    if not decision.frames:
        counters.record_pass(role, "send", tensor.numel() * tensor.element_size(), decision.reason)
        if codec is not None and decision.reason == PassReason.LINK_IS_FASTER.value:
            tensor = project_alone(tensor, codec, group, "send", role, config.route)  # values must not depend on times
        return dist.isend(tensor, to, group, tag)
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("send", group, config, role, decision.codec, tensor.device, tag=first, lossy=codec)
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


def _factored(factoring: Factoring, tensor: torch.Tensor, decision: Decision, config: ZipcclConfig) -> Factored | None:
    """Return the factors of a tensor that our schedule would carry, also where the plain send is faster: values must not depend on
    times."""
    if not decision.frames and decision.reason != PassReason.LINK_IS_FASTER.value:
        return None
    return factoring.factored(tensor, "send", config.route)


def _recv(
    tensor: torch.Tensor,
    src: int | None,
    group: dist.ProcessGroup | None,
    tag: int,
    group_src: int | None,
    config: ZipcclConfig,
    role: str,
    *,
    blocking: bool,
) -> Any:
    """As :func:`irecv`. With ``blocking``, the caller waits for the handle at once."""
    if not is_member(group):
        return dist.irecv(tensor, src, group, tag)
    group = resolve_group(group)
    peer = None if (src, group_src) == (None, None) else group_rank(group, src, group_src)
    decision = _decide("recv", tensor, group, tag, peer, config, role)
    if not decision.frames:
        counters.record_pass(role, "recv", 0, decision.reason)
        return dist.irecv(tensor, None if peer is None else dist.get_global_rank(group, peer), group, tag)
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


def _decide(
    op: str, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int, peer: int | None, config: ZipcclConfig, role: str
) -> Decision:
    state = group_state(group)
    assert state is not None  # callers have checked that this rank is in the group
    if tag >= TagRange.COLLECTIVE and config.enabled and config.mode_of(role) != "never":
        raise ValueError(
            f"{op}: tag must be below {int(TagRange.COLLECTIVE)}, got {tag}: this package uses the higher tags; use a lower tag"
        )
    decision = decide_message(op, tensor, state, config, role)
    if decision.frames and peer == state.rank:
        return Decision.passing(PassReason.TO_ITSELF)
    if decision.frames and not 0 <= tag < TAGS_PER_RANGE:
        return Decision.passing(PassReason.TAG, TAGS_PER_RANGE)
    return decision
