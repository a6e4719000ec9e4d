"""Random programs on the simulated machine: a few operations of the package each, with every result compared.

A seed decides the machine, the ranks, their nodes and groups, and the operations: kind, dtype, size, layout, streams, which of them are in
flight together, and the order in which each rank waits for them. Moves must have every bit. Sums of ours must have the bits of the
documented order, by the host; the backend's own sums must be near the sum.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import corpus
import levels
import torch
import torch.distributed as dist
from sim.device import machine

from ds_zipccl import devices
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import context, streams
from ds_zipccl.comm.group_state import group_nodes, resolve_group
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import KernelBackend
from ds_zipccl.policy import cost_model, wire
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.random_calls import DRAWN, MOVES, OPERATIONS, Desk, Task

_CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0, reduction="fp32")
CONFIGS = (_CODED, _CODED, replace(_CODED, codec="wide", block=256), replace(_CODED, codec="raw"))
#: Ranks, and how often. The emulated kernels of all ranks share one core.
RANKS = {2: 4, 3: 2, 4: 3, 8: 1}
#: Elements of a rank's part: around the borders of blocks, chunks and slots.
SIZES = (0, 1, 2, 7, 255, 256, 257, 1000, 1023, 1025, 2048, 4095, 4097, 5000)
#: Bytes of the staging buffers of a rank: so few that staging buffers are used again while they are in flight.
BUDGETS = (1 << 14, 1 << 16, 1 << 20)
ARENA_BYTES = 24 << 20


class _Passes(threading.local):
    """The last reason for which a call of this thread passed."""

    reason = ""


_passes = _Passes()


def program(
    rank: int,
    ranks: int,
    seed: int,
    nodes: Sequence[Sequence[int]],
    strict: bool,
    names: Sequence[str],
    configs: Sequence[ZipcclConfig],
) -> Counter[str]:
    """Run the program of a seed, and compare. Returns the calls that were coded, and those that passed, by kind.

    ``strict``: NCCL lets no two groups work side by side here, or a collective takes all multiprocessors. Then there is one group, and one
    operation in flight: plain operations of a caller have a stream of their own.
    """
    draw = random.Random(f"program {seed}")
    # Few kinds in half of the programs: messages that follow each other are alike, and get each other's memory.
    names, configs, kinds, sizes = (
        draw.choice((some, draw.sample(some, min(2, len(some)))))
        for some in (names, configs, list(corpus.SUMMED.values()), SIZES)
    )
    levels.pretend(nodes)
    groups: list[tuple[tuple[int, ...], Any]] = [(tuple(range(ranks)), dist.group.WORLD)]
    if ranks > 2 and not strict:
        for _ in range(draw.randrange(3)):
            members = sorted(draw.sample(range(ranks), draw.randrange(2, ranks)))
            groups.append((tuple(members), dist.new_group(members)))
    device, own = torch.device("cuda", rank), random.Random(f"{seed} {rank}")
    runtime = devices.runtime(device)
    assert runtime is not None
    main, side = runtime.current_stream(device), runtime.Stream(device)
    if seed % 2:
        streams.streams_of(device).reserve(drawn_machine(seed, ranks)[-1])
    pending: list[tuple[Desk, bool]] = []
    dropped: list[tuple[Desk, bool]] = []
    ended: list[tuple[Desk, bool, list[torch.Tensor]]] = []
    done: Counter[str] = Counter()

    def settle() -> None:
        own.shuffle(pending)
        while pending:
            desk, coded = pending.pop()
            with runtime.stream(side if desk.task.side != desk.elsewhere else main):
                desk.handle.wait()
                ended.append((desk, coded, [output.clone() for output in desk.outputs]))

    for number in range(draw.randrange(2, 6)):
        members, group = draw.choice(groups)
        task = Task(
            draw.choice(names), members, group, draw.choice(configs), draw.choice(kinds),
            draw.choice(sizes) // (2 if ranks == 8 else 1), draw.random() < 0.6, draw.random() < 0.2, draw.random() < 0.3,
            f"{seed} {number}",
        )  # fmt: skip
        if rank not in members:
            continue
        stream = side if task.side else main
        with runtime.stream(stream):
            desk, _passes.reason = Desk(task, rank), ""
            OPERATIONS[task.op][1](desk)
            coded = not _passes.reason
            done[f"{task.op}: {'coded' if coded else _passes.reason}"] += 1
            if not task.later or desk.handle is None:
                ended.append((desk, coded, [output.clone() for output in desk.outputs]))
            elif own.random() < 0.1:  # nobody waits for the handle
                desk.handle = None
                dropped.append((desk, coded))
            else:
                pending.append((desk, coded))
        if strict or own.random() < 0.3:
            settle()
    settle()
    torch.cuda.synchronize()
    assert len(machine().communicators) == len(groups), "the package made groups of its own, for levels perhaps"
    ended += [(desk, coded, desk.outputs) for desk, coded in dropped]
    for desk, coded, outputs in ended:
        for got, want in zip(outputs, desk.wanted, strict=True):
            compare(desk, coded, got.cpu(), want)
    return done


def compare(desk: Desk, coded: bool, got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail unless an output of a task is right."""
    nodes = group_nodes(resolve_group(desk.task.group))
    exact = coded and (not topology.levels(nodes) or len(nodes[0]) == 2)  # NCCL sums more ranks of a node in any order
    if desk.task.op not in MOVES:  # the payload of a NaN sum is undefined
        both = got.isnan() & want.isnan()
        got, want = got.masked_fill(both, 0), want.masked_fill(both, 0)
    if desk.task.op in MOVES or exact:
        word = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
        wrong = int((got.contiguous().view(word) != want.contiguous().view(word)).sum())
        assert not wrong, f"{wrong} of {got.numel()} elements are wrong after {desk.task}"
    else:
        near = torch.finfo(got.dtype).eps * 2 * desk.ranks
        biggest = want.float().abs().max().item() if want.numel() else 0.0
        close = (got.float() - want.float()).abs() <= near * (want.float().abs() + biggest)
        assert close.all(), f"{int((~close).sum())} of {got.numel()} sums are far off after {desk.task}"


