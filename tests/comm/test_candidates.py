"""mode auto: the fastest schedule is found and followed, by all ranks at the same call, with the same bits throughout."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, CODED, exchanged
from tiers import mostly_full

from ds_zipccl import comm
from ds_zipccl.comm import topology, tuner
from ds_zipccl.comm.group_state import group_state, link_profile
from ds_zipccl.comm.host import exchange as host_exchange
from ds_zipccl.comm.host import gather, pipeline, sums
from ds_zipccl.policy import trial
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.policy.trial import choose, drifted, follow, probed, remaining
from ds_zipccl.telemetry import counters

NUMEL = 40_000
PHASE = 85


def test_size_classes() -> None:
    sizes = [trial.size_class(nbytes) for nbytes in (1 << 21, (1 << 21) - 1, 1 << 20)]
    assert sizes[0] == sizes[1] + 1 == sizes[2] + 1
    assert trial.size_text(sizes[1]) == "up to 2 MiB"


@pytest.mark.parametrize(
    ("size", "nbytes", "wanted"),
    [
        *[(0, 0, 1), (0, 1, 1), (0, 1023, 10), (0, 1024, 11)],
        *[(10, 512, 10), (10, 410, 10), (10, 409, 9), (10, 1024, 10), (10, 1279, 10), (10, 1280, 11)],
        *[(10, 0, 1), (10, 1 << 30, 31), (1, 0, 1)],
    ],
)
def test_sizes_leave_their_class_when_they_are_clearly_out(size: int, nbytes: int, wanted: int) -> None:
    assert trial.followed_class(size, nbytes) == wanted


def test_clearly_slower_candidates_are_left_out() -> None:
    assert remaining([1.0, 1.2, 2.0], {0: 0.9, 1: 1.1, 2: 1.9}) == [0, 1]
    assert remaining([1.0, 2.0], {0: 0.9, 1: 1.3}) == [0, 1], "its fastest call was not clearly slower"
    assert remaining([math.inf, 1.0], {0: 0.0, 1: 1.0}) == [0, 1], "nothing is known of it"
    assert remaining([math.inf, math.inf], {}) == [0, 1]


def test_choices() -> None:
    assert choose(0, [1.0, 0.96, 2.0]) == 0 and choose(0, [1.0, 0.94, 2.0]) == 1 and choose(2, [3.0, 4.0, 3.1]) == 2
    assert choose(0, [math.inf, 2.0]) == 0 and choose(1, [math.inf, 2.0]) == 1
    assert follow(math.inf, 2.0) == 2.0 and follow(2.0, math.inf) == 2.0 and 2.0 < follow(2.0, 4.0) < 4.0
    assert drifted(1.0, 1.4) and drifted(1.0, 0.7) and not drifted(1.0, 1.2) and not drifted(1.0, math.inf)


def test_slow_candidates_are_tried_less_often() -> None:
    times = [1.0, 1.5, 2.5, 9.0, math.inf]
    tries = [sum(index in probed(0, times, review) for review in range(1, 65)) for index in range(5)]
    assert tries == [0, 64, 32, 8, 8]
    assert probed(1, times, 0) == [0, 2, 3, 4]  # after a drift: all


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


def followed(rank: int, ranks: int, later: bool) -> list[str]:
    """The faster way is chosen in 30 calls; when the speeds change, so does the choice, on all ranks at once."""
    ways: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "CHECK_CALLS", (6, 6))
        patch.setattr(trial, "REVIEW_CHECKS", (2, 4))
        patch.setattr(trial, "DELAY_CALLS", (4, 8))
        speeds, noise = Speeds(patch), random.Random(rank)
        for speeds.plain, speeds.ours in ((0.03, 0.0), (0.0, 0.03), (0.03, 0.0)):
            for step in range(PHASE):
                if step % 5 == rank:
                    time.sleep(noise.random() / 50)  # somebody is always late
                tensor, wanted = own(rank, step), own(rank, step)
                dist.all_reduce(wanted)
                way, handle = speeds.call(
                    lambda tensor=tensor: dist.all_reduce(tensor, async_op=later),
                    lambda tensor=tensor, **more: comm.all_reduce(tensor, async_op=later, config=AUTO, **more),
                )
                handle.wait() if later else None
                corpus.assert_same_bits(tensor, wanted)
                ways.append(way)
    return ways


@pytest.mark.alone
@pytest.mark.full(reason="six seconds alone")
@pytest.mark.parametrize("ranks, later", [(2, False), (3, True)])
def test_the_faster_way_is_followed(ranks: int, later: bool) -> None:
    first, *others = runner.run(followed, ranks, later)
    assert all(ways == first for ways in others)
    assert set(first[:20]) == {"plain", "frames"}
    for begin, way in ((0, "frames"), (PHASE, "plain"), (2 * PHASE, "frames")):
        settled = first[begin + 35 : begin + PHASE]
        assert settled.count(way) >= 0.6 * len(settled), (way, first)  # the others are tried now and then


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


@runner.together(4, 2)
@runner.together(6, 2, full="six ranks on two cores")
@runner.together(6, 3, full="six ranks on two cores")
def by_nodes(rank: int, ranks: int, nodes: int) -> None:
    """Gathers where some ranks share a node: every schedule is tried, the bits are right, and a shard enters a node once."""
    group_state(None).nodes = [list(range(first, first + ranks // nodes)) for first in range(0, ranks, ranks // nodes)]
    calls = []
    for step in range(trial.TRIAL_CALLS * 4):
        counters.reset()
        got = torch.zeros(NUMEL * ranks, dtype=torch.bfloat16)
        mine = got[rank * NUMEL :][:NUMEL].copy_(own(rank, step)) if step % 2 else own(rank, step)
        comm.all_gather_into_tensor(got, mine, config=AUTO)
        corpus.assert_same_bits(got, torch.cat([own(peer, step) for peer in range(ranks)]))
        calls.append(counters.totals()["logical_bytes"] / mine.nbytes)
    everyone, chosen = ranks - 1, (nodes - 1) + (ranks // nodes - 1) * nodes  # frames that a rank sends
    calls_each = trial.TRIAL_CALLS
    assert calls == [0] * calls_each + [everyone] * 2 * calls_each + [chosen] * calls_each


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
    state.profile = own = measured.slowed(2)
    assert found == [True, False, False] and link_profile(state) is own


WIDTH = 16
KINDS = ("dispatch", "combine", "")


def rows_of(step: int, ranks: int) -> list[list[int]]:
    """Rows from each rank to each rank. Sizes jump; from time to time rank 0, or all ranks, have nothing to send, to receive, or both."""
    noise = random.Random(step)
    scale = 40 << (2 * (step // 25 * 7 % 4) if step % 3 else 0)
    rows = [[scale + noise.randrange(scale) for _ in range(ranks)] for _ in range(ranks)]
    if step // 10 % 4 in (1, 2):
        rows[0] = [0] * ranks
    if step // 10 % 4 in (2, 3):
        rows = [[0, *more] for _, *more in rows]
    return rows if step % 29 else [[0] * ranks for _ in range(ranks)]


def exchange(rank: int, ranks: int, step: int, later: bool) -> None:
    sent = [
        torch.randn(sum(row), WIDTH, generator=torch.Generator().manual_seed(100 * step + peer)).bfloat16().split(row)
        for peer, row in enumerate(rows_of(step, ranks))
    ]
    exchanged(rank, sent, later, config=AUTO, role="ep", kind=KINDS[step % 3])


def chosen(
    rank: int, ranks: int, steps: int, later: str, plant: Callable[[int], None] | None = None
) -> list[tuple[int, str, bool]]:
    """The nominal sizes, the choices, and the timed calls of many calls. Ranks come late by turns, rank 1 always."""
    trial.CHECK_CALLS, trial.REVIEW_CHECKS = (5, 6), (1, 2)
    trial.DELAY_CALLS = (4, 9)
    said: list[tuple[int, str, bool]] = []
    next_plan = tuner.Tuner.next_plan

    def noted(self: tuner.Tuner, *args: Any, **more: Any) -> Any:
        decision, timer = next_plan(self, *args, **more)
        said.append((self.nominal, str(decision), timer is not None))
        return decision, timer

    tuner.Tuner.next_plan = noted  # type: ignore[method-assign]
    if plant is not None:
        plant(rank)
    noise = random.Random(rank)
    for step in range(steps):
        if rank == 1 or step % ranks == rank:
            time.sleep(noise.random() / 500)
        asynchronous = {"never": False, "always": True, "rank 2": rank == 2, "mixed": noise.random() < 0.3}[later]
        exchange(rank, ranks, step, asynchronous)
    return said


@pytest.mark.parametrize(
    "later", mostly_full(["never", "always", "rank 2", "mixed"], ["rank 2"], "calls of both kinds stay")
)
def test_all_ranks_choose_alike(later: str) -> None:
    first, *others = runner.run(chosen, 3, 400, later, timeout=60)
    assert all(other == first for other in others)
    assert {text for _, text, _ in first} == {"plain", "raw frames", "cascade frames"}
    assert len({nominal for nominal, _, _ in first}) >= 3, "sizes have jumped"


def own_size(rank: int) -> None:
    """Planted: a rank goes by its own bytes."""
    at = tuner.TunersBySize.at

    def wrong(self: tuner.TunersBySize, opened: Any, nbytes: int, blocking: bool) -> Any:
        trial.followed_class = lambda size, mean: trial.size_class(max(1, nbytes))
        return at(self, opened, nbytes, blocking)

    tuner.TunersBySize.at = wrong  # type: ignore[method-assign]


def too_soon(rank: int) -> None:
    """Planted: a rank whose calls block does not care that others do not."""
    arrived = tuner._arrived

    def wrong(exchange: Any, calls: int, soon: int, waits: bool) -> bool:
        return arrived(exchange, calls, soon, waits) if soon else calls == (0 if waits else trial.DELAY_CALLS[1])

    tuner._arrived = wrong


@pytest.mark.full(reason="ranks that wait for each other until the timeout")
@pytest.mark.parametrize(("plant", "later"), [(own_size, "never"), (too_soon, "rank 2")])
def test_ranks_that_choose_by_themselves_are_noticed(plant: Callable[[int], None], later: str) -> None:
    try:
        first, *others = runner.run(chosen, 3, 400, later, plant, timeout=5)
    except runner.RankFailure:
        return
    assert any(other != first for other in others)


@runner.together(3)
def waiting(rank: int, ranks: int) -> None:
    """gloo's own all-to-all waits for every rank even without data. So ranks may meet: no program relies on one that goes on alone."""
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    start = time.perf_counter()
    dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), [0] * ranks, [0] * ranks)
    assert rank == 1 or time.perf_counter() - start > 0.4


