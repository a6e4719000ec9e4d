"""Activation: by itself, without a line of user code, or by :func:`install`.

``import torch`` calls :func:`autoload`, the entry point of group ``torch.backends``. The call must be cheap and never raise. It leaves a
finder on ``sys.meta_path``. The finder lets :mod:`ds_zipccl.integration.hooks` adjust DeepSpeed's modules right after their execution.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: DeepSpeed's modules that ds_zipccl.integration.hooks adjusts.
ADJUSTED = (
    "deepspeed.comm.comm",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.engine",
)
#: Further ones, which a job need not load, and which a DeepSpeed may lack.
OPTIONAL = (
    "deepspeed.runtime.pipe.engine",
    "deepspeed.module_inject.layers",
    "deepspeed.moe.sharded_moe",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.env_report",
)
#: Modules behind the hooks. They import DeepSpeed: its modules wait for their hooks while one of these is being executed.
_BEHIND = ("ds_zipccl.integration.hooks", "ds_zipccl.integration.backend")

#: DeepSpeed module that was loaded -> why its hook failed; "" where the hook has adjusted the module.
OUTCOMES: dict[str, str] = {}
_executing: set[str] = set()  # modules of _BEHIND
_waiting: list[ModuleType] = []  # DeepSpeed's modules, executed and not adjusted yet


def autoload() -> None:
    """Watch for DeepSpeed, unless ``DS_ZIPCCL=0`` asks to leave it untouched. The entry point."""
    if os.environ.get("DS_ZIPCCL", "").strip() != "0":
        watch()


def install(section: Mapping[str, Any] | None = None) -> None:
    """Activate the package by a line of code, where the ``torch.backends`` entry point is unwanted or not installed.

    Call it any time before ``deepspeed.initialize``. Repeating the call is harmless. With ``DS_ZIPCCL=0`` it does nothing.

    Args:
        section: precedes the ``"zipccl"`` section of every DeepSpeed config in this process, for example ``{"enabled": True}``.

    Raises:
        ConfigError: the section, or ``DS_ZIPCCL``, is invalid.
        ModuleNotFoundError: DeepSpeed is not installed.
        Exception: an error of a hook, where the package does not fit this version of DeepSpeed.
    """
    from ds_zipccl.config import environment_section

    from_environment = environment_section()
    if from_environment is not None and not from_environment.get("enabled", True):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "ds_zipccl.install() adjusts DeepSpeed, which is not installed; pip install deepspeed, or 'ds-zipccl[deepspeed]'",
            name="deepspeed",
        )
    from ds_zipccl.integration import hooks, job

    if section is not None:
        job.install_section(section)
    for name in ADJUSTED:
        hooks.adopt(importlib.import_module(name))
        OUTCOMES[name] = ""
    watch()  # adjusts the optional ones, where they are loaded


def watch() -> None:
    """Adjust DeepSpeed's modules, those that are loaded now, the others after their execution. Repeating the call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in (*ADJUSTED, *OPTIONAL):
        module = sys.modules.get(name)
        # A module in execution is not ready. Its loader will adjust it.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _waiting.append(module)
    _adjust_waiting()


def _adjust_waiting() -> None:
    while _waiting and not _executing:
        _adjust(_waiting.pop(0))


def _adjust(module: ModuleType) -> None:
    """Call the hook of a module. An error becomes a warning: the program's own ``import deepspeed`` must not fail."""
    try:
        from ds_zipccl.integration import hooks

        hooks.adopt(module)
        hooks.say_late()
        OUTCOMES[module.__name__] = ""
    except Exception as error:
        OUTCOMES[module.__name__] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"ds_zipccl stays off: it does not fit this DeepSpeed ({type(error).__name__}: {error}). "
            "Call ds_zipccl.install() to see the whole error, or set DS_ZIPCCL=0 to silence this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Wraps the loaders of DeepSpeed's and of our own modules.

    The finder stays after a hit: libraries call ``importlib.util.find_spec`` long before they import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (*ADJUSTED, *OPTIONAL, *_BEHIND):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """The module's own loader, which adjusts modules after the execution."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:  # get_source, get_data and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        behind = module.__name__ in _BEHIND
        if behind:
            _executing.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            _executing.discard(module.__name__)
        if not behind:
            _waiting.append(module)
        _adjust_waiting()
