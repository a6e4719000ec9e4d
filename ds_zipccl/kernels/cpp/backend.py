"""The C++ route: a plain C interface called through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import DTYPE_IDS
from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import shipped
from ds_zipccl.kernels.cpp.lossy import NativeLossy, Segment, check
from ds_zipccl.kernels.cpp.lowrank import NativeLowRank
from ds_zipccl.kernels.cpp.rows import RowFrames, Search
from ds_zipccl.kernels.cpp.scaled import NativeScaled
from ds_zipccl.kernels.cpp.zfp import NativeZfp


class _Literals(ctypes.Structure):
    """ZipcclLiterals of csrc/cpu/rows/row_calls.h."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("width", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
    ]


class _Repeats(ctypes.Structure):
    """ZipcclRepeats of csrc/cpu/rows/row_calls.h."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("width", ctypes.c_uint64),
        ("itemsize", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("sources", ctypes.c_void_p),
        ("literals", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("room", ctypes.c_uint64),
        ("repeats", ctypes.c_uint64),
        ("plain", ctypes.c_uint64),
        ("bits", ctypes.c_uint64),
    ]


class _Map(ctypes.Structure):
    """ZipcclMap of csrc/cpu/rows/row_calls.h."""

    _fields_ = [
        ("map", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("repeats", ctypes.c_uint64),
        ("bits", ctypes.c_uint64),
        ("reach", ctypes.c_uint64),
        ("literals", ctypes.c_void_p),
        ("repeated", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
    ]


#: code -> its number in ZipcclCode of csrc/cpu/level.h.
_CODES = {"cascade": 0, "wide": 1}


class NativeRoute(NativeLossy, NativeScaled, NativeZfp, NativeLowRank):
    """Route over the library of csrc/cpu; see :class:`ds_zipccl.kernels.Route`.

    Tensors of a few MiB and more are spread over ``torch.get_num_threads()`` threads.
    """

    #: Bits that count in the hashes of rows; fewer in tests, so that hashes collide.
    hash_mask = (1 << 64) - 1

    def __init__(self, library: ctypes.CDLL) -> None:
        NativeLossy.__init__(self, library)
        NativeScaled.__init__(self, library)
        NativeZfp.__init__(self, library)
        NativeLowRank.__init__(self, library)
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
        self._hash.argtypes, self._hash.restype = [pointer, u64, pointer, pointer, i32], None
        self._find_rows = library.zipccl_find_rows
        self._find_rows.argtypes, self._find_rows.restype = [pointer, i32], u64
        self._encode_rows = library.zipccl_encode_rows
        self._encode_rows.argtypes, self._encode_rows.restype = [pointer, i32, i32, u32, pointer, i32], u64
        self._decode_rows = library.zipccl_decode_rows
        self._decode_rows.argtypes, self._decode_rows.restype = [pointer, u64, pointer, i32, u32, i32], i32
        self._encode_rounded_rows = library.zipccl_encode_rounded_rows
        self._encode_rounded_rows.argtypes = [pointer, i32, u32, u32, pointer, i32]
        self._encode_rounded_rows.restype = u64
        self._decode_rounded_rows = library.zipccl_decode_rounded_rows
        self._decode_rounded_rows.argtypes = [pointer, u64, pointer, i32, u32, i32]
        self._decode_rounded_rows.restype = i32
        self._pack_repeats = library.zipccl_pack_repeats
        self._pack_repeats.argtypes, self._pack_repeats.restype = [pointer], None
        self._unpack_repeats = library.zipccl_unpack_repeats
        self._unpack_repeats.argtypes, self._unpack_repeats.restype = [pointer], i32
        self._row_frame = library.zipccl_row_frame
        self._row_frame.argtypes, self._row_frame.restype = [pointer, u64, u64, pointer, u64, i32], u64
        self._copy_rows = library.zipccl_copy_rows
        self._copy_rows.argtypes, self._copy_rows.restype = [pointer, u64, pointer, pointer, u64, i32], None
        self._row_factors = library.zipccl_row_factors
        self._row_factors.argtypes = [pointer, i32, u64, pointer, pointer, u64, pointer, i32]
        self._row_factors.restype = None
        self._predict_rows = library.zipccl_predict_rows
        self._predict_rows.argtypes = [pointer, i32, u64, pointer, pointer, u64, pointer, i32]
        self._predict_rows.restype = None
        self._level = library.zipccl_level
        self._level.argtypes, self._level.restype = [], ctypes.c_char_p
        self._force = library.zipccl_force_level
        self._force.argtypes, self._force.restype = [ctypes.c_char_p], i32

    @property
    def level(self) -> str:
        """Instruction set in use: avx512, avx2, neon or scalar."""
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
        array = (Segment * len(segments))(*(Segment(w.data_ptr(), w.numel(), out.data_ptr(), 0) for w, out in pairs))
        dtype = DTYPE_IDS[segments[0].dtype]
        self._encode(ctypes.addressof(array), len(array), dtype, _CODES[code], block, torch.get_num_threads())
        return [segment.bytes for segment in array]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        check(
            self._decode(
                payload.data_ptr(), payload.numel(), words.data_ptr(), words.numel(), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        fp32_sums = sums.dtype != dtype
        check(
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
        check(
            self._decode_delta(
                payload.data_ptr(), payload.numel(), base.data_ptr(), words.data_ptr(), words.numel(),
                DTYPE_IDS[words.dtype], block, torch.get_num_threads(),
            )
        )  # fmt: skip

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        halves, keys = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)(*key)
        self._hash(
            data.data_ptr(), data.numel(), ctypes.addressof(keys), ctypes.addressof(halves), torch.get_num_threads()
        )
        return halves[0], halves[1]

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        search = Search(
            data.data_ptr(), row_bytes, first, sources.numel(), sources.data_ptr(), table.data_ptr(), table.numel(),
            self.hash_mask,
        )  # fmt: skip
        return int(self._find_rows(ctypes.addressof(search), torch.get_num_threads()))

    def encode_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, code: str, block: int, out: torch.Tensor
    ) -> int:
        literals, dtype = _literals(words, width, head, rows), DTYPE_IDS[words.dtype]
        threads = torch.get_num_threads()
        return int(self._encode_rows(ctypes.addressof(literals), dtype, _CODES[code], block, out.data_ptr(), threads))

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        literals = _literals(words, width, head, rows)
        check(
            self._decode_rows(
                payload.data_ptr(), payload.numel(), ctypes.addressof(literals), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def encode_rounded_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, mantissa: int, block: int, out: torch.Tensor
    ) -> int:  # fmt: skip
        literals, dtype = _literals(words, width, head, rows), DTYPE_IDS[words.dtype]
        threads, at = torch.get_num_threads(), ctypes.addressof(literals)
        return int(self._encode_rounded_rows(at, dtype, mantissa, block, out.data_ptr(), threads))

    def decode_rounded_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        literals = _literals(words, width, head, rows)
        check(
            self._decode_rounded_rows(
                payload.data_ptr(), payload.numel(), ctypes.addressof(literals), DTYPE_IDS[words.dtype], block,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        self._copy_rows(
            words.data_ptr(), width * words.itemsize, rows.data_ptr(), sources.data_ptr(), rows.numel(),
            torch.get_num_threads(),
        )  # fmt: skip

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        factors = tensors.empty(rows.numel(), torch.float32)
        self._row_factors(
            words.data_ptr(), DTYPE_IDS[words.dtype], width, rows.data_ptr(), sources.data_ptr(), rows.numel(),
            factors.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return factors

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._predict_rows(
            words.data_ptr(), DTYPE_IDS[words.dtype], width, sources.data_ptr(), factors.data_ptr(), sources.numel(),
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def pack_repeats(
        self, words: torch.Tensor, width: int, first: int, count: int, sources: torch.Tensor, map_room: torch.Tensor
    ) -> tuple[torch.Tensor, int, int]:
        """Write the map of a frame without scaled rows (FORMAT.md 2.6) with its padding to ``map_room``, unless it has no room.

        Args:
            words: the segment.
            first: the first of the frame's ``count`` whole rows.
            sources: of all rows, as :meth:`find_rows` writes them.
            map_room: uint8.

        Returns:
            The literals (int32, from row ``first`` on), the bits of a distance, and how many repeated rows have more than one word.
        """
        literals = tensors.empty(count, torch.int32)
        rows = _Repeats(
            words.data_ptr(), width, words.itemsize, first, count, sources.data_ptr(), literals.data_ptr(),
            map_room.data_ptr(), map_room.numel(), 0, 0, 0,
        )  # fmt: skip
        self._pack_repeats(ctypes.addressof(rows))
        return literals[: count - rows.repeats], rows.bits, rows.repeats - rows.plain

    def row_frames(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, table: torch.Tensor, literals: torch.Tensor, nested: bytes, code: str,
        block: int, raw_below: int, worth: float, mantissa: int,
    ) -> RowFrames:  # fmt: skip
        """Return the coder of row frames without scaled rows, see :class:`~ds_zipccl.kernels.cpp.rows.RowFrames`."""
        return RowFrames(
            self._payload, self.hash_mask, words, width, sources, table, literals, nested, _CODES[code], block, raw_below, worth, mantissa
        )  # fmt: skip

    def _payload(self, segment: int, begin: int, numel: int, out: int, room: int) -> int:
        return int(self._row_frame(segment, begin, numel, out, room, torch.get_num_threads()))

    def unpack_repeats(
        self, data: torch.Tensor, count: int, repeats: int, bits: int, reach: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Read the map of a frame without scaled rows, with ``count`` whole rows and distances of ``bits`` bits.

        Args:
            data: uint8, from the map on; 16 bytes more than the padded map.
            repeats: repeated rows, as the fields say; at most ``count``.
            reach: rows that the receiver holds in front of the frame; with ``count`` below ``2^31``.

        Returns:
            The literals, from the frame's first whole row on, and the repeated rows and their sources, from the first row in front on, all
            int32; None where the map contradicts itself, its fields or ``reach``.
        """
        numbers = tensors.empty(count + repeats, torch.int32)
        literals, repeated, sources = numbers.split((count - repeats, repeats, repeats))
        row_map = _Map(
            data.data_ptr(), count, repeats, bits, reach, literals.data_ptr(), repeated.data_ptr(), sources.data_ptr()
        )
        return None if self._unpack_repeats(ctypes.addressof(row_map)) else (literals, repeated, sources)


def _literals(words: torch.Tensor, width: int, head: int, rows: torch.Tensor) -> _Literals:
    return _Literals(words.data_ptr(), words.numel(), width, head, rows.data_ptr(), rows.numel())


def load() -> NativeRoute:
    """Return the route; builds its library (seconds) unless the cache has it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return NativeRoute(ctypes.CDLL(str(shipped.library() or build.build(build.CPU))))
