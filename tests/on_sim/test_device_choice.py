"""The choice between plain and coded moves on the simulated GPU: calibration, static rules, and schedules that switch by whole steps."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import corpus
import levels
import moves
import pytest
import torch
import torch.distributed as dist

from ds_zipccl import devices
from ds_zipccl.comm.device import calibration, choice, engine
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.group_state import device_profile, group_state, of_all_groups, resolve_group
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.steps import OTHER_STEPS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import cost_model, trial
from ds_zipccl.policy import settled as policy_settled
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile
from ds_zipccl.policy.settled import DTYPES
from ds_zipccl.telemetry import counters
from on_sim import world

AUTO: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0, "min_bytes": 0, "mode": "auto"}
#: 100 Gbit/s a node, and no delays: coding gains at any size.
SLOW = DeviceProfile(network=12e9, launch=1e-12, agreement=1e-12, exchange=1e-12, hop=0.0, step=0.0)
#: 8 x 400 Gbit/s.
FAST = DeviceProfile(network=380e9)
NUMEL = 3000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(calibration, "SIZES", (1 << 10, 4 << 10))
    monkeypatch.setattr(calibration, "SUM_SIZES", (1 << 10, 4 << 10))
    monkeypatch.setattr(calibration, "CODED_BYTES", (4 << 10, 16 << 10))
    monkeypatch.setattr(calibration, "_DRAWN", 1 << 10)
    monkeypatch.setattr(calibration, "_BUDGET_S", 1e9)
    monkeypatch.setattr(calibration, "_CALLS", 3)
    yield
    for one in of_all_groups(choice.GroupChoice):
        one.steps = None  # marks hold the simulated machine, and with it its groups


def settled(rank: int, nodes: int, **settings: Any) -> choice.Settled | None:
    levels.pretend(levels.nodes_of(nodes, dist.get_world_size() // nodes))
    return choice.settle(ZipcclConfig(enabled=True, **{**AUTO, **settings}), torch.device("cuda", rank))


def measured(rank: int, ranks: int, nodes: int) -> Any:
    found = settled(rank, nodes)
    assert found is not None and found.profile is device_profile("cuda")
    state = group_state(None)
    assert state is not None and state.device_sums == found.sums
    assert (found.profile is None) == (nodes == 1)
    return found


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full), (2, 1)])
def test_all_ranks_measure_the_same(route: CudaBackend, ranks: int, nodes: int) -> None:
    for seed, modes in enumerate((world.Modes(), world.ALL_MODES[-1])):
        outcome = world.run(measured, ranks, nodes, seed=seed, modes=modes, route=route)
        assert len(set(outcome.values)) == 1
        assert all(bool(one.collectives) == (nodes > 1) for one in outcome.counters)


def summed_by(rank: int, ranks: int, settings: dict[str, Any], asked: str, more: Any = None) -> Any:
    levels.pretend(more or levels.nodes_of(2, ranks // 2))
    found = choice.settle(ZipcclConfig(enabled=True, **{**AUTO, **settings}), torch.device("cuda", rank), asked)
    return None if found is None else found.sums


#: 25 and 100 Gbit/s a node; the timings of both schedules that all ranks agree on.
SLOWER, FASTER = DeviceProfile(network=2.9e9), DeviceProfile(network=11e9)


@pytest.mark.parametrize(
    ("profile", "gain", "settings", "asked", "dtypes", "why"),
    [
        (SLOWER, 1.2, {}, "", DTYPES, "1.20 times as fast in bfloat16, "),
        (SLOWER, 1.14, {}, "", (), "1.14 times as fast in float32, wanted 1.15"),
        (SLOWER, 9.0, {"nccl": "auto"}, "", DTYPES, "9.00 times"),
        (SLOWER, 9.0, {}, "NCCL_ALGO is set", (), "NCCL_ALGO is set"),
        (SLOWER, 9.0, {"reduction": "plain"}, "", (), 'by "reduction"'),
        (FAST, 9.0, {}, "", (), "would gain less than 1.3 times"),
        (FAST, 0.5, {"reduction": "fp32"}, "NCCL_ALGO is set", DTYPES, 'by "reduction"'),
        (FAST, 0.5, {"mode": "always"}, "", DTYPES, '"always"'),
    ],
)
def test_sums_are_chosen_by_facts_and_confirmed_by_a_timing(
    route: CudaBackend,
    monkeypatch: pytest.MonkeyPatch,
    profile: DeviceProfile,
    gain: float,
    settings: Any,
    asked: str,
    dtypes: Any,
    why: str,
) -> None:
    with_profile(monkeypatch, profile)
    monkeypatch.setattr(calibration, "sums", lambda *more: (((1, 1.0), (2, 1.0)), ((1, 9.0), (2, gain))))
    outcome = world.run(summed_by, 4, settings, asked, route=route)
    assert {one.dtypes for one in outcome.values} == {dtypes} and all(why in one.why for one in outcome.values)


@pytest.mark.parametrize(
    ("nodes", "why"), [([[0, 3], [1, 2]], "do not ascend"), ([[0, 1, 2], [3]], "different numbers of ranks")]
)
def test_nodes_that_suit_no_sums_are_named(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, nodes: Any, why: str
) -> None:
    with_profile(monkeypatch, SLOWER)
    outcome = world.run(summed_by, 4, {}, "", nodes, route=route)
    assert all(not one.dtypes and why in one.why for one in outcome.values)


@pytest.mark.parametrize("nbytes", [1 << 10, 64 << 10])
def test_both_sums_are_timed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(calibration, "SUM_SIZES", (nbytes, 2 * nbytes))

    def timed(rank: int, ranks: int) -> Any:
        levels.pretend(levels.nodes_of(2, 2))
        config = ZipcclConfig(enabled=True, **AUTO)
        return calibration.sums(resolve_group(None), config, torch.device("cuda", rank), torch.float16)

    outcome = world.run(timed, 4, route=route, modes=world.ALL_MODES[-1])
    assert len({str(one) for one in outcome.values}) == 1
    ours, theirs = outcome.values[0]
    assert [size for size, _ in ours] == [size for size, _ in theirs] == [nbytes, 2 * nbytes]


def summed_later(rank: int, ranks: int) -> list[float]:
    """Sums of each kind in step TIMED_STEP, and one before it; the seconds of the backend's own for each."""
    levels.pretend(levels.nodes_of(ranks, 1))
    config = ZipcclConfig(enabled=True, **AUTO)
    choice.settle(config, torch.device("cuda", rank))
    api, given = moves.coded(**AUTO), torch.ones(64 * ranks, dtype=torch.bfloat16, device=f"cuda:{rank}")
    api.all_reduce(given)
    for _ in range(choice.TIMED_STEP - 1):
        choice.end_step(Engine())
    api.all_reduce(given)
    api.reduce_scatter_tensor(given[:64].clone(), given)
    api.reduce_to_owners(given, [(64, (owner,)) for owner in range(ranks)], dist.ReduceOp.SUM)
    choice.end_step(Engine())
    api.all_reduce(given)
    found = [theirs for theirs, *_ in choice._of_job().timed]
    choice.end_step(Engine())
    return found


