"""Owners of a gradient bucket: the all-reduce that takes them, and the calls that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.integration import hook_points, hooks  # noqa: F401  the table of points
from ds_zipccl.integration.zero import buckets
from ds_zipccl.integration.zero.buckets import Bucket

DATA, OTHER = object(), object()  # groups
OWNED = [(600, frozenset({0})), (400, frozenset({1, 2}))]
BUCKET = Bucket(DATA, OWNED)  # type: ignore[arg-type]
UNKNOWN = (None, buckets.UNKNOWN)


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    buckets._next.set(None)
    yield
    buckets._next.set(None)


#: Elements, reduce op, group and async_op of calls that do not fit the bucket.
CALLS: dict[str, tuple[int, Any, Any, bool]] = {
    "smaller": (999, dist.ReduceOp.SUM, DATA, False),
    "larger": (1001, dist.ReduceOp.SUM, DATA, False),
    "nothing": (0, dist.ReduceOp.SUM, DATA, False),
    "another op": (1000, dist.ReduceOp.MAX, DATA, False),
    "averages": (1000, dist.ReduceOp.AVG, DATA, False),
    "another group": (1000, dist.ReduceOp.SUM, OTHER, False),
    "the default group": (1000, dist.ReduceOp.SUM, None, False),
    "later": (1000, dist.ReduceOp.SUM, DATA, True),
}
RIGHT = (torch.empty(10, 100), dist.ReduceOp.SUM, DATA, False)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_not_of_the_bucket(call: str) -> None:
    """The call gets the full sums, and the owners are forgotten for later calls too."""
    numel, *more = CALLS[call]
    assert not BUCKET.fits(torch.empty(numel), *more)
    buckets._next.set(BUCKET)
    assert buckets.take_owners(torch.empty(numel), *more) == UNKNOWN
    assert buckets.take_owners(*RIGHT) == UNKNOWN


def test_a_bucket_is_for_one_call() -> None:
    assert buckets.take_owners(*RIGHT) == UNKNOWN
    buckets._next.set(BUCKET)
    assert buckets.take_owners(*RIGHT) == (OWNED, "")
    assert buckets._next.get() is None
    assert buckets.take_owners(*RIGHT) == UNKNOWN, "of the same size, but another's"


class Optimizer:
    """An optimizer whose reduction returns the bucket that is noted at that time."""

    dp_process_group = DATA

    def allreduce_and_copy_with_multiple_ranks(
        self, small_bucket: list[torch.Tensor], communication_data_type: Any = None, process_group: Any = None,
        bucket_ranks: Any = None, fail: bool = False,
    ) -> Any:  # fmt: skip
        """DeepSpeed's method."""
        if fail:
            raise RuntimeError("as planted")
        return buckets._next.get()


NAME = "allreduce_and_copy_with_multiple_ranks"
SMALL_BUCKET = [torch.empty(20, 30), torch.empty(400)]


@pytest.fixture
def optimizer() -> Any:
    """An optimizer of a class of its own, which is watched."""
    watched = type("Watched", (Optimizer,), {NAME: getattr(Optimizer, NAME)})
    hook_points.surround(f"DeepSpeedZeroOptimizer.{NAME}", watched)
    return watched()


def test_what_is_known_of_a_bucket(optimizer: Any) -> None:
    reduce = getattr(optimizer, NAME)
    assert reduce(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == BUCKET
    assert reduce(SMALL_BUCKET, None, OTHER, [0, frozenset({1, 2})]) == Bucket(OTHER, OWNED)  # type: ignore[arg-type]
    assert reduce(SMALL_BUCKET) is None, "no owners"
    assert buckets._next.get() is None, "afterwards nothing is known"
    with pytest.raises(ValueError, match="zip"):
        reduce(SMALL_BUCKET, bucket_ranks=[0])
    with pytest.raises(RuntimeError, match="as planted"):
        reduce(SMALL_BUCKET, bucket_ranks=[0, 1], fail=True)
    assert buckets._next.get() is None


def test_zenflow_keeps_its_sums_whole(optimizer: Any) -> None:
    for on, wanted in ((True, None), (False, BUCKET)):
        optimizer.zenflow = on
        assert getattr(optimizer, NAME)(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == wanted


def test_watching_twice_is_watching_once(optimizer: Any) -> None:
    watched = type(optimizer)
    once = getattr(watched, NAME)
    assert once is not getattr(Optimizer, NAME) and once.__doc__ == "DeepSpeed's method."
    hook_points.surround(f"DeepSpeedZeroOptimizer.{NAME}", watched)
    assert getattr(watched, NAME) is once
    bare = type("Bare", (), {})
    hook_points.surround(f"DeepSpeedZeroOptimizer.{NAME}", bare)
    assert not hasattr(bare, NAME)
