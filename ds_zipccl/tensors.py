"""Tensors of the package, with the dtype and device that it asks for under any patch or mode of torch.

``deepspeed.zero.Init`` replaces ``torch.empty`` and similar functions, for all threads, by constructors that cast to the model's dtype. A
default device, a ``TorchFunctionMode`` and a ``TorchDispatchMode`` change the meaning of calls too. A temporary in another dtype or on
another device gives a wrong sum. So the package makes its tensors in this module alone (a test searches for other constructors), and runs
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
#: torch's own constructors: a program replaces attributes of the module ``torch``, not these.
_original: Any = torch._C._VariableFunctions
CPU = torch.device("cpu")


def empty(numel: int, dtype: torch.dtype, device: torch.device | str = CPU) -> torch.Tensor:
    """Return a 1-D tensor of undefined contents."""
    return _original.empty(numel, dtype=dtype, device=device)  # type: ignore[no-any-return]


def pinned(nbytes: int) -> torch.Tensor:
    """Return host memory of undefined contents, 1-D uint8, which a CUDA device copies from and to while the host goes on.

    torch pools such memory, and uses a freed block again only after the copies that are queued on the block. Without CUDA the memory is
    ordinary.
    """
    return _original.empty(  # type: ignore[no-any-return]
        nbytes, dtype=torch.uint8, device=CPU, pin_memory=torch.cuda.is_initialized()
    )


def filled(numel: int, value: float, dtype: torch.dtype, device: torch.device | str = CPU) -> torch.Tensor:
    """Return a 1-D tensor of one value."""
    return _original.full((numel,), value, dtype=dtype, device=device)  # type: ignore[no-any-return]


def of_numbers(numbers: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of (nested) numbers."""
    return _original.tensor(numbers, dtype=dtype, device=CPU)  # type: ignore[no-any-return]


def of_buffer(buffer: Any) -> torch.Tensor:
    """Return a 1-D uint8 CPU tensor that shares the memory of a writable buffer."""
    return _original.frombuffer(buffer, dtype=torch.uint8)  # type: ignore[no-any-return]


class undisturbed:
    """Context and decorator in which no function mode, no dispatch mode and no autocast of this thread sees a call of torch.

    A class and not a generator, because a generator's context costs more than the header of a small frame.
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


def is_traced(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor of this class has no data of its own here, or a tracer or transform is active.

    Fake tensors and DTensor have none; ``make_fx`` and ``torch.func`` are a tracer and a transform. Then torch sends nothing, or it
    sends in its own way.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
