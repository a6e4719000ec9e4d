"""The kernels under test: each route, and the native one at each of its instruction sets."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import emulation
import pytest
import torch

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda import load
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.protocol import ScaledCodec


class OnDevice:
    """A CUDA route for CPU tensors, so that the tests of every route are its tests too."""

    def __init__(self, route: CudaBackend) -> None:
        self.route = route

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        there = [torch.empty_like(out, device="cuda") for out in outs]
        sizes = self.route.encode([segment.cuda() for segment in segments], code, block, there)
        for size, out, found in zip(sizes, outs, there, strict=True):
            out[:size].copy_(found[:size])
        return sizes

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        there = torch.empty_like(words, device="cuda")
        self.route.decode(payload.cuda(), block, there)
        words.copy_(there)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        there = sums.cuda()
        self.route.decode_add(payload.cuda(), block, dtype, there)
        sums.copy_(there)

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        there = sums.cuda()
        self.route.add(words.cuda(), there)
        sums.copy_(there)

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        there = torch.empty_like(out, device="cuda")
        size = self.route.encode_delta(words.cuda(), base.cuda(), block, there)
        out[:size].copy_(there[:size])
        return size

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        there = base.cuda()
        self.route.decode_delta(payload.cuda(), there, block, there)
        words.copy_(there)

    def round_words(self, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        there = torch.empty_like(out, device="cuda")
        self.route.round_words(words.cuda(), mantissa, there)
        out.copy_(there)

    def encode_rounded(
        self, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> list[tuple[int, int]]:
        there = [torch.empty_like(out, device="cuda") for out in outs]
        sizes = self.route.encode_rounded([segment.cuda() for segment in segments], mantissa, block, there)
        for (size, _), out, found in zip(sizes, outs, there, strict=True):
            out[:size].copy_(found[:size])
        return sizes

    def decode_rounded(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        there = torch.empty_like(words, device="cuda")
        self.route.decode_rounded(payload.cuda(), block, there)
        words.copy_(there)

    def decode_rounded_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        there = sums.cuda()
        self.route.decode_rounded_add(payload.cuda(), block, dtype, there)
        sums.copy_(there)

    def encode_rounded_rows(
        self,
        words: torch.Tensor,
        width: int,
        head: int,
        rows: torch.Tensor,
        mantissa: int,
        block: int,
        out: torch.Tensor,
    ) -> int:
        there = torch.empty_like(out, device="cuda")
        size = self.route.encode_rounded_rows(words.cuda(), width, head, rows.cuda(), mantissa, block, there)
        out[:size].copy_(there[:size])
        return size

    def decode_rounded_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        there = words.cuda()
        self.route.decode_rounded_rows(payload.cuda(), block, there, width, head, rows.cuda())
        words.copy_(there)

    def encode_scaled(
        self, words: torch.Tensor, codec: ScaledCodec, scales: torch.Tensor, codes: torch.Tensor
    ) -> int | None:
        there = [torch.empty_like(out, device="cuda") for out in (scales, codes)]
        coded = self.route.encode_scaled(words.cuda(), codec, *there)
        scales.copy_(there[0])
        codes.copy_(there[1])
        return coded

    def decode_scaled(self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor) -> None:
        there = torch.empty_like(words, device="cuda")
        self.route.decode_scaled(scales.cuda(), codes.cuda(), codec, there)
        words.copy_(there)

    def decode_scaled_add(
        self, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        there = sums.cuda()
        self.route.decode_scaled_add(scales.cuda(), codes.cuda(), codec, dtype, there)
        sums.copy_(there)

    def project_scaled(self, words: torch.Tensor, codec: ScaledCodec, out: torch.Tensor) -> None:
        there = torch.empty_like(out, device="cuda")
        self.route.project_scaled(words.cuda(), codec, there)
        out.copy_(there)

    def encode_zfp(self, words: torch.Tensor, rate: int, codes: torch.Tensor) -> bool:
        there = torch.empty_like(codes, device="cuda")
        finite = self.route.encode_zfp(words.cuda(), rate, there)
        codes.copy_(there)
        return finite

    def decode_zfp(self, codes: torch.Tensor, rate: int, words: torch.Tensor) -> None:
        there = torch.empty_like(words, device="cuda")
        self.route.decode_zfp(codes.cuda(), rate, there)
        words.copy_(there)

    def decode_zfp_add(self, codes: torch.Tensor, rate: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        there = sums.cuda()
        self.route.decode_zfp_add(codes.cuda(), rate, dtype, there)
        sums.copy_(there)

    def project_zfp(self, words: torch.Tensor, rate: int, out: torch.Tensor) -> None:
        there = torch.empty_like(out, device="cuda")
        self.route.project_zfp(words.cuda(), rate, there)
        out.copy_(there)

    def region_hash(self, data: torch.Tensor, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        return self.route.region_hash(data.cuda(), key)

    def find_rows(
        self, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
    ) -> int:
        names, entries = torch.empty_like(sources, device="cuda"), table.cuda()
        repeats = self.route.find_rows(data.cuda(), row_bytes, first, names, entries)
        sources.copy_(names)
        table.copy_(entries)
        return repeats

    def row_factors(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return self.route.row_factors(words.cuda(), width, rows.cuda(), sources.cuda()).cpu()

    def predict_rows(
        self, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        there = torch.empty_like(out, device="cuda")
        self.route.predict_rows(words.cuda(), width, sources.cuda(), factors.cuda(), there)
        out.copy_(there)

    def encode_rows(
        self, words: torch.Tensor, width: int, head: int, rows: torch.Tensor, code: str, block: int, out: torch.Tensor
    ) -> int:
        there = torch.empty_like(out, device="cuda")
        size = self.route.encode_rows(words.cuda(), width, head, rows.cuda(), code, block, there)
        out[:size].copy_(there[:size])
        return size

    def decode_rows(
        self, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
    ) -> None:
        there = words.cuda()
        self.route.decode_rows(payload.cuda(), block, there, width, head, rows.cuda())
        words.copy_(there)

    def copy_rows(self, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        there = words.cuda()
        self.route.copy_rows(there, width, rows.cuda(), sources.cuda())
        words.copy_(there)


#: The CUDA kernels, emulated and, on a machine with a GPU, on the GPU: routes for tests alone.
FOR_TESTS: dict[str, Callable[[], kernels.KernelBackend]] = {"emulated": emulation.load}
if torch.cuda.is_available():
    FOR_TESTS["cuda-native"] = lambda: OnDevice(load.load_native())
    FOR_TESTS["cuda-cupy"] = lambda: OnDevice(load.load_cupy())
kernels.ROUTES["cpu"] |= FOR_TESTS


@dataclass(frozen=True)
class Variant:
    """A route by name and, for the native one, the level to force."""

    route: str
    level: str = ""

    def __str__(self) -> str:
        return f"{self.route}-{self.level}" if self.level else self.route

    def why_not(self) -> str:
        """Return why this variant cannot run here; "" if it can."""
        reason = kernels.why().get(self.route, "there is no GPU")
        if not reason and self.level:
            try:
                with self.in_use():
                    pass
            except ValueError as error:
                reason = str(error)
        return reason

    @contextlib.contextmanager
    def in_use(self) -> Iterator[str]:
        """Give the name of the route, whose calls go to this variant inside the context."""
        if not self.level:
            yield self.route
            return
        native = kernels.route(self.route)
        native.force_level(self.level)
        try:
            yield self.route
        finally:
            native.force_level("auto")


#: Machine, as :func:`platform.machine` names it -> levels of the native route beside the portable one, best first.
LEVELS = {"x86_64": ("avx512", "avx2"), "aarch64": ("neon",)}
PORTABLE = "scalar"
#: The level with the shortest registers that this machine may have, for tests that take one.
SHORTEST = (PORTABLE, *LEVELS.get(platform.machine(), ()))[-1]

CPP = tuple(Variant("native", level) for level in (*LEVELS.get(platform.machine(), ()), PORTABLE))
#: Those with row frames and lossy codecs; low-rank frames have the first of these alone.
COMPILED = (*CPP, *map(Variant, FOR_TESTS))
ALL = (*CPP, Variant("numba"), *map(Variant, FOR_TESTS))
#: One of each route that has no kernels of several instruction sets to compare.
ONCE = (Variant("native"), *map(Variant, FOR_TESTS))


def usable(kinds: Sequence[Variant] = ALL) -> list[Variant]:
    """Return the variants that can run here, for tests that compare them with each other."""
    return [variant for variant in kinds if not variant.why_not()]


def each(kinds: Sequence[Variant]) -> Any:
    """Return a fixture: the name of a CPU route, once for each of ``kinds``; skips, with the reason, what cannot run here. A file whose
    codec has other routes than ``ALL`` defines its ``route`` by this."""

    @pytest.fixture(params=kinds, ids=str)
    def route(request: pytest.FixtureRequest) -> Iterator[str]:
        reason = request.param.why_not()
        if reason:
            pytest.skip(f"{request.param} is not usable here: {reason}")
        with request.param.in_use() as name:
            yield name

    return route
