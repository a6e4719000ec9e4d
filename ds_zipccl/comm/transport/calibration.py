"""The measurement of a group's :class:`~ds_zipccl.policy.cost_model.LinkProfile`, equal on all ranks of the group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import compress, compress_bound, decompress, decompress_add, region_hash
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TagRange, Transport
from ds_zipccl.policy import trial
from ds_zipccl.policy.cost_model import LinkProfile

#: Bytes of the exchanges (seed: the last two are large against the burst that a shaped link lets through at once).
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
#: Seconds of all exchanges (seed: the whole calibration then takes less than two seconds).
_BUDGET_S = 1.4
#: Seconds of all exchanges of one size in a round, most such exchanges, and their bytes each way (seed: over loopback a GB costs a core
#: second of the job's start). At least one is made. The median counts; the first exchange counts only where no second one was made.
_SIZE_BUDGET_S = 0.1
_MOST, _MOST_BYTES = 4, 16 << 20
#: Largest seconds of an exchange of the size that is also sent in one direction, and times (seed: 1 MiB at 100 Mbit/s, of four bursts).
_ONE_WAY_S, _ONE_WAY_TIMES = 0.1, 3
#: Seconds of pause before an exchange (seed): a shaped link recovers its burst, as between a program's operations.
_PAUSE_S = 0.01
#: Elements of a tensor that is compressed (4 MiB); tensors side by side, more than caches hold; elements of a tensor whose time is only
#: the time of the calls.
_NUMEL, _COPIES, _TINY = 1 << 21, 6, 64
_REPEATS = _COPIES - 1


@tensors.undisturbed()
def measure(group: dist.ProcessGroup | None = None) -> LinkProfile:
    """Return the speeds of the slowest rank of ``group``. A collective; blocks for less than two seconds on links of 100 Mbit/s and
    faster, once the kernels are built.

    The number of exchanges and their largest size follow from times that are equal on all ranks, so that no rank goes on alone.

    Args:
        group: the default group where None.

    Raises:
        ValueError: the group has one rank, this rank is not in it, or its CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_world_size(group)
    if group is None or ranks < 2:
        raise ValueError(
            f"a link is measured between ranks: wanted a group of at least 2 ranks, with this rank among them; got {ranks} ranks; "
            f"call calibrate on the ranks of a larger group"
        )
    backends = dist.get_backend_config(group)
    backend = dict(pair.split(":") for pair in backends.split(",")).get("cpu", "")
    if backend not in TRANSPORTS:
        raise ValueError(
            f"wanted a group whose CPU tensors go over {' or '.join(TRANSPORTS)}, got backends {backends}; "
            f"only such groups can be measured yet"
        )
    transport = TRANSPORTS[backend](group)
    transfer = _transfer(group, transport)
    one_way = _one_way(group, transport, transfer)
    dist.barrier(group)  # all ranks compress at once, as in an operation: ranks may share cores
    *coding, call = _slowest(group, _coding_seconds())
    encode, decode, add, copy, add_raw = (_NUMEL * torch.bfloat16.itemsize / spent for spent in coding)
    return LinkProfile(transfer, encode, decode, add, copy, add_raw, call, one_way)


