"""The status word in which kernels report refused frames."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import FrameError

#: Content of a status word before a failure.
NO_FAILURE = -1


class Failure(NamedTuple):
    """The first refused frame of the calls that shared a status word, in the order of rank, frame and chunk."""

    #: None in calls without ranks.
    rank: int | None
    #: Number of the frame in its call: of the slot, of the parameter, or of the summand. 65535 stands for itself and more.
    frame: int
    #: 16777215 stands for itself and more.
    chunk: int
    #: FrameErrorCode.
    code: int


def new_status(device: torch.device) -> torch.Tensor:
    """Return a status word for the ``*_frames`` calls."""
    return tensors.filled(1, NO_FAILURE, torch.int64, device)


def failure_of(value: int) -> Failure | None:
    """Return the failure in the value of a status word, None if there is none.

    The 64 bits are ``rank << 48 | frame << 32 | chunk << 8 | code``; the rank is 0xffff in calls without ranks.
    """
    if value == NO_FAILURE:
        return None
    rank = value >> 48 & 0xFFFF
    return Failure(None if rank == 0xFFFF else rank, value >> 32 & 0xFFFF, value >> 8 & 0xFFFFFF, value & 255)


def raise_failure(status: torch.Tensor) -> None:
    """Raise the failure that the kernels wrote to ``status``; waits for the device.

    Raises:
        FrameError: a frame was refused.
    """
    if failure := failure_of(int(status.item())):
        sender = "of the call" if failure.rank is None else f"of rank {failure.rank}"
        raise FrameError(failure.code, f"frame {failure.frame} {sender} is wrong, in chunk {failure.chunk}")
