"""All-reduces of tensors that are the same on all ranks: only hashes travel, and the sums have gloo's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import corpus
import pytest
import ranks as runner
import sums
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.host import replicated
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.telemetry import counters

#: Many fragments for little data.
CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
HASH = HEADER_BYTES + 16
SIZES = (1, 1003, 300_007)
KINDS = (corpus.BF16, corpus.FP16, corpus.FP32)


def added(
    tensor: torch.Tensor, op: Any, group: Any, config: ZipcclConfig = CONFIG, **more: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Sum of ``tensor``, and the row of its counters."""
    counters.reset()
    found = tensor.clone()
    handle = comm.all_reduce(found, op, group, config=config, replicated=True, **more)
    assert (handle is not None) == bool(more) and (handle is None or handle.wait())
    (row,) = counters.rows()
    assert row["kind"] == "replicated"
    return found, dict(row)


def everywhere(rank: int, ranks: int, flushing: Sequence[int] = (), plant: Callable[[], None] | None = None) -> None:
    """Add equal tensors, and tensors of which one differs in one bit, as a group whose ranks flush denormals or keep them."""
    if plant is not None:
        plant()
    torch.set_flush_denormal(rank in flushing)
    group = dist.new_group(list(range(ranks)))
    torch.set_flush_denormal(False)
    for number, (kind, texture, size) in enumerate(
        (k, t, s) for k in KINDS for t in (sums.bell, sums.wild) for s in SIZES
    ):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            tensor = texture(0, size, kind, number)
            want = tensor.clone()
            dist.all_reduce(want, op, group)
            got, row = added(tensor, op, group, **({"async_op": True} if number % 2 else {}))
            sums.assert_same_sums(got, want, kind)
            assert row["wire_bytes"] == HASH * (ranks - 1), row
            assert row["logical_bytes"] == 2 * tensor.nbytes * (ranks - 1) // ranks
            if rank == ranks - 1:
                tensor.view(torch.uint8)[104_729 * number % tensor.nbytes] ^= 1 << number % 8
            want = tensor.clone()
            dist.all_reduce(want, op, group)
            got, row = added(tensor, op, group)
            sums.assert_same_sums(got, want, kind)
            assert row["wire_bytes"] > HASH * (ranks - 1) + tensor.nbytes // 4 // ranks, row


FULL = pytest.mark.full(reason="one number of ranks has the same ways of adding")


@pytest.mark.parametrize(
    ("ranks", "flushing"), [pytest.param(2, (), marks=FULL), (3, (0, 2)), pytest.param(4, (), marks=FULL)]
)
def test_the_bits_of_gloo(ranks: int, flushing: Sequence[int]) -> None:
    runner.run(everywhere, ranks, flushing)


def hash_of_the_first_half() -> None:
    whole = replicated.region_hash
    replicated.region_hash = lambda tensor: whole(tensor[: (tensor.numel() + 1) // 2])


def products() -> None:
    """Multiply instead of adding again and again."""

    def add(self: Any, rank: int, into: torch.Tensor) -> None:
        into.mul_(3) if rank == 2 else None

    replicated._Alike.add = add  # type: ignore[method-assign]


def of_one_rank() -> None:
    """Forget that ranks flush denormals."""
    fold = replicated.Reduction.fold
    replicated.Reduction.fold = lambda self, *args: fold(self, *args[:-1])  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [hash_of_the_first_half, products])
def test_a_fault_is_seen(plant: Callable[[], None]) -> None:
    with pytest.raises(runner.RankFailure, match=r"words differ|wire_bytes"):
        runner.run(everywhere, 3, (), plant)


def test_denormals_that_are_kept_are_seen() -> None:
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(everywhere, 3, (0, 1, 2), of_one_rank)


def others(rank: int, ranks: int) -> list[Any]:
    """Calls that take no notice: of no elements, plain ones, and sums by node."""
    group, tensor = dist.group.WORLD, torch.randn(4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    empty, _ = added(tensor[:0], dist.ReduceOp.SUM, group)
    small = added(tensor, dist.ReduceOp.SUM, group, ZipcclConfig(enabled=True, mode="always"))[1]["reasons"]
    never = added(tensor, dist.ReduceOp.SUM, group, ZipcclConfig(enabled=True, mode="never", min_bytes=0))[1]["reasons"]
    shadow = ZipcclConfig(enabled=True, mode="always", min_bytes=0, check="shadow")
    checked, row = added(tensor, dist.ReduceOp.SUM, group, shadow)
    return [empty.numel(), small, never, row["wire_bytes"], torch.equal(checked, 2 * tensor)]


def test_calls_that_pass_are_of_the_kind_too() -> None:
    passed = [{"smaller than min_bytes": 1}, {"role is never coded": 1}]
    assert runner.run(others, 2) == [[0, *passed, HASH, True]] * 2
