"""The size of a device's staging buffers, on which all ranks agree after the first optimizer step, and their memory.

Small buffers cut messages into many fragments, each with its latency and its work of the host. How large they may be shows once a step has
taken its memory. The memory is reserved between collectives: a rank that ran out of memory inside of one would leave the others waiting.
"""

from __future__ import annotations

import torch

from ds_zipccl import devices, tensors
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import largest
from ds_zipccl.comm.group_state import resolve_group, state_of
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import wire


@tensors.undisturbed()
def reserve(config: ZipcclConfig, device: torch.device) -> None:
    """Agree on the bytes of the staging buffers of all ranks, and reserve them. Where a rank cannot, no call is coded from now on. Nothing
    happens where the config names the bytes, or where devices of this type have no runtime. A collective; the host waits twice.

    Raises:
        CommError: a rank did not come within the group's timeout, or has refused a frame.
    """
    runtime = devices.runtime(device)
    if runtime is None or config.staging_mib:
        return
    world = state_of(None)
    ctx = DeviceContext("staging", resolve_group(None), config, "dp", config.codec, device)
    free, memory = runtime.mem_get_info(device)
    least = -largest(ctx, -wire.device_staging(memory, free))[0]
    failed = False
    try:
        ctx.streams.reserve(least)
    except RuntimeError:  # torch.OutOfMemoryError is one
        failed = True
    if largest(ctx, int(failed))[0]:
        ctx.streams.reserve(0)
        world.unreserved = True
    else:
        world.device_staging[device.type] = least
