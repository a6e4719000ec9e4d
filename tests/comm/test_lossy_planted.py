"""Proof that the tests of lossy calls can fail: each mistake that the design excludes makes the test that names it red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks as runner
import test_lossy_bytes
import test_lossy_definition
import test_lossy_sums
import torch
import torch.distributed as dist
from sums import CODED

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.comm import group_state, reduction_order
from ds_zipccl.comm.host import frames, pipeline
from ds_zipccl.comm.lossy import frames as lossy_frames
from ds_zipccl.comm.ops import all_reduce
from ds_zipccl.lossy import Round


def exact_owner() -> None:
    """The owner keeps its exact sum."""
    compress = frames.FrameCoder.compress

    def without_place(self: Any, flat: torch.Tensor, buffers: Any, base: Any = None, own_place: Any = None) -> Any:
        return compress(self, flat, buffers, base)

    frames.FrameCoder.compress = without_place  # type: ignore[method-assign]


def own_part_too() -> None:
    """The owner rounds its own part too."""
    make = pipeline.Received.__init__

    def rounded(self: Any, rank: int, exchange: Any, own: torch.Tensor) -> None:
        make(self, rank, exchange, project(own, Round(3)))

    pipeline.Received.__init__ = rounded  # type: ignore[method-assign]


def requantised_ring() -> None:
    """The sum is rounded again at each hop of a ring."""

    def ring(contributions: Any, ranks: Any, total: torch.Tensor, buffer: torch.Tensor, flushes: Any) -> None:
        own = contributions.rank
        total.zero_()
        for rank in [*(rank for rank in ranks if rank != own), own]:
            contributions.add(rank, total)
            if rank != own:
                project(total, Round(3), out=total)

    reduction_order._add_in_order = ring


def nan_to_zero() -> None:
    """Values that are not finite become zero."""

    def finite(good: Callable[..., Any]) -> Callable[..., Any]:
        def without(flat: torch.Tensor, *more: Any, **settings: Any) -> Any:
            return good(flat.nan_to_num(0.0, 0.0, 0.0), *more, **settings)

        return without

    lossy_frames.compress, lossy_frames.project = finite(lossy_frames.compress), finite(lossy_frames.project)


def exact_raw_frames() -> None:
    """Raw frames carry the values as they are."""
    lossy_frames.project = lambda flat, codec, *, out, route: out.copy_(flat)


def one_backoff() -> None:
    """Lossless frames depend on how well lossy ones shrink."""
    backoff = group_state.GroupState.backoff
    group_state.GroupState.backoff = lambda self, op, role, lossy: backoff(self, op, role, False)  # type: ignore[method-assign]


def unhinted_call() -> None:
    """A call that names no codec is lossy."""
    all_reduce.lossy_here = lambda lossy, *more: lossy or Round(1)  # type: ignore[assignment]


def unnamed_calls_are_exact(rank: int, ranks: int, plant: Callable[[], None] | None = None) -> None:
    """A user's own sum is exact beside a lossy one of the same role and size."""
    if plant is not None:
        plant()
    mine = torch.randn(1 << 18, generator=torch.Generator().manual_seed(rank))
    total = mine.clone()
    dist.all_reduce(total)
    for lossy in (Round(1), None, Round(1), None):
        found = mine.clone()
        comm.all_reduce(found, config=CODED, role="tp", lossy=lossy)
        assert torch.equal(found, total) == (lossy is None), f"lossy={lossy}"


def test_calls_that_name_no_codec_are_exact() -> None:
    runner.run(unnamed_calls_are_exact, 2)


#: A mistake, the check that must notice, and the words of its complaint. The checks are tests by themselves, without a mistake.
PLANTS: dict[str, tuple[Callable[[], None], Callable[[Any], Any], str]] = {
    "the owner keeps its exact sum": (
        exact_owner,
        lambda plant: runner.run(test_lossy_sums.replicas, 3, plant),
        "words differ",
    ),
    "the owner rounds its own part too": (
        own_part_too,
        lambda plant: test_lossy_sums.check_errors(2, Round(3), plant),
        "error 0.0",
    ),
    "a ring that rounds at every hop": (
        requantised_ring,
        lambda plant: test_lossy_sums.check_errors(3, Round(3), plant),
        "error 0.0",
    ),
    "NaN becomes zero": (
        nan_to_zero,
        lambda plant: runner.run(test_lossy_sums.not_finite, 3, plant),
        "AssertionError: round",
    ),
    "raw frames with exact values": (
        exact_raw_frames,
        lambda plant: runner.run(test_lossy_definition.by_definition, 2, plant),
        "words differ",
    ),
    "one backoff for all frames": (one_backoff, test_lossy_bytes.check_neighbours, "frames of lossless calls differ"),
    "a call without a hint": (
        unhinted_call,
        lambda plant: runner.run(unnamed_calls_are_exact, 2, plant),
        "AssertionError: lossy=None",
    ),
}


@pytest.mark.full(reason="the tests themselves are in the short tier")
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_is_seen(name: str) -> None:
    plant, check, complaint = PLANTS[name]
    with pytest.raises(AssertionError, match=complaint):
        check(plant)
