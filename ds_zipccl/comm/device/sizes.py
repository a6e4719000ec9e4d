"""Words that all ranks agree on, brought to the host: the only place where the host waits for a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ds_zipccl import devices, tensors
from ds_zipccl.comm.context import packed, unpacked
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.streams import Stage, Streams
from ds_zipccl.comm.work import CommError
from ds_zipccl.telemetry import counters

#: Looks at an event before the host sleeps between two looks, and seconds of the sleep (seed: an agreement takes some 100 us; a look keeps
#: Python's lock, which the threads of a data loader want too).
_LOOKS, _SLEEP_S = 50, 2e-5

#: End of the message of a refused frame.
REMEDY = "; words of refused frames are NaN; stop the job on all ranks"
#: Reports in a message (admission: the first of many tell enough).
_TEXTS = 3


class Refused(CommError):
    """A rank has refused a frame; all ranks of the group raise."""


#: Page-locked words of the host. The host has read an agreement before the next one begins.
_hosts: WeakKeyDictionary[Streams, torch.Tensor] = WeakKeyDictionary()


def agree(ctx: DeviceContext, words: Sequence[torch.Tensor]) -> list[int]:
    """Return the largest value over all ranks of each word. A collective of the group; the host waits, at most the group's timeout.

    Args:
        words: int64 tensors of the device, flat, made by work on the encoding stream; read one after the other.

    Raises:
        CommError: a rank has refused a frame of an earlier operation, or did not come within the timeout. All ranks raise.
    """
    return agreement(ctx, words)()


def agreement(ctx: DeviceContext, words: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Start :func:`agree`. Return the function in which the host waits and that ends it, before the next one starts: later work of the
    streams goes on meanwhile."""
    streams = ctx.streams
    with streams.on(Stage.ENCODE):
        streams.order(Stage.DECODE, Stage.ENCODE)  # for the reports; earlier decoders only delay
        flat = torch.cat([ctx.reports.failed(), *words])
    arrive = _to_host(ctx, flat, lambda: ctx.transport.max(flat))

    def end() -> list[int]:
        failed, *agreed = arrive().tolist()
        _raise_refused(ctx, failed)
        return agreed

    return end


def largest(ctx: DeviceContext, *numbers: int) -> list[int]:
    """Return the largest of all ranks of each number; see :func:`agree`, with whose inference mode the caller calls."""
    with ctx.streams.on(Stage.ENCODE):
        words = to_device(ctx.streams, numbers)
    return agree(ctx, [words])


def exchange_words(
    ctx: DeviceContext, found: torch.Tensor, numbers: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Send a row of words to each rank. Return the rows that this rank has sent, and those that it has received, in the order of the ranks.
    A collective of the group; the host waits, at most the group's timeout.

    Args:
        found: int64 matrix of the device with the first words of each row, made by work on the encoding stream.
        numbers: the further words of each row; rows of all ranks have one length.

    Raises:
        CommError: as for :func:`agree`.
    """
    streams, ranks = ctx.streams, ctx.size
    with streams.on(Stage.ENCODE):
        streams.order(Stage.DECODE, Stage.ENCODE)
        known = to_device(streams, numbers)
        rows = torch.cat([ctx.reports.failed().expand(ranks, 1), found, known], 1)
        both = tensors.empty(2 * rows.numel(), torch.int64, streams.device)
        sent, received = both.split(rows.numel())
        sent.view(rows.shape).copy_(rows)
    host = _to_host(ctx, both, lambda: ctx.transport.all_to_all(received, sent))()
    told, heard = host.view(2, ranks, -1).tolist()
    _raise_refused(ctx, any(row[0] for row in heard))
    return [row[1:] for row in told], [row[1:] for row in heard]


def _raise_refused(ctx: DeviceContext, failed: bool | int) -> None:
    counters.record_host_wait(ctx.role, ctx.op, kind=ctx.kind)
    if failed:
        said = dict.fromkeys(tell(ctx, ctx.reports.describe()))  # a collective: all ranks know that there is a failure
        everyones = "; ".join([text for text in said if text][:_TEXTS])
        raise Refused(str(ctx.error(f"{everyones}{REMEDY}")))


def _host(streams: Streams, numel: int) -> torch.Tensor:
    """Return page-locked words: the first half for words that come from the device, the second half for words that go there."""
    host = _hosts.get(streams)
    if host is None or host.numel() < 2 * numel:
        with torch.inference_mode(False):  # written in inference mode and outside
            host = _hosts[streams] = tensors.pinned(16 * max(1024, 2 * numel)).view(torch.int64)
    return host


def to_device(streams: Streams, numbers: Sequence[Any]) -> torch.Tensor:
    """Return numbers, or rows of them, on the device, int64. Work of the encoding stream, before an agreement; does not wait. The host has
    read the agreement of earlier words, so that these have left the host."""
    words = tensors.of_numbers(numbers, torch.int64)
    if devices.runtime(streams.device) is None:
        return words
    host = _host(streams, words.numel())
    waiting = host[host.numel() // 2 :][: words.numel()]
    waiting.copy_(words.view(-1))
    there = tensors.empty(words.numel(), torch.int64, streams.device)
    there.copy_(waiting, non_blocking=True)
    return there.view(words.shape)


@tensors.undisturbed()
def tell(ctx: DeviceContext, text: str) -> list[str]:
    """Return the texts of all ranks of the group, in their order. A collective; the host waits, at most the group's timeout.

    Raises:
        CommError: a rank did not come within the timeout.
    """
    with ctx.streams.on(Stage.ENCODE):
        own = tensors.of_buffer(packed(text)).view(torch.int64).to(ctx.device)
        whole = tensors.empty(own.numel() * ctx.size, torch.int64, ctx.device)
    host = _to_host(ctx, whole, lambda: ctx.transport.all_gather(whole, own))()
    return [unpacked(part.view(torch.uint8)) for part in host.view(ctx.size, -1)]


def _to_host(ctx: DeviceContext, flat: torch.Tensor, collective: Callable[[], None]) -> Callable[[], torch.Tensor]:
    """Run a collective on words that were made on the encoding stream. Return a function that returns the words in host memory, for which
    the host waits."""
    streams, host = ctx.streams, flat
    streams.order(Stage.ENCODE, Stage.WIRE)
    with streams.on(Stage.WIRE):
        collective()
        if devices.runtime(streams.device) is not None:
            host = _host(streams, flat.numel())[: flat.numel()]
            host.copy_(flat, non_blocking=True)
        arrived = streams.record(Stage.WIRE)
    streams.order(Stage.WIRE, Stage.ENCODE)  # the memory of the words, and work that follows

    def arrive() -> torch.Tensor:
        limit = ctx.state.patience or ctx.transport.timeout(ctx.device)
        if not ended(arrived, limit.total_seconds()):
            raise ctx.error(f"a rank of the group did not come within {limit}; see the messages of the other ranks")
        return host

    return arrive


def ended(event: Any, seconds: float) -> bool:
    """Wait on the host for an event, None: of work that has ended, for ``seconds`` at most. Return whether the work has ended."""
    deadline, looks = time.monotonic() + seconds, 0
    while event is not None and not event.query():
        looks += 1
        if looks > _LOOKS:
            time.sleep(_SLEEP_S)
            if time.monotonic() > deadline:
                return False
    return True
