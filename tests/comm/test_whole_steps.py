"""mode auto on gloo: whole steps are timed, and all ranks follow the faster schedule from the same step on, with the same bits; nodes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, CODED

from ds_zipccl import comm
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.group_state import group_state, link_profile
from ds_zipccl.comm.host import engine as host_engine
from ds_zipccl.comm.host import exchange as host_exchange
from ds_zipccl.comm.host import gather, pipeline, sums
from ds_zipccl.comm.steps import Steps
from ds_zipccl.policy import trial
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render

NUMEL = 40_000
#: Steps with each pair of speeds: a probe that the change of speeds may have disturbed, a trial, and some more probes.
PHASE = 120


class Speeds:
    """Adds seconds to the plain collective and to our schedule."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = self.ours = 0.0
        pump = pipeline.run_pipeline

        def slow(*args: Any) -> None:
            time.sleep(self.ours)
            pump(*args)

        for module in (host_exchange, gather, sums):
            monkeypatch.setattr(module, "run_pipeline", slow)

    def call(self, plain: Callable[[], Any], ours: Callable[..., Any]) -> tuple[str, Any]:
        """Run ``ours`` with a ``plain`` that is slowed down; says which way it went."""
        counters.reset()

        def slow() -> Any:
            time.sleep(self.plain)
            return plain()

        handle = ours(uncompressed_call=slow)
        passed = any(row["passed"] for row in counters.rows())
        return "plain" if passed else "frames", handle


def own(rank: int, step: int) -> torch.Tensor:
    return corpus.tensor(corpus.bell(NUMEL, corpus.BF16, 100 * step + rank), corpus.BF16)


class Engine:
    """Whose steps end."""


def followed(rank: int, ranks: int, later: bool, plant: Callable[[int], None] | None = None) -> list[str]:
    """The faster way is chosen by its steps; when the speeds change, so does the choice, on all ranks at once. Mode
    always takes no part."""
    ways: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "WARMUP_STEPS", 2)
        # enough for the chosen schedule to have most steps of any 30, however slow the machine is
        patch.setattr(trial.Comparison, "steps_to_probe", lambda *_: 10)
        if plant is not None:
            plant(rank)
        engine.settle(AUTO, torch.device("cpu"))
        speeds, noise, trained = Speeds(patch), random.Random(rank), Engine()
        for speeds.plain, speeds.ours in ((0.02, 0.0), (0.0, 0.02), (0.02, 0.0)):
            for step in range(PHASE):
                if step % 5 == rank:
                    time.sleep(noise.random() / 200)  # somebody is always late
                tensor, wanted = own(rank, step), own(rank, step)
                dist.all_reduce(wanted)
                way, handle = speeds.call(
                    lambda tensor=tensor: dist.all_reduce(tensor, async_op=later),
                    lambda tensor=tensor, **more: comm.all_reduce(tensor, async_op=later, config=AUTO, **more),
                )
                handle.wait() if later else None
                corpus.assert_same_bits(tensor, wanted)
                ways.append(way)
                if step % 10 == 0:
                    counters.reset()
                    comm.all_reduce(tensor, config=CODED)
                    assert not any(row["passed"] for row in counters.rows())
                engine.end_step(trained)
    return ways


@pytest.mark.full(reason="alone for ten seconds")
@pytest.mark.alone
@pytest.mark.parametrize("later", [False, True])
def test_the_faster_way_is_followed(later: bool) -> None:
    first, second = runner.run(followed, 2, later)
    assert first == second and set(first[:PHASE]) == {"plain", "frames"}
    for begin, way in ((0, "frames"), (PHASE, "plain"), (2 * PHASE, "frames")):
        settled = first[begin + 90 : begin + PHASE]
        assert settled.count(way) > len(settled) / 2, (way, first)  # the other is probed now and then


def own_times(rank: int) -> None:
    """Planted: a rank goes by its own times."""
    if rank:
        host_engine._largest = lambda call, doing, numbers: [10 * number for number in numbers][::-1]


def own_steps(rank: int) -> None:
    """Planted: a rank has fewer steps."""
    if rank:
        end, calls = Steps.end_step, iter(range(1000))
        Steps.end_step = lambda self, engine: end(self, engine) if next(calls) % 2 else None  # type: ignore[method-assign]