@pytest.mark.parametrize("lost", [False, True])
def test_gradient_sums_are_timed_once_in_a_job(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, capfd: Any, lost: bool
) -> None:
    """An all-reduce of the backend takes twice as long as its sum; so do gradients that go to their owners."""
    with_profile(monkeypatch, SLOWER)
    monkeypatch.setattr(policy_settled, "gaining_sums", lambda *more: (("bfloat16",), 0))
    size, seconds = 2 * 64 * 2, 1e-9 if lost else 1e3
    points = ((size, seconds), (2 * size, 2 * seconds))
    monkeypatch.setattr(calibration, "sums", lambda *more: (((1, 1e-12), (2, 1e-12)), points))
    outcome = world.run(summed_later, 2, route=route)
    assert outcome.values == [pytest.approx([2 * seconds, seconds, 2 * seconds])] * 2
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "gradient sums of step 100: " in line]
    assert ('"reduction": "plain" keeps' in line) == lost and "the backend's own would take" in line


def turns(rank: int, ranks: int, names: str) -> Any:
    runtime = devices.runtime(torch.device("cuda"))
    runtime.get_device_properties = lambda device: SimpleNamespace(uuid=names[device.index].strip())
    return calibration._turn(resolve_group(None), torch.device("cuda", rank))


@pytest.mark.parametrize(
    ("names", "found"), [("ab", [(0, 1), (0, 1)]), ("aab", [(0, 2), (1, 2), (0, 2)]), ("  ", [(0, 1), (0, 1)])]
)
def test_ranks_that_share_a_device_take_turns_on_its_bus(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, names: str, found: list[tuple[int, int]]
) -> None:
    """Devices without a name are nobody else's."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", torch.cuda.get_device_properties)
    assert world.run(turns, len(names), names, route=route).values == found


def a_gather(rank: int, ranks: int, api: Any, number: int) -> bool:
    """One gather; whether it was coded."""
    kind = next(iter(corpus.SUMMED.values()))
    inputs = [moves.filled(peer, NUMEL, kind, number).to(f"cuda:{rank}") for peer in range(ranks)]
    whole = torch.empty(NUMEL * ranks, dtype=inputs[0].dtype, device=f"cuda:{rank}")
    decided: list[bool] = []

    def plain() -> None:
        decided.append(True)
        dist.all_gather_into_tensor(whole, inputs[rank])

    api.all_gather_into_tensor(whole, inputs[rank], uncompressed_call=plain)
    corpus.assert_same_bits(whole.cpu(), torch.cat([one.cpu() for one in inputs]))
    return not decided


class Engine:
    """Stands for an engine."""


def codes() -> bool:
    """Whether a gather of the step that runs is coded."""
    config = ZipcclConfig(enabled=True, **AUTO)
    reason = choice.reason_to_pass("all_gather_into_tensor", "dp", None, config, resolve_group(None), "cuda")
    return reason is None


def steps(rank: int, ranks: int, count: int) -> Any:
    """The schedule of each step, and what was settled."""
    found = settled(rank, 2)
    api = moves.coded(**AUTO)
    engine, schedules = Engine(), []
    for number in range(count):
        schedules.append(a_gather(rank, ranks, api, number))
        assert schedules[-1] == codes()
        choice.end_step(engine)
    return schedules, found


class FakeClock:
    """Clocks of the ranks; each mark is a step later, and a step of a schedule takes its own time."""

    def __init__(self, seconds: Callable[[int, bool], float]) -> None:
        self._seconds = seconds
        self._now: collections.Counter[int] = collections.Counter()

    def mark(self, device: torch.device) -> int:
        rank = dist.get_rank()
        self._now[rank] += int(1e9 * self._seconds(rank, codes()))
        return self._now[rank]


def with_profile(monkeypatch: pytest.MonkeyPatch, profile: DeviceProfile) -> None:
    monkeypatch.setattr(calibration, "measure", lambda group, config, device: profile)


#: Steps up to the agreement on the first probe, and coded steps of the trial that follows, up to its agreement.
PROBED = (
    trial.WARMUP_STEPS - 1 + 2 * trial.PROBE_WINDOWS * (trial.SETTLE_STEPS + trial.WINDOW_STEPS) + trial.DELAY_STEPS
)
TRIED = trial.TRIAL_WINDOWS * (trial.SETTLE_STEPS + trial.WINDOW_STEPS) + trial.DELAY_STEPS
#: Steps up to the agreement on the first trial, which follows a probe.
TRIAL = trial.WARMUP_STEPS - 1 + sum(
    2 * windows * (trial.SETTLE_STEPS + trial.WINDOW_STEPS) + trial.DELAY_STEPS
    for windows in (trial.PROBE_WINDOWS, trial.TRIAL_WINDOWS)
)  # fmt: skip


def last_decides(ranks: int) -> Callable[[int, bool], float]:
    """Seconds of a step: the last rank is slower with frames, and it decides; to the other ranks frames look faster."""
    return lambda rank, coded: (1.3 if coded else 1.1) if rank == ranks - 1 else (0.5 if coded else 1.0)


def first_trial(
    route: CudaBackend, patch: pytest.MonkeyPatch, seconds: Callable[[int, bool], float], ranks: int = 2
) -> Any:
    """What each rank returns of :func:`steps` up to the first trial and beyond, with the seconds of a step."""
    with_profile(patch, SLOW)
    patch.setattr(choice, "mark", FakeClock(seconds).mark)
    return world.run(steps, ranks, TRIAL + 5, route=route).values


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_switch_at_one_step(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    (schedules, found), *others = first_trial(route, monkeypatch, last_decides(ranks), ranks)
    assert found.reason is None and all(one == (schedules, found) for one in others)
    assert all(schedules[: trial.WARMUP_STEPS]) and not any(schedules[TRIAL:])
    (row,) = [row for row in counters.rows() if row["calls"]]
    assert row["reasons"] == {PassReason.STEPS_ARE_FASTER.value: ranks * schedules.count(False)}
    ((what, (text, _)),) = row["choices"].items()
    lost = pytest.approx(-0.2 * ranks * TRIED)
    counted = ranks * (len(schedules) - PROBED)
    assert counters.saved() == {"steps": (lost, 0, counted)}, "plain steps save nothing"
    said = f"plain from step {TRIAL + 1} on (plain 1100 ms, coded 1300 ms)"
    assert what == "whole steps" and text.startswith(said)


def test_a_rank_that_goes_by_its_own_times_is_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(ctx: Any, nanoseconds: list[int]) -> list[float]:
        agreed = calibration.agreed_seconds(ctx, nanoseconds)
        return [one / 1e9 for one in nanoseconds] if ctx.rank == 0 else agreed

    monkeypatch.setattr(choice, "agreed_seconds", own)
    with pytest.raises(world.Fault, match=r"would hang|all_reduce|all_gather"):
        first_trial(route, monkeypatch, last_decides(2))


def test_marks_of_the_device_cost_no_wait(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait of the host for a probe, and one for a trial where the probe is not clear; nothing else waits."""
    with_profile(monkeypatch, SLOW)
    for seed, modes in enumerate((world.Modes(), world.ALL_MODES[-1])):
        outcome = world.run(marks_alone, 2, TRIAL + 3, seed=seed, modes=modes, route=route)
        assert all(not one.waits for one in outcome.counters) and outcome.values[0] == outcome.values[1]
        rows = counters.rows()
        # two of each rank for its staging buffers, after the first step
        waited = {row["op"]: row["host_waits"] for row in rows if row["host_waits"]}
        assert waited.pop("step") in (2, 4) and waited == {"staging": 4}


