"""Lossy calls of the collectives, with the results that they have by definition: every value rounded where the documentation says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import corpus
import torch
import torch.distributed as dist
from moves import wait
from sums import CODED

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.codecs.registry import LOSSY_SPECS
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.transport.gloo import all_reduce_chunk
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

#: What each rank contributes.
Parts = Sequence[torch.Tensor]
#: Codecs of every kind: each value by itself, groups, groups that are transformed, blocks.
CODECS: tuple[LossyCodec, ...] = tuple(
    codec for codec in (Round(3), Round(1), TacoFp8(), Int(6, 32), Zfp(8)) if type(codec) in LOSSY_SPECS
)
NAMES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_to_owners",
    "all_to_all", "all_to_all_single", "all_gather", "all_gather_into_tensor",
)  # fmt: skip


def api(lossy: LossyCodec | None, config: ZipcclConfig = CODED, **settings: Any) -> SimpleNamespace:
    """The collectives of comm with a config and a codec bound."""
    config = replace(config, **settings)
    return SimpleNamespace(**{name: partial(getattr(comm, name), config=config, lossy=lossy) for name in NAMES})


def normal(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers that every codec rounds."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, generator=generator).to(dtype)


def with_specials(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """As :func:`normal`, with values of other sizes, zeros of both signs, and one value on each rank that is not finite."""
    found = normal(rank, size, dtype, seed)
    found[::5] = 0.0
    found[3::7] *= -1e-3
    found[2::11] *= 30
    if size > 600:
        found[97 + 300 * rank] = (float("nan"), float("inf"), -float("inf"))[rank % 3]
    return found


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits; any NaN is any other: sums make theirs by the hardware."""
    corpus.assert_same_bits(*(tensor.masked_fill(tensor.isnan(), torch.nan) for tensor in (got, wanted)))


def total(contributions: Parts, owner: int, codec: LossyCodec, average: bool) -> torch.Tensor:
    """The sum that ``owner`` makes: its own contribution exact, the other ones rounded by the codec, added in fp32 in rank order."""
    values = [
        values.float() if rank == owner else project(values, codec).float() for rank, values in enumerate(contributions)
    ]
    found = values[0]
    for more in values[1:]:
        found = found + more
    return (found / len(values) if average else found).to(contributions[0].dtype)


def shards_of(numel: int, itemsize: int, ranks: int) -> list[slice]:
    """The part of a message that each rank sums in an all-reduce."""
    return cut(numel, all_reduce_chunk(numel, itemsize, ranks), ranks)


def all_reduced(everyone: Parts, codec: LossyCodec, average: bool) -> torch.Tensor:
    """Each shard is summed by its owner, and the sum is rounded by the codec for all ranks, the owner among them."""
    parts = shards_of(len(everyone[0]), everyone[0].element_size(), len(everyone))
    return torch.cat(
        [
            project(total([values[part] for values in everyone], owner, codec, average), codec)
            for owner, part in enumerate(parts)
        ]
    )


# Each calls one operation on ``mine`` and returns what this rank has afterwards, beside what it has by definition.


