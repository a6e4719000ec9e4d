"""The lossy functions of the C++ route; see :mod:`.backend`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ds_zipccl.frame import DTYPE_IDS, FrameError


class Segment(ctypes.Structure):
    """ZipcclSegment of csrc/cpu/chunks.h."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


def check(status: int) -> None:
    """Raise FrameError for the status of a decoder that is not 0."""
    if status:
        raise FrameError(status, "the payload contradicts itself")


class NativeLossy:
    """:class:`ds_zipccl.kernels.LossyRoute` over the library of csrc/cpu."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u64, i32, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
        self._round_words = library.zipccl_round_words
        self._round_words.argtypes, self._round_words.restype = [pointer, u64, i32, u32, pointer, i32], None
        self._encode_rounded = library.zipccl_encode_rounded
        self._encode_rounded.argtypes = [pointer, u32, i32, u32, u32, pointer, i32]
        self._encode_rounded.restype = None
        self._decode_rounded = library.zipccl_decode_rounded
        self._decode_rounded.argtypes, self._decode_rounded.restype = [pointer, u64, pointer, u64, i32, u32, i32], i32
        self._decode_rounded_add = library.zipccl_decode_rounded_add
        self._decode_rounded_add.argtypes = [pointer, u64, pointer, u64, i32, u32, i32, i32]
        self._decode_rounded_add.restype = i32
        self._squares = library.zipccl_squares
        self._squares.argtypes, self._squares.restype = [pointer, pointer, u64, i32, pointer, i32], None

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        dtype, threads = DTYPE_IDS[words.dtype], torch.get_num_threads()
        self._round_words(words.data_ptr(), words.numel(), dtype, mantissa, out.data_ptr(), threads)

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        pairs = zip(segments, outs, strict=True)
        array = (Segment * len(segments))(*(Segment(w.data_ptr(), w.numel(), out.data_ptr(), 0) for w, out in pairs))
        untrimmed = (ctypes.c_uint64 * len(segments))()
        self._encode_rounded(
            ctypes.addressof(array), len(array), DTYPE_IDS[segments[0].dtype], mantissa, block, ctypes.addressof(untrimmed),
            torch.get_num_threads(),
        )  # fmt: skip
        return [(segment.bytes, size) for segment, size in zip(array, untrimmed, strict=True)]

    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        check(
            self._decode_rounded(
                payload.data_ptr(), payload.numel(), words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_rounded_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        check(
            self._decode_rounded_add(
                payload.data_ptr(), payload.numel(), sums.data_ptr(), sums.numel(), DTYPE_IDS[dtype], block,
                sums.dtype != dtype, torch.get_num_threads(),
            )
        )  # fmt: skip

    def squares(self, words: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        """Return the sum of the squares of ``values`` - ``words``, and of those of ``words``, over the finite ``words``, added in fp64.

        Args:
            words, values: bfloat16, float16 or float32, flat, of one length.
        """
        sums, dtype = (ctypes.c_double * 2)(), DTYPE_IDS[words.dtype]
        pointers = words.data_ptr(), values.data_ptr()
        self._squares(*pointers, words.numel(), dtype, ctypes.addressof(sums), torch.get_num_threads())
        return sums[0], sums[1]
