"""NCCL auto on the simulated GPU: plain results in the first steps, coded copies beside them, and a switch of all ranks, or none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpus
import levels
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from sim.device import mine

from ds_zipccl import comm
from ds_zipccl.comm import shadow_check
from ds_zipccl.comm.device import choice, first_steps
from ds_zipccl.comm.group_state import of_all_groups
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import cost_model, wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import cases, plants, world
from on_sim.cases import CASES, HARD, weights

NUMEL = 24 << 10
AUTO: dict[str, Any] = {"nccl": "auto", "nccl_min_bytes": 0, "min_bytes": 0, "mode": "always"}
CONFIG = ZipcclConfig(enabled=True, **AUTO)
#: Operation -> its role.
ROLES = {"gather": "zero_param", "in place": "zero_param", "exchange": "ep", "uneven": "ep"}


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: MonkeyPatch) -> Any:
    monkeypatch.setattr(
        shadow_check, "build", SimpleNamespace(cache_root=lambda: tmp_path, BuildError=build.BuildError)
    )
    yield
    for one in of_all_groups(choice.GroupChoice):
        one.first = None


def trained(
    rank: int,
    ranks: int,
    names: tuple[str, ...],
    steps: int,
    later: bool,
    config: ZipcclConfig = CONFIG,
    same: Callable[[torch.Tensor, torch.Tensor], None] = corpus.assert_same_bits,
    each: int = 1,
) -> list[set[str]]:
    """Calls of each step, whose words are those of plain collectives; the roles that were coded, by step.
    ``each``: ranks of a node."""
    levels.pretend(levels.nodes_of(ranks // each, each))
    device, engine = torch.device("cuda", rank), object()
    if choice._of_job().first is None:
        choice.settle(config, device)
    found = []
    for step in range(steps):
        before = counted()
        for name in names:
            case = CASES["gather" if name == "in place" else name]
            inputs = [weights(peer, case.given(peer, ranks, NUMEL), step) for peer in range(ranks)]
            for words in inputs:
                words.view(torch.int16)[7::1001] = 0x7FA5  # a NaN with a payload
            wanted = case.wanted(rank, inputs)
            given, out = inputs[rank].to(device), torch.empty_like(wanted).to(device)
            if name == "in place":
                out.view(ranks, -1)[rank] = given
                given = out.view(ranks, -1)[rank]
            handle = case.call(Named(comm, config, ROLES[name]), out, given, None, later)
            if handle is not None:
                handle.wait()
            same(out.cpu(), wanted)
            out.fill_(-1)  # the caller's right
            given.fill_(-1)
        choice.end_step(engine)
        found.append(set(counted() - before))
    return found


class Named:
    """Our collectives with a config and a role."""

    def __init__(self, module: Any, config: ZipcclConfig, role: str) -> None:
        self._module, self._more = module, {"config": config, "role": role}

    def __getattr__(self, name: str) -> Any:
        return lambda *given: getattr(self._module, name)(*given, **self._more)


def counted() -> dict[str, int]:
    """Coded calls by role; ranks of the simulator share the counters."""
    found: Counter[str] = Counter()
    for row in counters.rows():
        found[row["role"]] += row["calls"]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full(reason="as 2"))])
@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("most", [first_steps.MOST_BYTES, 8 << 10], ids=["whole", "first words"])
def test_a_healthy_job_switches(
    route: CudaBackend, ranks: int, later: bool, most: int, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(first_steps, "MOST_BYTES", most)
    outcome = world.run(trained, ranks, tuple(ROLES), 6, later, modes=HARD, route=route)
    for steps in outcome.values:
        assert steps[:4] == [set()] * 4 and steps[5] == {"zero_param", "ep"}
    assert "nccl: ep coded from step 5 on, as all words compared were right; zero_param coded" in capfd.readouterr().out


@pytest.mark.parametrize("wrong", [False, True])
def test_both_schedules_of_gathers_are_compared(
    route: CudaBackend, wrong: bool, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    """Those of the job are too small for two levels; larger ones may come."""
    monkeypatch.setattr(cost_model, "levels_from", lambda topology, profile: 1e12)
    if wrong:
        plants.another_place(monkeypatch)
    steps = world.run(trained, 4, ("gather",), 6, False, CONFIG, corpus.assert_same_bits, 2, route=route).values
    assert all(one[5] == (set() if wrong else {"zero_param"}) for one in steps)
    assert f"zero_param {'stays plain, rank 0' if wrong else 'coded'}" in capfd.readouterr().out


def first_frame_damaged(patch: MonkeyPatch) -> None:
    decode = CudaBackend.decode_frames

    def wrong(self: Any, frames: Any, block: int, outs: Any, status: Any) -> None:
        frames[0][:1] ^= 8
        decode(self, frames, block, outs, status)

    patch.setattr(CudaBackend, "decode_frames", wrong)


@pytest.mark.parametrize("most", [first_steps.SAVED_BYTES, 4096], ids=["whole", "a part"])
@pytest.mark.parametrize("at", [0, 30_000, 2 * NUMEL - 1])
def test_the_words_around_a_mistake_are_saved(
    route: CudaBackend, at: int, most: int, tmp_path: Path, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    """By the ranks that have seen it, as words of both results, without what a reader would have to trust."""
    monkeypatch.setattr(first_steps, "SAVED_BYTES", most)
    decode = CudaBackend.decode_gather

    def wrong(self: Any, staging: Any, table: Any, outs: Any, skip: int, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, skip, *more, **named)
        if skip != (at >= NUMEL):  # the own part is written behind the decoder
            outs.view(torch.int16)[at : at + 2] ^= 5

    monkeypatch.setattr(CudaBackend, "decode_gather", wrong)
    world.run(trained, 2, ("gather", "exchange"), 5, False, route=route)
    seen, line = int(at < NUMEL), capfd.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name == f"zipccl_mismatch_{seen}.npz" and f"rank {seen}: " in line and f"saved in {path}" in line
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size < 2 * most + 4096
    with np.load(path, allow_pickle=False) as file:
        about, got, wanted = json.loads(str(file["about"])), file["got"], file["wanted"]
    assert (about["first_wrong"], about["rank"], about["op"]) == (at, seen, "all_gather_into_tensor")
    place, count = at - about["first_saved"], min(2, 2 * NUMEL - at)
    assert (got != wanted).nonzero()[0].tolist() == list(range(place, place + count)) and about["wrong"] == count
    words = torch.cat([weights(rank, NUMEL, 1) for rank in range(2)]).view(torch.int16)  # of step 2
    words.view(2, -1)[:, 7::1001] = 0x7FA5
    assert about["first_saved"] == max(0, at - most // 4)
    assert wanted.tolist() == words[about["first_saved"] : at + most // 4].tolist()
    said = re.search(r"got 0x(\w+), wanted 0x(\w+)", line)
    assert said and [int(word, 16) for word in said.groups()] == [int(some[place]) & 0xFFFF for some in (got, wanted)]


def test_a_healthy_job_looks_and_goes_on(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "LOOK_STEPS", 5)
    world.run(trained, 2, ("gather", "exchange"), 8, False, route=route)
    rows = [row for row in counters.rows() if row["role"] in ROLES.values()]
    assert [row["calls"] for row in rows] == [2 * 3] * 2, "steps 5, 7 and 8"
    assert [row["reasons"] for row in rows] == [{PassReason.UNPROVEN.value: 2 * 5}] * 2


def test_comparing_costs_the_plain_bytes_and_little_more(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    """Beside the coded copy. A proven role costs the coded copy alone, a role that comes too late the plain call alone."""
    monkeypatch.setattr(first_steps, "LAST", 4)
    monkeypatch.setattr(wire, "GOOD_FORECASTS", 99)  # all exchanges agree on sizes first
    ended, seen = choice.end_step, (list[tuple[int, int]](), list[tuple[int, int]]())

    def counting(engine: Any) -> None:
        ended(engine)
        found = mine().counters
        seen[mine().rank].append((found.collective_bytes.total(), found.launches.total()))

    def steps(program: Callable[..., Any], *given: Any) -> list[tuple[int, int]]:
        seen[0].clear()
        world.run(program, 2, *given, route=route)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip([(0, 0), *seen[0]], seen[0])]

    monkeypatch.setattr(choice, "end_step", counting)
    never, bytes_of = replace(CONFIG, mode="never"), dict[str, tuple[int, int]]()
    for name in ("gather", "exchange"):
        plain = steps(trained, (name,), 6, False, never)[-1]
        _, second, third, _, fifth, sixth = steps(trained, (name,), 6, False)
        assert second[0] == third[0] and fifth == sixth and fifth[0] < plain[0]
        assert third[0] - fifth[0] <= 1.3 * plain[0] and third[1] - fifth[1] <= plain[1] + 24
        bytes_of = bytes_of | {name: (plain[0], fifth[0])}
    assert steps(comes_later)[-1][0] == bytes_of["gather"][1] + bytes_of["exchange"][0]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
def test_a_role_that_comes_later(route: CudaBackend, late: bool, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "LAST", 4 if late else 8)
    world.run(comes_later, 2, route=route)
    calls = {row["role"]: row["calls"] for row in counters.rows()}
    assert (calls["zero_param"], calls["ep"]) == (2 * 6, 0 if late else 2 * 2)


def comes_later(rank: int, ranks: int) -> None:
    trained(rank, ranks, ("gather",), 5, False)
    trained(rank, ranks, ("gather", "exchange"), 4, False)
    trained(rank, ranks, ("gather", "exchange"), 1, False)


def captured(rank: int, ranks: int, name: str) -> None:
    levels.pretend(levels.nodes_of(ranks, 1))
    choice.settle(CONFIG, torch.device("cuda", rank))
    cases.captured(name, Named(comm, CONFIG, ROLES[name]), rank, ranks)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_compared_inside_a_graph(route: CudaBackend, name: str) -> None:
    """The host cannot wait for sizes there."""
    world.run(captured, 2, name, route=route)


def to_owners(rank: int, ranks: int) -> Any:
    levels.pretend(levels.nodes_of(ranks, 1))
    config, device = CONFIG, torch.device("cuda", rank)
    settled = choice.settle(config, device)
    assert settled is not None and settled.sums == "plain" and settled.compared
    words = torch.ones(ranks * NUMEL, dtype=torch.bfloat16, device=device)
    owned = [(NUMEL, [owner]) for owner in range(ranks)]
    comm.reduce_to_owners(words, owned, dist.ReduceOp.SUM, None, config=config, role="zero_grad")
    assert words[rank * NUMEL : (rank + 1) * NUMEL].eq(ranks).all()
    return None


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_have_the_bits_of_the_backend(route: CudaBackend, ranks: int) -> None:
    """Sums of two ranks have one order, so that gradients may go to their owners alone; those of more pass."""
    world.run(to_owners, ranks, route=route)
    (row,) = counters.rows()
    assert (row["calls"], row["passed"]) == ((ranks, 0) if ranks == 2 else (0, ranks))
