"""Memory of the simulated GPU over many steps of training: it does not grow, and coding needs no more than its staging buffers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim import device

from ds_zipccl import comm
from ds_zipccl.comm.device.reports import reports_of
from ds_zipccl.comm.device.streams import Streams, streams_of
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import random_programs, world

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0, reduction="fp32")
PLAIN = ZipcclConfig(enabled=False)
#: Bytes of the words in which decoders report, and of small temporaries: headers, work space, agreements.
REPORTS, SMALL = 8 * 4096, 16 << 10


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