@pytest.mark.full(reason="ranks that wait for each other until the timeout")
@pytest.mark.parametrize("plant", [own_times, own_steps])
def test_ranks_that_choose_by_themselves_are_noticed(plant: Callable[[int], None]) -> None:
    try:
        first, second = runner.run(followed, 2, False, plant, timeout=5)
    except runner.RankFailure:
        return
    assert first != second


@runner.together(2)
def settled(rank: int, ranks: int) -> None:
    """Steps decide only where a role is in mode auto, and not inside one node; the table has a line for a choice, and the seconds saved."""
    trial.WARMUP_STEPS, job, trained = 2, host_engine._of_job(), Engine()
    for config, decide in ((CODED, False), (replace(CODED, roles={"ep": "auto"}), True), (AUTO, True)):
        for nodes in ([list(range(ranks))], [[one] for one in range(ranks)]):
            group_state(None).nodes, job.steps = nodes, None
            assert engine.settle(config, torch.device("cpu")) is None
            assert (job.steps is not None) == (decide and len(nodes) > 1)
    counters.reset()
    for step in range(30):
        time.sleep(0.005)
        comm.all_reduce(
            tensor := own(rank, step),
            config=AUTO,
            uncompressed_call=lambda: (time.sleep(0.05), dist.all_reduce(tensor)),
        )
        engine.end_step(trained)
    assert "whole steps: coded from step" in render() and counters.saved()["steps"][0] > 0
    assert counters.saved()[""][2] == 30


@runner.together(2)
def incompressible(rank: int, ranks: int) -> None:
    """Frames that do not shrink go raw, until the data changes."""
    words = torch.randint(-(1 << 15), 1 << 15, (NUMEL,), dtype=torch.int16).view(torch.bfloat16)
    ratios = []
    for data in [words] * 40 + [own(rank, 1)] * 40:
        counters.reset()
        comm.all_gather_into_tensor(torch.empty(NUMEL * ranks, dtype=torch.bfloat16), data, config=CODED)
        ratios.append(counters.totals()["ratio"])
    coded = [ratio < 0.9995 for ratio in ratios[:40]]  # a raw frame adds nothing but its header
    assert sum(coded) <= 4 and coded[0]
    assert all(ratio > 1.4 for ratio in ratios[-20:])


def test_topology() -> None:
    assert topology.levels([[0, 2], [1, 3]]) and not topology.levels([[0, 1, 2]])
    assert not topology.levels([[0], [1]]) and not topology.levels([[0, 1], [2]])
    assert topology.here() == topology.here() != ""


@runner.together(4)
def found_without_tensors(rank: int, ranks: int) -> None:
    """Groups that take no CPU tensors, as those of NCCL; the ranks search in their groups different numbers of times."""
    part = dist.new_group([0, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast"):
            patch.delattr(dist, name)
        patch.setattr(topology, "here", lambda: "left" if rank % 2 else "right")
        found = [topology.find(part) for _ in range(2)] if rank != 1 else []
        patch.setattr(topology, "here", lambda: "moved" if rank else "right")
        assert found == ([] if rank == 1 else [{0: 0, 2: 0, 3: 1}] * 2)
        assert topology.find(dist.group.WORLD, "place") == {0: 0, 1: 1, 2: 1, 3: 1}
        assert topology.find(dist.group.WORLD, str(rank)) == {0: 0, 1: 1, 2: 2, 3: 3}


@runner.together(2)
def profile_of_each(rank: int, ranks: int) -> None:
    """A group without a measurement has that of the default group, if its messages go by the same backend."""
    state, found = group_state(dist.new_group([0, 1])), []
    measured = LinkProfile(((1.0, 1e-4), (32e6, 0.26)), *(8e9,) * 5, call=5e-5)
    group_state(None).profile = measured
    for backends in ({"cpu": "gloo", "cuda": "nccl"}, {"cpu": "mpi"}, {"cuda": "nccl"}):
        state.backends = backends
        found.append(link_profile(state) is not None)
    state.profile = own = replace(measured, call=1.0)
    assert found == [True, False, False] and link_profile(state) is own


test_programs = runner.programs(__name__)
