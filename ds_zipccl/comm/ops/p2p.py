"""Sends and receives of one tensor: one frame each, matched by peer and the user's tag, in order.

A coded message must be received by a coded receive of the same dtype and size under the same config, as with collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.comm.execution import group_rank, is_member, logical_order, message_of
from ds_zipccl.comm.frames import COLLECTIVE_TAG, P2P_TAG, SHADOW_TAG, TAGS, Link
from ds_zipccl.comm.group_state import known, profile_of, resolved
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.work import PostedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.policy import admission, cost_model
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
    """``torch.distributed.send``: blocks until the frame is out."""
    if is_member(group) and group_rank(group, dst, group_dst) == dist.get_rank(group):
        raise ValueError("send: destination is this rank itself")
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
    """``torch.distributed.recv``: blocks; returns the sender's global rank, -1 on a rank outside the group.

    ``src`` None receives from any rank.
    """
    work = irecv(tensor, src, group, tag, group_src, config=config, role=role)
    if work is None:
        return -1
    work.wait()
    source = group_rank(group, src, group_src) if (src, group_src) != (None, None) else work._source_rank()
    return dist.get_global_rank(resolved(group), source)


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
    """``torch.distributed.isend``: encodes and posts on the calling thread; ``tensor`` may be overwritten afterwards."""
    if not is_member(group):
        return dist.isend(tensor, dst, group, tag)
    group = resolved(group)
    peer = group_rank(group, dst, group_dst)
    to = dist.get_global_rank(group, peer)
    plan = _plan("send", tensor, group, tag, peer, config, role)
    if not plan.frames:
        counters.record_pass(role, "send", tensor.numel() * tensor.element_size(), plan.reason)
        return dist.isend(tensor, to, group, tag)
    link = Link("send", group, config, role, plan.codec, tag=P2P_TAG + tag)
    doing = f"sending to global rank {to}"
    with torch.inference_mode(), tensors.undisturbed(), link.naming(doing):
        flat = logical_order(tensor)
        frame = link.encode(flat, lease := Lease())
        handle = group.send([frame], peer, P2P_TAG + tag)
        beside = dist.isend(flat.clone(), to, group, SHADOW_TAG + tag) if config.check == "shadow" else None

    def finish(timeout: timedelta | None) -> None:
        with link.naming(doing):
            _wait(handle, timeout)
            if beside is not None:
                beside.wait()
        counters.record(role, "send", flat.nbytes, frame.nbytes)
        lease.release()

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
    """``torch.distributed.irecv``: posts the receive; ``wait()`` decodes into ``tensor``. ``src`` None: from any rank."""
    if not is_member(group):
        return dist.irecv(tensor, src, group, tag)
    group = resolved(group)
    peer = None if (src, group_src) == (None, None) else group_rank(group, src, group_src)
    plan = _plan("recv", tensor, group, tag, peer, config, role)
    if not plan.frames:
        counters.record_pass(role, "recv", 0, plan.reason)
        return dist.irecv(tensor, None if peer is None else dist.get_global_rank(group, peer), group, tag)
    link = Link("recv", group, config, role, plan.codec, tag=P2P_TAG + tag)

    def beside(source: int) -> Shadow:
        def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
            return dist.irecv(outputs[0], link.global_rank(source), group, SHADOW_TAG + tag)

        return Shadow(plain, [], [tensor.contiguous()], "bits", link.size)

    doing = "receiving from " + ("any rank" if peer is None else f"global rank {link.global_rank(peer)}")
    with torch.inference_mode(), tensors.undisturbed(), link.naming(doing):
        buffer = link.landing(tensor, lease := Lease())
        handle = (
            group.recv_anysource([buffer], P2P_TAG + tag) if peer is None else group.recv([buffer], peer, P2P_TAG + tag)
        )
        shadow = beside(peer) if config.check == "shadow" and peer is not None else None

    @torch.inference_mode()
    @tensors.undisturbed()
    def finish(timeout: timedelta | None) -> None:
        with link.naming(doing):
            _wait(handle, timeout)
        source = handle._source_rank() if peer is None else peer
        flat = logical_order(tensor)
        link.decode(buffer, source, flat)
        lease.release()
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        if config.check == "shadow":
            (shadow or beside(source)).compare([tensor], link.error)
        counters.record(role, "recv", 0, 0)

    return PostedWork("recv", [tensor], finish, handle._source_rank)


def _wait(handle: dist.Work, timeout: timedelta | None) -> None:
    handle.wait() if timeout is None else handle.wait(timeout)


def _plan(
    op: str, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int, peer: int | None, config: ZipcclConfig, role: str
) -> admission.Decision:
    members = known(group)
    assert members is not None  # callers have looked
    if tag >= COLLECTIVE_TAG and config.enabled and config.mode_of(role) != "never":
        raise ValueError(
            f"{op}: tag must be below {COLLECTIVE_TAG}, got {tag}: this package uses those above for its own messages"
        )
    if tensors.is_traced(tensor):
        return admission.Decision(False, "", "traced")
    plan = admission.admit(message_of(op, tensor, tensor.numel(), members, role), config)
    profile = profile_of(members) if plan.frames and config.mode_of(role) == "auto" else None
    if profile is not None and not cost_model.pays(tensor.nbytes, tensor.dtype, profile):
        return admission.Decision(False, "", "link faster than coding")
    if plan.frames and peer == dist.get_rank(group):
        return admission.Decision(False, "", "to itself")
    if plan.frames and not 0 <= tag < TAGS:
        return admission.Decision(False, "", f"tag not below {TAGS}")
    return plan
