"""mode auto, all-to-alls whose sizes each rank knows only of itself: all ranks choose alike, whatever the sizes do, and soon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from tiers import mostly_full

from ds_zipccl import comm
from ds_zipccl.comm.host import tuner
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import tuner_rules
from ds_zipccl.telemetry.table import render

AUTO = ZipcclConfig(enabled=True, min_bytes=0)
WIDTH = 16
KINDS = ("dispatch", "combine", "")


def rows_of(step: int, ranks: int, *, idle: bool) -> list[list[int]]:
    """Rows from each rank to each rank. Sizes jump; from time to time rank 0, or all ranks, have nothing to send, to receive, or both."""
    noise = random.Random(step)
    scale = 40 << (2 * (step // 25 * 7 % 4) if step % 3 else 0)
    rows = [[scale + noise.randrange(scale) for _ in range(ranks)] for _ in range(ranks)]
    if idle and step // 10 % 4 in (1, 2):
        rows[0] = [0] * ranks
    if idle and step // 10 % 4 in (2, 3):
        rows = [[0, *more] for _, *more in rows]
    return rows if step % 29 else [[0] * ranks for _ in range(ranks)]


def exchanged(rank: int, ranks: int, step: int, later: bool) -> None:
    """One call, with the bits that arrive."""
    rows = rows_of(step, ranks, idle=True)
    source = [
        torch.randn(sum(row) * WIDTH, generator=torch.Generator().manual_seed(100 * step + peer)).bfloat16()
        for peer, row in enumerate(rows)
    ]
    leaving, coming = rows[rank], [row[rank] for row in rows]
    out = torch.empty(sum(coming), WIDTH, dtype=torch.bfloat16)
    handle = comm.all_to_all_single(
        out, source[rank].view(-1, WIDTH), coming, leaving, None, later, config=AUTO, role="ep", kind=KINDS[step % 3]
    )
    handle.wait() if later else None
    wanted = [
        sent.split([count * WIDTH for count in row])[rank] for sent, row in zip(source, rows, strict=True) if sum(row)
    ]
    corpus.assert_same_bits(out.view(-1), torch.cat(wanted) if wanted else out.new_empty(0))


def chosen(
    rank: int, ranks: int, steps: int, later: str, plant: Callable[[int], None] | None = None
) -> list[tuple[int, str, bool]]:
    """The nominal sizes, the choices, and the timed calls of many calls. Ranks come late by turns, rank 1 always."""
    tuner_rules.CHECK_CALLS, tuner_rules.REVIEW_CHECKS = (5, 6), (1, 2)
    tuner_rules.DELAY_CALLS = (4, 9)
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
        exchanged(rank, ranks, step, asynchronous)
    return said


@pytest.mark.parametrize(
    "later", mostly_full(["never", "always", "rank 2", "mixed"], ["rank 2"], "calls of both kinds stay")
)
def test_all_ranks_choose_alike(later: str) -> None:
    first, *others = runner.run(chosen, 3, 400, later, timeout=60)
    assert all(other == first for other in others)
    assert {text for _, text, _ in first} == {"plain", "uncoded frames", "cascade frames"}
    assert len({nominal for nominal, _, _ in first}) >= 3, "sizes have jumped"


def own_size(rank: int) -> None:
    """Planted: a rank goes by its own bytes."""
    at = tuner.TunersBySize.at

    def wrong(self: tuner.TunersBySize, opened: Any, nbytes: int, blocking: bool) -> Any:
        tuner_rules.followed_class = lambda size, mean: tuner_rules.size_class(max(1, nbytes))
        return at(self, opened, nbytes, blocking)

    tuner.TunersBySize.at = wrong  # type: ignore[method-assign]


def too_soon(rank: int) -> None:
    """Planted: a rank whose calls block does not care that others do not."""
    tuner.TunersBySize._arrived = lambda self, exchange: (  # type: ignore[method-assign]
        self._calls == self._due + (0 if self._blocking else tuner_rules.DELAY_CALLS[1])
    )


@pytest.mark.full(reason="ranks that wait for each other until the timeout")
@pytest.mark.parametrize(("plant", "later"), [(own_size, "never"), (too_soon, "rank 2")])
def test_ranks_that_choose_by_themselves_are_noticed(plant: Callable[[int], None], later: str) -> None:
    try:
        first, *others = runner.run(chosen, 3, 400, later, plant, timeout=5)
    except runner.RankFailure:
        return
    assert any(other != first for other in others)


def waiting(rank: int, ranks: int) -> float:
    """The seconds of gloo's own all-to-all in which nobody has anything to send, when rank 1 comes late."""
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    start = time.perf_counter()
    dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), [0] * ranks, [0] * ranks)
    return time.perf_counter() - start


def test_gloo_waits_for_every_rank_even_without_data() -> None:
    """So ranks may meet: no program relies on a rank that goes on without the others."""
    first, _, third = runner.run(waiting, 3)
    assert min(first, third) > 0.4


def soon(rank: int, ranks: int) -> list[tuple[int, str]]:
    """The calls before each choice, and the choices, where the plain collective takes longer."""
    made = []
    record = tuner.Tuner._switch

    def noted(self: tuner.Tuner, index: int) -> None:
        made.append((self._calls, str(self._candidates[index])))
        record(self, index)

    tuner.Tuner._switch = noted  # type: ignore[method-assign]
    plain = dist.all_to_all_single

    def late(*args: Any, **more: Any) -> Any:
        time.sleep(0.02)
        return plain(*args, **more)

    dist.all_to_all_single = late
    for _ in range(40):
        out, rows = torch.empty(2 * ranks, WIDTH), [2] * ranks
        comm.all_to_all_single(out, torch.ones_like(out), rows, rows, config=AUTO, role="ep", kind="combine")
    assert "combine" in render() and "float32, up to 0.000244 MiB sent by a rank, 2 ranks: " in render()
    return made


def test_a_choice_comes_before_step_five_of_three_layers() -> None:
    """A step has three calls of a kind: the first agrees on the size, the others try. Plain takes 20 ms longer."""
    for calls, made in [found[0] for found in runner.run(soon, 2)]:
        assert made != "plain" and calls == 3 * tuner_rules.EXCHANGE_ROUNDS[0] + tuner_rules.EXCHANGE_DELAY < 4 * 3


#: Rows of each segment of :func:`called`.
SEGMENT = 64


def called(group: dist.ProcessGroup, later: bool) -> Any:
    """One exchange of equal segments, uneven by its arguments."""
    rows = [SEGMENT] * dist.get_world_size()
    out = torch.empty(sum(rows), WIDTH)
    return comm.all_to_all_single(out, torch.ones_like(out), rows, rows, group, later, config=AUTO)


def ahead(rank: int, ranks: int, plant: Callable[[], None] | None = None) -> None:
    """Rank 0 runs three asynchronous calls ahead of rank 1, which first needs a message of rank 0: after every number of blocking calls."""
    if plant is not None:
        plant()
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


def test_a_rank_that_runs_ahead_does_not_wait_for_the_next_call_of_another() -> None:
    runner.run(ahead, 2, timeout=20)


@pytest.mark.full(reason="ranks that wait for each other until the timeout")
def test_times_sent_too_late_are_noticed() -> None:
    with pytest.raises(runner.RankFailure):
        runner.run(ahead, 2, told_late, timeout=6)
