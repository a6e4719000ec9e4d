"""Compiled libraries, kept by content: same sources, flags and compiler give the same file. Independent of DeepSpeed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ds_zipccl.kernels.build import trust

#: Sources include each other by their paths from this folder.
CSRC = Path(__file__).resolve().parents[2] / "csrc"
#: Libraries in the package. A checkout has none; `make wheels` fills the folder in wheels.
SHIPPED = CSRC.with_name("lib")

_AVX2 = ("-mavx2", "-mbmi", "-mbmi2", "-mpopcnt")
_AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vbmi2"))
_X86 = (("cpu/avx2.cpp", _AVX2), ("cpu/avx512.cpp", (*_AVX2, *_AVX512)))
_ARM: tuple[tuple[str, tuple[str, ...]], ...] = (("cpu/neon.cpp", ()),)  # no flags: each 64-bit Arm CPU has NEON
#: Machine, as :func:`platform.machine` names it -> sources of its levels beside the portable one, with flags for the instruction set.
_LEVELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "x86_64": _X86,
    "AMD64": _X86,
    "aarch64": _ARM,
    "arm64": _ARM,
}


@dataclass(frozen=True)
class Recipe:
    """Compiler, sources and flags of a library."""

    name: str
    #: Returns the command that starts the compiler, its path and arguments, or raises BuildError.
    compiler: Callable[[], tuple[str, ...]]
    #: Objects: the path of a source, absolute or under csrc, and the flags for this object alone. A source may have several objects.
    objects: tuple[tuple[str, tuple[str, ...]], ...]
    flags: tuple[str, ...]

    @property
    def sources(self) -> list[str]:
        """Paths of the sources, each once."""
        return list(dict.fromkeys(name for name, _ in self.objects))


class BuildError(RuntimeError):
    """A library could not be built; the message has the command and the output of the compiler."""


def cache_root() -> Path:
    """Return the folder for code compiled at run time; never inside the package, and never one that other users can write to.

    The wanted folder, or a private one in its place; then a line on stderr says why, once in a process.

    Raises:
        BuildError: other users can write to each of these folders.
    """
    return _placed(_wanted_root())[0]


def distrust() -> str:
    """Return why :func:`cache_root` is not the wanted folder; "" where it is.

    Raises:
        BuildError: as :func:`cache_root`.
    """
    return _placed(_wanted_root())[1]


def _wanted_root() -> Path:
    chosen = os.environ.get("DS_ZIPCCL_CACHE") or os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        root = Path(chosen) if chosen else Path.home() / ".cache" / "torch_extensions"
    except RuntimeError:  # this user has no home
        root = Path(tempfile.gettempdir()) / f"ds_zipccl-{os.geteuid()}"
    # Resolved, because a link in a folder that other users can write to could change after the check.
    return (root / "ds_zipccl").resolve()


@cache
def _placed(wanted: Path) -> tuple[Path, str]:
    """Return ``wanted`` or the first private folder that can be trusted, and why ``wanted`` cannot be trusted."""
    reasons = [trust.claim(wanted)]
    if not reasons[0]:
        return wanted, ""
    for place in _private_folders():
        reason = trust.claim(place)
        if not reason:
            note = f"compiled kernels are kept in {place}, not in {wanted}: {reasons[0]}; to choose another folder, to which"
            note += " no other user can write, set DS_ZIPCCL_CACHE"
            if os.environ.get("LOCAL_RANK", "0") == "0":  # one line for a node
                print(f"ds_zipccl: {note}", file=sys.stderr, flush=True)
            return place, reasons[0]
        reasons.append(reason)
    raise BuildError(
        f"no folder for compiled kernels: {'; '.join(reasons)}; set DS_ZIPCCL_CACHE to a folder to which no other user can write"
    )


def _private_folders() -> Iterator[Path]:
    """Yield private folders for libraries, best first. The last one belongs to this process and is removed when it ends."""
    with contextlib.suppress(RuntimeError):  # no home
        yield (Path.home() / ".cache" / "ds_zipccl").resolve()
    temporary = Path(tempfile.gettempdir()).resolve()
    yield temporary / f"ds_zipccl-{os.geteuid()}"
    own, process = Path(tempfile.mkdtemp(prefix="ds_zipccl-", dir=temporary)), os.getpid()
    atexit.register(lambda: shutil.rmtree(own, ignore_errors=True) if os.getpid() == process else None)
    yield own


@cache
def compiler() -> tuple[str, ...]:
    """Return the command that starts the C++ compiler: its path, and the arguments in CXX, as in ``ccache g++``.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX", "")
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise BuildError(
            f"CXX must be a command as a shell reads it, got {wanted!r}: {error}; correct its quotes"
        ) from None
    # The whole value comes first, because the path of a compiler may contain spaces.
    for name, *arguments in [[wanted], words] if words else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(name)
        if found:
            return found, *arguments
    looked = words[0] if words else "c++, g++, clang++"
    raise BuildError(f"no C++ compiler ({looked} not on PATH); install g++ or set CXX")


