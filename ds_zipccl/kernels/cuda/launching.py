"""What all calls of the CUDA route need: the device of their tensors, and the launch of a kernel."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ds_zipccl.kernels.cuda import arguments


class Family(NamedTuple):
    """The kernels ``zipccl_<what>_<dtype><suffix>`` of several dtypes."""

    what: str
    suffix: str
    #: The struct that is their parameter.
    params: type[ctypes.Structure]
    dtypes: Sequence[torch.dtype]
    #: Bytes of an element -> bytes of shared memory; the source asserts that they suffice. None: as the exact kernels ``what``.
    shared_bytes: Mapping[int, int] | None


class Launching(abc.ABC):
    """Base of the calls of :class:`ds_zipccl.kernels.cuda.backend.CudaRoute`, for devices of one type.

    Args:
        device_type: of tensors.
        multiprocessors: of the device, None: ask it.
    """

    def __init__(self, device_type: str, multiprocessors: int | None) -> None:
        self._device_type, self._multiprocessors = device_type, multiprocessors

    def _device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of ``tensor``, which must be one of this route."""
        device = tensor.device
        if device.type != self._device_type:
            raise ValueError(
                f"got {arguments.describe(tensor)}, these kernels work on {self._device_type} tensors; copy it there with .to()"
            )
        return device

    @abc.abstractmethod
    def _launch(
        self,
        what: str,
        kind: str,
        itemsize: int,
        grid: tuple[int, int],
        params: ctypes.Structure,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Put a kernel on the current stream of ``device``; ``reads`` and ``writes`` are for the observer."""
        ...