def all_reduce(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    mine = everyone[rank].clone()
    wait(calls.all_reduce(mine, op, None, later))
    return mine, all_reduced(everyone, codec, op == dist.ReduceOp.AVG)


def all_reduce_coalesced(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    mine = everyone[rank].clone()
    wait(calls.all_reduce_coalesced([mine[:777], mine[777:].view(-1, 1)], op, None, later))
    return mine, all_reduced(everyone, codec, op == dist.ReduceOp.AVG)


def all_reduce_strided(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """gloo sums a dense tensor in the order of its memory."""
    mine = everyone[rank].clone()
    rows = mine[: len(mine) // 3 * 3]
    wait(calls.all_reduce(rows.view(-1, 3).t(), op, None, later))
    return rows, all_reduced([values[: len(rows)] for values in everyone], codec, op == dist.ReduceOp.AVG)


def reduce(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    mine, root = everyone[rank].clone(), len(everyone) - 1
    wait(calls.reduce(mine, root, op, None, later))
    wanted = total(everyone, root, codec, op == dist.ReduceOp.AVG) if rank == root else everyone[rank]
    return mine, wanted


def reduce_scatter_tensor(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    size = len(everyone[0]) // len(everyone)
    output = torch.empty_like(everyone[0][:size])
    wait(calls.reduce_scatter_tensor(output, everyone[rank][: size * len(everyone)], op, None, later))
    part = slice(rank * size, (rank + 1) * size)
    return output, total([values[part] for values in everyone], rank, codec, op == dist.ReduceOp.AVG)


def reduce_scatter_in_place(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    size, mine = len(everyone[0]) // len(everyone), everyone[rank].clone()
    part = slice(rank * size, (rank + 1) * size)
    wait(calls.reduce_scatter_tensor(mine[part], mine[: size * len(everyone)], op, None, later))
    return mine[part], total([values[part] for values in everyone], rank, codec, op == dist.ReduceOp.AVG)


def reduce_scatter(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """A list of uneven tensors."""
    ranks, numel = len(everyone), len(everyone[0])
    cuts = [min(numel // ranks, 700 * (peer + 1)) for peer in range(ranks - 1)]
    shards = [values.split([*cuts, numel - sum(cuts)]) for values in everyone]
    output = torch.empty_like(shards[0][rank])
    wait(calls.reduce_scatter(output, [shard.clone() for shard in shards[rank]], op, None, later))
    return output, total([of_rank[rank] for of_rank in shards], rank, codec, op == dist.ReduceOp.AVG)


def to_owners(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """Every rank owns two slices: contributions go straight to the owners."""
    ranks, size = len(everyone), len(everyone[0]) // (2 * len(everyone))
    owners = [(size, (turn % ranks,)) for turn in range(2 * ranks)]
    owners.append((len(everyone[0]) - 2 * ranks * size, ()))
    mine = everyone[rank].clone()
    calls.reduce_to_owners(mine, owners, op)
    owned = [slice((rank + ranks * turn) * size, (rank + ranks * turn + 1) * size) for turn in range(2)]
    laid = [torch.cat([values[part] for part in owned]) for values in everyone]
    return torch.cat([mine[part] for part in owned]), total(laid, rank, codec, op == dist.ReduceOp.AVG)


def to_several_owners(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """All ranks own all of the sum: each shard is summed once and goes to the owners as it is."""
    mine = everyone[rank].clone()
    calls.reduce_to_owners(mine, [(len(mine), range(len(everyone)))], op)
    parts = shards_of(len(mine), mine.element_size(), len(everyone))
    sums = [
        total([values[part] for values in everyone], owner, codec, op == dist.ReduceOp.AVG)
        for owner, part in enumerate(parts)
    ]
    return mine, torch.cat(sums)


SUMS: tuple[Callable[..., Any], ...] = (
    all_reduce, all_reduce_coalesced, all_reduce_strided, reduce, reduce_scatter_tensor, reduce_scatter_in_place,
    reduce_scatter, to_owners, to_several_owners,
)  # fmt: skip


def gather(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """All ranks get the same, the sender among them."""
    outputs = [torch.empty_like(values) for values in everyone]
    wait(calls.all_gather(outputs, everyone[rank], None, later))
    return torch.cat(outputs), torch.cat([project(values, codec) for values in everyone])


def gather_in_place(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    whole = torch.cat(list(everyone))
    own = whole.chunk(len(everyone))[rank]
    wait(calls.all_gather_into_tensor(whole, own, None, later))
    return whole, torch.cat([project(values, codec) for values in everyone])


def exchange(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """Even segments; the own one stays as it is."""
    ranks, size = len(everyone), len(everyone[0]) // len(everyone)
    whole = everyone[rank][: size * ranks]
    output = torch.empty_like(whole)
    wait(calls.all_to_all_single(output, whole, None, None, None, later))
    part = slice(rank * size, (rank + 1) * size)
    wanted = [
        values[part] if peer == rank else project(values[part].contiguous(), codec)
        for peer, values in enumerate(everyone)
    ]
    return output, torch.cat(wanted)


def exchange_uneven(calls: Any, everyone: Parts, rank: int, codec: LossyCodec, op: Any, later: bool) -> Any:
    """Segment p of rank r has a size of its own, among them none; each is rounded from its own first element on."""
    ranks = len(everyone)
    sizes = [
        [0 if (peer + 2 * sender) % 5 == 4 else 501 * (peer + sender + 1) for peer in range(ranks)]
        for sender in range(ranks)
    ]
    segments = [list(values[: sum(of)].split(of)) for values, of in zip(everyone, sizes, strict=True)]
    outputs = [torch.empty_like(of[rank]) for of in segments]
    wait(calls.all_to_all(outputs, segments[rank], None, later))
    wanted = [of[rank] if peer == rank else project(of[rank], codec) for peer, of in enumerate(segments)]
    return torch.cat(outputs), torch.cat(wanted)


MOVES: tuple[Callable[..., Any], ...] = (gather, gather_in_place, exchange, exchange_uneven)
EVERYTHING = SUMS + MOVES
