"""Host time of coded calls on NCCL groups, without a device: ``python -m ds_zipccl.benchmarks.comm.host_time --json PATH``.

This process is rank 0 of a fake group. The schedules of the package run as on a GPU: the kernel backend of CUDA, whose
launcher counts; streams and events, which count; and torch's own Python of each collective, on a few bytes. So the
times are those of Python alone: CUDA and NCCL add theirs. Frames have another size in each call, as in a training.

``--device cuda``: with real kernels, streams, events and copies to the host; NCCL's time is still missing. Frames of
other ranks never come, so that their decoders launch and refuse. The device is idle when a timed call begins. Events
and streams are not counted there.

Columns: us, min_us: median and least microseconds of a call; plain: median in units of a plain gather, of the same
process. records, waits: events recorded, and waits of streams for them; contexts: streams that became the current one;
launches: kernels; collectives: of the group, with the agreements, for which the host waits host_waits times.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl import comm, devices, kernels
from ds_zipccl.benchmarks.comm import counted
from ds_zipccl.benchmarks.comm.counted import BACKEND, DEVICE
from ds_zipccl.benchmarks.fabric.clock import PROCESSORS, Clock
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status
from ds_zipccl.kernels.cuda.jobs import frame_bytes
from ds_zipccl.kernels.cuda.launchers import Launcher
from ds_zipccl.policy import admission
from ds_zipccl.telemetry import counters
from ds_zipccl.tools import tables
from ds_zipccl.tools.tables import Column

#: Nodes, and GPUs of a node.
NODES, EACH = 2, 8
#: Words by bytes of frames, one after the other; bytes of the words of a gather, a sum and an exchange.
RATIOS, GATHER, SUM, EXCHANGE = (1.46, 1.52, 1.49, 1.44), 90_177_536, 100_000_000, 83_886_080
#: Calls before the first one that counts, and calls that count.
WARM, CALLS = 12, 200
CONFIG = ZipcclConfig(enabled=True, mode="always", nccl="on", reduction="fp32")
COLUMNS = (
    Column("call", width=34),
    *tables.alike("us min_us", ",.0f", 7),
    Column("plain", ".1f", 7),
    *tables.alike("records waits contexts launches collectives host_waits", "d"),
)

#: Its streams never have work. What has been counted since the last call began.
_clock = Clock()
counts = _clock.counts


class _Launcher:
    """Launches nothing, by a call of C."""

    def launch(self, *arguments: Any) -> None:
        counts["launches"] += 1
        _getpid()


_getpid = ctypes.CDLL(None).getpid


class _Device(_Launcher):
    """Launches on a device. Decoders refuse what no rank has sent, and report that to a word of their own: no call fails."""

    def __init__(self, launcher: Launcher, status: torch.Tensor) -> None:
        self._real, self._status = launcher, status

    def launch(self, kernel: str, grid: tuple[int, int], shared: int, params: Any, stream: int) -> None:
        counts["launches"] += 1
        if "decode" in kernel:
            params.status = self._status.data_ptr()
        self._real.launch(kernel, grid, shared, params, stream)


class _Backend(CudaBackend):
    """Frames of another size in each call."""

    ratios = itertools.cycle(RATIOS)

    def frame_sizes(self, segments: Any, code: str, block: int, headers: torch.Tensor, bases: Any = None) -> None:
        super().frame_sizes(segments, code, block, headers, bases)
        frame_bytes(headers.view(len(segments), -1)).fill_(int(segments[0].nbytes / next(self.ratios)))


class _Transport(NcclTransport):
    """torch's collectives with the same arguments, on a few bytes, because the fake group copies."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._part, self._whole = (torch.zeros(size, dtype=torch.uint8) for size in (1, group.size()))

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        counts["collectives"] += 1
        super().all_gather(self._whole, self._part)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        counts["collectives"] += 1
        ones = None if received_sizes is None else [1] * len(received_sizes)
        super().all_to_all(self._whole, self._whole, ones, ones)

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        counts["collectives"] += 1
        super().exchange(dict.fromkeys(received, self._part), dict.fromkeys(sent, self._part))

    def max(self, words: torch.Tensor) -> None:
        counts["collectives"] += 1
        super().max(words)


