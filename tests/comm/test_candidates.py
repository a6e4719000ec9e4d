"""mode auto: the fastest schedule is found and followed, by all ranks at the same call, with the same bits throughout."""

from __future__ import annotations

import gc
import math
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import pytest
import ranks as runner
import tiers
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import group_nodes, group_state, link_profile
from ds_zipccl.comm.host import gather, pipeline, sums
from ds_zipccl.comm.ops import all_reduce, all_to_all, broadcast, reduce_to_owners
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import cost_model, tuner_rules
from ds_zipccl.policy.admission import Decision, Message, PassReason, candidates
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.policy.tuner_rules import choose, drifted, follow, probed, remaining
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render

AUTO = ZipcclConfig(enabled=True, min_bytes=0)
MESSAGE = Message("all_gather", torch.bfloat16, 1 << 20, 2, "cpu", "gloo", "dp")
NUMEL = 40_000
PHASE = 85


def test_candidates() -> None:
    assert [str(plan) for plan in candidates(MESSAGE, AUTO, True)] == ["plain", "uncoded frames", "cascade frames"]
    assert [str(plan) for plan in candidates(MESSAGE, AUTO, False)] == ["uncoded frames", "cascade frames"]
    raw = replace(AUTO, codec="raw")
    assert [str(plan) for plan in candidates(MESSAGE, raw, True)] == ["plain", "uncoded frames"]
    for config in (replace(AUTO, mode="always"), replace(AUTO, roles={"dp": "always"})):
        assert candidates(MESSAGE, config, True) == (Decision(True, "cascade", ""),)


def test_size_classes() -> None:
    sizes = [tuner_rules.size_class(nbytes) for nbytes in (1 << 21, (1 << 21) - 1, 1 << 20)]
    assert sizes[0] == sizes[1] + 1 == sizes[2] + 1
    assert tuner_rules.size_text(sizes[1]) == "up to 2 MiB"


@pytest.mark.parametrize(
    ("size", "nbytes", "wanted"),
    [
        *[(0, 0, 1), (0, 1, 1), (0, 1023, 10), (0, 1024, 11)],
        *[(10, 512, 10), (10, 410, 10), (10, 409, 9), (10, 1024, 10), (10, 1279, 10), (10, 1280, 11)],
        *[(10, 0, 1), (10, 1 << 30, 31), (1, 0, 1)],
    ],
)
def test_sizes_leave_their_class_when_they_are_clearly_out(size: int, nbytes: int, wanted: int) -> None:
    assert tuner_rules.followed_class(size, nbytes) == wanted


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

        for module in (all_reduce, all_to_all, broadcast, gather, sums, reduce_to_owners):
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
        patch.setattr(tuner_rules, "CHECK_CALLS", (6, 6))
        patch.setattr(tuner_rules, "REVIEW_CHECKS", (2, 4))
        patch.setattr(tuner_rules, "DELAY_CALLS", (4, 8))
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
@pytest.mark.parametrize("ranks, later", tiers.mostly_full([(2, False), (3, True)], [(2, False)], "nobody runs beside"))
def test_the_faster_way_is_followed(ranks: int, later: bool) -> None:
    first, *others = runner.run(followed, ranks, later)
    assert all(ways == first for ways in others)
    assert set(first[:20]) == {"plain", "frames"}
    for begin, way in ((0, "frames"), (PHASE, "plain"), (2 * PHASE, "frames")):
        settled = first[begin + 35 : begin + PHASE]
        assert settled.count(way) >= 0.6 * len(settled), (way, first)  # the others are tried now and then


def table(rank: int, ranks: int) -> str:
    counters.reset()
    for step in range(30):
        comm.all_gather_into_tensor(torch.empty(NUMEL * ranks, dtype=torch.bfloat16), own(rank, step), config=AUTO)
    return render()


def test_the_table_shows_choices() -> None:
    first, second = runner.run(table, 2)
    lines = [next(line for line in text.splitlines() if "from call 26 on" in line) for text in (first, second)]
    assert lines[0] == lines[1]  # the numbers are agreed too
    assert lines[0].startswith("dp all_gather_into_tensor, bfloat16, up to 0.25 MiB, 2 ranks: ")
    assert "plain " in lines[0] and "uncoded frames " in lines[0] and "cascade frames " in lines[0]


def in_opposite_orders(rank: int, ranks: int) -> None:
    """Nobody waits in a circle where ranks start operations of two groups in opposite orders."""
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    for step in range(40):
        works = {}
        for group in groups if rank % 2 else groups[::-1]:
            tensor = own(rank, step)
            works[group] = (tensor, comm.all_reduce(tensor, group=group, async_op=True, config=AUTO))
        for _, work in works.values():
            work.wait()
        corpus.assert_same_bits(*(tensor for tensor, _ in works.values()))


def test_opposite_orders() -> None:
    runner.run(in_opposite_orders, 2)