@contextlib.contextmanager
def limits(budget: int, levels_from: float = 0.0) -> Iterator[None]:
    """Limits of the package so small that short messages are cut, coded, and wait for staging buffers; and notes of calls that pass.
    ``levels_from``: bytes from which on gathers go in two levels, on nodes that have them."""
    opened, record = context.DeviceContext.__init__, counters.record_pass

    def open_small(self: Any, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        self.budget = budget

    def note(role: str, op: str, nbytes: int, reason: str, **named: Any) -> None:
        _passes.reason = reason
        record(role, op, nbytes, reason, **named)

    patched = [
        (wire, "FRAGMENT_UNIT", 512), (wire, "DEVICE_FRAGMENT_BYTES", 1 << 12), (wire, "RAW_BELOW_BYTES", 64), (wire, "GOOD_FORECASTS", 0),
        (cost_model, "levels_from", lambda topology, profile: levels_from if topology.levels else math.inf),
        (streams, "_GRAIN", 1 << 10), (context.DeviceContext, "__init__", open_small), (counters, "record_pass", note),
    ]  # fmt: skip
    with world.replacing(patched):
        yield


class Failure(AssertionError):
    """The program of a seed failed; the message has the seed. The cause is the error."""


def drawn_machine(seed: int, ranks: int | None = None) -> tuple[int, list[list[int]], world.Modes, int]:
    """The ranks, their nodes, the machine's properties and the budget of a seed."""
    draw = random.Random(f"machine {seed}")
    drawn = draw.choices(list(RANKS), list(RANKS.values()))[0]
    ranks = drawn if ranks is None else ranks
    each = draw.choice([size for size in (1, 2, 4) if not ranks % size])
    modes = draw.choice((world.Modes(), draw.choice(world.ALL_MODES), _any_modes(draw)))
    return ranks, levels.nodes_of(ranks // each, each), modes, draw.choice(BUDGETS)


def _any_modes(draw: random.Random) -> world.Modes:
    names = ("one_queue", "lazy_loading", "busy", "connect", "strict_communicators")
    return world.Modes(**{name: draw.random() < 0.5 for name in names})


def run(
    seed: int,
    route: KernelBackend,
    ranks: int | None = None,
    names: Sequence[str] = tuple(DRAWN),
    configs: Sequence[ZipcclConfig] = CONFIGS,
) -> Counter[str]:
    """Run the program of a seed.

    Args:
        ranks: their number, if the seed shall not decide.
        names, configs: operations and configurations to draw from.

    Returns:
        The calls of all ranks that were coded, and those that passed, by kind.

    Raises:
        Failure: a wrong result, a race, a program that is stuck, or any error.
    """
    ranks, nodes, modes, budget = drawn_machine(seed, ranks)
    strict = modes.strict_communicators or modes.busy
    options: dict[str, Any] = {"seed": seed, "modes": modes, "arena_bytes": ARENA_BYTES, "route": route}
    with limits(budget, seed % 3 * 2000):
        try:
            outcome = world.run(program, ranks, seed, nodes, strict, names, configs, **options)
        except Exception as error:
            repeat = f"python tests/on_sim/soak.py --first {seed} --ranks {ranks} -- 1"
            said = f"seed {seed}, nodes {nodes}, {budget} bytes of staging buffers, {modes}; again by: {repeat}"
            raise Failure(f"{type(error).__name__}: {error}\n{said}") from error
    return sum(outcome.values, Counter())
