"""The C interface of csrc/cpu/interface.h for ctypes: its structs, and the signatures of its functions.

``tests/codec/test_interfaces.py`` compares both with the header.
"""

from __future__ import annotations

import ctypes

from ds_zipccl.kernels.c_functions import F64, I32, POINTER, TEXT, U32, U64, Signatures

#: ZipcclCode of csrc/cpu/level.h.
CODES = {"cascade": 0, "wide": 1}
#: ZipcclInto of csrc/cpu/interface.h; the next one: sums of float32 that are not those of the words' dtype.
INTO_WORDS, INTO_SUMS = 0, 1
#: kGroupStays of csrc/cpu/level.h.
GROUP_STAYS = (1 << 64) - 1
#: kZipcclTile of csrc/cpu/level.h.
TILE = 32


class Scaling(ctypes.Structure):
    _fields_ = [("integers", U32), ("bits", U32), ("log2", U32), ("hadamard", U32)]


class Segment(ctypes.Structure):
    _fields_ = [("words", POINTER), ("numel", U64), ("out", POINTER), ("bytes", U64)]


class Search(ctypes.Structure):
    _fields_ = [
        ("data", POINTER), ("row_bytes", U64), ("first", U64), ("count", U64), ("sources", POINTER), ("table", POINTER),
        ("slots", U64), ("mask", U64),
    ]  # fmt: skip


class Literals(ctypes.Structure):
    _fields_ = [("words", POINTER), ("numel", U64), ("width", U64), ("head", U64), ("rows", POINTER), ("count", U64)]


class Map(ctypes.Structure):
    _fields_ = [
        ("map", POINTER), ("count", U64), ("repeats", U64), ("bits", U64), ("reach", U64), ("literals", POINTER),
        ("repeated", POINTER), ("sources", POINTER),
    ]  # fmt: skip


class RowSegment(ctypes.Structure):
    _fields_ = [
        ("search", Search), ("repeats", U64), ("width", U64), ("itemsize", U64), ("raw_below", U64), ("worth", F64),
        ("literals", POINTER), ("nested", ctypes.c_uint8 * 16), ("dtype", I32), ("code", I32), ("block", U32), ("mantissa", U32),
    ]  # fmt: skip


#: The structs, each ``Zipccl...`` in the header.
STRUCTS: tuple[type[ctypes.Structure], ...] = (Scaling, Segment, Search, Literals, Map, RowSegment)

_ROWS = None, (POINTER, I32, U64, POINTER, POINTER, U64, POINTER, I32)
_ZFP = (POINTER, U64, I32, U32, POINTER, I32)
#: The functions. The last argument is the number of threads where a function has one.
SIGNATURES: Signatures = {
    "zipccl_level": (TEXT, ()),
    "zipccl_force_level": (I32, (TEXT,)),
    "zipccl_hash": (None, (POINTER, U64, POINTER, POINTER, I32)),
    "zipccl_encode": (None, (POINTER, U32, I32, I32, U32, I32)),
    "zipccl_decode": (I32, (POINTER, U64, POINTER, U64, I32, I32, U32, I32, I32)),
    "zipccl_add": (None, (POINTER, U64, POINTER, I32, I32, I32)),
    "zipccl_squared_error": (None, (POINTER, POINTER, U64, I32, POINTER, I32)),
    "zipccl_delta_encode": (U64, (POINTER, POINTER, U64, POINTER, I32, U32, I32)),
    "zipccl_delta_decode": (I32, (POINTER, U64, POINTER, POINTER, U64, I32, U32, I32)),
    "zipccl_find_rows": (U64, (POINTER, I32)),
    "zipccl_encode_rows": (U64, (POINTER, I32, I32, U32, U32, POINTER, I32)),
    "zipccl_decode_rows": (I32, (POINTER, U64, POINTER, I32, I32, U32, I32)),
    "zipccl_copy_rows": (None, (POINTER, U64, POINTER, POINTER, U64, I32)),
    "zipccl_row_factors": _ROWS,
    "zipccl_predict_rows": _ROWS,
    "zipccl_unpack_repeats": (I32, (POINTER,)),
    "zipccl_row_frame": (U64, (POINTER, U64, U64, POINTER, U64, I32)),
    "zipccl_round_words": (None, (POINTER, U64, I32, U32, POINTER, I32)),
    "zipccl_encode_rounded": (None, (POINTER, U32, I32, U32, U32, POINTER, I32)),
    "zipccl_scaled_encode": (U64, (POINTER, U64, I32, POINTER, POINTER, POINTER, I32)),
    "zipccl_scaled_encode_staged": (U64, (POINTER, U64, I32, POINTER, U32, POINTER, POINTER, POINTER, I32)),
    "zipccl_scaled_decode": (I32, (POINTER, POINTER, U64, I32, POINTER, POINTER, I32, I32)),
    "zipccl_scaled_decode_staged": (I32, (POINTER, POINTER, U64, U32, U64, I32, POINTER, POINTER, I32, I32)),
    "zipccl_scaled_project": (None, (POINTER, U64, I32, POINTER, POINTER, I32)),
    "zipccl_zfp_encode": (I32, _ZFP),
    "zipccl_zfp_decode": (None, (POINTER, U64, I32, U32, POINTER, I32, I32)),
    "zipccl_zfp_project": (None, _ZFP),
    "zipccl_multiply": (None, (POINTER, POINTER, U64, U32, U64, U64, I32, POINTER, I32, I32)),
    "zipccl_orthonormalize": (None, (POINTER, U64, U32, POINTER)),
}
