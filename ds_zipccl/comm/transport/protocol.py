"""The transport protocols: how bytes travel between the ranks of one group. Schedules see only these.

A :class:`Transport` has messages of pairs of ranks, driven by the host. A :class:`CollectiveTransport` has collectives in the order of a
device's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

#: Tags in each range (admission). The ranges lie above the tags that programs use and below 2**31.
TAGS_PER_RANGE = 1 << 28
#: Tags for the bodies of announced sends (admission: a body is over long before its tag comes round again).
BODY_TAGS = TAGS_PER_RANGE // 4
#: Tags of one collective (admission: gathers by node have two exchanges, and differences have one before and one after these; all-reduces
#: in two levels have four; then comes the outcome of a call that is checked).
TAGS_PER_COLLECTIVE = 5


class TagRange(IntEnum):
    """First tag of each range that this package uses on a group. Programs may use the tags below all ranges."""

    COLLECTIVE = 1 << 30
    POINT_TO_POINT = COLLECTIVE + TAGS_PER_RANGE
    SHADOW = POINT_TO_POINT + TAGS_PER_RANGE
    #: One tag serves all exchanges of a calibration: messages of a pair of ranks arrive in order. The next one is that of flags of kernels.
    CALIBRATION = SHADOW + TAGS_PER_RANGE
    #: A tag for the body of each announced send, by the number of the send. The range lies in the unused part of the one before.
    BODY = CALIBRATION + TAGS_PER_RANGE // 2


class Transport(Protocol):
    """Messages between this rank and the other ranks of one group, matched by tag. Ranks are group ranks, buffers 1-D uint8 tensors in
    host memory. A receive buffer may be larger than the message, so that no sizes are exchanged. The backend's sums have the order that
    :meth:`ring_chunk` describes, so that ours can have the same bits.

    A posted buffer must live until its handle's ``wait()`` has returned, and a sent buffer must not change until then. All methods raise
    RuntimeError where the backend does.
    """

    def __init__(self, group: dist.ProcessGroup) -> None: ...

    def post_send(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Post the send of all of ``buffer``; does not block."""

    def post_recv(self, buffer: torch.Tensor, peer: int | None, tag: int) -> dist.Work:
        """Post the receive of one message of at most ``buffer``'s size, from any rank if ``peer`` is None; does not block."""

    def ring_chunk(self, op: str, numel: int, itemsize: int) -> int:
        """Return the elements in a chunk of the backend's ring for a sum by ``op`` ("all_reduce" or "reduce") of ``numel`` elements."""

    def ask_flushing(self) -> Callable[[], Sequence[bool]]:
        """Ask each rank whether its backend flushes denormals in sums; once per group, a collective that does not block. The answer, a
        flag for each rank, blocks until all ranks have asked."""

    def timeout(self) -> timedelta:
        """Return the time after which the backend gives an operation up."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the time after which the backend of a group for tensors on ``device`` gives an operation up."""
    default: timedelta = c10d.default_pg_timeout
    try:
        found: timedelta = getattr(group._get_backend(device).options, "_timeout", default)
    except (AttributeError, RuntimeError):  # a backend without options
        return default
    return found


class CollectiveTransport(Protocol):
    """Collectives of one group on tensors of its device. Ranks are group ranks; tensors are flat and contiguous.

    A call puts its work on the current stream of the device, and returns. Every rank calls in one order with equal sizes. All methods raise
    RuntimeError where the backend does.
    """

    def __init__(self, group: dist.ProcessGroup) -> None: ...

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write the parts of all ranks to ``whole``, in their order. ``part`` is the own part of ``whole``, or apart from it."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        """Send the pieces of ``sent`` to the ranks, in their order, and write the pieces for this rank to ``received``. Sizes in elements;
        None: equal pieces."""

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to each rank that is named, and write what arrives from others to theirs; some tensor is received. A tensor may be
        sent to several ranks. All ranks of the group call."""

    def max(self, words: torch.Tensor) -> None:
        """Replace each word by the largest of all ranks."""

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp) -> None:
        """Write the backend's own sum of this rank's part of every rank's ``whole`` to ``part``, which may be the own part."""

    def timeout(self, device: torch.device) -> timedelta:
        """Return the time after which the backend gives an operation up."""
