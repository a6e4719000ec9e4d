"""Sums in two levels: the bits of the documented order, the bytes between nodes, and the groups that sum in one level."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import levels
import pytest
import ranks as runner
import sums
import test_reduce_to_owners as owners
import test_work
import torch
import torch.distributed as dist
from levels import Nodes, Summed, in_one_level, in_one_level_only, in_two_levels, nodes_of
from moves import flip_a_bit
from sums import all_reduce_by_memory, bell, coded, wild
from test_pipeline import in_small_pieces

from ds_zipccl import comm
from ds_zipccl.comm import reduction_order, topology
from ds_zipccl.comm.group_state import find_nodes, group_nodes
from ds_zipccl.comm.host import sums_by_node
from ds_zipccl.comm.ops import reduce_to_owners
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, cost_model, tuner_rules
from ds_zipccl.policy.admission import Message
from ds_zipccl.telemetry import counters

FP32 = replace(sums.CODED, reduction="fp32")
AUTO = ZipcclConfig(enabled=True, min_bytes=0, reduction="fp32")
#: Nodes whose ranks do not follow each other.
MIXED = [[0, 3], [1, 2], [4, 5]]
SIZES = (0, 1, 2, 7, 31, 2049, 20001)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element behind an aligned address."""
    return torch.cat([tensor[:0].new_zeros(1), tensor])[1:]


@runner.together(4, nodes_of(2, 2), (4 * 70001,))
@runner.together(6, MIXED, (7, 20001))
@runner.together(6, MIXED, (7, 20001))
@runner.together(4, nodes_of(2, 2), (4 * 70_001,))
@runner.together(4, nodes_of(2, 2))
@runner.together(6, nodes_of(3, 2))
@runner.together(8, nodes_of(4, 2), full="eight ranks on two cores")
@runner.together(8, nodes_of(2, 4), full="eight ranks on two cores")
def as_documented(
    rank: int,
    ranks: int,
    nodes: Nodes,
    sizes: Sequence[int] = SIZES,
    plant: Callable[[], None] | None = None,
) -> None:
    """Sums have the bits of the order that the documentation names, in every dtype, blocking and not, through frames only."""
    levels.pretend(nodes)
    if plant is not None:
        plant()
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
    build = sums_by_node.NodeAdder.__init__

    def wrong(self: Any, ctx: Any, *more: Any) -> None:
        build(self, ctx, *more)
        self._local_rank = self._local_rank[::-1]

    sums_by_node.NodeAdder.__init__ = wrong  # type: ignore[method-assign]


def other_order_in_nodes() -> None:
    """From now on the ranks of a node are added from the last to the first."""
    right = sums_by_node.add_in_fp32

    def wrong(contributions: Any, ranks: Any, *more: Any) -> None:
        right(contributions, ranks if len(more) > 2 else ranks[::-1], *more)

    sums_by_node.add_in_fp32 = wrong


def second_rounding() -> None:
    """From now on every addition rounds."""
    add = sums_by_node.Received.add

    def wrong(self: Any, rank: int, total: torch.Tensor) -> None:
        add(self, rank, total)
        total.copy_(total.to(self.own.dtype))

    sums_by_node.Received.add = wrong  # type: ignore[method-assign]


def no_rounding_of_nodes() -> None:
    """From now on the sums of nodes lose a bit, as if they were rounded in another way."""
    right = sums_by_node.NodeAdder._sum_of_node

    def wrong(self: Any, contribution: torch.Tensor, buffers: Any) -> torch.Tensor:
        return right(self, contribution, buffers).view(torch.int16).bitwise_and_(-2).view(contribution.dtype)

    sums_by_node.NodeAdder._sum_of_node = wrong  # type: ignore[method-assign]


def divided_in_nodes() -> None:
    """From now on averages divide the sums of nodes."""
    right = sums_by_node.add_in_fp32

    def wrong(contributions: Any, ranks: Any, out: torch.Tensor, flushes: Any, divisor: int = 0) -> None:
        right(contributions, ranks, out, flushes, len(ranks) if divisor != 1 else 1)

    sums_by_node.add_in_fp32 = wrong


