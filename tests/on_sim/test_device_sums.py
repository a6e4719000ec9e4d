"""Sums of NCCL groups on the simulated GPU: bits, planted mistakes, bytes between nodes, memory, and the values of ``reduction``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import levels
import numpy as np
import pytest
import sums
import test_owners as to_owners
import tiers
import torch
import torch.distributed as dist
from levels import CALLS, Nodes, nodes_of
from sim.device import machine

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import sums as device_sums
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.comm.device.streams import Stage, streams_of
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend, Own
from ds_zipccl.policy import cost_model, wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.settled import DTYPES, Sums
from ds_zipccl.telemetry import counters
from on_sim import plants, random_programs, world
from on_sim.cases import bytes_sent, documented, weights

pytestmark = pytest.mark.usefixtures("small_frames")
ALWAYS: dict[str, Any] = {"enabled": True, "mode": "always", "min_bytes": 0, "nccl": "on", "nccl_min_bytes": 0}
AUTO: dict[str, Any] = {**ALWAYS, "mode": "auto"}
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
#: Elements of messages: fewer than ranks, and more than a block for each of two ranks.
SIZES = (0, 1, 7, 2051)


def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several agreements a sum, and several fragments an agreement."""
    monkeypatch.setattr(wire, "device_sum_numel", lambda *more: 256)
    monkeypatch.setattr(wire, "device_sum_fragment", lambda *more: 100)


def spread(rank: int, size: int, kind: corpus.Float, seed: int, nodes: Nodes) -> torch.Tensor:
    """Numbers that a node adds without rounding, in any order, and whose sum over nodes depends on the order even in fp32: small integers
    times a power of two of the node."""
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    integers = corpus._below(size, 1000 * (rank + 1) + seed, 9).astype(np.int64) - 4
    reach = 12 if kind is corpus.FP16 else 60
    powers = corpus._below(size, 77 * (node + 1) + seed, reach).astype(np.int64) - reach // 2
    return torch.from_numpy(np.ldexp(integers.astype(np.float64), powers)).to(kind.dtype)


