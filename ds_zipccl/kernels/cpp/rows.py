"""Row frames of a segment by the C++ route: a call for each frame without scaled rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ds_zipccl.frame import DTYPE_IDS


class Search(ctypes.Structure):
    """ZipcclSearch of csrc/cpu/rows/row_calls.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_bytes", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("sources", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("slots", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
    ]


class Segment(ctypes.Structure):
    """ZipcclRowSegment of csrc/cpu/rows/row_calls.h."""

    _fields_ = [
        ("search", Search),
        ("repeats", ctypes.c_uint64),
        ("width", ctypes.c_uint64),
        ("itemsize", ctypes.c_uint64),
        ("raw_below", ctypes.c_uint64),
        ("worth", ctypes.c_double),
        ("literals", ctypes.c_void_p),
        ("nested", ctypes.c_uint8 * 16),
        ("dtype", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("block", ctypes.c_uint32),
        ("mantissa", ctypes.c_uint32),
    ]


class RowFrames:
    """Payloads of the row frames of a segment, in order, with literals of one code.

    Args:
        call: zipccl_row_frame of csrc/cpu/rows/row_frame.cpp: address of a :class:`Segment`, begin, elements, address and bytes of the
            output.
        hash_mask: bits that count in the hashes of rows.
        words: the segment, flat. This tensor and the next ones are used for as long as the object is.
        width: elements of a row.
        sources: int32, one for each row: of all rows, as ``find_rows`` writes them.
        table: as ``find_rows`` takes it.
        literals: int32, one for each row, contents undefined.
        nested: the first 16 bytes of the header of a frame of literals.
        code, block: of the literals.
        raw_below: literals of fewer bytes are raw.
        worth: share of the bytes of its repeated rows that a row frame saves, at least.
        mantissa: bits to which literals are rounded, 0: they stay as they are.
    """

    #: :meth:`payload` gives this where literals are to be raw, and has written nothing that counts.
    RAW = 1

    def __init__(
        self, call: Callable[[int, int, int, int, int], int], hash_mask: int, words: torch.Tensor, width: int, sources: torch.Tensor,
        table: torch.Tensor, literals: torch.Tensor, nested: bytes, code: int, block: int, raw_below: int, worth: float,
        mantissa: int,
    ) -> None:  # fmt: skip
        self._call, self._held = call, (words, sources, table, literals)
        search = Search(
            words.data_ptr(), width * words.itemsize, 0, 0, sources.data_ptr(), table.data_ptr(), table.numel(), hash_mask
        )  # fmt: skip
        self._state = Segment(
            search, 0, width, words.itemsize, raw_below, worth, literals.data_ptr(), (ctypes.c_uint8 * 16)(*nested),
            DTYPE_IDS[words.dtype], code, block, mantissa,
        )  # fmt: skip
        self._at = ctypes.addressof(self._state)

    def payload(self, begin: int, numel: int, out: torch.Tensor, known: int, repeats: int) -> tuple[int, int, int]:
        """Write the payload of the frame of ``numel`` elements from ``begin`` on to ``out``; blocks.

        Args:
            out: uint8, the bound of an ordinary payload, or more.
            known: rows of which ``sources`` are known.
            repeats: rows among them that repeat earlier ones.

        Returns:
            Bytes of the payload, 0 where a row frame is not worth while, or :attr:`RAW`; then ``known`` and ``repeats`` from now on.
        """
        state = self._state
        state.search.first, state.repeats = known, repeats
        size = self._call(self._at, begin, numel, out.data_ptr(), out.numel())
        return size, state.search.first, state.repeats
