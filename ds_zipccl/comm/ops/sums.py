"""Collectives that add: all-reduce, reduce, reduce-scatter.

Frames go to the rank that adds, which decodes and folds them in a documented order (:mod:`ds_zipccl.comm.reduction_order`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.execution import (
    Call,
    Operation,
    group_rank,
    is_member,
    is_small,
    others,
    pass_small,
    reduce_op_name,
    run,
)
from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.group_state import known, resolved, size_of
from ds_zipccl.comm.ops.moves import split
from ds_zipccl.comm.reduction_order import Reduction, all_reduce_chunk, cut, reduce_chunk, within
from ds_zipccl.comm.schedules.gather import detached
from ds_zipccl.comm.schedules.pipeline import Pieces, Round, posting, pump
from ds_zipccl.comm.shadow_check import Plain, Tolerance
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.all_reduce``: in place, the same bits on every rank."""
    call = Call(group, async_op, config, role)
    if is_small(tensor, config):
        return pass_small(
            "all_reduce", call, 2 * others(tensor.nbytes, group), lambda: dist.all_reduce(tensor, op, group, async_op)
        )
    return _all_reduce_tensors(
        "all_reduce",
        [tensor],
        lambda inputs, outputs, later: dist.all_reduce(outputs[0], op, group, later),
        op,
        call,
    )


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.all_reduce_coalesced``: one all-reduce over the tensors laid end to end, in place."""

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handle = dist.all_reduce_coalesced(list(outputs), op, group, later)
        return JoinedWork("all_reduce_coalesced", [handle], outputs) if handle is not None else None

    return _all_reduce_tensors("all_reduce_coalesced", tensors, plain, op, Call(group, async_op, config, role))


def _all_reduce_tensors(name: str, tensors: Sequence[torch.Tensor], plain: Plain, op: Any, call: Call) -> Any:
    ranks = size_of(call.group)
    reduction, tolerance = arithmetic(tensors, op, call.group, call.config)

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        chunk = all_reduce_chunk(whole.numel(), whole.element_size(), ranks)
        slices = cut(whole.numel(), chunk, ranks)
        shards = Pieces(link, [whole[part] for part in slices], rounds=2)
        with posting(link, 0) as leaving, posting(link, 1) as coming:
            adding = Adding(link, leaving, shards, reduction, [slices[link.rank]], chunk)

            def add(turn: int) -> None:
                coming.turn()
                places = shards.at(turn)
                for peer in link.peers:
                    coming.expect(peer, places[peer])
                adding.take(places[link.rank])
                coming.send(places[link.rank], *link.peers)

            def take(turn: int) -> None:
                for peer in link.peers:
                    coming.receive(peer, shards.at(turn)[peer])

            pump(shards.turns, adding.post, add, take)
        adding.finish(whole)
        if len(outputs) > 1:
            for flat, part in zip(outputs, whole.split([flat.numel() for flat in outputs]), strict=True):
                flat.copy_(part)

    numel = sum(tensor.numel() for tensor in tensors)
    operation = Operation(
        name=name,
        inputs=[],
        outputs=tensors,
        plain=plain,
        coded=coded,
        numel=numel,
        sent=2 * numel * (ranks - 1) / ranks,
        reduce_op=op,
        tolerance=tolerance,
        memory_order=name == "all_reduce",  # plain ones of several tensors lay copies end to end
    )
    return run(operation, call)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.reduce``: the sum goes in place to global rank ``dst`` (or group rank); other ranks keep theirs."""
    if not is_member(group):
        return dist.reduce(tensor, dst, op, group, async_op)
    root = group_rank(group, dst, group_dst)
    root_globally = dist.get_global_rank(resolved(group), root)
    adds = dist.get_rank(group) == root
    reduction, tolerance = arithmetic([tensor], op, group, config)

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        flat = [*inputs, *outputs][0]
        chunk = reduce_chunk(flat.numel(), flat.element_size(), link.size)
        # one shard: all of it is the root's
        shards = [flat if rank == root else flat[:0] for rank in range(link.size)]
        _reduce_scatter(link, shards, flat if adds else flat[:0], reduction, slice(0, flat.numel()), chunk)

    operation = Operation(
        name="reduce",
        inputs=[] if adds else [tensor],
        outputs=[tensor] if adds else [],
        plain=lambda inputs, outputs, later: dist.reduce([*inputs, *outputs][0], root_globally, op, group, later),
        coded=coded,
        numel=tensor.numel(),
        sent=tensor.numel() * (not adds),
        reduce_op=op,
        tolerance=tolerance,
        memory_order=True,
    )
    return run(operation, Call(group, async_op, config, role))


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.reduce_scatter_tensor``: the output of rank r is the sum of all shards r of the inputs.

    The output may be the own shard of the input.
    """
    call = Call(group, async_op, config, role)
    if is_small(input, config):
        return pass_small(
            "reduce_scatter_tensor",
            call,
            others(input.nbytes, group),
            lambda: dist.reduce_scatter_tensor(output, input, op, group, async_op),
        )
    ranks = size_of(group)
    reduction, tolerance = arithmetic([output], op, group, config)

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        chunk = all_reduce_chunk(inputs[0].numel(), inputs[0].element_size(), ranks)
        begin = link.rank * outputs[0].numel()
        span = slice(begin, begin + outputs[0].numel())
        _reduce_scatter(link, split(inputs[0], ranks), outputs[0], reduction, span, chunk)

    wrong = output.numel() * ranks != input.numel()
    operation = Operation(
        name="reduce_scatter_tensor",
        inputs=[input],
        outputs=[output],
        plain=lambda inputs, outputs, later: dist.reduce_scatter_tensor(outputs[0], inputs[0], op, group, later),
        coded=coded,
        flat=True,
        numel=input.numel(),
        sent=input.numel() * (ranks - 1) / ranks,
        problem=f"input must have {ranks} times {output.numel()} elements of output, got {input.numel()}"
        if wrong
        else "",
        reduce_op=op,
        tolerance=tolerance,
    )
    return run(operation, call)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.reduce_scatter``: the output of rank r is the sum of all ``input_list[r]``; sizes may differ."""
    ranks, rank = size_of(group), dist.get_rank(group)
    reduction, tolerance = arithmetic([output], op, group, config)

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        # gloo all-reduces each tensor of the list by itself: every shard has a grid of its own
        chunk = all_reduce_chunk(outputs[0].numel(), outputs[0].element_size(), ranks)
        _reduce_scatter(link, inputs, outputs[0], reduction, slice(0, outputs[0].numel()), chunk)

    sizes = [tensor.numel() for tensor in input_list]
    wrong = len(sizes) != ranks or sizes[rank] != output.numel()
    operation = Operation(
        name="reduce_scatter",
        inputs=input_list,
        outputs=[output],
        plain=lambda inputs, outputs, later: dist.reduce_scatter(outputs[0], list(inputs), op, group, later),
        coded=coded,
        numel=sum(sizes),
        sent=sum(sizes) * (ranks - 1) / ranks,
        problem=f"input_list must have {ranks} tensors, the one of this rank of {output.numel()} elements, got {sizes}"
        if wrong
        else "",
        reduce_op=op,
        tolerance=tolerance,
    )
    return run(operation, Call(group, async_op, config, role))


