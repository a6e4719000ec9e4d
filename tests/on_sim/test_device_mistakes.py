"""Schedules on a device with one mistake planted: random programs of a few seeds notice each."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moves
import pytest
import torch
from places import PACKAGE
from pytest import MonkeyPatch

from ds_zipccl.comm.device import sizes as agreement
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.stream_work import StreamWork
from ds_zipccl.comm.device.streams import Stage, StagingBuffer, Streams
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import random_programs, world

RAW = random_programs.CONFIGS[-1]
#: Seeds within which a mistake must be noticed.
FEW = 60
#: Orders that no program can miss, and the reason.
TWICE = {
    (
        "streams",
        "self.order(stage, Stage.DECODE)",
    ): "schedules order all streams into the decoding one; this is for those that fail",
    ("sizes", "streams.order(Stage.WIRE, Stage.ENCODE)"): "the host has waited for the wire meanwhile",
}
#: File, and function or "" for all of them -> why no random program comes to its orders.
UNDRAWN = {
    ("calibration", ""): "of speeds, whose words nothing reads",
    ("sizes", "finish"): "for the end of an engine",
    ("exchange", "_apart"): "for exchanges in place: test_device_exchange.py",
    ("exchange", "exchange_even"): "as above",
    ("sums", "plain_to_owners"): "sums of the backend have no order of their own to compare with: test_device_sums.py",
    ("sums", "_scattered"): "as above",
    ("sums", "_reduced"): "as above",
}
#: Orders that matter in rare programs: what these draw from.
RARE: dict[tuple[str, str], dict[str, Any]] = {
    ("gather", "ctx.streams.order(Stage.ENCODE, Stage.WIRE)"): {"names": ["gather list"], "configs": [RAW]},
    ("all_gather", "ctx.streams.order(Stage.DECODE, Stage.ENCODE)"): {"names": ["gather list"], "configs": [RAW]},
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
        self._outputs = []

    patch.setattr(StreamWork, "__init__", make)


def unread_agreement(patch: MonkeyPatch) -> None:
    """The host reads the agreement before it has arrived."""
    patch.setattr(agreement, "_wait", lambda ctx, event: None)


def wrong_size(patch: MonkeyPatch) -> None:
    """One rank has understood another size than the others."""
    agree = agreement.agree

    def misunderstood(ctx: DeviceContext, words: Any) -> list[int]:
        return [size + (4096 if ctx.rank == 1 else 0) for size in agree(ctx, words)]

    for name in [name for name in sys.modules if name.startswith("ds_zipccl.comm")]:
        if getattr(sys.modules[name], "agree", None) is agree:
            patch.setattr(sys.modules[name], "agree", misunderstood)


def same_stream(patch: MonkeyPatch) -> None:
    """The decoder works on the encoder's stream."""
    on = Streams.on
    patch.setattr(Streams, "on", lambda self, stage: on(self, Stage.ENCODE if stage is Stage.DECODE else stage))


PLANTS: dict[Callable[[MonkeyPatch], None], str] = {
    no_begin: "race", no_join: "race", staging_early: "race", staging_freed_early: "race", nothing_kept: "race", unread_agreement: "race",
    wrong_size: "would hang", same_stream: "race",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_mistake_is_noticed(
    route: CudaBackend, monkeypatch: MonkeyPatch, plant: Callable[[MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    said = noticed(route)
    assert PLANTS[plant] in said or "elements are wrong" in said, said


def swapped(rank: int, ranks: int, sizes: tuple[int, int]) -> None:
    """Two gathers, which rank 1 calls in the other order."""
    api, device = moves.coded(nccl="on", nccl_min_bytes=0), torch.device("cuda", rank)
    inputs = [
        torch.full((size,), number + rank, dtype=torch.bfloat16, device=device) for number, size in enumerate(sizes)
    ]
    outputs = [torch.empty(ranks * size, dtype=torch.bfloat16, device=device) for size in sizes]
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
