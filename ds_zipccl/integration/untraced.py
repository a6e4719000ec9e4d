"""Functions whose own frames torch.compile leaves alone.

Ranks compile a frame again at different times, because their tensors have different sizes, and one rank may give up before the others do.
A function that decides which messages travel must therefore run alike in compiled programs and in others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

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


def _skip(function: Callable[..., Any]) -> None:
    torch.compiler.disable(function, recursive=False)  # marks the code of the function, and returns the function itself
