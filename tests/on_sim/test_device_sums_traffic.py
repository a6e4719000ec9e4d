"""Sums of NCCL groups on the simulated GPU: bytes between nodes, host waits, memory, groups, and the values of ``reduction``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import corpus
import levels
import pytest
import torch
import torch.distributed as dist
from levels import Nodes, nodes_of
from sim.device import machine

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import sums
from ds_zipccl.comm.device.streams import streams_of
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.ops.reduce_to_owners import Owners
from ds_zipccl.config import ConfigError, ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.test_device_sums import ALWAYS, AVG, NODES, PLAIN, spread

pytestmark = pytest.mark.usefixtures("small_frames")
AUTO: dict[str, Any] = {**ALWAYS, "mode": "auto"}


# --- bytes between nodes


def bytes_between(nodes: Nodes) -> float:
    """The bytes that this rank has sent between nodes so far. Collectives of NCCL count as rings, which enter each node once, and as this
    rank's part of them."""
    where = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    me, total = dist.get_rank(), 0.0
    for communicator in machine().communicators.values():
        if me not in communicator.ranks:
            continue
        count = len(communicator.ranks)
        links = len({where[rank] for rank in communicator.ranks})
        for call in communicator.calls[me] if links > 1 else ():
            nbytes, itemsize = sum(one.nbytes for one in call.inputs), call.inputs[0].element_size()
            if call.kind == "all_to_all":
                peers = zip(communicator.ranks, call.sent, strict=True)
                total += sum(sent * itemsize for peer, sent in peers if where[peer] != where[me])
                continue
            shares = {
                "all_gather": count - 1,
                "reduce_scatter": (count - 1) / count,
                "all_reduce": 2 * (count - 1) / count,
                "reduce": 1,
            }
            total += shares[call.kind] * nbytes * (links - (call.kind == "reduce")) / count
    return total


NUMEL = 1 << 16


def balanced(ranks: int) -> Owners:
    return [(NUMEL // ranks, (rank,)) for rank in range(ranks)]


CALLS: dict[str, Callable[..., Any]] = {
    "reduce_scatter_tensor": lambda x, ranks, **more: comm.reduce_scatter_tensor(
        x.new_empty(len(x) // ranks), x, **more
    ),
    "reduce_scatter": lambda x, ranks, **more: comm.reduce_scatter(x.new_empty(len(x) // ranks), list(x.chunk(ranks)), **more),
    "all_reduce": lambda x, ranks, **more: comm.all_reduce(x, **more),
    "balanced": lambda x, ranks, **more: comm.reduce_to_owners(x, balanced(ranks), **more),
    "one owner": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), (1,))], **more),
    "all own all": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), range(ranks))], **more),
}  # fmt: skip


def sent_between(
    rank: int, ranks: int, nodes: Nodes, some: dict[str, dict[str, Any]], calls: Sequence[str]
) -> dict[str, float]:
    levels.pretend(nodes)
    found = {}
    mine = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).bfloat16().to(f"cuda:{rank}")
    warm = mine[: 64 * ranks].clone()
    comm.all_reduce(warm, config=ZipcclConfig(**ALWAYS))
    for (kind, settings), name in itertools.product(some.items(), calls):
        if (kind, name) != ("plain", "reduce_scatter"):  # it passes, and the simulated NCCL has none of a list
            before = bytes_between(nodes)
            CALLS[name](mine.clone(), ranks, config=ZipcclConfig(**settings))
            found[f"{kind} {name}"] = bytes_between(nodes) - before
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


@pytest.mark.parametrize(
    ("nodes", "each"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.full(reason="two nodes are in the short tier"))]
)
def test_no_more_bytes_between_nodes_than_a_ring(route: CudaBackend, nodes: int, each: int) -> None:
    found, ranks = totals(route, nodes, each, {"raw": RAW, "coded": ALWAYS, "plain": PLAIN}, list(CALLS)), nodes * each
    for name in CALLS:
        ring = nodes * (ranks - 1) / ranks * 2 * NUMEL * (1 if name.startswith("reduce_scatter") else 2)
        assert 0 < found[f"raw {name}"] <= 1.01 * ring, (name, found[f"raw {name}"] / ring)
        assert found[f"coded {name}"] <= ring / 1.4, (name, found[f"coded {name}"] / ring)
        passes = name.startswith(("reduce_scatter", "all"))
        plain = found.get(f"plain {name}", 0)
        assert plain <= (1 if passes else 0.51) * 1.001 * ring, (name, plain / ring)


