"""The context of one operation on a device."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.device.reports import reports_of
from ds_zipccl.comm.device.streams import Stage, streams_of
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend


class DeviceContext(Call):
    """One operation of this rank whose frames stay on ``device``.

    ``codec``: of frames without a base. ``with_base``: frames may be differences. ``route``: the kernels. ``budget``: bytes of all
    staging buffers.
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
        self.budget = config.staging_mib << 20
        self.streams.sweep()
        self.streams.begin()

    def copy(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy words on the decoding stream, unless they are in their place."""
        if source.data_ptr() != place.data_ptr():
            with self.streams.on(Stage.DECODE):
                place.copy_(source)
