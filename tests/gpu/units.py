"""Times of a GPU of which estimates of coded calls are made. In a dry run the CPU stands for the GPU.

    python tests/gpu/units.py units|beside|bus|counters FILE|kernels

units: microseconds of the smallest calls. beside: what the kernels of the codec take from matrix products on another stream. bus: copies
from host memory by this process alone, and the figure that comm/device/calibration.py finds for them. counters: the bandwidth of decoders
as a part of a copy's, from the FILE of `bench codec`; where ncu is, its counters of the program "kernels" too.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import figures
import torch
import torch.distributed as dist
import where

from ds_zipccl.comm.device import calibration
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status
from ds_zipccl.policy import cost_model

Call = Callable[[], object]
#: Calls of a batch, which fit into the queue of a stream; batches, of which the median counts.
CALLS, BATCHES = (3, 2) if where.DRY else (200, 15)
#: Side of the matrices; bytes of the words that are coded beside the products; products of a run; runs of each case.
SIDE, CODED_BYTES, PRODUCTS, RUNS = (8, 1 << 12, 2, 2) if where.DRY else (8192, 16 << 20, 24, 9)
#: Time of the kernels of the codec alone / time of the products alone.
DUTIES = (0.05, 0.1, 0.2)
#: Cycles for which the device waits before a run, so that the host has queued the run by then: some 20 ms.
AHEAD = 40_000_000
#: MiB of a copy, and copies of each size.
MIB, COPIES = ((1, 2), 3) if where.DRY else ((8, 64, 256, 1024), 9)
#: Bytes of the words that are coded under ncu; what it counts: bytes of memory, nanoseconds, and parts of peaks: of memory's bandwidth, of
#: the issue rate, and of the integer pipe.
COUNTED_BYTES, PEAK = 256 << 20, ".avg.pct_of_peak_sustained"
COUNTERS = ["dram__bytes.sum", "gpu__time_duration.sum", f"dram__throughput{PEAK}_elapsed"]
COUNTERS += [f"sm__inst_issued{PEAK}_active", f"sm__inst_executed_pipe_alu{PEAK}_active"]


def synchronize() -> None:
    if not where.DRY:
        torch.cuda.synchronize()


def order(first: Any, second: Any) -> None:
    """Let the second stream wait for the work that is on the first one now."""
    if not where.DRY:
        second.wait_event(first.record_event())


def on_device(work: Call, stream: Any) -> float:
    """Seconds that ``stream`` takes for ``work``. Blocks."""
    synchronize()
    if where.DRY:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(AHEAD)
        begin.record()
        work()
        end.record()
    synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """The group of this process alone."""
    if where.DRY:
        from ds_zipccl.benchmarks.links import slots

        slots.install()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(where.HERE.backend, store=store, rank=0, world_size=1)
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        dist.destroy_process_group()


def coder(nbytes: int) -> tuple[CudaBackend, dict[str, Call]]:
    """A kernel backend that works here, and its calls for words of ``nbytes`` bytes."""
    backend, device = where.HERE.route((figures.told("usable") or ["native"])[0]), where.HERE.device
    words = torch.randn(nbytes // 2, device=device).bfloat16()
    out, slot = torch.empty_like(words), torch.empty(2 * nbytes, dtype=torch.uint8, device=device)
    status = new_status(device)
    encode = partial(backend.encode_frames, [words], "cascade", 1024, [slot])
    encode()
    decode = partial(backend.decode_frames, [slot], 1024, [out], status)
    add = partial(backend.decode_sum_frames, [slot] * 8, 1024, words.dtype, out, status)
    return backend, {"encode": encode, "decode": decode, "sum": add}


def units() -> None:
    """Microseconds of the host for a call, and of the host and the device together, in batches."""
    word, pinned = torch.zeros(1, device=where.HERE.device), torch.empty(1024, pin_memory=not where.DRY)
    place, (first, second) = pinned.to(where.HERE.device), where.HERE.streams(2)
    backend, coding = coder(4096)
    launcher: Any = backend._launches._launcher
    last: list[Any] = []
    backend._launches._launcher = type("Recorder", (), {"launch": lambda self, *words: last.append(words)})()
    coding["decode"]()  # whose kernel may run again and again on the same memory
    backend._launches._launcher = launcher
    figures.put(parameter_bytes=ctypes.sizeof(last[0][3]))

    def current() -> None:
        with where.HERE.on(first):
            pass

    memset: Call = int
    if not where.DRY:
        function = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
        function.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
        memset = partial(function, place.data_ptr(), 0, 4096, torch.cuda.current_stream().cuda_stream)
    with one_rank() as group:
        calls: dict[str, Call] = {
            "launch": partial(word.fill_, 1.0),
            "launch of a decoder": lambda: launcher.launch(*last[0]),
            "event, recorded and waited for": lambda: order(first, second),
            "stream made current": current,
            "memset": memset,
            "pinned copy": lambda: place.copy_(pinned, non_blocking=True),
            "gather of one rank": lambda: dist.all_gather_into_tensor(word, word, group),
        }
        for name, call in calls.items():
            times: list[tuple[float, float]] = []
            for _ in range(1 + BATCHES):  # the first one warms up
                synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                host = time.perf_counter() - start
                synchronize()
                times.append((host, time.perf_counter() - start))
            host_us, both_us = (round(1e6 * statistics.median(some) / CALLS, 2) for some in zip(*times[1:]))
            figures.put(**{name: {"host_us": host_us, "both_us": both_us}})
            print(f"{name}: {host_us} us of the host, {both_us} us with the device", flush=True)


def beside() -> None:
    """Seconds by which products become slower per second of kernels of the codec: in runs with the kernels and without, in turns."""
    left, right = (torch.randn(SIDE, SIDE, device=where.HERE.device).bfloat16() for _ in range(2))
    product, (main, other), rows = torch.empty_like(left), where.HERE.streams(2), list[dict[str, Any]]()
    _, coding = coder(CODED_BYTES)

    def run(call: Call, times: int, products: int = 1) -> None:
        for _ in range(PRODUCTS):
            order(main, other)
            with where.HERE.on(other if products else main):
                for _ in range(times):
                    call()
            if products:
                torch.mm(left, right, out=product)

    for name in ("encode", "decode"):
        call = coding[name]
        alone = statistics.median(on_device(partial(run, call, 1, 0), main) for _ in range(RUNS)) / PRODUCTS
        for duty in DUTIES:
            plain = statistics.median(on_device(partial(run, call, 0), main) for _ in range(RUNS))
            times = max(1, round(duty * plain / PRODUCTS / alone))
            kernels, both = PRODUCTS * times * alone, (partial(run, call, 0), partial(run, call, times))
            pairs = [[on_device(work, main) for work in both] for _ in range(RUNS)]
            lost = sorted((slow - fast) / kernels for fast, slow in pairs)
            row = {"call": name, "call_us": 1e6 * alone, "duty": kernels / plain, "products_ms": 1e3 * plain}
            rows.append(row | {"lost": statistics.median(lost), "least": lost[0], "most": lost[-1]})
            figures.put(rows=rows, lost_per_second=statistics.median(one["lost"] for one in rows))
            print(rows[-1], flush=True)


def bus() -> None:
    """GB/s of copies from pinned host memory: the first one of new memory, and the median of the next ones; and by the calibration."""
    rows = list[dict[str, Any]]()
    (stream,) = where.HERE.streams(1)
    for mib in MIB:
        there = torch.empty(mib << 20, dtype=torch.uint8, device=where.HERE.device)
        copy = partial(
            there.copy_, torch.empty(mib << 20, dtype=torch.uint8, pin_memory=not where.DRY), non_blocking=True
        )
        cold, *warm = (there.nbytes / on_device(copy, stream) / 1e9 for _ in range(COPIES))
        rows.append({"mib": mib, "cold_gbps": cold, "warm_gbps": statistics.median(warm)})
        figures.put(rows=rows)
        print(rows[-1], flush=True)
    with one_rank() as group:
        config = ZipcclConfig(enabled=True, nccl="on")
        ctx = DeviceContext("calibrate", group, config, "dp", "cascade", where.HERE.device)
        points = calibration._points(ctx, calibration.SIZES, partial(calibration._from_host, copies=True))
    figures.put(calibration_gbps=cost_model.slope(points) / 1e9, calibration_points=points)
    print(f"calibration: {cost_model.slope(points) / 1e9:.1f} GB/s", flush=True)


def counters(file: str) -> None:
    """Bytes moved per second, as parts of a copy's: by a decoder, and by the sum of eight frames (``sum``), which decodes and adds."""
    rows = [row for row in figures.read(Path(file)).get("rows", ()) if row["sum_moved"] and not row["offset"]]
    most = max((row["mib"] for row in rows), default=0)
    parts = {"decode": "decode_moved", "sum": "sum_moved"}
    moved = {
        f"{one['route']} {one['codec']}": {name: one[key] for name, key in parts.items()}
        for one in rows
        if one["mib"] == most
    }
    figures.put(mib=most, of_a_copy=moved)
    tool = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if tool is None or where.DRY:
        figures.put(left_out="ncu is missing")
        return
    words = [
        tool,
        *"--csv --page raw --print-units base --profile-from-start off --metrics".split(),
        ",".join(COUNTERS),
    ]
    words = ["timeout", f"{0.8 * figures.seconds(60):.0f}", *words, sys.executable, __file__, "kernels"]
    said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    table = csv.DictReader(line for line in said.splitlines() if line.startswith('"'))
    found = {row["Kernel Name"]: {name: row.get(name) for name in COUNTERS} for row in table if row["ID"]}
    figures.put(**({"counters": found} if found else {"left_out": said[-500:]}))


def kernels() -> None:
    """Run each kernel under ncu: once before it counts, and once more."""
    _, coding = coder(COUNTED_BYTES)
    for begin in (int, torch.cuda.profiler.start):
        begin()
        for call in coding.values():
            call()
        synchronize()


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {one.__name__: one for one in (units, beside, bus, counters, kernels)}
    programs[sys.argv[1]](*sys.argv[2:])
