"""Lossy sends; gathers and exchanges by node; sums whose ranks are on several nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import levels
import lossy_calls
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lossy_calls import CODECS, api, normal, same, with_specials
from sums import CODED

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import exchange_by_node, gather
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import LossyCodec, Round
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters

#: A link that no codec can beat.
FAST = LinkProfile(((1.0, 1e-9), (1e12, 1e-3)), 1e6, 1e6, 1e6, 1e6, 1e6, 1.0)


def passed_on(config: ZipcclConfig, mine: torch.Tensor, rank: int, later: bool, codec: LossyCodec | None) -> Any:
    """Rank 0 sends to rank 1, which names no codec; the tensor that rank 1 gets."""
    if rank == 0:
        call = comm.isend if later else comm.send
        work = call(mine, 1, config=config, role="pp", lossy=codec)
        if work is not None:
            work.wait()
        return None
    got = torch.empty(mine.shape, dtype=mine.dtype)
    comm.recv(got, 0, config=config, role="pp")
    return got


def sends(rank: int, ranks: int) -> None:
    ways: list[dict[str, Any]] = [{}, {"codec": "raw"}, {"staging_mib": 1}, {"check": "shadow"}, {"mode": "auto"}]
    sizes = (1500, 60_000, 900_000)
    for seed, (codec, way) in enumerate(itertools.product(CODECS, ways)):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        mine = with_specials(0, sizes[seed % 3], dtype, seed)
        mine = mine.view(-1, 4).t() if seed % 4 == 3 else mine.view(-1, 4)
        got = passed_on(replace(CODED, **way), mine, rank, bool(seed % 2), codec)
        if rank:
            same(got, project(mine.contiguous(), codec))
    mine = normal(0, 60_000, torch.bfloat16)
    for config in (replace(CODED, min_bytes=1 << 20), replace(CODED, enabled=False)):
        got = passed_on(config, mine, rank, False, Round(1))
        if rank:
            corpus.assert_same_bits(got, mine)
    # every way of a send in mode auto: coded, in bytes, and as a plain send where the link is faster
    config = replace(CODED, mode="auto")
    for _ in range(40):
        got = passed_on(config, mine, rank, True, Round(2))
        if rank:
            corpus.assert_same_bits(got, project(mine, Round(2)))
    state = group_state(None)
    assert state is not None
    state.profiles["cpu", "gloo"] = FAST
    got = passed_on(config, mine.view(300, 200).t(), rank, False, Round(2))
    if rank:
        corpus.assert_same_bits(got, project(mine.view(300, 200).t().contiguous(), Round(2)))
    assert any("link faster than coding" in row["reasons"] for row in counters.rows())


def test_sends() -> None:
    runner.run(sends, 2)


def on_nodes(rank: int, ranks: int) -> list[str]:
    """Two nodes of two ranks. Gathers go by node; exchanges do where each value is rounded by itself; sums stay in one level."""
    used: list[str] = []

    def noting(place: Any, name: str) -> None:
        good: Callable[..., Any] = getattr(place, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            used.append(name)
            return good(*arguments, **more)

        setattr(place, name, noted)

    noting(exchange_by_node._NodeExchange, "run")
    noting(gather.NodeGather, "send")
    levels.pretend([[0, 2], [1, 3]])
    for codec in CODECS:
        everyone = [with_specials(peer, 40_000, torch.bfloat16) for peer in range(ranks)]
        for call in (
            lossy_calls.gather_in_place,
            lossy_calls.exchange,
            lossy_calls.all_reduce,
            lossy_calls.to_several_owners,
        ):
            used.clear()
            got, wanted = call(api(codec, reduction="fp32"), everyone, rank, codec, dist.ReduceOp.SUM, False)
            same(got, wanted)
            by_value = isinstance(codec, Round)
            assert bool(used) == (call is lossy_calls.gather_in_place or (call is lossy_calls.exchange and by_value)), (
                f"{call.__name__} by {codec}: {used}"
            )
    return used


@pytest.mark.full(reason="four ranks")
def test_several_nodes() -> None:
    runner.run(on_nodes, 4)


def refusals(rank: int, ranks: int) -> None:
    whole, own = torch.empty(4000), torch.ones(4000 // ranks)
    with pytest.raises(ValueError, match=r"got lossy=round mantissa 3 beside a base or agreed sizes"):
        api(Round()).all_gather_into_tensor(whole, own, base=comm.IN_PLACE)


def test_a_base_is_exact() -> None:
    runner.run(refusals, 2)
