"""Compressed collectives on plain ``torch.distributed`` groups. Names, argument order and meaning are those of ``torch.distributed``.

Every function takes two more keywords. ``config`` is a :class:`ds_zipccl.config.ZipcclConfig`, which must be equal on all ranks of the
group. ``role`` is one of :data:`ds_zipccl.config.ROLES`, for the policy and the counters. Collectives also take ``uncompressed_call``:
a call that passes runs this function instead of torch.distributed's. :func:`reduce_to_owners` has no counterpart in torch.distributed:
every rank needs only a part of that all-reduce.

``lossy``, equal on all ranks, is the :class:`ds_zipccl.lossy.LossyCodec` that may change the values in the messages of this call; None, the
default: no value changes. Lossy are bfloat16, float16 and float32, on CPUs over gloo and on GPUs over NCCL, from ``min_bytes`` on, moved,
summed or averaged by more than one rank. Other calls stay exact, and the reason is counted. A sum adds contributions that are rounded,
except for the own one, in fp32 in rank order, whatever ``reduction`` is. All ranks have the same bits after an all-reduce or a gather. In
an all-to-all a rank's own segment stays exact.
"""

from ds_zipccl.comm.bases.in_place import IN_PLACE, Base
from ds_zipccl.comm.bases.shared import allocate_bases
from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.device.engine import StreamEngine
from ds_zipccl.comm.engine import calibrate, check_frames, parameter, register
from ds_zipccl.comm.host.engine import MessageEngine
from ds_zipccl.comm.ops.all_gather import all_gather, all_gather_coalesced, all_gather_into_tensor
from ds_zipccl.comm.ops.all_reduce import all_reduce, all_reduce_coalesced
from ds_zipccl.comm.ops.all_to_all import all_to_all, all_to_all_single
from ds_zipccl.comm.ops.broadcast import broadcast
from ds_zipccl.comm.ops.p2p import irecv, isend, recv, send
from ds_zipccl.comm.ops.parameters import agree_sizes
from ds_zipccl.comm.ops.reduce import reduce
from ds_zipccl.comm.ops.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from ds_zipccl.comm.ops.reduce_to_owners import reduce_to_owners
from ds_zipccl.comm.shadow_check import ShadowMismatch
from ds_zipccl.comm.work import CommError, Work

__all__ = [
    "IN_PLACE", "Base", "CommError", "GatheredParameter", "ShadowMismatch", "Work",
    "agree_sizes", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "allocate_bases", "broadcast", "calibrate", "check_frames",
    "irecv", "isend", "parameter", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_to_owners", "send",
]  # fmt: skip

register(MessageEngine())
register(StreamEngine())  # asked first
