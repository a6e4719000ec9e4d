"""Memory of the simulated GPU over many steps of training: it does not grow, and coding needs no more than its staging buffers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import corpus
import levels
import pytest
import torch
import torch.distributed as dist
from sim import device

from ds_zipccl import comm
from ds_zipccl.comm.device import choice, context
from ds_zipccl.comm.device import reserve as reservation
from ds_zipccl.comm.device.reports import reports_of
from ds_zipccl.comm.device.streams import Streams, streams_of
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import random_programs, world

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0, reduction="fp32")
PLAIN = ZipcclConfig(enabled=False)
#: Bytes of the words in which decoders report, and of small temporaries: headers, work space, agreements.
REPORTS, SMALL = 8 * (4096 + 3072), 16 << 10


def gather(weights: Sequence[torch.Tensor], config: ZipcclConfig) -> None:
    """As ZeRO-3: into new memory, one parameter ahead of its use."""
    started: list[tuple[torch.Tensor, Any]] = []
    for shard in weights:
        whole = torch.empty(dist.get_world_size() * shard.numel(), dtype=shard.dtype, device=shard.device)
        started.append((whole, comm.all_gather_into_tensor(whole, shard, None, True, config=config)))
        if len(started) > 1:
            use(*started.pop(0))
    use(*started.pop())


def gather_in_place(weights: Sequence[torch.Tensor], config: ZipcclConfig) -> None:
    ranks, shard = dist.get_world_size(), weights[-1]
    whole = torch.zeros(ranks * shard.numel(), dtype=shard.dtype, device=shard.device)
    comm.all_gather_into_tensor(whole, whole.chunk(ranks)[dist.get_rank()], config=config)


def scatter(weights: Sequence[torch.Tensor], config: ZipcclConfig) -> None:
    gradients = torch.cat([weights[-1]] * dist.get_world_size())
    comm.reduce_scatter_tensor(torch.empty_like(weights[-1]), gradients, config=config)


def exchange(weights: Sequence[torch.Tensor], config: ZipcclConfig) -> None:
    tokens = torch.cat([weights[-1]] * dist.get_world_size())
    comm.all_to_all_single(torch.empty_like(tokens), tokens, config=config)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sent = [len(tokens) // ranks // 2 * (peer + 1) for peer in range(ranks)]  # most to the last rank
    received = tokens.new_empty(ranks * sent[rank])
    comm.all_to_all_single(received, tokens[: sum(sent)], [sent[rank]] * ranks, sent, config=config)


#: Steps follow each other in this order.
STEPS = (gather, scatter, gather_in_place, exchange)


def use(whole: torch.Tensor, handle: Any) -> None:
    handle.wait()
    (whole * 2).sum()


def train(
    rank: int, ranks: int, config: ZipcclConfig, sizes: Sequence[int], looks: Sequence[int]
) -> list[dict[str, int]]:
    """Train, and return the memory after the steps of ``looks``."""
    place = torch.device("cuda", rank)
    values = torch.randn(max(sizes), generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16).to(place)
    weights = [values[:size].clone() for size in sizes]
    found = []
    for number in range(1, looks[-1] + 1):
        STEPS[number % len(STEPS)](weights, config)
        if number in looks:
            torch.cuda.synchronize()
            gpu, streams = device.mine(), streams_of(place)
            streams.sweep()
            found.append(
                {
                    "reserved": gpu.allocator.used().numel(),
                    "live": gpu.allocator.live,
                    "staging_buffers": streams.nbytes(),
                    "left": len(streams._left),
                }
                | {"names": len(reports_of(streams)._names), "peak": gpu.allocator.peak}
            )
    return found


def machines() -> set[int]:
    return {id(one) for one in gc.get_objects() if type(one) is world.Machine}


def test_a_run_leaves_no_memory_behind(route: CudaBackend) -> None:
    """A process of tests makes thousands of machines; one that cannot fork any more fails in other tests."""
    before = machines()
    world.run(train, 2, CODED, (300,), (4,), route=route)
    gc.collect()
    assert machines() <= before  # failures of other tests may hold theirs


def leaking(patch: pytest.MonkeyPatch) -> None:
    """Every staging buffer is new, and none is given back."""

    def take(self: Streams, nbytes: int, budget: int) -> Any:
        self._buffers.append(self._new(nbytes))
        return self._buffers[-1]

    patch.setattr(Streams, "_take", take)


def flat(route: CudaBackend, steps: int) -> bool:
    """Whether memory is after all steps as it was when the staging buffers had taken their budget."""
    modes = world.Modes(races=False)
    with random_programs.limits(1 << 13):
        ran = world.run(
            train, 2, CODED, (300,), (24, steps), route=route, modes=modes, arena_bytes=32 << 20, timeout=400
        )
    assert all(before["staging_buffers"] > 0 for before, _ in ran.values), "or nothing was coded"
    return all(before == after for before, after in ran.values)


@pytest.mark.parametrize("steps", [60, pytest.param(400, marks=pytest.mark.full(reason="many steps"))])
def test_memory_is_flat(route: CudaBackend, steps: int) -> None:
    assert flat(route, steps)


def test_a_leak_is_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking(monkeypatch)
    assert not flat(route, 40)


@pytest.mark.parametrize("budget", [1 << 16, 1 << 18])
def test_the_peak(route: CudaBackend, budget: int) -> None:
    """Over plain communication coding needs the budget and two staging buffers. A staging buffer has at most a third of the budget,
    rounded up."""
    sizes, peaks = (20_000, 9_000, 20_000), {}
    for config in (PLAIN, CODED):
        with random_programs.limits(budget):
            outcome = world.run(train, 2, config, sizes, (4,), route=route)
        peaks[config.enabled] = max(counts.peak_bytes for counts in outcome.counters)
    staging = budget // 3 + (budget // 3 >> 3) + 1024
    assert 0 < peaks[True] - peaks[False] - REPORTS - SMALL <= budget + 2 * staging


# ---- staging buffers sized to the device ---------------------------------------------------------------------------------


def sized(rank: int, ranks: int, staging_mib: int = 0) -> tuple[int, int, list[str]]:
    """Gathers and sums before and after the first optimizer step; the bytes of the buffers on which the ranks agreed, those of this
    rank's memory for them, and the reasons for which calls passed."""
    levels.pretend(levels.nodes_of(2, 1))
    config = replace(CODED, staging_mib=staging_mib)
    device = torch.device("cuda", rank)
    choice.settle(config, device)
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16).to(device)
    for _ in range(3):
        gather([values[:20_000], values[20_000:]], config)
        summed = values.clone()
        comm.all_reduce(summed, config=config)
        choice.end_step(sized)
        torch.cuda.synchronize()
    wanted = [torch.randn(40_000, generator=torch.Generator().manual_seed(one)).to(torch.bfloat16) for one in range(2)]
    corpus.assert_same_bits(summed.cpu(), levels.in_one_level(wanted))
    reasons = sorted({reason for row in counters.rows() for reason in row["reasons"]})
    return context.staging_of(config, device), streams_of(device).memory(), reasons