def marks_alone(rank: int, ranks: int, count: int) -> list[bool]:
    settled(rank, 2)
    engine, schedules = Engine(), []
    for _ in range(count):
        schedules.append(codes())
        torch.ones(10, device=f"cuda:{rank}").mul_(2)
        choice.end_step(engine)
    return schedules


@pytest.mark.parametrize(
    ("nodes", "profile", "settings", "reason"),
    [
        (2, FAST, {}, PassReason.NETWORK_IS_FASTER),
        (1, SLOW, {}, PassReason.INSIDE_NODE),
        (2, DeviceProfile(network=12e9), {}, PassReason.BREAK_EVEN),
        (1, SLOW, {"mode": "always"}, None),
        (2, FAST, {"mode": "always"}, None),
        (2, SLOW, {"roles": {"dp": "always"}}, None),
        (2, SLOW, {"roles": {"dp": "never"}}, PassReason.ROLE),
    ],
)
def test_static_rules(
    route: CudaBackend,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    profile: DeviceProfile,
    settings: dict[str, Any],
    reason: PassReason | None,
) -> None:
    with_profile(monkeypatch, profile)
    outcome = world.run(static, 2, nodes, settings, route=route)
    assert [coded for coded, _ in outcome.values] == [reason is None] * 2
    (row,) = [row for row in counters.rows() if row["calls"] or row["passed"]]
    assert row["reasons"] == ({} if reason is None else {reason.value: 2})


