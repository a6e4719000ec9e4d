"""Calls of the collectives that add, compared with plain gloo: all-reduce, reduce and reduce-scatter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import numpy as np
import torch
import torch.distributed as dist
from moves import coded, wait

from ds_zipccl.comm import reduction_order
from ds_zipccl.comm.transport import gloo
from ds_zipccl.telemetry import counters

MIB = 1 << 20


#: Elements after which the contributions repeat: a prime, so that no chunk of a large message looks like another.
PERIOD = 20011


def repeated(texture: corpus.Texture, size: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    """Many words for little time."""
    return corpus.tensor(np.resize(texture(min(size, PERIOD), kind, seed), size), kind)


def bell(rank: int, size: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    """Numbers whose sum depends on the order."""
    return repeated(corpus.bell, size, kind, 1000 * (rank + 1) + 5 * seed)


def wild(rank: int, size: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    """Any bits, among them NaN payloads, infinities, -0, denormals, overflow."""
    return repeated(lambda n, kind, seed: corpus.mixed(n, kind, 128, seed), size, kind, 1000 * (rank + 1) + seed)


def assert_same_sums(got: torch.Tensor, want: torch.Tensor, kind: corpus.Float) -> None:
    """Bit for bit; which payload a NaN carries is only defined for bf16."""
    if kind is not corpus.BF16:
        got, want = (tensor.masked_fill(tensor.isnan(), torch.nan) for tensor in (got, want))
    corpus.assert_same_bits(got, want)


# Each reduces ``mine`` through ``api`` and returns what this rank is left with; None where that is not defined.


def all_reduce(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    wait(api.all_reduce(mine, op, None, later))
    return mine


def all_reduce_by_memory(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    """gloo sums a dense tensor in the order of its memory."""
    rows = mine[: len(mine) // 3 * 3].view(-1, 3).t()
    wait(api.all_reduce(rows, op, None, later))
    return mine


def all_reduce_coalesced(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    third = len(mine) // 3
    wait(api.all_reduce_coalesced([mine[:third], mine[third:]], op, None, later))
    return mine


def reduce(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    dst = len(mine) % dist.get_world_size()
    before = mine.clone()
    wait(api.reduce(mine, dst, op, None, later))
    if dist.get_rank() == dst:
        return mine
    if api is not dist:
        corpus.assert_same_bits(mine, before)
    return None


def reduce_scatter_tensor(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    output = mine.new_empty(len(mine) // dist.get_world_size())
    wait(api.reduce_scatter_tensor(output, mine[: len(output) * dist.get_world_size()], op, None, later))
    return output


def reduce_scatter_in_place(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    size = len(mine) // dist.get_world_size()
    output = mine[size * dist.get_rank() : size * (dist.get_rank() + 1)]
    wait(api.reduce_scatter_tensor(output, mine[: size * dist.get_world_size()], op, None, later))
    return output


def reduce_scatter(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    """A list of uneven tensors."""
    cuts = [min(len(mine) // dist.get_world_size(), 7 * peer) for peer in range(dist.get_world_size() - 1)]
    shards = mine.split([*cuts, len(mine) - sum(cuts)])
    output = torch.empty_like(shards[dist.get_rank()])
    wait(api.reduce_scatter(output, [shard.clone() for shard in shards], op, None, later))
    return output


#: File of ds_zipccl.comm.ops -> ways to call its operations.
SUMS: dict[str, tuple[Callable[..., Any], ...]] = {
    "all_reduce": (all_reduce, all_reduce_by_memory, all_reduce_coalesced),
    "reduce": (reduce,),
    "reduce_scatter": (reduce_scatter_tensor, reduce_scatter_in_place, reduce_scatter),
}
EVERYTHING = tuple(add for calls in SUMS.values() for add in calls)


def as_gloo(rank: int, ranks: int, sizes: Sequence[int], calls: Sequence[Callable[..., Any]] = EVERYTHING) -> None:
    """Sums have gloo's bits, in every dtype, blocking and not, through frames only."""
    for seed, (size, add) in enumerate((size, add) for size in sizes for add in calls):
        kind = list(corpus.SUMMED.values())[(seed + size) % 3]
        op = dist.ReduceOp.AVG if seed % 5 == 0 else dist.ReduceOp.SUM
        if size < ranks and add in (reduce_scatter_tensor, reduce_scatter_in_place, reduce_scatter):
            continue  # gloo refuses empty ones
        for fill in (bell, wild) if size < MIB // 2 else (bell,):
            mine = fill(rank, size, kind, seed)
            want = add(dist, mine.clone(), op, False)
            got = add(coded(), mine.clone(), op, bool(seed % 2))
            if got is not None:
                assert_same_sums(got, want, kind)
    assert not any(row["passed"] for row in counters.rows())


def sizes_for(ranks: int) -> list[int]:
    """Small ones, and around the places where gloo's grids change: segments of 1 MiB, 2 of them per chunk.

    Large messages are dear, and two ranks have one order only.
    """
    draw = random.Random(ranks)
    few = [1, 2, 3, ranks - 1, ranks, 5 * ranks + 1, draw.randrange(1000, 3000), 20001]
    return few + [
        ranks * MIB // 2 * mega + draw.randrange(-40, 40) for mega in {2: (1,), 3: (1, 2, 3), 4: (1, 2)}[ranks]
    ]


def other_order() -> None:
    """From now on chunks are summed in another order."""
    pieces = reduction_order.Reduction._parts

    def turned(self: Any, spans: Sequence[slice], chunk: int, **more: Any) -> Any:
        return [(piece, list(reversed(order))) for piece, order in pieces(self, spans, chunk, **more)]

    reduction_order.Reduction._parts = turned


def other_grid() -> None:
    """From now on chunks are as long as owners' shards."""
    gloo.all_reduce_chunk = lambda numel, itemsize, ranks: -(-numel // ranks)