@pytest.mark.full(reason="shows that the test before it can fail")
def test_one_level_sends_more_than_a_ring(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "levels", lambda nodes: False)
    found = totals(route, 2, 4, {"raw": RAW}, ["reduce_scatter_tensor"])
    assert found["raw reduce_scatter_tensor"] > 2.2 * 2 * 7 / 8 * 2 * NUMEL


# --- waits and memory


def waiting(rank: int, ranks: int) -> int:
    levels.pretend(nodes_of(2, 2))
    config = ZipcclConfig(**ALWAYS)
    mine = torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).bfloat16().to(f"cuda:{rank}")
    for _ in range(2):
        comm.reduce_scatter_tensor(mine.new_empty(25_000), mine, config=config)
        comm.all_reduce(mine, config=config)
        comm.reduce_to_owners(mine, [(25_000, (owner,)) for owner in range(4)], config=config)
    return len(machine().communicators)


def test_waits_of_the_host_and_groups(route: CudaBackend) -> None:
    counters.reset()
    outcome = world.run(waiting, 4, modes=world.Modes(races=False), route=route)
    waits = {row["op"]: row["host_waits"] / row["calls"] for row in counters.rows()}
    assert waits == {"reduce_scatter_tensor": 1, "all_reduce": 2, "reduce_to_owners": 1}
    assert outcome.values == [1] * 4  # the default group: levels have no groups of their own
    for seen in (
        outcome.counters
    ):  # the program's own copy waits; of ours nothing does, because an agreement looks at its event
        assert len(seen.waits) == 1 and "pageable" in seen.waits[0][0]


def bounded(rank: int, ranks: int) -> tuple[int, int]:
    levels.pretend(nodes_of(2, 2))
    config = ZipcclConfig(**{**ALWAYS, "staging_mib": 1})
    mine = torch.randn(400_000, generator=torch.Generator().manual_seed(rank)).bfloat16().to(f"cuda:{rank}")
    out = mine.new_empty(100_000)
    peaks = []
    for _ in range(2):
        comm.reduce_scatter_tensor(out, mine, config=config)
        comm.reduce_scatter_tensor(out, mine, AVG, config=config)
        comm.reduce_to_owners(
            mine, [(100_000, (owner,)) for owner in (0, 1, 0, 2)], config=ZipcclConfig(**{**PLAIN, "staging_mib": 1})
        )
        peaks.append(streams_of(mine.device).nbytes())
    return peaks[0], peaks[1]


@pytest.mark.full(reason="400,000 elements are many for the emulated kernels")
def test_memory_is_bounded(route: CudaBackend) -> None:
    for first, second in world.run(bounded, 4, modes=world.Modes(races=False), route=route).values:
        assert 0 < first <= second <= 1 << 20


