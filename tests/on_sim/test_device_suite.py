"""Every collective on the simulated GPU and NCCL, in random programs, which notice each planted mistake;
`make soak-sim` runs many more."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import levels
import moves
import pytest
import torch
import torch.distributed as dist
from places import PACKAGE
from pytest import MonkeyPatch
from sim import device
from sim.mistakes import filled

from ds_zipccl.comm.device import sizes as agreement
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.streams import Stage, Streams
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import plants, random_programs, world
from on_sim.random_calls import DRAWN, OPERATIONS, SUMS, Desk, Task

SHORT, FULL = range(15), range(15, 60)


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(FULL, marks=pytest.mark.full(reason="more seeds"))], ids=str)
def test_random_programs(route: CudaBackend, seeds: range) -> None:
    calls: Counter[str] = Counter()
    for seed in seeds:
        calls += random_programs.run(seed, route)
    for name in DRAWN:
        reasons = {kind.removeprefix(f"{name}: ") for kind in calls if kind.startswith(f"{name}: ")}
        passes = PassReason.NOT_ON_DEVICE.of(OPERATIONS[name][0])
        assert reasons or seeds is FULL, f"{name} is not drawn"
        assert reasons <= ({"coded"} if OPS[OPERATIONS[name][0]].on_device else {passes}), name


#: Operation -> host waits of a call; all others have one. All-reduces are a reduce-scatter and a gather; ranks compare their owners first.
WAITS = {"all_reduce": 2, "all_reduce several": 2, "owners": 2}
#: Operations with a schedule on a device.
CODED = [name for name in DRAWN if OPS[OPERATIONS[name][0]].on_device]


def one_call(rank: int, ranks: int, name: str, nodes: Any) -> tuple[int, int]:
    """Waits of the host for the device in one call, and its looks at events, as the simulator sees them."""
    levels.pretend(nodes)
    everybody, config = tuple(range(ranks)), random_programs.CONFIGS[0]
    for number in range(2):  # the first call of a group may connect ranks
        draw = f"w{number}"
        task = Task(name, everybody, dist.group.WORLD, config, corpus.BF16, 5000, later=True, draw=draw)
        desk = Desk(task, rank)
        call = desk.call
        seen: list[tuple[int, int]] = []

        def counted(*arguments: Any, **more: Any) -> None:
            counts = device.mine().counters
            before = len(counts.waits), counts.queries
            call(*arguments, **more)  # noqa: B023
            seen.append((len(counts.waits) - before[0], counts.queries - before[1]))  # noqa: B023

        desk.call = counted  # type: ignore[method-assign]
        if number and not rank:
            counters.reset()
        dist.barrier()
        OPERATIONS[name][1](desk)
        if desk.handle is not None:
            desk.handle.wait()
        torch.cuda.synchronize()
        dist.barrier()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "each"), [(name, 1) for name in CODED] + [(name, 2) for name in CODED if name in SUMS]
)
def test_host_waits(route: CudaBackend, name: str, each: int) -> None:
    """On two nodes of ``each`` ranks. The agreement alone waits, by looking at an event; no call blocks."""
    nodes = levels.nodes_of(2, each)
    ranks = sum(map(len, nodes))
    for waits, looks in world.run(one_call, ranks, name, nodes, route=route).values:
        assert waits == 0 and looks >= WAITS.get(name, 1)
    (row,) = [row for row in counters.rows() if row["op"] == OPERATIONS[name][0]]
    assert row["host_waits"] == WAITS.get(name, 1) * ranks and row["calls"] == ranks


RAW = random_programs.CONFIGS[-1]
#: Seeds within which a mistake must be noticed.
FEW = 60
#: Orders that no program can miss, and the reason.
TWICE = {
    ("streams", "self.order(stage, Stage.DECODE)"): "schedules order all streams into it; this is for those that fail",
    ("sizes", "streams.order(Stage.WIRE, Stage.ENCODE)"): "the host has waited for the wire meanwhile",
}
#: File, and function or "" for all of them -> why no random program comes to its orders.
UNDRAWN = {
    ("calibration", ""): "of speeds, whose words nothing reads",
    ("exchange", "apart"): "for exchanges in place: test_device_exchange.py",
    ("lossy", ""): "for values that a codec changes: test_device_lossy.py",
    ("first_steps", ""): "of programs without steps: test_first_steps.py",
    ("gather", "gather_in_place"): "for differences from a gather that nobody has waited for, which no program makes",
}
#: Orders that matter in rare programs: what these draw from.
RARE: dict[tuple[str, str], dict[str, Any]] = {
    ("engine", "ctx.streams.order(Stage.DECODE, Stage.ENCODE)"): {"names": ["gather list"], "configs": [RAW]},
}


@dataclass(frozen=True)
class Order:
    """A call in which a stream waits for another one: its file, line and text."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.stem} {self.line} {self.text}"


