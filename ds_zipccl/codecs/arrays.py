"""The public calls on frames, which also take arrays of numpy, CuPy, JAX and whatever has DLPack, without a copy.

Within the package tensors alone are coded, by the functions of :mod:`.api`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch

from ds_zipccl.codecs import api
from ds_zipccl.codecs.memory import admit

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Bytes of an element -> dtype that stands for words of any other one of that size.
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
#: Dtypes that numpy has only by name, from the package ml_dtypes.
_NAMED = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def is_array(value: object) -> bool:
    """Return whether ``value`` is an array of another library than torch."""
    return hasattr(value, "__dlpack__") and not isinstance(value, torch.Tensor)


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return an array as a tensor of the same memory, and anything else as it is.

    Args:
        value: an array of ml_dtypes.bfloat16 or of a float8 dtype becomes a tensor of that dtype.
        dtype: where the array has unsigned integers, the dtype of their size that they stand for; of another size: no effect.

    Raises:
        ValueError, TypeError, BufferError: the library's or torch's own, for memory that torch cannot describe, as with negative strides.
    """
    if not is_array(value):
        return value
    named = _NAMED.get(str(value.dtype)) if isinstance(value, np.ndarray) else None
    tensor = torch.utils.dlpack.from_dlpack(value if named is None else value.view(f"u{named.itemsize}"))
    wanted = named or dtype
    return tensor if wanted is None or _WORDS.get(wanted.itemsize) is not tensor.dtype else tensor.view(wanted)


def takes_arrays(
    *written: str, dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator: the function takes arrays where its first argument is one, and returns an array of that library.

    A tensor whose dtype the library lacks is returned as unsigned integers of its size. An array that the function returns because it was
    given is returned itself.

    Args:
        written: parameters that the function writes to.
        dtype_of: returns the dtype that unsigned integers in the other arrays stand for, from the first argument; None: for themselves.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        leading = next(iter(signature.parameters))

        @functools.wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
            first: Any = args[0] if args else keywords.get(leading)
            if isinstance(first, torch.Tensor) or not is_array(first):
                return function(*args, **keywords)
            bound = signature.bind(*args, **keywords)
            given = dict(bound.arguments)
            for name in written:
                _check_writable(name, given.get(name))
            found = as_tensor(first)
            dtype = None if dtype_of is None else dtype_of(found)
            for name, value in given.items():
                bound.arguments[name] = found if value is first else as_tensor(value, dtype)
            result: Any = function(*bound.args, **bound.kwargs)
            for name in written:
                if result is bound.arguments.get(name):
                    result = given[name]
            return cast(_T, _returned(result, first) if isinstance(result, torch.Tensor) else result)

        return call

    return decorate


def _check_writable(name: str, value: Any) -> None:
    interface = getattr(value, "__cuda_array_interface__", None) or getattr(value, "__array_interface__", None)
    if is_array(value) and (interface is None or interface["data"][1]):
        raise ValueError(
            f"{name} is a {type(value).__name__} that cannot be written; pass an array of numpy or CuPy, or a tensor"
        )


def _returned(tensor: torch.Tensor, like: Any) -> Any:
    """``tensor`` as an array of the library of ``like``, in the same memory."""
    module = sys.modules[type(like).__module__.partition(".")[0]]  # numpy 1 and older CuPy know no namespace
    library = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
    try:
        return library.from_dlpack(tensor)
    except (RuntimeError, TypeError, ValueError, BufferError):  # each library has its own for a dtype that it lacks
        return library.from_dlpack(tensor.view(_WORDS[tensor.itemsize]))


def _dtype_in(frame: torch.Tensor) -> torch.dtype:
    admit("frame", frame, TypeError)
    return api.open_frame(frame)[0].dtype


compress = takes_arrays("out")(api.compress)
decompress = takes_arrays("out", dtype_of=_dtype_in)(api.decompress)
decompress_add = takes_arrays("sums", dtype_of=_dtype_in)(api.decompress_add)
region_hash = takes_arrays()(api.region_hash)
