"""Sums for their owners: what a rank owns has the bits of an all-reduce, and about half as much is sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import flip_a_bit
from sums import CODED, MIB, assert_same_sums, bell, other_order, sizes_for, wild
from test_pipeline import in_small_pieces

from ds_zipccl import comm
from ds_zipccl.comm.host import sums
from ds_zipccl.comm.ops import reduce_to_owners
from ds_zipccl.comm.ops.reduce_to_owners import Owners, spans_of
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, cost_model, tuner_rules
from ds_zipccl.telemetry import counters

#: Called one after the other on the same bits.
CONFIGS = [replace(CODED, **more) for more in ({}, {"codec": "raw"}, {"check": "shadow"})]
AUTO = ZipcclConfig(enabled=True, min_bytes=0)


# Owner maps of a message of ``size`` elements.


def balanced(draw: random.Random, size: int, ranks: int) -> Owners:
    return [(size // ranks, (rank,)) for rank in range(ranks - 1)] + [
        (size - size // ranks * (ranks - 1), (ranks - 1,))
    ]


def one_owner(draw: random.Random, size: int, ranks: int) -> Owners:
    return [(size, (draw.randrange(ranks),))]


def cut_at_random(draw: random.Random, size: int, count: int) -> list[int]:
    cuts = sorted(draw.randrange(size + 1) for _ in range(count))
    return [end - begin for begin, end in itertools.pairwise([0, *cuts, size])]


def uneven(draw: random.Random, size: int, ranks: int) -> Owners:
    return [(numel, (draw.randrange(ranks),)) for numel in cut_at_random(draw, size, 2 * ranks)]


def tiny(draw: random.Random, size: int, ranks: int) -> Owners:
    """Many parts, in turn; the last rank has none."""
    few = max(1, ranks - 1)
    return [(numel, (turn % few,)) for turn, numel in enumerate(cut_at_random(draw, size, min(size, 300)))]


def several(draw: random.Random, size: int, ranks: int) -> Owners:
    """From no owner to all ranks."""
    return [
        (numel, frozenset(draw.sample(range(ranks), draw.randrange(ranks + 1))))
        for numel in cut_at_random(draw, size, 12)
    ]


MAPS: tuple[Callable[[random.Random, int, int], Owners], ...] = (balanced, one_owner, uneven, tiny, several)
#: For messages of several pieces, which are dear.
LARGE = (tiny, several)


def recut(owned: Owners, draw: random.Random) -> Owners:
    """The same owners, with parts cut and joined in another way, some of them empty."""
    parts: list[tuple[int, frozenset[int]]] = []
    for numel, ranks in owned:
        if parts and parts[-1][1] == frozenset(ranks) and draw.random() < 0.5:
            parts[-1] = (parts[-1][0] + numel, parts[-1][1])
        else:
            pieces = cut_at_random(draw, numel, draw.randrange(3))
            parts += [(piece, frozenset(ranks)) for piece in pieces]
    return parts


def mask(owned: Owners, rank: int) -> torch.Tensor:
    """Which elements a rank owns."""
    return torch.cat([torch.full((numel,), rank in ranks) for numel, ranks in owned])


@runner.together(3, [37, 4099], 4)
def as_all_reduce(
    rank: int, ranks: int, sizes: Sequence[int], seeds: int = 1, plant: Callable[[], None] | None = None
) -> None:
    if plant is not None:
        plant()
    for seed, size, owners_of in itertools.product(range(seeds), sizes, MAPS):
        if size >= MIB and owners_of not in LARGE:
            continue
        case = random.Random(f"{seed} {size} {owners_of.__name__}")
        owned = owners_of(case, size, ranks)
        kind, fill = (
            case.choice(list(corpus.SUMMED.values())),
            wild if size < MIB // 2 and case.random() < 0.5 else bell,
        )
        op = case.choice([dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.AVG])
        mine, own = fill(rank, size, kind, seed), mask(owned, rank)
        want = mine.clone()
        dist.all_reduce(want, op)
        for config in CONFIGS if size < MIB else [case.choice(CONFIGS)]:
            got = mine.clone()
            comm.reduce_to_owners(got, recut(owned, random.Random(rank)), op, config=config)
            # torch divides NaNs of bf16 into others in its vector units than beside them, which depends on where a message begins
            assert_same_sums(got[own], want[own], corpus.FP32 if op == dist.ReduceOp.AVG else kind)
    assert not any(row["passed"] for row in counters.rows())


runner.together(2, sizes_for(2))(as_all_reduce)
runner.together(3, sizes_for(3))(as_all_reduce)
runner.together(4, sizes_for(4), full="four ranks on two cores")(as_all_reduce)
for ranks in (2, 3):
    runner.together(ranks, as_all_reduce, ([7, 1000, 20001],), file=__name__)(in_small_pieces)


def grid_of_the_shard() -> None:
    """From now on the position in the own shard counts, instead of the one in the message."""
    build = sums.ShardAdder.__init__

    def wrong(self: Any, ctx: Any, exchange: Any, shards: Any, reduction: Any, spans: Any, chunk: int) -> None:
        numel = sum(span.stop - span.start for span in spans)
        build(self, ctx, exchange, shards, reduction, [slice(0, numel)], chunk)

    sums.ShardAdder.__init__ = wrong  # type: ignore[method-assign]


def shifted_by_one() -> None:
    """From now on everything belongs to the owners of the element before it."""
    right = spans_of

    def wrong(tensor: torch.Tensor, owned: Owners, ranks: int) -> list[list[slice]]:
        moved = [[slice(span.start + 1, min(span.stop + 1, tensor.numel())) for span in spans]
                 for spans in right(tensor, owned, ranks)]  # fmt: skip
        return [[span for span in spans if span.start < span.stop] for spans in moved]

    reduce_to_owners.spans_of = wrong


@pytest.mark.parametrize("plant", [grid_of_the_shard, shifted_by_one, flip_a_bit, other_order])
def test_a_fault_is_seen(plant: Callable[[], None]) -> None:
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(as_all_reduce, 3, [20001], 1, plant)


def shadow_sees(rank: int, ranks: int) -> None:
    grid_of_the_shard()
    tensor = bell(rank, 20001, corpus.BF16, 0)
    comm.reduce_to_owners(tensor, balanced(random.Random(), 20001, ranks), config=CONFIGS[2])


def test_shadow_sees_a_fault() -> None:
    with pytest.raises(runner.RankFailure, match=r"ShadowMismatch: reduce_to_owners .* wrong in output 0"):
        runner.run(shadow_sees, 3)


@runner.together(3)
def as_defined(rank: int, ranks: int) -> None:
    """What it says of dense tensors, fp32 sums, groups, and calls that pass."""
    mine = bell(rank, 6000, corpus.BF16, 0)
    owned, own = [(2500, (1,)), (3500, (0, 2))], slice(0, 2500) if rank == 1 else slice(2500, 6000)
    for reduction, check in itertools.product(("match", "fp32"), ("off", "shadow")):
        config = replace(CODED, reduction=reduction, check=check)
        want, got, rows = mine.clone(), mine.clone(), mine.clone()
        comm.all_reduce(want, config=config)
        comm.reduce_to_owners(got, owned, config=config)
        corpus.assert_same_bits(got[own], want[own])
        comm.reduce_to_owners(rows.view(2000, 3).t(), owned, config=config)
        corpus.assert_same_bits(rows, got)
    leaf = torch.ones(6000, requires_grad=True)
    comm.reduce_to_owners(leaf, owned, config=CODED)
    assert leaf[own].tolist() == [ranks] * len(leaf[own]) and leaf.requires_grad

    group = dist.new_group([0, 2])
    want, got = mine.clone(), mine.clone()
    if rank == 1:
        assert comm.reduce_to_owners(got, [(6000, (0,))], group=group, config=CODED) is None
    else:
        dist.all_reduce(want, group=group)
        comm.reduce_to_owners(got, [(6000, (1,))], group=group, config=CODED)
    corpus.assert_same_bits(got, want if rank == 2 else mine)

    counters.reset()
    for config in (replace(AUTO, mode="never"), ZipcclConfig(enabled=True), ZipcclConfig()):
        want, got = mine.clone(), mine.clone()
        dist.all_reduce(want)
        comm.reduce_to_owners(got, owned, config=config)
        corpus.assert_same_bits(got[own], want[own])
    got = torch.ones(6000, dtype=torch.int32)
    comm.reduce_to_owners(got, owned, config=CODED)
    assert got[own].tolist() == [ranks] * len(got[own])
    (row,) = counters.rows()
    assert row["passed_bytes"] == (3 * 6000 * 2 + 6000 * 4) * 2 * (ranks - 1) // ranks and row["calls"] == 0
    assert set(row["reasons"]) == {"role is never coded", "smaller than min_bytes", "not enabled", "dtype int32"}


@runner.together(2)
def complaints(rank: int, ranks: int) -> None:
    tensor = torch.ones(10)
    calls: dict[str, tuple[torch.Tensor, Owners]] = {
        "add up to the tensor's 10 elements, got 9": (tensor, [(4, (0,)), (5, (1,))]),
        "add up to the tensor's 10 elements, got 0": (tensor, []),
        "owners from 0 to 1 .*, got 10 of .2.": (tensor, [(10, (2,))]),
        "owners from 0 to 1 .*, got 6 of .-1, 0.": (tensor, [(4, (0,)), (6, (-1, 0))]),
        "0 or more elements .*, got -1 of .0.": (tensor, [(11, (0,)), (-1, (0,))]),
        "wanted a dense tensor, got one of layout torch.strided, shape .5,. and strides .2,.": (
            tensor[::2],
            [(5, (0,))],
        ),
        "wanted a dense tensor, got one of layout torch.sparse_coo": (tensor.to_sparse(), [(10, (0,))]),
    }
    for config, (message, (given, owned)) in itertools.product((CODED, AUTO, ZipcclConfig()), calls.items()):
        with pytest.raises(ValueError, match=f"reduce_to_owners: .*{message}"):
            comm.reduce_to_owners(given, owned, config=config)
    assert not counters.rows() and tensor.tolist() == [1.0] * 10
    comm.reduce_to_owners(tensor[:0], [], config=CODED)
    comm.reduce_to_owners(tensor, [(10, (0, 1))], config=CODED)  # and the ranks still understand each other
    assert tensor.tolist() == [2.0] * 10


@runner.together(2)
@runner.together(4)
def half_as_much_is_sent(rank: int, ranks: int) -> None:
    for codec in ("raw", "cascade"):
        counters.reset()
        config = replace(CODED, codec=codec)
        mine = bell(rank, 400_000, corpus.BF16, 0)
        comm.reduce_to_owners(mine.clone(), balanced(random.Random(), len(mine), ranks), config=config)
        comm.all_reduce(mine, config=config)
        whole, parts = counters.rows()
        raw, wire = parts["logical_bytes"], parts["wire_bytes"]
        assert rank or raw == 2 * 400_000 * 2 * (ranks - 1) // ranks  # what the plain all-reduce sends
        assert rank or wire == pytest.approx(whole["wire_bytes"] / 2, rel=0.02), codec
        assert rank or raw / wire == pytest.approx(2 if codec == "raw" else 3, rel=0.03)


@runner.together(3)
def competing(rank: int, ranks: int) -> None:
    """Every schedule is tried, with the same bits."""
    draw = random.Random(0)
    for step in range(3 * tuner_rules.TRIAL_CALLS + tuner_rules.DELAY_CALLS[0] + 3):
        mine = bell(rank, 50_000, corpus.BF16, step)
        owned = uneven(draw, len(mine), ranks)
        want, own = mine.clone(), mask(owned, rank)
        dist.all_reduce(want)
        comm.reduce_to_owners(mine, owned, config=AUTO)
        corpus.assert_same_bits(mine[own], want[own])
    (row,) = counters.rows()
    assert row["op"] == "reduce_to_owners"
    assert "trying schedules" in row["reasons"].keys() <= {"trying schedules", "plain is faster"}
    assert row["passed"] >= tuner_rules.TRIAL_CALLS and row["calls"] >= 2 * tuner_rules.TRIAL_CALLS
    assert [count for _, count in row["choices"].values()] == [1]


def test_what_is_promising() -> None:
    """Uncoded frames are not tried where the link is so slow that coded ones must be faster, as with a reduce-scatter."""
    message = admission.Message("reduce_to_owners", torch.bfloat16, 8 * MIB, 2, "cpu", "gloo", "zero_grad", "SUM")
    plans = admission.candidates(message, AUTO, exact=True)
    points = ((1.0, 1e-4), (1e9, 10.0))
    slow = cost_model.LinkProfile(points, encode=8e9, decode=8e9, add=8e9, copy=2e10, add_raw=1e10, call=1e-4)
    assert [str(plan) for plan in cost_model.prune_candidates(plans, message, slow)] == ["plain", "cascade frames"]
    assert cost_model.prune_candidates(plans, message, None) == plans


test_programs = runner.programs(__name__)
