"""What a job on groups in the order of streams has settled at its start."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import SUM, DeviceProfile, Topology

_PINS = '"reduction": "fp32" or "plain" pins them'
#: Bytes per second of a node: the ends of the classes of networks. Measured speeds of a nominal network lie below its end (1, 25, 100, 200
#: Gbit/s).
CLASSES = (0.125e9, 3.125e9, 12.5e9, 25e9)
#: Sums must be predicted to be faster than the backend's own by the first factor (seed: above the error of the model), and by the second
#: when both are timed at the start (default, not tuned: above the noise of a timing).
GAINING, TIMED_GAIN = 1.3, 1.15
#: Bytes of the sums that must gain (seed: buckets of DeepSpeed that are set to "auto" in a model of 7B, and those of its default).
SUMMED_BYTES = (64e6, cost_model.NOMINAL_BYTES, 1e9)
#: The roles whose sums are those of gradients, also of experts': ``reduction`` auto chooses for them alone.
GRADIENT_ROLES = ("zero_grad", "dp")
#: The dtypes of which sums may be ours, torch's names.
DTYPES = tuple(cost_model.TYPICAL_RATIO)


class Sums(NamedTuple):
    """The sums of a job with ``reduction`` auto. ``dtypes``: those in which sums of gradients of ``least`` bytes and more are ours, in fp32
    and the documented order; all others are the backend's own. ``why``: what has decided so."""

    dtypes: tuple[str, ...] = ()
    least: int = 0
    why: str = ""

    def ours(self, role: str, dtype: str, nbytes: int | None) -> bool:
        """Return whether a sum of a role and dtype is ours. ``nbytes``: of the whole message, None where ranks may see different sizes."""
        return role in GRADIENT_ROLES and dtype in self.dtypes and (nbytes is None or nbytes >= self.least)

    def __str__(self) -> str:
        size = f", from {self.least / 1e6:.3g} MB on," if self.least else ""
        ours = (
            f"gradient sums of {', '.join(self.dtypes)}{size} in fp32" if self.dtypes else "sums by the backend itself"
        )
        return f"{ours} ({self.why})"


@dataclass(frozen=True)
class Settled:
    """What was settled at the start for tensors of one device type. ``reason``: why no move in mode auto is coded; None: some may be.
    ``sums``: those of the start; a checkpoint may bring others. ``one_queue``: on some rank all streams share one queue of the device.
    ``compared``: the first steps, which compare coded moves with plain ones; 0: none. ``levels_from``, ``raw``: of the default group, see
    :class:`ds_zipccl.comm.engine.Engine`."""

    device: str
    topology: Topology
    profile: DeviceProfile | None
    reason: PassReason | None
    sums: Sums
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
        parts.append(f"moves in mode auto: {moves}")
        if self.levels_from < math.inf and not self.reason:
            raw = ", without coding" if self.raw else ""
            parts.append(f"gathers in two levels from {self.levels_from / 1e6:.3g} MB of a collective on{raw}")
        if self.compared and not self.reason:
            parts.append(f"plain in the first {self.compared} steps, which compare coded copies")
        if self.one_queue:
            parts.append("no overlap of coded calls with computing, as CUDA_DEVICE_MAX_CONNECTIONS is 1: unset it")
        return "; ".join(parts)


def sums_of(config: ZipcclConfig, topology: Topology, profile: DeviceProfile | None, asked: str = "") -> Sums:
    """Return the sums of a job by facts that repeat between runs. ``asked``: why the user wants the backend's own where ``reduction`` is
    auto; "" where nothing says so. Without a profile they are not chosen by speeds."""
    if config.reduction != "auto":
        ours = config.reduction == "fp32" or (config.reduction == "match" and topology.ranks == 2)
        return Sums(DTYPES if ours else (), why='by "reduction"')
    if asked:
        return Sums(why=asked)
    if config.mode_of("zero_grad") == "always" or (profile is None and topology.nodes > 1):
        return Sums(DTYPES, why='as the mode of zero_grad is "always"')
    if topology.nodes > 1 and not topology.even:
        return Sums(why="the nodes have different numbers of ranks")
    dtypes, least = ((), 0) if profile is None else gaining_sums(topology, profile)
    return Sums(dtypes, least, _PINS if dtypes else f"ours would gain less than {GAINING} times; {_PINS}")


def class_of(network: float) -> tuple[float, float]:
    """Return the ends of the class of a measured network, which repeats between runs where its speed does not. The last one ends where
    moves are plain."""
    ends = (*CLASSES, max(cost_model.FAST_NODE, network))
    at = max(1, bisect_left(ends, network))
    return ends[at - 1], ends[at]


def gaining_sums(topology: Topology, profile: DeviceProfile) -> tuple[tuple[str, ...], int]:
    """Return the dtypes whose sums are ours in a job, and the least bytes of such sums; all others are the backend's own. By facts that
    repeat between runs: the topology, the class of the network, and the other speeds as powers of two, rounded down; delays are those of
    the model. A group inside a node, and nodes with several ranks that are not equally many, have none."""
    if topology.nodes == 1 or not (topology.levels or topology.each == 1):
        return (), 0
    speeds = {name: 2.0 ** math.floor(math.log2(getattr(profile, name))) for name in ("inside", "encode", "decode")}
    ends = [DeviceProfile(network, **speeds) for network in class_of(profile.network)]
    ratios, found, least = {**cost_model.TYPICAL_RATIO, "bfloat16": cost_model.RATIO[SUM]}, [], 0.0
    for dtype, ratio in ratios.items():
        if all(
            cost_model.pays(SUM, topology, end, size, GAINING, ratio=ratio) for end in ends for size in SUMMED_BYTES
        ):
            found.append(dtype)
            least = max([least, *(cost_model.least_bytes(topology, end, kind=SUM, ratio=ratio) for end in ends)])
    return tuple(found), int(least)
