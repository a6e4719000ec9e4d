"""Sums as gloo's threads would make them where ``torch.set_flush_denormal`` is in use.

The switch belongs to a thread, and a thread has it from the one that started it. gloo adds on threads that a group starts when it is made;
this package adds on the caller's thread or on threads of its own. So each group is asked once whether its threads flush, by an all-reduce
of denormals through gloo itself, and each addition is then made as the rank would make it that makes it in gloo's ring, on whatever thread.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.reduction_order import all_reduce_chunk, cut

#: Elements of the question for each rank, and the bits of each: a denormal float.
_LANES, _DENORMAL = 64, 1 << 22


class Denormals:
    """Which ranks' gloo threads flush denormals in a group. Made on every rank at the same call of the group; does not block.

    Chunk r of the question is a denormal of rank r and zeros of all others, so that rank r alone adds it to something, or takes it as it
    came: it arrives unless r flushes.
    """

    @tensors.undisturbed()
    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        self._cuts = cut(_LANES * ranks, all_reduce_chunk(_LANES * ranks, 4, ranks), ranks)
        self._answer = tensors.filled(_LANES * ranks, 0, torch.float32)
        self._answer.view(torch.int32)[self._cuts[dist.get_rank(group)]] = _DENORMAL
        self._handle: dist.Work | None = dist.all_reduce(self._answer, group=group, async_op=True)
        self._lock = threading.Lock()

    def flushing_ranks(self) -> list[bool]:
        """Whether each rank of the group flushes; blocks until all ranks have asked.

        Raises:
            RuntimeError: the transport failed.
        """
        with self._lock:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None
        bits = self._answer.view(torch.int32)
        return [not int(bits[span.start]) for span in self._cuts]
