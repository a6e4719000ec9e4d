"""Gathers of parameters as differences against what is in place, or a copy of each rank or node: the same bits whatever ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from kept import CONFIG, FULL, OTHER, SHARDS, refusing

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases import host_memory, in_place
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import frames, tuner
from ds_zipccl.comm.host import gather as host_gather
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.policy import admission, tuner_rules
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render

SHARD = 40_000


def step(weights: torch.Tensor, seed: int) -> None:
    """A step of an optimizer on every shard, the same on all ranks."""
    noise = torch.randn(weights.numel(), generator=torch.Generator().manual_seed(seed))
    weights.add_(1e-3 * noise)


class Trainer:
    """What a ZeRO-1/2 rank does: keep the whole in bf16, step its own shard, gather in place."""

    base: comm.Base | None = comm.IN_PLACE

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.ranks = rank, ranks
        self.masters = torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(1))
        self.whole = self.masters.to(dtype, copy=True)
        self.seed = 100

    @property
    def own(self) -> torch.Tensor:
        return self.whole.chunk(self.ranks)[self.rank]

    def gather(self, *, moved: bool = True, later: bool = False) -> dict[str, int]:
        """One step; what it added to the count of differences. The result is checked."""
        if moved:
            self.seed += 1
            step(self.masters, self.seed)
        wanted = self.masters.to(self.whole.dtype)
        self.own.copy_(wanted.chunk(self.ranks)[self.rank])
        counters.reset()
        handle = comm.all_gather_into_tensor(self.whole, self.own, None, later, config=CONFIG, base=self.base)
        if later:
            handle.wait()
        assert torch.equal(self.whole.view(torch.uint8), wanted.view(torch.uint8))
        (row,) = counters.rows()
        self.ratio = row["ratio"]
        return row["differences"]


def steps(rank: int, ranks: int, kind: str) -> None:
    trainer = Trainer(rank, ranks, corpus.SUMMED[kind].dtype)
    assert trainer.gather() == {FULL: 1}
    full = trainer.ratio
    for turn in range(3):
        assert trainer.gather(later=turn == 1) == {"": 1}
        assert trainer.ratio > (2.5 if kind == "bf16" else 1.1) * full
    assert trainer.gather(moved=False) == {"": 1}
    assert trainer.ratio > 100, "nothing has changed"


@runner.together(3)
def edited(rank: int, ranks: int) -> None:
    """One bit of one rank's copy of one shard: that shard goes in full, once; the others do not."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    for place in (3, SHARD // 2, SHARD - 1):
        if rank == 1:
            trainer.whole[place].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
        assert trainer.gather() == ({OTHER: 1} if rank == 0 else {"": 1})
        assert trainer.gather() == {"": 1}


@runner.together(3)
def workspace(rank: int, ranks: int) -> None:
    """Gathers of many sizes into the same memory: one copy is kept, as long as the memory lives."""
    buffer = torch.zeros(ranks * SHARD, dtype=torch.bfloat16)
    for numel in range(SHARD - 20, SHARD):
        whole = buffer[: ranks * numel]
        comm.all_gather_into_tensor(whole, torch.ones(numel).bfloat16(), config=CONFIG, base=comm.IN_PLACE)
        assert counters.memory()["copies of the shards sent"] == 2 * numel
    del buffer, whole
    assert "copies of the shards sent" not in counters.memory()


@runner.together(3)
def sometimes(rank: int, ranks: int) -> None:
    """With a base and without, the same message otherwise."""
    trainer = Trainer(rank, ranks)
    trainer.base = None
    assert trainer.gather() == {}
    trainer.base = comm.IN_PLACE
    assert trainer.gather() == {FULL: 1}
    assert trainer.gather() == {"": 1}


@runner.together(3)
def loaded(rank: int, ranks: int) -> None:
    """A checkpoint on all ranks: nobody holds what was sent last. Then another rank's memory is new."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    trainer.masters = torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(2))
    trainer.whole.copy_(trainer.masters.bfloat16())
    assert trainer.gather() == {OTHER: 1}
    assert trainer.gather() == {"": 1}
    kept = trainer.whole
    if rank == ranks - 1:
        trainer.whole = trainer.whole.clone()  # a new engine, say
    assert trainer.gather() == ({FULL: 1} if rank == ranks - 1 else {"": 1})
    assert trainer.gather() == {"": 1}
    assert kept is not None


@runner.together(3)
def skipped(rank: int, ranks: int) -> None:
    """A rank that changed its own shard and threw the change away."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    if rank == 0:
        trainer.own.zero_()
    assert trainer.gather(moved=False) == {"": 1}


