"""The readable reference of the payloads of FORMAT.md section 2, in numba; also the backend for machines without a compiler.

This file has the tables and sizes that encoder and decoder share. :mod:`.encode` and :mod:`.decode` are the two, of exponent payloads
alone. Words are numpy uint8, uint16 or uint32 arrays, payloads are uint8 arrays. A float type is ``(E, M)``: exponent and mantissa bits.
LLVM can vectorize the loops. Bit planes are written and read eight elements at a time, as bytes of a uint64.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

from ds_zipccl.kernels.build import BuildError, cache_root

FILL, RAW, CASCADE, SPARSE, WIDE = range(5)
OK, INDEX, BLOCK = 0, 11, 12  # FrameErrorCode
CHUNK_BLOCKS = 16
MAX_BLOCK = 1024
TIERS = 4
ABOVE = 3  # k of the window's top
ZERO_CODE = 2  # of the last tier: exponent field 0
TAIL_BITS = 13
#: Eighths of a binade: for CASCADE (and SPARSE), for WIDE, and for WIDE in the place of CASCADE.
CASCADE_BIAS, WIDE_BIAS, FALLBACK_BIAS = 23, 20, 28
#: Codes as in FORMAT.md 2.1: tier -> the k of code 0, 1, 2, ...; the last tier's code 2 is the exponent 0.
_NAMED = {
    CASCADE: ((4, 5, 6), (3, 7, 8), (9, 10, 11), (2, 12)),
    WIDE: ((3, 4, 5, 6, 7, 8, 9), (10, 2, 11), (12, 1, 13), (14, 0)),
}
#: mode -> bits of tier 1; later tiers have two.
TIER1_BITS = np.array([0, 0, 2, 2, 3], dtype=np.int64)
CODE_OF_K = np.zeros((5, TIERS, 256), dtype=np.uint8)
K_OF_CODE = np.zeros((5, TIERS, 8), dtype=np.int64)
for _mode, _tiers in _NAMED.items():
    for _tier, _ks in enumerate(_tiers):
        CODE_OF_K[_mode, _tier] = (1 << TIER1_BITS[_mode]) - 1 if _tier == 0 else 3
        CODE_OF_K[_mode, _tier, list(_ks)] = range(len(_ks))
        K_OF_CODE[_mode, _tier, : len(_ks)] = _ks
LOW_BITS = np.uint64(0x0101010101010101)


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def identity() -> bytes:
    """Return what decides the machine code on a type of CPU: the sources, and the version of numba."""
    return f"{numba.__version__}\0".encode() + _sources()


def _kernel_folder() -> str:
    """Return the folder in which numba keeps compiled code; "" if no folder can be trusted or written to.

    Each content of these files has a folder of its own, because numba does not notice a change in a function of another file.
    NUMBA_CACHE_DIR does not count: numba runs the code in its folder, so the folder must pass :mod:`ds_zipccl.kernels.build.trust`.
    """
    try:
        folder = cache_root() / f"numba_{hashlib.sha256(_sources()).hexdigest()[:20]}"
        folder.mkdir(mode=0o700, exist_ok=True)  # numba makes files by the umask, which may let a group write to them
    except (BuildError, OSError):
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


_settings: Any = numba.config


@contextlib.contextmanager
def kernel_cache() -> Iterator[None]:
    """Let numba keep compiled code in our cache folder, not inside the installed package."""
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = _KERNEL_FOLDER
    try:
        yield
    finally:
        _settings.CACHE_DIR = before


_KERNEL_FOLDER = _kernel_folder()
#: Without a folder each process compiles anew, because numba would choose an unchecked folder.
jit = numba.njit(nogil=True, cache=bool(_KERNEL_FOLDER))


with kernel_cache():

    @jit
    def pad16(x):
        """x rounded up to a multiple of 16."""
        return (x + 15) // 16 * 16

    @jit
    def itemsize_of(exponent, mantissa):
        """Bytes of a word: sign, exponent and mantissa."""
        return (1 + exponent + mantissa) // 8

    @jit
    def plane_bytes(n):
        """Bytes of a bit plane of n elements."""
        return (n + 7) // 8

    @jit
    def parts_bytes(m, r):
        """Bytes of the signs and mantissas of m elements, r bits each."""
        return r // 8 * m + r % 8 * plane_bytes(m)

    @jit
    def table_bytes(blocks, trims):
        """Bytes of a chunk's table with its padding."""
        return pad16(blocks * (4 if trims else 3))

    @jit
    def body_bytes(mode, n, trim, mantissa, itemsize):
        """Bytes of a block's body with its padding."""
        if mode == RAW:
            return pad16(n * itemsize)
        if mode in (CASCADE, WIDE):
            return pad16(parts_bytes(n, 1 + mantissa - trim) + TIER1_BITS[mode] * plane_bytes(n))
        return 0
