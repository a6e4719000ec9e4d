"""The kernels under test: each route, and the native one at each of its instruction sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import emulation

from ds_zipccl import kernels

# The CUDA kernels, emulated: nothing but tests asks for this route.
kernels.ROUTES["cpu"].setdefault("emulated", emulation.load)


@dataclass(frozen=True)
class Variant:
    """A route by name and, for the native one, the level to force."""

    route: str
    level: str = ""

    def __str__(self) -> str:
        return f"{self.route}-{self.level}" if self.level else self.route

    def why_not(self) -> str:
        """Why this variant cannot run here; "" if it can."""
        reason = kernels.why()[self.route]
        if not reason and self.level:
            try:
                with self.in_use():
                    pass
            except ValueError as error:
                reason = str(error)
        return reason

    @contextlib.contextmanager
    def in_use(self) -> Iterator[str]:
        """The route's name, while calls of it go to this variant."""
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
    Variant("emulated"),
)


def usable() -> list[Variant]:
    """What can run here, for tests that compare the variants with each other."""
    return [variant for variant in ALL if not variant.why_not()]
