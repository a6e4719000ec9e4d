"""send, recv, isend, irecv: one frame for each tensor, matched by peer and the caller's tag, in order.

Sender and receiver of a compressed message must have the same dtype, size and config, as with collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide_message
from ds_zipccl.comm.execution import logical_order
from ds_zipccl.comm.frames import FrameCoder
from ds_zipccl.comm.group_state import group_rank, group_state, is_member, resolve_group
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import TAGS_PER_RANGE, TagRange
from ds_zipccl.comm.work import PostedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.telemetry import counters


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> None:
    """``torch.distributed.send``: blocks until the frame is sent.

    Raises:
        ValueError: the destination is this rank itself.
    """
    if is_member(group) and group_rank(group, dst, group_dst) == dist.get_rank(group):
        raise ValueError(
            f"send: wanted another rank as destination, got this rank itself, {dist.get_rank(group)}; copy the tensor"
        )
    if (work := isend(tensor, dst, group, tag, group_dst, config=config, role=role)) is not None:
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
    work = irecv(tensor, src, group, tag, group_src, config=config, role=role)
    if work is None:
        return -1
    work.wait()
    source = group_rank(group, src, group_src) if (src, group_src) != (None, None) else work._source_rank()
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
) -> Any:
    """``torch.distributed.isend``: compresses and posts on the calling thread. ``tensor`` may be overwritten afterwards."""
    if not is_member(group):
        return dist.isend(tensor, dst, group, tag)
    group = resolve_group(group)
    peer = group_rank(group, dst, group_dst)
    to = dist.get_global_rank(group, peer)
    decision = _decide("send", tensor, group, tag, peer, config, role)
    if not decision.frames:
        counters.record_pass(role, "send", tensor.numel() * tensor.element_size(), decision.reason)
        return dist.isend(tensor, to, group, tag)
    first = TagRange.POINT_TO_POINT + tag
    ctx = OpContext("send", group, config, role, decision.codec, tensor.device, tag=first)
    doing = f"sending to global rank {to}"
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing):
        with ctx.working():
            flat = logical_order(tensor)
            frame = FrameCoder(ctx).compress(flat, buffers := PooledBuffers())
        handle = ctx.transport.post_send(frame, peer, first)
        beside = dist.isend(flat.clone(), to, group, TagRange.SHADOW + tag) if config.check == "shadow" else None

    def finish(timeout: timedelta | None) -> None:
        with ctx.naming(doing):
            _wait(handle, timeout)
            if beside is not None:
                beside.wait()
        counters.record(role, "send", flat.nbytes, frame.nbytes)
        buffers.release()

    return PostedWork("send", [tensor], finish, handle._source_rank)


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
    """``torch.distributed.irecv``: posts the receive; ``wait()`` decompresses into ``tensor``. With ``src`` and ``group_src`` None, a
    message from any rank is received."""
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
    coder = FrameCoder(ctx)

    def beside(source: int) -> Shadow:
        def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
            return dist.irecv(outputs[0], ctx.global_rank(source), group, TagRange.SHADOW + tag)

        return Shadow(plain, [], [tensor.contiguous()], "bits", ctx.size)

    doing = "receiving from " + ("any rank" if peer is None else f"global rank {ctx.global_rank(peer)}")
    with torch.inference_mode(), tensors.undisturbed(), ctx.naming(doing):
        frame = coder.recv_buffer(tensor.numel(), tensor.dtype, buffers := PooledBuffers())
        handle = ctx.transport.post_recv(frame, peer, first)
        shadow = beside(peer) if config.check == "shadow" and peer is not None else None

    @torch.inference_mode()
    @tensors.undisturbed()
    def finish(timeout: timedelta | None) -> None:
        with ctx.naming(doing):
            _wait(handle, timeout)
        source = handle._source_rank() if peer is None else peer
        with ctx.working():
            flat = logical_order(tensor)
            coder.decompress(frame, source, flat)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
        buffers.release()
        if config.check == "shadow":
            (shadow or beside(source)).compare([tensor], ctx.error)
        counters.record(role, "recv", 0, 0)

    return PostedWork("recv", [tensor], finish, handle._source_rank)


def _wait(handle: dist.Work, timeout: timedelta | None) -> None:
    handle.wait() if timeout is None else handle.wait(timeout)


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
