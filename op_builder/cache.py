"""Compiled libraries, kept by content: same sources, flags and compiler give the same file. Knows nothing of DeepSpeed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
if not CSRC.is_dir():  # a plain checkout, where op_builder/ stands beside the package
    CSRC = Path(__file__).resolve().parent.parent / "ds_zipccl" / "csrc"

_AVX2 = ("-mavx2", "-mbmi", "-mbmi2", "-mpopcnt")
#: source -> flags of its own. Each level has its instruction set; which one runs is chosen by CPU at run time.
CPU_SOURCES: dict[str, tuple[str, ...]] = {
    "cpu_payload.cpp": (),
    "cpu_delta.cpp": (),
    "cpu_hash.cpp": (),
    "cpu_dispatch.cpp": (),
    "cpu_scalar.cpp": (),
}
if platform.machine() in ("x86_64", "AMD64"):
    CPU_SOURCES |= {
        "cpu_avx2.cpp": _AVX2,
        "cpu_avx512.cpp": (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vbmi2"))),
    }
#: -ffp-contract=off: a sum rounds where the source says so.
CPU_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-pthread")


class BuildError(RuntimeError):
    """A library could not be built; the message holds the command and the compiler's words."""


def cache_root() -> Path:
    """Folder for everything compiled at run time; never inside the package."""
    chosen = os.environ.get("DS_ZIPCCL_CACHE") or os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "torch_extensions"
    return root / "ds_zipccl"


@cache
def compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    looked = wanted or "c++, g++, clang++"
    raise BuildError(f"no C++ compiler ({looked} not on PATH); install g++ or set CXX")


@cache
def _identity() -> bytes:
    """What besides sources and flags decides the machine code: the compiler. The sources choose by CPU at run time."""
    return subprocess.run([compiler(), "--version"], capture_output=True, timeout=60).stdout


#: Names under csrc with the flags that only they are compiled with.
Sources = Mapping[str, Sequence[str]]


def library_path(sources: Sources = CPU_SOURCES, flags: Sequence[str] = CPU_FLAGS) -> Path:
    """Where the library of these sources is or will be."""
    digest = hashlib.sha256(_identity())
    for part in (*flags, *(part for name, own in sources.items() for part in (name, *own))):
        digest.update(part.encode() + b"\0")
    for path in sorted(CSRC.iterdir()):
        if path.name in sources or path.suffix in (".h", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_root() / f"zipccl_cpu_{digest.hexdigest()[:20]}.so"


def build(sources: Sources = CPU_SOURCES, flags: Sequence[str] = CPU_FLAGS) -> Path:
    """Compile the library unless it is there already, and return its path; blocks while another process builds it.

    The file appears by atomic rename, so a build that is killed leaves nothing behind that could be loaded.

    Raises:
        BuildError: no compiler, the compiler failed, or the cache folder cannot be written.
    """
    target = library_path(sources, flags)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(sources, flags, target)
    except OSError as error:
        raise BuildError(
            f"cannot write to {target.parent}: {error}; set DS_ZIPCCL_CACHE to a folder you can write"
        ) from error
    return target


def _compile(sources: Sources, flags: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in sources]
        commands = [
            [compiler(), *flags, *own, "-c", str(CSRC / name), "-o", str(output)]
            for (name, own), output in zip(sources.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        output = Path(folder) / target.name
        _run([compiler(), *flags, "-shared", *map(str, objects), "-o", str(output)])
        os.replace(output, target)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")
