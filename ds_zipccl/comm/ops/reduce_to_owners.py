"""reduce_to_owners: an all-reduce in which each slice of the sum goes only to its owner ranks.

ZeRO-1 and ZeRO-2 all-reduce whole gradient buckets, but each rank keeps only the slices of its own partition. With n ranks an all-reduce
sends 2 (n-1)/n of the bucket from each rank; the owners need half of these bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device import sums
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.levels import levels_of
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.execution import execute, is_small, memory_order, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size, group_streams, is_member
from ds_zipccl.comm.host.pipeline import Fragments, SpanView, open_exchange, run_pipeline
from ds_zipccl.comm.host.sums import open_adder
from ds_zipccl.comm.ops.all_reduce import ReduceScatterGather
from ds_zipccl.comm.reduction_order import Reduction
from ds_zipccl.comm.request import Request, Schedule, lossy_here, set_sum
from ds_zipccl.comm.spans import common, cut, length
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.policy import wire

NAME = "reduce_to_owners"

#: (elements, group ranks of their owners) of each slice, from the start of a tensor to its end.
Owners = Sequence[tuple[int, Collection[int]]]


@dataclass(frozen=True, slots=True)
class _Straight:
    """Every contribution goes to the owners, and the owners sum. ``spans[r]``: the slices that rank r owns."""

    spans: Sequence[Sequence[slice]]
    reduction: Reduction

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole, *_), spans = inputs, self.spans
        own, chunk = spans[ctx.rank], ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
        of_peers = [span for rank, owned in enumerate(spans) if rank != ctx.rank for span in owned]
        # this rank writes its own slices while their other owners may still wait for its contributions
        source = whole.clone() if any(common(own, span) for span in of_peers) else whole
        views = [SpanView(whole if rank == ctx.rank else source, owned) for rank, owned in enumerate(spans)]
        shards = Fragments(ctx, views)
        with open_adder(ctx, shards, self.reduction, own, chunk) as adder:

            def take(step: int) -> None:
                sums, places = adder.take()
                adder.finish(sums)
                for place, part in zip(places, sums.split(list(map(length, places))), strict=True):
                    if whole[place].data_ptr() != part.data_ptr():
                        whole[place].copy_(part)

            run_pipeline(shards.steps, *adder.stages, take)


@dataclass(frozen=True, slots=True)
class _ByShards:
    """Every rank sums a shard of the same size, as in an all-reduce, and sends the sums to their owners only."""

    spans: Sequence[Sequence[slice]]
    reduction: Reduction

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole, *_), spans = inputs, self.spans
        chunk = ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
        slices = cut(whole.numel(), chunk, ctx.size)
        shards = Fragments(ctx, [whole[part] for part in slices], exchanges=2)
        with (
            open_adder(ctx, shards, self.reduction, [slices[ctx.rank]], chunk) as adder,
            open_exchange(ctx, len(adder.stages), exact=True) as coming,  # one rounding, and equal sums at all owners
        ):

            def parts(adding: int, step: int, owner: int) -> list[torch.Tensor]:
                """Return the slices of ``owner`` in the fragment that rank ``adding`` sums in a step."""
                if step >= len(shards[adding]):
                    return []
                begin = slices[adding].start + step * shards[adding][0].numel()
                fragment = slice(begin, begin + shards[adding][step].numel())
                return [whole[part] for part in common(spans[owner], fragment)]

            def add(step: int) -> None:
                coming.next_step()
                for peer in ctx.peers:
                    for part in parts(peer, step, ctx.rank):
                        coming.post_recv(peer, part)
                if step < len(shards[ctx.rank]):
                    adder.take()
                for peer in ctx.peers:
                    for part in parts(ctx.rank, step, peer):
                        coming.send(part, peer)

            def take(step: int) -> None:
                for peer in ctx.peers:
                    for part in parts(peer, step, ctx.rank):
                        coming.recv(peer, part)

            run_pipeline(shards.steps, *adder.stages, add, take)
        for span in spans[ctx.rank]:
            adder.finish(whole[span])


@dataclass(frozen=True, slots=True)
class _ToAll:
    """Every rank gets the whole sum. In two levels this sends less between nodes where slices have several owners in a node."""

    reduction: Reduction

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        ReduceScatterGather(self.reduction, ()).run(ctx, [], inputs)  # the outputs are views of the input


def _schedule(
    spans: Sequence[Sequence[slice]],
    numel: int,
    nodes: Sequence[Sequence[int]],
    reduction: Reduction,
    one_summer: bool = False,
) -> Schedule:
    """Return the schedule of a sum of ``numel`` elements. ``spans[r]``: the slices that rank r owns; ``nodes``: the ranks of each node if
    the sum goes in two levels. Then the links between nodes are the slow ones, and the owners of a node share them. ``one_summer``: one
    rank alone sums an element, because owners that sum by themselves would get different sums: their own part is exact."""
    owned = [sum(map(length, slices)) for slices in spans]
    if nodes:
        owned = [sum(owned[rank] for rank in ranks) for ranks in nodes]
    if one_summer and not _disjoint(spans):
        return _ByShards(spans, reduction)
    if wire.straight_to_owners(owned, numel):
        return _Straight(spans, reduction)
    if nodes and max(owned) > numel:
        return _ToAll(reduction)
    return _ByShards(spans, reduction)


@dataclass(frozen=True, slots=True)
class _ToOwners:
    """A sum of ``numel`` elements for their owners; the other fields are those of :func:`_schedule`. ``disjoint``: no element has two
    owners."""

    spans: Sequence[Sequence[slice]]
    numel: int
    nodes: Sequence[Sequence[int]]
    reduction: Reduction
    disjoint: bool
    op: Any

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        one_summer = ctx.lossy is not None
        _schedule(self.spans, self.numel, self.nodes, self.reduction, one_summer).run(ctx, inputs, outputs)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole,) = inputs
        parts = [Part(*((whole, span) for span in owned)) for owned in self.spans]
        if self.reduction.plain:
            sums.plain_to_owners(ctx, parts, self.op)
            return
        levels = levels_of(ctx, self.nodes)
        owned = [sum(parts[rank].numel for rank in ranks) for ranks in levels.nodes]
        if self.disjoint and wire.straight_to_owners(owned, self.numel):
            sums.reduce_scatter(ctx, levels, parts, parts[ctx.rank], self.reduction.divisor)
        else:
            sums.all_reduce(ctx, levels, [whole], self.reduction.divisor)


def _disjoint(spans: Sequence[Sequence[slice]]) -> bool:
    """Return whether no element has two owners. ``spans[r]``: the slices that rank r owns."""
    found = sorted((span.start, span.stop) for owned in spans for span in owned)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(found))


def reduce_to_owners(
    tensor: torch.Tensor,
    owners: Owners,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
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
    if is_small(tensor, config):
        call = uncompressed_call or (lambda: dist.all_reduce(tensor, op, group))
        pass_small(NAME, role, 2 * sent_to_peers(tensor.nbytes, group), call)
        return
    own, disjoint = spans[rank], _disjoint(spans)
    lossy = lossy_here(lossy, (tensor.dtype, tensor.device), group, NAME, role)

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
        config,
        role,
        plain=plain,
        numel=tensor.numel(),
        sent=2 * tensor.numel() * (ranks - 1) / ranks,
        uncompressed_call=uncompressed_call,
        memory_order=True,
        sends_less=True,
        lossy=lossy,
    )
    reduction, _, nodes = set_sum(request, op)
    request.plain_sums = reduction.plain and not (disjoint and group_streams(group, tensor.device.type))
    execute(decide(request), request, _ToOwners(spans, tensor.numel(), nodes, reduction, disjoint, op))


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


def _parts(tensor: torch.Tensor, spans: Sequence[slice]) -> list[torch.Tensor]:
    """Return flat views of the slices of ``tensor`` in memory order."""
    flat = memory_order(tensor.detach())
    return [flat[span] for span in spans]
