"""The suites of a rank of the tests of NCCL (nccl_rank.py): all ways to call our operations, in as many sizes as there is time for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import corpus
import figures
import levels
import moves
import sums
import torch
import torch.distributed as dist
import where

from ds_zipccl.ops import OPS
from ds_zipccl.telemetry import counters

if TYPE_CHECKING:
    from nccl_rank import Rank

SETTINGS: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0, "reduction": "fp32"}
#: Elements of the tensors of the suite, up to several blocks of a frame.
SUITE_SIZES = (0, 7, 1025) if where.DRY else moves.SIZES
#: Seconds that both suites may take in NCCL's kernels of two ranks, and these kernels for each size; all-reduces that the probe times.
SUITE_SECONDS, SUITE_KERNELS, TINY_CALLS = 15.0, 100, 20


def suite_sizes(ranks: int) -> tuple[int, ...]:
    """The sizes for which there is time: without MPS ranks take turns on the GPU, and a kernel that waits for a rank wastes its turn.

    Every rank reads the same time of the smallest collective, which the probe told. The largest sizes are kept, two at least.
    """
    size_ms = (figures.told("tiny_ms") or 0.0) * SUITE_KERNELS * ranks / 2
    fit = int(1e3 * SUITE_SECONDS / size_ms) if size_ms else len(SUITE_SIZES)
    return SUITE_SIZES[-max(2, min(len(SUITE_SIZES), fit)) :]


def move_suite(it: Rank) -> None:
    """All ways to call the operations that move bits, in every dtype, with every kind of words."""
    api = moves.coded(**SETTINGS)
    calls = [move for ways in ("all_gather", "all_to_all") if OPS[ways].on_device for move in moves.MOVES[ways]]
    counters.reset()
    for seed, (move, size) in enumerate((move, size) for size in suite_sizes(it.ranks) for move in calls):
        it.alive()
        kind = list(corpus.SUMMED.values())[seed % 3]
        inputs = [moves.filled(peer, size, kind, seed).to(it.device) for peer in range(it.ranks)]
        for later in (False, True):
            outputs, wanted = move(api, inputs, it.rank, later)
            for got, want in zip(outputs, wanted, strict=True):
                corpus.assert_same_bits(got.cpu(), want.cpu())
    it.figures["moves"] = sum(row["calls"] for row in counters.rows())
    assert it.figures["moves"] and not any(row["passed"] for row in counters.rows()), counters.rows()


def sum_suite(it: Rank) -> None:
    """All ways to call the operations that add, in every dtype, with NaNs, infinities and denormals."""
    if not OPS["all_reduce"].on_device:
        return
    api = sums.coded(**SETTINGS)
    calls = (*sums.SUMS["all_reduce"], *sums.SUMS["reduce_scatter"])
    counters.reset()
    sizes = [size for size in suite_sizes(it.ranks) if size >= it.ranks]
    for seed, (add, size) in enumerate((add, size) for size in sizes for add in calls):
        it.alive()
        kind = list(corpus.SUMMED.values())[seed % 3]
        average = seed % 5 == 0
        for fill in (sums.bell, sums.wild):
            contributions = [fill(peer, size, kind, seed) for peer in range(it.ranks)]
            total = levels.in_one_level(contributions, average)
            want = add(levels.Summed(), total, None, False)
            with torch.device(it.device):
                op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
                got = add(api, contributions[it.rank].to(it.device), op, bool(seed % 2))
            end = size // 3 * 3 if add is sums.all_reduce_by_memory else size  # which leaves words alone
            sums.assert_same_sums(got.cpu()[:end], want[:end], kind)
    it.figures["sums"] = sum(row["calls"] for row in counters.rows())
    assert it.figures["sums"] and not any(row["passed"] for row in counters.rows()), counters.rows()
