"""Mistakes to plant in the schedules of a device: each takes a monkeypatch. And whether a few seeds of a program notice one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch
from sim.mistakes import FEW

from ds_zipccl.comm.device import sizes as agreement
from ds_zipccl.comm.device.streams import Stage, StagingBuffer, Streams, StreamWork
from ds_zipccl.comm.transport.nccl import NcclTransport
from on_sim import world

Plant = Callable[[MonkeyPatch], None]


def fails(function: Callable[..., Any], ranks: int, *arguments: Any, seeds: int = FEW, **options: Any) -> None:
    """Fail unless a program ends with a fault, wrong words or another failed assertion for one of a few seeds."""
    with pytest.raises(AssertionError):
        for seed in range(seeds):
            world.run(function, ranks, *arguments, seed=seed, **options)


def only(when: Callable[[], bool], plant: Plant) -> Plant:
    """What a plant replaces is as before while ``when`` says no."""

    def between(patch: MonkeyPatch, owner: Any, name: str, wrong: Any) -> None:
        good = getattr(owner, name)
        patch.setattr(owner, name, lambda *given, **named: (wrong if when() else good)(*given, **named))

    return lambda patch: plant(SimpleNamespace(setattr=functools.partial(between, patch)))  # type: ignore[arg-type]


def without_order(first: Stage, second: Stage) -> Plant:
    """The second stream never waits for the first one."""
    order = Streams.order

    def forgetful(self: Streams, *pair: Stage) -> None:
        if pair != (first, second):
            order(self, *pair)

    return lambda patch: patch.setattr(Streams, "order", forgetful)


def no_begin(patch: MonkeyPatch) -> None:
    """No stream waits for the caller."""
    patch.setattr(Streams, "begin", lambda self: None)


def no_join(patch: MonkeyPatch) -> None:
    """The caller does not wait for the operation."""
    patch.setattr(Streams, "join", lambda self, event: None)


def staging_early(patch: MonkeyPatch) -> None:
    """A staging buffer is used again before its last use has ended."""
    taken = Streams._take

    def take(self: Streams, nbytes: int, budget: int) -> StagingBuffer:
        for staging in self._buffers:
            staging.last = None
        return taken(self, nbytes, budget)

    patch.setattr(Streams, "_take", take)


def gaps_that_are_none(patch: MonkeyPatch) -> None:
    """Every staging buffer begins where the reserved memory does."""
    patch.setattr(Streams, "_gap", lambda self, size: 0 if self._reserved is not None else None)


def staging_freed_early(patch: MonkeyPatch) -> None:
    """The memory of a staging buffer goes back to the allocator before its last use has ended."""

    def take(self: Streams, nbytes: int, budget: int) -> StagingBuffer:
        self._buffers.clear()
        staging = self._new(nbytes)
        self._buffers.append(staging)
        for stream in self._streams.values():
            stream.wait_event(staging.last)
        return staging

    patch.setattr(Streams, "_take", take)


def nothing_kept(patch: MonkeyPatch) -> None:
    """A handle keeps no tensors."""
    made = StreamWork.__init__

    def make(self: StreamWork, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self._keep = ()
        self._tensors = []

    patch.setattr(StreamWork, "__init__", make)


def unread_agreement(patch: MonkeyPatch) -> None:
    """The host reads the agreement before it has arrived."""
    patch.setattr(agreement, "ended", lambda event, seconds: True)


def same_stream(patch: MonkeyPatch) -> None:
    """The decoder works on the encoder's stream."""
    on = Streams.on
    patch.setattr(Streams, "on", lambda self, stage: on(self, Stage.ENCODE if stage is Stage.DECODE else stage))


def another_place(patch: MonkeyPatch) -> None:
    """In two levels the parts of the ranks of a node change places."""
    exchange = NcclTransport.exchange

    def rotated(self: NcclTransport, received: Any, sent: Any) -> None:
        first, *others = received.values()
        exchange(self, dict(zip(received, [*others, first], strict=True)), sent)

    patch.setattr(NcclTransport, "exchange", rotated)
