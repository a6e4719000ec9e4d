"""The kernels of csrc/cuda: one table, and the C interface of csrc/cuda/interface.h that starts them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_zipccl.kernels.c_functions import I32, POINTER, TEXT, U32, Signatures
from ds_zipccl.kernels.cuda import jobs
from ds_zipccl.kernels.cuda.jobs import DTYPES, SUMMED, TRIMMED

#: The functions of a library of nvcc. ``tests/codec/test_interfaces.py`` compares them with the header.
SIGNATURES: Signatures = {
    "zipccl_cuda_kernel": (POINTER, (TEXT,)),
    "zipccl_cuda_device": (I32, (POINTER,)),
    "zipccl_cuda_load": (I32, (POINTER, U32)),
    "zipccl_cuda_start": (I32, (POINTER, U32, U32, U32, U32, POINTER, POINTER)),
    "zipccl_cuda_error": (TEXT, (I32,)),
}
#: kernel -> itemsize -> bytes of shared memory; cuda/kernels.cuh asserts that they suffice.
SHARED_BYTES: dict[str, Mapping[int, int]] = {
    "encode": {1: 30720, 2: 47104, 4: 79872},
    "decode": {1: 25088, 2: 33280, 4: 49664},
    "decode_sum": {2: 50176, 4: 66560},
    "untrimmed": {2: 2048},
    **{f"zfp_{what}": {2: 6144, 4: 6144} for what in ("encode", "decode", "project")},
    **{f"scaled_{what}": {2: 0, 4: 0} for what in ("encode", "decode", "project")},
    **{what: {2: 0, 4: 0} for what in ("row_sums", "predict_rows", "round")},
    **{what: {1: 0} for what in ("hash", "find_rows")},
}
#: Threads of a block: kThreads of cuda/warp.cuh.
THREADS = 256
#: The kernels ``zipccl_<what>_<dtype><suffix>``: what, suffix, the struct that is their parameter, their dtypes.
_OF_DTYPES: tuple[tuple[str, str, type[ctypes.Structure], Sequence[torch.dtype]], ...] = (
    ("encode", "_cascade", jobs.EncodeJobs, tuple(DTYPES)),
    ("encode", "_wide", jobs.EncodeJobs, tuple(DTYPES)),
    ("decode", "", jobs.DecodeJobs, tuple(DTYPES)),
    ("encode", "_delta", jobs.EncodeJobs, SUMMED),
    ("decode", "_delta", jobs.DecodeJobs, SUMMED),
    ("decode_sum", "", jobs.SumJob, SUMMED),
    ("row_sums", "", jobs.RowPairs, SUMMED),
    ("predict_rows", "", jobs.RowPairs, SUMMED),
    ("round", "", jobs.RoundJob, SUMMED),
    ("encode", "_rounded", jobs.EncodeJobs, SUMMED),
    ("decode", "_rounded", jobs.DecodeJobs, TRIMMED),
    ("untrimmed", "", jobs.UntrimmedJobs, TRIMMED),
    *((f"scaled_{what}", "", jobs.ScaledJob, SUMMED) for what in ("encode", "decode", "project")),
    *((f"zfp_{what}", "", jobs.ZfpJob, SUMMED) for what in ("encode", "decode", "project")),
)
#: The other kernels, all of bytes: name behind ``zipccl_``, what, the struct.
_OF_BYTES: tuple[tuple[str, str, type[ctypes.Structure]], ...] = (
    ("encode_u8_delta", "encode", jobs.EncodeJobs),
    ("decode_u8_delta", "decode", jobs.DecodeJobs),
    ("hash", "hash", jobs.HashJobs),
    ("find_rows", "find_rows", jobs.FindRows),
)


@dataclass(frozen=True)
class Kernel:
    """The facts that a launcher needs of a kernel."""

    #: Threads of a block.
    threads: int
    #: Most bytes of shared memory of a launch.
    shared_bytes: int
    #: The struct that is its parameter. A launch with zeros does nothing.
    params: type[ctypes.Structure]


def _kernels() -> Iterator[tuple[str, Kernel]]:
    for what, suffix, params, dtypes in _OF_DTYPES:
        for dtype in dtypes:
            yield f"zipccl_{what}_{DTYPES[dtype]}{suffix}", Kernel(THREADS, SHARED_BYTES[what][dtype.itemsize], params)
    for name, what, params in _OF_BYTES:
        yield f"zipccl_{name}", Kernel(THREADS, SHARED_BYTES[what][1], params)


#: Every kernel of csrc/cuda/kernels.cuh.
KERNELS = dict(_kernels())
