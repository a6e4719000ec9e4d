"""What a job on groups in the order of streams has settled at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile, Topology


@dataclass(frozen=True)
class Settled:
    """What was settled at the start for tensors of one device type. ``reason``: why no move in mode auto is coded; None: some may be.
    ``sums``: the sums of ``reduction`` auto. ``one_queue``: on some rank all streams share one queue of the device. ``compared``: the first
    steps, which compare coded moves with plain ones; 0: none. ``levels_from``, ``raw``: of the default group, see
    :class:`ds_zipccl.comm.engine.Engine`."""

    device: str
    topology: Topology
    profile: DeviceProfile | None
    reason: PassReason | None
    sums: str
    least_bytes: float
    one_queue: bool = False
    compared: int = 0
    levels_from: float = math.inf
    raw: bool = False

    def __str__(self) -> str:
        parts, found = [f"{self.topology.nodes} nodes, at most {self.topology.each} ranks each"], self.profile
        coded = "coded" if found is None else f"coded from {self.least_bytes / 1e6:.3g} MB on, as whole steps show"
        if found is not None:
            inside = f"{found.inside / 1e9:.3g} GB/s inside, " if self.topology.each > 1 else ""
            parts.append(
                f"{found.network / 1e9:.3g} GB/s between nodes, {inside}coding {found.encode / 1e9:.3g} and {found.decode / 1e9:.3g} GB/s, "
                f"an agreement {1e6 * found.agreement:.0f} us, a step to the next node {1e6 * found.hop:.0f} us"
            )
        moves = f"plain, {self.reason.value}" if self.reason else coded
        parts += [f"moves in mode auto: {moves}", f"sums: {self.sums}"]
        if self.levels_from < math.inf and not self.reason:
            raw = ", without coding" if self.raw else ""
            parts.append(f"gathers in two levels from {self.levels_from / 1e6:.3g} MB of a collective on{raw}")
        if self.compared and not self.reason:
            parts.append(f"plain in the first {self.compared} steps, which compare coded copies")
        if self.one_queue:
            parts.append("no overlap of coded calls with computing, as CUDA_DEVICE_MAX_CONNECTIONS is 1: unset it")
        return "; ".join(parts)


def sums_of(config: ZipcclConfig, topology: Topology, profile: DeviceProfile | None) -> str:
    """Return the sums of a job, "fp32" or "plain"; without a profile they are not chosen by speeds."""
    if config.reduction in ("fp32", "plain"):
        return config.reduction
    if config.nccl == "auto":
        return "plain"  # bits must not change when schedules are proven
    if config.mode_of("zero_grad") == "always" or (profile is None and topology.nodes > 1):
        return "fp32"
    return "plain" if profile is None else cost_model.sums_of(topology, profile)
