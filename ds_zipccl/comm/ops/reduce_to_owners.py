"""reduce_to_owners: an all-reduce in which each slice of the sum goes only to its owner ranks.

ZeRO-1 and ZeRO-2 all-reduce whole gradient buckets, but each rank keeps only the slices of its own partition. With n ranks an all-reduce
sends 2 (n-1)/n of the bucket from each rank; the owners need half of these bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.codecs.memory import flat_view
from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_size, is_member
from ds_zipccl.comm.reduction_order import Owned, Sum
from ds_zipccl.comm.request import CallOptions, Options, Request, is_small
from ds_zipccl.comm.work import JoinedWork

NAME = "reduce_to_owners"

#: (elements, group ranks of their owners) of each slice, from the start of a tensor to its end.
Owners = Sequence[tuple[int, Collection[int]]]


def reduce_to_owners(
    tensor: torch.Tensor,
    owners: Owners,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    **options: Unpack[Options],
) -> None:
    """``torch.distributed.all_reduce`` in place, in which every rank needs only the slices that it owns. Blocks.

    The slices that this rank owns then equal those of :func:`ds_zipccl.comm.all_reduce`, bit for bit; averages that are NaN may be
    another NaN. Only sums that NCCL adds, in a node or with ``reduction`` plain, may have another order. The other slices are undefined:
    unchanged, or sums.

    Args:
        tensor: dense, of any shape: slices follow each other in memory.
        owners: the slices of ``tensor``. A slice may have several owners, or none. All ranks give the same owners to each element;
            the borders of the slices may differ.

    Raises:
        ValueError: the tensor is not dense, the slices do not add up to the tensor, or an owner is no rank of the group. Nothing was
            sent.
        CommError: as :func:`ds_zipccl.comm.execution.execute`.
    """
    if not is_member(group):
        dist.all_reduce(tensor, op, group)
        return
    ranks, rank = group_size(group), dist.get_rank(group)
    spans = spans_of(tensor, owners, ranks)
    call = CallOptions(**options)
    if is_small(tensor, call.config):
        pass_small(NAME, call, tensor.nbytes, group, lambda: dist.all_reduce(tensor, op, group))
        return
    own = spans[rank]

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        dist.all_reduce(inputs[0], op, group)
        for output, part in zip(outputs, _parts(inputs[0], own), strict=True):
            if output.data_ptr() != part.data_ptr():
                output.copy_(part)
        return JoinedWork(NAME, [], outputs) if later else None

    request = Request(
        NAME,
        [tensor],
        _parts(tensor, own),
        group,
        False,
        call,
        plain=plain,
        numel=tensor.numel(),
        sum=Sum(op, Owned(spans, _disjoint(spans))),
    )
    run(request)


def spans_of(tensor: torch.Tensor, owners: Owners, ranks: int) -> list[list[slice]]:
    """Return the slices of ``tensor`` that each rank owns, in elements in memory order. Adjacent slices are joined.

    Raises:
        ValueError: as :func:`reduce_to_owners`.
    """
    if tensor.layout != torch.strided or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        shape = f"shape {tuple(tensor.shape)}" + (
            f" and strides {tensor.stride()}" if tensor.layout == torch.strided else ""
        )
        raise ValueError(
            f"{NAME}: wanted a dense tensor, got one of layout {tensor.layout}, {shape}; make it contiguous"
        )
    spans: list[list[slice]] = [[] for _ in range(ranks)]
    end = 0
    for numel, ranks_of_part in owners:
        begin, end = end, end + numel
        if numel < 0 or not all(0 <= owner < ranks for owner in ranks_of_part):
            wanted = f"0 or more elements and owners from 0 to {ranks - 1}"
            raise ValueError(f"{NAME}: wanted {wanted} (ranks of the group), got {numel} of {sorted(ranks_of_part)}")
        for owner in set(ranks_of_part) if numel else ():
            owned = spans[owner]
            if owned and owned[-1].stop == begin:
                owned.append(slice(owned.pop().start, end))
            else:
                owned.append(slice(begin, end))
    if end != tensor.numel():
        raise ValueError(f"{NAME}: parts must add up to the tensor's {tensor.numel()} elements, got {end}")
    return spans


def _disjoint(spans: Sequence[Sequence[slice]]) -> bool:
    """Return whether no element has two owners. ``spans[r]``: the slices that rank r owns."""
    found = sorted((span.start, span.stop) for owned in spans for span in owned)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(found))


def _parts(tensor: torch.Tensor, spans: Sequence[slice]) -> list[torch.Tensor]:
    """Return flat views of the slices of ``tensor`` in memory order."""
    flat = flat_view(tensor)
    return [flat[span] for span in spans]