@runner.together(3)
def replaced(rank: int, ranks: int) -> None:
    """What was sent is remembered as long as the memory it was gathered to, which then may come back."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    for _ in range(4):
        trainer.whole = trainer.whole.clone()
        assert trainer.gather() == {FULL: 1}
    assert trainer.gather() == {"": 1}
    (sent,) = in_place.IN_PLACE._sent.values()
    assert len(sent) == 1


def trusting(rank: int, ranks: int) -> None:
    host_gather._objection = lambda link, last, places: "" if last is not None else FULL
    edited(rank, ranks)


@runner.together(2)
def after_an_error(rank: int, ranks: int) -> None:
    """A refused frame ends the operation; the next gather assumes nothing."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    failing = [True]

    def damaged(frame: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        if frame[5] == 2 and failing.pop():
            frame = frame.clone()
            frame[4] = 9
        return decompress(frame, *arguments, **more)

    frames.decompress = damaged
    with pytest.raises(comm.CommError, match=r"frame from global rank .* refused"):
        trainer.gather()
    frames.decompress = decompress
    dist.barrier()
    trainer.whole.copy_(trainer.masters.bfloat16())
    assert trainer.gather() == {FULL: 1}


@runner.together(2)
def where_there_are_none(rank: int, ranks: int) -> None:
    """Off, without a base, another operation, small shards, the raw codec: no differences."""
    whole = torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = whole.chunk(ranks)[rank]
    for _ in range(2):
        off, raw = (replace(CONFIG, **{key: value}) for key, value in (("delta", "off"), ("codec", "raw")))
        comm.all_gather_into_tensor(whole, own, config=off, base=comm.IN_PLACE)
        comm.all_gather_into_tensor(whole, own, config=CONFIG)
        comm.all_gather(list(whole.chunk(ranks)), own.clone(), config=CONFIG)
        comm.all_gather_into_tensor(whole[: 64 * ranks], whole[:64], config=CONFIG, base=comm.IN_PLACE)
        comm.all_gather_into_tensor(whole, own, config=raw, base=comm.IN_PLACE)
    assert not any(row["differences"] for row in counters.rows())
    assert "differences" not in render()


# ---- without ranks -----------------------------------------------------------------------------------------------------


class Group:
    """Stands for one."""


def remembered(base: in_place.InPlaceBase, link: Any, *outputs: torch.Tensor) -> list[bool]:
    """Of which outputs, each of two shards, what was sent is known."""
    found = []
    for output in outputs:
        last = base.begin(link, output.chunk(2), PooledBuffers())
        found.append(last is not None)
        if last is not None:
            base.end(link, output.chunk(2), last)
    return found


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> in_place.InPlaceBase:
    """A base of which the counters do not know: they go on to tell of the base of this process."""
    monkeypatch.setattr(in_place.counters, "count_memory", lambda what, nbytes: None)
    return in_place.InPlaceBase()


def test_what_is_remembered_of_each_place(base: in_place.InPlaceBase) -> None:
    """Several outputs at a time, side by side too; what is written over another is all that is known of that memory."""
    link = SimpleNamespace(group=Group(), rank=1)
    memory, elsewhere = torch.arange(400.0).bfloat16(), torch.zeros(100).bfloat16()
    first, second, third = memory[:100], memory[100:200], memory[200:]
    across = memory[50:150]
    outputs = [second, first, elsewhere, third]
    assert remembered(base, link, *outputs) == [False] * 4
    for output in outputs:
        base.end(link, output.chunk(2), None)
    assert remembered(base, link, *outputs, *outputs) == [True] * 8, "begin takes it out, end puts it back"
    assert remembered(base, link, first.view(torch.float16), memory[:50], memory[1:101], across) == [False] * 4
    assert remembered(base, SimpleNamespace(group=Group(), rank=1), first) == [False], "another group's"
    base.end(link, across.chunk(2), None)
    assert remembered(base, link, *outputs, across) == [False, False, True, True, True]
    assert base._nbytes() == across.nbytes // 2 + elsewhere.nbytes // 2 + third.nbytes // 2


def test_what_was_sent_is_a_copy_of_the_own_shard(base: in_place.InPlaceBase) -> None:
    link = SimpleNamespace(group=Group(), rank=1)
    output = torch.arange(10.0).bfloat16()
    base.end(link, output.chunk(2), None)
    output.zero_()
    last = base.begin(link, output.chunk(2), PooledBuffers())
    assert last is not None and last.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert base.begin(link, output.chunk(2), PooledBuffers()) is None, "after an error nothing is known"


class Watched:
    """A base that notes what it is asked, and takes memory."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin(self, link: Any, places: Any, lease: PooledBuffers) -> torch.Tensor | None:
        self.lease = lease
        return lease.empty(places[0].numel(), torch.float32, places[0].device).fill_(7.0)

    def end(self, link: Any, places: Any, last: torch.Tensor | None) -> None:
        assert last is not None and self.lease._blocks, "it is still its memory"
        self._log.append("end")

    def abandon(self, link: Any) -> None:
        self._log.append("abandon")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("reason", ["", OTHER])
def test_the_course_of_a_gather(monkeypatch: pytest.MonkeyPatch, fails: bool, reason: str) -> None:
    log: list[Any] = []

    def gather(link: Any, index: int, own: Any, places: Any, base: torch.Tensor | None = None) -> None:
        log.append((index, float(own[0][0]), base is not None))
        if fails:
            raise comm.CommError("as planted")

    monkeypatch.setattr(host_gather, "gather", gather)
    monkeypatch.setattr(host_gather, "_objection", lambda link, last, places: reason)
    link, base = SimpleNamespace(rank=0, role="zero_param", op="gather"), Watched(log)
    whole = torch.arange(8.0)
    places = whole.chunk(2)
    counters.reset()
    with pytest.raises(comm.CommError) if fails else nullcontext():
        host_gather.gather_differences(link, places[1], places, base)  # type: ignore[arg-type]
    assert log == [(1, 4.0, not reason), "abandon" if fails else "end"]
    assert bool(base.lease._blocks) == fails, "memory goes back where nobody can be at work on it"
    assert [row["differences"] for row in counters.rows()] == ([] if fails else [{reason: 1}])
    counters.reset()


def test_the_table_says_it() -> None:
    counters.reset()
    counters.record_difference("zero_param", "all_gather_into_tensor", FULL)
    counters.record_difference("zero_param", "all_gather_into_tensor", "")
    line = f"zero_param all_gather_into_tensor: 1 of 2 shards went as differences, {FULL} (1)"
    assert render().splitlines()[-2] == line
    counters.reset()


class Sharded:
    """What a ZeRO-3 rank does: step its shards of some tensors, gather some of them at a time into new memory, let it go."""

    def __init__(self, rank: int, ranks: int, kind: str) -> None:
        self.rank, self.ranks, self.seed = rank, ranks, 1
        self.masters = [torch.randn(ranks, shard, generator=torch.Generator().manual_seed(shard)) for shard in SHARDS]
        self.kept = comm.allocate_bases([(shard, torch.bfloat16) for shard in SHARDS], kind, dist.group.WORLD)

    def step(self) -> None:
        for master in self.masters:
            self.seed += 1
            master.add_(1e-3 * torch.randn(master.shape, generator=torch.Generator().manual_seed(self.seed)))

    def start(self, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """What is gathered, what should be, and the handle."""
        wanted = torch.cat([self.masters[index] for index in chosen], dim=1).bfloat16()
        whole = torch.full(wanted.shape, float("nan"), dtype=torch.bfloat16)
        own = whole[self.rank].copy_(wanted[self.rank]) if self.seed % 2 else wanted[self.rank].clone()
        base = comm.SharedBase([self.kept[index] for index in chosen])
        return whole, wanted, comm.all_gather_into_tensor(whole.view(-1), own, None, True, config=CONFIG, base=base)

    def gather(self, *chosen: int) -> dict[str, int]:
        """What a gather, which is checked, adds to the count of differences."""
        counters.reset()
        whole, wanted, handle = self.start(chosen)
        handle.wait()
        assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16))
        (row,) = counters.rows()
        self.ratio = row["ratio"]
        return row["differences"]


@runner.together(2, "host")
@runner.together(2, "device")
@runner.together(3, "host")
@runner.together(3, "device")
def shared_steps(rank: int, ranks: int, kind: str) -> None:
    trainer = Sharded(rank, ranks, kind)
    assert trainer.gather(0, 1, 2) == {FULL: 1}
    full = trainer.ratio
    for _ in range(3):
        trainer.step()
        assert trainer.gather(0, 1, 2) == {"": 1}
        assert trainer.ratio > 2 * full
        assert trainer.gather(1, 2) == {"": 1}  # asked for in other company, as in a backward pass
        assert trainer.ratio > 100
        assert trainer.gather(0) == {"": 1}
        assert trainer.ratio > 100
    nbytes = sum(2 * ranks * shard for shard in SHARDS)
    assert nbytes <= counters.memory()["copies of gathered parameters"] < nbytes + 64 * len(SHARDS)


@runner.together(4)
def nodes_share_a_copy(rank: int, ranks: int) -> None:
    """Two nodes of two ranks: each pair has one copy, and shards may come by way of the other rank of a node."""
    topology.here = lambda: "left" if rank < 2 else "right"
    trainer = Sharded(rank, ranks, "host")
    assert [kept.node_ranks for kept in trainer.kept] == [[0, 1] if rank < 2 else [2, 3]] * len(SHARDS)
    for nodes in ([], [[0, 1], [2, 3]]):
        group_state(None).nodes = nodes
        trainer.gather(0, 2)
        trainer.step()
        assert trainer.gather(0, 2) == {"": 1}
    dist.barrier()
    before = trainer.kept[0].memory[0, 0].clone()
    dist.barrier()
    if rank in (0, 2):
        trainer.kept[0].memory[0, 0] = 1.0 + rank
    dist.barrier()
    assert before != trainer.kept[0].memory[0, 0] == 1.0 + rank // 2 * 2


@runner.together(3)
def copy_edited(rank: int, ranks: int) -> None:
    """One bit of one rank's copy of one shard: that shard goes in full, once; the others do not."""
    trainer = Sharded(rank, ranks, "device")
    trainer.gather(0, 2)
    if rank == 1:
        trainer.kept[2].memory[0, 7].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
    trainer.step()
    assert trainer.gather(0, 2) == ({OTHER: 1} if rank == 0 else {"": 1})
    trainer.step()
    assert trainer.gather(0, 2) == {"": 1}


@runner.together(3)
def mistaken(rank: int, ranks: int) -> None:
    """A rank takes the copy of another tensor, then one whose last gather it has missed."""
    trainer = Sharded(rank, ranks, "device")
    trainer.kept.append(BaseSlot(trainer.kept[0].memory.clone(), trainer.kept[0].node_ranks, 99))
    trainer.masters.append(trainer.masters[0] + 1)
    trainer.gather(0)
    trainer.gather(3)
    right = trainer.kept[0], trainer.kept[0].memory.clone()
    if rank == 1:
        trainer.kept[0] = trainer.kept[3]
    trainer.step()
    assert trainer.gather(0) == {OTHER: 1}
    if rank == 1:
        trainer.kept[0] = right[0]
        trainer.kept[0].memory.copy_(right[1])
    trainer.step()
    assert trainer.gather(0) == {OTHER: 1}
    trainer.step()
    assert trainer.gather(0) == {"": 1}


@runner.together(3)
def together(rank: int, ranks: int) -> None:
    """Several gathers in flight, waited for in another order."""
    trainer = Sharded(rank, ranks, "host")
    for _ in range(4):
        trainer.step()
        for whole, wanted, handle in [trainer.start([index]) for index in (2, 0)][::-1]:
            handle.wait()
            assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16))
    assert trainer.gather(0, 2) == {"": 1}
    assert trainer.ratio > 100


