"""Describes the machine of ``make gpu``: device, driver, versions of everything that decides a result. Status 1 if torch sees no GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import driver
import figures
import torch
import where

from ds_zipccl.bench import tables
from ds_zipccl.kernels import build

PACKAGES = ("deepspeed", "pydantic", "nvidia-nvcomp-cu13", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "pytest",
            "pytest-timeout", "hypothesis", "numba", "numpy")  # fmt: skip


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout.strip()


def device() -> dict[str, Any]:
    """The first GPU."""
    if where.DRY:
        return {"name": "no device: a dry run"}
    found = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    return {
        "name": found.name, "capability": f"{found.major}.{found.minor}", "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory, "free_bytes": free, "count": torch.cuda.device_count(),
    }  # fmt: skip


#: Each on its own: one that cannot be read leaves its reason, and the others.
FACTS: dict[str, Callable[[], Any]] = {
    "device": device,
    "driver": lambda: _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "torch": lambda: torch.__version__,
    "cuda": lambda: torch.version.cuda,
    "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    "nvcc": lambda: f"{build.nvcc()[0]}: {_said(*build.nvcc(), '--version').splitlines()[-1]}",
    "c++": lambda: _said(*build.compiler(), "--version").splitlines()[0],
    "sanitizer": lambda: driver.sanitizer_path(),
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
    found = {}
    for name, fact in FACTS.items():
        try:
            found[name] = fact()
        except Exception as error:
            found[name] = f"unknown: {type(error).__name__}: {error}"
        print(f"{name}: {found[name]}", flush=True)
        figures.put(**found)
    return 0 if isinstance(found["device"], dict) else 1


if __name__ == "__main__":
    sys.exit(main())
