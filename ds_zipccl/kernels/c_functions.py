"""Functions of C libraries through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Kinds of arguments and results. A pointer to a struct, a struct's array or memory is POINTER.
POINTER, TEXT = ctypes.c_void_p, ctypes.c_char_p
U32, U64, I32, F64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_double
#: Name -> kind of the result, and kinds of the arguments.
Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]


def bind(library: ctypes.CDLL, signatures: Signatures, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return functions of a library by their names.

    Raises:
        AttributeError: the library lacks one.
    """
    found = {}
    for name in names:
        found[name] = function = getattr(library, name)
        function.restype, function.argtypes = signatures[name]
    return found
