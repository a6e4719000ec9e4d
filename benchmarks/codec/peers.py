"""Peers: lossless compressors of other projects, measured by ``bench codec --peers`` like the codecs of ds_zipccl.

A peer takes and returns bytes through its Python interface. The allocation of its results is part of its time, as in
any use. ``pip install ds-zipccl[bench]`` installs the peers that are not part of Python. ``load`` imports one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


class Functions(NamedTuple):
    """Functions of a peer. ``compress`` may change its input, as that of ZipNN does."""

    compress: Callable[[memoryview], bytes]
    decompress: Callable[[bytes], bytes | bytearray]


@dataclass(frozen=True)
class Peer:
    """A compressor. ``load(dtype, threads)`` raises ImportError if it is missing. ``package``: for pip, "" for zlib."""

    load: Callable[[str, int], Functions]
    package: str = ""
    dtypes: tuple[str, ...] | None = None  # torch names; None: any

    def takes(self, dtype: str) -> bool:
        return self.dtypes is None or dtype in self.dtypes


def _zlib(dtype: str, threads: int) -> Functions:
    import zlib

    return Functions(lambda raw: zlib.compress(raw, 1), zlib.decompress)


def _zstd(level: int) -> Callable[[str, int], Functions]:
    def load(dtype: str, threads: int) -> Functions:
        import zstandard

        # threads=1 would start a second thread; 0 starts none.
        packer = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        return Functions(packer.compress, zstandard.ZstdDecompressor().decompress)

    return load


def _lz4(dtype: str, threads: int) -> Functions:
    import lz4.block

    return Functions(lz4.block.compress, lz4.block.decompress)


def _zipnn(dtype: str, threads: int) -> Functions:
    from zipnn import ZipNN

    packer = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=threads)
    return Functions(packer.compress, packer.decompress)


#: Name -> peer; a number in the name is the level. zlib and lz4 always use one thread.
PEERS: dict[str, Peer] = {
    "zlib1": Peer(_zlib),
    "zstd1": Peer(_zstd(1), "zstandard"),
    "zstd3": Peer(_zstd(3), "zstandard"),
    "lz4": Peer(_lz4, "lz4"),
    "zipnn": Peer(_zipnn, "zipnn", ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")),
}


class PeerTrial:
    """One peer and one tensor: a :class:`ds_zipccl.benchmarks.codec.trial.Trial`."""

    repeatable = False  # compress may change the input
    more: Mapping[str, tuple[Callable[[], None], Callable[[], None]]] = {}

    def __init__(self, tensor: torch.Tensor, name: str, threads: int) -> None:
        import torch

        self._tensor = tensor
        self._functions = PEERS[name].load(str(tensor.dtype).removeprefix("torch."), threads)
        self._input = torch.empty(tensor.nbytes, dtype=torch.uint8)
        self._view = memoryview(self._input.numpy().data)
        self._coded: bytes = b""
        self._decoded: bytes | bytearray = bytearray()

    def prepare(self) -> None:
        import torch

        self._input.copy_(self._tensor.view(torch.uint8))
        self._decoded = bytearray()

    def encode(self) -> None:
        self._coded = self._functions.compress(self._view)

    def decode(self) -> None:
        self._decoded = self._functions.decompress(self._coded)

    def result(self) -> torch.Tensor:
        """The decoded bytes as a flat tensor of the dtype; empty if they are no whole number of elements."""
        import torch

        decoded = bytearray(self._decoded)  # frombuffer wants writable memory
        fits = len(decoded) and len(decoded) % self._tensor.itemsize == 0
        return torch.frombuffer(decoded, dtype=self._tensor.dtype) if fits else self._tensor.new_empty(0)

    @property
    def coded_bytes(self) -> int:
        return len(self._coded)


class Difference(Protocol):
    """A compressor of words against their base. All arrays are flat and have the same unsigned dtype and size."""

    def compress(self, words: np.ndarray, base: np.ndarray) -> bytes: ...
    def decompress(self, coded: bytes, base: np.ndarray, words: np.ndarray) -> None:
        """Write the decoded words to ``words``, which may be ``base``."""
        ...


class _XorZstd:
    """Words XOR base, compressed with zstd level 1."""

    def __init__(self, threads: int) -> None:
        functions = _zstd(1)("", threads)
        self._compress, self._decompress = functions

    def compress(self, words: np.ndarray, base: np.ndarray) -> bytes:
        return self._compress((words ^ base).data)

    def decompress(self, coded: bytes, base: np.ndarray, words: np.ndarray) -> None:
        import numpy as np

        np.bitwise_xor(base, np.frombuffer(self._decompress(coded), dtype=words.dtype), out=words)


class _Pairs:
    """The index (u32) and the word of each change."""

    def __init__(self, threads: int) -> None:
        pass

    def compress(self, words: np.ndarray, base: np.ndarray) -> bytes:
        import numpy as np

        places = np.flatnonzero(words != base)
        return places.astype(np.uint32).tobytes() + words[places].tobytes()

    def decompress(self, coded: bytes, base: np.ndarray, words: np.ndarray) -> None:
        import numpy as np

        count = len(coded) // (4 + words.itemsize)
        places = np.frombuffer(coded, np.uint32, count)
        if words is not base:
            np.copyto(words, base)
        words[places] = np.frombuffer(coded, words.dtype, count, 4 * count)


#: Name -> constructor of a peer of the delta codec, (threads) -> peer. ``xor_zstd1`` may raise ImportError.
DIFFERENCES: dict[str, Callable[[int], Difference]] = {"xor_zstd1": _XorZstd, "pairs": _Pairs}
#: Key of :data:`DIFFERENCES` -> package for pip.
DIFFERENCE_PACKAGES = {"xor_zstd1": "zstandard"}