#: Rows of each segment of :func:`called`.
SEGMENT = 64


def called(group: dist.ProcessGroup, later: bool) -> Any:
    """One exchange of equal segments, uneven by its arguments."""
    rows = [SEGMENT] * dist.get_world_size()
    out = torch.empty(sum(rows), WIDTH)
    return comm.all_to_all_single(out, torch.ones_like(out), rows, rows, group, later, config=AUTO)


@runner.together(2)
def ahead(rank: int, ranks: int) -> None:
    """Rank 0 runs three asynchronous calls ahead of rank 1, which first needs a message of rank 0: after every number of blocking calls."""
    for blocking in range(5, 14):
        group = dist.new_group()
        for _ in range(blocking):
            called(group, False)
        if rank == 1:
            dist.recv(torch.empty(1), 0)
        handles = [called(group, True) for _ in range(3)]
        if rank == 0:
            dist.send(torch.ones(1), 1)
        for handle in handles:
            handle.wait()
        for _ in range(20):
            called(group, False)


def told_late() -> None:
    """Planted: ranks that have met send their times in the next call."""
    stop = tuner.CallTimer.stop

    def silent(self: tuner.CallTimer) -> None:
        self.on_stop = None
        stop(self)

    tuner.CallTimer.stop = silent  # type: ignore[method-assign]


@pytest.mark.full(reason="ranks that wait for each other until the timeout")
def test_times_sent_too_late_are_noticed() -> None:
    with pytest.raises(runner.RankFailure):
        runner.run(ahead, 2, plant=told_late, timeout=6)


test_programs = runner.programs(__name__)
