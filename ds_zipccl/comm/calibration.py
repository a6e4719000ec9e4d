"""Measures the :class:`~ds_zipccl.policy.cost_model.LinkProfile` of a group, the same on all its ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import compress, compress_bound, decompress, decompress_add, region_hash
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TagRange, Transport
from ds_zipccl.policy.cost_model import LinkProfile

#: Bytes of the exchanges (seed: the last two are large against the burst that a shaped link lets through at once).
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
#: Seconds that exchanges may take in all, so that the whole calibration stays under two ...
_BUDGET_S = 1.4
#: ... and those of one size: as many as fit, at least one, at most so many. The median counts, without the first if there are others.
_SIZE_BUDGET_S = 0.3
_MOST = 10
#: Pause before an exchange: what a link lets through at once, it has then saved up again, as between a program's operations.
_PAUSE_S = 0.01
#: Elements of what is coded at once (4 MiB), how many of these lie side by side, more than caches hold, and elements of a tensor whose
#: coding costs nothing but the calls.
_NUMEL, _PIECES, _TINY = 1 << 21, 8, 64
_REPEATS = 5


@tensors.undisturbed()
def measure(group: dist.ProcessGroup | None = None) -> LinkProfile:
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
    if group is None or ranks < 2:
        raise ValueError(
            f"a link is measured between ranks of the group: wanted at least 2, of which this is one; got {ranks}"
        )
    backends = dist.get_backend_config(group)
    backend = dict(pair.split(":") for pair in backends.split(",")).get("cpu", "")
    if backend not in TRANSPORTS:
        raise ValueError(
            f"only groups whose CPU tensors go over {' or '.join(TRANSPORTS)} can be measured yet, got backends {backends}"
        )
    transfer = _transfer(group, TRANSPORTS[backend](group))
    dist.barrier(group)  # all code at once, as in an operation: they may share cores
    seconds = tensors.of_numbers(list(coding_seconds()), torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return coding_profile(transfer, seconds.tolist())


def coding_profile(transfer: tuple[tuple[float, float], ...], seconds: Iterable[float]) -> LinkProfile:
    """The profile of exchanges that take ``transfer`` and of :func:`coding_seconds`."""
    *coding, call = seconds
    encode, decode, add, copy, add_raw = (_NUMEL * torch.bfloat16.itemsize / spent for spent in coding)
    return LinkProfile(transfer, encode, decode, add, copy, add_raw, call)


def coding_seconds() -> Iterator[float]:
    """Times of this process alone, on one thread: encode, decode, decode and add, make a raw frame, add a raw one, and a call."""
    with _one_thread():
        values = tensors.empty(_NUMEL, torch.float32).normal_(generator=torch.Generator().manual_seed(0)).bfloat16()
        words, outs = values.repeat(_PIECES, 1), values.repeat(_PIECES, 1)
        buffers = {codec: _buffer(values, codec) for codec in ("cascade", "raw")}
        frames = {codec: _encode(values, codec, _buffer(values, codec)) for codec in buffers}
        yield _median(lambda piece: _encode(words[piece], "cascade", buffers["cascade"]))
        yield _median(lambda piece: decompress(frames["cascade"], outs[piece]))
        yield _median(lambda piece: decompress_add(frames["cascade"], outs[piece]))
        yield _median(lambda piece: _encode(words[piece], "raw", buffers["raw"]))
        yield _median(lambda piece: decompress_add(frames["raw"], outs[piece]))
        few, buffer = values[:_TINY], _buffer(values[:_TINY], "cascade")
        yield _median(lambda piece: decompress(_encode(few, "cascade", buffer), outs[piece, :_TINY]))


def difference_seconds(before: torch.Tensor, after: torch.Tensor) -> Iterator[float]:
    """Times of this process alone, on one thread, to encode ``after`` against ``before`` and to decode that in place, each with the hash
    that goes before it. Flat tensors of one dtype and size."""
    with _one_thread():
        places, words = before.repeat(_PIECES, 1), after.repeat(_PIECES, 1)
        buffer = _buffer(after, "delta")

        def encode(piece: int) -> torch.Tensor:
            region_hash(places[piece])
            return compress(words[piece], "delta", base=places[piece], out=buffer, shaped=False, checksum=False)

        def decode(piece: int) -> None:  # a place is a base once: there are more of them than repeats
            region_hash(places[piece])
            decompress(frame, places[piece], base=places[piece])

        yield _median(encode)
        frame = encode(0)
        yield _median(decode)


def _buffer(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    return tensors.filled(compress_bound(tensor.numel(), tensor.dtype, codec), 0, torch.uint8)


def _encode(tensor: torch.Tensor, codec: str, buffer: torch.Tensor) -> torch.Tensor:
    return compress(tensor, codec, out=buffer, shaped=False, checksum=False)


def _median(step: Callable[[int], object]) -> float:
    """Median seconds of a step, on one piece after the other; the first time does not count."""
    return statistics.median([_seconds(partial(step, index % _PIECES)) for index in range(_REPEATS + 1)][1:])


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


def _transfer(group: dist.ProcessGroup, transport: Transport) -> tuple[tuple[float, float], ...]:
    """Points (bytes, seconds), with the same numbers on all ranks; fewer of them on slow links."""
    points: list[tuple[float, float]] = []
    spent = 0.0
    for size in SIZES:
        if points and spent + size / points[-1][0] * points[-1][1] > _BUDGET_S:
            break
        times = _exchanges(group, transport, size)
        seconds = statistics.median(times[1:] or times)
        # A smaller transfer that took longer was disturbed: it says nothing.
        points = [*(point for point in points if point[1] < seconds), (float(size), seconds)]
        spent += sum(times) + len(times) * _PAUSE_S
    return tuple(points)


def _exchanges(group: dist.ProcessGroup, transport: Transport, size: int) -> list[float]:
    """Seconds of the slowest rank for each of some exchanges of ``size`` bytes with both neighbours."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = tensors.filled(size, 0, torch.uint8), tensors.filled(size, 0, torch.uint8)

    def exchange() -> None:
        tag = TagRange.CALIBRATION
        works = [
            transport.post_recv(received, (rank - 1) % ranks, tag),
            transport.post_send(sent, (rank + 1) % ranks, tag),
        ]
        for work in works:
            work.wait()

    times: list[float] = []
    while not times or (len(times) < _MOST and sum(times) + len(times) * _PAUSE_S + times[-1] < _SIZE_BUDGET_S):
        time.sleep(_PAUSE_S)
        dist.barrier(group)
        seconds = tensors.of_numbers([_seconds(exchange)], torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        times.append(seconds.item())
    return times
