"""The C++ route: a plain C interface called through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ds_zipccl.frame import DTYPE_IDS, FrameError
from ds_zipccl.kernels import build


class _Segment(ctypes.Structure):
    """ZipcclSegment of csrc/cpu/payload.cpp."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


#: code -> its number in ZipcclCode of csrc/cpu/level.h.
_CODES = {"cascade": 0, "wide": 1}


class NativeRoute:
    """Route over the library of csrc/cpu; see :class:`ds_zipccl.kernels.Route`.

    Tensors of a few MiB and more are spread over ``torch.get_num_threads()`` threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, u64, i32, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
        self._encode = library.zipccl_encode
        self._encode.argtypes, self._encode.restype = [pointer, u32, i32, i32, u32, i32], None
        self._decode = library.zipccl_decode
        self._decode.argtypes, self._decode.restype = [pointer, u64, pointer, u64, i32, u32, i32], i32
        self._decode_add = library.zipccl_decode_add
        self._decode_add.argtypes, self._decode_add.restype = [pointer, u64, pointer, u64, i32, u32, i32, i32], i32
        self._add = library.zipccl_add
        self._add.argtypes, self._add.restype = [pointer, u64, pointer, i32, i32, i32], None
        self._encode_delta = library.zipccl_delta_encode
        self._encode_delta.argtypes, self._encode_delta.restype = [pointer, pointer, u64, pointer, i32, u32, i32], u64
        self._decode_delta = library.zipccl_delta_decode
        self._decode_delta.argtypes, self._decode_delta.restype = (
            [pointer, u64, pointer, pointer, u64, i32, u32, i32],
            i32,
        )
        self._hash = library.zipccl_hash
        self._hash.argtypes, self._hash.restype = [pointer, u64, pointer, i32], None
        self._level = library.zipccl_level
        self._level.argtypes, self._level.restype = [], ctypes.c_char_p
        self._force = library.zipccl_force_level
        self._force.argtypes, self._force.restype = [ctypes.c_char_p], i32

    @property
    def level(self) -> str:
        """Instruction set in use: avx512, avx2 or scalar."""
        return str(self._level().decode())

    def force_level(self, name: str) -> None:
        """Use the named level from now on in this process ("auto": the best level); for tests.

        Raises:
            ValueError: there is no such level, or this CPU lacks it.
        """
        if self._force(name.encode()):
            raise ValueError(f"level {name!r} is unknown or not supported by this CPU; in use: {self.level}")

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        pairs = zip(segments, outs, strict=True)
        array = (_Segment * len(segments))(*(_Segment(w.data_ptr(), w.numel(), out.data_ptr(), 0) for w, out in pairs))
        dtype = DTYPE_IDS[segments[0].dtype]
        self._encode(ctypes.addressof(array), len(array), dtype, _CODES[code], block, torch.get_num_threads())
        return [segment.bytes for segment in array]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        _check(
            self._decode(
                payload.data_ptr(), payload.numel(), words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        fp32_sums = sums.dtype != dtype
        _check(
            self._decode_add(
                payload.data_ptr(), payload.numel(), sums.data_ptr(), sums.numel(), DTYPE_IDS[dtype], block, fp32_sums,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        threads, fp32_sums = torch.get_num_threads(), sums.dtype != words.dtype
        self._add(words.data_ptr(), words.numel(), sums.data_ptr(), DTYPE_IDS[words.dtype], fp32_sums, threads)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return int(
            self._encode_delta(
                words.data_ptr(), base.data_ptr(), words.numel(), out.data_ptr(), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        _check(
            self._decode_delta(
                payload.data_ptr(), payload.numel(), base.data_ptr(), words.data_ptr(), words.numel(),
                DTYPE_IDS[words.dtype], block, torch.get_num_threads(),
            )
        )  # fmt: skip

    def region_hash(self, data: torch.Tensor) -> tuple[int, int]:
        halves = (ctypes.c_uint64 * 2)()
        self._hash(data.data_ptr(), data.numel(), ctypes.addressof(halves), torch.get_num_threads())
        return halves[0], halves[1]


def _check(status: int) -> None:
    if status:
        raise FrameError(status, "the payload contradicts itself")


def load() -> NativeRoute:
    """Return the route; builds its library (seconds) unless the cache has it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return NativeRoute(ctypes.CDLL(str(build.build(build.CPU))))
