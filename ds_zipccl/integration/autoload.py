"""Activation without a line of user code.

``import torch`` calls :func:`autoload` (entry point group ``torch.backends``). It must stay light and never raise. It leaves a finder on
``sys.meta_path`` that lets :mod:`ds_zipccl.integration.backend` adjust DeepSpeed's modules right after they are executed.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: DeepSpeed module -> function of ds_zipccl.integration.backend that adjusts it.
HOOKS = {
    "deepspeed.comm.comm": "adopt_comm",
    "deepspeed.runtime.zero.partition_parameters": "adopt_zero3",
    "deepspeed.runtime.zero.stage_1_and_2": "adopt_zero12",
    "deepspeed.runtime.engine": "adopt_engine",
}


def autoload() -> None:
    """Entry point. ``DS_ZIPCCL=0`` leaves DeepSpeed untouched."""
    if os.environ.get("DS_ZIPCCL", "").strip() != "0":
        watch()


def watch() -> None:
    """Adjust DeepSpeed's modules: now where they are loaded, else as soon as they are. Repeating it does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in HOOKS:
        module = sys.modules.get(name)
        # A module that is being executed is not ready; the loader that executes it will call _adjust.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _adjust(module)


#: Modules that were loaded while ds_zipccl.integration.backend itself was: it imports DeepSpeed.
_waiting: list[ModuleType] = []


def adjust_waiting() -> None:
    """Adjust what was loaded meanwhile; ds_zipccl.integration.backend calls this at its end."""
    while _waiting:
        _adopt(_waiting.pop(0))


def _adjust(module: ModuleType) -> None:
    backend = sys.modules.get("ds_zipccl.integration.backend")
    if backend is not None and getattr(backend.__spec__, "_initializing", False):
        _waiting.append(module)
    else:
        _adopt(module)


def _adopt(module: ModuleType) -> None:
    try:
        backend = importlib.import_module("ds_zipccl.integration.backend")
        getattr(backend, HOOKS[module.__name__])(module)
    except Exception as error:  # somebody else's `import deepspeed` must not fail because of us
        warnings.warn(
            f"ds_zipccl stays off: it does not fit this DeepSpeed ({type(error).__name__}: {error}). "
            "Call ds_zipccl.install() to see the whole error, or set DS_ZIPCCL=0 to silence this.",
            RuntimeWarning,
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Stays in place after a hit: libraries probe with ``importlib.util.find_spec`` long before they import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """The module's own loader, with one call after execution."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:  # get_source, get_data and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _adjust(module)
