"""Describes the machine of ``make gpu``: first the parts that are missing, a line each, then device, driver and versions of everything
that decides a result. Wheels of the option ``--wheels`` are unpacked before. Status 1 if torch sees no GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import parts
import wheels

PACKAGES = ("deepspeed", "pydantic", "nvidia-nvcomp-cu13", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "cupy-cuda13x", "pytest",
            "pytest-timeout", "hypothesis", "numba", "numpy")  # fmt: skip


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout.strip()


def device() -> dict[str, Any]:
    """The first GPU."""
    import torch
    import where

    if where.DRY:
        return {"name": "no device: a dry run"}
    found = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    return {
        "name": found.name, "capability": f"{found.major}.{found.minor}", "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory, "free_bytes": free, "count": torch.cuda.device_count(),
    }  # fmt: skip


def facts() -> dict[str, Callable[[], Any]]:
    """Each on its own: one that cannot be read leaves its reason, and the others."""
    import driver
    import torch

    from ds_zipccl.kernels import build
    from ds_zipccl.tools import tables

    return {
        "device": device,
        "driver": lambda: _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": lambda: torch.__version__,
        "cuda": lambda: torch.version.cuda,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "nvcc": lambda: f"{build.nvcc()[0]}: {_said(*build.nvcc(), '--version').splitlines()[-1]}",
        "c++": lambda: _said(*build.compiler(), "--version").splitlines()[0],
        "sanitizer": driver.sanitizer_path,
        "kernels": lambda: str(build.cache_root()),
        "host": tables.machine,
        "kernel": platform.release,
        "python": platform.python_version,
        "packages": lambda: {name: tables.version(name) for name in PACKAGES},
        "environment": lambda: {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NCCL", "TORCH", "DS_ZIPCCL", "NVIDIA_VISIBLE"))
        },
    }  # fmt: skip


def main() -> int:
    try:
        wheels.unpack(os.environ.get(wheels.WHEELS, ""), Path(os.environ[figures.SCRATCH]) / wheels.SITE)
    except SystemExit as error:  # what is missing then says the rest
        print(f"wheels: {error}", flush=True)
    missing = parts.missing()
    for name, line in missing.items():
        print(f"missing {name}: {line}", flush=True)
    wanted = {} if os.environ.get("ZIPCCL_DRY") else missing  # a dry run has stand-ins
    figures.put(missing=wanted)
    figures.tell("missing", wanted)
    if vital := [part.name for part in parts.VITAL if part.name in missing]:
        print(f"nothing can run without {' and '.join(vital)}", flush=True)
        return 1
    found: dict[str, Any] = {}
    for name, fact in facts().items():
        try:
            found[name] = fact()
        except Exception as error:
            found[name] = f"unknown: {type(error).__name__}: {error}"
        print(f"{name}: {found[name]}", flush=True)
        figures.put(**found)
    return 0 if isinstance(found["device"], dict) else 1


if __name__ == "__main__":
    sys.exit(main())
