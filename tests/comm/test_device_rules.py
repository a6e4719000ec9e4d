"""The model of collectives on devices reproduces the tables it was designed with, and the rules follow from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_zipccl.policy import device_rules, wire
from ds_zipccl.policy.device_rules import (
    ALL_TO_ALL,
    GATHER,
    PCIE,
    PIECE_BYTES,
    RDMA_REACH,
    SUM,
    TCP_REACH,
    DeviceProfile,
    Topology,
    coded_seconds,
    host_bases_gain,
    least_bytes,
    moves_may_gain,
    plain_seconds,
    sums_of,
)

EIGHT, FOUR, ONE = Topology(4, 8), Topology(4, 4), Topology(4, 1)
S = 256e6


def node(cards: int, gbits: float, reach: float = RDMA_REACH, **more: float) -> DeviceProfile:
    return DeviceProfile(cards * gbits * 1e9 / 8 * reach, **more)


#: name -> topology, profile, plain ms, gather, sums in one level, sums in two levels: at 0.5, 1.0 and 1.5 TB/s, or at 1.0 alone. The plain
#: times follow from (n-1)/n at the slowest hop; the gains are those of the design, whose rings entered a node once, with such rings.
TABLE: dict[str, tuple[Topology, DeviceProfile, float, tuple[float, ...], float, tuple[float, ...]]] = {
    "8x400G": (EIGHT, node(8, 400), 0.67, (1.04, 1.21, 1.26), 0.21, (0.77, 0.78, 0.79)),
    "8x200G": (EIGHT, node(8, 200), 1.31, (1.24, 1.32, 1.35), 0.22, (1.25, 1.26, 1.27)),
    "8x100G": (EIGHT, node(8, 100), 2.61, (1.34, 1.39, 1.40), 0.22, (1.48, 1.49, 1.50)),
    "400G a node": (EIGHT, node(1, 400), 5.22, (1.40, 1.42, 1.43), 0.23, (1.64, 1.65, 1.65)),
    "100G a node": (EIGHT, node(1, 100), 20.9, (1.44, 1.45, 1.45), 0.23, (1.78, 1.78, 1.78)),
    "25G TCP a node": (EIGHT, node(1, 25, TCP_REACH), 93.4, (1.46, 1.46, 1.46), 0.23, (1.82, 1.82, 1.82)),
    "1 GPU, 400G": (ONE, node(1, 400), 4.04, (1.41,), 1.31, (1.31,)),
    "1 GPU, 100G": (ONE, node(1, 100), 16.5, (1.45,), 1.39, (1.39,)),
    "4 PCIe GPUs, 100G": (FOUR, node(1, 100, inside=PCIE), 20.2, (1.45,), 0.44, (1.47,)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_model_gives_the_table_of_the_design(name: str) -> None:
    topology, profile, plain_ms, gathers, one_level, sums = TABLE[name]
    plain = plain_seconds(GATHER, S, topology, profile)
    assert plain == plain_seconds(SUM, S, topology, profile) == pytest.approx(plain_ms * 1e-3, rel=0.03)
    codecs = (0.5e12, 1e12, 1.5e12) if len(gathers) == 3 else (1e12,)
    for codec, gather, summed in zip(codecs, gathers, sums, strict=True):
        found = replace(profile, encode=codec, decode=codec)
        assert plain / coded_seconds(GATHER, S, topology, found) == pytest.approx(gather, rel=0.03)
        assert plain / coded_seconds(SUM, S, topology, found) == pytest.approx(summed, rel=0.03)
    flat = plain / coded_seconds(SUM, S, topology, profile, two_levels=False)
    assert flat == pytest.approx(one_level, rel=0.04)


@pytest.mark.parametrize(("nodes", "each"), [(2, 8), (4, 8), (2, 2), (4, 1), (1, 8)])
def test_a_ring_passes_its_slowest_hop(nodes: int, each: int) -> None:
    """Every shard goes from rank to rank until all have it; the edges that leave a node are counted one by one."""
    ranks, crossing = nodes * each, [0] * nodes
    for first in range(ranks):
        for sender in range(first, first + ranks - 1):
            if sender % each == each - 1:
                crossing[sender % ranks // each] += 1
    profile = DeviceProfile(network=10e9, inside=1e12)
    wanted = max(crossing) * S / ranks / profile.network if nodes > 1 else S * (ranks - 1) / ranks / profile.inside
    assert plain_seconds(GATHER, S, Topology(nodes, each), profile) == pytest.approx(wanted)
    sums = coded_seconds(SUM, S, Topology(nodes, each), replace(profile, encode=1e15, decode=1e15), 1.0, pieces=1 << 20)
    if each > 1 and nodes > 1:  # in two levels, of the uncoded bytes
        assert sums == pytest.approx(S * (nodes - 1) / nodes / profile.network, rel=0.02)


@pytest.mark.parametrize(
    ("cards", "gbits", "least", "most"), [(8, 400, 0.98, 1.17), (8, 200, 1.17, 1.30), (8, 100, 1.30, 1.37)]
)
def test_exchanges_of_experts(cards: int, gbits: float, least: float, most: float) -> None:
    """134 MB a GPU over 32 ranks."""
    for codec, wanted in ((0.5e12, least), (1.5e12, most)):
        profile = node(cards, gbits, encode=codec, decode=codec)
        plain = plain_seconds(ALL_TO_ALL, 134e6, EIGHT, profile)
        assert plain / coded_seconds(ALL_TO_ALL, 134e6, EIGHT, profile) == pytest.approx(wanted, rel=0.03)


def test_break_even_sizes() -> None:
    for profile, megabytes in ((node(1, 400), 20.3), (node(1, 100), 4.45), (node(1, 25, TCP_REACH), 0.97)):
        assert least_bytes(GATHER, EIGHT, profile) == pytest.approx(megabytes * 1e6, rel=0.06)
        assert least_bytes(GATHER, EIGHT, profile, waits=0) < 0.5 * least_bytes(GATHER, EIGHT, profile)
        assert least_bytes(ALL_TO_ALL, EIGHT, profile) < 60e6
    assert math.isinf(least_bytes(GATHER, EIGHT, replace(node(1, 400), decode=1e10)))
    assert 4 * PIECE_BYTES < least_bytes(GATHER, EIGHT, node(8, 200)) < 130e6  # only in several pieces


@pytest.mark.parametrize("waits", [0, 1])
def test_a_break_even_size_breaks_even(waits: int) -> None:
    profile = node(1, 400)
    size = least_bytes(GATHER, EIGHT, profile, waits=waits)
    coded = coded_seconds(GATHER, size, EIGHT, profile, waits=waits, pieces=1)
    assert coded == pytest.approx(plain_seconds(GATHER, size, EIGHT, profile))


def test_pieces_are_those_of_the_schedules() -> None:
    """Not imported, because ``plan --help`` must not load torch."""
    assert (device_rules.PIECES, PIECE_BYTES) == (wire.DEVICE_FRAGMENTS, wire.DEVICE_FRAGMENT_BYTES)


def test_rules() -> None:
    ours = {name: sums_of(row[0], row[1]) for name, row in TABLE.items()}
    assert {name for name, kind in ours.items() if kind == "plain"} == {"8x400G"}
    tried = {name: moves_may_gain(row[0], row[1]) for name, row in TABLE.items()}
    assert {name for name, may in tried.items() if not may} == {"8x400G"}


def test_bases_in_host_memory_gain_on_networks_slower_than_the_bus() -> None:
    gains = {name: host_bases_gain(row[0], row[1]) for name, row in TABLE.items()}
    gaining = {"100G a node", "25G TCP a node", "1 GPU, 100G", "4 PCIe GPUs, 100G"}
    assert {name for name, gain in gains.items() if gain} == gaining


def test_a_group_inside_a_node_is_plain() -> None:
    for each in (2, 8):
        assert sums_of(Topology(1, each), node(1, 1)) == "plain"
        assert not moves_may_gain(Topology(1, each), node(1, 1))


def test_nodes_that_are_not_even_have_plain_sums() -> None:
    assert Topology.of([[0, 1, 2], [3, 4]]) == Topology(2, 3, even=False)
    assert Topology.of([[0, 2], [1, 3]]) == Topology(2, 2)
    assert sums_of(Topology(2, 3, even=False), node(1, 100)) == "plain"
    assert moves_may_gain(Topology(2, 3, even=False), node(1, 100))


def test_a_codec_that_is_too_slow_is_not_tried() -> None:
    slow = replace(node(1, 400), decode=2e10)
    assert not moves_may_gain(EIGHT, slow) and sums_of(ONE, slow) == "plain"


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_profiles_refuse_numbers(wrong: float) -> None:
    with pytest.raises(ValueError, match="measure again"):
        device_rules.DeviceProfile(network=wrong)
