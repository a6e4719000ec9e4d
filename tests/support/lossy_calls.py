"""Lossy calls of the collectives, with the results that they have by definition: every value rounded where the documentation says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import corpus
import levels
import moves
import sums
import torch
import torch.distributed as dist
from moves import CODED
from operations import Coded

from ds_zipccl.codecs import project
from ds_zipccl.codecs.registry import LOSSY_SPECS
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.transport.gloo import all_reduce_chunk
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

#: Codecs of every kind: each value by itself, groups, groups that are transformed, blocks.
CODECS: tuple[LossyCodec, ...] = tuple(
    codec for codec in (Round(3), Round(1), TacoFp8(), Int(6, 32), Zfp(8)) if type(codec) in LOSSY_SPECS
)


def api(lossy: LossyCodec | None, config: ZipcclConfig = CODED, **settings: Any) -> Coded:
    return Coded(replace(config, **settings), lossy=lossy)


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


@dataclass(frozen=True)
class Call:
    """A call of one rank: the collectives with a codec bound, what each rank gives, and the codec of the definition. ``nodes``: where sums
    go in two levels, so that the sums of nodes are rounded. ``device``: of the tensors of the call."""

    api: Any
    everyone: Sequence[torch.Tensor]
    rank: int
    codec: LossyCodec
    op: Any = dist.ReduceOp.SUM
    later: bool = False
    nodes: levels.Nodes = ()
    device: str = "cpu"

    @property
    def own(self) -> torch.Tensor:
        return self.everyone[self.rank]

    @property
    def mine(self) -> torch.Tensor:
        """A copy of what this rank gives, for a call in place."""
        return self.own.clone().to(self.device)

    @property
    def of_a_sum(self) -> tuple[Any, torch.Tensor, Any, bool]:
        """Arguments of the functions of :mod:`sums`."""
        return self.api, self.mine, self.op, self.later

    @property
    def of_a_move(self) -> tuple[Any, list[torch.Tensor], int, bool]:
        """Arguments of the functions of :mod:`moves`."""
        return self.api, [one.to(self.device) for one in self.everyone], self.rank, self.later

    @property
    def shard(self) -> slice:
        size = len(self.own) // len(self.everyone)
        return slice(self.rank * size, (self.rank + 1) * size)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return project(values.contiguous(), self.codec)

    def total(self, owner: int, *parts: slice) -> torch.Tensor:
        """The sum that ``owner`` makes: its own contribution exact, the other ones rounded, added in fp32 in rank order; in two levels
        those of nodes. An average divides before the first rounding of the sum."""
        laid = [torch.cat([values[part] for part in parts or [slice(None)]]) for values in self.everyone]
        nodes = self.nodes or [[rank] for rank in range(len(laid))]
        divisor = len(laid) if self.op == dist.ReduceOp.AVG else 1
        of_nodes = [levels.in_order([laid[rank] for rank in ranks], divisor if self.nodes else 1) for ranks in nodes]
        values = [own if owner in ranks else self.rounded(own) for ranks, own in zip(nodes, of_nodes, strict=True)]
        return levels.in_order(values, 1 if self.nodes else divisor)

    def shares(self, numel: int) -> list[torch.Tensor]:
        """The sum of each rank's part of a message in an all-reduce, made by that rank."""
        chunk = all_reduce_chunk(numel, self.own.element_size(), len(self.everyone))
        return [self.total(owner, part) for owner, part in enumerate(cut(numel, chunk, len(self.everyone)))]

    def all_reduced(self, numel: int) -> torch.Tensor:
        """Each share is rounded for all ranks, its owner among them."""
        return torch.cat([self.rounded(share) for share in self.shares(numel)])

    def arrived(self, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Segments from each rank: the own one as it is, each other one rounded from its own first element on."""
        return torch.cat([one if peer == self.rank else self.rounded(one) for peer, one in enumerate(segments)])


# Each makes one call and returns what this rank has afterwards, and what it has by definition.
Result = tuple[torch.Tensor, torch.Tensor]


def all_reduce(call: Call) -> Result:
    return sums.all_reduce(*call.of_a_sum), call.all_reduced(len(call.own))


def all_reduce_coalesced(call: Call) -> Result:
    return sums.all_reduce_coalesced(*call.of_a_sum), call.all_reduced(len(call.own))


def all_reduce_strided(call: Call) -> Result:
    rows = len(call.own) // 3 * 3
    return sums.all_reduce_by_memory(*call.of_a_sum)[:rows], call.all_reduced(rows)


def reduce(call: Call) -> Result:
    """What the root has; the other ranks have what they gave."""
    got, root = sums.reduce(*call.of_a_sum), len(call.own) % len(call.everyone)
    return (got, call.total(root)) if call.rank == root else (call.own, call.own)


def reduce_scatter_tensor(call: Call) -> Result:
    return sums.reduce_scatter_tensor(*call.of_a_sum), call.total(call.rank, call.shard)


def reduce_scatter_in_place(call: Call) -> Result:
    return sums.reduce_scatter_in_place(*call.of_a_sum), call.total(call.rank, call.shard)


def reduce_scatter(call: Call) -> Result:
    """A list of uneven tensors."""
    ranks, numel, own = len(call.everyone), len(call.own), call.mine
    cuts = [min(numel // ranks, 700 * (peer + 1)) for peer in range(ranks - 1)]
    shards = own.split([*cuts, numel - sum(cuts)])
    output, begin = torch.empty_like(shards[call.rank]), sum(cuts[: call.rank])
    moves.wait(call.api.reduce_scatter(output, list(shards), call.op, None, call.later))
    return output, call.total(call.rank, slice(begin, begin + len(output)))


def to_owners(call: Call) -> Result:
    """Every rank owns two slices: contributions go straight to the owners."""
    ranks, mine = len(call.everyone), call.mine
    size = len(mine) // (2 * ranks)
    owners = [(size, (turn % ranks,)) for turn in range(2 * ranks)]
    call.api.reduce_to_owners(mine, [*owners, (len(mine) - 2 * ranks * size, ())], call.op)
    owned = [slice((call.rank + ranks * turn) * size, (call.rank + ranks * turn + 1) * size) for turn in range(2)]
    return torch.cat([mine[part] for part in owned]), call.total(call.rank, *owned)


def to_several_owners(call: Call) -> Result:
    """All ranks own all of the sum: each share is summed once and goes to the owners as it is."""
    mine = call.mine
    call.api.reduce_to_owners(mine, [(len(mine), range(len(call.everyone)))], call.op)
    return mine, torch.cat(call.shares(len(mine)))


def gather(call: Call) -> Result:
    """All ranks get the same, the sender among them."""
    return torch.cat(moves.all_gather(*call.of_a_move)[0]), torch.cat(list(map(call.rounded, call.everyone)))


def gather_in_place(call: Call) -> Result:
    return moves.all_gather_in_place(*call.of_a_move)[0][0], torch.cat(list(map(call.rounded, call.everyone)))


def exchange(call: Call) -> Result:
    (output,), (wanted,) = moves.all_to_all_single_even(*call.of_a_move)
    return output.view(-1), call.arrived(wanted.unbind())


def exchange_uneven(call: Call) -> Result:
    """Rank 0 gets nothing."""
    outputs, wanted = moves.all_to_all(*call.of_a_move)
    return torch.cat(outputs), call.arrived(wanted)


SUMS: tuple[Callable[[Call], Result], ...] = (
    all_reduce,
    all_reduce_coalesced,
    all_reduce_strided,
    reduce,
    reduce_scatter_tensor,
    reduce_scatter_in_place,
    reduce_scatter,
    to_owners,
    to_several_owners,
)
MOVES: tuple[Callable[[Call], Result], ...] = (gather, gather_in_place, exchange, exchange_uneven)
EVERYTHING = SUMS + MOVES


def every_way(
    rank: int,
    ranks: int,
    calls: Sequence[Callable[[Call], Result]],
    ways: Sequence[dict[str, Any]],
    size: int,
    **more: Any,
) -> Iterator[tuple[Callable[[Call], Result], Call]]:
    """Each call by each codec, with dtypes, operations and ``ways``, which are settings, in turn. ``more``: fields of :class:`Call`."""
    for seed, (codec, call) in enumerate(itertools.product(CODECS, calls)):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(seed + seed // 3) % 3]
        op = dist.ReduceOp.AVG if seed % 4 == 1 else dist.ReduceOp.SUM
        way = dict(ways[seed % len(ways)])
        if call is exchange_uneven:
            way.pop("check", None)  # gloo's own exchange of lists refuses sizes that differ
        each = 8 * size if "staging_mib" in way else size
        everyone = [with_specials(peer, each, dtype, seed) for peer in range(ranks)]
        yield call, Call(api(codec, **way), everyone, rank, codec, op, bool(seed // 2 % 2), **more)