@pytest.mark.parametrize(("nodes", "mode"), [(2, "auto"), (2, "always"), (1, "auto")])
def test_one_hardware_queue(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, nodes: int, mode: str) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS is 1 on one rank: moves in mode auto are plain on all ranks, and the start-up line says why."""
    with_profile(monkeypatch, SLOW)
    told = choice.tell
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(choice, "tell", lambda group, text: {**told(group, text), 0: ""})
    (coded, said), other = world.run(static, 2, nodes, {"mode": mode}, route=route).values
    assert (coded, said) == other == (mode == "always", said)
    assert "no overlap of coded calls with computing, as CUDA_DEVICE_MAX_CONNECTIONS is 1: unset it" in said
    (row,) = [row for row in counters.rows() if row["calls"] or row["passed"]]
    reason = PassReason.ONE_QUEUE if nodes == 2 else PassReason.INSIDE_NODE
    assert row["reasons"] == ({} if coded else {reason.value: 2})


def static(rank: int, ranks: int, nodes: int, settings: dict[str, Any]) -> tuple[bool, str]:
    found = settled(rank, nodes, **settings)
    coded = a_gather(rank, ranks, moves.coded(**{**AUTO, **settings}), 0)
    choice.end_step(Engine())
    return coded, str(found)


def may_copy(rank: int, ranks: int, based: int, base: str) -> PassReason | None:
    """Why a gather of two parameters passes, ``based`` of which have a base."""
    settled(rank, 2, zero3_base=base)
    agreed = [
        SimpleNamespace(numel=1 << 20, slot=lambda has=number < based: object() if has else None) for number in range(2)
    ]
    options = SimpleNamespace(config=ZipcclConfig(enabled=True, **AUTO, zero3_base=base), role="zero_param", lossy=None)
    request = SimpleNamespace(
        op="all_gather_into_tensor", tensor=torch.empty(0, device=f"cuda:{rank}"), group=None, options=options, parameters=agreed,
        sum=SimpleNamespace(op=None), numel=2 << 20, nbytes=lambda: 8 << 20,
    )  # fmt: skip
    request.copied = Request.copied.fget(request)  # type: ignore[attr-defined]
    return engine.StreamEngine().passes_now(request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("based", "base", "reason"),
    [
        (2, "auto", None),
        (1, "auto", PassReason.BREAK_EVEN),
        (0, "auto", PassReason.BREAK_EVEN),
        (2, "host", PassReason.BREAK_EVEN),
        (2, "node", None),
    ],
)
def test_small_gathers_copy_their_bases(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, based: int, base: str, reason: PassReason | None
) -> None:
    """Too small for coding; auto has bases of parameters alone that do not change."""
    with_profile(monkeypatch, DeviceProfile(network=12e9))
    assert world.run(may_copy, 2, based, base, route=route).values == [reason] * 2


@pytest.mark.parametrize("codec", [1e12, 1e9], ids=["fast", "slow"])
def test_gathers_in_two_levels_need_no_codec(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, codec: float) -> None:
    """With a slow codec gathers go in two levels without coding: no kernel, no wait of the host."""
    with_profile(monkeypatch, replace(SLOW, encode=codec, decode=codec))
    found = world.run(static, 4, 2, {}, route=route)
    assert all(coded and "two levels from" in said for coded, said in found.values)
    assert all(("without coding" in said) == (codec < 1e12) for _, said in found.values)
    (row,) = [row for row in counters.rows() if row["calls"]]
    assert row["host_waits"] == (0 if codec < 1e12 else 4)


def test_without_nodes_moves_are_coded(route: CudaBackend) -> None:
    """Plain torch.distributed."""
    assert world.run(unknown, 2, route=route).values == [True, True]


def unknown(rank: int, ranks: int) -> bool:
    choice.end_step(Engine())
    return a_gather(rank, ranks, moves.coded(**AUTO), 0)


def shares(rank: int, ranks: int) -> list[Any]:
    """Static reasons of the world, of the ranks of each node, and of one rank of each node."""
    levels.pretend(levels.nodes_of(2, 2))
    groups = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    choice.settle(ZipcclConfig(enabled=True, **AUTO), torch.device("cuda", rank))
    mine = [None, *(one for one in groups if dist.get_rank(one) >= 0)]
    return [choice.never_coded("all_gather_into_tensor", one, "cuda") for one in mine]


def test_groups_have_rules_of_their_own(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one local rank have their part of the network, and nothing to hide behind a ring inside the node."""
    with_profile(monkeypatch, replace(SLOW, network=300e9))
    found = world.run(shares, 4, route=route).values
    assert found == [[PassReason.NETWORK_IS_FASTER, PassReason.INSIDE_NODE, None]] * 4


