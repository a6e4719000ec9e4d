"""check = "shadow" of lossy calls: the error that the codec explains passes, whatever the tensors are, and more than that does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import lossy_calls
import pytest
import ranks as runner
import test_lossy_planted as planted
import torch
import torch.distributed as dist
from lossy_calls import CODECS, api, normal
from sums import CODED

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.comm.lossy import frames
from ds_zipccl.lossy import Round

SIZE = 30_000


def constant(rank: int, size: int) -> torch.Tensor:
    return torch.full((size,), 1.1 + rank)


def alike(rank: int, size: int) -> torch.Tensor:
    """The same on all ranks, errors too."""
    return normal(0, size, torch.float32)


def cancelling(rank: int, size: int) -> torch.Tensor:
    """A sum of next to nothing."""
    found = normal(rank // 2, size, torch.float32) * (-1) ** rank
    return found + 1e-3 * normal(rank, size, torch.float32)


def outliers(rank: int, size: int) -> torch.Tensor:
    """All of the norm is in a few values."""
    found = normal(rank, size, torch.float32)
    found[:3] *= 1e5
    return found


def empty(rank: int, size: int) -> torch.Tensor:
    return torch.zeros(size)


def broken(rank: int, size: int) -> torch.Tensor:
    found = normal(rank, size, torch.float32)
    found[rank] = float("nan")
    found[rank + size // 2] = float("inf")
    return found


FILLS: tuple[Callable[[int, int], torch.Tensor], ...] = (constant, alike, cancelling, outliers, empty, broken)
CALLS = (
    lossy_calls.all_reduce,
    lossy_calls.reduce_scatter_tensor,
    lossy_calls.to_owners,
    lossy_calls.gather,
    lossy_calls.exchange,
)


def no_alarm(rank: int, ranks: int) -> None:
    for seed, (fill, call, size) in enumerate(itertools.product(FILLS, CALLS, (ranks * 2, SIZE))):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        codec = CODECS[seed % len(CODECS)]
        op = dist.ReduceOp.AVG if seed % 2 else dist.ReduceOp.SUM
        everyone = [fill(peer, size).to(dtype) for peer in range(ranks)]
        call(api(codec, check="shadow"), everyone, rank, codec, op, False)


@pytest.mark.full(reason="many tensors")
def test_what_the_codec_explains_passes() -> None:
    runner.run(no_alarm, 3)


def coarser() -> None:
    """Frames carry values with one bit less than was asked for."""
    frames.compress = lambda flat, codec, **settings: good(flat, Round(codec.mantissa - 1), **settings)


good = frames.compress


def alarm(rank: int, ranks: int, plant: Callable[[], None] | None, complaint: str) -> None:
    if plant is not None:
        plant()
    mine = normal(rank, SIZE, torch.float32)
    mine[rank] = mine[rank + SIZE // 2] = float("inf")
    output = torch.empty(SIZE // ranks)
    call = api(Round(3), check="shadow").reduce_scatter_tensor
    if plant is None:
        call(output, mine)
        return
    with pytest.raises(comm.ShadowMismatch, match=complaint):
        call(output, mine)


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (None, ""),
        *(
            pytest.param(plant, complaint, marks=pytest.mark.full(reason="mistakes"))
            for plant, complaint in (
                (planted.own_part_too, "relative L2 error 0.0.* by round mantissa 3, at most 0.0.* is explained"),
                (coarser, "relative L2 error"),
                (planted.nan_to_zero, "wanted inf"),
            )
        ),
    ],
)
def test_more_than_that_does_not(plant: Callable[[], None] | None, complaint: str) -> None:
    runner.run(alarm, 2, plant, complaint)


def sent_exactly(rank: int, ranks: int) -> None:
    """The receiver of a send has the very values of the codec."""
    mine = normal(0, SIZE, torch.bfloat16)
    config = replace(CODED, check="shadow")
    if rank == 0:
        comm.send(mine, 1, config=config, lossy=Round(3))
        frames.project = lambda flat, codec, **more: project(flat, Round(2), **more)
        frames.compress = lambda flat, codec, **settings: good(flat, Round(2), **settings)
        comm.send(mine, 1, config=config, lossy=Round(3))
        return
    got = torch.empty_like(mine)
    comm.recv(got, 0, config=config)
    with pytest.raises(comm.ShadowMismatch):
        comm.recv(got, 0, config=config)


@pytest.mark.full(reason="sends are compared bit by bit, as without a codec")
def test_sends_are_compared_too() -> None:
    runner.run(sent_exactly, 2)