def inexact(rank: int, ranks: int) -> set[str]:
    """Where the plain collective would give other bits it does not compete."""
    config = replace(AUTO, reduction="fp32")
    counters.reset()
    for step in range(24):
        comm.all_reduce(own(rank, step), config=config)
    return set(counters.rows()[0]["reasons"])


def test_other_bits_do_not_compete() -> None:
    assert runner.run(inexact, 3) == [set()] * 3
    assert runner.run(inexact, 2) == [{PassReason.TRIAL.value}] * 2


def incompressible(rank: int, ranks: int) -> list[float]:
    """Frames that do not shrink go uncoded, until the data changes."""
    always = replace(AUTO, mode="always")
    words = torch.randint(-(1 << 15), 1 << 15, (NUMEL,), dtype=torch.int16).view(torch.bfloat16)
    ratios = []
    for data in [words] * 40 + [own(rank, 1)] * 40:
        counters.reset()
        comm.all_gather_into_tensor(torch.empty(NUMEL * ranks, dtype=torch.bfloat16), data, config=always)
        ratios.append(counters.totals()["ratio"])
    return ratios


def test_incompressible_data() -> None:
    for ratios in runner.run(incompressible, 2):
        coded = [ratio < 0.9995 for ratio in ratios[:40]]  # an uncoded frame adds nothing but its header
        assert sum(coded) <= 4 and coded[0]
        assert all(ratio > 1.4 for ratio in ratios[-20:])


