"""The context of one operation on a device."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.device.reports import reports_of
from ds_zipccl.comm.device.streams import Stage, streams_of
from ds_zipccl.comm.group_state import device_profile, group_nodes, group_profile, group_state
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import GATHER, SUM, DeviceProfile, Topology


class _Least:
    """The least bytes of the fragments of a group's gathers and sums, and the profile by which they were found."""

    def __init__(self) -> None:
        self._profile: DeviceProfile | None = None
        self._found: tuple[int, int] | None = None

    def of(self, group: dist.ProcessGroup, device: str) -> tuple[int, int]:
        """Return the bytes, equal on all ranks of the group."""
        profile = device_profile(device)
        if self._found is None or self._profile is not profile:
            topology = Topology.of(group_nodes(group) or [[rank] for rank in range(dist.get_world_size(group))])
            by = cost_model.UNMEASURED if profile is None else group_profile(group, profile)
            gather, summed = (cost_model.least_fragment(kind, topology, by) for kind in (GATHER, SUM))
            self._profile, self._found = profile, (gather, summed)
        return self._found


def staging_of(config: ZipcclConfig, device: torch.device) -> int:
    """Return the bytes of the staging buffers of a device: those of the config, otherwise those on which all ranks have agreed."""
    world = group_state(None)
    assert world is not None  # every rank is in the default group
    return config.staging if config.staging_mib else world.device_staging.get(device.type, config.staging)


class DeviceContext(Call):
    """One operation of this rank whose frames stay on ``device``.

    ``codec``: of frames without a base. ``with_base``: frames may be differences. ``route``: the kernels. ``budget``: bytes of all
    staging buffers. ``least`` and ``least_sum``: bytes of words of a fragment of a gather, and of a sum, below which its latency counts.
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
        self.codec, self.device, self.with_base = codec, device, with_base
        self.transport = COLLECTIVE_TRANSPORTS[self.state.backend(device.type)](group)
        self.route = cast(CudaBackend, kernels.route(kernels.preferred(config.route, device.type), device.type))
        self.streams = streams_of(device)
        self.reports = reports_of(self.streams)
        self.budget = staging_of(config, device)
        self.least, self.least_sum = self.state.of(_Least).of(group, device.type)
        self.streams.sweep()
        self.streams.begin()

    def copy(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy words on the decoding stream, unless they are in their place."""
        if source.data_ptr() != place.data_ptr():
            with self.streams.on(Stage.DECODE):
                place.copy_(source)
