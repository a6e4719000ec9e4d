"""A kernel that spins on all multiprocessors but one (spin.cu), as NCCL's kernels do while they wait for other ranks.

python tests/gpu/spin.py build
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator
from functools import cache

import torch

#: Blocks of the kernel at most, as in spin.cu.
MOST = 1022
#: Seconds after which the kernel ends by itself: work behind it would otherwise wait for ever.
SECONDS = 12.0


class _Words(ctypes.Structure):
    _fields_ = [("release", ctypes.c_uint32), ("expired", ctypes.c_uint32), ("arrived", ctypes.c_uint32 * MOST)]


@cache
def _library() -> ctypes.CDLL:
    import driver

    library = ctypes.CDLL(str(driver.there("spin")))
    library.spin_error.restype, library.spin_error.argtypes = ctypes.c_char_p, [ctypes.c_int32]
    library.spin_words.argtypes = [ctypes.c_void_p]
    library.spin_start.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    return library


def _must(status: int) -> None:
    if status:
        raise RuntimeError(f"the spinning kernel: {_library().spin_error(status).decode()}")


@contextlib.contextmanager
def spinning(free: int = 1) -> Iterator[int]:
    """Hold all multiprocessors but ``free`` while the context lasts, and give the number that is held.

    Raises:
        AssertionError: the kernel ended by itself after ``SECONDS``, because the work in the context did not end beside it.
    """
    place = ctypes.c_void_p()
    _must(_library().spin_words(ctypes.byref(place)))
    assert place.value
    words = _Words.from_address(place.value)
    ctypes.memset(place.value, 0, ctypes.sizeof(words))
    blocks = min(MOST, torch.cuda.get_device_properties(0).multi_processor_count - free)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    _must(_library().spin_start(blocks, place.value, int(SECONDS * 1e9), stream.cuda_stream))
    try:
        deadline = time.monotonic() + SECONDS / 2
        while sum(words.arrived) < blocks:
            assert time.monotonic() < deadline, f"{sum(words.arrived)} of {blocks} blocks of the spinning kernel run"
        yield blocks
        early = words.expired
    finally:
        words.release = 1
        stream.synchronize()
    assert not early, f"work beside a spinning kernel did not end in {SECONDS:.0f} s: it waited for the whole device"


if __name__ == "__main__":
    assert sys.argv[1:] == ["build"], f"got {sys.argv[1:]}, wanted is build"
    _library()