def equal_hashes(rank: int, ranks: int, edit: Any) -> None:
    host_gather.region_hash = lambda region: bytes(16)
    edit(rank, ranks)


@pytest.mark.parametrize("mistake", [(trusting,), (equal_hashes, edited), (equal_hashes, copy_edited)])
def test_a_missing_proof_is_noticed(mistake: Any) -> None:
    """Differences against something else give other parameters: what these tests compare."""
    with pytest.raises(runner.RankFailure, match=r"torch\.equal"):
        runner.run(mistake[0], 3, *mistake[1:])


@runner.together(3)
def in_a_container(rank: int, ranks: int) -> None:
    """Rank 1 has the host name and the network of the others, but cannot see their processes: the size of its group of sharers."""
    if rank == 1:
        host_memory.place = lambda: "pid:[1] user:[1] 0"
    trainer = Sharded(rank, ranks, "host")
    trainer.gather(0, 2)
    trainer.step()
    assert trainer.gather(0, 2) == {"": 1}
    assert len(trainer.kept[0].node_ranks) == (1 if rank == 1 else 2)


@runner.together(2)
def nobody_waits_for_who_has_failed(rank: int, ranks: int) -> None:
    """A rank that refuses a frame goes on to other things; the others of its node do not wait for it, and nobody counts on the copy."""
    trainer = Sharded(rank, ranks, "host")
    trainer.gather(0)
    trainer.step()

    frames.decompress = refusing(SHARDS[0]) if rank == 0 else decompress
    if rank == 0:
        with pytest.raises(comm.CommError, match="refused"):
            trainer.gather(0)
    else:
        assert trainer.gather(0) == {"": 1}
    frames.decompress = decompress
    dist.barrier()
    assert trainer.gather(0) == {FULL: 1}
    assert trainer.gather(0) == {"": 1}


