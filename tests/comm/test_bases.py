"""Gathers of parameters as differences against what is in place, or a copy of each rank or node: the same bits whatever ranks hold."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from cached import CONFIG, FULL, OTHER, SHARDS, refusing
from moves import turn

from ds_zipccl import comm, kernels
from ds_zipccl.codecs import decompress
from ds_zipccl.comm.bases import host_memory, in_place
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.host import gather as host_gather
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.policy import admission
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render


class Trainer:
    """What a rank does whose ranks each step a shard of some tensors: gather some of them at a time.

    ``kind``: "in place" keeps each whole tensor and gathers one at a time, as ZeRO-1 and 2; "host" and "device" gather into new memory
    with copies there, as ZeRO-3.
    """

    def __init__(self, rank: int, ranks: int, kind: str = "in place", dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.ranks, self.seed, self.dtype, self.in_place = rank, ranks, 1, dtype, kind == "in place"
        self.config = CONFIG
        self.masters = [torch.randn(ranks, shard, generator=torch.Generator().manual_seed(shard)) for shard in SHARDS]
        self.wholes = [master.to(dtype, copy=True) for master in self.masters]
        groups = [] if self.in_place else [dist.group.WORLD]
        self.kept = [
            kept for group in groups for kept in comm.allocate_bases([(s, dtype) for s in SHARDS], kind, group)
        ]

    def held(self, index: int) -> torch.Tensor:
        """What this rank holds of the last gather of a tensor: a row for each rank."""
        return self.wholes[index] if self.in_place else self.kept[index].memory

    def step(self) -> None:
        for master in self.masters:
            self.seed += 1
            master.add_(1e-3 * torch.randn(master.shape, generator=torch.Generator().manual_seed(self.seed)))

    def start(self, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """What is gathered, what should be, and the handle."""
        wanted = torch.cat([self.masters[index] for index in chosen], dim=1).to(self.dtype)
        whole = self.wholes[chosen[0]] if self.in_place else torch.full_like(wanted, float("nan"))
        put = self.in_place or self.seed % 2
        own = whole[self.rank].copy_(wanted[self.rank]) if put else wanted[self.rank].clone()
        base: Any = comm.IN_PLACE if self.in_place else SharedBase([self.kept[index] for index in chosen])
        return (
            whole,
            wanted,
            comm.all_gather_into_tensor(whole.view(-1), own, None, True, config=self.config, base=base),
        )

    def gather(self, *chosen: int) -> dict[str, int]:
        """What a gather, which is checked, adds to the count of differences."""
        counters.reset()
        whole, wanted, handle = self.start(chosen)
        handle.wait()
        assert torch.equal(whole.view(torch.uint8), wanted.view(torch.uint8))
        (row,) = counters.rows()
        self.ratio = row["ratio"]
        return row["differences"]


def steps(rank: int, ranks: int, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    trainer, every = Trainer(rank, ranks, kind, dtype), (0,) if kind == "in place" else (0, 1, 2)
    assert trainer.gather(*every) == {FULL: 1}
    full = trainer.ratio
    for _ in range(3):
        trainer.step()
        assert trainer.gather(*every) == {"": 1}
        assert trainer.ratio > (2 if dtype == torch.bfloat16 else 1.1) * full
        for chosen in every[1:], every[:1]:  # nothing has changed; asked for in other company, as in a backward pass
            assert not chosen or (trainer.gather(*chosen) == {"": 1} and trainer.ratio > 100)
    nbytes = sum(2 * ranks * shard for shard in SHARDS)
    held = counters.memory().get("copies of gathered parameters", 0)
    assert held == 0 if trainer.in_place else nbytes <= held < nbytes + 64 * len(SHARDS)


for ranks in (2, 3):
    for dtype in (kind.dtype for kind in corpus.SUMMED.values()):
        runner.together(ranks, "in place", dtype)(steps)
    for kind in ("host", "device"):
        runner.together(ranks, kind)(steps)


@runner.together(2, "in place")
@runner.together(2, "host")
def plain_in_between(rank: int, ranks: int, kind: str) -> None:
    """Steps of mode auto whose gathers are plain: no base of an earlier gather is taken for their result."""
    trainer = Trainer(rank, ranks, kind)
    trainer.config = replace(CONFIG, mode="auto")
    for number in range(9):
        turn(plain=number % 4 in (1, 2))
        trainer.step()
        trainer.gather(0)
        assert number % 4 or trainer.gather(0) == {"": 1}


@runner.together(3, "in place")
@runner.together(3, "device")
def edited(rank: int, ranks: int, kind: str) -> None:
    """One bit of one rank's copy of one shard: that shard goes in full, once; the others do not."""
    trainer, numel = Trainer(rank, ranks, kind), SHARDS[0]
    trainer.gather(0)
    for place in (3, numel // 2, numel - 1):
        if rank == 1:
            trainer.held(0)[0, place].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
        trainer.step()
        assert trainer.gather(0) == ({OTHER: 1} if rank == 0 else {"": 1})
        trainer.step()
        assert trainer.gather(0) == {"": 1}


@runner.together(3, "in place")
@runner.together(3, "host")
def without_kernels(rank: int, ranks: int, kind: str) -> None:
    """While a rank has numba's kernels alone, which have no differences, every shard goes in full."""
    trainer, table = Trainer(rank, ranks, kind), kernels.ROUTES["cpu"]
    trainer.gather(0)
    if rank == 1:
        kernels.ROUTES["cpu"] = {"numba": table["numba"]}
    trainer.step()
    assert trainer.gather(0) == {"a rank has no kernels of differences": 1}
    kernels.ROUTES["cpu"] = table
    trainer.step()
    assert trainer.gather(0) == {"": 1}


@runner.together(3)
def workspace(rank: int, ranks: int) -> None:
    """Gathers of many sizes into the same memory: one copy is kept, as long as the memory lives."""
    buffer = torch.zeros(ranks * SHARDS[0], dtype=torch.bfloat16)
    for numel in range(SHARDS[0] - 20, SHARDS[0]):
        whole = buffer[: ranks * numel]
        comm.all_gather_into_tensor(whole, torch.ones(numel).bfloat16(), config=CONFIG, base=comm.IN_PLACE)
        assert counters.memory()["copies of the shards sent"] == 2 * numel
    del buffer, whole
    assert "copies of the shards sent" not in counters.memory()


@runner.together(3)
def loaded(rank: int, ranks: int) -> None:
    """A checkpoint on all ranks: nobody holds what was sent last. Then another rank's memory is new."""
    trainer = Trainer(rank, ranks)
    trainer.gather(0)
    trainer.masters[0] = torch.randn(ranks, SHARDS[0], generator=torch.Generator().manual_seed(2))
    trainer.wholes[0].copy_(trainer.masters[0].bfloat16())
    assert [trainer.gather(0) for _ in range(2)] == [{OTHER: 1}, {"": 1}]
    kept = trainer.wholes[0]
    if rank == ranks - 1:
        trainer.wholes[0] = kept.clone()  # a new engine, say
    assert [trainer.gather(0) for _ in range(2)] == [{FULL: 1} if rank == ranks - 1 else {"": 1}, {"": 1}]


@runner.together(3)
def skipped(rank: int, ranks: int) -> None:
    """A rank that changed its own shard and threw the change away."""
    trainer = Trainer(rank, ranks)
    trainer.gather(0)
    if rank == 0:
        trainer.wholes[0][0].zero_()
    assert trainer.gather(0) == {"": 1}


@runner.together(3)
def replaced(rank: int, ranks: int) -> None:
    """What was sent is remembered as long as the memory it was gathered to, which then may come back."""
    gc.collect()  # errors of earlier cases hold outputs of this group in cycles
    trainer = Trainer(rank, ranks)
    trainer.gather(0)
    for _ in range(4):
        trainer.wholes[0] = trainer.wholes[0].clone()
        assert trainer.gather(0) == {FULL: 1}
    assert trainer.gather(0) == {"": 1}
    assert len(group_state(None).of(in_place.Sent)) == 1


def trusting() -> None:
    """Planted: what was sent last counts as held."""
    host_gather._objection = lambda link, last, places: "" if last is not None else FULL


@runner.together(2)
def after_an_error(rank: int, ranks: int) -> None:
    """A rank that refuses a frame goes on to other things, and the shard of the other one goes in full."""
    trainer = Trainer(rank, ranks)
    trainer.gather(0)
    trainer.step()
    frames.decompress = refusing(SHARDS[0]) if rank == 0 else decompress
    if rank == 0:
        with pytest.raises(comm.CommError, match=r"frame from global rank 1 refused"):
            trainer.gather(0)
    else:
        assert trainer.gather(0) == {"": 1}
    frames.decompress = decompress
    dist.barrier()
    assert trainer.gather(0) == {OTHER if rank else FULL: 1}
    assert trainer.gather(0) == {"": 1}


# ---- without ranks -----------------------------------------------------------------------------------------------------


def link_of_a_group() -> Any:
    """Stands for the context of an operation, with the state of a new group."""
    return SimpleNamespace(state=SimpleNamespace(of=functools.cache(lambda kind: kind())), rank=1)


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
    link = link_of_a_group()
    memory, elsewhere = torch.arange(400.0).bfloat16(), torch.zeros(100).bfloat16()
    first, second, third = memory[:100], memory[100:200], memory[200:]
    across = memory[50:150]
    outputs = [second, first, elsewhere, third]
    assert remembered(base, link, *outputs) == [False] * 4
    for output in outputs:
        base.end(link, output.chunk(2), None)
    assert remembered(base, link, *outputs, *outputs) == [True] * 8, "begin takes it out, end puts it back"
    assert remembered(base, link, first.view(torch.float16), memory[:50], memory[1:101], across) == [False] * 4
    assert remembered(base, link_of_a_group(), first) == [False], "another group's"
    base.end(link, across.chunk(2), None)
    assert remembered(base, link, *outputs, across) == [False, False, True, True, True]
    left = sum(one.shard.nbytes for one in link.state.of(in_place.Sent).prune().values())
    assert left == across.nbytes // 2 + elsewhere.nbytes // 2 + third.nbytes // 2


def test_the_table_says_it() -> None:
    counters.reset()
    counters.record_difference("zero_param", "all_gather_into_tensor", FULL)
    counters.record_difference("zero_param", "all_gather_into_tensor", "")
    line = f"zero_param all_gather_into_tensor: 1 of 2 shards went as differences, {FULL} (1)"
    assert render().splitlines()[-2] == line
    counters.reset()


def equal_hashes() -> None:
    host_gather.region_hash = lambda *given: b"an equal hash..."


@pytest.mark.parametrize(
    ("plant", "kind"), [(trusting, "in place"), (equal_hashes, "in place"), (equal_hashes, "device")]
)
def test_a_missing_proof_is_noticed(plant: Callable[[], None], kind: str) -> None:
    """Differences against something else give other parameters: what these tests compare."""
    with pytest.raises(runner.RankFailure, match=r"torch\.equal"):
        runner.run(edited, 3, kind, plant=plant)


@runner.together(3)
def in_a_container(rank: int, ranks: int) -> None:
    """Rank 1 has the host name and the network of the others, but cannot see their processes: the size of its group of sharers."""
    if rank == 1:
        host_memory.place = lambda: "pid:[1] user:[1] 0"
    trainer = Trainer(rank, ranks, "host")
    trainer.gather(0, 2)
    trainer.step()
    assert trainer.gather(0, 2) == {"": 1}
    assert len(trainer.kept[0].node_ranks) == (1 if rank == 1 else 2)


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
        for number, kind in enumerate(("first", "unchanged", "changed", "raw")):
            if kind == "changed":
                shards[:, number::100] = storage(ranks * 800, dtype, 70 + number).view(ranks, 800)
            counters.reset()
            base = None if kind == "raw" else SharedBase([slot])
            whole = storage(ranks * numel, dtype, 99)
            comm.all_gather_into_tensor(whole, shards[rank].clone(), config=CONFIG, base=base)
            assert torch.equal(whole.view(torch.uint8), shards.view(-1).view(torch.uint8)), (dtype, kind)
            (row,) = counters.rows()
            name = str(dtype).removeprefix("torch.")
            if kind == "raw":
                assert row["reasons"] == {f"dtype {name}": 1} and not row["calls"]
                continue
            assert row["differences"] == {FULL if kind == "first" else "": 1} and not row["reasons"]
            assert row["ratio"] > least[kind], (dtype, kind)


test_programs = runner.programs(__name__, 2)