@contextmanager
def installed(device: str = DEVICE.type) -> Iterator[None]:
    """Make this process rank 0 of the fake group, with these collectives, for a while. On CPUs, streams and kernels only count."""
    before = dict(admission.CODED_BACKENDS), admission.STREAM_BACKENDS, dict(kernels.ROUTES["cpu"])
    runtime = devices.RUNTIMES.get("cpu")
    counted.install(_Transport, lambda: _Backend(_Launcher(), "cpu", PROCESSORS))
    devices.RUNTIMES["cpu"] = cast(Any, _clock.runtime)
    if device != DEVICE.type:
        admission.CODED_BACKENDS[device] += (BACKEND,)
        launches = cast(CudaBackend, kernels.route("auto", device))._launches
        launches._launcher = _Device(launches._launcher, new_status(torch.device(device)))
    try:
        with counted.world(NODES, EACH, counted.Counting(), device):
            yield
    finally:
        admission.CODED_BACKENDS.update(before[0])
        admission.STREAM_BACKENDS = before[1]
        kernels.ROUTES["cpu"] = before[2]
        devices.RUNTIMES.pop("cpu") if runtime is None else devices.RUNTIMES.update(cpu=runtime)


def calls(device: str = DEVICE.type) -> dict[str, Callable[[], object]]:
    """Return the calls by name. The first one is the plain gather."""
    ranks = NODES * EACH

    def words(nbytes: int) -> torch.Tensor:
        found = torch.empty(nbytes // 2 // ranks * ranks, dtype=torch.bfloat16, device=device)
        return found if device == DEVICE.type else found.normal_()

    whole, bucket, tokens = words(GATHER), words(SUM), words(EXCHANGE)
    shard, part = (one[: len(one) // ranks] for one in (whole, bucket))
    target, parameter = words(EXCHANGE), comm.parameter(resolve_group(None), device, "0", len(shard))
    comm.agree_sizes([(parameter, shard)], config=CONFIG)
    small = ZipcclConfig(enabled=True, nccl="on", min_bytes=1 << 30)
    role: Any = {"config": CONFIG, "role": "zero_param"}

    def agree() -> None:
        parameter.forget()
        comm.agree_sizes([(parameter, shard)], config=CONFIG)

    return {
        "plain gather": lambda: dist.all_gather_into_tensor(_one_each(ranks), _one_each(1)),
        "gather that passes": lambda: comm.all_gather_into_tensor(_one_each(ranks), _one_each(1), config=small),
        "gather, 90 MB": lambda: comm.all_gather_into_tensor(whole, shard, **role, parameters=[parameter]),
        "gather, 90 MB, no agreed sizes": lambda: comm.all_gather_into_tensor(whole, shard, **role),
        "agreement on a parameter": agree,
        "reduce-scatter, 100 MB": lambda: comm.reduce_scatter_tensor(part, bucket, config=CONFIG, role="zero_grad"),
        "all-to-all, 84 MB": lambda: comm.all_to_all_single(target, tokens, config=CONFIG, role="ep"),
    }


_ones: dict[int, torch.Tensor] = {}


def _one_each(ranks: int) -> torch.Tensor:
    return _ones.setdefault(ranks, torch.zeros(ranks, dtype=torch.bfloat16))


def measured(call: Callable[[], object], times: int = CALLS, device: str = DEVICE.type) -> dict[str, Any]:
    """Return the microseconds of a call, and what one call counts. Blocks."""
    idle: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else int
    for _ in range(WARM):
        call()
    counters.reset()
    counts.clear()
    call()
    names = ("records", "waits", "contexts", "launches", "collectives")
    seen = names if device == DEVICE.type else names[3:]
    row: dict[str, Any] = {name: counts[name] if name in seen else None for name in names}
    row["host_waits"] = sum(one["host_waits"] for one in counters.rows())
    seconds = []
    for _ in range(times):
        idle()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return row | {"us": 1e6 * statistics.median(seconds), "min_us": 1e6 * min(seconds)}


def rows(device: str = DEVICE.type, times: int = CALLS) -> list[dict[str, Any]]:
    """Return a row for each call of :func:`calls`. Blocks for a second."""
    with installed(device):
        found = [{"call": name, **measured(call, times, device)} for name, call in calls(device).items()]
    return [row | {"plain": row["us"] / found[0]["us"]} for row in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    counted.run(__doc__, "host_time", COLUMNS, rows, "Measured", ("cpu", "cuda"))
