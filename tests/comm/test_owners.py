"""Sums for their owners, and sums in two levels: the bits of an all-reduce or of the documented order, and the bytes that are sent."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import levels
import pytest
import ranks as runner
import sums
import test_work
import tiers
import torch
import torch.distributed as dist
from levels import Nodes, Summed, in_one_level, in_one_level_only, in_two_levels, nodes_of
from moves import AUTO, CODED, flip_a_bit, turn
from sums import MIB, all_reduce_by_memory, assert_same_sums, bell, coded, other_order, sizes_for, wild
from test_pipeline import in_small_pieces

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import find_nodes, group_nodes
from ds_zipccl.comm.host import sums as host_sums
from ds_zipccl.comm.ops import reduce_to_owners
from ds_zipccl.comm.ops.reduce_to_owners import Owners, spans_of
from ds_zipccl.comm.reduction_order import Owned
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, cost_model
from ds_zipccl.policy.admission import Message, PassReason
from ds_zipccl.telemetry import counters

#: Called one after the other on the same bits.
CONFIGS = [replace(CODED, **more) for more in ({}, {"codec": "raw"}, {"check": "shadow"})]


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
def as_all_reduce(rank: int, ranks: int, sizes: Sequence[int], seeds: int = 1) -> None:
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


#: Owners that differ between ranks: lists by which all would wait for each other, none, other borders, and some that only one rank has.
UNLIKE: dict[str, Callable[[int, int, int], Owners]] = {
    "itself": lambda rank, ranks, size: [(size, (rank,))],
    "the next": lambda rank, ranks, size: [(size, ((rank + 1) % ranks,))],
    "borders": lambda rank, ranks, size: [(size // 2 + rank, (0,)), (size - size // 2 - rank, (1,))],
    "nobody": lambda rank, ranks, size: [(size, (0,) if rank else ())],
    "several": lambda rank, ranks, size: [(size, range(ranks) if rank else (0,))],
}


def unlike_owners(
    rank: int, ranks: int, name: str, config: ZipcclConfig, group: dist.ProcessGroup | None = None, device: str = "cpu"
) -> None:
    """Plain sums once owners differ, also where they agree again; one line says so."""
    alike, said, size = one_owner(random.Random(0), 20_001, ranks), io.StringIO(), 20_001
    counters.reset()
    for call, owned in enumerate([alike, UNLIKE[name](rank, ranks, size), alike, UNLIKE[name](rank, ranks, size)]):
        want = (mine := bell(rank, size, corpus.BF16, call).to(device)).clone()
        dist.all_reduce(want, group=group)
        with contextlib.redirect_stdout(said) if device == "cpu" else contextlib.nullcontext():
            comm.reduce_to_owners(mine, owned, group=group, config=config)
        own = mask(owned, rank) if call == 0 else slice(None)
        corpus.assert_same_bits(mine.cpu()[own], want.cpu()[own])
    if device == "cpu":
        assert counters.rows()[0]["reasons"][PassReason.OWNERS.value] == 3
        assert said.getvalue().count("ranks reduce different parameters") == (rank == 0), said.getvalue()


@runner.together(2)
@runner.together(3)
def owners_differ(rank: int, ranks: int) -> None:
    for name, config in itertools.product(UNLIKE, (CODED, AUTO)):
        unlike_owners(rank, ranks, name, config, dist.new_group())


def on_both_sides_of_min_bytes(rank: int, ranks: int) -> None:
    for numel in (40_000, 40_000 - 20_000 * rank):
        tensor = torch.ones(numel, dtype=torch.bfloat16)
        comm.reduce_to_owners(tensor, [(numel, (0,))], config=replace(AUTO, min_bytes=65_536))


def test_buckets_on_both_sides_of_min_bytes_fail_as_plain_ones() -> None:
    """gloo ends a rank or its connection at once; nobody waits for the times of a rank that sends none."""
    with pytest.raises(runner.RankFailure) as found:
        runner.run(on_both_sides_of_min_bytes, 2, timeout=60)
    assert not re.search("did not finish|times that ranks measured", str(found.value))


def grid_of_the_shard() -> None:
    """From now on the position in the own shard counts, instead of the one in the message."""
    build = host_sums.ShardAdder.__init__

    def wrong(self: Any, ctx: Any, exchange: Any, shards: Any, reduction: Any, spans: Any, chunk: int) -> None:
        numel = sum(span.stop - span.start for span in spans)
        build(self, ctx, exchange, shards, reduction, [slice(0, numel)], chunk)

    host_sums.ShardAdder.__init__ = wrong  # type: ignore[method-assign]


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
        runner.run(as_all_reduce, 3, [20001], plant=plant)


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
    """Plain and coded by turns, with the same bits."""
    draw = random.Random(0)
    for step in range(4):
        turn(plain=step % 2 == 0)
        mine = bell(rank, 50_000, corpus.BF16, step)
        owned = uneven(draw, len(mine), ranks)
        want, own = mine.clone(), mask(owned, rank)
        dist.all_reduce(want)
        comm.reduce_to_owners(mine, owned, config=AUTO)
        corpus.assert_same_bits(mine[own], want[own])
    (row,) = counters.rows()
    assert row["op"] == "reduce_to_owners" and row["passed"] == row["calls"] == 2


FP32 = replace(CODED, reduction="fp32")
AUTO_FP32 = replace(AUTO, reduction="fp32")
#: Nodes whose ranks do not follow each other.
MIXED = [[0, 3], [1, 2], [4, 5]]
SIZES = (0, 1, 2, 7, 31, 2049, 20001)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element behind an aligned address."""
    return torch.cat([tensor[:0].new_zeros(1), tensor])[1:]


