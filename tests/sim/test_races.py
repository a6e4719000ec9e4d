"""The detector of races, compared with torch's own; and random programs, which give the values of program order where no race is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import EventHandler

from sim import world
from sim.device import kernel
from sim.scheduler import Fault

STREAMS, EVENTS, TENSORS = 3, 3, 3
Action = tuple[Any, ...]


def actions(seed: int, count: int) -> list[Action]:
    """A random program: ("launch", stream, reads, writes), ("record" | "wait", event, stream), ("sync stream", stream), ("sync event",
    event)."""
    rng = random.Random(seed)
    made: list[Action] = []
    for _ in range(count):
        kind = rng.choices(["launch", "record", "wait", "sync stream", "sync event"], [5, 4, 5, 0.4, 0.6])[0]
        stream, event = rng.randrange(STREAMS), rng.randrange(EVENTS)
        if kind == "launch":
            chosen = rng.sample(range(TENSORS), rng.randint(1, 2))
            cut = rng.randint(0, len(chosen))
            made.append((kind, stream, tuple(chosen[:cut]), tuple(chosen[cut:])))
        elif kind in ("record", "wait"):
            made.append((kind, event, stream))
        else:
            made.append((kind, stream if kind == "sync stream" else event))
    return made


def first_race_of_torch(program: list[Action]) -> int | None:
    """The number of the action at which torch's sanitizer reports a race."""
    handler = EventHandler()
    for stream in range(STREAMS):
        handler._handle_stream_creation(stream + 1)
    for event in range(EVENTS):
        handler._handle_event_creation(event)
    for tensor in range(TENSORS):
        handler._handle_memory_allocation(tensor + 1)

    def launch(stream: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> Any:
        read, written = {tensor + 1 for tensor in reads}, {tensor + 1 for tensor in writes}
        aliases: dict[int, list[str]] = {tensor: [] for tensor in read | written}
        return handler._handle_kernel_launch(stream + 1, read, written, set(), "kernel", aliases)

    does: dict[str, Callable[..., Any]] = {
        "launch": launch,
        "record": lambda event, stream: handler._handle_event_record(event, stream + 1),
        "wait": lambda event, stream: handler._handle_event_wait(event, stream + 1),
        "sync stream": lambda stream: handler._handle_stream_synchronization(stream + 1),
        "sync event": handler._handle_event_synchronization,
    }
    return next((number for number, (kind, *what) in enumerate(program) if does[kind](*what)), None)


def run_actions(rank: int, ranks: int, program: list[Action], done: list[int]) -> list[list[int]]:
    """Run the program; a launch adds its reads to its writes, with its own number. Returns the tensors' values."""
    values = [torch.full((4,), tensor, dtype=torch.int64, device="cuda:0") for tensor in range(TENSORS)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    events = [torch.cuda.Event() for _ in range(EVENTS)]
    for number, (kind, *what) in enumerate(program):
        done[0] = number
        if kind == "launch":
            stream, reads, writes = what
            with torch.cuda.stream(streams[stream]):
                kernel("mix", _mixer(number), [values[at] for at in reads], [values[at] for at in writes])
        elif kind == "record":
            events[what[0]].record(streams[what[1]])
        elif kind == "wait":
            events[what[0]].wait(streams[what[1]])
        elif kind == "sync stream":
            streams[what[0]].synchronize()
        else:
            events[what[0]].synchronize()
    torch.cuda.synchronize()
    return [value.tolist() for value in values]


def _mixer(number: int) -> Any:
    def mix(reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        for written in writes:
            written.mul_(3).add_(number)
            for read in reads:
                written.add_(read)
            written.remainder_(1_000_003)

    return mix


def in_program_order(program: list[Action]) -> list[list[int]]:
    values = [torch.full((4,), tensor, dtype=torch.int64) for tensor in range(TENSORS)]
    for number, (kind, *what) in enumerate(program):
        if kind == "launch":
            _mixer(number)([values[at] for at in what[1]], [values[at] for at in what[2]])
    return [value.tolist() for value in values]


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.full(reason="more programs"))])
def test_same_races_as_torch(count: int) -> None:
    """The first race is the same; without one, the results are those of program order."""
    found, none = 0, 0
    for seed in range(count):
        program = actions(seed, 4 + seed % 12)
        wanted, done = first_race_of_torch(program), [-1]
        try:
            got = world.run(run_actions, 1, program, done, seed=seed).values[0]
        except Fault as fault:
            assert fault.kind == "race" and done[0] == wanted, (seed, program, str(fault))
            found += 1
        else:
            assert wanted is None, (seed, program)
            assert got == in_program_order(program), (seed, program)
            none += 1
    assert min(found, none) > count // 6, (found, none)


def leases(rank: int, ranks: int, seed: int) -> None:
    """Tensors of several streams, made, used elsewhere after a wait, freed after a wait back, and made again."""
    rng = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    for number in range(12):
        home, guest = rng.choice(streams), rng.choice(streams)
        with torch.cuda.stream(home):
            one = torch.full((rng.choice((8, 100, 300)),), number, device="cuda:0")
        guest.wait_stream(home)
        with torch.cuda.stream(guest):
            two = one * 2
        if rng.random() < 0.5:
            one.record_stream(guest)
        else:
            home.wait_stream(guest)
        del one
        if rng.random() < 0.3:
            guest.synchronize()
            assert bool((two == 2 * number).all())
        torch.cuda.current_stream().wait_stream(guest)
        assert (two + 1).tolist() == [2 * number + 1] * two.numel()
        two.record_stream(torch.cuda.current_stream())


@pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.full(reason="more programs"))])
def test_freed_memory_of_right_programs(count: int) -> None:
    """The poison of freed memory reaches no program that frees after its last use."""
    for seed in range(count):
        world.run(leases, 1, seed, seed=seed)


def halves(rank: int, ranks: int, overlapping: bool) -> None:
    whole = torch.zeros(6, 8, device="cuda:0")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    whole[:, :4].add_(1)
    with torch.cuda.stream(side):
        whole[:, 3 if overlapping else 4 :].add_(2)


def test_bytes_of_strided_tensors() -> None:
    """Columns that interleave in memory share no byte; torch's sanitizer takes tensors by their first address alone."""
    world.run(halves, 1, False)
    with pytest.raises(Fault, match="race"):
        world.run(halves, 1, True)