def _coding_seconds() -> list[float]:
    """Return seconds of this process alone, on one thread: compress, decompress, decompress and add, make a raw frame, add a raw frame,
    and compress and decompress a tiny tensor."""
    drawn = tensors.empty(_NUMEL // 16, torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    values = drawn.bfloat16().repeat(16)  # drawing all of them would take most of the time
    rows, tiny = values.repeat(_COPIES, 1), values[:_TINY]
    coded, raw = (_compress(values, codec, _buffer(values, codec)) for codec in ("cascade", "raw"))
    buffer = _buffer(values, "cascade")  # for every frame: raw ones are not larger
    return [
        _median(lambda row: _compress(rows[row], "cascade", buffer)),
        _median(lambda row: decompress(coded, rows[row])),
        _median(lambda row: decompress_add(coded, rows[row])),
        _median(lambda row: _compress(rows[row], "raw", buffer)),
        _median(lambda row: decompress_add(raw, rows[row])),
        _median(lambda row: decompress(_compress(tiny, "cascade", buffer), rows[row, :_TINY])),
    ]


def difference_seconds(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """Return seconds of this process alone, on one thread: compress ``after`` against ``before``, and decompress the frame in place. Each
    time includes the hash of the base. Both tensors are flat, of one dtype and size."""
    bases, inputs = before.repeat(_COPIES, 1), after.repeat(_COPIES, 1)
    buffer = _buffer(after, "delta")

    def compress_difference(row: int) -> torch.Tensor:
        region_hash(bases[row])
        return compress(inputs[row], "delta", base=bases[row], out=buffer, shaped=False, checksum=False)

    def decompress_difference(row: int) -> None:  # a row is a base once: there are as many rows as times
        region_hash(bases[row])
        decompress(frame, bases[row], base=bases[row])

    compressing, frame = _median(compress_difference), compress_difference(0)
    return compressing, _median(decompress_difference)


def copy_seconds(base: torch.Tensor, same: Callable[[torch.Tensor, torch.Tensor], bool]) -> tuple[float, float]:
    """Return seconds of this process alone, on one thread: copy a flat base to new memory, and compare it with equal words by ``same``."""
    bases, own = base.repeat(_COPIES, 1), base.repeat(_COPIES, 1)
    return _median(lambda row: bases[row].clone()), _median(lambda row: same(own[row], bases[row]))


def _buffer(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    return tensors.filled(compress_bound(tensor.numel(), tensor.dtype, codec), 0, torch.uint8)


def _compress(tensor: torch.Tensor, codec: str, buffer: torch.Tensor) -> torch.Tensor:
    return compress(tensor, codec, out=buffer, shaped=False, checksum=False)


def _median(step: Callable[[int], object]) -> float:
    """Return the median seconds of a step on one thread, on one row after the other; the first time does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return statistics.median([_seconds(partial(step, index % _COPIES)) for index in range(_REPEATS + 1)][1:])
    finally:
        torch.set_num_threads(threads)


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _transfer(group: dist.ProcessGroup, transport: Transport) -> tuple[tuple[float, float], ...]:
    """Return points (bytes, seconds), equal on all ranks. Slow links get fewer points."""

    memory = tensors.empty(0, torch.uint8)

    def exchanged(size: int) -> tuple[float, float]:
        nonlocal memory
        if memory.numel() < 2 * size:
            memory = tensors.filled(2 * size, 0, torch.uint8)
        times = _exchanges(group, transport, *memory[: 2 * size].split(size))
        return statistics.median(times[1:] or times), sum(times) + len(times) * _PAUSE_S

    points: list[tuple[float, float]] = []
    for size, seconds in trial.in_rounds(SIZES, exchanged, _BUDGET_S):
        # a smaller transfer that took longer was disturbed, and does not count
        points = [*(point for point in points if point[1] < seconds), (size, seconds)]
    return tuple(points)


def _one_way(group: dist.ProcessGroup, transport: Transport, points: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a message in one direction as a part of those of an exchange, at most 1, equal on all ranks: of the largest
    size of ``points`` that is sent in a short time; 1 where there is none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    quick = [
        (int(size), seconds)
        for size, seconds in points
        if seconds < _ONE_WAY_S and size * _ONE_WAY_TIMES <= _MOST_BYTES
    ]
    if not quick:
        return 1.0
    size, both = quick[-1]
    tensor = tensors.filled(size, 0, torch.uint8)

    def move() -> None:  # rank 0 to 1, 2 to 3, and so on: a last rank without a partner looks on
        if rank % 2:
            transport.post_recv(tensor, rank - 1, TagRange.CALIBRATION).wait()
        elif rank + 1 < ranks:
            transport.post_send(tensor, rank + 1, TagRange.CALIBRATION).wait()

    times = [_timed(group, move) for _ in range(_ONE_WAY_TIMES)]
    return min(1.0, statistics.median(times[1:]) / both)


def _exchanges(
    group: dist.ProcessGroup, transport: Transport, sent: torch.Tensor, received: torch.Tensor
) -> list[float]:
    """Return seconds of the slowest rank for each exchange of uint8 tensors with the next and the previous rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def exchange() -> None:
        tag = TagRange.CALIBRATION
        works = [
            transport.post_recv(received, (rank - 1) % ranks, tag),
            transport.post_send(sent, (rank + 1) % ranks, tag),
        ]
        for work in works:
            work.wait()

    times: list[float] = []
    most = min(_MOST, _MOST_BYTES // sent.numel())
    while not times or (len(times) < most and sum(times) + len(times) * _PAUSE_S + times[-1] < _SIZE_BUDGET_S):
        times.append(_timed(group, exchange))
    return times


def _timed(group: dist.ProcessGroup, step: Callable[[], None]) -> float:
    """Return the seconds of the slowest rank for a step that all ranks begin together, after a pause."""
    time.sleep(_PAUSE_S)
    dist.barrier(group)
    return _slowest(group, [_seconds(step)])[0]


def _slowest(group: dist.ProcessGroup, seconds: Sequence[float]) -> list[float]:
    """Return the seconds of the slowest rank for each of some times."""
    slowest = tensors.of_numbers(seconds, torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return list(slowest.tolist())
