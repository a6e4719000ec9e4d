"""A third engine, in one file outside of the package: gathers of frames by the plain collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import corpus
import ranks as runner
import torch
import torch.distributed as dist
from moves import CODED

from ds_zipccl import codecs, comm
from ds_zipccl.comm import engine
from ds_zipccl.comm.group_state import GroupState
from ds_zipccl.comm.request import Request
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.telemetry import counters


class PaddedGathers(engine.Engine):
    """Frames go padded to the largest, by torch's own gather. Takes groups of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0

    def takes(self, state: GroupState, device: str) -> bool:
        return state.size == self.size and device == "cpu"

    def passes_now(self, request: Request) -> PassReason | None:
        return None if request.op == "all_gather_into_tensor" else PassReason.SMALL_GAIN

    def start(self, request: Request, decision: Decision, timer: Any = None) -> None:
        self.calls += 1
        frame = codecs.compress(request.inputs[0], decision.codec)
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, torch.tensor([frame.numel()]), request.group)
        padded = torch.nn.functional.pad(frame, (0, int(sizes.max()) - frame.numel()))
        slots = padded.repeat(self.size)
        dist.all_gather_into_tensor(slots, padded, request.group)
        slot_of = slots.chunk(self.size)
        for place, slot, nbytes in zip(request.outputs[0].chunk(self.size), slot_of, sizes.tolist(), strict=True):
            codecs.decompress(slot[:nbytes], place)
        counters.record(request.options.role, request.op, request.sent_bytes(), padded.numel() * (self.size - 1), 0)


@runner.together(3)
def gathers(rank: int, ranks: int) -> None:
    """An engine executes the calls of its groups from its registration on. A group that had a call keeps its engine; so do other groups."""
    everyone = [corpus.tensor(corpus.bell(20_000, corpus.BF16, peer), corpus.BF16) for peer in range(ranks)]
    pair, engines = dist.new_group([0, 1]), [PaddedGathers(size) for size in (2, 3)]

    def gather(group: dist.ProcessGroup | None, size: int) -> list[int]:
        counters.reset()
        got = torch.empty(size * 20_000, dtype=torch.bfloat16)
        comm.all_gather_into_tensor(got, everyone[rank], group, config=CODED)
        corpus.assert_same_bits(got, torch.cat(everyone[:size]))
        (row,) = counters.rows()
        assert 1.3 < row["logical_bytes"] / row["wire_bytes"] < 1.7
        return [one.calls for one in engines]

    gather(None, ranks)
    for one in engines:
        engine.register(one)
    assert gather(None, ranks) == [0, 0]
    if rank < 2:
        assert gather(pair, 2) == [1, 0]
        counters.reset()
        ours, wanted = torch.full((20_000,), 1.5), torch.full((20_000,), 1.5)
        comm.all_reduce(ours, group=pair, config=CODED)
        dist.all_reduce(wanted, group=pair)
        assert torch.equal(ours, wanted)
        assert [row["reasons"] for row in counters.rows()] == [{PassReason.SMALL_GAIN.value: 1}]


class Sending(engine.Engine):
    """Has messages and parameters of its own, and notes what a job tells it."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def takes(self, state: GroupState, device: str) -> bool:
        return True

    def send(self, post: Any, *, bounded: bool) -> Any:
        self.told.append(("send", post.peer, bounded))
        return SimpleNamespace(wait=lambda: None)

    def has_bases(self, request: Request) -> bool:
        return len(request.parameters) == 1

    def gather_parameters(self, request: Request) -> Any:
        self.told.append([one.name for one in request.parameters])

    def end_step(self, engine: Any) -> None:
        self.told.append(engine)

    def finish(self, place: torch.device, seconds: float) -> bool:
        return False


@runner.together(2)
def everything_else(rank: int, ranks: int) -> None:
    """Sends, gathers of parameters and the steps of a job reach an engine that nobody knows by name."""
    engine.register(one := Sending())
    words = torch.zeros(5000, dtype=torch.bfloat16)
    comm.send(words, 1 - rank, config=CODED)
    state = comm.parameter(dist.group.WORLD, "cpu", "weight", 5000)
    whole = torch.zeros(10_000, dtype=torch.bfloat16)
    comm.all_gather_into_tensor(whole, words, parameters=[state], config=CODED)
    engine.end_step("a step")
    assert one.told == [("send", 1 - rank, True), ["weight"], "a step"]
    assert not engine.finish(torch.device("cpu"), 1.0) and engine.settle(CODED, torch.device("cpu")) is None
    assert engine.never_coded("all_reduce", None, "cpu") is None


test_programs = runner.programs(__name__)