@pytest.fixture
def uneven_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has less memory."""
    monkeypatch.setattr(wire, "device_staging", lambda memory, free: (3 - dist.get_rank()) << 20)


@pytest.mark.usefixtures("uneven_memory")
def test_ranks_agree_on_the_staging_buffers_that_all_have(route: CudaBackend) -> None:
    for seed, modes in enumerate((world.Modes(), world.ALL_MODES[-1])):
        found = world.run(sized, 2, route=route, seed=seed, modes=modes).values
        assert found == [(2 << 20, 2 << 20, [])] * 2, "all of it is reserved, and no buffer lies elsewhere"


def test_a_number_in_the_config_wins(route: CudaBackend) -> None:
    for budget, memory, reasons in world.run(sized, 2, 5, route=route).values:
        assert budget == 5 << 20 and 0 < memory <= budget and not reasons


@pytest.mark.usefixtures("uneven_memory")
def test_a_rank_that_cannot_reserve_makes_all_plain(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Streams.reserve

    def full(self: Streams, nbytes: int) -> None:
        if dist.get_rank() == 1 and nbytes:
            raise torch.OutOfMemoryError("full")
        reserve(self, nbytes)

    monkeypatch.setattr(Streams, "reserve", full)
    found = world.run(sized, 2, route=route).values
    assert found == [(64 << 20, 0, [PassReason.NO_MEMORY.value])] * 2
    # a rank that goes by its own memory calls other collectives than its peers
    monkeypatch.setattr(reservation, "largest", lambda ctx, *numbers: list(numbers))
    with pytest.raises(world.Fault, match=r"would hang|all_reduce|all_gather"):
        world.run(sized, 2, route=route)


def test_buffers_lie_in_gaps_of_the_reserved_memory(route: CudaBackend) -> None:
    """A larger one than a gap waits for those that are free; one larger than all lies elsewhere."""
    world.run(gaps, 1, route=route)


def gaps(rank: int, ranks: int) -> None:
    own, unit = Streams(torch.device("cuda", rank)), 1 << 16
    own.reserve(8 * unit)
    starts = []
    with own.staging(3 * unit, 8 * unit), own.staging(2 * unit, 8 * unit):
        starts += [one.start for one in own._buffers]
        with own.staging(17 * unit, 8 * unit):
            starts.append(own._buffers[-1].start)
    with own.staging(6 * unit, 8 * unit):
        starts.append(own._buffers[-1].start)
    assert starts == [0, 3 * unit, None, 0]
    own.reserve(0)
    assert own.memory() == own.nbytes() == 0
