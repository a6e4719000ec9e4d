"""Owners of the slices of gradient buckets, for ZeRO-1 and ZeRO-2: the call of the all-reduce does not tell them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.ops.reduce_to_owners import Owners
from ds_zipccl.integration import hints, hook_points

#: Reason why a gradient sum without owners goes to all ranks.
UNKNOWN = "the owners of the bucket are not known"


@dataclass(frozen=True)
class Bucket:
    """A gradient bucket that is about to be all-reduced over ``group``: the sizes of its slices and their owners."""

    group: dist.ProcessGroup
    owned: Owners

    def fits(self, tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> bool:
        """Whether an all-reduce with these arguments is the all-reduce of this bucket."""
        same = group is self.group and sum(numel for numel, _ in self.owned) == tensor.numel()
        return same and op == dist.ReduceOp.SUM and not async_op


def reduce(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the owners of a bucket that ``DeepSpeedZeroOptimizer`` reduces.

    ``allreduce_and_copy_with_multiple_ranks`` copies its tensors end to end, in the communication dtype, and all-reduces the copy. Then it
    reads the sums of those tensors whose ``bucket_ranks`` include this rank, adds them to this rank's partition and copies them back.
    A bucket of one tensor is the gradient itself, not a copy. There a rank that does not own the gradient keeps its own values instead of
    the sum. It does so in every bucket of several tensors too, hence nothing in DeepSpeed may rely on the sum. Everything but the
    all-reduce remains DeepSpeed's code.

    Some sums still go to all ranks, and :func:`ds_zipccl.telemetry.counters.record_whole` counts them. With ``reduce_scatter`` false, with
    ``contiguous_gradients`` false and in the BF16 optimizer, other methods reduce and copy the whole bucket back; the BF16 optimizer
    computes its gradient norm over the whole bucket. ZenFlow reads gradients outside of its partition. ``use_multi_rank_bucket_allreduce``
    false needs nothing: it reduces to owners by itself.
    """
    given = hook_points.arguments(original, optimizer, *args, **kwargs)
    group, ranks_of_slices = given.get("process_group"), given.get("bucket_ranks")
    bucket = []
    if ranks_of_slices is not None and not getattr(optimizer, "zenflow", False):
        sizes = [tensor.numel() for tensor in given["small_bucket"]]
        owners = [ranks if isinstance(ranks, frozenset) else frozenset((ranks,)) for ranks in ranks_of_slices]
        group = optimizer.dp_process_group if group is None else group
        bucket = [Bucket(group, list(zip(sizes, owners, strict=True)))]
    with hints.hinting(bucket=bucket):
        return original(optimizer, *args, **kwargs)


def take_owners(tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> Owners | None:
    """Return the owner ranks of each slice of a gradient bucket, or None if every rank needs the full sum.

    The arguments are those of an all-reduce. A bucket serves one all-reduce: after the call its owners are forgotten, whether they
    fitted or not.
    """
    coming = hints.current().bucket
    bucket: Bucket | None = coming.pop() if coming else None
    return bucket.owned if bucket is not None and bucket.fits(tensor, op, group, async_op) else None