def _reduce_scatter(
    link: Link, shards: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction, span: slice, chunk: int
) -> None:
    sources, places = Pieces(link, detached(shards, [out], [out] * len(shards))), Pieces(link, [out])
    with posting(link) as exchange:
        adding = Adding(link, exchange, sources, reduction, [span], chunk)

        def take(turn: int) -> None:
            adding.take(places.at(turn)[0])

        pump(sources.turns, adding.post, take)
    adding.finish(out)


class Adding:
    """Sends every peer its shard and sums what comes for the own one, a piece a turn.

    ``spans``: what the own shard is of the message, laid end to end; ``chunk``: the size of the message's chunks, in elements.
    """

    def __init__(
        self, link: Link, exchange: Round, shards: Pieces, reduction: Reduction, spans: Sequence[slice], chunk: int
    ) -> None:
        self._link, self._exchange, self._shards, self._reduction = link, exchange, shards, reduction
        self._spans, self._chunk = spans, chunk
        self._own: deque[torch.Tensor] = deque()  # posted and not taken yet
        self._taken = 0  # elements

    def post(self, turn: int) -> None:
        self._exchange.turn()
        pieces = self._shards.at(turn)
        self._own.append(pieces[self._link.rank])
        for peer in self._link.peers:
            self._exchange.expect(peer, pieces[self._link.rank])
        self._exchange.scatter(pieces, self._link.peers[::-1])

    def take(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, list[slice]]:
        """Write the sum of the next piece into ``out``, which may be the own piece, as it is if None.

        Returns:
            The sum, and what it is of the message.
        """
        own = self._own.popleft()
        out = own if out is None else out
        begin, self._taken = self._taken, self._taken + out.numel()
        spans = within(self._spans, begin, self._taken)
        if out.numel():  # a rank that adds nothing needs nothing of others
            received = _Received(self._link, self._exchange, own)
            self._reduction.fold(received, out, spans, self._chunk, self._link.flushing_ranks())
        return out, spans

    def finish(self, out: torch.Tensor) -> None:
        """Turn sums into averages where these are wanted."""
        if out.numel():
            self._reduction.finish(out, self._link.flushing_ranks()[self._link.rank])


class _Received:
    """:class:`ds_zipccl.comm.reduction_order.Contributions`: the own one as it is, those of peers decoded from their frames."""

    def __init__(self, link: Link, exchange: Round, own: torch.Tensor) -> None:
        self._link, self._exchange, self.rank, self.own = link, exchange, link.rank, own

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        return self.own if rank == self.rank else self._exchange.receive(rank, into)

    def add(self, rank: int, sums: torch.Tensor) -> None:
        if rank == self.rank:
            self._link.add(self.own, sums)
        else:
            self._exchange.receive_add(rank, self.own.dtype, sums)

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        self._link.add(taken, sums)


def arithmetic(
    tensors: Sequence[torch.Tensor], op: Any, group: dist.ProcessGroup | None, config: ZipcclConfig
) -> tuple[Reduction, Tolerance]:
    """The arithmetic that the config asks for, and how near it comes to the plain backend's."""
    members = known(group)
    if members is None:
        return Reduction("fp32", "", -1), "nan"  # never used
    device = tensors[0].device.type if tensors else ""
    return _exactness(config.reduction, members.backend(device), reduce_op_name(op), members.size)


@functools.lru_cache
def _exactness(kind: str, backend: str, op: str, ranks: int) -> tuple[Reduction, Tolerance]:
    if kind == "auto":
        kind = "match" if backend == "gloo" else "fp32"
    exact = kind == "match" or (ranks == 2 and op == "SUM")
    return Reduction(kind, op, ranks), "nan" if exact else "rounding"
