"""``bench codec --device cuda`` without a GPU, for a dry run: emulated kernels, small buffers, and the host's clock for the device's.

python tests/gpu/dry_bench.py bench codec --device cuda ...
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import variants  # puts the emulated kernels among the routes of the CPU

from ds_zipccl import kernels
from ds_zipccl.__main__ import main
from ds_zipccl.bench import cuda, floors


def seconds(calls: Callable[[], object], repeats: int, eager: bool) -> float:
    """Stands for the time of the device."""
    times = []
    for _ in range(min(repeats, 2)):
        start = time.perf_counter()
        calls()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def prepare() -> None:
    """Let the benchmark use the CPU."""
    assert "emulated" in variants.FOR_TESTS
    emulated = kernels.ROUTES["cpu"]["emulated"]
    kernels.ROUTES["cpu"] = {"native": emulated, "nvrtc": emulated}
    cuda.DEVICE, cuda.MIB_BYTES, cuda.ROTATE_BYTES, cuda.PYTHON_CALLS, cuda.PYTHON_RANKS = "cpu", 1 << 6, 1, 1, 2
    cuda._seconds = seconds  # type: ignore[assignment]
    floors.missed = lambda compared: []  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(name="emulation", total_memory=0)


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
