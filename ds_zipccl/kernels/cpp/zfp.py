"""ZFP of the C++ route (csrc/cpu/lossy/zfp.cpp)."""

from __future__ import annotations

import ctypes

import torch

from ds_zipccl.frame import DTYPE_IDS


class NativeZfp:
    """ZFP of :class:`ds_zipccl.kernels.LossyRoute`; :class:`ds_zipccl.kernels.cpp.backend.NativeRoute` has it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u64, i32, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
        self._encode_zfp = library.zipccl_zfp_encode
        self._encode_zfp.argtypes, self._encode_zfp.restype = [pointer, u64, i32, u32, pointer, i32], i32
        self._decode_zfp = library.zipccl_zfp_decode
        self._decode_zfp.argtypes, self._decode_zfp.restype = [pointer, u64, i32, u32, pointer, i32], None
        self._decode_zfp_add = library.zipccl_zfp_decode_add
        self._decode_zfp_add.argtypes, self._decode_zfp_add.restype = [pointer, u64, i32, u32, pointer, i32, i32], None
        self._project_zfp = library.zipccl_zfp_project
        self._project_zfp.argtypes, self._project_zfp.restype = [pointer, u64, i32, u32, pointer, i32], None

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        dtype, threads = DTYPE_IDS[words.dtype], torch.get_num_threads()
        self._project_zfp(words.data_ptr(), words.numel(), dtype, rate, out.data_ptr(), threads)

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        dtype, threads = DTYPE_IDS[words.dtype], torch.get_num_threads()
        return bool(self._encode_zfp(words.data_ptr(), words.numel(), dtype, rate, codes.data_ptr(), threads))

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        dtype, threads = DTYPE_IDS[words.dtype], torch.get_num_threads()
        self._decode_zfp(codes.data_ptr(), words.numel(), dtype, rate, words.data_ptr(), threads)

    def decode_zfp_add(self, codes: torch.Tensor, rate: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        fp32_sums, threads = sums.dtype != dtype, torch.get_num_threads()
        self._decode_zfp_add(
            codes.data_ptr(), sums.numel(), DTYPE_IDS[dtype], rate, sums.data_ptr(), fp32_sums, threads
        )
