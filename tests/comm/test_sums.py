"""Reductions: "match" has the bits of plain gloo, "fp32" those of its definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import corpus
import numpy as np
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import frames, reduction_order, spans
from ds_zipccl.comm.transport import gloo
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
NAMES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MIB = 1 << 20


def coded(**settings: Any) -> SimpleNamespace:
    """The collectives of comm with a config bound."""
    config = CODED.model_copy(update=settings)
    return SimpleNamespace(**{name: partial(getattr(comm, name), config=config) for name in NAMES})


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


def wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()


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
    output = torch.empty(len(mine) // dist.get_world_size(), dtype=mine.dtype)
    wait(api.reduce_scatter_tensor(output, mine[: len(output) * dist.get_world_size()], op, None, later))
    return output


def reduce_scatter_in_place(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    size = len(mine) // dist.get_world_size()
    output = mine[size * dist.get_rank() : size * (dist.get_rank() + 1)]
    wait(api.reduce_scatter_tensor(output, mine[: size * dist.get_world_size()], op, None, later))
    return output


def reduce_scatter(api: Any, mine: torch.Tensor, op: Any, later: bool) -> Any:
    """A list of uneven tensors."""
    cuts = [min(len(mine) // 2, 7 * peer) for peer in range(dist.get_world_size() - 1)]
    shards = mine.split([*cuts, len(mine) - sum(cuts)])
    output = torch.empty_like(shards[dist.get_rank()])
    wait(api.reduce_scatter(output, [shard.clone() for shard in shards], op, None, later))
    return output


SUMS: tuple[Callable[..., Any], ...] = (
    all_reduce, all_reduce_by_memory, all_reduce_coalesced, reduce, reduce_scatter_tensor, reduce_scatter_in_place,
    reduce_scatter,
)  # fmt: skip


def as_gloo(rank: int, ranks: int, sizes: Sequence[int], plant: Callable[[], None] | None = None) -> None:
    if plant is not None:
        plant()
    for seed, (size, add) in enumerate((size, add) for size in sizes for add in SUMS):
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_match_has_gloos_bits(ranks: int) -> None:
    runner.run(as_gloo, ranks, sizes_for(ranks))


def flip_a_bit() -> None:
    """From now on the last element of every decoded tensor has a wrong bit."""
    decompress = frames.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **settings: Any) -> torch.Tensor:
        decompress(frame, out, **settings)
        out.view(torch.uint8)[-1] ^= 1
        return out

    frames.decompress = wrong


def other_order() -> None:
    """From now on chunks are summed in another order."""
    pieces = reduction_order.Reduction._parts

    def turned(self: Any, spans: Sequence[slice], chunk: int, **more: Any) -> Any:
        return [(piece, list(reversed(order))) for piece, order in pieces(self, spans, chunk, **more)]

    reduction_order.Reduction._parts = turned


def other_grid() -> None:
    """From now on chunks are as long as owners' shards."""
    gloo.all_reduce_chunk = lambda numel, itemsize, ranks: -(-numel // ranks)


@pytest.mark.parametrize("plant", [flip_a_bit, other_order, other_grid])
def test_a_fault_is_seen(plant: Callable[[], None]) -> None:
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(as_gloo, 3, [20002, MIB + 1], plant)


def by_definition(rank: int, ranks: int) -> None:
    """fp32: x0 + x1 + ... in fp32, divided for AVG, rounded once."""
    for seed, kind in enumerate(corpus.SUMMED.values()):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            contributions = [bell(peer, 5003, kind, seed) for peer in range(ranks)]
            total = contributions[0].float()
            for contribution in contributions[1:]:
                total = total + contribution.float()
            wanted = (total / ranks if op == dist.ReduceOp.AVG else total).to(kind.dtype)
            for codec in ("cascade", "raw"):
                got = contributions[rank].clone()
                coded(reduction="fp32", codec=codec).all_reduce(got, op)
                corpus.assert_same_bits(got, wanted)
                got = contributions[rank].clone()
                coded(reduction="fp32", codec=codec).reduce(got, 1, op)
                corpus.assert_same_bits(got, wanted if rank == 1 else contributions[rank])
            size = 5003 // ranks
            output = torch.empty(size, dtype=kind.dtype)
            coded(reduction="fp32").reduce_scatter_tensor(output, contributions[rank][: size * ranks], op)
            corpus.assert_same_bits(output, wanted[size * rank : size * (rank + 1)])
    plain = bell(rank, 5003, corpus.BF16, 0)
    dist.all_reduce(plain)
    other = bell(rank, 5003, corpus.BF16, 0)
    coded(reduction="fp32").all_reduce(other)
    assert not torch.equal(plain, other)  # or the two kinds of reduction would not have been told apart


def test_fp32_by_definition() -> None:
    runner.run(by_definition, 3)


def same_everywhere(rank: int, ranks: int) -> list[Any]:
    results = []
    for codec in ("cascade", "raw"):
        for kind in ("match", "fp32"):
            tensor = wild(rank, 3001, corpus.BF16, 0)
            coded(codec=codec, reduction=kind).all_reduce(tensor)
            results.append(tensor)
    corpus.assert_same_bits(torch.stack(results[:2]), torch.stack(results[2:]))
    return torch.stack(results).view(torch.int16).tolist()


def test_same_bits_on_all_ranks_and_with_any_codec() -> None:
    first, *others = runner.run(same_everywhere, 3)
    assert all(first == other for other in others)


def strided(rank: int, ranks: int) -> None:
    """Tensors with gaps, of which gloo sums as many elements of memory as they have; and what it refuses."""
    for size in (1, 300):
        wide = bell(rank, 2 * size, corpus.FP32, 2)
        wanted = wide.clone()
        dist.all_reduce(wanted[::2])
        coded().all_reduce(wide[::2])
        corpus.assert_same_bits(wide, wanted)
    leaf = torch.ones(10, requires_grad=True)
    coded().all_reduce(leaf)
    assert leaf.tolist() == [ranks] * 10 and leaf.requires_grad


def test_strided() -> None:
    runner.run(strided, 2)


def passes(rank: int, ranks: int) -> None:
    tensor = torch.tensor([rank, 1.0])
    coded().all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [ranks - 1, 1.0]
    coded().all_reduce(tensor.int(), dist.ReduceOp.BOR)
    work = comm.all_reduce_coalesced([tensor], async_op=True, config=ZipcclConfig())
    work.wait()
    assert tensor.tolist() == [ranks * (ranks - 1), ranks] and work.is_completed()
    assert {reason for row in counters.rows() for reason in row["reasons"]} == {
        "reduce op MAX",
        "dtype int32",
        "not enabled",
    }
    outside = dist.new_group([0])
    if rank:
        assert coded().all_reduce(tensor, group=outside) is None
        assert coded().all_reduce_coalesced([tensor], group=outside) is None
    calls: dict[str, Callable[[], Any]] = {
        "input must have 2 times 3 elements": lambda: coded().reduce_scatter_tensor(torch.ones(3), torch.ones(5)),
        "input_list must have 2 tensors": lambda: coded().reduce_scatter(torch.ones(3), [torch.ones(3)]),
        "no tensors": lambda: coded().all_reduce_coalesced([]),
        "one dtype": lambda: coded().all_reduce_coalesced([torch.ones(2), torch.ones(2).half()]),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_passes_and_complaints() -> None:
    runner.run(passes, 2)


class Given:
    """Contributions that are here."""

    def __init__(self, rank: int, given: list[torch.Tensor]) -> None:
        self.rank, self.own, self._given = rank, given[rank], given

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        return self.own if rank == self.rank else into.copy_(self._given[rank])

    def add(self, rank: int, sums: torch.Tensor) -> None:
        sums.add_(self._given[rank].to(sums.dtype))

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        sums.add_(taken)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_fp32_sums_of_nan_are_one_nan(rank: int) -> None:
    """Whatever payload and sign came: bf16 rounds a NaN by cutting it."""
    words = [[0x7FC1, 0xFFC0, 0x3F80], [0x3F80, 0x3F80, 0x7F81], [0x0000, 0x7FFF, 0x4000]]
    given = [torch.tensor(row, dtype=torch.int32).to(torch.int16).view(torch.bfloat16) for row in words]
    out = torch.zeros(3, dtype=torch.bfloat16)
    reduction_order.Reduction("fp32", "SUM", 3).fold(Given(rank, given), out, [slice(0, 3)], 3)
    assert out.view(torch.int16).tolist() == [0x7FC0] * 3


@pytest.mark.parametrize(
    ("kind", "backend", "op", "ranks", "fp32", "tolerance"),
    [
        ("auto", "gloo", "SUM", 3, False, "nan"),
        ("auto", "nccl", "SUM", 3, True, "rounding"),
        ("match", "nccl", "AVG", 3, False, "nan"),
        ("fp32", "gloo", "SUM", 3, True, "rounding"),
        ("fp32", "gloo", "SUM", 2, True, "nan"),  # one rounding, as with gloo
        ("fp32", "gloo", "AVG", 2, True, "rounding"),
    ],
)
def test_how_near_sums_come(kind: str, backend: str, op: str, ranks: int, fp32: bool, tolerance: str) -> None:
    reduction_, found = reduction_order._exactness(kind, backend, op, ranks)
    assert (reduction_._fp32, found) == (fp32, tolerance)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_grids_cover_the_message(ranks: int, itemsize: int) -> None:
    draw = random.Random(ranks)
    for numel in [0, 1, ranks - 1, ranks, 2 * ranks + 1, *(draw.randrange(1, 1 << 27) for _ in range(200))]:
        for grid in (gloo.all_reduce_chunk, gloo.reduce_chunk):
            slices = spans.cut(numel, grid(numel, itemsize, ranks), ranks)
            assert slices[0].start == 0 and slices[-1].stop == numel
            assert all(left.stop == right.start for left, right in pairwise(slices))