@runner.together(6, MIXED, (7, 20001), full="six ranks on two cores")
@runner.together(4, nodes_of(2, 2), (4 * 70_001,), full="large messages of four ranks")
@runner.together(4, nodes_of(2, 2))
@runner.together(6, nodes_of(3, 2), full="six ranks on two cores")
@runner.together(8, nodes_of(4, 2), full="eight ranks on two cores")
@runner.together(8, nodes_of(2, 4), full="eight ranks on two cores")
def as_documented(rank: int, ranks: int, nodes: Nodes, sizes: Sequence[int] = SIZES) -> None:
    """Sums have the bits of the order that the documentation names, in every dtype, blocking and not, through frames only."""
    levels.pretend(nodes)
    filled = functools.cache(lambda fill, size, kind: [fill(peer, size, kind, size) for peer in range(ranks)])
    for seed, (size, add) in enumerate(itertools.product(sizes, sums.EVERYTHING)):
        kind = list(corpus.SUMMED.values())[(seed + size) % 3]
        average = seed % 5 in (0, 3)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        for fill, codec in ((bell, "cascade"), (wild, "cascade"), (bell, "raw")):
            everyone = filled(fill, size, kind)
            mine, total = misaligned(everyone[rank]), in_two_levels(everyone, nodes, average)
            if add is all_reduce_by_memory:  # leaves the elements behind the last row of three
                total[size // 3 * 3 :] = mine[size // 3 * 3 :]
            want = add(Summed(), total, op, False)
            got = add(coded(reduction="fp32", codec=codec, staging_mib=1), mine, op, bool(seed % 2))
            if got is not None:
                sums.assert_same_sums(got, want, kind)
    assert not any(row["passed"] for row in counters.rows())


def sharing(rank: int, ranks: int, nodes: Nodes) -> None:
    """Outputs in the shard of another rank, and shards that are all the output itself."""
    levels.pretend(nodes)
    everyone = [bell(peer, 5000 * ranks, corpus.BF16, 0) for peer in range(ranks)]
    total = in_two_levels(everyone, nodes)
    for peer in range(ranks):
        whole = everyone[rank].clone()
        place = whole[(rank + peer) % ranks * 5000 :][:5000]
        comm.reduce_scatter_tensor(place, whole, config=FP32)
        corpus.assert_same_bits(place, total[5000 * rank :][:5000])
    same = everyone[rank].clone()
    comm.reduce_scatter(same, [same] * ranks, config=FP32)
    corpus.assert_same_bits(same, total)


# ---- mistakes that these tests must see --------------------------------------------------------------------------------


def other_order_of_nodes() -> None:
    """From now on the nodes are added from the last to the first."""
    right = host_sums.add_in_fp32

    def wrong(contributions: Any, ranks: Any, *more: Any) -> None:
        right(contributions, ranks if len(more) > 2 else ranks[::-1], *more)

    host_sums.add_in_fp32 = wrong


def other_order_in_nodes() -> None:
    """From now on the ranks of a node are added from the last to the first."""
    right = host_sums.add_in_fp32

    def wrong(contributions: Any, ranks: Any, *more: Any) -> None:
        right(contributions, ranks[::-1] if len(more) > 2 else ranks, *more)

    host_sums.add_in_fp32 = wrong


def second_rounding() -> None:
    """From now on every addition rounds."""
    add = host_sums.Received.add

    def wrong(self: Any, rank: int, total: torch.Tensor) -> None:
        add(self, rank, total)
        total.copy_(total.to(self.own.dtype))

    host_sums.Received.add = wrong  # type: ignore[method-assign]


def no_rounding_of_nodes() -> None:
    """From now on the sums of nodes lose a bit, as if they were rounded in another way."""
    right = host_sums.NodeAdder._sum_of_node

    def wrong(self: Any, contribution: torch.Tensor, buffers: Any) -> torch.Tensor:
        return right(self, contribution, buffers).view(torch.int16).bitwise_and_(-2).view(contribution.dtype)

    host_sums.NodeAdder._sum_of_node = wrong  # type: ignore[method-assign]


def divided_late() -> None:
    """From now on averages divide the sum of all nodes."""
    right, late = host_sums.add_in_fp32, [1]

    def wrong(contributions: Any, ranks: Any, out: torch.Tensor, flushes: Any, divisor: int = 0) -> None:
        late[0] = divisor or late[0]
        right(contributions, ranks, out, flushes, 1 if divisor else late[0])

    host_sums.add_in_fp32 = wrong


PLANTS = [
    other_order_of_nodes, other_order_in_nodes, second_rounding, no_rounding_of_nodes, in_one_level_only, divided_late, flip_a_bit
]  # fmt: skip


@pytest.mark.parametrize("plant", tiers.mostly_full(PLANTS, PLANTS[:3], "six ranks each"))
def test_a_fault_in_two_levels_is_seen(plant: Callable[[], None]) -> None:
    # the sum of two does not depend on their order
    nodes = nodes_of(2, 3) if plant is other_order_in_nodes else nodes_of(3, 2)
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(as_documented, 6, nodes, (20001,), plant=plant)


# ---- owners ------------------------------------------------------------------------------------------------------------


def all_by_all(draw: random.Random, size: int, ranks: int) -> Owners:
    return [(size, range(ranks))]


def to_owners(rank: int, ranks: int, nodes: Nodes, sizes: Sequence[int]) -> None:
    """The owners' slices have the bits of the documented order, by all schedules."""
    levels.pretend(nodes)
    used = set()
    for size, owners_of in itertools.product(sizes, (*MAPS, all_by_all)):
        case = random.Random(f"{size} {owners_of.__name__}")
        owned = owners_of(case, size, ranks)
        kind, fill = case.choice(list(corpus.SUMMED.values())), case.choice([bell, wild])
        average = case.random() < 0.3
        everyone, own = [fill(peer, size, kind, size) for peer in range(ranks)], mask(owned, rank)
        spans = reduce_to_owners.spans_of(everyone[0], owned, ranks)
        owned_by = Owned(spans, reduce_to_owners._disjoint(spans))
        used.add(host_sums.owners_schedule(owned_by, size, nodes).__name__)
        for more in ({}, {"codec": "raw"}, {"check": "shadow"}):
            got = everyone[rank].clone()
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            config = replace(FP32, **more)
            comm.reduce_to_owners(got, recut(owned, random.Random(rank)), op, config=config)
            sums.assert_same_sums(got[own], in_two_levels(everyone, nodes, average)[own], kind)
    assert not any(row["passed"] for row in counters.rows())
    # with two nodes contributions that go straight never crowd a link
    assert used == {"straight", "to_all"} | ({"by_shards"} if len(nodes) > 2 else set()) or len(sizes) == 1


runner.together(4, nodes_of(2, 2), [1, 37, 4099])(to_owners)
for nodes in (nodes_of(2, 4), MIXED):
    runner.together(sum(map(len, nodes)), nodes, [1, 37, 4099], full="more ranks than cores")(to_owners)


# ---- groups and choices ------------------------------------------------------------------------------------------------


@runner.together(4, [[0, 1, 2], [3]])
@runner.together(4, [[0], [1], [2], [3]], full="as with unknown nodes")
@runner.together(4, [[0, 1, 2, 3]], full="as with unknown nodes")
@runner.together(4, [])
def one_level(rank: int, ranks: int, nodes: Nodes) -> None:
    """Nodes that are uneven, have a rank each, are one or unknown. Whatever NaN comes, its sum is one NaN."""
    levels.pretend(nodes)
    for fill in (bell, wild):
        everyone = [fill(peer, 20001, corpus.BF16, 0) for peer in range(ranks)]
        assert not torch.equal(in_one_level(everyone), in_two_levels(everyone, nodes_of(2, 2)))
        got = everyone[rank].clone()
        comm.all_reduce(got, config=FP32)
        corpus.assert_same_bits(got, in_one_level(everyone))


@runner.together(6, full="six ranks on two cores")
def groups(rank: int, ranks: int) -> None:
    """A subgroup has nodes of its own; `match` has gloo's order wherever ranks are; nodes that are found later count from then on."""
    everyone = [bell(peer, 20001, corpus.BF16, 0) for peer in range(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "here", lambda: str(rank // 3))
        for wanted in (in_one_level(everyone), in_two_levels(everyone, nodes_of(2, 3))):
            for mode in ("always", "auto"):
                got = everyone[rank].clone()
                comm.all_reduce(got, config=replace(FP32, mode=mode))
                corpus.assert_same_bits(got, wanted)
            find_nodes()
    part = dist.new_group([0, 1, 3, 4])
    if rank in (0, 1, 3, 4):
        assert group_nodes(part) == [[0, 1], [2, 3]]
        members = [everyone[peer] for peer in (0, 1, 3, 4)]
        got = everyone[rank].clone()
        comm.all_reduce(got, group=part, config=FP32)
        corpus.assert_same_bits(got, in_two_levels(members, nodes_of(2, 2)))
    uneven = dist.new_group([0, 1, 2, 3])
    if rank < 4:
        got = everyone[rank].clone()
        comm.all_reduce(got, group=uneven, config=FP32)
        corpus.assert_same_bits(got, in_one_level(everyone[:4]))
    got, wanted = everyone[rank].clone(), everyone[rank].clone()
    comm.all_reduce(got, config=CODED)
    dist.all_reduce(wanted)
    corpus.assert_same_bits(got, wanted)


@runner.together(4)
def whatever_is_chosen(rank: int, ranks: int) -> None:
    """Under auto, with data that shrink and data that do not, all calls have the same order; the plain collective is never called."""
    nodes = nodes_of(2, 2)
    levels.pretend(nodes)
    for step, kind in enumerate(("bell", "noise", "bell")):
        turn(plain=True)
        draw = torch.Generator().manual_seed(step)
        noise = torch.randint(-(1 << 15), 1 << 15, (ranks, 40_000), dtype=torch.int16, generator=draw)
        everyone = [bell(peer, 40_000, corpus.BF16, step) for peer in range(ranks)]
        everyone = everyone if kind == "bell" else list(noise.view(torch.bfloat16))
        got = everyone[rank].clone()
        comm.all_reduce(got, config=AUTO_FP32)
        sums.assert_same_sums(got, in_two_levels(everyone, nodes), corpus.BF16)
    (row,) = counters.rows()
    assert not row["passed"]


MESSAGE = Message("all_reduce", torch.bfloat16, 1 << 22, 8, "cpu", "gloo", "dp", "SUM", nodes=2)


def test_the_levels_are_no_choice() -> None:
    for mode, names in (
        ("auto", ["raw frames by node", "cascade frames by node"]),
        ("always", ["cascade frames by node"]),
    ):
        config = replace(AUTO_FP32, mode=mode)
        assert [str(plan) for plan in admission.candidates(MESSAGE, config, exact=False)] == names
    assert not admission.admit(MESSAGE, ZipcclConfig()).by_node


def test_the_link_between_nodes_decides_what_is_tried() -> None:
    """A rank sends a quarter of the message between nodes: codec and link are compared over those bytes, for two ranks."""
    plans = admission.candidates(MESSAGE, AUTO_FP32, exact=False)
    points = ((1.0, 1e-4), (1e9, 10.0))
    slow = cost_model.LinkProfile(points, encode=8e9, decode=8e9, add=8e9, copy=2e10, add_raw=1e10, call=1e-4)
    found: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "predict", lambda *given: found.append(given) or float(len(found) == 2))
        assert cost_model.fastest(plans, MESSAGE, slow) == plans[1]
    assert [given[:4] for given in found] == [("all_reduce", variant, 2 << 20, 2) for variant in ("coded", "raw")]


# ---- failures ----------------------------------------------------------------------------------------------------------


def garbage(rank: int, ranks: int, group: dist.ProcessGroup, op: str) -> None:
    levels.pretend(nodes_of(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_work, "ALWAYS", replace(test_work.ALWAYS, reduction="fp32"))
        test_work.garbage(rank, ranks, group, op)


@pytest.mark.parametrize("op", ["reduce_scatter_tensor", "all_reduce"])
def test_damaged_frames_raise(tmp_path: Path, op: str) -> None:
    """Frames of rank 1, to its neighbor in the node and to the rank of its local rank in the other node."""
    said = test_work.survive(tmp_path, garbage, 4, op)
    assert sorted(said) == [0, 1, 2, 3]
    assert "frame from global rank 1 refused: VERSION: " in said[0] and all(said[rank] for rank in (2, 3)), said


# Messages of many fragments, whose levels and gather overlap.
for case, *arguments in (
    (as_documented, nodes_of(2, 2), [7, 20001]),
    (as_documented, MIXED, [7, 20001]),
    (sharing, nodes_of(2, 2)),
    (sharing, MIXED),
    (to_owners, nodes_of(2, 2), [20001]),
):
    ranks = sum(map(len, arguments[0]))
    runner.together(ranks, case, tuple(arguments), full="many ranks" * (ranks > 3), file=__name__)(in_small_pieces)


test_programs = runner.programs(__name__, 2)