PLANTS = [
    other_order_of_nodes,
    other_order_in_nodes,
    second_rounding,
    no_rounding_of_nodes,
    in_one_level_only,
    divided_in_nodes,
    flip_a_bit,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_fault_is_seen(plant: Callable[[], None]) -> None:
    # the sum of two does not depend on their order
    nodes = nodes_of(2, 3) if plant is other_order_in_nodes else nodes_of(3, 2)
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(as_documented, 6, nodes, (20001,), plant)


# ---- owners ------------------------------------------------------------------------------------------------------------


def all_by_all(draw: random.Random, size: int, ranks: int) -> owners.Owners:
    return [(size, range(ranks))]


def to_owners(rank: int, ranks: int, nodes: Nodes, sizes: Sequence[int]) -> None:
    """The owners' slices have the bits of the documented order, by all schedules."""
    levels.pretend(nodes)
    used = set()
    for size, owners_of in itertools.product(sizes, (*owners.MAPS, all_by_all)):
        case = random.Random(f"{size} {owners_of.__name__}")
        owned = owners_of(case, size, ranks)
        kind, fill = case.choice(list(corpus.SUMMED.values())), case.choice([bell, wild])
        average = case.random() < 0.3
        everyone, own = [fill(peer, size, kind, size) for peer in range(ranks)], owners.mask(owned, rank)
        spans = reduce_to_owners.spans_of(everyone[0], owned, ranks)
        reduction = reduction_order.Reduction("fp32", "SUM", ranks)
        used.add(type(reduce_to_owners._schedule(spans, size, nodes, reduction)).__name__)
        for more in ({}, {"codec": "raw"}, {"check": "shadow"}):
            got = everyone[rank].clone()
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            config = replace(FP32, **more)
            comm.reduce_to_owners(got, owners.recut(owned, random.Random(rank)), op, config=config)
            sums.assert_same_sums(got[own], in_two_levels(everyone, nodes, average)[own], kind)
    assert not any(row["passed"] for row in counters.rows())
    # with two nodes contributions that go straight never crowd a link
    assert used == {"_Straight", "_ToAll"} | ({"_ByShards"} if len(nodes) > 2 else set()) or len(sizes) == 1


for nodes in (nodes_of(2, 2), nodes_of(2, 4), MIXED):
    runner.together(sum(map(len, nodes)), nodes, [1, 37, 4099])(to_owners)


# ---- groups and choices ------------------------------------------------------------------------------------------------


@runner.together(4, [[0, 1, 2], [3]])
@runner.together(4, [[0], [1], [2], [3]])
@runner.together(4, [[0, 1, 2, 3]])
@runner.together(4, [])
def one_level(rank: int, ranks: int, nodes: Nodes) -> None:
    """Nodes that are uneven, have a rank each, are one or unknown."""
    levels.pretend(nodes)
    everyone = [bell(peer, 20001, corpus.BF16, 0) for peer in range(ranks)]
    assert not torch.equal(in_one_level(everyone), in_two_levels(everyone, nodes_of(2, 2)))
    got = everyone[rank].clone()
    comm.all_reduce(got, config=FP32)
    corpus.assert_same_bits(got, in_one_level(everyone))


@runner.together(6)
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
    comm.all_reduce(got, config=sums.CODED)
    dist.all_reduce(wanted)
    corpus.assert_same_bits(got, wanted)


@runner.together(4)
def whatever_is_chosen(rank: int, ranks: int) -> None:
    """Under auto, with data that shrink and data that do not, all calls have the same order; the plain collective is never called."""
    nodes = nodes_of(2, 2)
    levels.pretend(nodes)
    chosen = []
    for kind in ("bell", "noise"):
        counters.reset()
        for step in range(3 * tuner_rules.TRIAL_CALLS + tuner_rules.DELAY_CALLS[0]):
            draw = torch.Generator().manual_seed(step)
            noise = torch.randint(-(1 << 15), 1 << 15, (ranks, 40_000), dtype=torch.int16, generator=draw)
            everyone = [bell(peer, 40_000, corpus.BF16, step) for peer in range(ranks)]
            everyone = everyone if kind == "bell" else list(noise.view(torch.bfloat16))
            got = everyone[rank].clone()
            comm.all_reduce(got, config=AUTO)
            sums.assert_same_sums(got, in_two_levels(everyone, nodes), corpus.BF16)
        (row,) = counters.rows()
        assert not row["passed"]
        chosen += [text for text, _ in row["choices"].values()]
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, chosen)
    assert all(other == chosen for other in told)
    assert "uncoded frames by node" in chosen[0] and "cascade frames by node" in chosen[0] and "plain" not in chosen[0]


MESSAGE = Message("all_reduce", torch.bfloat16, 1 << 22, 8, "cpu", "gloo", "dp", "SUM", nodes=2)


def test_the_levels_are_no_choice() -> None:
    for mode, names in (
        ("auto", ["uncoded frames by node", "cascade frames by node"]),
        ("always", ["cascade frames by node"]),
    ):
        config = replace(AUTO, mode=mode)
        assert [str(plan) for plan in admission.candidates(MESSAGE, config, exact=False)] == names
    assert not admission.admit(MESSAGE, ZipcclConfig()).by_node


def test_the_link_between_nodes_decides_what_is_tried() -> None:
    """A rank sends a quarter of the message between nodes: codec and link are compared over those bytes, for two ranks."""
    plans = admission.candidates(MESSAGE, AUTO, exact=False)
    points = ((1.0, 1e-4), (1e9, 10.0))
    slow = cost_model.LinkProfile(points, encode=8e9, decode=8e9, add=8e9, copy=2e10, add_raw=1e10, call=1e-4)
    found: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "predict", lambda *given: found.append(given) or float(len(found) == 1))
        assert cost_model.prune_candidates(plans, MESSAGE, slow) == plans[1:]
    assert [given[:4] for given in found] == [("all_reduce", variant, 2 << 20, 2) for variant in ("raw", "coded")]


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


def dying(rank: int, ranks: int, group: dist.ProcessGroup, op: str) -> None:
    levels.pretend(nodes_of(2, 2))
    test_work.dying(rank, ranks, group, op, FP32)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    said = test_work.survive(tmp_path, dying, 4, "all_reduce")
    assert sorted(said) == [0, 1, 2] and all(text.startswith("all_reduce (group ") for text in said.values())


# Messages of many fragments, whose levels and gather overlap.
for case, *arguments in (
    (as_documented, nodes_of(2, 2), [7, 20001]),
    (as_documented, MIXED, [7, 20001]),
    (sharing, nodes_of(2, 2)),
    (sharing, MIXED),
    (to_owners, nodes_of(2, 2), [20001]),
):
    ranks = sum(map(len, arguments[0]))
    runner.together(ranks, case, tuple(arguments), file=__name__)(in_small_pieces)
test_programs = runner.programs(__name__)
