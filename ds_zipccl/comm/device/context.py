"""The context of one operation on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.comm.bases.state import AGREEMENT
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.device.reports import Reports, reports_of
from ds_zipccl.comm.device.streams import Stage, Streams, streams_of
from ds_zipccl.comm.group_state import device_profile, group_nodes, group_profile, state_of
from ds_zipccl.comm.topology import Levels
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import DeviceProfile, Topology

#: Operations whose frames are those of gathers.
_GATHERS = {AGREEMENT, *(name for name, op in OPS.items() if op.traffic == "all_gather")}


class Cut(NamedTuple):
    """How the schedules of a group cut operations, and send gathers.

    ``gather``, ``exchange``: :func:`.cost_model.gather_fragments` and :func:`.cost_model.exchange_steps` of the group. ``sum``: bytes of
    words of a fragment below which its latency counts.
    ``levels_from``: bytes of a collective from which on gathers go in two levels; ``raw``: without coding, in mode auto. ``levels``: of
    the group, as this rank sees them.
    """

    gather: Callable[..., tuple[int, bool]]
    exchange: Callable[[float], int]
    sum: int
    levels_from: float
    raw: bool
    levels: Levels


class _Found:
    """The cut of a group, and the profile by which it was found."""

    cut: Cut | None = None
    profile: DeviceProfile | None = None


class _Parts(dict[tuple[torch.device, str], Any]):
    """Device and kernel backend of the config -> kernels, streams and reports of a group's contexts. Nothing that holds the group."""


def cut_of(group: dist.ProcessGroup, device: str) -> Cut:
    """Return the cut of a group, equal on all its ranks, of which this one is one."""
    state, profile = state_of(group), device_profile(device)
    found = state.of(_Found)
    if found.cut is None or found.profile is not profile:
        levels = Levels.of(group_nodes(group), state.rank, state.size)
        topology = Topology.of(levels.nodes)
        by = cost_model.UNMEASURED if profile is None else group_profile(group, profile)
        gather, summed = (
            partial(cost_model.gather_fragments, topology=topology, profile=by),
            cost_model.least_of_sum(topology, by),
        )
        raw = profile is not None and cost_model.gathers_raw(topology, by)
        steps = partial(cost_model.exchange_steps, topology=topology, profile=by)
        found.cut = Cut(gather, steps, summed, cost_model.levels_from(topology, by), raw, levels)
        found.profile = profile
    return found.cut


def staging_of(config: ZipcclConfig, device: torch.device) -> int:
    """Return the bytes of the staging buffers of a device: those of the config, otherwise those on which all ranks have agreed."""
    return config.staging if config.staging_mib else state_of(None).device_staging.get(device.type, config.staging)


class DeviceContext(Call):
    """One operation of this rank whose frames stay on ``device``.

    ``codec``: of frames without a base. ``with_base``: frames may be differences. ``route``: the kernels. ``budget``: bytes of all
    staging buffers. ``cut``: that of the group.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        config: ZipcclConfig,
        role: str,
        codec: str,
        device: torch.device,
        *,
        with_base: bool = False,
    ) -> None:
        super().__init__(op, group, config, role)
        self.device, self.with_base = device, with_base
        parts = self.state.of(_Parts)
        found: Any = parts.get((device, config.route))
        if found is None:
            route, streams = (
                kernels.route(kernels.preferred(config.route, device.type), device.type),
                streams_of(device),
            )
            found = parts[device, config.route] = route, streams, reports_of(streams)
        self.transport = COLLECTIVE_TRANSPORTS[self.state.backend(device.type)](group)
        self.route, self.streams, self.reports = cast(tuple[CudaBackend, Streams, Reports], found)
        self.budget = staging_of(config, device)
        self.cut = cut_of(group, device.type)
        raw = self.cut.raw and config.mode_of(role) == "auto" and op in _GATHERS
        self.codec = "raw" if raw else codec
        self.streams.sweep()
        self.streams.begin()

    def copy(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy words on the decoding stream, unless they are in their place."""
        if source.data_ptr() != place.data_ptr():
            with self.streams.on(Stage.DECODE):
                place.copy_(source)
