"""gloo: messages by paired sends and receives in host memory, matched by tag; sums in the order of its rings.

A receive buffer may be larger than the message. So a receive is posted with the largest size of the frame, and ranks exchange no sizes:
the frame's header has the true length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.transport.protocol import timeout_of

#: gloo's largest segment, in bytes (admission: part of the geometry of gloo's rings).
_SEGMENT_BYTES = 1 << 20
#: Elements for each rank in the all-reduce that asks for denormals; the bit pattern of each element, a denormal float.
_STREAMS, _DENORMAL = 64, 1 << 22


class GlooTransport:
    """:class:`ds_zipccl.comm.transport.Transport` over the caller's own gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def post_send(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return self._group.send([buffer], peer, tag)

    def post_recv(self, buffer: torch.Tensor, peer: int | None, tag: int) -> dist.Work:
        return self._group.recv_anysource([buffer], tag) if peer is None else self._group.recv([buffer], peer, tag)

    def ring_chunk(self, op: str, numel: int, itemsize: int) -> int:
        chunk = {"all_reduce": all_reduce_chunk, "reduce": reduce_chunk}[op]
        return chunk(numel, itemsize, self._group.size())

    def ask_flushing(self) -> Callable[[], Sequence[bool]]:
        return Denormals(self._group).flushing_ranks

    def timeout(self) -> timedelta:
        return timeout_of(self._group, torch.device("cpu"))


def _ceil(count: int, unit: int) -> int:
    return (count + unit - 1) // unit


def _up(count: int, unit: int) -> int:
    return _ceil(count, unit) * unit


def all_reduce_chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Return the elements in a chunk of gloo's ring all-reduce and reduce-scatter."""
    total = numel * itemsize
    segments = _up(max(_ceil(total, _SEGMENT_BYTES), 2 * ranks), ranks)
    segment = _up(_ceil(total, segments), itemsize)
    return segments // ranks * segment // itemsize


def reduce_chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Return the elements in a chunk of gloo's ring reduce."""
    total = numel * itemsize
    segment = _up(max(1, min(_ceil(total, 2 * ranks), _SEGMENT_BYTES)), itemsize)
    segments = _up(max(_ceil(total, segment), 2 * ranks), ranks)
    return segments // ranks * segment // itemsize


class Denormals:
    """The ranks whose gloo threads flush denormals. Every rank makes this object at the same call of the group; making does not block.

    ``torch.set_flush_denormal`` is a switch of each thread. A thread inherits the switch from the thread that started it. gloo adds on
    threads that start with the group; this package adds on the caller's thread or on its own threads. So each group runs one all-reduce of
    denormals through gloo. Each of our additions then flushes exactly if the rank that makes the same addition in gloo's ring flushes.

    Chunk r of the all-reduce is denormals on rank r and zeros on all other ranks. Only rank r adds the denormals of chunk r, or copies them
    as they are: they arrive unless rank r flushes.
    """

    @tensors.undisturbed()
    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        self._cuts = cut(_STREAMS * ranks, all_reduce_chunk(_STREAMS * ranks, 4, ranks), ranks)
        self._answer = tensors.filled(_STREAMS * ranks, 0, torch.float32)
        self._answer.view(torch.int32)[self._cuts[dist.get_rank(group)]] = _DENORMAL
        self._handle: dist.Work | None = dist.all_reduce(self._answer, group=group, async_op=True)
        self._flushing: list[bool] = []
        self._lock = threading.Lock()

    def flushing_ranks(self) -> list[bool]:
        """See :meth:`ds_zipccl.comm.transport.protocol.Transport.ask_flushing`."""
        with self._lock:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None
                bits = self._answer.view(torch.int32)
                self._flushing = [not int(bits[span.start]) for span in self._cuts]
        return self._flushing
