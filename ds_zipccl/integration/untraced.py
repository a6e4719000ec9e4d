"""Functions whose own frames torch.compile leaves alone.

Ranks compile a frame again at different times, because their tensors have different sizes, and one rank may give up before the others do.
A function that decides which messages travel must therefore run alike in compiled programs and in others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_NO_GRAPH = (
    "ds_zipccl codes collectives outside of compiled graphs: compile without fullgraph=True, or run with DS_ZIPCCL=0"
)
_functions: list[Callable[..., Any]] = []
_skipping = False


def untraced_frame(function: _F) -> _F:
    """Return ``function``, which :func:`skip_frames` covers. Functions that it calls may be compiled."""
    _functions.append(function)
    if _skipping:
        _skip(function)
    return function


def skip_frames() -> None:
    """Keep torch.compile out of all functions of :func:`untraced_frame` from now on. Imports torch's compiler, which takes seconds: only
    jobs that code messages call."""
    global _skipping
    _skipping = True
    for function in _functions:
        _skip(function)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a traced program: the graph breaks there, and the call runs as in other programs."""
    disable = torch.compiler.disable
    why = {"reason": _NO_GRAPH} if "reason" in inspect.signature(disable).parameters else {}  # torch 2.7 and later
    return disable(function, **why)  # type: ignore[no-any-return, no-untyped-call]


def _skip(function: Callable[..., Any]) -> None:
    torch.compiler.disable(function, recursive=False)  # marks the code of the function, and returns the function itself
