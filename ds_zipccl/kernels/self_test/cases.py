"""Every kernel of a backend on the inputs of the self-test.

The truth of encoders is a digest for each case, committed beside this file: the formats are deterministic, so that all backends have the
same ones. That of decoders is the words, that of sums is torch.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from ds_zipccl import tensors
from ds_zipccl.frame import CHUNK_BLOCKS, FrameError
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.kernels.protocol import (
    DeltaBackend,
    KernelBackend,
    LossyBackend,
    RowBackend,
    ScaledCodec,
    group_bytes,
    scale_dtype,
)
from ds_zipccl.kernels.self_test.inputs import (
    BLOCK,
    FLOATS,
    NAMES,
    NUMEL,
    SUMMED,
    Bytes,
    Input,
    Outputs,
    bound,
    inputs,
    large,
    raw,
)
from ds_zipccl.lossy import Int, TacoFp8

#: Kernel -> the crc32 of each of its cases.
Digests = Mapping[str, Sequence[int]]
#: Codes of the exponent encoders, with blocks.
CODES = {"cascade": BLOCK, "wide": 256}
_SCALED: tuple[ScaledCodec, ...] = (TacoFp8(128, True), Int(8, 128))
#: Number of the input whose payload is damaged: incompressible, with a table in each chunk.
REFUSED = 5
FINITE = ("(normal)", "(zeros)", "(one fill word)")
_MANTISSA, _RATE, _WIDTH = 3, 8, 33


class SelfTestError(RuntimeError):
    """A kernel gave something else than it must; the message has the kernel, its input, and the first byte that is wrong."""


class Cases:
    """The cases of a backend.

    Args:
        device: of the tensors that the backend takes.
        short: one input of each kernel.
        wanted: the digests; None: they are collected in :attr:`digests`.
        witness: another backend, for CPU tensors, that is asked for the bytes where a digest differs.
    """

    def __init__(
        self, backend: KernelBackend, device: torch.device, short: bool, wanted: Digests | None, witness: KernelBackend | None = None
    ) -> None:  # fmt: skip
        self.backend, self.device, self.short, self.wanted, self.witness = backend, device, short, wanted, witness
        self.digests: dict[str, list[int]] = {}
        self.kept: dict[tuple[str, int], Bytes] | None = None
        #: Cases so far.
        self.count = 0

    def run(self) -> None:
        """Run all cases.

        Raises:
            SelfTestError: a case is wrong.
        """
        for dtype in FLOATS:
            for code in CODES:
                self.exponent(dtype, code)
        if hasattr(self.backend, "encode_delta"):
            for dtype in (*SUMMED, torch.uint8):
                self.delta(dtype)
        self.hashes()
        for dtype in SUMMED:
            self.sums(dtype)
            if hasattr(self.backend, "find_rows"):
                self.rows(dtype)
            if hasattr(self.backend, "encode_rounded"):
                self.rounded(dtype)
                for codec in _SCALED:
                    self.scaled(dtype, codec)
                self.zfp(dtype)
        if hasattr(self.backend, "orthonormalize"):
            self.low_rank()

    # --- comparing

    def compare(
        self, kernel: str, given: Sequence[Input], out: Outputs | Sequence[Bytes], wanted: Sequence[Bytes] | None = None
    ) -> None:  # fmt: skip
        """Accept the outputs of a kernel's cases, which have numbers and labels; without ``wanted`` by their digests."""
        found = self.guarded(kernel, given, out) if isinstance(out, Outputs) else out
        for one, got, right in zip(given, found, wanted or itertools.repeat(None, len(given)), strict=True):
            self.count += 1
            digest = zlib.crc32(got.tobytes())
            if self.kept is not None:
                self.kept[kernel, one.number] = got
            if right is None and self.wanted is None:
                self.digests.setdefault(kernel, []).append(digest)
            elif right is None and self.wanted is not None and self.wanted[kernel][one.number] != digest:
                right = self._witnessed(kernel, one.number)
                if right is None:
                    said = f"{len(got)} bytes with digest {digest:08x}, wanted {self.wanted[kernel][one.number]:08x}"
                    raise SelfTestError(f"{kernel}, {one.label}: got {said}")
            if right is not None and not np.array_equal(got, right):
                raise SelfTestError(f"{kernel}, {one.label}: {_difference(got, right)}")

    def guarded(self, kernel: str, given: Sequence[Input], out: Outputs) -> list[Bytes]:
        """Return the bytes of the outputs; nothing outside of them may have been written."""
        found, beside = out.read()
        if beside is not None:
            raise SelfTestError(f"{kernel}, {given[beside].label}: bytes outside of the output were written")
        return found

    def _witnessed(self, kernel: str, number: int) -> Bytes | None:
        """Return the output that the witness gives, if it has the right digest."""
        if self.witness is None or self.wanted is None:
            return None
        other = Cases(self.witness, tensors.CPU, self.short, None)
        other.kept = {}
        other.run()
        found = other.kept.get((kernel, number))
        return found if found is not None and zlib.crc32(found.tobytes()) == self.wanted[kernel][number] else None

    def refuses(self, kernel: str, decode: Callable[[torch.Tensor], object], payload: torch.Tensor) -> None:
        """Demand that damaged payloads are refused; ``payload`` is one of several chunks."""
        index, mode = payload.clone(), payload.clone()
        index[:1] += 1
        damaged = {"no byte": payload[:0], "16 bytes less": payload[:-16], "a wrong index": index}
        if not int(payload[3]) & 0x80:  # the first chunk is no LIST, but has a table
            mode[16 * int(payload[0]) + CHUNK_BLOCKS + 1] |= 0xE0  # the highest byte of the first block's entry
            damaged["a wrong mode"] = mode
        for damage, given in damaged.items():
            self.count += 1
            try:
                decode(given)
            except FrameError:
                continue
            raise SelfTestError(f"{kernel}, {NUMEL:,} words: a payload with {damage} was not refused")

    # --- families of kernels

    def given(self, dtype: torch.dtype) -> list[Input]:
        return inputs(dtype, self.device, self.short)

    def exponent(self, dtype: torch.dtype, code: str) -> None:
        block, kernel = CODES[code], f"encode_{NAMES[dtype]}_{code}"

        def encode(given: Sequence[Input], outs: list[torch.Tensor]) -> list[int]:
            return self.backend.encode([one.words for one in given], code, block, outs)

        def decode(one: Input, payload: torch.Tensor, words: torch.Tensor) -> None:
            self.backend.decode(payload, block, words)

        several = dtype == torch.bfloat16 and code == "cascade" and not self.short
        for given in (self.given(dtype), *([large(self.device)] if several else [])):
            payloads = self._encode(kernel, given, block, encode)
            self._decode(f"decode_{NAMES[dtype]}", given, payloads, decode)

    def _encode(
        self, kernel: str, given: Sequence[Input],  block: int,
        encode: Callable[[Sequence[Input], list[torch.Tensor]], list[int]],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Compare the payloads of an encoder, and return them."""
        out = Outputs([bound(one.words.numel(), one.words.itemsize, block) for one in given], self.device)
        sizes = encode(given, out.views())
        found = self.guarded(kernel, given, out)
        payloads = [view[:size] for view, size in zip(out.views(), sizes, strict=True)]
        self.compare(kernel, given, [one[:size] for one, size in zip(found, sizes, strict=True)])
        return payloads

    def _decode(
        self, kernel: str, given: Sequence[Input],  payloads: Sequence[torch.Tensor],
        decode: Callable[[Input, torch.Tensor, torch.Tensor], None], wanted: Sequence[Bytes] | None = None,
    ) -> None:  # fmt: skip
        """Compare the words of a decoder with ``wanted``, else with those of the inputs; it must refuse damaged payloads."""
        dtype = given[0].words.dtype
        out = Outputs([one.words.nbytes for one in given], self.device, [one.offset * dtype.itemsize for one in given])
        for one, payload, words in zip(given, payloads, out.views(dtype), strict=True):
            try:
                decode(one, payload, words)
            except FrameError as error:
                raise SelfTestError(f"{kernel}, {one.label}: a right payload was refused: {error}") from None
        self.compare(kernel, given, out, wanted or [raw(one.words) for one in given])
        at = min(REFUSED, len(given) - 1)
        if given[at].words.numel() == NUMEL:
            self.refuses(kernel, lambda damaged: decode(given[at], damaged, out.views(dtype)[at]), payloads[at])

    def sums(self, dtype: torch.dtype) -> None:
        """Sums of payloads, and of words, in their dtype and in float32; NaNs are equal, except that one of bfloat16 is 0x7fc0."""
        given = self.given(dtype)[::2]
        sizes = [bound(one.words.numel(), dtype.itemsize, BLOCK) for one in given]
        room = [tensors.empty(size, torch.uint8, self.device) for size in sizes]
        sizes = self.backend.encode([one.words for one in given], "cascade", BLOCK, room)
        for into in {dtype: 0, torch.float32: 1}:
            right = [one.base.cpu().to(into, copy=True) for one in given]
            for one, sums in zip(given, right, strict=True):
                plain_sums.add(one.words.cpu(), sums)
            for kernel in ("decode_add", "add"):
                out = Outputs([one.words.numel() * into.itemsize for one in given], self.device)
                for one, payload, size, sums in zip(given, room, sizes, out.views(into), strict=True):
                    sums.copy_(one.base.to(into))
                    if kernel == "add":
                        self.backend.add(one.words, sums)
                    else:
                        self.backend.decode(payload[:size], BLOCK, sums, dtype)
                name = f"{kernel}_{NAMES[dtype]} into {NAMES[into]}"
                got = self.guarded(name, given, out)
                views = [tensors.of_buffer(one).view(into) if len(one) else tensors.empty(0, into) for one in got]
                self.compare(name, given, [settled(one) for one in views], [settled(one) for one in right])

    def delta(self, dtype: torch.dtype) -> None:
        backend, given = cast(DeltaBackend, self.backend), self.given(dtype)

        def encode(given: Sequence[Input], outs: list[torch.Tensor]) -> list[int]:
            return [backend.encode_delta(one.words, one.base, BLOCK, out) for one, out in zip(given, outs, strict=True)]

        def decode(one: Input, payload: torch.Tensor, words: torch.Tensor) -> None:
            base = words.copy_(one.base) if one.offset else one.base  # both places that the protocol allows
            backend.decode_delta(payload, base, BLOCK, words)

        payloads = self._encode(f"encode_{NAMES[dtype]}_delta", given, BLOCK, encode)
        self._decode(f"decode_{NAMES[dtype]}_delta", given, payloads, decode)

    def hashes(self) -> None:
        given = self.given(torch.uint8)
        found = [self.backend.region_hash(one.words, (one.number, 1 << 63)) for one in given]
        self.compare("hash", given, [np.frombuffer(struct.pack("<2Q", *one), np.uint8) for one in found])

    # --- rows and lossy codecs, of the backends that have them

    def rows(self, dtype: torch.dtype) -> None:
        """Rows of 33 words, of which each third one is repeated twice; then the same rows, each a multiple of another."""
        backend, given, name = cast(RowBackend, self.backend), self.given(dtype)[:1], NAMES[dtype]
        label = [given[0]._replace(label=f"rows of {_WIDTH} words")]
        count = NUMEL // _WIDTH
        words = given[0].words[: count * _WIDTH + 5].clone()
        matrix = words[: count * _WIDTH].view(torch.uint8).view(count, -1)
        in_order = bytearray(np.arange(count, dtype=np.int32).tobytes())
        numbers = tensors.of_buffer(in_order).view(torch.int32).to(self.device)
        matrix.copy_(matrix[(numbers // 3 * 3).long()])
        sources, table = (tensors.filled(size, 0, torch.int32, self.device) for size in (count, 1 << 10))
        backend.find_rows(words.view(torch.uint8), matrix.shape[1], 0, sources, table)
        self.compare(f"find_rows of {name}", label, [raw(sources)])
        own = sources == numbers
        first, repeats = numbers[own], numbers[~own]
        out = Outputs([bound(words.numel(), words.itemsize, BLOCK)], self.device)
        size = backend.encode_rows(words, _WIDTH, 0, first, "cascade", BLOCK, out.views()[0])
        payload = out.views()[0][:size]
        self.compare(f"encode_rows of {name}", label, [raw(payload)])
        decoded = Outputs([words.nbytes], self.device)
        (target,) = decoded.views(dtype)
        backend.decode_rows(payload, BLOCK, target, _WIDTH, 0, first)
        backend.copy_rows(target, _WIDTH, repeats, sources[~own])
        self.compare(f"decode_rows or copy_rows of {name}", label, decoded, [raw(words)])
        if hasattr(backend, "encode_rounded"):
            size = backend.encode_rows(words, _WIDTH, 0, first, "cascade", BLOCK, out.views()[0], _MANTISSA)
            self.compare(f"encode_rows of {name}, rounded", label, [raw(out.views()[0][:size])])
            backend.decode_rows(out.views()[0][:size], BLOCK, target, _WIDTH, 0, first, rounded=dtype != torch.float32)
            self.compare(f"decode_rows of {name}, rounded", label, decoded)
        others = first.flip(0).contiguous()
        factors = backend.row_factors(words, _WIDTH, first, others)
        self.compare(f"row_sums_{name}", label, [raw(factors)])
        usable = factors != 0
        predicted = Outputs([int(usable.sum()) * matrix.shape[1]], self.device)
        backend.predict_rows(words, _WIDTH, others[usable], factors[usable], predicted.views(dtype)[0])
        self.compare(f"predict_rows_{name}", label, predicted)

    def rounded(self, dtype: torch.dtype) -> None:
        backend, name = cast(LossyBackend, self.backend), NAMES[dtype]
        given = self.given(dtype)
        words = Outputs([one.words.nbytes for one in given], self.device)
        for one, place in zip(given, words.views(dtype), strict=True):
            backend.round_words(one.words, _MANTISSA, place)
        self.compare(f"round_{name}", given, words)

        def encode(given: Sequence[Input], outs: list[torch.Tensor]) -> list[int]:
            return [size for size, _ in backend.encode_rounded([one.words for one in given], _MANTISSA, BLOCK, outs)]

        def decode(one: Input, payload: torch.Tensor, words: torch.Tensor) -> None:
            (self.backend.decode if dtype == torch.float32 else backend.decode_rounded)(payload, BLOCK, words)

        payloads = self._encode(f"encode_{name}_rounded", given, BLOCK, encode)
        self._decode(f"decode_{name}_rounded", given, payloads, decode, words.read()[0])
        if dtype != torch.float32:
            self._added(
                f"decode_{name}_rounded", given[::4], words.views(dtype)[::4],
                lambda at, sums: backend.decode_rounded(payloads[4 * at], BLOCK, sums, dtype),
            )  # fmt: skip

    def scaled(self, dtype: torch.dtype, codec: ScaledCodec) -> None:
        backend, name = cast(LossyBackend, self.backend), f"{NAMES[dtype]} ({codec})"
        given = self._finite(dtype)
        groups = [-(-one.words.numel() // codec.group) for one in given]
        scales = Outputs([count * scale_dtype(codec).itemsize for count in groups], self.device)
        codes = Outputs([count * group_bytes(codec) for count in groups], self.device)
        decoded, projected = (Outputs([one.words.nbytes for one in given], self.device) for _ in range(2))
        places = scales.views(scale_dtype(codec)), codes.views(), decoded.views(dtype), projected.views(dtype)
        for one, some, room, words, other in zip(given, *places, strict=True):
            coded = backend.encode_scaled(one.words, codec, some, room)
            if coded is None:
                raise SelfTestError(f"scaled_encode_{name}, {one.label}: no codes")
            room[coded * group_bytes(codec) :] = 0
            backend.decode_scaled(some, room[: coded * group_bytes(codec)], codec, words)
            backend.project_scaled(one.words, codec, other)
        for what, out in {"encode": scales, "encode, codes": codes, "project": projected}.items():
            self.compare(f"scaled_{what}_{name}", given, out)
        self.compare(f"scaled_decode_{name}", given, decoded, projected.read()[0])
        coded_by = [
            (some, room[: int((some != 0).sum()) * group_bytes(codec)]) for some, room in zip(*places[:2], strict=True)
        ]
        self._added(
            f"scaled_decode_{name}", given, decoded.views(dtype),
            lambda at, sums: backend.decode_scaled(*coded_by[at], codec, sums, dtype),
        )  # fmt: skip

    def zfp(self, dtype: torch.dtype) -> None:
        backend, name = cast(LossyBackend, self.backend), NAMES[dtype]
        given = self._finite(dtype)
        codes = Outputs([8 * -(-4 * _RATE * -(-one.words.numel() // 4) // 64) for one in given], self.device)
        decoded, projected = (Outputs([one.words.nbytes for one in given], self.device) for _ in range(2))
        places = codes.views(), decoded.views(dtype), projected.views(dtype)
        for one, room, words, other in zip(given, *places, strict=True):
            if not backend.encode_zfp(one.words, _RATE, room):
                raise SelfTestError(f"zfp_encode_{name}, {one.label}: no codes")
            backend.decode_zfp(room, _RATE, words)
            backend.project_zfp(one.words, _RATE, other)
        for what, out in {"encode": codes, "project": projected}.items():
            self.compare(f"zfp_{what}_{name}", given, out)
        self.compare(f"zfp_decode_{name}", given, decoded, projected.read()[0])
        rooms = codes.views()
        self._added(
            f"zfp_decode_{name}",
            given,
            decoded.views(dtype),
            lambda at, sums: backend.decode_zfp(rooms[at], _RATE, sums, dtype),
        )

    def low_rank(self) -> None:
        """Products of factors, and orthonormal columns."""
        backend = cast(LossyBackend, self.backend)
        one = self._finite(torch.float32)[0]
        one = one._replace(label="factors of 130 and 41 rows, of 6 columns")
        p, q = (one.words[: rows * 6].view(rows, 6).clone() for rows in (130, 41))
        for dtype in SUMMED:
            words = Outputs([130 * 41 * dtype.itemsize], self.device)
            backend.multiply(p, q, words.views(dtype)[0])
            self.compare(f"multiply_{NAMES[dtype]}", [one], words)
            self._added(
                f"multiply_{NAMES[dtype]}",
                [one],
                words.views(dtype),
                partial(lambda dtype, _, sums: backend.multiply(p, q, sums, dtype), dtype),
            )
        backend.orthonormalize(p)
        self.compare("orthonormalize", [one], [raw(p.view(-1))])

    def _added(
        self, kernel: str, given: Sequence[Input], values: Sequence[torch.Tensor], add: Callable[[int, torch.Tensor], None]
    ) -> None:  # fmt: skip
        """Compare sums of ``values``, of each case, with themselves; ``add`` adds those of a case, by its place."""
        for place, (one, words) in enumerate(zip(given, values, strict=True)):
            sums, right = words.clone(), words.cpu().clone()
            add(place, sums)
            plain_sums.add(words.cpu(), right)
            self.compare(f"{kernel} added", [one], [settled(sums.cpu())], [settled(right)])

    def _finite(self, dtype: torch.dtype) -> list[Input]:
        """Finite inputs."""
        given = [one for one in inputs(dtype, self.device) if any(text in one.label for text in FINITE)]
        return [one._replace(number=number) for number, one in enumerate(given[: 1 if self.short else None])]


def settled(sums: torch.Tensor) -> Bytes:
    return raw(sums if sums.dtype == torch.bfloat16 else sums.masked_fill(sums.isnan(), torch.nan))


def _difference(got: Bytes, wanted: Bytes) -> str:
    if len(got) != len(wanted):
        return f"got {len(got)} bytes, wanted {len(wanted)}"
    at = int(np.flatnonzero(got != wanted)[0])
    return f"byte {at} is 0x{got[at]:02x}, wanted 0x{wanted[at]:02x}"
