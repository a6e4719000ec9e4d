"""reduce_to_owners: an all-reduce in which each slice of the sum goes only to its owner ranks.

ZeRO-1 and ZeRO-2 all-reduce whole gradient buckets, but each rank keeps only the slices of its own partition. With n ranks an all-reduce
sends 2 (n-1)/n of the bucket from each rank; the owners need half of these bytes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.codecs.memory import flat_view
from ds_zipccl.comm import engine
from ds_zipccl.comm.decision import Choice, decide
from ds_zipccl.comm.execution import execute, pass_small
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.reduction_order import Owned, Sum
from ds_zipccl.comm.request import CallOptions, Options, Request, is_small
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.policy.admission import Decision, PassReason

NAME = "reduce_to_owners"

#: (elements, group ranks of their owners) of each slice, from the start of a tensor to its end.
Owners = Sequence[tuple[int, Collection[int]]]

_DIFFER = Choice(Decision.passing(PassReason.OWNERS))


class _Owners:
    """Whether the ranks of a group have ever given different owners, as all of them know: then they do not compare any more."""

    differ = False


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

    No rank can know that the others give the same owners, and no schedule but an all-reduce ends where they do not. So ranks compare them
    before each coded call. Once they differ, this call and all later ones of the group are plain all-reduces, whose sums are right for any
    owners, and the first rank of the group prints a line.

    Args:
        tensor: dense, of any shape: slices follow each other in memory.
        owners: the slices of ``tensor``. A slice may have several owners, or none. All ranks should give the same owners to each
            element; the borders of the slices may differ.

    Raises:
        ValueError: the tensor is not dense, the slices do not add up to the tensor, or an owner is no rank of the group. Nothing was
            sent.
        CommError: as :func:`ds_zipccl.comm.execution.execute`.
    """
    state = group_state(group)
    if state is None:
        dist.all_reduce(tensor, op, group)
        return
    spans = spans_of(tensor, owners, state.size)
    call = CallOptions(**options)
    if is_small(tensor, call.config):
        pass_small(NAME, call, tensor.nbytes, group, lambda: dist.all_reduce(tensor, op, group))
        return
    own = spans[state.rank]

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
    ranks = state.of(_Owners)
    choice = _DIFFER if ranks.differ else decide(request)
    if choice.decision.frames:
        digest = int.from_bytes(hashlib.blake2b(repr((request.numel, spans)).encode(), digest_size=7).digest(), "big")
        largest = engine.engine_for(request).largest(request, digest, -digest)
        ranks.differ = largest[0] != -largest[1]
        if ranks.differ:
            choice = _DIFFER
            if state.rank == 0:
                print(f"[ds_zipccl] {call.role}: {_DIFFER.decision.reason}, sums of this group stay plain", flush=True)
        elif request.sum.reduction.plain and not request.sum.owned.disjoint:
            choice = Choice(Decision.passing(PassReason.PLAIN_SUMS))
    execute(choice, request)


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
