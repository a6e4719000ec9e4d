"""The C++ kernel backend: csrc/cpu through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_zipccl import tensors
from ds_zipccl.frame import DTYPE_IDS, FrameError
from ds_zipccl.kernels import build
from ds_zipccl.kernels.c_functions import bind
from ds_zipccl.kernels.cpp.interface import (
    CODES,
    GROUP_STAYS,
    INTO_SUMS,
    INTO_WORDS,
    SIGNATURES,
    TILE,
    Literals,
    Map,
    RowSegment,
    Scaling,
    Search,
    Segment,
)  # fmt: skip
from ds_zipccl.kernels.protocol import ScaledCodec
from ds_zipccl.kernels.self_test import proven
from ds_zipccl.lossy import Int, TacoFp8


class CppBackend:
    """Kernel backend over the library of csrc/cpu; see :class:`ds_zipccl.kernels.KernelBackend` and
    :class:`ds_zipccl.kernels.LossyBackend`.

    Tensors of a few MiB and more are spread over ``torch.get_num_threads()`` threads.

    Args:
        names: the functions that the library has.
    """

    #: Bits that count in the hashes of rows; fewer in tests, so that hashes collide.
    hash_mask = (1 << 64) - 1

    def __init__(self, library: ctypes.CDLL, names: Iterable[str] = SIGNATURES) -> None:
        self._functions = bind(library, SIGNATURES, names)

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function with a number of threads, which comes last. Tensors go as their addresses, dtypes as their numbers."""
        numbers = (value if type(value) is int else _number(value) for value in arguments)
        return self._functions[name](*numbers, torch.get_num_threads())  # type: ignore[no-any-return]

    def _decode(self, name: str, *arguments: Any) -> None:
        """Call a function that returns 0, or the FrameErrorCode of a payload that contradicts itself."""
        if status := self._call(name, *arguments):
            raise FrameError(status, "the payload contradicts itself")

    @property
    def level(self) -> str:
        """Instruction set in use: avx512, avx2, neon or scalar."""
        return str(self._functions["zipccl_level"]().decode())

    def force_level(self, name: str) -> None:
        """Use the named level from now on in this process ("auto": the best level); for tests.

        Raises:
            ValueError: there is no such level, or this CPU lacks it.
        """
        if self._functions["zipccl_force_level"](name.encode()):
            raise ValueError(f"level {name!r} is unknown or not supported by this CPU; in use: {self.level}")

    # --- words, and words against a base

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        array = _segments(segments, outs)
        self._call("zipccl_encode", array, len(array), segments[0].dtype, CODES[code], block)
        return [segment.bytes for segment in array]

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        self._decode("zipccl_decode", payload, payload.numel(), words, words.numel(), *_into(words, adds, False, block))

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        self._call("zipccl_add", words, words.numel(), sums, words.dtype, sums.dtype != words.dtype)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._call("zipccl_delta_encode", words, base, words.numel(), out, words.dtype, block)

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._decode("zipccl_delta_decode", payload, payload.numel(), base, words, words.numel(), words.dtype, block)

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        halves = (ctypes.c_uint64 * 2)()
        self._call("zipccl_hash", data, data.numel(), (ctypes.c_uint64 * 2)(*key), halves)
        return halves[0], halves[1]

    # --- rows

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        search = Search(
            data.data_ptr(), row_bytes, first, sources.numel(), sources.data_ptr(), table.data_ptr(), table.numel(),
            self.hash_mask,
        )  # fmt: skip
        return self._call("zipccl_find_rows", search)

    def encode_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, code: str, block: int, out: torch.Tensor,
        mantissa: int = 0,
    ) -> int:  # fmt: skip
        literals = _literals(words, width, head, rows)
        return self._call("zipccl_encode_rows", literals, words.dtype, CODES[code], mantissa, block, out)

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor,
        rounded: bool = False,
    ) -> None:  # fmt: skip
        literals = _literals(words, width, head, rows)
        self._decode("zipccl_decode_rows", payload, payload.numel(), literals, words.dtype, rounded, block)

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        self._call("zipccl_copy_rows", words, width * words.itemsize, rows, sources, rows.numel())

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        factors = tensors.empty(rows.numel(), torch.float32)
        self._call("zipccl_row_factors", words, words.dtype, width, rows, sources, rows.numel(), factors)
        return factors

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._call("zipccl_predict_rows", words, words.dtype, width, sources, factors, sources.numel(), out)

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
        row_map = Map(
            data.data_ptr(), count, repeats, bits, reach, literals.data_ptr(), repeated.data_ptr(), sources.data_ptr()
        )
        return (
            None if self._functions["zipccl_unpack_repeats"](ctypes.byref(row_map)) else (literals, repeated, sources)
        )

    # --- lossy codecs

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        self._call("zipccl_round_words", words, words.numel(), words.dtype, mantissa, out)

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        array, untrimmed = _segments(segments, outs), (ctypes.c_uint64 * len(segments))()
        self._call("zipccl_encode_rounded", array, len(array), segments[0].dtype, mantissa, block, untrimmed)
        return [(segment.bytes, size) for segment, size in zip(array, untrimmed, strict=True)]

    def decode_rounded(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, adds: torch.dtype | None = None
    ) -> None:
        self._decode("zipccl_decode", payload, payload.numel(), words, words.numel(), *_into(words, adds, True, block))

    def squared_error(self, words: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        """Return the sum of the squares of ``values`` - ``words``, and of those of ``words``, over the finite ``words``, added in fp64.

        Args:
            words, values: bfloat16, float16 or float32, flat, of one length.
        """
        sums = (ctypes.c_double * 2)()
        self._call("zipccl_squared_error", words, values, words.numel(), words.dtype, sums)
        return sums[0], sums[1]

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        coded = self._call("zipccl_scaled_encode", words, words.numel(), words.dtype, _scaling(codec), scales, codes)
        return None if coded == GROUP_STAYS else coded

    def decode_scaled(
        self,
        scales: torch.Tensor,
        codes: torch.Tensor,
        codec: ScaledCodec,
        words: torch.Tensor,
        adds: torch.dtype | None = None,
    ) -> None:
        self._decode("zipccl_scaled_decode", scales, codes, words.numel(), *_into(words, adds, _scaling(codec), words))

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
        numel, dtype, scaling = words.numel(), words.dtype, _scaling(codec)
        size = self._call("zipccl_scaled_encode_staged", words, numel, dtype, scaling, block, scales, codes, payload)
        return None if size == GROUP_STAYS else size

    def decode_scaled_staged(
        self,
        scales: torch.Tensor,
        payload: torch.Tensor,
        block: int,
        codec: ScaledCodec,
        words: torch.Tensor,
        adds: torch.dtype | None = None,
    ) -> None:
        """As :meth:`decode_scaled`, of codes with stage 2 in blocks of ``block`` codes."""
        given = scales, payload, payload.numel(), block, words.numel()
        self._decode("zipccl_scaled_decode_staged", *given, *_into(words, adds, _scaling(codec), words))

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        self._call("zipccl_scaled_project", words, words.numel(), words.dtype, _scaling(codec), out)

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        return bool(self._call("zipccl_zfp_encode", words, words.numel(), words.dtype, rate, codes))

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        self._call("zipccl_zfp_decode", codes, words.numel(), *_into(words, adds, rate, words))

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        self._call("zipccl_zfp_project", words, words.numel(), words.dtype, rate, out)

    def multiply(self, p: torch.Tensor, q: torch.Tensor, words: torch.Tensor, adds: torch.dtype | None = None) -> None:
        columns = _columns(q)
        given = p, columns, columns.shape[1], p.shape[1], len(p), len(q)
        self._call("zipccl_multiply", *given, *_into(words, adds, words))

    def orthonormalize(self, columns: torch.Tensor) -> None:
        rows, rank = columns.shape
        room = tensors.empty(rank * (rows + 1), torch.float64)
        self._functions["zipccl_orthonormalize"](columns.data_ptr(), rows, rank, room.data_ptr())


class RowFrames:
    """Payloads of the row frames of a segment, in order, without scaled rows, with literals of one code or raw: a call for each frame.

    Args:
        backend: the kernels.
        words: the segment, flat. This tensor and the next ones are used for as long as the object is.
        width: elements of a row.
        sources: int32, one for each row: of all rows, as ``find_rows`` writes them.
        table: as ``find_rows`` takes it.
        literals: int32, one for each row, contents undefined.
        nested: the first 16 bytes of the header of a frame of literals that are not raw.
        code, block: of such literals.
        raw_below: literals of fewer bytes are raw.
        worth: share of the bytes of its repeated rows that a row frame saves, at least.
        mantissa: bits to which literals are rounded, 0: they stay as they are.
    """

    def __init__(
        self, backend: CppBackend, words: torch.Tensor, width: int, sources: torch.Tensor, table: torch.Tensor, literals: torch.Tensor,
        nested: bytes, code: str, block: int, raw_below: int, worth: float, mantissa: int,
    ) -> None:  # fmt: skip
        self._backend, self._held = backend, (words, sources, table, literals)
        search = Search(
            words.data_ptr(), width * words.itemsize, 0, 0, sources.data_ptr(), table.data_ptr(), table.numel(), backend.hash_mask
        )  # fmt: skip
        self._state = RowSegment(
            search, 0, width, words.itemsize, raw_below, worth, literals.data_ptr(), (ctypes.c_uint8 * 16)(*nested),
            DTYPE_IDS[words.dtype], CODES.get(code, 0), block, mantissa,
        )  # fmt: skip

    def payload(self, begin: int, numel: int, out: torch.Tensor, known: int, repeats: int) -> tuple[int, int, int]:
        """Write the payload of the frame of ``numel`` elements from ``begin`` on to ``out``; blocks.

        Args:
            out: uint8, the bound of an ordinary payload, or more.
            known: rows of which ``sources`` are known.
            repeats: rows among them that repeat earlier ones.

        Returns:
            Bytes of the payload, 0 where a row frame is not worth while; then ``known`` and ``repeats`` from now on.
        """
        state = self._state
        state.search.first, state.repeats = known, repeats
        size = self._backend._call("zipccl_row_frame", state, begin, numel, out, out.numel())
        return size, state.search.first, state.repeats


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, torch.dtype):
        return DTYPE_IDS[value]
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value


