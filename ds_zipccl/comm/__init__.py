"""Coded collectives on plain ``torch.distributed`` groups: its names, its argument order, its meaning, fewer bytes.

Every function takes two more keywords: ``config``, a :class:`ds_zipccl.config.ZipcclConfig` that must be equal on all ranks of
the group, and ``role``, one of :data:`ds_zipccl.config.ROLES`, for the policy and the statistics. Calls that the policy does not
code go to ``torch.distributed`` unchanged. :func:`reduce_to_owners` has no counterpart there: an all-reduce of which every rank needs a
part only.
"""

from ds_zipccl.comm.delta.negotiation import IN_PLACE, Base
from ds_zipccl.comm.delta.shared_base import Stored, keep
from ds_zipccl.comm.group_state import calibrate
from ds_zipccl.comm.ops.moves import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    broadcast,
)
from ds_zipccl.comm.ops.p2p import irecv, isend, recv, send
from ds_zipccl.comm.ops.reduce_to_owners import reduce_to_owners
from ds_zipccl.comm.ops.sums import all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor
from ds_zipccl.comm.shadow_check import ShadowMismatch
from ds_zipccl.comm.work import CommError, Work

__all__ = [
    "IN_PLACE",
    "Base",
    "CommError",
    "ShadowMismatch",
    "Stored",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "calibrate",
    "irecv",
    "isend",
    "keep",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_to_owners",
    "send",
]
