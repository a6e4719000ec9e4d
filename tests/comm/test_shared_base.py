"""Gathers into new memory as differences against a copy that each rank or each node keeps: the same bits whatever the copies hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from kept import refusing

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases import host_memory, negotiation
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import frames, tuner
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, tuner_rules
from ds_zipccl.telemetry import counters

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
SHARDS = (40_000, 1_000, 70_001)
FULL, OTHER = "nothing was gathered there", "a rank holds something else"


class Trainer:
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


def steps(rank: int, ranks: int, kind: str) -> None:
    trainer = Trainer(rank, ranks, kind)
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


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps(ranks: int, kind: str) -> None:
    runner.run(steps, ranks, kind)


def by_node(rank: int, ranks: int) -> None:
    """Two nodes of two ranks: each pair has one copy, and shards may come by way of the other rank of a node."""
    topology.here = lambda: "left" if rank < 2 else "right"
    trainer = Trainer(rank, ranks, "host")
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


def test_nodes_share_a_copy() -> None:
    runner.run(by_node, 4)


def edited(rank: int, ranks: int) -> None:
    """One bit of one rank's copy of one shard: that shard goes in full, once; the others do not."""
    trainer = Trainer(rank, ranks, "device")
    trainer.gather(0, 2)
    if rank == 1:
        trainer.kept[2].memory[0, 7].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
    trainer.step()
    assert trainer.gather(0, 2) == ({OTHER: 1} if rank == 0 else {"": 1})
    trainer.step()
    assert trainer.gather(0, 2) == {"": 1}


def mistaken(rank: int, ranks: int) -> None:
    """A rank takes the copy of another tensor, then one whose last gather it has missed."""
    trainer = Trainer(rank, ranks, "device")
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


def together(rank: int, ranks: int) -> None:
    """Several gathers in flight, waited for in another order."""
    trainer = Trainer(rank, ranks, "host")
    for _ in range(4):
        trainer.step()
        for whole, wanted, handle in [trainer.start([index]) for index in (2, 0)][::-1]:
            handle.wait()
            assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16))
    assert trainer.gather(0, 2) == {"": 1}
    assert trainer.ratio > 100


@pytest.mark.parametrize("case", [edited, mistaken, together], ids=lambda case: case.__name__)
def test_what_copies_hold(case: Any) -> None:
    runner.run(case, 3)


def equal_hashes(rank: int, ranks: int) -> None:
    negotiation.region_hash = lambda region: bytes(16)
    edited(rank, ranks)


def test_a_missing_proof_is_noticed() -> None:
    with pytest.raises(runner.RankFailure, match=r"torch\.equal"):
        runner.run(equal_hashes, 3)


def in_a_container(rank: int, ranks: int) -> int:
    """Rank 1 has the host name and the network of the others, but cannot see their processes: the size of its group of sharers."""
    if rank == 1:
        host_memory.place = lambda: "pid:[1] user:[1] 0"
    trainer = Trainer(rank, ranks, "host")
    trainer.gather(0, 2)
    trainer.step()
    assert trainer.gather(0, 2) == {"": 1}
    return len(trainer.kept[0].node_ranks)


def test_containers_of_one_host_have_copies_of_their_own() -> None:
    assert runner.run(in_a_container, 3) == [2, 1, 2]


def refused(rank: int, ranks: int) -> None:
    """A rank that refuses a frame goes on to other things; the others of its node do not wait for it, and nobody counts on the copy."""
    trainer = Trainer(rank, ranks, "host")
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


def test_nobody_waits_for_who_has_failed() -> None:
    runner.run(refused, 2, timeout=30)


def trials(rank: int, ranks: int) -> list[bool]:
    """Of every call that was timed while differences were tried: whether it was one. Eight tensors, forward and backward."""
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
    return found


def test_differences_are_tried_when_there_is_something_to_differ_from() -> None:
    for found in runner.run(trials, 2):
        assert found[: tuner_rules.TRIAL_CALLS] == [True] * tuner_rules.TRIAL_CALLS


def test_nothing_to_keep() -> None:
    runner.run(nothing, 2)


def nothing(rank: int, ranks: int) -> None:
    assert comm.allocate_bases([], "host", dist.group.WORLD) == []


def storage(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes that are values of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), generator=generator)
    return words.to(torch.uint8).view(dtype)


def stored(rank: int, ranks: int) -> dict[str, float]:
    """Gathers of integers and other words that are no floats of the format: their bytes go as differences, against a base alone.

    Ratios of gathers of unchanged words, and of words of which one in a hundred has changed.
    """
    numel, found = 80_000, {}
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
            found[f"{name} {kind}"] = row["ratio"]
    return found


def test_every_dtype_that_gloo_takes() -> None:
    for found in runner.run(stored, 2):
        for name, ratio in found.items():
            least = {"first": 0.99, "unchanged": 200, "changed": 20}[name.split()[1]]
            assert ratio > least, found


def stored_by_measurement(rank: int, ranks: int) -> None:
    """Schedules compete for integers too: the plain collective, uncoded frames and differences."""
    config = replace(CONFIG, mode="auto")
    shard = storage(SHARDS[0], torch.int8, rank)
    (slot,) = comm.allocate_bases([(SHARDS[0], torch.int8)], "host", dist.group.WORLD)
    wanted = torch.cat([storage(SHARDS[0], torch.int8, other) for other in range(ranks)])
    for _ in range(60):
        whole = torch.zeros(ranks * SHARDS[0], dtype=torch.int8)
        comm.all_gather_into_tensor(whole, shard, config=config, base=comm.SharedBase([slot]))
        assert torch.equal(whole, wanted)


def test_differences_of_integers_compete() -> None:
    runner.run(stored_by_measurement, 2)
