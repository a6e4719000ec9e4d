"""The lossy calls of the CUDA route, and the table of their kernels; each codec has a module of its own."""

from __future__ import annotations

from ds_zipccl.kernels.cuda import rounded, scaled, zfp
from ds_zipccl.kernels.cuda.launching import Family
from ds_zipccl.kernels.cuda.rounded import RoundedCalls
from ds_zipccl.kernels.cuda.scaled import ScaledCalls
from ds_zipccl.kernels.cuda.zfp import ZfpCalls

#: The kernels of csrc/cuda/lossy/lossy_kernels.cuh.
KERNELS: tuple[Family, ...] = (*rounded.KERNELS, *scaled.KERNELS, *zfp.KERNELS)


class LossyCalls(RoundedCalls, ScaledCalls, ZfpCalls):
    """:class:`ds_zipccl.kernels.LossyRoute` on CUDA. Functions that it lacks are those of codecs without CUDA kernels."""
