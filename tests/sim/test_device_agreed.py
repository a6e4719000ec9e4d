"""Gathers of parameters with agreed sizes, on the simulated GPU: no wait of the host, and never a wrong bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from ds_zipccl import comm, kernels
from ds_zipccl.comm import Agreed
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda import CudaRoute
from ds_zipccl.telemetry import counters
from sim import launcher, world

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0)
#: Elements of a rank's shard of each parameter: no element, raw ones, one frame, odd addresses.
SIZES = (0, 3, 3001, 2048, 5003)


@pytest.fixture(scope="module")
def route() -> CudaRoute:
    kernels.route()
    return launcher.route()


class Model:
    """Parameters of one rank, as ZeRO-3 has them, and a copy on the host of the shards of all ranks."""

    def __init__(self, rank: int, ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", rank)
        self.agreed = [Agreed(f"layers.{number}.weight", size) for number, size in enumerate(SIZES)]
        self.hosts = [
            [weights(peer, size, seed + number, dtype) for peer in range(ranks)] for number, size in enumerate(SIZES)
        ]
        self.shards = [hosts[rank].to(self.device) for hosts in self.hosts]

    def agree(self) -> int:
        return comm.agree_sizes(zip(self.agreed, self.shards, strict=True), config=CONFIG)

    def gather(self, numbers: list[int], later: bool = True) -> Callable[[], list[bool]]:
        """Start a gather as DeepSpeed does it: shards end to end, in place. The result tells whether each parameter has the right bits."""
        words = torch.cat([self.shards[number] for number in numbers])
        output = torch.empty(self.ranks * words.numel(), dtype=words.dtype, device=self.device)
        own = output[self.rank * words.numel() : (self.rank + 1) * words.numel()]
        own.copy_(words)
        parameters = [self.agreed[number] for number in numbers]
        handle = comm.all_gather_into_tensor(
            output, own, None, later, config=CONFIG, role="zero_param", agreed=parameters
        )
        wanted = [[host.clone() for host in self.hosts[number]] for number in numbers]

        def finish() -> list[bool]:
            if handle is not None:
                handle.wait()
            parts = output.cpu().view(self.ranks, -1).split([SIZES[number] for number in numbers], 1)
            return [
                all(same(part[peer], want[peer]) for peer in range(self.ranks))
                for part, want in zip(parts, wanted, strict=True)
            ]

        return finish

    def write(self, number: int, peer: int, words: torch.Tensor) -> None:
        """Change a shard in place. All ranks call, as each keeps a copy of all shards."""
        self.hosts[number][peer] = words
        if peer == self.rank:
            self.shards[number].copy_(words.to(self.device))


def weights(rank: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Words of a trained weight: they shrink."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (0.02 * torch.randn(size, generator=generator)).to(dtype)


def noise(size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Words of any bits: they do not shrink."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(1 << 15), 1 << 15, (size * dtype.itemsize // 2,), generator=generator)
        .to(torch.int16)
        .view(dtype)
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def waits() -> int:
    """Waits of the host that the package has counted, of all ranks of the simulation."""
    return sum(row["host_waits"] for row in counters.rows())


def steps(rank: int, ranks: int, seed: int, dtype: torch.dtype) -> None:
    model = Model(rank, ranks, seed, dtype)
    order = random.Random(seed)
    assert model.agree() == len(SIZES)
    for step in range(3):
        started = []
        for _ in range(3):
            numbers = sorted(order.sample(range(len(SIZES)), order.randint(1, len(SIZES))))
            started.append(model.gather(numbers, order.random() < 0.7))
        for finish in started:
            assert all(finish())
        for number in range(1, 3):  # a step; the others are frozen
            for peer in range(ranks):
                model.write(number, peer, weights(peer, SIZES[number], 50 * step + number, dtype))
            model.agreed[number].forget()
        comm.check_frames(model.device, config=CONFIG)
        assert model.agree() == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps(route: CudaRoute, ranks: int) -> None:
    for seed, modes in enumerate(world.ALL_MODES):
        counters.reset()
        dtype = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
        world.run(steps, ranks, seed, dtype, seed=seed, modes=modes, route=route)
        rows = {row["op"]: row for row in counters.rows()}
        assert rows["all_gather_into_tensor"]["host_waits"] == 0
        assert rows["all_gather_into_tensor"]["calls"] == 9 * ranks
        assert rows["agreement"]["host_waits"] == 7 * ranks
