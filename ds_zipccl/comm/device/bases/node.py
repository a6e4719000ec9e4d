"""Bases that the devices of a node keep together: each has the shards of its rank and of its rank's peers, the ranks of the same local rank
on other nodes. A copy is an exchange inside the node, over NVLink or PCIe; nothing is sent between nodes.

It is the layout of ZeRO++'s secondary partition (hpZ), with the words of the gathers themselves. A rank's own shard is in its own memory:
a difference, the sizes of differences and the comparison with the shard read it there. Where all parameters of a gather are copies, and
nodes are few, the rows of each node come by an exchange of their own straight into the output. Otherwise one exchange brings the rows of
all nodes to a staging buffer, with the parameters that are read side by side.

The ranks of a node hold different shards, and those of one local rank hold equal ones: so each local rank has a proof of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs.known import key_words
from ds_zipccl.comm.bases.shared import BaseSlot, copy_others
from ds_zipccl.comm.device import gather
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.reports import WRONG_COPY
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import hash_key
from ds_zipccl.comm.topology import Levels, grid

#: A base, and the rows of its parameter in an output, ``[ranks, numel]``.
_Read = tuple[BaseSlot, torch.Tensor]


def copy_whole(ctx: DeviceContext, bases: Sequence[_Read], shard: Shard) -> None:
    """Give an output the shards of all other ranks from bases of all its parameters. The decoding stream follows.

    The ranks of the node get the own shard from its place in the output, where it is put: it has the words of the base, unless it was
    changed behind our back, which :func:`.proof.watch` reports.
    """
    levels = _levels(bases)
    with ctx.streams.on(Stage.ENCODE):
        for base, rows in bases:
            copy_others(base.memory, grid(rows, levels.nodes)[:, levels.local_rank], levels.node)
        rows = shard.whole.view(ctx.size, -1)
        if shard.own.data_ptr() != rows[ctx.rank].data_ptr():
            rows[ctx.rank].copy_(shard.own)
    with ctx.streams.wire():
        gather.forward(ctx, rows.unbind(), levels, levels.nodes)


def copy_columns(ctx: DeviceContext, bases: Sequence[_Read]) -> None:
    """Give the rows of some parameters of an output the shards of all other ranks from their bases. The decoding stream follows."""
    levels = _levels(bases)
    mine, ranks = levels.local_rank, levels.node_ranks
    for some in _columns(ctx, bases):
        dtype = some[0][1].dtype
        ends = list(itertools.accumulate((rows.shape[1] for _, rows in some), initial=0))
        spans = list(itertools.pairwise(ends))
        with ctx.streams.staging(ctx.size * ends[-1] * dtype.itemsize, ctx.budget) as staging:
            table = staging.view(dtype).view(len(ranks), len(levels.nodes), ends[-1])
            with ctx.streams.on(Stage.ENCODE):
                for (words, _), (begin, end) in zip(some, spans, strict=True):
                    table[mine, :, begin:end].copy_(words)
            with ctx.streams.wire():
                coming = {rank: part for rank, part in zip(ranks, table.flatten(1), strict=True) if rank != ctx.rank}
                ctx.transport.exchange(coming, dict.fromkeys(coming, table[mine].view(-1)))
            with ctx.streams.on(Stage.DECODE):
                for (_, rows), (begin, end) in zip(some, spans, strict=True):
                    read, places = table[:, :, begin:end].transpose(0, 1), grid(rows, levels.nodes)
                    copy_others(read, places, levels.node)
                    copy_others(read[levels.node], places[levels.node], mine)


def _columns(ctx: DeviceContext, bases: Sequence[_Read]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the words of bases and the rows for them, in parts of which two fill the memory for staging buffers at most."""
    dtype = bases[0][1].dtype
    most = max(1, ctx.budget // 2 // (ctx.size * dtype.itemsize))
    some, left = [], most
    for base, rows in bases:
        start = 0
        while start < rows.shape[1]:
            numel = min(left, rows.shape[1] - start)
            some.append((base.memory.narrow(1, start, numel), rows.narrow(1, start, numel)))
            start, left = start + numel, left - numel
            if not left:
                yield some
                some, left = [], most
    if some:
        yield some


def look(
    ctx: DeviceContext, names: Sequence[str], rows: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> None:
    """Compare the copies of all ranks' shards with the shards themselves by their hashes, which ranks gather; report the parameters of
    which one differs. A collective of the group; the host does not wait. Work of all streams, after that which has written the copies.

    Args:
        rows: of each parameter, ``[ranks, numel]``.
        shards: of this rank.
    """
    count, key = 2 * len(shards), key_words(hash_key())
    with ctx.streams.staging(8 * count * ctx.size, ctx.budget) as staging:
        wanted = staging.view(torch.int64)
        own = wanted[ctx.rank * count : (ctx.rank + 1) * count]
        with ctx.streams.on(Stage.ENCODE):
            ctx.route.hash_regions(list(shards), own, key)
        with ctx.streams.wire():
            ctx.transport.all_gather(wanted, own)
        with ctx.streams.on(Stage.DECODE):
            found = tensors.empty(count * ctx.size, torch.int64, ctx.device)
            ctx.route.hash_regions([some[rank] for rank in range(ctx.size) for some in rows], found, key)
            for rank in range(ctx.size):
                part = slice(rank * count, (rank + 1) * count)
                ctx.reports.note_changes(ctx.where(), names, wanted[part], found[part], WRONG_COPY)


def _levels(bases: Sequence[_Read]) -> Levels:
    levels = bases[0][0].levels
    assert levels is not None  # of kind "node"
    return levels
