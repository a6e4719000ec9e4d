"""Lossy sums: the size of their error, equal replicas, values that are not finite, and calls that stay exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import lossy_calls
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lossy_calls import CODECS, api, normal

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import LossyCodec, Round
from ds_zipccl.telemetry import counters

#: Of the gates on errors of sums.
GATE = 0.08
SIZE = 240_000


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative L2 error."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, uncompressed."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine.contiguous())
    return everyone


def errors_of(rank: int, ranks: int, codec: LossyCodec, plant: Callable[[], None] | None = None) -> dict[str, float]:
    """The errors of one rounding and of sums of like contributions in fp32, where nothing else rounds."""
    if plant is not None:
        plant()
    everyone = [normal(peer, SIZE, torch.float32, 7) for peer in range(ranks)]
    exact, mine = torch.stack([values.double() for values in everyone]).sum(0), everyone[rank]
    calls = api(codec)
    found = {"once": relative(project(mine, codec), mine)}
    whole = mine.clone()
    calls.all_reduce(whole)
    found["all_reduce"] = relative(whole, exact)
    shard = torch.empty(SIZE // ranks)
    calls.reduce_scatter_tensor(shard, mine)
    found["reduce_scatter_tensor"] = relative(shard, exact.chunk(ranks)[rank])
    owned = mine.clone()
    calls.reduce_to_owners(owned, [(SIZE // ranks, (peer,)) for peer in range(ranks)])
    found["reduce_to_owners"] = relative(owned.chunk(ranks)[rank], exact.chunk(ranks)[rank])
    averaged = mine.clone()
    calls.all_reduce(averaged, dist.ReduceOp.AVG)
    found["average"] = relative(averaged, exact / ranks)
    return found


def check_errors(ranks: int, codec: LossyCodec, plant: Callable[[], None] | None = None) -> None:
    """One rounding of each contribution but the own one; an all-reduce rounds the sum as well. A third rounding, one less, and one of the
    own part are beyond the gates."""
    contributions = math.sqrt((ranks - 1) / ranks)
    both = math.sqrt((ranks - 1) / ranks + 1)
    for found in runner.run(errors_of, ranks, codec, plant):
        once = found.pop("once")
        for name, error in found.items():
            wanted = once * (both if name in ("all_reduce", "average") else contributions)
            assert abs(error / wanted - 1) <= GATE, f"{name} of {ranks}: error {error:.5f}, wanted {wanted:.5f} +-8 %"


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full(reason="more of the same formula")) for ranks in (3, 4))]
)
def test_errors_of_sums(ranks: int) -> None:
    check_errors(ranks, Round(3))


@pytest.mark.full(reason="the schedules are the same for all codecs")
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in (Round(3), Round(1))], ids=str)
def test_errors_of_sums_by_other_codecs(codec: LossyCodec) -> None:
    check_errors(3, codec)


def replicas(rank: int, ranks: int, plant: Callable[[], None] | None = None) -> None:
    """Every rank has the same bits after every all-reduce and gather, in the own part too."""
    if plant is not None:
        plant()
    for codec, dtype in itertools.product(CODECS, (torch.bfloat16, torch.float32)):
        for config in ({}, {"codec": "raw"}):
            for call in (lossy_calls.all_reduce, lossy_calls.all_reduce_coalesced, lossy_calls.gather):
                everyone = [lossy_calls.with_specials(peer, 40_009, dtype) for peer in range(ranks)]
                got, _ = call(api(codec, **config), everyone, rank, codec, dist.ReduceOp.SUM, False)
                for other in gathered(got):
                    corpus.assert_same_bits(got, other)


def test_replicas_are_equal() -> None:
    runner.run(replicas, 3)


def not_finite(rank: int, ranks: int, plant: Callable[[], None] | None = None) -> None:
    """What is not finite on one rank is so on every rank, and its neighbors in the tensor stay near what they were."""
    if plant is not None:
        plant()
    for codec, dtype, value in itertools.product(
        CODECS, (torch.bfloat16, torch.float16, torch.float32), (math.nan, math.inf, -math.inf)
    ):
        everyone = [normal(peer, 30_000, dtype, 3) for peer in range(ranks)]
        for place in (5, 29_998):
            everyone[1][place] = value
        plain, whole = torch.stack([values.float() for values in everyone]).sum(0), everyone[rank].clone()
        api(codec).all_reduce(whole)
        assert torch.equal(whole.isfinite(), plain.isfinite()), f"{codec} {dtype} {value}"
        assert torch.equal(whole.isnan(), plain.isnan()), f"{codec} {dtype} {value}"
        finite = plain.isfinite()
        assert relative(whole[finite], plain[finite]) < (0.5 if codec == Round(1) else 0.2)
        shard = whole.new_empty(30_000 // ranks)
        api(codec).reduce_scatter_tensor(shard, everyone[rank])
        assert torch.equal(shard.isfinite(), plain.chunk(ranks)[rank].isfinite())


@pytest.mark.full(reason="the definition has such values")
def test_nothing_that_is_not_finite_disappears() -> None:
    runner.run(not_finite, 3)


def stays_exact(rank: int, ranks: int) -> None:
    """Small messages, other dtypes and reductions, one rank, a role that is never coded, and a config that is not enabled."""
    codec = Round(1)
    default = ZipcclConfig(enabled=True, mode="always")
    everyone = [normal(peer, 40_000, torch.float32) for peer in range(ranks)]
    mine, alone = everyone[rank], [dist.new_group([peer]) for peer in range(ranks)]
    total = mine.clone()
    dist.all_reduce(total)

    def summed(config: ZipcclConfig, values: torch.Tensor, **more: Any) -> torch.Tensor:
        found = values.clone()
        comm.all_reduce(found, config=config, lossy=codec, **more)
        return found

    small = mine[: default.min_bytes // 4 - 1]
    corpus.assert_same_bits(summed(default, small), total[: len(small)])
    assert not torch.equal(summed(default, mine), total)
    corpus.assert_same_bits(summed(replace(default, enabled=False), mine), total)
    corpus.assert_same_bits(summed(replace(default, mode="never"), mine), total)
    corpus.assert_same_bits(summed(default, mine, group=alone[rank]), mine)
    whole = torch.arange(40_000)
    assert torch.equal(summed(default, whole), whole * ranks)
    assert torch.equal(summed(default, mine.double()), torch.stack([one.double() for one in everyone]).sum(0))
    assert torch.equal(summed(default, mine, op=dist.ReduceOp.MAX), torch.stack(everyone).amax(0))
    segments = [torch.full((900,), 1 / 3) for _ in range(ranks)]
    outputs = [torch.empty(900) for _ in range(ranks)]
    comm.all_to_all(
        outputs, segments, config=default, lossy=codec
    )  # its size is each rank's own, so that it never passes
    corpus.assert_same_bits(torch.cat(outputs), torch.cat(segments))
    assert {reason for row in counters.rows() for reason in row["reasons"]} == {
        "smaller than min_bytes",
        "not enabled",
        "role is never coded",
        "group of one rank",
        "dtype int64",
        "dtype float64",
        "reduce op MAX",
    }


def test_calls_that_stay_exact() -> None:
    runner.run(stays_exact, 2)


def counted(rank: int, ranks: int) -> None:
    """The sampled error of the sender is the error of one rounding; frames count."""
    mine = normal(rank, SIZE, torch.bfloat16)
    for _ in range(3):
        api(Round(3)).all_reduce(mine.clone(), role="tp")
    mine[7] = math.inf
    api(Round(3)).all_gather_into_tensor(torch.empty(SIZE * ranks).bfloat16(), mine, role="tp")
    first, second = counters.lossy()
    assert (first["role"], first["op"], first["codec"]) == ("tp", "all_gather_into_tensor", "round mantissa 3")
    for row in (first, second):
        assert row["error"] == pytest.approx(0.0265, rel=0.05)
        assert row["frames"] >= 1 and not row["exact"]
    api(Round(3)).all_reduce(torch.ones(40_000, dtype=torch.int32), role="tp")
    assert counters.lossy()[1]["exact"] == {"dtype int32 is never lossy": 1}


def test_errors_are_counted() -> None:
    runner.run(counted, 2)


def frames_that_went_exact(rank: int, ranks: int) -> None:
    """A frame whose payload cannot hold a value says why."""
    codec = next(codec for codec in CODECS if not isinstance(codec, Round))
    mine = normal(rank, 40_000, torch.float32)
    mine[7] = math.nan
    api(codec).all_gather_into_tensor(torch.empty(40_000 * ranks), mine)
    assert counters.lossy()[0]["exact"].get("not finite", 0) > 0


@pytest.mark.full(reason="a counter")
@pytest.mark.skipif(
    all(isinstance(codec, Round) for codec in CODECS), reason="no codec whose frames can fail to hold values"
)
def test_frames_that_went_exact_are_counted() -> None:
    runner.run(frames_that_went_exact, 2)