def orders() -> Iterator[Order]:
    """Every such call of the schedules."""
    folders = [PACKAGE / "comm/device", PACKAGE / "comm/ops"]
    for file in [*(file for folder in folders for file in sorted(folder.glob("*.py"))), PACKAGE / "comm/execution.py"]:
        tree = ast.parse(file.read_text())
        undrawn = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and {(file.stem, ""), (file.stem, function.name)} & set(UNDRAWN)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "order":
                text = ast.unparse(node)
                if "Stage." in text and (file.stem, text) not in TWICE and id(node) not in undrawn:
                    yield Order(file, node.lineno, text)


def noticed(route: CudaBackend, **drawn: Any) -> str:
    """The text of the first failure; ``drawn`` is of :func:`on_sim.random_programs.run`."""
    for seed in range(FEW):
        try:
            random_programs.run(seed, route, **drawn)
        except random_programs.Failure as failure:
            return str(failure)
    raise AssertionError(f"none of {FEW} seeds noticed")


@pytest.mark.full(reason="many seeds")
@pytest.mark.parametrize("place", orders(), ids=str)
def test_a_stream_that_does_not_wait(route: CudaBackend, monkeypatch: MonkeyPatch, place: Order) -> None:
    order = Streams.order

    def forgetful(self: Streams, first: Stage, second: Stage) -> None:
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) != (str(place.file), place.line):
            order(self, first, second)

    monkeypatch.setattr(Streams, "order", forgetful)
    noticed(route, **RARE.get((place.file.stem, place.text), {}))


def test_orders_are_found() -> None:
    """The orders that are said twice are there, and others too."""
    for stem, text in TWICE:
        assert text in ast.unparse(ast.parse((PACKAGE / f"comm/device/{stem}.py").read_text())), (stem, text)
    assert len(list(orders())) > 5


def wrong_size(patch: MonkeyPatch) -> None:
    """One rank has understood another size than the others."""
    agree = agreement.agree

    def misunderstood(ctx: DeviceContext, words: Any) -> list[int]:
        return [size + (4096 if ctx.rank == 1 else 0) for size in agree(ctx, words)]

    for name in [name for name in sys.modules if name.startswith("ds_zipccl.comm")]:
        if getattr(sys.modules[name], "agree", None) is agree:
            patch.setattr(sys.modules[name], "agree", misunderstood)


PLANTS: dict[plants.Plant, str] = {
    plants.no_begin: "race", plants.no_join: "race", plants.staging_early: "race", plants.staging_freed_early: "race",
    plants.gaps_that_are_none: "race", plants.nothing_kept: "race", plants.unread_agreement: "race",
    wrong_size: "would hang", plants.same_stream: "race", plants.another_place: "elements are wrong",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_mistake_is_noticed(route: CudaBackend, monkeypatch: MonkeyPatch, plant: plants.Plant) -> None:
    plant(monkeypatch)
    said = noticed(route)
    assert PLANTS[plant] in said or "elements are wrong" in said, said


def swapped(rank: int, ranks: int, sizes: tuple[int, int]) -> None:
    """Two gathers, which rank 1 calls in the other order."""
    api = moves.coded(nccl="on", nccl_min_bytes=0)
    inputs = [filled(rank, size, number + rank, torch.bfloat16) for number, size in enumerate(sizes)]
    outputs = [filled(rank, ranks * size, -1, torch.bfloat16) for size in sizes]
    handles = [
        api.all_gather_into_tensor(outputs[at], inputs[at], None, True) for at in ((1, 0) if rank == 1 else (0, 1))
    ]
    for handle in handles:
        handle.wait()
    for number, output in enumerate(outputs):
        wanted = torch.cat([torch.full((sizes[number],), number + peer, dtype=torch.bfloat16) for peer in range(ranks)])
        assert torch.equal(output.cpu(), wanted), "wrong words"


@pytest.mark.parametrize("sizes", [(3000, 9000), (3000, 3000), (100, 20_000)])
def test_another_order_on_a_rank(route: CudaBackend, sizes: tuple[int, int]) -> None:
    """NCCL would hang, or words are not those of the call: a rank refuses the frames, or finds other words in them."""
    with pytest.raises((AssertionError, CommError)):
        world.run(swapped, 2, sizes, route=route)
