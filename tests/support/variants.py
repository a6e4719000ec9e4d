"""The kernels under test: each route, and the native one at each of its instruction sets."""

from __future__ import annotations

import contextlib
import inspect
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import emulation
import pytest
import torch
from torch.utils import _pytree as pytree

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda import load
from ds_zipccl.kernels.cuda.backend import CudaBackend

#: Arguments that are written -> the methods of a route that write them.
_WRITERS: dict[tuple[str, ...], str] = {
    ("outs",): "encode encode_rounded",
    ("out",): "encode_delta round_words project_scaled project_zfp predict_rows encode_rows",
    ("words",): "decode decode_rounded decode_scaled decode_zfp decode_rows copy_rows",
    ("sums",): "add",
    ("codes",): "encode_zfp",
    ("scales", "codes"): "encode_scaled",
    ("sources", "table"): "find_rows",
    (): "region_hash row_factors",
}
#: Method of a route -> the arguments that it writes.
WRITTEN = {method: written for written, methods in _WRITERS.items() for method in methods.split()}


class OnDevice:
    """A CUDA route for CPU tensors, so that the tests of every route are its tests too."""

    def __init__(self, route: CudaBackend) -> None:
        self.route = route

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The method of the route, which gets copies of all tensors on the GPU; what it writes there comes back."""
        if name not in WRITTEN:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        method = getattr(self.route, name)
        signature = inspect.signature(method)

        def call(*arguments: Any, **named: Any) -> Any:
            here = signature.bind(*arguments, **named).arguments
            there = {one: pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, value) for one, value in here.items()}
            result = method(**there)
            for written in WRITTEN[name]:
                for out, found in zip(
                    pytree.tree_leaves(here[written]), pytree.tree_leaves(there[written]), strict=True
                ):
                    out.copy_(found)
            return result.cpu() if isinstance(result, torch.Tensor) else result

        return call

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """In place of the base."""
        there = base.cuda()
        self.route.decode_delta(payload.cuda(), there, block, there)
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
        reason = kernels.why(only=self.route).get(self.route, "there is no GPU")
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

CPP = tuple(Variant("native", level) for level in (*LEVELS.get(platform.machine(), ()), PORTABLE))
#: Those with differences, row frames and lossy codecs; low-rank frames have the first of these alone.
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