def test_marks_that_were_not_made_or_reached_are_unknown(route: CudaBackend) -> None:
    world.run(unknown_marks, 2, route=route)


def unknown_marks(rank: int, ranks: int) -> None:
    config = ZipcclConfig(enabled=True, **AUTO)
    ctx = DeviceContext("step", resolve_group(None), config, "dp", "cascade", torch.device("cuda", rank))
    first = calibration.mark(ctx.device)
    not_reached: Any = SimpleNamespace(query=lambda: False)
    assert calibration.nanoseconds(first, not_reached) == 1 << 62
    assert calibration.nanoseconds(None, first) == 1 << 62
    own = calibration.nanoseconds(7, 9 if rank else 10)
    assert calibration.agreed_seconds(ctx, [own, 5 if rank else 1 << 62]) == [3e-9, float("inf")]
    behind = calibration.mark(ctx.device)
    torch.cuda.synchronize()
    assert calibration.nanoseconds(first, behind) < 1 << 62
    assert calibration._median(ctx, [(7, 7)] * 3) == 1e-6, "the clock stood still"


def test_speeds_are_slopes() -> None:
    assert cost_model.slope([(1e6, 2e-3), (2e6, 3e-3)]) == pytest.approx(1e9)
    assert cost_model.slope([(1e6, 2e-3)]) == pytest.approx(5e8)
    assert cost_model.slope([(1e6, 2e-3), (2e6, 1e-3)]) == pytest.approx(2e9)