@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("local_ranks", [1, 8])
def test_sizes_of_pieces(nodes: int, local_ranks: int) -> None:
    """Node sums take half of the budget, and three fragments the rest, wherever a fragment can be so small."""
    for mib in (1, 64, 256):
        budget, rows = mib << 20, nodes + local_ranks
        summing: Any = SimpleNamespace(
            _packed=True, _dtype=torch.bfloat16, _rows=rows, _ctx=SimpleNamespace(budget=budget)
        )
        whole = budget // 2 // rows // 2 // sums._ALIGNED * sums._ALIGNED
        assert sums._Summing.step(summing, whole - 1) == whole, "one piece, and so one agreement"
        for numel in (1, 1000, 10**6, 10**9):
            step = wire.device_sum_numel(numel, 2, rows, budget)
            assert 1 <= step <= max(numel, wire.FRAGMENT_UNIT)
            assert 2 * rows * step <= max(budget // 2, 2 * rows * wire.FRAGMENT_UNIT)
            left = budget - 2 * rows * step
            fragment = wire.device_sum_fragment(step, 2, nodes, left)
            assert fragment == wire.FRAGMENT_UNIT or 3 * 2 * (2 * nodes * fragment) <= left


# --- what `reduction` means


def reasons(rank: int, ranks: int, nodes: Nodes, settings: dict[str, Any], device_sums: str = "fp32") -> None:
    levels.pretend(nodes)
    state = group_state(None)
    assert state is not None
    state.device_sums = device_sums
    config, mine = ZipcclConfig(**settings), torch.ones(64 * ranks, device=f"cuda:{rank}")
    comm.all_reduce(mine, config=config)
    comm.reduce_scatter_tensor(mine[:64].clone(), mine, config=config)
    comm.reduce_to_owners(mine, [(64, (owner,)) for owner in range(ranks)], config=config)
    assert mine[64 * rank].item() == ranks * ranks


@pytest.mark.parametrize(
    ("nodes", "settings", "device_sums", "coded"),
    [
        ("3x1", AUTO, "fp32", True),
        ("3x1", AUTO, "plain", False),
        ("3x1", {**AUTO, "reduction": "fp32"}, "plain", True),
        ("3x1", {**ALWAYS, "reduction": "plain"}, "fp32", False),
        ("2x2", AUTO, "fp32", True),
        ("one", AUTO, "fp32", False),
        ("one", {**AUTO, "reduction": "fp32"}, "fp32", False),
        ("one", ALWAYS, "fp32", True),
        ("uneven", AUTO, "fp32", False),
        ("uneven", {**AUTO, "reduction": "fp32"}, "fp32", True),
        ("uneven", ALWAYS, "fp32", True),
        ("not ascending", AUTO, "fp32", False),
    ],
)
def test_what_is_summed_by_whom(route: CudaBackend, nodes: str, settings: Any, device_sums: str, coded: bool) -> None:
    counters.reset()
    ranks = sum(map(len, NODES[nodes]))
    world.run(reasons, ranks, NODES[nodes], settings, device_sums, route=route)
    passed = {row["op"]: set(row["reasons"]) for row in counters.rows()}
    assert passed.pop("reduce_to_owners") == set()
    assert all(found == (set() if coded else {PassReason.PLAIN_SUMS.value}) for found in passed.values()) and passed


def test_match_is_refused(route: CudaBackend) -> None:
    settings = {**ALWAYS, "reduction": "match"}
    with pytest.raises(ConfigError, match=r"no order is promised by NCCL itself.*match is for gloo"):
        world.run(reasons, 3, nodes_of(3, 1), settings, route=route)
    world.run(reasons, 3, nodes_of(3, 1), {**settings, "nccl": "off"}, route=route)


def in_subgroups(rank: int, ranks: int) -> int:
    """Groups that overlap, and one with the ranks of another: their levels share groups."""
    levels.pretend(nodes_of(2, 4))
    config = ZipcclConfig(**ALWAYS)
    for members in ([0, 1, 4, 5], [2, 3, 6, 7], [0, 1, 2, 4, 5, 6], [0, 1, 4, 5]):
        group = dist.new_group(members)
        if rank in members:
            mine = spread(rank, 999, corpus.FP32, 1, nodes_of(2, 4)).to(f"cuda:{rank}")
            comm.all_reduce(mine, group=group, config=config)
            found = {member: spread(member, 999, corpus.FP32, 1, nodes_of(2, 4)) for member in members}
            nodes = [[one for one in members if one < 4], [one for one in members if one >= 4]]
            places = [[members.index(one) for one in node] for node in nodes]
            corpus.assert_same_bits(mine.cpu(), levels.in_two_levels(list(found.values()), places))
    return len(machine().communicators)


def test_subgroups(route: CudaBackend) -> None:
    for seed in range(4):
        outcome = world.run(in_subgroups, 8, seed=seed, modes=world.ALL_MODES[seed], route=route)
    assert max(outcome.values) == 5  # those of the program