def kinds(rank: int, ranks: int) -> None:
    """Every operation under auto, sizes and dtypes mixed, bits against the plain one."""
    choice = random.Random(7)
    for _ in range(150):
        numel, dtype = ranks * choice.choice([20_000, 50_000]), choice.choice([torch.bfloat16, torch.float32])
        x = torch.randn(numel, generator=torch.Generator().manual_seed(choice.randrange(1 << 30) + rank)).to(dtype)
        op = choice.choice(["gather", "scatter", "reduce", "all_to_all", "broadcast"])
        results = []
        for module, more in ((dist, {}), (comm, {"config": AUTO})):
            y = x.clone()
            if op == "gather":
                y = x.new_empty(numel * ranks)
                module.all_gather_into_tensor(y, x, **more)
            elif op == "scatter":
                y = x.new_empty(numel // ranks)
                module.reduce_scatter_tensor(y, x, **more)
            elif op == "reduce":
                module.all_reduce(y, **more)
            elif op == "all_to_all":
                module.all_to_all_single(y, x, **more)
            else:
                module.broadcast(y, 1, **more)
            results.append(y)
        corpus.assert_same_bits(*results)


def test_every_operation() -> None:
    runner.run(kinds, 3)


SLOW = LinkProfile(((4096.0, 1e-4), (32e6, 0.26)), *(8e9,) * 5, call=5e-5)
FAST = LinkProfile(((4096.0, 1e-4), (32e6, 0.003)), *(8e9,) * 5, call=5e-5)


def test_what_cannot_win_is_not_tried() -> None:
    plans = candidates(MESSAGE, AUTO, True, True)
    assert [str(plan) for plan in plans][2:] == ["cascade frames", "cascade frames by node"]
    assert cost_model.prune_candidates(plans, MESSAGE, SLOW) == (plans[0], *plans[2:])
    for profile, message in ((FAST, MESSAGE), (None, MESSAGE), (SLOW, replace(MESSAGE, numel=None))):
        assert cost_model.prune_candidates(plans, message, profile) == plans
    raw = candidates(MESSAGE, replace(AUTO, codec="raw"), True)
    assert cost_model.prune_candidates(raw, MESSAGE, SLOW) == raw


def measured(rank: int, ranks: int, profile: LinkProfile) -> dict[str, int]:
    """Sends by what was measured of the link."""
    group_state(None).profiles["cpu", "gloo"] = profile
    counters.reset()
    tensor = own(0, 1)
    comm.send(tensor, 1, config=AUTO) if rank == 0 else comm.recv(tensor.zero_(), 0, config=AUTO)
    corpus.assert_same_bits(tensor, own(0, 1))
    return counters.rows()[0]["reasons"]


def test_sends_by_the_speed_of_the_link() -> None:
    assert runner.run(measured, 2, replace(SLOW, transfer=((1.0, 1e-5), (32e6, 1.0)))) == [{}] * 2
    assert runner.run(measured, 2, FAST) == [{"link faster than coding": 1}] * 2


def by_nodes(rank: int, ranks: int, nodes: int) -> list[str]:
    """Gathers where some ranks share a node: every schedule is tried, the bits are right, and a shard enters a node once."""
    group_state(None).nodes = [list(range(first, first + ranks // nodes)) for first in range(0, ranks, ranks // nodes)]
    calls = []
    for step in range(tuner_rules.TRIAL_CALLS * 4):
        counters.reset()
        got = torch.zeros(NUMEL * ranks, dtype=torch.bfloat16)
        mine = got[rank * NUMEL :][:NUMEL].copy_(own(rank, step)) if step % 2 else own(rank, step)
        comm.all_gather_into_tensor(got, mine, config=AUTO)
        corpus.assert_same_bits(got, torch.cat([own(peer, step) for peer in range(ranks)]))
        calls.append(counters.totals()["logical_bytes"] / mine.nbytes)
    return calls


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 2), (6, 3)])
def test_gathers_by_node(ranks: int, nodes: int) -> None:
    local_ranks = ranks // nodes
    everyone, chosen = ranks - 1, (nodes - 1) + (local_ranks - 1) * nodes  # frames that a rank sends
    for calls in runner.run(by_nodes, ranks, nodes):
        calls_each = tuner_rules.TRIAL_CALLS
        assert calls == [0] * calls_each + [everyone] * 2 * calls_each + [chosen] * calls_each


def differences_by_node(rank: int, ranks: int) -> None:
    """Differences are handed on as they are."""
    group_state(None).nodes = [[0, 1], [2, 3]]
    whole = torch.randn(ranks * NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = {}
    for step in range(tuner_rules.TRIAL_CALLS * 5 + tuner_rules.SETTLE_CALLS[1]):
        wanted = (whole.float() * (1 + 1e-3 * step)).bfloat16()
        whole.chunk(ranks)[rank].copy_(wanted.chunk(ranks)[rank])
        counters.reset()
        comm.all_gather_into_tensor(whole, whole.chunk(ranks)[rank], config=AUTO, base=comm.IN_PLACE)
        corpus.assert_same_bits(whole, wanted)
        found = counters.rows()[0]["differences"]
    assert found == {"": 1}


def test_differences_by_node() -> None:
    runner.run(differences_by_node, 4)


def here_and_there(rank: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Nodes as ranks themselves say, of a part of them, before and after they were asked."""
    part = dist.new_group([0, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "here", lambda: "left" if rank % 2 else "right")
        before = group_nodes(part) if rank != 1 else []
        comm.calibrate()
        return before, group_nodes(part) if rank != 1 else []


def test_topology() -> None:
    assert runner.run(here_and_there, 4) == [([], [[0, 1], [2]]), ([], []), *([([], [[0, 1], [2]])] * 2)]
    assert topology.levels([[0, 2], [1, 3]]) and not topology.levels([[0, 1, 2]])
    assert not topology.levels([[0], [1]]) and not topology.levels([[0, 1], [2]])
    assert topology.here() == topology.here() != ""


def refuses(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("No backend type associated with device type cpu")


def found_without_tensors(rank: int, ranks: int) -> list[dict[int, int]]:
    """Groups that take no CPU tensors, as those of NCCL; the ranks search in their groups different numbers of times."""
    part = dist.new_group([0, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast"):
            patch.setattr(dist, name, refuses)
        patch.setattr(topology, "here", lambda: "left" if rank % 2 else "right")
        found = [topology.find(part) for _ in range(2)] if rank != 1 else []
        patch.setattr(topology, "here", lambda: "moved" if rank else "right")
        return [*found, topology.find(dist.group.WORLD, "place"), topology.find(dist.group.WORLD, str(rank))]


def test_nodes_are_found_without_tensors() -> None:
    everyone = [{0: 0, 1: 1, 2: 1, 3: 1}, {0: 0, 1: 1, 2: 2, 3: 3}]
    members = [{0: 0, 2: 0, 3: 1}] * 2 + everyone
    assert runner.run(found_without_tensors, 4) == [members, everyone, members, members]


def profile_of_each(rank: int, ranks: int) -> list[bool]:
    """Whether a device has a profile, where the profile of CPU tensors on gloo is known."""
    state, found = group_state(dist.new_group([0, 1])), []
    group_state(None).profiles["cpu", "gloo"] = SLOW
    for backends in ({"cpu": "gloo", "cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}):
        state.backends = backends
        found += [link_profile(state, device) is not None for device in ("cpu", "cuda")]
    return found


def test_a_profile_is_of_one_device_and_backend() -> None:
    """A message of CUDA tensors is not judged by the codec of the CPU, nor by the link of another backend."""
    assert runner.run(profile_of_each, 2) == [[True, False, True, False, False, False]] * 2


def forgotten(rank: int, ranks: int) -> None:
    """What is remembered of a group keeps neither the group nor tensors alive."""
    group = dist.new_group(list(range(ranks)))
    alive = weakref.ref(group)
    for step in range(40):
        tensor = own(rank, step)
        comm.all_reduce(tensor, group=group, config=AUTO)
        if step == 0:
            first = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert first() is None
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None


def test_groups_and_tensors_are_let_go() -> None:
    runner.run(forgotten, 2)
