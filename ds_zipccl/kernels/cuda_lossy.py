"""The lossy calls of the CUDA route, and the table of their kernels; each codec has a module of its own."""

from __future__ import annotations

from ds_zipccl.kernels import rounded_calls, scaled_calls, zfp_calls
from ds_zipccl.kernels.launching import Family
from ds_zipccl.kernels.rounded_calls import RoundedCalls
from ds_zipccl.kernels.scaled_calls import ScaledCalls
from ds_zipccl.kernels.zfp_calls import ZfpCalls

#: The kernels of csrc/cuda/lossy_kernels.cuh.
KERNELS: tuple[Family, ...] = (*rounded_calls.KERNELS, *scaled_calls.KERNELS, *zfp_calls.KERNELS)


class LossyCalls(RoundedCalls, ScaledCalls, ZfpCalls):
    """:class:`ds_zipccl.kernels.LossyRoute` on CUDA. Functions that it lacks are those of codecs without CUDA kernels."""