def every_call(
    mine: torch.Tensor, op: Any, later: bool, settings: dict[str, Any], draw: random.Random
) -> list[tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """All ways to call: name, result of this rank, and a function that takes the same from the sum of everything."""
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), len(mine)
    api, config = sums.coded(**settings), ZipcclConfig(**settings)
    shard = size // ranks
    cuts = [min(shard, 7 * peer) for peer in range(ranks - 1)]
    begin = sum(cuts[:rank])
    listed = slice(begin, begin + cuts[rank] if rank < ranks - 1 else size)
    even = slice(shard * rank, shard * (rank + 1))
    places: dict[Callable[..., Any], slice] = {
        sums.reduce_scatter_tensor: even, sums.reduce_scatter_in_place: even, sums.reduce_scatter: listed,
        sums.all_reduce: slice(0, size), sums.all_reduce_by_memory: slice(0, size // 3 * 3), sums.all_reduce_coalesced: slice(0, size),
    }  # fmt: skip
    found = []
    for call, place in places.items():
        got = call(api, mine.clone(), op, later)
        found.append((call.__name__, got[: place.stop - place.start], lambda whole, place=place: whole[place]))
    for owners_of in draw.sample(to_owners.MAPS, 2):
        owned = owners_of(draw, size, ranks)
        mask = to_owners.mask(owned, rank)
        got = mine.clone()
        comm.reduce_to_owners(got, to_owners.recut(owned, random.Random(rank)), op, config=config)
        found.append((owners_of.__name__, got.cpu()[mask], lambda whole, mask=mask: whole[mask]))
    return found


def in_documented_order(
    rank: int, ranks: int, nodes: Nodes, sizes: Sequence[int], settings: dict[str, Any], case: int = 0
) -> None:
    levels.pretend(nodes)
    for number, size in enumerate(sizes):
        draw = random.Random(f"{case} {size}")
        kind = list(corpus.SUMMED.values())[(case + number) % 3]
        average, wild = draw.random() < 0.3, max(map(len, nodes)) <= 2 and draw.random() < 0.4
        contributions = [
            sums.wild(peer, size, kind, case) if wild else spread(peer, size, kind, case, nodes)
            for peer in range(ranks)
        ]
        want = documented(contributions, nodes, average)
        mine = contributions[rank].to(f"cuda:{rank}")
        for name, got, take in every_call(mine, AVG if average else SUM, bool(number % 2), settings, draw):
            try:
                sums.assert_same_sums(got.cpu(), take(want), corpus.FP32 if average else kind)
            except AssertionError as error:
                raise AssertionError(f"{name} of {size} {kind.dtype}, {average=}, {wild=}: {error}") from error


NODES: dict[str, Nodes] = {
    "2x1": nodes_of(2, 1),
    "3x1": nodes_of(3, 1),
    "2x2": nodes_of(2, 2),
    "in turn": [[0, 2], [1, 3]],
    "one": [[0, 1, 2]],
    "uneven": [[0, 1, 2], [3]],
    "not ascending": [[0, 3], [1, 2]],
    "4x1": nodes_of(4, 1),
    "2x4": nodes_of(2, 4),
    "4x2": nodes_of(4, 2),
    "8x1": nodes_of(8, 1),
}


@pytest.mark.parametrize("name", tiers.mostly_full(NODES, ["3x1", "2x2"], "other nodes are in the short tier"))
def test_bits_are_those_of_the_documented_order(route: CudaBackend, name: str) -> None:
    nodes = NODES[name]
    ranks = sum(map(len, nodes))
    cases = ((SIZES, world.ALL_MODES[-1]), (SIZES[-1:], world.Modes()), (SIZES[2:3], world.Modes(declared=True)))
    for seed, (sizes, modes) in enumerate(cases[: 3 if name == "2x2" else 1]):
        world.run(in_documented_order, ranks, nodes, sizes, ALWAYS, seed, seed=seed, modes=modes, route=route)
        rows = counters.rows()
        assert {row["op"] for row in rows} >= {"reduce_scatter", "all_reduce_coalesced", "reduce_to_owners"}
        assert all(row["calls"] and not row["passed"] for row in rows)


@pytest.mark.parametrize("name", to_owners.UNLIKE)
def test_owners_that_differ(route: CudaBackend, name: str) -> None:
    config = ZipcclConfig(**{**ALWAYS, "reduction": "fp32"})
    world.run(unlike, 2, name, config, modes=world.ALL_MODES[-1], route=route)
    (row,) = counters.rows()
    assert row["reasons"][PassReason.OWNERS.value] == 6


def unlike(rank: int, ranks: int, name: str, config: ZipcclConfig) -> None:
    to_owners.unlike_owners(rank, ranks, name, config, device=f"cuda:{rank}")


# --- planted mistakes


def other_rows(turn: Callable[[int, torch.Tensor, torch.Tensor], None], own_at: int | None = None) -> plants.Plant:
    """``turn`` gets the number of the node, the rows that are added, and a copy to change, which is added instead; own words count as being
    in row ``own_at``, if it is given."""
    add = device_sums.Summing._add

    def wrong(self: Any, matrix: torch.Tensor, own: torch.Tensor, place: Any, total: torch.Tensor) -> None:
        turned = matrix.clone()
        turn(self._levels.node, matrix, turned)
        add(self, turned, own, place, total)

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_sums.Summing, "_add", wrong)
        if own_at is not None:
            monkeypatch.setattr(device_sums, "Own", lambda words, at: Own(words, own_at))

    return plant


def swap_others(node: int, rows: torch.Tensor, turned: torch.Tensor) -> None:
    first, second = (other for other in range(3) if other != node)
    turned[first], turned[second] = rows[second], rows[first]


