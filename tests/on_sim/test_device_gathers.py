"""Gathers of NCCL groups on the simulated GPU: the package's own calls, unchanged."""

from __future__ import annotations

import gc
from typing import Any

import corpus
import moves
import pytest
import torch

from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.telemetry import counters
from on_sim import world

CODED: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0}


def gathers(rank: int, ranks: int) -> None:
    api = moves.coded(**CODED)
    device = torch.device("cuda", rank)
    for seed, (size, move) in enumerate((size, move) for size in (0, 7, 20001) for move in moves.MOVES["all_gather"]):
        kind = list(corpus.SUMMED.values())[seed % 3]
        inputs = [moves.filled(peer, size, kind, seed).to(device) for peer in range(ranks)]
        for later in (False, True):
            outputs, wanted = move(api, inputs, rank, later)
            for got, want in zip(outputs, wanted, strict=True):
                corpus.assert_same_bits(got.cpu(), want.cpu())


def machines() -> set[int]:
    return {id(one) for one in gc.get_objects() if type(one) is world.Machine}


def test_a_run_leaves_no_memory_behind(route: CudaBackend) -> None:
    """A process of tests makes thousands of machines; one that cannot fork any more fails in other tests."""
    before = machines()
    world.run(gathers, 2, route=route)
    gc.collect()
    assert machines() <= before  # failures of other tests may hold theirs


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers(route: CudaBackend, ranks: int) -> None:
    counters.reset()
    for seed, modes in enumerate((world.ALL_MODES[0], world.ALL_MODES[-1])):  # the other modes: random programs
        world.run(gathers, ranks, seed=seed, modes=modes, route=route)
    rows = counters.rows()
    assert all(row["calls"] and not row["passed"] for row in rows) and rows
