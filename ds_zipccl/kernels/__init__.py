"""Kernels of the exponent codec: one table, device type -> routes in order of preference.

A route turns words into payload bytes and back (FORMAT.md section 2). All routes give the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ds_zipccl.kernels import cuda_launchers, native
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.kernels.numba import route as numba_route


class Route(Protocol):
    """All calls block and release the interpreter lock while they work. Words are flat contiguous tensors of the route's device."""

    def encode(
        self, segments: Sequence[torch.Tensor], code: str, block: int, outs: Sequence[torch.Tensor]
    ) -> list[int]:
        """Encode each segment (at least one, all of one dtype) with ``code``, "cascade" or "wide", into its ``outs``
        (uint8, payload_bound() bytes each); returns the payloads' bytes."""
        ...

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """Decode ``payload`` (uint8) into ``words``; raises FrameError."""
        ...

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the words of ``dtype`` in ``payload`` to ``sums``, of the same dtype (each sum is rounded to it) or float32;
        raises FrameError."""
        ...

    def add(self, words: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``words`` to ``sums``, with the dtypes of :meth:`decode_add`. On a CPU the sums are made by this thread or by threads that it
        starts: they flush denormals where this thread does."""
        ...

    def encode_delta(self, words: torch.Tensor, base: torch.Tensor, block: int, out: torch.Tensor) -> int:
        """Encode ``words`` against ``base``, of the same dtype (bfloat16, float16 or float32) and size, into ``out`` (uint8,
        payload_bound() bytes); returns the payload's bytes."""
        ...

    def decode_delta(self, payload: torch.Tensor, base: torch.Tensor, block: int, words: torch.Tensor) -> None:
        """The inverse; ``words`` may be ``base``'s memory or apart from it. Raises FrameError."""
        ...

    def region_hash(self, data: torch.Tensor) -> tuple[int, int]:
        """Both halves of the hash of ``data`` (uint8; FORMAT.md section 5)."""
        ...


class RouteUnavailable(RuntimeError):
    """The route that was asked for cannot run here; the message says why and what to do."""


#: name -> loader; a loader returns a Route or raises with the reason. Order is preference.
ROUTES: dict[str, dict[str, Callable[[], Route]]] = {
    "cpu": {"native": native.load, "numba": numba_route.load},
    "cuda": {"native": cuda_launchers.load_native, "nvrtc": cuda_launchers.load_nvrtc},
}

_loaded: dict[tuple[str, str], Route | str] = {}
_lock = threading.Lock()


def _load(device: str, name: str) -> Route | str:
    """The route, or the reason why there is none; tried once per process."""
    with _lock:
        if (device, name) not in _loaded:
            try:
                _loaded[device, name] = ROUTES[device][name]()
            except Exception as error:  # whatever keeps a route from loading, the next one is tried
                _loaded[device, name] = f"{type(error).__name__}: {error}"
        return _loaded[device, name]


def add(words: torch.Tensor, sums: torch.Tensor, route_name: str = "auto") -> None:
    """Add flat ``words`` to flat ``sums`` as :meth:`Route.add` does; by torch where there are no kernels."""
    try:
        route(route_name, sums.device.type).add(words, sums)
    except RouteUnavailable:
        plain_sums.add(sums, words)


def why(device: str = "cpu") -> dict[str, str]:
    """Every route of ``device`` in order: "" if usable here, else the reason. Loads (and builds) them."""
    return {name: found if isinstance(found := _load(device, name), str) else "" for name in ROUTES.get(device, {})}


def route(name: str = "auto", device: str = "cpu") -> Route:
    """The named route, or for "auto" the first that works; the first call may build it (seconds).

    Raises:
        RouteUnavailable: none works here; the message has every reason.
        ValueError: no route of that name.
    """
    table = ROUTES.get(device, {})
    if name != "auto" and name not in table:
        raise ValueError(f"no route {name!r} for device {device!r}; known routes: {', '.join(('auto', *table))}")
    reasons = []
    for candidate in table if name == "auto" else (name,):
        found = _load(device, candidate)
        if not isinstance(found, str):
            return found
        reasons.append(f"{candidate}: {found}")
    raise RouteUnavailable(f"no kernels for {device} tensors here. " + "; ".join(reasons))
