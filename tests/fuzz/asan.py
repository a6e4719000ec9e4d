"""Builds fuzz.cpp with the codec under AddressSanitizer and UBSan, and runs it.

``python tests/fuzz/asan.py [SECONDS]`` fuzzes for that long (default 600) from a new seed, and prints the command that repeats the run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_zipccl.kernels import build

FLAGS = (
    "-g1",
    "-std=c++17",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-pthread",
)
DRIVER = Path(__file__).with_name("fuzz.cpp")


def build_fuzzer(folder: Path, csrc: Path = build.CSRC, optimization: str = "-O0") -> Path:
    """Compile the fuzzer to ``folder`` with the codec sources in ``csrc``, and return its path.

    Compiling takes longer than a hundred thousand mutations: -O0 is for short runs.

    Raises:
        RuntimeError: the compiler failed; the message has its output.
    """
    target = folder / "fuzz"
    sources = {DRIVER: (), **{csrc / name: flags for name, flags in build.CPU.sources.items()}}
    common = (*build.compiler(), optimization, *FLAGS, f"-I{csrc}")
    objects = {source: folder / f"{source.name}.o" for source in sources}
    with ThreadPoolExecutor() as pool:
        list(pool.map(_compile, ((*common, *sources[at], "-c", at, "-o", objects[at]) for at in sources)))
    _compile((*common, *objects.values(), "-o", target))
    return target


def _compile(command: Sequence[str | Path]) -> None:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stderr}")


def run(fuzz: Path, seed: int, mutations: int, seconds: int, levels: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the fuzzer once; status 0 and one line of counts if it found nothing."""
    command = [str(fuzz), str(seed), str(mutations), str(seconds), *levels]
    # No search for leaks: it needs ptrace, which containers forbid, and the codec allocates nothing.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 300)


def main() -> None:
    import variants

    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    levels = [variant.level for variant in variants.usable() if variant.level]
    with tempfile.TemporaryDirectory() as folder:
        result = run(build_fuzzer(Path(folder), optimization="-O2"), int(time.time()), 1 << 60, seconds, levels)
    print(" ".join(result.args[1:]), result.stdout, result.stderr, sep="\n")
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