def test_latency_is_what_gathers_take_without_their_bytes() -> None:
    points = [(nbytes, 3 * 20e-6 + 28 * cost_model.STEP_S + nbytes / 1e9) for nbytes in (1e6, 2e6, 64e6)]
    topology = cost_model.Topology(4, 8)
    assert cost_model.hop_of(points, topology) == pytest.approx(20e-6, rel=1e-3)
    assert cost_model.hop_of(points[:1], topology) == cost_model.HOP_S
    assert cost_model.hop_of([(1e6, 2e-3), (2e6, 4e-3)], topology) == 0.0, "never below 0"


def engines(rank: int, ranks: int, order: str) -> list[int]:
    """The numbers of the steps that count."""
    settled(rank, 2)
    world_state = group_state(None)
    assert world_state is not None
    found = {name: Engine() for name in "abc"}
    numbers = []
    for name in order:
        choice.end_step(found[name])
        numbers.append(world_state.of(choice.GroupChoice).steps._steps)
    return numbers


def test_the_steps_of_one_engine_count(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with_profile(monkeypatch, SLOW)
    assert world.run(engines, 2, "abab" * 2, route=route).values[0] == [1, 1, 2, 2, 3, 3, 4, 4]
    other = "b" * OTHER_STEPS
    found = world.run(engines, 2, f"aa{other}bb", route=route).values[0]
    assert found[:3] == [1, 2, 2] and found[-4:] == [2, 3, 4, 5]
