"""Gathers that copy unchanged parameters from a base, so that nothing is sent between nodes. Pure."""

from __future__ import annotations

import math

from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import GAINING, GATHER, NOMINAL_BYTES, DeviceProfile, Topology

#: Nodes up to which the shards of each node come by an exchange of their own, straight into an output (default, not tuned: the launches of
#: more exchanges take longer than to pack the shards of all nodes into one).
STRAIGHT_NODES = 4
#: Bytes per second of a copy on a device (default, not tuned: reads and writes of an H100's memory).
COPY = 2e12


def seconds(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of a copy of a gather of ``nbytes``: "host", from host memory while all devices of the node read it, or "node",
    from the other devices of the node, with one exchange for the shards of each node or one for all. The host issues an exchange while the
    one before is on its way: gathers follow each other."""
    if kind == "host":
        return profile.launch + nbytes / profile.bus
    straight = topology.nodes <= STRAIGHT_NODES
    exchanges = topology.nodes if straight else 1
    each = profile.exchange + nbytes * (1 - 1 / topology.each) / profile.inside / exchanges
    return exchanges * max(profile.launch, each) + (0.0 if straight else 2 * nbytes / COPY)


def gaining(topology: Topology, profile: DeviceProfile) -> tuple[str, ...]:
    """Return the kinds of bases of which a copy is faster than a coded gather over the network, the fastest first."""
    coded = cost_model.coded_seconds(GATHER, NOMINAL_BYTES, topology, profile)
    kinds = ("host", "node") if topology.levels else ("host",)
    found = {kind: seconds(kind, NOMINAL_BYTES, topology, profile) for kind in kinds}
    return tuple(sorted((kind for kind in kinds if coded > GAINING * found[kind]), key=found.__getitem__))


def saved(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds by which copies of gathers of ``nbytes`` together are faster than the gathers, plain or coded."""
    plain, coded = (
        of(GATHER, NOMINAL_BYTES, topology, profile) for of in (cost_model.plain_seconds, cost_model.coded_seconds)
    )
    return nbytes / NOMINAL_BYTES * (min(plain, coded) - seconds(kind, NOMINAL_BYTES, topology, profile))


def least_bytes(kind: str, topology: Topology, profile: DeviceProfile) -> float:
    """Return the bytes of a gather from which on a copy is faster than the plain gather; infinite where none is."""

    def gained(nbytes: float) -> float:
        plain = cost_model.plain_seconds(GATHER, nbytes, topology, profile)
        return plain - GAINING * seconds(kind, nbytes, topology, profile)

    each = (gained(NOMINAL_BYTES) - gained(0)) / NOMINAL_BYTES  # both grow with the bytes alone
    return max(0.0, -gained(0) / each) if each > 0 else math.inf
