"""Lossy calls on groups in stream order on CPUs (benchmarks/links/slots.py): the bits of their definition, which are those of gloo groups,
in one level and in two; counts, refusals and planted mistakes."""

from __future__ import annotations

import levels
import lossy_calls
import pytest
import ranks as runner
from lossy_calls import EVERYTHING, same

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.telemetry import counters

SIZE = 5_003
#: `reduce` has no schedule in stream order.
CALLS = tuple(call for call in EVERYTHING if call is not lossy_calls.reduce)
#: Ways to do the same: one fragment and several, coded and raw frames, the shadow.
WAYS = tuple(
    {"nccl": "on", "nccl_min_bytes": 0} | way for way in ({}, {"codec": "raw"}, {"staging_mib": 1}, {"check": "shadow"})
)


def by_definition(rank: int, ranks: int, nodes: levels.Nodes) -> None:
    levels.pretend(nodes)
    two_levels = nodes if len(nodes[0]) > 1 else ()
    for call, args in lossy_calls.every_way(rank, ranks, CALLS, WAYS, SIZE, nodes=two_levels):
        try:
            same(*call(args))
        except AssertionError as error:
            raise AssertionError(f"{call.__name__} by {args.api}: {error}") from error
    assert not any(row["passed"] for row in counters.rows()), counters.rows()
    assert {found["exact"].get("not finite") for found in counters.lossy()} != {None}


@pytest.mark.parametrize(
    ("nodes", "each"),
    [(2, 1), *(pytest.param(*some, marks=pytest.mark.full(reason="slow")) for some in ((4, 1), (2, 2)))],
)
def test_calls_have_the_bits_of_their_definition(nodes: int, each: int) -> None:
    """In one level that of gloo groups, see test_lossy_messages.py."""
    runner.run(by_definition, nodes * each, levels.nodes_of(nodes, each), backend=slots.NAME, timeout=500)
