"""Sums of NCCL groups on the simulated GPU: their bits, and planted mistakes."""

from __future__ import annotations

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
from levels import Nodes, nodes_of
from sim import mistakes

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import sums as device_sums
from ds_zipccl.comm.device.streams import Stage, Streams
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend, Own
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import world

pytestmark = pytest.mark.usefixtures("small_frames")
ALWAYS: dict[str, Any] = {"enabled": True, "mode": "always", "min_bytes": 0, "nccl": "on", "nccl_min_bytes": 0}
PLAIN: dict[str, Any] = {**ALWAYS, "reduction": "plain"}
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


def in_two_levels(nodes: Nodes) -> bool:
    return topology.levels(nodes) and topology.ascending(nodes)


def documented(contributions: Sequence[torch.Tensor], nodes: Nodes, average: bool) -> torch.Tensor:
    if in_two_levels(nodes):
        return levels.in_two_levels(contributions, nodes, average)
    return levels.in_one_level(contributions, average)


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
    counters.reset()
    cases = ((SIZES, world.ALL_MODES[-1]), (SIZES[-1:], world.Modes()), (SIZES[2:3], world.Modes(declared=True)))
    for seed, (sizes, modes) in enumerate(cases[: 3 if name == "2x2" else 1]):
        world.run(in_documented_order, ranks, nodes, sizes, ALWAYS, seed, seed=seed, modes=modes, route=route)
    rows = counters.rows()
    assert {row["op"] for row in rows} >= {"reduce_scatter", "all_reduce_coalesced", "reduce_to_owners"}
    assert all(row["calls"] and not row["passed"] for row in rows)


