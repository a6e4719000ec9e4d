"""The measurement of a group in stream order: its network, the ranks of a node, the codec and an agreement; equal on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import compress_bound
from ds_zipccl.comm.device.clock import Span, agreed_seconds, mark
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import group_nodes
from ds_zipccl.comm.host.calibration import in_rounds
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.jobs import GatherTable, Parameter
from ds_zipccl.policy import wire
from ds_zipccl.policy.device_rules import DeviceProfile, Topology

#: Bytes of the gathers and exchanges, and of the words that are coded (seed: the last two are large against the delay of a message; 16 MiB
#: fill an H100).
SIZES = (1 << 20, 8 << 20, 64 << 20)
CODED_BYTES = (256 << 10, 4 << 20, 16 << 20)
#: Calls of each size in each round of :func:`.in_rounds`; the first one warms up and does not count. Of a call the slowest rank counts, of
#: the calls the median.
_CALLS = 3
#: Seconds of all calls of one kind (seed): a larger size, or a later round, that would take longer is left out.
_BUDGET_S = 0.5
#: Elements of normal values that are repeated (seed: drawing them takes longer than coding them).
_DRAWN = 1 << 16
#: Shortest time that counts, in seconds: clocks may stand still.
_LEAST_S = 1e-6

#: (bytes, seconds), in rising order of bytes.
Points = list[tuple[float, float]]
#: A call to be timed, and its stream.
Work = tuple[Stage, Callable[[], None]]


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
    found = {
        "network": (1 - 1 / Topology.of(nodes).nodes) * speed(_points(ctx, SIZES, _gathering)),
        "encode": speed(_points(ctx, CODED_BYTES, _encoding)),
        "decode": speed(_points(ctx, CODED_BYTES, _decoding)),
        "agreement": _agreement_seconds(ctx),
    }
    if max(map(len, nodes)) > 1:
        found["inside"] = speed(_points(ctx, SIZES, _inside))
    return DeviceProfile(**found)


def speed(points: Points) -> float:
    """Return bytes a second of large messages: the slope between the last two points, or with its delay that of the last point."""
    (bytes0, seconds0), (bytes1, seconds1) = ((0.0, 0.0), *points)[-2:]
    return (bytes1 - bytes0) / (seconds1 - seconds0) if seconds1 > seconds0 else bytes1 / seconds1


def _points(
    ctx: DeviceContext, sizes: tuple[int, ...], make: Callable[[DeviceContext, int], AbstractContextManager[Work]]
) -> Points:
    """Return seconds by size, equal on all ranks, for sizes that do not take long."""

    def called(size: int) -> tuple[float, float]:
        with make(ctx, size) as (stage, work):
            seconds = _seconds(ctx, stage, work)
        return seconds, _CALLS * seconds

    return in_rounds(sizes, called, _BUDGET_S)


def _seconds(ctx: DeviceContext, stage: Stage, work: Callable[[], None]) -> float:
    spans = []
    with ctx.streams.on(stage):
        for _ in range(_CALLS):
            first = mark(ctx.device)
            work()
            spans.append(Span(first, mark(ctx.device)))
    agree(ctx, [])  # the host waits for the calls
    return _median(ctx, spans)


def _median(ctx: DeviceContext, spans: Sequence[Span]) -> float:
    agreed = agreed_seconds(ctx, [span.nanoseconds() for span in spans])
    return max(_LEAST_S, statistics.median(agreed[1:]))


def _agreement_seconds(ctx: DeviceContext) -> float:
    host = torch.device("cpu")
    spans = []
    for _ in range(_CALLS):
        first = mark(host)
        agree(ctx, [])
        spans.append(Span(first, mark(host)))
    return _median(ctx, spans)


@contextmanager
def _gathering(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    part = nbytes // ctx.size
    with ctx.streams.staging(part * ctx.size, ctx.budget) as whole:
        own = whole[ctx.rank * part : (ctx.rank + 1) * part]
        yield Stage.WIRE, lambda: ctx.transport.all_gather(whole, own)


@contextmanager
def _inside(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    """Give an exchange of a rank with the ranks of its node: ``nbytes`` bytes are for them together. Others get nothing."""
    peers = [rank for rank in next(ranks for ranks in group_nodes(ctx.group) if ctx.rank in ranks) if rank != ctx.rank]
    sizes = [nbytes // len(peers) if rank in peers else 0 for rank in range(ctx.size)]
    half = sum(sizes)
    with ctx.streams.staging(max(1, 2 * half), ctx.budget) as memory:
        sent, received = memory[:half], memory[half : 2 * half]
        yield Stage.WIRE, lambda: ctx.transport.all_to_all(received, sent, sizes, sizes)


class _Coding:
    """Words of normal values, and memory for their frame and for what it is decoded to."""

    def __init__(self, ctx: DeviceContext, nbytes: int, memory: ExitStack) -> None:
        self._ctx, dtype = ctx, torch.bfloat16
        slot = wire.slot_bytes(compress_bound(nbytes // dtype.itemsize, dtype, ctx.codec))
        words, self._part, out = (
            memory.enter_context(ctx.streams.staging(size, ctx.budget)) for size in (nbytes, slot, nbytes)
        )
        self._words, self._out = words.view(dtype), out.view(dtype)
        self._table = GatherTable((Parameter(self._words.numel(), slot),), dtype, ctx.config.block, 1)
        drawn = tensors.empty(min(_DRAWN, self._words.numel()), torch.float32)
        drawn.normal_(generator=torch.Generator().manual_seed(0))
        with ctx.streams.on(Stage.ENCODE):
            self._words.view(-1, drawn.numel()).copy_(drawn.to(dtype).to(ctx.device))

    def encode(self) -> None:
        self._ctx.route.encode_gather([self._words], self._ctx.codec, self._table, self._part)

    def decode(self) -> None:
        status = self._ctx.reports.word(self._ctx.where())
        self._ctx.route.decode_gather(self._part, self._table, [self._out], None, status)


@contextmanager
def _encoding(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    with ExitStack() as memory:
        yield Stage.ENCODE, _Coding(ctx, nbytes, memory).encode


@contextmanager
def _decoding(ctx: DeviceContext, nbytes: int) -> Iterator[Work]:
    with ExitStack() as memory:
        coding = _Coding(ctx, nbytes, memory)
        with ctx.streams.on(Stage.ENCODE):
            coding.encode()
        ctx.streams.order(Stage.ENCODE, Stage.DECODE)
        yield Stage.DECODE, coding.decode
