"""Programs that torch.distributed runs: ours must not hang in them, nor give other bits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.group_state import GroupState
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TAGS_PER_RANGE, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import tuner_rules
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

AUTO = ZipcclConfig(enabled=True, min_bytes=0)
MODES = {"auto": AUTO, "always": replace(AUTO, mode="always")}
NUMEL = 20_000
#: Operations in flight at a time: past the first measurements that ranks tell each other, in a program that waits for none.
MANY = 3 * tuner_rules.TRIAL_CALLS + 20


def filled(value: float, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), value, dtype=torch.bfloat16)


def far_ahead_in_opposite_orders(rank: int, ranks: int, config: ZipcclConfig) -> None:
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    works = []
    for group in groups if rank else groups[::-1]:
        works += [comm.all_reduce(filled(1), group=group, async_op=True, config=config) for _ in range(MANY)]
    for work in works:
        work.wait()


def far_ahead_of_a_sender(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """Rank 1 starts with what rank 0 ends with."""
    tensor = torch.ones(1 << 20)
    if rank == 1:
        dist.send(tensor, 0)
    works = [comm.all_reduce(filled(1), async_op=True, config=config) for _ in range(MANY)]
    if rank == 0:
        dist.recv(tensor, 1)
    for work in works:
        work.wait()


def one_after_another(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """Rank 2 comes to the broadcast from rank 0 only when rank 1 is through it."""
    for _ in range(3):
        tensor = torch.ones(1 << 18)
        if rank == 2:
            dist.recv(tensor, 1)
        comm.broadcast(filled(1), 0, config=config)
        if rank == 1:
            dist.send(tensor, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "ranks"),
    [(far_ahead_in_opposite_orders, 2), (far_ahead_of_a_sender, 2), (one_after_another, 3)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_nobody_waits_in_a_circle(case: Callable[..., None], ranks: int, mode: str) -> None:
    runner.run(case, ranks, MODES[mode], timeout=40)


def once_wrong(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """A rank may correct its arguments after a ValueError: nothing has been sent."""
    for step in range(12):
        if rank == 0 and step in (0, 9):
            with pytest.raises(ValueError, match="elements of the inputs"):
                comm.all_gather_into_tensor(filled(0, 2 * NUMEL - 2), filled(1), config=config)
        got = filled(0, ranks * NUMEL)
        comm.all_gather_into_tensor(got, filled(rank + 1.0), config=config)
        assert got[0] == 1 and got[-1] == ranks


def both_ways(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """Asynchronous on one rank, blocking on the other."""
    for step in range(MANY):
        tensor = filled(step % 7 + 1.0)
        work = comm.all_reduce(tensor, async_op=bool(rank), config=config)
        work.wait() if rank else None
        assert tensor[0] == 2 * (step % 7 + 1)


def uneven_list(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """What gloo's own all_to_all refuses works from the first call on."""
    for _ in range(tuner_rules.TRIAL_CALLS + 2):
        sizes = [NUMEL + 100 * (rank + peer) for peer in range(ranks)]
        got = [filled(0, size) for size in sizes]
        comm.all_to_all(got, [filled(10 * rank + peer, size) for peer, size in enumerate(sizes)], config=config)
        assert [float(tensor[-1]) for tensor in got] == [10 * peer + rank for peer in range(ranks)]


