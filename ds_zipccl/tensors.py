"""Tensors of our own, exactly as they are asked for, whatever the program has done to torch.

``deepspeed.zero.Init`` replaces ``torch.empty`` and its like, for all threads, by constructors that cast to the model's dtype. A default
device, a ``TorchFunctionMode`` and a ``TorchDispatchMode`` change the meaning of calls too. A temporary that comes out in another dtype or
on another device is a wrong sum. So the package makes its tensors here and nowhere else (a test looks for other constructors), and runs
its schedules inside :func:`undisturbed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: torch's constructors as torch made them: what a program replaces are attributes of the module ``torch``.
_original: Any = torch._C._VariableFunctions
CPU = torch.device("cpu")
_KINDS = (torch.Tensor, torch.nn.Parameter)


def empty(numel: int, dtype: torch.dtype, device: torch.device | str = CPU) -> torch.Tensor:
    """1-D tensor of undefined contents."""
    return _original.empty(numel, dtype=dtype, device=device)  # type: ignore[no-any-return]


def filled(numel: int, value: float, dtype: torch.dtype, device: torch.device | str = CPU) -> torch.Tensor:
    """1-D tensor of one value."""
    return _original.full((numel,), value, dtype=dtype, device=device)  # type: ignore[no-any-return]


def of_numbers(numbers: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """CPU tensor of (nested) numbers."""
    return _original.tensor(numbers, dtype=dtype, device=CPU)  # type: ignore[no-any-return]


def of_buffer(buffer: Any) -> torch.Tensor:
    """1-D uint8 CPU tensor that shares the memory of a writable buffer."""
    return _original.frombuffer(buffer, dtype=torch.uint8)  # type: ignore[no-any-return]


class undisturbed:
    """Torch as it is: no function mode, no dispatch mode and no autocast of this thread sees a call. A context, also a decorator.

    Not a generator's context: entering and leaving those costs more than a small frame's header.
    """

    __slots__ = ("_autocast", "_functions", "_modes")

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._autocast = torch._C._DisableAutocast()
        self._modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        self._functions.__enter__()
        self._autocast.__enter__()
        if self._modes is not None:
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*error)
        self._autocast.__exit__(*error)
        self._functions.__exit__(*error)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with undisturbed():
                return function(*args, **kwargs)

        return inner


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` stands for data that are elsewhere or nowhere (fake tensors, DTensor), or the program is being traced or
    transformed (``make_fx``, ``torch.func``). Nothing is sent then, or torch sends it in a way of its own."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    if type(tensor) not in _KINDS and torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