def first_in_own_place(node: int, rows: torch.Tensor, turned: torch.Tensor) -> None:
    turned[node] = rows[0]


MISTAKES: dict[str, plants.Plant] = {
    "nodes in another order": other_rows(swap_others),
    "own words elsewhere": other_rows(first_in_own_place, 0),
    "encoded -> sent": plants.without_order(Stage.ENCODE, Stage.WIRE),
    "node sums -> encoded": plants.without_order(Stage.WIRE, Stage.ENCODE),
    "received -> added": plants.without_order(Stage.WIRE, Stage.DECODE),
    "sums -> gathered": plants.without_order(Stage.DECODE, Stage.ENCODE),
}


@pytest.mark.parametrize("mistake", tiers.mostly_full(MISTAKES, list(MISTAKES)[:3], "the others are like these"))
def test_planted_mistakes_are_noticed(route: CudaBackend, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    nodes = NODES["2x2" if "->" in mistake else "3x1"]
    plants.fails(in_documented_order, sum(map(len, nodes)), nodes, [2051], ALWAYS, route=route)


# --- bytes between nodes

NUMEL = 1 << 16


def sent_between(
    rank: int, ranks: int, nodes: Nodes, some: dict[str, dict[str, Any]], calls: Sequence[str]
) -> dict[str, float]:
    levels.pretend(nodes)
    found = {}
    mine = weights(rank, NUMEL).to(f"cuda:{rank}")
    warm = mine[: 64 * ranks].clone()
    comm.all_reduce(warm, config=ZipcclConfig(**ALWAYS))
    for (kind, settings), name in itertools.product(some.items(), calls):
        if (kind, name) != ("plain", "reduce_scatter"):  # it passes, and the simulated NCCL has none of a list
            before = bytes_sent(nodes)
            CALLS[name](mine.clone(), ranks, config=ZipcclConfig(**settings))
            found[f"{kind} {name}"] = bytes_sent(nodes) - before
    return found


def totals(
    route: CudaBackend, nodes: int, each: int, some: dict[str, dict[str, Any]], calls: Sequence[str]
) -> dict[str, float]:
    modes = world.Modes(races=False)
    of_ranks = world.run(
        sent_between, nodes * each, nodes_of(nodes, each), some, calls, modes=modes, route=route
    ).values
    return {name: sum(one[name] for one in of_ranks) for name in of_ranks[0]}


RAW = {**ALWAYS, "codec": "raw"}
SHAPES = [(2, 2), *(pytest.param(*shape, marks=pytest.mark.full(reason="eight ranks")) for shape in ((2, 4), (4, 2)))]


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_no_more_bytes_between_nodes_than_a_ring(route: CudaBackend, nodes: int, each: int) -> None:
    found, ranks = totals(route, nodes, each, {"raw": RAW, "coded": ALWAYS}, list(CALLS)), nodes * each
    for name in CALLS:
        ring = nodes * (ranks - 1) / ranks * 2 * NUMEL * (1 if name.startswith(("reduce_scatter", "gather")) else 2)
        assert 0 < found[f"raw {name}"] <= 1.01 * ring, (name, found[f"raw {name}"] / ring)
        assert found[f"coded {name}"] <= ring / 1.4, (name, found[f"coded {name}"] / ring)


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_a_gather_in_two_levels_enters_each_node_once(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, nodes: int, each: int
) -> None:
    """A ring brings (n-1)/n of the whole into each of m nodes, where (m-1)/m is necessary."""
    ranks, necessary = nodes * each, (nodes - 1) * 2 * NUMEL
    ring = totals(route, nodes, each, {"raw": RAW}, ["gather"])
    assert ring["raw gather"] >= 0.99 * necessary * (ranks - 1) / ranks * nodes / (nodes - 1)
    monkeypatch.setattr(cost_model, "levels_from", lambda topology, profile: 0.0)
    found = totals(route, nodes, each, {"raw": RAW, "coded": ALWAYS}, ["gather"])
    assert 0 < found["raw gather"] <= 1.01 * necessary
    assert found["coded gather"] <= necessary / 1.4


def gathered(rank: int, ranks: int) -> list[tuple[str, int]]:
    """The collectives of a gather with agreed sizes, and the bytes that each has sent."""
    levels.pretend(nodes_of(2, 2))
    own = weights(rank, 8_000).to(f"cuda:{rank}")
    agreed = Agreed("one", own.numel())
    config = ZipcclConfig(**ALWAYS)
    comm.agree_sizes([(agreed, own)], config=config)
    (calls,) = (one.calls[rank] for one in machine().communicators.values())
    before = len(calls)
    comm.all_gather_into_tensor(own.new_empty(ranks * own.numel()), own, parameters=[agreed], config=config)
    return [(call.kind, sum(one.nbytes for one in call.inputs)) for call in calls[before:]]


@pytest.mark.parametrize(("kind", "each"), [("all_to_all", 2), ("all_gather", 1)])
def test_fragments_of_a_gather_are_few_and_equal_and_go_one_way(route: CudaBackend, kind: str, each: int) -> None:
    """Slots of 64 KB go in three fragments of 21 KB, as 32 KB of memory demand: more than the bytes for two levels, or fewer."""
    with random_programs.limits(32 << 10, 20_000 if each == 2 else 24_000):
        found = world.run(gathered, 4, route=route).values
    for calls in found:
        assert [one for one, _ in calls] == [kind] * 3 * each
        sent = [nbytes for _, nbytes in calls[::each]]
        assert max(sent) <= 1.2 * min(sent)


@pytest.mark.full(reason="shows that the test before it can fail")
def test_one_level_sends_more_than_a_ring(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "levels", lambda nodes: False)
    found = totals(route, 2, 4, {"raw": RAW}, ["reduce_scatter_tensor"])
    assert found["raw reduce_scatter_tensor"] > 2.2 * 2 * 7 / 8 * 2 * NUMEL


def with_an_empty_shard(rank: int, ranks: int) -> None:
    levels.pretend(nodes_of(2, 2))
    everybodys = [weights(peer, 512) for peer in range(ranks)]
    parts = [part.to(f"cuda:{rank}") for part in (everybodys[rank][:0], everybodys[rank])]
    for settings in (RAW, ALWAYS):
        wholes = [part.new_empty(part.numel() * ranks) for part in parts]
        comm.all_gather_coalesced(wholes, parts, config=ZipcclConfig(**settings))
        assert not wholes[0].numel() and torch.equal(wholes[1].cpu(), torch.cat(everybodys))


def test_an_empty_shard_in_two_levels(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "levels_from", lambda topology, profile: 0.0)
    world.run(with_an_empty_shard, 4, route=route)


# --- memory


def bounded(rank: int, ranks: int) -> tuple[int, int]:
    levels.pretend(nodes_of(2, 2))
    config = ZipcclConfig(**{**ALWAYS, "staging_mib": 1})
    mine = weights(rank, 400_000).to(f"cuda:{rank}")
    out = mine.new_empty(100_000)
    peaks = []
    for _ in range(2):
        comm.reduce_scatter_tensor(out, mine, config=config)
        comm.reduce_scatter_tensor(out, mine, AVG, config=config)
        comm.reduce_to_owners(
            mine, [(100_000, (owner,)) for owner in (0, 1, 0, 2)], config=ZipcclConfig(**{**ALWAYS, "staging_mib": 1})
        )
        peaks.append(streams_of(mine.device).nbytes())
    return peaks[0], peaks[1]


@pytest.mark.full(reason="400,000 elements are many for the emulated kernels")
def test_memory_is_bounded(route: CudaBackend) -> None:
    for first, second in world.run(bounded, 4, modes=world.Modes(races=False), route=route).values:
        assert 0 < first <= second <= 1 << 20


@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("local_ranks", [1, 8])
@pytest.mark.parametrize("adjacent", [False, True])
def test_sizes_of_pieces(nodes: int, local_ranks: int, adjacent: bool) -> None:
    """Node sums take three quarters of the budget, and three fragments the rest, wherever a fragment can be so small."""
    inside = local_ranks if local_ranks > 1 else 0
    for mib in (1, 64, 256):
        budget, alone, packing = mib << 20, nodes + inside, nodes + 2 * inside
        whole = 3 * budget // 4 // packing // 2
        assert wire.sum_step(whole, 2, nodes, local_ranks, budget, adjacent=False) == (whole, packing)
        whole = 3 * budget // 4 // alone // 2
        at_once = wire.sum_step(whole, 2, nodes, local_ranks, budget, adjacent=True)
        assert at_once == (whole, alone), "one agreement, and no memory to pack"
        for numel in (1, 1000, 10**6, 10**9):
            step, rows = wire.sum_step(numel, 2, nodes, local_ranks, budget, adjacent=adjacent)
            assert rows in (alone, packing) and (rows == packing or step == numel)
            assert 1 <= step <= max(numel, wire.FRAGMENT_UNIT)
            assert 2 * rows * step <= max(3 * budget // 4, 2 * rows * wire.FRAGMENT_UNIT)
            left = budget - 2 * rows * step
            fragment = wire.device_sum_fragment(step, 2, nodes, left)
            assert fragment == wire.FRAGMENT_UNIT or 3 * 2 * (2 * nodes * fragment) <= left


# --- what `reduction` means


def reasons(rank: int, ranks: int, nodes: Nodes, settings: dict[str, Any], dtypes: tuple[str, ...] = DTYPES) -> None:
    levels.pretend(nodes)
    state = group_state(None)
    assert state is not None
    state.device_sums = Sums(dtypes)
    config, mine = ZipcclConfig(**settings), torch.ones(64 * ranks, device=f"cuda:{rank}")
    comm.all_reduce(mine, config=config)
    comm.reduce_scatter_tensor(mine[:64].clone(), mine, config=config)
    comm.reduce_to_owners(mine, [(64, (owner,)) for owner in range(ranks)], config=config)
    assert mine[64 * rank].item() == ranks * ranks


@pytest.mark.parametrize(
    ("nodes", "settings", "dtypes", "coded"),
    [
        ("2x1", {**AUTO, "reduction": "match"}, (), True),
        ("3x1", {**ALWAYS, "reduction": "match"}, DTYPES, False),
        ("2x1", {**AUTO, "nccl": "auto"}, (), False),
        ("2x1", AUTO, (), False),
        ("3x1", AUTO, DTYPES, True),
        ("3x1", AUTO, ("bfloat16", "float16"), False),
        ("3x1", {**AUTO, "reduction": "fp32"}, (), True),
        ("3x1", {**ALWAYS, "reduction": "plain"}, DTYPES, False),
        ("2x2", AUTO, ("float32",), True),
        ("one", AUTO, DTYPES, False),
        ("one", {**AUTO, "reduction": "fp32"}, DTYPES, False),
        ("one", ALWAYS, DTYPES, True),
        ("uneven", AUTO, DTYPES, False),
        ("uneven", {**AUTO, "reduction": "fp32"}, DTYPES, True),
        ("uneven", ALWAYS, DTYPES, True),
        ("not ascending", AUTO, DTYPES, False),
    ],
)
def test_what_is_summed_by_whom(route: CudaBackend, nodes: str, settings: Any, dtypes: Any, coded: bool) -> None:
    ranks = sum(map(len, NODES[nodes]))
    world.run(reasons, ranks, NODES[nodes], settings, dtypes, route=route)
    passed = {row["op"]: set(row["reasons"]) for row in counters.rows()}
    assert list(passed.values()) == [set() if coded else {PassReason.PLAIN_SUMS.value}] * 3