def coalesced(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """torch's coalescing manager sends calls at its end: there they pass, those of a group without an earlier call too, and later calls are
    coded again."""
    for _ in range(2):
        for later in (False, True):
            sums, whole, part = [filled(1), filled(2)], filled(0, ranks * NUMEL), filled(0, NUMEL // ranks)
            with dist._coalescing_manager(async_ops=later) as manager:
                for tensor in sums:
                    comm.all_reduce(tensor, async_op=later, config=config)
            with dist._coalescing_manager(async_ops=True) as gathers:
                comm.all_gather_into_tensor(whole, filled(rank + 1), config=config)
            with dist._coalescing_manager(async_ops=True) as scatters:
                comm.reduce_scatter_tensor(part, filled(3), config=config)
            for handle in (manager, gathers, scatters) if later else (gathers, scatters):
                handle.wait()
            assert [float(tensor[-1]) for tensor in (*sums, part)] == [ranks, 2 * ranks, 3 * ranks]
            assert [float(whole[one * NUMEL]) for one in range(ranks)] == [one + 1 for one in range(ranks)]
        rows = counters.rows()
        assert [set(row["reasons"]) for row in rows] == [{PassReason.COALESCED.value}] * 3
        comm.all_reduce(tensor := filled(1), config=MODES["always"])
        assert float(tensor[0]) == ranks and sum(row["calls"] for row in counters.rows()) == 1
        counters.reset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [once_wrong, both_ways, uneven_list, coalesced], ids=lambda case: case.__name__)
def test_calls_of_all_kinds(case: Callable[..., None], mode: str) -> None:
    runner.run(case, 2, MODES[mode], timeout=40)


def inputs_in_other_places(rank: int, ranks: int) -> None:
    """The input lies in the place of another rank's output."""
    config = MODES["always"]
    places = [filled(-1) for _ in range(ranks)]
    comm.all_gather(places, places[(rank + 1) % ranks].fill_(rank + 1), config=config)
    assert [float(place[-1]) for place in places] == [peer + 1 for peer in range(ranks)]

    whole = filled(-1, ranks * NUMEL)
    comm.all_gather_into_tensor(whole, whole.chunk(ranks)[(rank + 1) % ranks].fill_(rank + 1), config=config)
    assert [float(place[-1]) for place in whole.chunk(ranks)] == [peer + 1 for peer in range(ranks)]

    tensors = [filled(10 * rank + peer) for peer in range(ranks)]
    turned = [tensors[(peer + 1) % ranks] for peer in range(ranks)]
    comm.all_to_all(turned, tensors, config=config)
    assert [float(tensor[0]) for tensor in turned] == [10 * peer + rank for peer in range(ranks)]

    sizes = [[1, 1, 1], [1, 1, 0], [0, 2, 0]]  # from row to column, in place
    sent, got = [NUMEL * size for size in sizes[rank]], [NUMEL * row[rank] for row in sizes]
    memory = filled(-1, max(sum(sent), sum(got)))
    for peer, part in enumerate(memory[: sum(sent)].split(sent)):
        part.fill_(10 * rank + peer)
    comm.all_to_all_single(memory[: sum(got)], memory[: sum(sent)], got, sent, config=config)
    for peer, part in enumerate(memory[: sum(got)].split(got)):
        assert part.eq(10 * peer + rank).all()


def test_inputs_in_other_places() -> None:
    runner.run(inputs_in_other_places, 3)


def undecided(rank: int, ranks: int, kind: str) -> dict[str, Any]:
    """An asynchronous plain collective is timed too, whatever handle torch gives for it."""
    counters.reset()
    sizes = itertools.cycle([NUMEL, NUMEL + NUMEL // 3, NUMEL + NUMEL // 2])
    for _ in range(3 * tuner_rules.TRIAL_CALLS + tuner_rules.DELAY_CALLS[1] + 2):
        size = next(sizes)
        if kind == "coalesced":
            comm.all_reduce_coalesced([filled(1, size), filled(1, size)], async_op=True, config=AUTO).wait()
        else:
            got = [filled(0, ranks * size), filled(0, ranks * size)]
            comm.all_gather_coalesced(got, [filled(1, size), filled(1, size)], async_op=True, config=AUTO).wait()
    (row,) = counters.rows()
    return row["choices"]


@pytest.mark.parametrize("kind", ["coalesced", "gathers"])
def test_handles_of_all_kinds_are_timed(kind: str) -> None:
    for choices in runner.run(undecided, 2, kind):
        assert choices and all("plain " in latest.split("(")[1] for latest, _ in choices.values()), choices


def uncoded(rank: int, ranks: int) -> list[float]:
    """Where there is a base, uncoded frames are still uncoded, and coded ones no differences."""
    generator = torch.Generator().manual_seed(1)
    whole, ratios = torch.randn(2 * ranks * NUMEL, generator=generator).bfloat16(), []
    for _ in range(4 * tuner_rules.TRIAL_CALLS):
        counters.reset()
        comm.all_gather_into_tensor(whole, whole.chunk(ranks)[rank], config=AUTO, base=comm.IN_PLACE)
        ratios.append(counters.totals()["ratio"])
    return ratios


def test_uncoded_frames_are_no_differences() -> None:
    calls = tuner_rules.TRIAL_CALLS
    for ratios in runner.run(uncoded, 2):
        assert all(0.99 < ratio <= 1 for ratio in ratios[: 2 * calls])
        assert all(1.3 < ratio < 1.7 for ratio in ratios[2 * calls : 3 * calls]) and min(ratios[3 * calls + 1 :]) > 50


def test_tags_repeat_in_whole_operations() -> None:
    last = TAGS_PER_RANGE // TAGS_PER_COLLECTIVE
    state = GroupState.__new__(GroupState)
    state._issued, state._issued_lock = itertools.count(last - 1), threading.Lock()
    tags = [state.next_tag() for _ in range(2)]
    assert tags == [TagRange.COLLECTIVE + (last - 1) * TAGS_PER_COLLECTIVE, TagRange.COLLECTIVE]
    assert tags[0] + TAGS_PER_COLLECTIVE <= TagRange.POINT_TO_POINT


def writes(module: Any, rank: int, ranks: int, more: dict[str, Any]) -> Iterator[tuple[str, list[torch.Tensor], Any]]:
    """Calls of torch.distributed or of ours, with the tensors that they write."""
    one, all_, parts = filled(1), filled(0, ranks * NUMEL), [filled(0) for _ in range(ranks)]
    yield "all_reduce", [one], lambda: module.all_reduce(one, **more)
    yield "broadcast", [one], lambda: module.broadcast(one, 0, **more)
    yield "reduce", [one], lambda: module.reduce(one, 0, **more)
    yield "all_gather", parts, lambda: module.all_gather(parts, filled(1), **more)
    yield "all_gather_into_tensor", [all_], lambda: module.all_gather_into_tensor(all_, filled(1), **more)
    yield "reduce_scatter_tensor", [one], lambda: module.reduce_scatter_tensor(one, filled(1, ranks * NUMEL), **more)
    yield "recv", [one], lambda: module.recv(one, 0, **more) if rank else module.send(filled(1), 1, **more)


def versions(rank: int, ranks: int) -> None:
    """Autograd is told of as many writes as by torch's collectives: a program that runs with those runs with ours."""
    counted: list[dict[str, list[int]]] = []
    for module, more in ((dist, {}), (comm, {"config": MODES["always"]})):
        found = {}
        for name, outputs, call in writes(module, rank, ranks, more):
            before = [tensor._version for tensor in outputs]
            call()
            found[name] = [tensor._version - start for tensor, start in zip(outputs, before, strict=True)]
        counted.append(found)
    plain, ours = counted
    told = {name: (plain[name], ours[name]) for name in plain if ours[name] > plain[name]}
    assert not told, told


def test_versions_of_outputs() -> None:
    runner.run(versions, 2)
