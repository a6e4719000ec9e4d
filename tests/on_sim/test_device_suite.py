"""Every collective on the simulated GPU and NCCL, in random programs; `make soak-sim` runs many more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import corpus
import levels
import pytest
import torch
import torch.distributed as dist
from sim import device

from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import random_programs, world
from on_sim.random_calls import DRAWN, OPERATIONS, SUMS, Desk, Task

#: Seeds of the short tier, and of the full one.
SHORT, FULL = range(30), range(30, 60)


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(FULL, marks=pytest.mark.full(reason="more seeds"))], ids=str)
def test_random_programs(route: CudaBackend, seeds: range) -> None:
    calls: Counter[str] = Counter()
    for seed in seeds:
        calls += random_programs.run(seed, route)
    for name in DRAWN:
        reasons = {kind.removeprefix(f"{name}: ") for kind in calls if kind.startswith(f"{name}: ")}
        passes = PassReason.NOT_ON_DEVICE.of(OPERATIONS[name][0])
        assert reasons or seeds is FULL, f"{name} is not drawn"
        assert reasons <= ({"coded"} if OPS[OPERATIONS[name][0]].on_device else {passes}), name


#: Operation -> host waits of a call; all others have one. All-reduces are a reduce-scatter and a gather.
WAITS = {"all_reduce": 2, "all_reduce several": 2}
#: Operations with a schedule on a device.
CODED = [name for name in DRAWN if OPS[OPERATIONS[name][0]].on_device]


def one_call(rank: int, ranks: int, name: str, nodes: Any) -> tuple[int, int]:
    """Waits of the host for the device in one call, and its looks at events, as the simulator sees them."""
    levels.pretend(nodes)
    group = dist.group.WORLD
    for number in range(2):  # the first call of a group may connect ranks
        task = Task(
            name,
            tuple(range(ranks)),
            group,
            random_programs.CONFIGS[0],
            corpus.BF16,
            5000,
            True,
            False,
            False,
            f"w{number}",
        )
        desk = Desk(task, rank)
        call = desk.call
        seen: list[tuple[int, int]] = []

        def counted(*arguments: Any, **more: Any) -> None:
            counts = device.mine().counters
            before = len(counts.waits), counts.queries
            call(*arguments, **more)  # noqa: B023
            seen.append((len(counts.waits) - before[0], counts.queries - before[1]))  # noqa: B023

        desk.call = counted  # type: ignore[method-assign]
        if number and not rank:
            counters.reset()
        dist.barrier()
        OPERATIONS[name][1](desk)
        if desk.handle is not None:
            desk.handle.wait()
        torch.cuda.synchronize()
        dist.barrier()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "each"), [(name, 1) for name in CODED] + [(name, 2) for name in CODED if name in SUMS]
)
def test_host_waits(route: CudaBackend, name: str, each: int) -> None:
    """On two nodes of ``each`` ranks. The agreement alone waits, by looking at an event; no call blocks."""
    nodes = levels.nodes_of(2, each)
    ranks = sum(map(len, nodes))
    for waits, looks in world.run(one_call, ranks, name, nodes, route=route).values:
        assert waits == 0 and looks >= WAITS.get(name, 1)
    (row,) = [row for row in counters.rows() if row["op"] == OPERATIONS[name][0]]
    assert row["host_waits"] == WAITS.get(name, 1) * ranks and row["calls"] == ranks