@cache
def nvcc() -> tuple[str]:
    """Return the path of the CUDA compiler: in ``CUDA_HOME``, on ``PATH``, or in the usual folder of CUDA.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(str(Path(home) / "bin" / "nvcc")) if home else shutil.which("nvcc")
    found = found or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        raise BuildError("no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda; install the CUDA toolkit")
    return (found,)


def cpu(machine: str = platform.machine(), compiler: Callable[[], tuple[str, ...]] = compiler) -> Recipe:
    """Return the recipe of the C++ kernels for CPUs of a type, as :func:`platform.machine` names it.

    Each level has its instruction set; the CPU decides at run time which level runs.
    """
    names = "payload hash dispatch scalar delta/delta rows/rows rows/row_map rows/row_frame".split()
    names += [f"lossy/{name}" for name in ("rounded", "scaled", "zfp", "lowrank")]
    objects = (*((f"cpu/{name}.cpp", ()) for name in names), *_LEVELS.get(machine, ()))
    # -ffp-contract=off: no fused multiply-add takes away a rounding.
    return Recipe("zipccl_cpu", compiler, objects, ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-pthread"))


CPU = cpu()
#: Numbers of the parts of the CUDA kernels: bits of ZIPCCL_PARTS in cuda/kernels.cuh.
CUDA_PARTS = (1, 2, 4, 8, 16, 32, 64, 128)


def cuda(architectures: Sequence[str]) -> Recipe:
    """Return the recipe of the CUDA kernels for compute capabilities such as "9.0", or "9.0+PTX" for later ones too.

    Not --use_fast_math: it flushes subnormal floats, and sums would differ.
    """
    targets = []
    for architecture in architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        code = f"[sm_{number},compute_{number}]" if architecture.endswith("+PTX") else f"sm_{number}"
        targets.append(f"-gencode=arch=compute_{number},code={code}")
    # Warnings 177 and 186: loops over no planes, for a type without such planes.
    flags = ("-O3", "-std=c++17", "-Xcompiler=-fPIC", "-diag-suppress=177,186", "--threads=0", *targets)
    objects = tuple(("cuda/launch.cu", (f"-DZIPCCL_PARTS={part}",)) for part in CUDA_PARTS)
    return Recipe("zipccl_cuda", nvcc, objects, flags)


@cache
def _identity(compiler: tuple[str, ...]) -> bytes:
    """Return the version of the compiler, which decides the machine code beside sources and flags.

    Raises:
        BuildError: the compiler cannot be run.
    """
    return _output([*compiler, "--version"], 60, check=False)


def library_path(recipe: Recipe = CPU) -> Path:
    """Return the path of the library, built or not.

    Raises:
        BuildError: no compiler, or it cannot be run.
    """
    compiler = recipe.compiler()
    return cache_root() / file_name(recipe, _identity(compiler), compiler[1:])


def file_name(recipe: Recipe, identity: bytes = b"", arguments: Sequence[str] = ()) -> str:
    """Return the name of a library: the content of sources and flags, and the identity and arguments of a compiler, decide it."""
    digest = hashlib.sha256(identity)
    for part in (*arguments, *recipe.flags, *(part for name, own in recipe.objects for part in (name, *own))):
        digest.update(part.encode() + b"\0")
    headers = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh")]
    for path in sorted([*headers, *(CSRC / name for name in recipe.sources)]):
        digest.update(os.path.relpath(path, CSRC).encode() + b"\0" + path.read_bytes())
    return f"{recipe.name}_{digest.hexdigest()[:20]}.so"


def shipped() -> Path | None:
    """Return the library of the C++ backend for this CPU that lies in the package, for machines without a compiler; None where there is none.

    Its name has the content of sources and flags. So a library of other sources, or one with flags that differ, is not taken.
    """
    found = SHIPPED / file_name(CPU)
    return found if found.is_file() else None


def build(recipe: Recipe = CPU) -> Path:
    """Compile the library unless it is there already, and return its path; blocks while another process builds it.

    Raises:
        BuildError: no compiler, the compiler failed, or the cache folder cannot be written.
    """
    return publish(library_path(recipe), lambda output: compile_library(recipe, output), f"{recipe.compiler()[0]} compiles")


def publish(target: Path, make: Callable[[Path], None], means: str) -> Path:
    """Make the file ``target`` unless it is there already, and return its path; blocks while another process makes it.

    The file appears by atomic rename, so a killed build leaves no file that could be loaded; the next build removes its remains. Only this
    user can write to it. A build that takes long says so on stderr.

    Args:
        make: writes the file to the path that it is given, in a folder of its own.
        means: the maker and what it does with kernels, for messages: "g++ compiles".

    Raises:
        BuildError: the folder of ``target`` cannot be written, or as ``make``.
    """
    if target.exists():
        return target
    try:
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                for left in target.parent.glob(
                    f"{target.stem}-*"
                ):  # remains of killed builds, because this build holds the lock
                    shutil.rmtree(left, ignore_errors=True)
                with (
                    tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}-") as folder,  # of mode 0700
                    _announced(target, means),
                ):
                    made = Path(folder) / target.name
                    make(made)
                    made.chmod(made.stat().st_mode & 0o755)  # under any umask, no other user can write to the file
                    os.replace(made, target)
    except OSError as error:
        raise BuildError(
            f"cannot write to {target.parent}: {error}; set DS_ZIPCCL_CACHE to a folder you can write"
        ) from error
    return target


#: Seconds after which a build says that it is under way.
PATIENCE = 4.0
#: Seconds that a compiler may take for one object.
COMPILER_SECONDS = 300.0


@contextlib.contextmanager
def _announced(target: Path, means: str) -> Iterator[None]:
    """Say on stderr that a build takes long, and its time. Other processes wait for this one, so there is one line for a node."""
    start, said = time.monotonic(), threading.Event()

    def say(text: str) -> None:
        print(f"ds_zipccl: {text}", file=sys.stderr, flush=True)

    def announce() -> None:
        said.set()
        say(f"{means} kernels, once for this machine, for {target}; this may take a minute")

    timer = threading.Timer(PATIENCE, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            say(f"{means.rpartition(' ')[0]} ended after {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is made where it is missing; a link is not followed."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def compile_library(recipe: Recipe, output: Path) -> None:
    """Compile a library to ``output``, and its objects to the folder of ``output``; blocks.

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    command = [*recipe.compiler(), *recipe.flags, f"-I{CSRC}"]
    outputs = [output.with_name(f"{number}.o") for number in range(len(recipe.objects))]
    commands = [
        [*command, *own, "-c", str(CSRC / name), "-o", str(to)]
        for (name, own), to in zip(recipe.objects, outputs, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run(command, output.parent), commands))
    _run([*command, "-shared", *map(str, outputs), "-o", str(output)], output.parent)


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a compiler with its temporary files in ``folder``; under any umask, no other user can write to the files that it makes."""
    _output(command, COMPILER_SECONDS, env={**os.environ, "TMPDIR": str(folder)}, umask=0o022)


def _output(command: Sequence[str], seconds: float, *, check: bool = True, **settings: Any) -> bytes:
    """Return the output of a compiler.

    Raises:
        BuildError: it cannot be run, needs more than ``seconds``, or, with ``check``, fails.
    """
    try:
        result: subprocess.CompletedProcess[bytes] = subprocess.run(
            command, capture_output=True, timeout=seconds, **settings
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{shlex.join(command)} did not end within {seconds:g} s; try again on a less busy machine"
        ) from error
    if check and result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr.decode(errors='replace').strip()}")
    return result.stdout
