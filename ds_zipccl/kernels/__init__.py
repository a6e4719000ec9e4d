"""Kernels of the codecs: one table, device type -> kernel backends in order of preference. All backends give the same bytes.

The argument ``route`` names a backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import torch

from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.kernels.cpp import backend as cpp_backend
from ds_zipccl.kernels.cuda import load as cuda_load
from ds_zipccl.kernels.numba import backend as numba_backend
from ds_zipccl.kernels.protocol import DeltaBackend, KernelBackend, LossyBackend, RowBackend

__all__ = [
    "REMEDY",
    "ROUTES",
    "DeltaBackend",
    "KernelBackend",
    "LossyBackend",
    "RouteUnavailable",
    "RowBackend",
    "adder",
    "compiled",
    "delta_route",
    "lacking",
    "lossy_route",
    "preferred",
    "route",
    "row_route",
    "tried",
    "why",
]


class RouteUnavailable(RuntimeError):
    """No kernels can run here; the message has the reason of each backend."""


#: device type -> name -> loader, in order of preference. A loader returns a KernelBackend or raises with the reason.
ROUTES: dict[str, dict[str, Callable[[], KernelBackend]]] = {
    "cpu": {"native": cpp_backend.load, "numba": numba_backend.load},
    "cuda": {"native": cuda_load.load_native, "cupy": cuda_load.load_cupy},
}

#: What to do where no backend for CPU tensors has a function that numba lacks.
REMEDY = "install a C++ compiler or a wheel of ds_zipccl with its library"

_loaded: dict[tuple[str, str], KernelBackend | str] = {}
_locks: dict[tuple[str, str], threading.Lock] = {}


def _load(device: str, name: str) -> KernelBackend | str:
    """Return the backend, or the reason why it cannot run; tried once per process."""
    key = (device, name)
    with _locks.setdefault(key, threading.Lock()):  # of its own, because loading a backend may take a minute
        if key not in _loaded:
            try:
                _loaded[key] = ROUTES[device][name]()
            except Exception as error:  # a backend that does not load, for any reason, gives way to the next one
                _loaded[key] = f"{type(error).__name__}: {error}"
        return _loaded[key]


def adder(route_name: str, device: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that adds flat words to flat sums as :meth:`KernelBackend.add` does: that of a backend, or torch's."""
    try:
        return route(route_name, device).add
    except RouteUnavailable:
        return plain_sums.add


def why(device: str = "cpu", only: str | None = None) -> dict[str, str]:
    """Return, for every backend of ``device`` in order, "" or the reason why it cannot run here. Loads (and builds) the backends. ``only``:
    the backend of that name alone."""
    names = [name for name in ROUTES.get(device, {}) if only in (None, name)]
    return {name: found if isinstance(found := _load(device, name), str) else "" for name in names}


def tried(device: str) -> dict[str, str]:
    """Return :func:`why` for those backends of ``device`` that this process has loaded, or tried to load, so far."""
    known = {name: _loaded.get((device, name)) for name in ROUTES.get(device, {})}
    return {name: found if isinstance(found, str) else "" for name, found in known.items() if found is not None}


def preferred(name: str, device: str) -> str:
    """Return the name of the backend of a config for tensors of ``device``: "auto" where only other devices have a backend ``name``."""
    return name if name in ROUTES.get(device, {}) else "auto"


def compiled(name: str, device: str) -> cpp_backend.CppBackend | None:
    """Return the backend of that name if it is the C++ backend, which does more than a backend has to; else None.

    Raises:
        RouteUnavailable: as :func:`route`.
    """
    found = route(name, device)
    return found if isinstance(found, cpp_backend.CppBackend) else None


def route(name: str = "auto", device: str = "cpu") -> KernelBackend:
    """Return the named backend, or for "auto" the first that can run; the first call may build it (seconds).

    Raises:
        RouteUnavailable: none can run here; the message has every reason.
        ValueError: no backend of that name.
    """
    return _first(name, device, "")


def delta_route(name: str, device: str) -> DeltaBackend:
    """As :func:`route`, among the backends that have the functions of differences."""
    return cast(DeltaBackend, _first(name, device, "encode_delta"))


def row_route(name: str, device: str) -> RowBackend:
    """As :func:`route`, among the backends that have the functions of row frames."""
    return cast(RowBackend, _first(name, device, "find_rows"))


def lossy_route(name: str, device: str, function: str) -> LossyBackend:
    """As :func:`route`, among the backends that have ``function``, a name of :class:`LossyBackend`."""
    return cast(LossyBackend, _first(name, device, function))


def lacking(load: Callable[[], object]) -> str:
    """Return the reason why ``load`` finds no kernels here; "" where it finds them."""
    try:
        load()
    except RouteUnavailable as error:
        return str(error)
    return ""


def _first(name: str, device: str, function: str) -> KernelBackend:
    """Return the first backend by that name that can run and has ``function``, where one is named."""
    table = ROUTES.get(device, {})
    if name != "auto" and name not in table:
        raise ValueError(f"no route {name!r} for device {device!r}; known routes: {', '.join(('auto', *table))}")
    reasons = []
    for candidate in table if name == "auto" else (name,):
        found = _load(device, candidate)
        if not isinstance(found, str) and (not function or hasattr(found, function)):
            return found
        reasons.append(f"{candidate}: {found if isinstance(found, str) else f'it has no {function}'}")
    remedy = [REMEDY] if function and device == "cpu" else []
    raise RouteUnavailable(f"no kernels for {device} tensors here. " + "; ".join([*reasons, *remedy]))
