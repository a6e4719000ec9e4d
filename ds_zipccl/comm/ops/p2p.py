"""send, recv, isend, irecv: a message for each tensor, matched by peer and the caller's tag, in order.

Sender and receiver of a compressed message must have the same config and as many elements. As with gloo, the receiver's dtype may be
another, and its tensor longer where that too is coded, by `min_bytes` and the speed of the link: the message is the first bytes, and the
others stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm import engine
from ds_zipccl.comm.decision import decide_message
from ds_zipccl.comm.group_state import group_rank, group_state, resolve_group
from ds_zipccl.comm.request import MessageOptions, Post, SendOptions
from ds_zipccl.comm.transport.protocol import TAGS_PER_RANGE, TagRange
from ds_zipccl.config import DEFAULT
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.telemetry import counters


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    **options: Unpack[SendOptions],
) -> None:
    """``torch.distributed.send``: blocks until the frames are sent.

    Raises:
        ValueError: the destination is this rank itself.
    """
    post = _post("send", tensor, group, tag, (dst, group_dst), **options)
    if post is not None:
        if post.peer == dist.get_rank(group):
            raise ValueError(
                f"send: wanted another rank as destination, got this rank itself, {post.peer}; copy the tensor"
            )
        _send(post, bounded=True).wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    **options: Unpack[MessageOptions],
) -> int:
    """``torch.distributed.recv``: blocks, and returns the sender's global rank; -1 on a rank outside the group.

    With ``src`` and ``group_src`` None, a message from any rank is received.
    """
    post = _post("recv", tensor, group, tag, (src, group_src), **options)
    if post is None:
        return -1
    handle = _recv(post, blocking=True)
    handle.wait()
    return dist.get_global_rank(post.group, handle._source_rank() if post.peer is None else post.peer)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    **options: Unpack[SendOptions],
) -> Any:
    """``torch.distributed.isend``: compresses and posts on the calling thread, without blocking on the peer. ``tensor`` may be overwritten
    afterwards: the handle has the whole message in memory until it is sent."""
    post = _post("send", tensor, group, tag, (dst, group_dst), **options)
    return dist.isend(tensor, dst, group, tag) if post is None else _send(post, bounded=False)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    **options: Unpack[MessageOptions],
) -> Any:
    """``torch.distributed.irecv``: posts the receive. With ``src`` and ``group_src`` None, a message from any rank is received.

    A tensor of one fragment is decompressed in the first ``wait()``. A larger tensor is received in the background, because its sender may
    block before the program here comes to ``wait()``.
    """
    post = _post("recv", tensor, group, tag, (src, group_src), **options)
    return dist.irecv(tensor, src, group, tag) if post is None else _recv(post, blocking=False)


def _post(
    op: str,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    tag: int,
    ends: tuple[int | None, int | None],
    **options: Unpack[SendOptions],
) -> Post | None:
    """Return the message to or from a rank, given as its global rank or its rank in the group, and decide on it; None outside the group."""
    state = group_state(group)
    if state is None:
        return None
    group, config, role = resolve_group(group), options.get("config", DEFAULT), options.get("role", "dp")
    peer = None if op == "recv" and ends == (None, None) else group_rank(group, *ends)
    if tag >= TagRange.COLLECTIVE and config.enabled and config.mode_of(role) != "never":
        raise ValueError(
            f"{op}: tag must be below {int(TagRange.COLLECTIVE)}, got {tag}: this package uses the higher tags; use a lower tag"
        )
    decision = decide_message(op, tensor, state, config, role)
    if decision.frames and peer == state.rank:
        decision = Decision.passing(PassReason.TO_ITSELF)
    elif decision.frames and not 0 <= tag < TAGS_PER_RANGE:
        decision = Decision.passing(PassReason.TAG, TAGS_PER_RANGE)
    return Post(tensor, group, tag, peer, config, role, decision).changed(op, options)


def _send(post: Post, *, bounded: bool) -> Any:
    """Start a send. With ``bounded``, posting may block on the peer, so that memory is bounded, and the tensor must stay as it is."""
    if post.decision.frames:
        return engine.engine_for(post).send(post, bounded=bounded)
    counters.record_pass(post.role, "send", post.tensor.numel() * post.tensor.element_size(), post.decision.reason)
    assert post.peer is not None  # a send names its receiver
    return dist.isend(post.tensor, dist.get_global_rank(post.group, post.peer), post.group, post.tag)


def _recv(post: Post, *, blocking: bool) -> Any:
    """Start a receive. With ``blocking``, the caller waits for the handle at once."""
    if post.decision.frames:
        return engine.engine_for(post).receive(post, blocking=blocking)
    counters.record_pass(post.role, "recv", 0, post.decision.reason)
    source = None if post.peer is None else dist.get_global_rank(post.group, post.peer)
    return dist.irecv(post.tensor, source, post.group, post.tag)