@runner.together(2)
def trials(rank: int, ranks: int) -> None:
    """Differences are tried when there is something to differ from. Eight tensors, forward and backward."""
    config, timed = replace(CONFIG, mode="auto"), []
    start = tuner.CallTimer.start
    tuner.CallTimer.start = lambda self: (timed.append(True), start(self))
    shards = [torch.randn(SHARDS[0]).bfloat16() for _ in range(8)]
    kept = comm.allocate_bases([(SHARDS[0], torch.bfloat16)] * 8, "host", dist.group.WORLD)
    found = []
    for turn in range(80):
        index = min(turn % 16, 15 - turn % 16)
        counters.reset()
        timed.clear()
        whole = torch.empty(ranks * SHARDS[0], dtype=torch.bfloat16)
        comm.all_gather_into_tensor(whole, shards[index], config=config, base=comm.SharedBase([kept[index]]))
        differences = counters.rows()[0]["differences"]
        if timed and differences:
            found.append(differences == {"": 1})
    assert found[: tuner_rules.TRIAL_CALLS] == [True] * tuner_rules.TRIAL_CALLS


@runner.together(2)
def nothing_to_keep(rank: int, ranks: int) -> None:
    assert comm.allocate_bases([], "host", dist.group.WORLD) == []


def storage(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes that are values of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), generator=generator)
    return words.to(torch.uint8).view(dtype)


