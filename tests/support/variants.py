"""The kernels under test: each route, and the native one at each of its instruction sets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import emulation
import torch

from ds_zipccl import kernels
from ds_zipccl.kernels import cuda_launchers


class OnDevice:
    """A CUDA route for CPU tensors, so that the tests of every route are its tests too."""

    def __init__(self, route: kernels.Route) -> None:
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

    def region_hash(self, data: torch.Tensor) -> tuple[int, int]:
        return self.route.region_hash(data.cuda())


#: The CUDA kernels, emulated and, on a machine with a GPU, on the GPU: routes for tests alone.
FOR_TESTS: dict[str, Callable[[], kernels.Route]] = {"emulated": emulation.load}
if torch.cuda.is_available():
    FOR_TESTS["cuda-native"] = lambda: OnDevice(cuda_launchers.load_native())
    FOR_TESTS["cuda-nvrtc"] = lambda: OnDevice(cuda_launchers.load_nvrtc())
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


ALL = (
    Variant("native", "avx512"),
    Variant("native", "avx2"),
    Variant("native", "scalar"),
    Variant("numba"),
    *map(Variant, FOR_TESTS),
)


def usable() -> list[Variant]:
    """Return the variants that can run here, for tests that compare them with each other."""
    return [variant for variant in ALL if not variant.why_not()]
