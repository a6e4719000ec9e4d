"""Programs for 64-bit Arm CPUs: made on any machine, run on such a CPU, under QEMU or in the emulator of the package unicorn."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import arm_process
import torch
from builds import Binary
from places import TESTS

from ds_zipccl import frame as framing
from ds_zipccl.kernels import build

MACHINE = "aarch64"
LEVELS = ("neon", "scalar")


@cache
def compiler() -> tuple[str, ...]:
    """Return the command of a compiler for these CPUs.

    Raises:
        BuildError: there is none.
    """
    if platform.machine() == MACHINE:
        return build.compiler()
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "c++", "-target", f"{MACHINE}-linux-musl"
    return cross()


@cache
def cross() -> tuple[str]:
    """Return the path of GCC for these CPUs.

    Raises:
        BuildError: there is none.
    """
    found = shutil.which(f"{MACHINE}-linux-gnu-g++")
    if not found:
        raise build.BuildError(
            "no GCC for 64-bit Arm; install the package g++-aarch64-linux-gnu, or, for tests alone, ziglang with pip"
        )
    return (found,)


def emulator(machine: str = MACHINE, always: bool = False) -> list[str]:
    """Return the words in front of a command that runs a program for ``machine`` here: none on such a machine, unless ``always``.

    Raises:
        BuildError: there is no emulator.
    """
    if platform.machine() == machine and not always:
        return []
    found = next(filter(None, map(shutil.which, (f"qemu-{machine}", f"qemu-{machine}-static"))), None)
    if not found:
        raise build.BuildError(f"no emulator of {machine}; install the package qemu-user-static")
    return [found]


def why_not() -> str:
    """Return why no program for these CPUs can be made or run here; "" if it can."""
    try:
        compiler()
        if not importlib.util.find_spec("unicorn"):
            emulator()
    except build.BuildError as error:
        return f"{error}, or run pip install unicorn"
    return ""


def fuzzer(compiler: Callable[[], tuple[str, ...]] = compiler) -> Binary:
    """The fuzzer (tests/fuzz/fuzz.cpp) with the codec as the library has it; pages that no access survives stand for a sanitizer."""
    recipe = build.cpu(MACHINE, compiler)
    return Binary(
        "fuzz_arm",
        {"csrc": build.CSRC, "fuzz": TESTS / "fuzz"},
        {"fuzz/fuzz.cpp": (), **{f"csrc/{name}": flags for name, flags in recipe.objects}},
        (*recipe.flags, "-O1", "-DZIPCCL_PAGES"),  # the last -O counts: -O3 takes minutes to compile
        ("-static",),
        compiler=compiler,
    )


def fuzzer_here() -> Binary:
    """The fuzzer over the library that the native route uses on this machine."""
    library = build.build()
    return Binary(
        "fuzz_here",
        {"csrc": build.CSRC, "fuzz": TESTS / "fuzz"},
        {"fuzz/fuzz.cpp": ()},
        ("-O1", "-std=c++17"),
        ("-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}"),
    )


def case(
    words: torch.Tensor, base: torch.Tensor | None, frame: torch.Tensor, code: int, kept: int, wanted: torch.Tensor
) -> bytes:
    """A message, its frame, and the words that the frame gives, as a case of a file of cases (tests/fuzz/cases.h)."""
    header = framing.parse(frame)
    payload = frame[header.payload_at :]
    numbers = framing.DTYPE_IDS[words.dtype], header.block, words.numel(), code, kept, base is not None, len(payload)
    parts = [one.contiguous().view(-1).view(torch.uint8) for one in (words, base, payload, wanted) if one is not None]
    return struct.pack("<7Q", *numbers) + b"".join(part.numpy().tobytes() for part in parts)


def run(program: Path, *arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run a static program for these CPUs; blocks until it ends."""
    try:
        command = [*emulator(), str(program), *arguments]
    except build.BuildError:
        command = [sys.executable, str(Path(arm_process.__file__)), str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