@runner.together(2)
def stored(rank: int, ranks: int) -> None:
    """Gathers of integers and other words that are no floats of the format: their bytes go as differences, against a base alone.

    Ratios of gathers of unchanged words, and of words of which one in a hundred has changed.
    """
    numel, least = 80_000, {"first": 0.99, "unchanged": 200, "changed": 20}
    for dtype in admission.DELTA_DTYPES:
        shards = torch.stack([storage(numel, dtype, 7 + shard) for shard in range(ranks)])
        (slot,) = comm.allocate_bases([(numel, dtype)], "host", dist.group.WORLD)
        assert slot.memory.dtype is dtype
        for turn, kind in enumerate(("first", "unchanged", "changed", "uncoded")):
            if kind == "changed":
                shards[:, turn::100] = storage(ranks * 800, dtype, 70 + turn).view(ranks, 800)
            counters.reset()
            base = None if kind == "uncoded" else comm.SharedBase([slot])
            whole = storage(ranks * numel, dtype, 99)
            comm.all_gather_into_tensor(whole, shards[rank].clone(), config=CONFIG, base=base)
            assert torch.equal(whole.view(torch.uint8), shards.view(-1).view(torch.uint8)), (dtype, kind)
            (row,) = counters.rows()
            name = str(dtype).removeprefix("torch.")
            if kind == "uncoded":
                assert row["reasons"] == {f"dtype {name}": 1} and not row["calls"]
                continue
            assert row["differences"] == {FULL if kind == "first" else "": 1} and not row["reasons"]
            assert row["ratio"] > least[kind], (dtype, kind)


@runner.together(2)
def differences_of_integers_compete(rank: int, ranks: int) -> None:
    """Schedules compete for integers too: the plain collective, uncoded frames and differences."""
    config = replace(CONFIG, mode="auto")
    shard = storage(SHARDS[0], torch.int8, rank)
    (slot,) = comm.allocate_bases([(SHARDS[0], torch.int8)], "host", dist.group.WORLD)
    wanted = torch.cat([storage(SHARDS[0], torch.int8, other) for other in range(ranks)])
    for _ in range(60):
        whole = torch.zeros(ranks * SHARDS[0], dtype=torch.int8)
        comm.all_gather_into_tensor(whole, shard, config=config, base=comm.SharedBase([slot]))
        assert torch.equal(whole, wanted)


for kind in corpus.SUMMED:
    runner.together(2, kind)(steps)
    runner.together(3, kind)(steps)


test_programs = runner.programs(__name__)
