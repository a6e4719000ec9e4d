"""Builds fuzz.cpp with the codec under AddressSanitizer and UBSan, and runs it.

``python tests/fuzz/asan.py [SECONDS]`` fuzzes for that long (default 600) from a new seed, and prints the command that repeats the run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from builds import Binary, Change

from ds_zipccl.kernels import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
FLAGS = ("-g1", "-std=c++17", "-pthread", *SANITIZERS)
FOLDERS = {"csrc": build.CSRC, "fuzz": Path(__file__).parent}
#: Changes with which the codec has its portable level alone, that of :data:`PORTABLE`: it compiles in a third of the time.
ONE_LEVEL = {"csrc/cpu/dispatch.cpp": (("defined(__x86_64__)", "0"), ("defined(__aarch64__)", "0"))}
PORTABLE = {f"csrc/{name}": flags for name, flags in build.cpu("").objects}
#: Up to here compiling with -O2 takes longer than it saves.
SHORT_SECONDS = 120


def fuzzer(optimization: str = "-O0", changes: Mapping[str, tuple[Change, ...]] | None = None) -> Binary:
    """The fuzzer with the codec in it. With ``changes`` to files of csrc the codec has its portable level alone.

    Compiling takes longer than a hundred thousand mutations: -O0 is for short runs.
    """
    codec = dict(PORTABLE) if changes else {f"csrc/{name}": flags for name, flags in build.CPU.objects}
    # lambdas are inlined there: memory that has gone out of scope is noticed
    codec["csrc/cpu/rows/rows.cpp"] += ("-O2",)
    return Binary(
        "fuzz",
        FOLDERS,
        {"fuzz/fuzz.cpp": (), **codec},
        (optimization, *FLAGS),
        changes={f"csrc/{file}": changed for file, changed in changes.items()} | ONE_LEVEL if changes else {},
    )


def alone(codec: str) -> dict[str, tuple[str, ...]]:
    """Sources of "lowrank", "zfp" or "maps" that link without the rest of the C++ kernels, and compile in seconds."""
    if codec == "maps":
        return {"csrc/cpu/rows/row_map.cpp": ()}
    return {f"csrc/cpu/lossy/{codec}.cpp": (), "fuzz/lossy_alone.cpp": ()}


def fuzzer_of(codec: str, changes: Mapping[str, tuple[Change, ...]] | None = None) -> Binary:
    """The fuzzer of a codec of :func:`alone`, with ``changes`` to files of csrc."""
    changed = {f"csrc/{file}": change for file, change in (changes or {}).items()}
    sources = {f"fuzz/fuzz_{codec}.cpp": (), **alone(codec)}
    return Binary(f"fuzz_{codec}", FOLDERS, sources, ("-O1", "-ffp-contract=off", *FLAGS), changes=changed)


def run(
    fuzz: Path, seed: int, mutations: int, seconds: int | None = None, levels: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer once; status 0 and one line of counts if it found nothing. The fuzzer of the whole codec takes seconds and levels."""
    command = [str(fuzz), str(seed), str(mutations), *([] if seconds is None else [str(seconds)]), *levels]
    # No search for leaks: it needs ptrace, which containers forbid, and the codec allocates nothing.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=(seconds or 0) + 300)


def main() -> None:
    import variants

    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    levels = [variant.level for variant in variants.usable() if variant.level]
    optimization = "-O2" if seconds > SHORT_SECONDS else "-O0"
    result = run(fuzzer(optimization).path(), int(time.time()), 1 << 60, seconds, levels)
    print(" ".join(result.args[1:]), result.stdout, result.stderr, sep="\n")
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
