"""The stand-alone driver (driver.cu) as a program: built with nvcc for the GPU that is here, or for the emulation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import builds
from places import TESTS

from ds_zipccl.kernels import build

HERE = Path(__file__).parent
#: -lineinfo: sanitizers name lines; the machine code is the same.
_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-diag-suppress=177,186")


def for_gpu(architectures: list[str] | None = None) -> Path:
    """The driver with the kernels in it, compiled unless it is there already (about a minute).

    Raises:
        BuildError: there is no nvcc or no device, or nvcc failed.
    """
    return compiled("driver", (HERE / "driver.cu", build.CSRC / "cuda" / "launch.cu"), architectures)


def compiled(
    name: str, sources: tuple[Path, ...], architectures: list[str] | None = None, flags: tuple[str, ...] = ()
) -> Path:
    """What nvcc makes of ``sources`` for the devices here, or for compute capabilities such as "9.0"; kept by content."""
    compiler = build.nvcc()
    targets = [flag for flag in build.cuda(architectures or build.architectures()).flags if flag.startswith("-gencode")]
    command = [*compiler, *_FLAGS, *flags, *targets, f"-I{build.CSRC}", *map(str, sources)]

    def make(target: Path) -> None:
        result = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, timeout=builds.SECONDS)
        if result.returncode:
            raise build.BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")

    parts = [build._identity(compiler), *_FLAGS, *flags, *targets, *builds.contents({"csrc": build.CSRC, "gpu": HERE})]
    return builds.kept(f"gpu_{name}", [*parts, *(source.name for source in sources)], make)


def for_emulation() -> Path:
    """The driver that loads the emulated kernels: ``--library`` names them.

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    folders = {"csrc": build.CSRC, "emulation": TESTS / "emulation", "gpu": HERE}
    flags = ("-O1", "-std=c++17", f"-I{TESTS / 'emulation'}")
    return builds.Binary("emulated_driver", folders, {"gpu/driver.cu": ("-x", "c++")}, flags, ("-ldl",)).path()
