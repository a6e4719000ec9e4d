"""The error of sums of gradients in 16 bits: ours against a ring that rounds after every rank, as NCCL's does, on twelve trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from ds_zipccl.comm.reduction_order import on_host

RANKS, NODES = 8, [[0, 1, 2, 3], [4, 5, 6, 7]]
WIDTH, STEPS = 64, 4

MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.Conv1d(1, 32, 5),
        nn.GELU(),
        nn.Conv1d(32, 8, 5),
        nn.Flatten(),
        nn.Linear(448, WIDTH),
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True), nn.Flatten()
    ),
    "normed": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.SiLU(), nn.Linear(512, WIDTH)),
}


def gradients(make: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """For each step the flat gradient of each rank, which has a batch of its own, in 16 bits."""
    torch.manual_seed(seed)
    model, found = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=(1e-2, 1e-3, 1e-4)[seed % 3])
    target = torch.randn(WIDTH, WIDTH)
    for _ in range(STEPS):
        of_ranks = []
        for _ in range(RANKS):
            model.zero_grad()
            inputs = torch.randn(16, WIDTH)
            nn.functional.mse_loss(model(inputs), inputs @ target).backward()
            of_ranks.append(torch.cat([one.grad.flatten() for one in model.parameters()]))  # type: ignore[union-attr]
        found.append([one.to(dtype) for one in of_ranks])
        at, mean = 0, torch.stack(of_ranks).mean(0)
        for one in model.parameters():
            one.grad = mean[at : at + one.numel()].view_as(one).clone()
            at += one.numel()
        optimizer.step()
    return found


def ring(given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each of the chunks begins at another rank, and rounds at every step."""
    sums = []
    for chunk, parts in enumerate(zip(*(one.chunk(RANKS) for one in given), strict=True)):
        total = parts[(chunk + 1) % RANKS]
        for step in range(2, RANKS + 1):
            total = total + parts[(chunk + step) % RANKS]
        sums.append(total)
    return torch.cat(sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nodes", [NODES, [[rank] for rank in range(RANKS)]], ids=["two levels", "one level"])
def test_error_is_at_most_that_of_a_ring(name: str, seed: int, dtype: torch.dtype, nodes: list[list[int]]) -> None:
    """In root mean square, of a sum and of an average, which a ring of NCCL takes of values that it has divided before."""
    errors = torch.zeros(4, dtype=torch.float64)
    for given in gradients(MODELS[name], seed, dtype):
        exact = torch.stack([one.double() for one in given]).sum(0)
        divided = [(one.float() / RANKS).to(dtype) for one in given]
        results = on_host(given, nodes), ring(given), on_host(given, nodes, RANKS), ring(divided)
        for at, (got, want) in enumerate(zip(results, (exact, exact, exact / RANKS, exact / RANKS), strict=True)):
            errors[at] += (got.double() - want).square().sum()
    ours, rings, our_average, of_ring = errors.sqrt().tolist()
    print(f"{ours / rings:.3f} {our_average / of_ring:.3f}")
    assert 0 < ours <= rings and 0 < our_average <= of_ring
