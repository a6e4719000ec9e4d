"""The CUDA kernels on the CPU: their own source, compiled against emulation.h, behind the route that CUDA tensors use."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import CudaRoute

HERE = Path(__file__).parent


def recipe(csrc: Path | None = None) -> build.Recipe:
    """How the emulation is built, with the kernels of another folder if one is named."""
    text = hashlib.sha256((HERE / "emulation.h").read_bytes()).hexdigest()[:16]
    flags = (
        "-O2",
        "-std=c++17",
        "-fPIC",
        "-ffp-contract=off",
        f"-DTEXT=0x{text}",
        "-include",
        str(HERE / "emulation.h"),
    )
    return build.Recipe(
        "zipccl_emulation", build.compiler, {str(HERE / "emulated.cpp"): (f"-I{csrc or build.CSRC}",)}, flags
    )


class EmulatedLauncher:
    """Runs kernels when they are launched, one launch at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.zipccl_emulation_seed.argtypes = [ctypes.c_uint64]

    def seed(self, value: int) -> None:
        """Draw the order in which threads run from ``value``; the same value gives the same order."""
        self._library.zipccl_emulation_seed(value)

    def launch(self, kernel: str, grid: int, shared_bytes: int, params: ctypes.Structure, stream: int) -> None:
        status = self._library.zipccl_cuda_launch(kernel.encode(), grid, shared_bytes, ctypes.byref(params), None)
        if status:
            raise RuntimeError(f"no kernel {kernel}")


def launcher(changes: Mapping[str, tuple[str, str]] | None = None, folder: Path | None = None) -> EmulatedLauncher:
    """The emulation; with ``changes`` (file of csrc -> text, its replacement) of a copy in ``folder``."""
    csrc = None
    if changes is not None:
        assert folder is not None
        csrc = folder / "csrc"
        shutil.copytree(build.CSRC, csrc)
        for name, (good, bad) in changes.items():
            text = (csrc / name).read_text()
            assert good in text, f"{good!r} is no longer in {name}: plant the mistake elsewhere"
            (csrc / name).write_text(text.replace(good, bad))
        made = recipe(csrc)
        library = folder / "emulation.so"
        source, own = next(iter(made.sources.items()))
        build._run([*made.compiler(), *made.flags, *own, source, "-shared", "-o", str(library)], str(folder))
        return EmulatedLauncher(ctypes.CDLL(str(library)))
    return EmulatedLauncher(ctypes.CDLL(str(build.build(recipe()))))


def load() -> CudaRoute:
    """The route, for CPU tensors."""
    return CudaRoute(launcher())
