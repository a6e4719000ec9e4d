"""All-reduce for those who keep a part of the result only: every part goes to the ranks that own it, and to no other.

ZeRO-1 and ZeRO-2 all-reduce whole buckets of gradients, of which each rank keeps the slices of its own partition. With n ranks an
all-reduce sends 2 (n-1)/n of the bucket from each rank; what owners need is half of that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.execution import Call, Operation, is_member, is_small, memory_order, others, pass_small, run
from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.group_state import size_of
from ds_zipccl.comm.ops.sums import Adding, arithmetic
from ds_zipccl.comm.reduction_order import Reduction, all_reduce_chunk, cut
from ds_zipccl.comm.schedules.pipeline import Laid, Pieces, posting, pump
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.policy import wire

NAME = "reduce_to_owners"

#: (elements, group ranks that own them), from the start of a tensor to its end.
Owned = Sequence[tuple[int, Collection[int]]]


def reduce_to_owners(
    tensor: torch.Tensor,
    owned: Owned,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> None:
    """``torch.distributed.all_reduce`` in place, of which every rank needs only the parts that it owns. Blocks.

    What this rank owns is afterwards what :func:`ds_zipccl.comm.all_reduce` makes of it, bit for bit; averages that are NaN may be
    another NaN. The rest is undefined: as it was, or sums.

    Args:
        tensor: dense, of any shape: parts follow each other in memory.
        owned: its parts. A part may have several owners, or none. All ranks give the same owners to each element; where they cut parts
            does not matter.

    Raises:
        ValueError: the tensor is not dense, the parts do not add up to it, or an owner is no rank of the group; nothing was sent.
        CommError: as :func:`ds_zipccl.comm.execution.run`.
    """
    if not is_member(group):
        dist.all_reduce(tensor, op, group)
        return
    ranks, rank = size_of(group), dist.get_rank(group)
    spans = spans_of(tensor, owned, ranks)
    call = Call(group, False, config, role)
    if is_small(tensor, config):
        sent = 2 * others(tensor.nbytes, group)
        pass_small(NAME, call, sent, lambda: dist.all_reduce(tensor, op, group))
        return
    mine = spans[rank]
    reduction, tolerance = arithmetic([tensor], op, group, config)

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        dist.all_reduce(inputs[0], op, group)
        for output, part in zip(outputs, _parts(inputs[0], mine), strict=True):
            if output.data_ptr() != part.data_ptr():
                output.copy_(part)
        return JoinedWork(NAME, [], outputs) if later else None

    straight = wire.straight_to_owners([sum(map(_length, theirs)) for theirs in spans], tensor.numel())

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (_straight if straight else _by_shards)(link, inputs[0], spans, reduction)

    operation = Operation(
        name=NAME,
        inputs=[tensor],
        outputs=_parts(tensor, mine),
        plain=plain,
        coded=coded,
        numel=tensor.numel(),
        sent=2 * tensor.numel() * (ranks - 1) / ranks,
        sends_less=True,
        reduce_op=op,
        tolerance=tolerance,
        memory_order=True,
    )
    run(operation, call)


def _straight(link: Link, whole: torch.Tensor, spans: Sequence[Sequence[slice]], reduction: Reduction) -> None:
    """Every contribution goes to the owners, who add."""
    mine, chunk = spans[link.rank], all_reduce_chunk(whole.numel(), whole.element_size(), link.size)
    others = [span for rank, theirs in enumerate(spans) if rank != link.rank for span in theirs]
    # other owners of what is written here may still wait for it
    source = whole.clone() if any(_common(mine, span) for span in others) else whole
    shards = Pieces(link, [Laid(whole if to == link.rank else source, theirs) for to, theirs in enumerate(spans)])
    with posting(link) as exchange:
        adding = Adding(link, exchange, shards, reduction, mine, chunk)

        def take(turn: int) -> None:
            sums, places = adding.take()
            adding.finish(sums)
            for place, part in zip(places, sums.split(list(map(_length, places))), strict=True):
                if whole[place].data_ptr() != part.data_ptr():
                    whole[place].copy_(part)

        pump(shards.turns, adding.post, take)


def _by_shards(link: Link, whole: torch.Tensor, spans: Sequence[Sequence[slice]], reduction: Reduction) -> None:
    """Every rank adds a shard of the same size, as in an all-reduce, and sends the sums to their owners only."""
    chunk = all_reduce_chunk(whole.numel(), whole.element_size(), link.size)
    slices = cut(whole.numel(), chunk, link.size)
    shards = Pieces(link, [whole[part] for part in slices], rounds=2)
    with posting(link, 0) as leaving, posting(link, 1) as coming:
        adding = Adding(link, leaving, shards, reduction, [slices[link.rank]], chunk)

        def parts(adder: int, turn: int, owner: int) -> list[torch.Tensor]:
            """What ``owner`` owns of a piece that ``adder`` adds."""
            if turn >= len(shards[adder]):
                return []
            begin = slices[adder].start + turn * shards[adder][0].numel()
            piece = slice(begin, begin + shards[adder][turn].numel())
            return [whole[part] for part in _common(spans[owner], piece)]

        def add(turn: int) -> None:
            coming.turn()
            for peer in link.peers:
                for part in parts(peer, turn, link.rank):
                    coming.expect(peer, part)
            if turn < len(shards[link.rank]):
                adding.take()
            for peer in link.peers:
                for part in parts(link.rank, turn, peer):
                    coming.send(part, peer)

        def take(turn: int) -> None:
            for peer in link.peers:
                for part in parts(peer, turn, link.rank):
                    coming.receive(peer, part)

        pump(shards.turns, adding.post, add, take)
    for span in spans[link.rank]:
        adding.finish(whole[span])


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _common(spans: Sequence[slice], part: slice) -> list[slice]:
    """What of ``part`` is in one of ``spans``."""
    return [
        slice(max(span.start, part.start), min(span.stop, part.stop))
        for span in spans
        if span.start < part.stop and part.start < span.stop
    ]


def spans_of(tensor: torch.Tensor, owned: Owned, ranks: int) -> list[list[slice]]:
    """What each rank owns of ``tensor``, in elements in the order of memory, in as few spans as can be.

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
    for numel, owners in owned:
        begin, end = end, end + numel
        if numel < 0 or not all(0 <= owner < ranks for owner in owners):
            wanted = f"0 or more elements and owners from 0 to {ranks - 1}"
            raise ValueError(f"{NAME}: wanted {wanted} (ranks of the group), got {numel} of {sorted(owners)}")
        for owner in set(owners) if numel else ():
            theirs = spans[owner]
            if theirs and theirs[-1].stop == begin:
                begins = theirs.pop().start
                theirs.append(slice(begins, end))
            else:
                theirs.append(slice(begin, end))
    if end != tensor.numel():
        raise ValueError(f"{NAME}: parts must add up to the tensor's {tensor.numel()} elements, got {end}")
    return spans


def _parts(tensor: torch.Tensor, spans: Sequence[slice]) -> list[torch.Tensor]:
    """Flat views."""
    flat = memory_order(tensor.detach())
    return [flat[span] for span in spans]