@pytest.mark.parametrize("name", tiers.mostly_full(["2x2", "3x1"], ["2x2"], "the same code in one level"))
def test_the_same_in_pieces(route: CudaBackend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces(monkeypatch)
    nodes = NODES[name]
    counters.reset()
    world.run(in_documented_order, sum(map(len, nodes)), nodes, [2051], ALWAYS, modes=world.ALL_MODES[-1], route=route)
    (row,) = (row for row in counters.rows() if row["op"] == "reduce_scatter_tensor")
    assert row["host_waits"] == row["calls"] * (2 if name == "2x2" else 1)


def incompressible(rank: int, ranks: int, nodes: Nodes, texture: str) -> tuple[float, bytes]:
    """The ratio, and the sum's bits."""
    levels.pretend(nodes)
    kind, size = corpus.FP32, 19992
    words = corpus.random_words(size, kind, rank)
    if texture == "shrinks":  # the same sums, of a tensor whose second half is zeros
        words[size // 2 :] = 0
    # exponents from 2 to 200: no block has a window, and no sum overflows
    exponents = 2 + corpus._below(size, 31 + rank, 200).astype(np.int64)
    mine = corpus.tensor(np.where(words == 0, 0, corpus.with_exponents(words, exponents, kind)).astype(kind.word), kind)
    out = torch.empty(size // ranks, device=f"cuda:{rank}")
    counters.reset()
    comm.reduce_scatter_tensor(out, mine.to(out.device), config=ZipcclConfig(**ALWAYS))
    every = [torch.empty_like(mine).to(out.device) for _ in range(ranks)]
    dist.all_gather(every, mine.to(out.device))
    want = documented([one.cpu() for one in every], nodes, False)
    corpus.assert_same_bits(out.cpu(), want[rank * len(out) :][: len(out)])
    return want[: size // 2].numpy().tobytes()  # type: ignore[return-value]


def test_bits_do_not_depend_on_how_well_words_compress(route: CudaBackend) -> None:
    for nodes in (nodes_of(3, 1), nodes_of(2, 2)):
        ranks = sum(map(len, nodes))
        dense = world.run(incompressible, ranks, nodes, "dense", route=route).values
        shrinking = world.run(incompressible, ranks, nodes, "shrinks", route=route).values
        assert set(dense) == set(shrinking) and len(set(dense)) == 1


def as_nccl(rank: int, ranks: int, settings: dict[str, Any]) -> None:
    levels.pretend(nodes_of(2, 1))
    for seed, kind in enumerate(corpus.SUMMED.values()):
        if settings["reduction"] == "plain":
            mine = sums.wild(rank, 6151, kind, seed).to(f"cuda:{rank}")
            want = mine.clone()
            dist.all_reduce(want)
            comm.reduce_to_owners(mine, [(3000, (0,)), (3151, (1,))], config=ZipcclConfig(**settings))
            place = slice(0, 3000) if rank == 0 else slice(3000, 6151)
            sums.assert_same_sums(mine[place].cpu(), want[place].cpu(), corpus.FP32)
            continue
        mine = sums.wild(rank, 6151, kind, seed).to(f"cuda:{rank}")
        want = mine.clone()
        dist.all_reduce(want)
        for _, got, take in every_call(mine, SUM, False, settings, random.Random(seed)):
            # payloads of NaNs are NCCL's own
            sums.assert_same_sums(got.cpu(), take(want.cpu()), corpus.FP32)


@pytest.mark.parametrize("reduction", tiers.mostly_full(["auto", "match", "plain"], ["auto"], "the same sums"))
def test_two_ranks_have_the_bits_of_nccl(route: CudaBackend, reduction: str) -> None:
    world.run(as_nccl, 2, {**ALWAYS, "reduction": reduction}, route=route)


# --- owner-only sums of NCCL's own


def plain_owners(rank: int, ranks: int, nodes: Nodes, sizes: Sequence[int]) -> None:
    levels.pretend(nodes)
    config = ZipcclConfig(**PLAIN)
    for size, owners_of in ((size, owners_of) for size in sizes for owners_of in to_owners.MAPS):
        draw = random.Random(f"{size} {owners_of.__name__}")
        owned, kind = owners_of(draw, size, ranks), draw.choice(list(corpus.SUMMED.values()))
        # one node: no order matters
        mine = spread(rank, size, kind, 3, [list(range(ranks))]).to(f"cuda:{rank}")
        want, mask = mine.clone(), to_owners.mask(owned, rank)
        dist.all_reduce(want)
        comm.reduce_to_owners(mine, to_owners.recut(owned, random.Random(rank)), config=config)
        corpus.assert_same_bits(mine.cpu()[mask], want.cpu()[mask])


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.full(reason="two ranks are in the short tier"))]
)
def test_plain_sums_for_owners(route: CudaBackend, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for in_pieces in (False, True):
        if in_pieces:
            pieces(monkeypatch)
        counters.reset()
        sizes = (2051,) if in_pieces else (7, 2000, 2051)
        world.run(plain_owners, ranks, nodes_of(ranks, 1), sizes, modes=world.ALL_MODES[-1], route=route)
        (row,) = counters.rows()
        assert not row["host_waits"] and set(row["reasons"]) == {PassReason.PLAIN_SUMS.value}
        assert (row["calls"], row["passed"]) == (
            4 * len(sizes) * ranks,
            len(sizes) * ranks,
        )  # slices with several owners pass
        assert row["wire_bytes"] <= 0.51 * row["logical_bytes"]


# --- planted mistakes


def nodes_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    add = device_sums._Summing._add

    def wrong(self: Any, matrix: torch.Tensor, own: torch.Tensor, place: Any, total: torch.Tensor) -> None:
        first, second = (node for node in range(3) if node != self._levels.node)
        turned = matrix.clone()
        turned[first], turned[second] = matrix[second], matrix[first]
        add(self, turned, own, place, total)

    monkeypatch.setattr(device_sums._Summing, "_add", wrong)


def own_words_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    add = device_sums._Summing._add

    def wrong(self: Any, matrix: torch.Tensor, own: torch.Tensor, place: Any, total: torch.Tensor) -> None:
        turned = matrix.clone()
        turned[self._levels.node] = matrix[0]
        monkeypatch.setattr(device_sums, "Own", lambda words, at: Own(words, 0))
        add(self, turned, own, place, total)

    monkeypatch.setattr(device_sums._Summing, "_add", wrong)


def without_order(first: Stage, second: Stage) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        order = Streams.order

        def wrong(self: Streams, one: Stage, other: Stage) -> None:
            if (one, other) != (first, second):
                order(self, one, other)

        monkeypatch.setattr(Streams, "order", wrong)

    return plant


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nodes in another order": nodes_in_another_order,
    "own words elsewhere": own_words_elsewhere,
    "encoded -> sent": without_order(Stage.ENCODE, Stage.WIRE),
    "node sums -> encoded": without_order(Stage.WIRE, Stage.ENCODE),
    "received -> added": without_order(Stage.WIRE, Stage.DECODE),
    "sums -> gathered": without_order(Stage.DECODE, Stage.ENCODE),
}


@pytest.mark.parametrize("mistake", tiers.mostly_full(MISTAKES, list(MISTAKES)[:3], "the others are like these"))
def test_planted_mistakes_are_noticed(route: CudaBackend, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    nodes = NODES["2x2" if "->" in mistake else "3x1"]
    with pytest.raises((AssertionError, world.Fault)):
        for seed in range(mistakes.FEW):
            world.run(in_documented_order, sum(map(len, nodes)), nodes, [2051], ALWAYS, seed, seed=seed, route=route)
