"""Lossy calls have the bits of their definition, whatever the size of fragments, the codec of frames, the mode and the route are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lossy_calls
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lossy_calls import CODECS, EVERYTHING, api, normal, same, with_specials

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

SIZE = 40009
#: Ways to do the same: small fragments and one for all, coded and raw frames, the shadow.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"codec": "raw"},
    {"staging_mib": 1, "codec": "wide"},
    {"staging_mib": 64},
    {"check": "shadow"},
)
AUTO = ZipcclConfig(enabled=True, min_bytes=0)


def by_definition(rank: int, ranks: int, plant: Callable[[], None] | None = None) -> None:
    if plant is not None:
        plant()
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    for seed, (codec, call) in enumerate(itertools.product(CODECS, EVERYTHING)):
        dtype = kinds[(seed + seed // 3) % 3]
        op = dist.ReduceOp.AVG if seed % 4 == 1 else dist.ReduceOp.SUM
        everyone = [with_specials(peer, SIZE, dtype, seed) for peer in range(ranks)]
        form = ("cascade", "raw")[seed % 2]  # an odd number of calls: each has both forms
        got, wanted = call(api(codec, codec=form), everyone, rank, codec, op, bool(seed // 2 % 2))
        same(got, wanted)
        if codec == CODECS[0]:
            exact = call(api(None), everyone, rank, codec, op, False)[0]
            unchanged = torch.equal(exact.nan_to_num(), got.nan_to_num())
            assert unchanged == (call is lossy_calls.reduce and rank < ranks - 1), f"{call.__name__}: {unchanged}"
    assert not any(row["passed"] for row in counters.rows())


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.full(reason="the schedules are those of 2 ranks"))]
)
def test_results_are_those_of_the_definition(ranks: int) -> None:
    runner.run(by_definition, ranks)


def any_way(rank: int, ranks: int) -> None:
    """Large messages of several fragments."""
    for seed, (codec, call) in enumerate(itertools.product(CODECS, EVERYTHING)):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        everyone = [normal(peer, 8 * SIZE, dtype, seed) for peer in range(ranks)]
        config: dict[str, Any] = dict(WAYS[seed % len(WAYS)])
        if call is lossy_calls.exchange_uneven:
            config.pop("check", None)  # gloo's own exchange of lists refuses sizes that differ
        got, wanted = call(api(codec, **config), everyone, rank, codec, dist.ReduceOp.SUM, False)
        same(got, wanted)
    everyone = [with_specials(peer, SIZE, torch.bfloat16) for peer in range(ranks)]
    for way, call in itertools.product(WAYS, (lossy_calls.all_reduce, lossy_calls.exchange)):
        got, wanted = call(api(CODECS[0], **way), everyone, rank, CODECS[0], dist.ReduceOp.SUM, False)
        same(got, wanted)


@pytest.mark.full(reason="large messages")
def test_any_way_gives_the_same() -> None:
    runner.run(any_way, 2)


def in_mode_auto(rank: int, ranks: int) -> list[list[str]]:
    """Trials of all candidates, with the results of mode always; the plain collective is none of them."""
    everyone = [normal(peer, SIZE, torch.bfloat16) for peer in range(ranks)]
    codec = CODECS[0]
    for call in (lossy_calls.all_reduce, lossy_calls.reduce_scatter_tensor, lossy_calls.exchange, lossy_calls.gather):
        for _ in range(30):
            got, wanted = call(api(codec, AUTO), everyone, rank, codec, dist.ReduceOp.SUM, False)
            same(got, wanted)
    assert not any(row["passed"] for row in counters.rows())
    return [[text for text, _ in row["choices"].values()] for row in counters.rows()]


@pytest.mark.full(reason="many calls")
def test_mode_auto_has_the_results_of_always() -> None:
    for choices in runner.run(in_mode_auto, 2):
        told = [text for texts in choices for text in texts]
        assert told and all("uncoded frames" in text and "round mantissa 3 frames" in text for text in told), told
        assert not any("plain" in text for text in told)
