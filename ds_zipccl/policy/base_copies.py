"""Gathers that copy unchanged parameters from a base, so that nothing is sent between nodes. Pure."""

from __future__ import annotations

import math

from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import GAINING, GATHER, NOMINAL_BYTES, DeviceProfile, Topology


def seconds(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of a copy of a gather of ``nbytes``: "host", from host memory while all devices of the node read it, or "node",
    from the other devices of the node, with an exchange for the shards of each node."""
    if kind == "host":
        return profile.launch + nbytes / profile.bus
    delay = topology.nodes * max(profile.launch, cost_model.exchange_latency(topology, profile))
    return delay + nbytes * (1 - 1 / topology.each) / profile.inside


def gaining(topology: Topology, profile: DeviceProfile) -> tuple[str, ...]:
    """Return the kinds of bases of which a copy is faster than a coded gather over the network, the fastest first."""
    coded = cost_model.coded_seconds(GATHER, NOMINAL_BYTES, topology, profile)
    kinds = ("host", "node") if topology.levels else ("host",)
    found = {kind: seconds(kind, NOMINAL_BYTES, topology, profile) for kind in kinds}
    return tuple(sorted((kind for kind in kinds if coded > GAINING * found[kind]), key=found.__getitem__))


def least_bytes(kind: str, topology: Topology, profile: DeviceProfile) -> float:
    """Return the bytes of a gather from which on a copy is faster than the plain gather; infinite where none is."""

    def saved(nbytes: float) -> float:
        plain = cost_model.plain_seconds(GATHER, nbytes, topology, profile)
        return plain - GAINING * seconds(kind, nbytes, topology, profile)

    each = (saved(NOMINAL_BYTES) - saved(0)) / NOMINAL_BYTES  # both grow with the bytes alone
    return max(0.0, -saved(0) / each) if each > 0 else math.inf
