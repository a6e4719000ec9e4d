"""Collectives of this package's own on groups in the order of streams: sizes agreed on ahead, and whether all frames were accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.bases import agreed
from ds_zipccl.comm.bases.agreed import Agreed
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.group_state import group_size, group_state, is_member, resolve_group
from ds_zipccl.comm.request import Request
from ds_zipccl.config import DEFAULT, ZipcclConfig

#: Name of these collectives in messages and counters.
NAME = "agreement"


def agree_sizes(
    parameters: Iterable[tuple[Agreed, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> int:
    """Agree on the sizes of the frames of parameters that have none, for gathers with ``agreed``. A collective; the host waits once.

    Nothing happens where a gather of all these parameters would not be coded in the order of streams, or where all of them have sizes.

    Args:
        parameters: with the own shards, flat, contiguous, all on one device, in an order that is equal on all ranks.

    Returns:
        The number of parameters that got sizes.

    Raises:
        CommError: a rank has refused a frame of an earlier operation, or did not come within the group's timeout. All ranks raise.
    """
    if not is_member(group):
        return 0
    found: dict[torch.dtype, list[tuple[Agreed, torch.Tensor]]] = {}
    for one, words in parameters:
        found.setdefault(one.dtype or words.dtype, []).append((one, words))
    coded: list[tuple[Agreed, torch.Tensor]] = []
    codec: str = config.codec
    for dtype, some in found.items():
        decision = decide(_gather(dtype, [words for _, words in some], group, config, role)).decision
        if decision.on_device and decision.codec != "raw":
            codec = decision.codec
            coded += some
    if not coded:
        return 0
    with torch.inference_mode(), tensors.undisturbed():
        device = coded[0][1].device
        return agreed.agree_all(DeviceContext(NAME, resolve_group(group), config, role, codec, device), coded)


def check_frames(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> None:
    """Raise if a rank of the group has refused a frame, on any group, so far. A collective; the host waits once.

    Nothing happens where the group has not gathered with ``agreed`` since its last call of this function, or agreement.

    Args:
        device: has the tensors of the operations. The group's backend for the device is one in the order of streams.

    Raises:
        CommError: a frame was refused, or a rank did not come within the group's timeout. All ranks raise.
    """
    state = group_state(group)
    if state is None or agreed.is_checked(state):
        return
    with torch.inference_mode(), tensors.undisturbed():
        agreed.check(DeviceContext(NAME, resolve_group(group), config, role, config.codec, device))


def _gather(
    dtype: torch.dtype,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    config: ZipcclConfig,
    role: str,
) -> Request:
    """Return the request of a gather of all these shards in a dtype, which is decided on and not executed."""
    numel, ranks = sum(words.numel() for words in shards), group_size(group)
    like = tensors.empty(0, dtype, shards[0].device)
    return Request(
        "all_gather_into_tensor",
        (),
        [like],
        group,
        False,
        config,
        role,
        plain=lambda inputs, outputs, later: None,
        numel=numel * ranks,
        sent=numel * (ranks - 1),
        flat=True,
    )
