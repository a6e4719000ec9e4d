"""Benchmarks of ``make gpu`` without a GPU, for a dry run: emulated kernels, and small buffers.

python tests/gpu/dry_bench.py bench codec --device cuda ...          # the host's clock stands for the device's
python tests/gpu/dry_bench.py bench comm --backend nccl ...          # groups in stream order on CPUs (benchmarks/links/slots.py)
python tests/gpu/dry_bench.py bench train --backend nccl ...
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
import variants  # puts the emulated kernels among the routes of the CPU

from ds_zipccl import kernels
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.codec import cuda, floors
from ds_zipccl.benchmarks.links import backends, slots


def seconds(calls: Callable[[], object], repeats: int, eager: bool) -> float:
    """Stands for the time of the device."""
    times = []
    for _ in range(min(repeats, 2)):
        start = time.perf_counter()
        calls()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def prepare_codec() -> None:
    """Let the benchmark of the codec use the CPU."""
    assert "emulated" in variants.FOR_TESTS
    emulated = kernels.ROUTES["cpu"]["emulated"]
    kernels.ROUTES["cpu"] = {"native": emulated, "cupy": emulated}
    cuda.DEVICE, cuda.MIB_BYTES, cuda.ROTATE_BYTES, cuda.PYTHON_CALLS, cuda.PYTHON_RANKS = "cpu", 1 << 6, 1, 1, 2
    cuda._seconds = seconds  # type: ignore[assignment]
    floors.missed = lambda compared: []  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(name="emulation", total_memory=0)


def prepare_ranks() -> None:
    """Let groups in stream order on CPUs stand for NCCL's."""
    slots.install()
    nccl = backends.BACKENDS["nccl"]
    backends.BACKENDS["nccl"] = replace(nccl, name=slots.NAME, device="cpu")


# The processes of `bench comm` are spawned: each runs the lines of this file anew, under another name.
if "codec" in sys.argv:
    prepare_codec()
else:
    prepare_ranks()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