def _into(words: torch.Tensor, adds: torch.dtype | None, *more: Any) -> tuple[Any, ...]:
    """Return the last arguments of a function that writes ``words``, or adds words of ``adds`` to them: the dtype of the words, ``more``,
    and ZipcclInto of csrc/cpu/interface.h."""
    return (words.dtype, *more, INTO_WORDS) if adds is None else (adds, *more, INTO_SUMS + (words.dtype != adds))


def _segments(segments: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> ctypes.Array[Segment]:
    pairs = zip(segments, outs, strict=True)
    return (Segment * len(segments))(*(Segment(w.data_ptr(), w.numel(), out.data_ptr(), 0) for w, out in pairs))


def _literals(words: torch.Tensor, width: int, head: int, rows: torch.Tensor) -> Literals:
    return Literals(words.data_ptr(), words.numel(), width, head, rows.data_ptr(), rows.numel())


def _scaling(codec: ScaledCodec) -> Scaling:
    return Scaling(isinstance(codec, Int), codec.bits, codec.group.bit_length() - 1, codec.hadamard)


def _columns(q: torch.Tensor) -> torch.Tensor:
    """The transpose of ``q``, its rows as long as kernels read them."""
    size, rank = q.shape
    stride = -(-size // TILE) * TILE
    columns = tensors.filled(rank * stride, 0.0, torch.float32).view(rank, stride)
    columns[:, :size].copy_(q.t())
    return columns


def load() -> CppBackend:
    """Return the backend; builds its library (seconds) unless the cache has it.

    Raises:
        BuildError: there is no compiler, or it failed.
        SelfTestError: the kernels are wrong on this machine.
    """
    path = build.shipped() or build.build(build.CPU)
    return proven(lambda: CppBackend(ctypes.CDLL(str(path))), "native", path.read_bytes())
