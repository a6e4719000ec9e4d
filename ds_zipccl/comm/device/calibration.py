"""The clock of a device, agreed by all ranks, and the measurement of a group in stream order: its network, the ranks of a node, the codec
and an agreement; equal on all ranks."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl import devices, tensors
from ds_zipccl.codecs import compress_bound
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import agree, largest
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.device.sums import Part, reduce_scatter
from ds_zipccl.comm.group_state import group_nodes
from ds_zipccl.comm.spans import cut
from ds_zipccl.comm.topology import tell
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.jobs import GatherTable, Parameter
from ds_zipccl.policy import cost_model, trial, wire
from ds_zipccl.policy.cost_model import DeviceProfile, Topology

#: Nanoseconds of a span that is not known: larger than any other.
UNKNOWN = 1 << 62


def nanoseconds(first: Any, last: Any) -> int:
    """Return the time between two marks of one device; ``1 << 62`` where the first was not made (None), or the device has not come to both.
    Does not block."""
    if first is None:
        return UNKNOWN
    if isinstance(first, int):
        return int(last - first)
    return int(first.elapsed_time(last) * 1e6) if first.query() and last.query() else UNKNOWN


def mark(device: torch.device) -> Any:
    """Return a mark after the work on the current stream of a device; for a device without streams, the time of the host."""
    runtime = devices.runtime(device)
    if runtime is None:
        return time.perf_counter_ns()
    event = runtime.Event(enable_timing=True)
    event.record(runtime.current_stream(device))
    return event


def agreed_seconds(ctx: DeviceContext, times: Sequence[int]) -> list[float]:
    """Return the seconds of the slowest rank for each of its times in nanoseconds, infinite where a rank does not know its own. An
    agreement.

    Raises:
        CommError: as :func:`.sizes.agree`.
    """
    return [found / 1e9 if found < UNKNOWN else float("inf") for found in largest(ctx, *times)]


# ---- measuring -------------------------------------------------------------------------------------------------------

#: Bytes of the sums that are timed in both ways (default, not tuned: a bucket of a small model, and one of a large one).
SUM_SIZES = (32 << 20, 128 << 20)
#: Bytes of the gathers and exchanges, and of the words that are coded (seed: the last two are large against the delay of a message; 16 MiB
#: fill an H100).
SIZES = (1 << 20, 8 << 20, 64 << 20)
CODED_BYTES = (256 << 10, 4 << 20, 16 << 20)
#: Calls of each size in each round of :func:`ds_zipccl.policy.trial.in_rounds`; the first one warms up and does not count. Of a call the
#: slowest rank counts, of the calls the median.
_CALLS = 3
#: Seconds of all calls of one kind (seed): a larger size, or a later round, that would take longer is left out.
_BUDGET_S = 0.5
#: Elements of normal values that are repeated (seed: drawing them takes longer than coding them).
_DRAWN = 1 << 16
#: Shortest time that counts, in seconds: clocks may stand still.
_LEAST_S = 1e-6

#: A call to be timed, and its stream.
Work = tuple[Stage, Callable[[], object]]


@tensors.undisturbed()
def measure(group: dist.ProcessGroup, config: ZipcclConfig, device: torch.device) -> DeviceProfile:
    """Return the speeds of the slowest rank of a group of several nodes. A collective; the host waits, for less than three seconds.

    Args:
        group: its tensors on ``device`` go in stream order, and its nodes are known.

    Raises:
        CommError: a rank did not come within the group's timeout.
    """
    codec = config.codec if config.codec != "raw" else "cascade"
    ctx = DeviceContext("calibrate", group, config, "dp", codec, device)
    nodes = group_nodes(group)
    topology, gathers = Topology.of(nodes), _points(ctx, SIZES, _gathering)
    own, turns = _turn(group, device)
    copies = [_points(ctx, SIZES, partial(_from_host, copies=own == turn)) for turn in range(turns)]
    found = {
        "network": (1 - 1 / ctx.size) * cost_model.slope(gathers),
        "hop": cost_model.hop_of(gathers, topology),
        "encode": cost_model.slope(_points(ctx, CODED_BYTES, partial(_coding, stage=Stage.ENCODE))),
        "decode": cost_model.slope(_points(ctx, CODED_BYTES, partial(_coding, stage=Stage.DECODE))),
        "bus": min(map(cost_model.slope, copies)),
        "agreement": _median(ctx, _spans(torch.device("cpu"), partial(agree, ctx, []))),
    }
    if max(map(len, nodes)) > 1:
        found["inside"] = cost_model.slope(_points(ctx, SIZES, _inside))
    return DeviceProfile(**found)


def _points(
    ctx: DeviceContext, sizes: tuple[int, ...], make: Callable[[DeviceContext, int], AbstractContextManager[Work]]
) -> Sequence[tuple[float, float]]:
    """Return points (bytes, seconds), equal on all ranks, of the sizes that do not take long."""

    def called(size: int) -> tuple[float, float]:
        with make(ctx, size) as (stage, work):
            with ctx.streams.on(stage):
                spans = _spans(ctx.device, work)
            agree(ctx, [])  # the host waits for the calls
            seconds = _median(ctx, spans)
        return seconds, _CALLS * seconds

    return trial.in_rounds(sizes, called, _BUDGET_S)


def _spans(clock: torch.device, work: Callable[[], object]) -> list[tuple[Any, Any]]:
    """Call ``work`` between marks of a device."""
    spans = []
    for _ in range(_CALLS):
        first = mark(clock)
        work()
        spans.append((first, mark(clock)))
    return spans


def _median(ctx: DeviceContext, spans: Sequence[tuple[Any, Any]]) -> float:
    agreed = agreed_seconds(ctx, [nanoseconds(*span) for span in spans])
    return max(_LEAST_S, statistics.median(agreed[1:]))


@contextmanager
def _gathering(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    part = nbytes // ctx.size
    with ctx.streams.staging(part * ctx.size, ctx.budget) as whole:
        own = whole[ctx.rank * part : (ctx.rank + 1) * part]
        yield Stage.WIRE, lambda: ctx.transport.all_gather(whole, own)


def sums(
    group: dist.ProcessGroup, config: ZipcclConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]:
    """Return points (bytes, seconds), equal on all ranks, of coded sums and of the backend's own. A collective; the host waits.
    Arguments and errors as of :func:`measure`."""
    with tensors.undisturbed():
        ctx = DeviceContext("calibrate", group, config, "zero_grad", config.codec, device)
        ours, theirs = (_points(ctx, SUM_SIZES, partial(_summing, dtype=dtype, coded=coded)) for coded in (True, False))
    return ours, theirs


@contextmanager
def _summing(ctx: DeviceContext, nbytes: int, dtype: torch.dtype, *, coded: bool) -> Iterator[Work]:
    """Give a reduce-scatter of normal values."""
    streams = ctx.streams
    numel = max(8, nbytes // dtype.itemsize // ctx.size // 8 * 8)
    with streams.on(Stage.DECODE):
        whole, out = (tensors.empty(numel * rows, dtype, ctx.device) for rows in (ctx.size, 1))
        drawn = tensors.empty(_DRAWN, torch.float32).normal_(generator=torch.Generator().manual_seed(ctx.rank))
        whole.copy_(drawn.to(dtype).to(ctx.device).repeat(-(-len(whole) // _DRAWN))[: len(whole)])
    parts, op = [Part((whole, span)) for span in cut(len(whole), numel, ctx.size)], dist.ReduceOp.SUM

    def summed() -> None:
        for stage in (Stage.ENCODE, Stage.WIRE):
            streams.order(Stage.DECODE, stage)
        if coded:
            reduce_scatter(ctx, ctx.cut.levels, parts, Part.of(out))
            return
        with streams.wire():
            ctx.transport.reduce_scatter(out, whole, cast(Any, op))

    yield Stage.DECODE, summed


def _turn(group: dist.ProcessGroup, device: torch.device) -> tuple[int, int]:
    """Return this rank's turn to copy from host memory, and the number of turns. All devices of a node copy at once, as gathers do; ranks
    that share a device share its bus too, and copy one after the other."""
    runtime = devices.runtime(device)
    name = str(getattr(runtime.get_device_properties(device), "uuid", "")) if runtime is not None else ""
    names = [one for _, one in sorted(tell(group, name).items())]
    shared = Counter(filter(None, names))  # a device without a name is nobody else's
    return names[: dist.get_rank(group)].count(name) if name else 0, max(shared.values(), default=1)


@contextmanager
def _from_host(ctx: DeviceContext, nbytes: int, *, copies: bool) -> Iterator[Work]:
    """Give a copy of host memory to the device, nothing if another rank ``copies``."""
    words = tensors.pinned(nbytes)
    with ctx.streams.staging(nbytes, ctx.budget) as memory:
        yield Stage.ENCODE, lambda: copies and memory.copy_(words, non_blocking=True)


@contextmanager
def _inside(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    """Give an exchange of a rank with the ranks of its node: ``nbytes`` bytes are for them together. Others get nothing."""
    peers = [rank for rank in next(ranks for ranks in group_nodes(ctx.group) if ctx.rank in ranks) if rank != ctx.rank]
    sizes = [nbytes // len(peers) if rank in peers else 0 for rank in range(ctx.size)]
    half = sum(sizes)
    with ctx.streams.staging(max(1, 2 * half), ctx.budget) as memory:
        sent, received = memory[:half], memory[half : 2 * half]
        yield Stage.WIRE, lambda: ctx.transport.all_to_all(received, sent, sizes, sizes)


@contextmanager
def _coding(ctx: DeviceContext, nbytes: int, stage: Stage) -> Iterator[Work]:
    """Give the work of a stage: words of normal values are encoded, or their frame is decoded."""
    dtype = torch.bfloat16
    slot = wire.slot_bytes(compress_bound(nbytes // dtype.itemsize, dtype, ctx.codec))
    with ExitStack() as memory:
        words, frame, out = (
            memory.enter_context(ctx.streams.staging(size, ctx.budget)) for size in (nbytes, slot, nbytes)
        )
        words, out = words.view(dtype), out.view(dtype)
        table = GatherTable((Parameter(words.numel(), slot),), dtype, ctx.config.block, 1)
        drawn = tensors.empty(min(_DRAWN, words.numel()), torch.float32)
        drawn.normal_(generator=torch.Generator().manual_seed(0))

        def encode() -> None:
            ctx.route.encode_gather([words], ctx.codec, table, frame)

        def decode() -> None:
            ctx.route.decode_gather(frame, table, [out], None, ctx.reports.word(ctx.where()))

        with ctx.streams.on(Stage.ENCODE):
            words.view(-1, drawn.numel()).copy_(drawn.to(dtype).to(ctx.device))
        if stage == Stage.DECODE:
            with ctx.streams.on(Stage.ENCODE):
                encode()
            ctx.streams.order(Stage.ENCODE, Stage.DECODE)
        yield stage, encode if stage == Stage.ENCODE else decode
