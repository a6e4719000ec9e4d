"""Gathers that copy unchanged parameters from a base in host memory, so that nothing is sent. Pure."""

from __future__ import annotations

import math

from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import GAINING, GATHER, NOMINAL_BYTES, DeviceProfile, Topology


def gain(topology: Topology, profile: DeviceProfile) -> bool:
    """Return whether a copy is faster than a coded gather over the network."""
    coded = cost_model.coded_seconds(GATHER, NOMINAL_BYTES, topology, profile)
    return coded > GAINING * (profile.launch + NOMINAL_BYTES / profile.bus)


def least_bytes(topology: Topology, profile: DeviceProfile) -> float:
    """Return the bytes of a gather from which on a copy is faster than the plain gather; infinite where none is."""

    def saved(nbytes: float) -> float:
        plain = cost_model.plain_seconds(GATHER, nbytes, topology, profile)
        return plain - GAINING * (profile.launch + nbytes / profile.bus)

    each = (saved(NOMINAL_BYTES) - saved(0)) / NOMINAL_BYTES  # both grow with the bytes alone
    return max(0.0, -saved(0) / each) if each > 0 else math.inf
