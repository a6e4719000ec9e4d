"""Lossy calls on groups in stream order, on the stand-in of tests/support/shim.py: the bits of their definition, which are those of gloo
groups, in one level and in two; counts, refusals and planted mistakes."""

from __future__ import annotations

import itertools
from typing import Any

import levels
import lossy_calls
import pytest
import ranks as runner
import shim
import torch
import torch.distributed as dist
from lossy_calls import CODECS, EVERYTHING, Call, api, same, with_specials

from ds_zipccl.telemetry import counters

SIZE = 5_003
ON: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0}
#: `reduce` has no schedule in stream order.
CALLS = tuple(call for call in EVERYTHING if call is not lossy_calls.reduce)
#: Ways to do the same: one fragment and several, coded and raw frames, the shadow.
WAYS: tuple[dict[str, Any], ...] = ({}, {"codec": "raw"}, {"staging_mib": 1}, {"check": "shadow"})


def by_definition(rank: int, ranks: int, nodes: levels.Nodes) -> None:
    levels.pretend(nodes)
    two_levels = nodes if len(nodes[0]) > 1 else ()
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    for seed, (codec, call) in enumerate(itertools.product(CODECS, CALLS)):
        dtype = kinds[(seed + seed // 3) % 3]
        op = dist.ReduceOp.AVG if seed % 4 == 1 else dist.ReduceOp.SUM
        way = dict(WAYS[seed % len(WAYS)])
        if call is lossy_calls.exchange_uneven:
            way.pop("check", None)  # gloo's own exchange of lists refuses sizes that differ
        size = 8 * SIZE if "staging_mib" in way else SIZE
        everyone = [with_specials(peer, size, dtype, seed) for peer in range(ranks)]
        coded: Any = api(codec, **ON, **way)
        try:
            same(*call(Call(coded, everyone, rank, codec, op, bool(seed // 2 % 2), two_levels)))
        except AssertionError as error:
            raise AssertionError(f"{call.__name__} by {codec} of {dtype}, {way}: {error}") from error
    assert not any(row["passed"] for row in counters.rows()), counters.rows()
    assert {found["exact"].get("not finite") for found in counters.lossy()} != {None}


@pytest.mark.parametrize(
    ("nodes", "each"),
    [(2, 1), *(pytest.param(*some, marks=pytest.mark.full(reason="slow")) for some in ((4, 1), (2, 2)))],
)
def test_calls_have_the_bits_of_their_definition(nodes: int, each: int) -> None:
    """In one level that of gloo groups, see test_lossy_messages.py."""
    shim.build()
    runner.run(by_definition, nodes * each, levels.nodes_of(nodes, each), backend=shim.NAME, timeout=500)
