"""The functions of the C++ route for scaled payloads."""

from __future__ import annotations

import ctypes

import torch

from ds_zipccl.frame import DTYPE_IDS
from ds_zipccl.kernels.cpp.lossy import check
from ds_zipccl.kernels.lossy_protocol import ScaledCodec
from ds_zipccl.lossy import Int, TacoFp8

#: kGroupStays of csrc/cpu/level.h.
_STAYS = (1 << 64) - 1


class _Scaling(ctypes.Structure):
    """ZipcclScaling of csrc/cpu/level.h."""

    _fields_ = [
        ("integers", ctypes.c_uint32),
        ("bits", ctypes.c_uint32),
        ("log2", ctypes.c_uint32),
        ("hadamard", ctypes.c_uint32),
    ]


class NativeScaled:
    """A part of :class:`ds_zipccl.kernels.LossyRoute` over csrc/cpu/lossy/scaled.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u64, i32, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
        self._encode_scaled = library.zipccl_scaled_encode
        self._encode_scaled.argtypes = [pointer, u64, i32, pointer, pointer, pointer, i32]
        self._encode_scaled.restype = u64
        self._decode_scaled = library.zipccl_scaled_decode
        self._decode_scaled.argtypes = [pointer, pointer, u64, i32, pointer, pointer, i32]
        self._decode_scaled.restype = i32
        self._add_scaled = library.zipccl_scaled_add
        self._add_scaled.argtypes = [pointer, pointer, u64, i32, pointer, pointer, i32, i32]
        self._add_scaled.restype = i32
        self._encode_staged = library.zipccl_scaled_encode_staged
        self._encode_staged.argtypes = [pointer, u64, i32, pointer, u32, pointer, pointer, pointer, i32]
        self._encode_staged.restype = u64
        self._decode_staged = library.zipccl_scaled_decode_staged
        self._decode_staged.argtypes = [pointer, pointer, u64, u32, u64, i32, pointer, pointer, i32]
        self._decode_staged.restype = i32
        self._add_staged = library.zipccl_scaled_add_staged
        self._add_staged.argtypes = [pointer, pointer, u64, u32, u64, i32, pointer, pointer, i32, i32]
        self._add_staged.restype = i32
        self._project_scaled = library.zipccl_scaled_project
        self._project_scaled.argtypes = [pointer, u64, i32, pointer, pointer, i32]
        self._project_scaled.restype = None

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        scaling = _scaling(codec)
        coded = self._encode_scaled(
            words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], ctypes.addressof(scaling), scales.data_ptr(),
            codes.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return None if coded == _STAYS else int(coded)

    def decode_scaled(self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor) -> None:
        scaling = _scaling(codec)
        check(
            self._decode_scaled(
                scales.data_ptr(), codes.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], ctypes.addressof(scaling),
                words.data_ptr(), torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_scaled_add(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        scaling = _scaling(codec)
        check(
            self._add_scaled(
                scales.data_ptr(), codes.data_ptr(), sums.numel(), DTYPE_IDS[dtype], ctypes.addressof(scaling),
                sums.data_ptr(), sums.dtype != dtype, torch.get_num_threads(),
            )
        )  # fmt: skip

    def encode_scaled_staged(
        self,
        words: torch.Tensor,
        codec: TacoFp8,
        block: int,
        scales: torch.Tensor,
        codes: torch.Tensor,
        payload: torch.Tensor,
    ) -> int | None:
        """As :meth:`encode_scaled`, and write the codes with stage 2 to ``payload`` too.

        Args:
            block: codes in a block of stage 2.
            payload: uint8, as many bytes as the longest stage 2 of all codes.

        Returns:
            The bytes of stage 2 where all groups have codes; 0 where one has none, and all outputs are undefined; None as
            :meth:`encode_scaled`.
        """
        scaling = _scaling(codec)
        size = self._encode_staged(
            words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], ctypes.addressof(scaling), block, scales.data_ptr(),
            codes.data_ptr(), payload.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return None if size == _STAYS else int(size)

    def decode_scaled_staged(
        self, scales: torch.Tensor, payload: torch.Tensor, block: int, codec: ScaledCodec, words: torch.Tensor
    ) -> None:
        """As :meth:`decode_scaled`, of codes with stage 2 in blocks of ``block`` codes."""
        scaling = _scaling(codec)
        check(
            self._decode_staged(
                scales.data_ptr(), payload.data_ptr(), payload.numel(), block, words.numel(), DTYPE_IDS[words.dtype],
                ctypes.addressof(scaling), words.data_ptr(), torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_scaled_staged_add(
        self,
        scales: torch.Tensor,
        payload: torch.Tensor,
        block: int,
        codec: ScaledCodec,
        dtype: torch.dtype,
        sums: torch.Tensor,
    ) -> None:
        """As :meth:`decode_scaled_add`, of codes with stage 2 in blocks of ``block`` codes."""
        scaling = _scaling(codec)
        check(
            self._add_staged(
                scales.data_ptr(), payload.data_ptr(), payload.numel(), block, sums.numel(), DTYPE_IDS[dtype],
                ctypes.addressof(scaling), sums.data_ptr(), sums.dtype != dtype, torch.get_num_threads(),
            )
        )  # fmt: skip

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        scaling = _scaling(codec)
        self._project_scaled(
            words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], ctypes.addressof(scaling), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip


def _scaling(codec: ScaledCodec) -> _Scaling:
    bits = codec.bits if isinstance(codec, Int) else 8
    return _Scaling(isinstance(codec, Int), bits, codec.group.bit_length() - 1, codec.hadamard)
