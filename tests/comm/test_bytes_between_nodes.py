"""Bytes between nodes, counted: sums in two levels and gathers by node send no more than a ring; what the counters say; and memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import levels
import pytest
import ranks as runner
import torch
from levels import CountingTransport, Nodes, in_one_level_only, nodes_of
from sums import CODED, bell
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import comm
from ds_zipccl.comm.host.buffer_pool import POOL
from ds_zipccl.telemetry import counters

FP32 = replace(CODED, reduction="fp32")
NUMEL = 1 << 20
NBYTES = 2 * NUMEL


def gaussian(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).bfloat16()


CALLS: dict[str, Callable[..., Any]] = {
    "reduce_scatter_tensor": lambda x, ranks, **more: comm.reduce_scatter_tensor(
        x.new_empty(len(x) // ranks), x, **more
    ),
    "reduce_scatter": lambda x, ranks, **more: comm.reduce_scatter(
        x.new_empty(len(x) // ranks), list(x.chunk(ranks)), **more
    ),
    "all_reduce": lambda x, ranks, **more: comm.all_reduce(x, **more),
    "reduce": lambda x, ranks, **more: comm.reduce(x, 1, **more),
    "balanced": lambda x, ranks, **more: comm.reduce_to_owners(
        x, [(len(x) // ranks, (r,)) for r in range(ranks)], **more
    ),
    "one owner": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), (1,))], **more),
    "all own all": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), range(ranks))], **more),
}


def ring(call: str, nodes: int, ranks: int) -> float:
    """Bytes between nodes of all ranks together, by a ring that enters each node once: a reduce-scatter sends (ranks - 1) / ranks of the
    message over each link, an all-reduce twice as much. A reduce is a reduce-scatter, and a gather at one rank."""
    once = nodes * (ranks - 1) / ranks * NBYTES
    at_root = (nodes - 1) / nodes * NBYTES
    all_reduces = ("all_reduce", "balanced", "one owner", "all own all")
    return once + at_root if call == "reduce" else (2 if call in all_reduces else 1) * once


def bytes_between(rank: int, ranks: int, nodes: Nodes, plant: Callable[[], None] | None = None) -> dict[str, list[int]]:
    levels.pretend(nodes)
    if plant is not None:
        plant()
    found: dict[str, list[int]] = {}
    for (name, call), codec in itertools.product(CALLS.items(), ("raw", "cascade")):
        CountingTransport.begin()
        call(gaussian(rank), ranks, config=replace(FP32, codec=codec))
        found.setdefault(name, []).append(CountingTransport.between)
    CountingTransport.begin()
    whole = torch.empty(NUMEL, dtype=torch.bfloat16)
    comm.all_gather_into_tensor(whole, gaussian(7).chunk(ranks)[rank], config=FP32)
    corpus.assert_same_bits(whole, gaussian(7))
    found["gather"] = [CountingTransport.between]
    return found


def totals(nodes: int, each: int, plant: Callable[[], None] | None = None) -> dict[str, list[int]]:
    """Bytes between nodes of all ranks: uncoded and coded sums, and a coded gather."""
    of_ranks = runner.run(bytes_between, nodes * each, nodes_of(nodes, each), plant)
    return {name: [sum(column) for column in zip(*(one[name] for one in of_ranks))] for name in of_ranks[0]}


@pytest.mark.parametrize(("nodes", "each"), [(2, 4), (4, 2)])
def test_no_more_bytes_between_nodes_than_a_ring(nodes: int, each: int) -> None:
    found = totals(nodes, each)
    (gathered,) = found.pop("gather")
    assert gathered <= ring("gather", nodes, nodes * each) / 1.4
    for call, (uncoded, with_codec) in found.items():
        least = ring(call, nodes, nodes * each)
        assert 0 < uncoded <= least, (call, uncoded / least)
        assert with_codec <= least / 1.4, (call, with_codec / least)


def test_one_level_sends_more_than_a_ring() -> None:
    found = totals(2, 4, in_one_level_only)
    assert found["reduce_scatter_tensor"][0] > 2.2 * ring("reduce_scatter_tensor", 2, 8)


def accounts(rank: int, ranks: int) -> None:
    """The counters have all that is sent, inside nodes as well; and before coding that is as much as in one level."""
    levels.pretend(nodes_of(2, 2))
    CountingTransport.begin()
    counters.reset()
    comm.reduce_scatter_tensor(torch.empty(NUMEL // 4, dtype=torch.bfloat16), gaussian(rank), config=FP32)
    (row,) = counters.rows()
    assert row["logical_bytes"] == NBYTES * 3 // 4
    assert row["wire_bytes"] == CountingTransport.between + CountingTransport.inside
    assert CountingTransport.inside == pytest.approx(NBYTES / 2, rel=1e-3)  # uncoded
    assert CountingTransport.between == pytest.approx(NBYTES / 4 / 1.5, rel=0.05)


def test_what_the_counters_say() -> None:
    runner.run(accounts, 4)


def bounded(rank: int, ranks: int) -> list[float]:
    """The most memory for frames and sums, in parts of staging_mib."""
    levels.pretend(nodes_of(2, 2))
    peaks = []
    tensor = bell(rank, 12 << 20, corpus.BF16, 0)
    for call in ("reduce_scatter_tensor", "all_reduce", "balanced"):
        POOL.peak = 0
        CALLS[call](tensor, ranks, config=replace(FP32, staging_mib=6))
        peaks.append(POOL.peak / (6 << 20))
    return peaks


def test_memory_is_bounded() -> None:
    for peaks in runner.run(bounded, 4):
        # frames may be a little larger than pieces, buffers are rounded up by an eighth; sums of nodes are made beside them
        assert all(0 < peak <= 1.4 for peak in peaks), peaks


def letting_go(rank: int, ranks: int, nodes: Nodes) -> list[str]:
    """Calls after which a tensor still has memory, which only garbage collection would free."""
    levels.pretend(nodes)
    gc.disable()
    kept = []
    for name, call in CALLS.items():
        tensor = gaussian(rank)
        memory = StorageWeakRef(tensor.untyped_storage())
        call(tensor, ranks, config=FP32)
        del tensor
        kept += [name] * (not memory.expired())
    return kept


@pytest.mark.parametrize("nodes", [nodes_of(2, 2), nodes_of(1, 4)])
def test_memory_is_let_go(nodes: Nodes) -> None:
    assert runner.run(letting_go, 4, nodes) == [[]] * 4
