"""Host time of coded calls on NCCL groups, without a device: ``python -m ds_zipccl.benchmarks.comm.host_time --json PATH``.

This process is rank 0 of a fake group. The schedules of the package run as on a GPU: the kernel backend of CUDA, whose
launcher counts; streams and events, which count; and torch's own Python of each collective, on a few bytes. So the
times are those of Python alone: CUDA and NCCL add theirs. Frames have another size in each call, as in a training.

Columns: us, min_us: median and least microseconds of a call; plain: median in units of a plain gather, of the same
process. records, waits: events recorded, and waits of streams for them; contexts: streams that became the current one;
launches: kernels; collectives: of the group, with the agreements, for which the host waits host_waits times.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl import comm, devices, kernels
from ds_zipccl.benchmarks.comm import counted
from ds_zipccl.benchmarks.comm.counted import DEVICE
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.cuda.jobs import frame_bytes
from ds_zipccl.policy import admission
from ds_zipccl.telemetry import counters
from ds_zipccl.tools import tables
from ds_zipccl.tools.tables import Column

#: Nodes, and GPUs of a node.
NODES, EACH = 2, 8
#: Words by bytes of frames, one after the other; bytes of the words of a gather, a sum and an exchange.
RATIOS, GATHER, SUM, EXCHANGE = (1.46, 1.52, 1.49, 1.44), 90_177_536, 100_000_000, 83_886_080
#: Calls before the first one that counts, calls that count, and multiprocessors of the device.
WARM, CALLS, PROCESSORS = 12, 200, 132
CONFIG = ZipcclConfig(enabled=True, mode="always", nccl="on", reduction="fp32")
COLUMNS = (
    Column("call", width=34),
    *tables.alike("us min_us", ",.0f", 7),
    Column("plain", ".1f", 7),
    *tables.alike("records waits contexts launches collectives host_waits", "d"),
)

#: What has been counted since the last call began.
counts: Counter[str] = Counter()


class _Launcher:
    """Launches nothing, by a call of C."""

    def launch(self, *arguments: Any) -> None:
        counts["launches"] += 1
        _getpid()


_getpid = ctypes.CDLL(None).getpid


class _Backend(CudaBackend):
    """Frames of another size in each call."""

    ratios = itertools.cycle(RATIOS)

    def frame_sizes(self, segments: Any, code: str, block: int, headers: torch.Tensor, bases: Any = None) -> None:
        super().frame_sizes(segments, code, block, headers, bases)
        frame_bytes(headers.view(len(segments), -1)).fill_(int(segments[0].nbytes / next(self.ratios)))


class _Event:
    def query(self) -> bool:
        return True


class _Stream:
    cuda_stream = 7

    def __init__(self, *given: Any, **named: Any) -> None:
        """A stream of any device and priority."""

    def record_event(self, event: Any = None) -> _Event:
        counts["records"] += 1
        return _EVENT

    def wait_event(self, event: Any) -> None:
        counts["waits"] += 1


_EVENT, _STREAM = _Event(), _Stream()


class _Inside:
    """A context that counts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        counts[self._name] += 1

    def __exit__(self, *error: object) -> None:
        pass


class Runtime:
    """The calls of ``torch.cuda`` that streams need, without a device."""

    Stream = _Stream

    def Event(self, **named: Any) -> _Event:
        return _EVENT

    def current_stream(self, device: Any = None) -> _Stream:
        return _STREAM

    def stream(self, stream: _Stream) -> _Inside:
        return _Inside("contexts")

    def device(self, device: Any) -> _Inside:
        return _Inside("devices")

    def is_current_stream_capturing(self) -> bool:
        return False


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
def installed() -> Iterator[None]:
    """Make this process rank 0 of the fake group, with these kernels, streams and collectives, for a while."""
    before = dict(admission.CODED_BACKENDS), admission.STREAM_BACKENDS, dict(kernels.ROUTES["cpu"])
    runtime = devices.RUNTIMES.get("cpu")
    counted.install(_Transport, lambda: _Backend(_Launcher(), "cpu", PROCESSORS))
    devices.RUNTIMES["cpu"] = cast(Any, Runtime())
    try:
        with counted.world(NODES, EACH, counted.Counting()):
            yield
    finally:
        admission.CODED_BACKENDS.update(before[0])
        admission.STREAM_BACKENDS = before[1]
        kernels.ROUTES["cpu"] = before[2]
        devices.RUNTIMES.pop("cpu") if runtime is None else devices.RUNTIMES.update(cpu=runtime)


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls by name. The first one is the plain gather."""
    ranks = NODES * EACH

    def words(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes // 2 // ranks * ranks, dtype=torch.bfloat16)

    whole, bucket, tokens = words(GATHER), words(SUM), words(EXCHANGE)
    shard, part = (one[: len(one) // ranks] for one in (whole, bucket))
    target, parameter = words(EXCHANGE), comm.parameter(resolve_group(None), DEVICE.type, "0", len(shard))
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


def measured(call: Callable[[], object], times: int = CALLS) -> dict[str, Any]:
    """Return the microseconds of a call, and what one call counts. Blocks."""
    for _ in range(WARM):
        call()
    counters.reset()
    counts.clear()
    call()
    names = ("records", "waits", "contexts", "launches", "collectives")
    row: dict[str, Any] = {name: counts[name] for name in names}
    row["host_waits"] = sum(one["host_waits"] for one in counters.rows())
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return row | {"us": 1e6 * statistics.median(seconds), "min_us": 1e6 * min(seconds)}


def rows(times: int = CALLS) -> list[dict[str, Any]]:
    """Return a row for each call of :func:`calls`. Blocks for a second."""
    with installed():
        found = [{"call": name, **measured(call, times)} for name, call in calls().items()]
    return [row | {"plain": row["us"] / found[0]["us"]} for row in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    counted.run(__doc__, "host_time", COLUMNS, rows, "Measured")
