"""Gathers of parameters as differences: the same bits whatever the ranks hold, and a difference only where all hold the base."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm.bases import in_place, negotiation
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
SHARD = 40_000
FULL, OTHER = "nothing was gathered there", "a rank holds something else"


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


@pytest.mark.parametrize("kind", corpus.SUMMED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps(ranks: int, kind: str) -> None:
    runner.run(steps, ranks, kind)


def edited(rank: int, ranks: int) -> None:
    """One bit of one rank's copy of one shard: that shard goes in full, once; the others do not."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    for place in (3, SHARD // 2, SHARD - 1):
        if rank == 1:
            trainer.whole[place].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
        assert trainer.gather() == ({OTHER: 1} if rank == 0 else {"": 1})
        assert trainer.gather() == {"": 1}


def workspace(rank: int, ranks: int) -> None:
    """Gathers of many sizes into the same memory: one copy is kept, as long as the memory lives."""
    buffer = torch.zeros(ranks * SHARD, dtype=torch.bfloat16)
    for numel in range(SHARD - 20, SHARD):
        whole = buffer[: ranks * numel]
        comm.all_gather_into_tensor(whole, torch.ones(numel).bfloat16(), config=CONFIG, base=comm.IN_PLACE)
        assert counters.memory()["copies of the shards sent"] == 2 * numel
    del buffer, whole
    assert "copies of the shards sent" not in counters.memory()


def sometimes(rank: int, ranks: int) -> None:
    """With a base and without, the same message otherwise."""
    trainer = Trainer(rank, ranks)
    trainer.base = None
    assert trainer.gather() == {}
    trainer.base = comm.IN_PLACE
    assert trainer.gather() == {FULL: 1}
    assert trainer.gather() == {"": 1}


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


def skipped(rank: int, ranks: int) -> None:
    """A rank that changed its own shard and threw the change away."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    if rank == 0:
        trainer.own.zero_()
    assert trainer.gather(moved=False) == {"": 1}


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


@pytest.mark.parametrize(
    "case", [edited, loaded, skipped, replaced, workspace, sometimes], ids=lambda case: case.__name__
)
def test_what_ranks_hold(case: Any) -> None:
    runner.run(case, 3)


def trusting(rank: int, ranks: int) -> None:
    negotiation._objection = lambda link, last, places: "" if last is not None else FULL
    edited(rank, ranks)


def equal_hashes(rank: int, ranks: int) -> None:
    negotiation.region_hash = lambda region: bytes(16)
    edited(rank, ranks)


@pytest.mark.parametrize("mistake", [trusting, equal_hashes], ids=lambda case: case.__name__)
def test_a_missing_proof_is_noticed(mistake: Any) -> None:
    """Differences against something else give other parameters: what these tests compare."""
    with pytest.raises(runner.RankFailure):
        runner.run(mistake, 3)


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


def test_after_an_error() -> None:
    runner.run(after_an_error, 2)


def others(rank: int, ranks: int) -> None:
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


def test_where_there_are_none() -> None:
    runner.run(others, 2)


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

    monkeypatch.setattr(negotiation.full, "gather", gather)
    monkeypatch.setattr(negotiation, "_objection", lambda link, last, places: reason)
    link, base = SimpleNamespace(rank=0, role="zero_param", op="gather"), Watched(log)
    whole = torch.arange(8.0)
    places = whole.chunk(2)
    counters.reset()
    with pytest.raises(comm.CommError) if fails else nullcontext():
        negotiation.gather(link, places[1], places, base)  # type: ignore[arg-type]
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
