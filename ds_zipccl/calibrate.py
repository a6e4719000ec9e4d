"""Measures the :class:`~ds_zipccl.costs.Profile` of a group, the same on all its ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ds_zipccl.codecs import compress, compress_bound, decompress, decompress_add
from ds_zipccl.costs import Profile

#: Tag of the exchanges here (admission: above all ranges of comm/exchange.py, below 2**31). One serves all: what a rank sends to
#: another arrives in order.
TAG = 0x70000000
#: Bytes of the exchanges (seed: the last two are large against the burst that a shaped link lets through at once).
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
#: Seconds that exchanges may take in all, so that the whole calibration stays under two ...
_BUDGET_S = 1.4
#: ... and one size, unless once takes longer: of the repeats up to REPEATS the median counts.
_SIZE_BUDGET_S = 0.25
_REPEATS = 5
#: Pause before an exchange: what a link lets through at once, it has then saved up again, as between a program's operations.
_PAUSE_S = 0.01
#: Elements of the tensor that is coded (4 MiB), and of one whose coding costs nothing but the calls.
_NUMEL, _TINY = 1 << 21, 64


def measure(group: dist.ProcessGroup | None = None) -> Profile:
    """What the slowest rank of ``group`` can do. A collective; blocks for less than two seconds on links from 100 mbit a second up,
    once the kernels are built.

    How often and up to which size is measured follows from times that the ranks have agreed on, so that none goes on alone.

    Args:
        group: the default group where None.

    Raises:
        ValueError: the group has one rank, this rank is not in it, or its CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError(f"a link is measured between ranks of the group: wanted at least 2, of which this is one; got {ranks}")
    backends = dist.get_backend_config(group)
    if dict(pair.split(":") for pair in backends.split(",")).get("cpu") != "gloo":
        raise ValueError(f"only groups whose CPU tensors go over gloo can be measured yet, got backends {backends}")
    transfer = _transfer(group)
    dist.barrier(group)  # all code at once, as in an operation: they may share cores
    seconds = torch.tensor(list(coding_seconds()), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return coding_profile(transfer, seconds.tolist())


def coding_profile(transfer: tuple[tuple[float, float], ...], seconds: Iterable[float]) -> Profile:
    """The profile of exchanges that take ``transfer`` and of :func:`coding_seconds`."""
    *coding, call = seconds
    encode, decode, add, copy, add_raw = (_NUMEL * torch.bfloat16.itemsize / spent for spent in coding)
    return Profile(transfer, encode, decode, add, copy, add_raw, call)


def coding_seconds() -> Iterator[float]:
    """Times of this process alone, on one thread: encode, decode, decode and add, make a raw frame, add a raw one, and a call."""
    with _one_thread():
        tensor = torch.empty(_NUMEL).normal_(generator=torch.Generator().manual_seed(0)).bfloat16()
        frames = {codec: _encode(tensor, codec, _buffer(tensor, codec)) for codec in ("cascade", "raw")}
        out, sums = torch.empty_like(tensor), torch.zeros_like(tensor)
        spare = _buffer(tensor, "cascade")
        yield _median(lambda: _encode(tensor, "cascade", spare))
        yield _median(lambda: decompress(frames["cascade"], out))
        yield _median(lambda: decompress_add(frames["cascade"], sums))
        yield _median(lambda: _encode(tensor, "raw", spare))
        yield _median(lambda: decompress_add(frames["raw"], sums))
        few, buffer = tensor[:_TINY], _buffer(tensor[:_TINY], "cascade")
        yield _median(lambda: decompress(_encode(few, "cascade", buffer), out[:_TINY]))


def _buffer(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    return torch.zeros(compress_bound(tensor.numel(), tensor.dtype, codec), dtype=torch.uint8)


def _encode(tensor: torch.Tensor, codec: str, buffer: torch.Tensor) -> torch.Tensor:
    return compress(tensor, codec, out=buffer, shaped=False, checksum=False)


def _median(step: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a step, after one that does not count."""
    step()
    return statistics.median(_seconds(step) for _ in range(repeats))


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _transfer(group: dist.ProcessGroup) -> tuple[tuple[float, float], ...]:
    """Points (bytes, seconds), with the same numbers on all ranks; fewer of them on slow links."""
    points: list[tuple[float, float]] = []
    spent = expected = 0.0
    for size in SIZES:
        if spent + expected > _BUDGET_S:
            break
        repeats = max(1, min(_REPEATS, int(_SIZE_BUDGET_S / (expected + _PAUSE_S))))
        times = _exchanges(group, size, repeats, warm_up=repeats > 1)
        seconds = statistics.median(times[-repeats:])
        # A smaller transfer that took longer was disturbed: it says nothing.
        points = [*(point for point in points if point[1] < seconds), (float(size), seconds)]
        spent += sum(times) + len(times) * _PAUSE_S
        following = SIZES[SIZES.index(size) + 1 :]
        expected = seconds * following[0] / size if following else 0.0
    return tuple(points)


def _exchanges(group: dist.ProcessGroup, size: int, repeats: int, warm_up: bool) -> list[float]:
    """Seconds of the slowest rank for each of some exchanges of ``size`` bytes with both neighbours, the warm-up first."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def exchange() -> None:
        works = [group.recv([received], (rank - 1) % ranks, TAG), group.send([sent], (rank + 1) % ranks, TAG)]
        for work in works:
            work.wait()

    seconds = torch.empty(repeats + warm_up, dtype=torch.float64)
    for repeat in range(len(seconds)):
        time.sleep(_PAUSE_S)
        dist.barrier(group)
        seconds[repeat] = _seconds(exchange)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return list(seconds.tolist())
