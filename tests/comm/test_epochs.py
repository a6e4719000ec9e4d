"""Parameters with kept bases: gathers without messages while all ranks hold the words, and what ends or breaks that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from kept import CONFIG, FULL, MISS, OTHER, SHARDS, VERSION, Rank, refusing

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases import versions
from ds_zipccl.comm.host import frames


@runner.together(2, "host", True)
@runner.together(3, "device", False)
def frozen(rank: int, ranks: int, kind: str, later: bool) -> None:
    """One message for all parameters at the first gather after a step; no other one, and no frames."""
    one = Rank(rank, ranks, kind)
    found, sent = one.gather(0, 1, 2, later=later)
    assert found == {FULL: 1} and sent > 0 and one.agreements == 0
    for _ in range(3):
        assert one.gather(1, later=later) == ({"": 1}, 0) and one.agreements == 1
        for chosen in ((0, 1, 2), (2, 0), (0,)):
            assert one.gather(*chosen, later=later) == ({"": 1}, 0) and one.agreements == 0
        one.step()


@runner.together(2)
def trained(rank: int, ranks: int) -> None:
    """A parameter that steps change goes as a difference once a step, and is copied afterwards; the others are copied."""
    one = Rank(rank, ranks)
    one.settle()
    for _ in range(3):
        one.step(2)
        found, sent = one.gather(0, 2)
        assert found == {"": 2} and 0 < sent < 1000, "a copy and a difference"
        assert one.gather(0, 2) == ({"": 1}, 0) and one.agreements == 1
        assert one.gather(1) == ({"": 1}, 0) and one.agreements == 0


@runner.together(2)
def mixed(rank: int, ranks: int) -> None:
    """Parameters without a base go beside copies, in one gather; in any order, also while bases are filled."""
    one = Rank(rank, ranks)
    full = one.gather(0, 1, also=5_000)[1]
    assert one.gather(0, 1, also=5_000) == ({"": 1}, one.gather(0, 1, also=5_000)[1])
    assert 5_000 < one.gather(1, 0, also=5_000)[1] < 11_000 < full // 4
    one.step()
    assert one.gather(2, 0, also=3)[0] == {"": 1}
    assert one.gather(0, 2, also=3, later=False)[0] == {"": 1}
    two = [one.start([2, 1], also=7), one.start([0])]
    assert all(handle.wait() and torch.equal(whole, wanted) for whole, wanted, handle in reversed(two))


@runner.together(2)
def schedules(rank: int, ranks: int) -> None:
    """Whatever the schedule of the first gather is, it fills the bases."""
    for config, dtype in (
        (replace(CONFIG, mode="auto"), torch.bfloat16),
        (replace(CONFIG, min_bytes=1 << 30), torch.bfloat16),
        (CONFIG, torch.int8),
        (CONFIG, torch.float64),
        (replace(CONFIG, check="shadow"), torch.float32),
    ):
        one = Rank(rank, ranks, config=config, dtype=dtype)
        for chosen in ((0,), (1,), (2, 1)):
            one.gather(*chosen)
        for _ in range(2):
            assert one.gather(0, 1, 2) == ({"": 1}, 0)
            one.step()


# ---- edits ---------------------------------------------------------------------------------------------------------


def by_data(one: Rank) -> None:
    version = one.shards[2]._version
    one.shards[2].data[-1] = 1.5
    assert one.shards[2]._version == version, "the counter does not move"


def by_copy(one: Rank) -> None:
    one.shards[2].copy_(one.shards[2] + 1)


def by_a_new_tensor(one: Rank) -> None:
    one.shards[2] = one.shards[2] * 2


EDITS: tuple[Callable[[Rank], None], ...] = (by_data, by_copy, by_a_new_tensor)


@runner.together(2)
def edited_between_steps(rank: int, ranks: int) -> None:
    one = Rank(rank, ranks)
    one.settle()
    for edit in EDITS:
        if rank == 1:
            edit(one)
        found, sent = one.gather(0, 2)
        assert found[MISS] == 1 and found[""] == 2 and sent < 300_000, "a miss, a copy and a difference"
        assert one.gather(0, 2) == ({"": 1}, 0)
        one.step()


@runner.together(2)
def edited_in_a_step(rank: int, ranks: int) -> None:
    """After a copy all ranks stop before the step; again and again, until the change is made known."""
    one = Rank(rank, ranks)
    one.settle()
    for edit in EDITS:
        one.gather(0, 2)
        if rank == 1:
            edit(one)
        for _ in range(2):
            with pytest.raises(
                comm.CommError, match=r"p2: the shard of group ranks \[1\] was gathered before, and changed"
            ):
                one.step()
        one.kept[2].forget()
        one.step()
        one.gather(0, 1, 2)
        one.step()


@runner.together(2, full="rarer mistakes")
def away_between_comparisons(rank: int, ranks: int) -> None:
    """Copies while the owner had other words stop all ranks, although the old words are back, or the epoch is over; until that is known."""
    one = Rank(rank, ranks)
    one.settle()
    for ended in (False, True):
        one.gather(0, 2)
        saved = one.shards[2].clone()
        if rank == 1:
            by_data(one)
        one.start([0, 2])[2].wait()
        one.shards[2].data.copy_(saved)
        if ended:
            one.kept[2].forget()
        for _ in range(2):
            with pytest.raises(comm.CommError, match=r"p2: the shard of group ranks \[1\] was gathered before"):
                one.step()
        one.kept[2].forget()
        one.step()
        one.settle()


@runner.together(2, full="rarer mistakes")
def edited_without_steps(rank: int, ranks: int) -> None:
    """A program without steps looks after some copies of a base, and a program that asks for it at once."""
    one = Rank(rank, ranks)
    one.settle()
    assert all(one.gather(0, 2) == ({"": 1}, 0) for _ in range(2 * versions.COPIES))
    if rank == 1:
        by_data(one)
    with pytest.raises(comm.CommError, match="p2: the shard of"):
        for _ in range(versions.COPIES + 1):
            one.start([2])[2].wait()
    one.kept[2].forget()
    one.gather(2)
    one.gather(2)
    one.step()
    if rank == 0:
        by_data(one)
    one.kept[2].refresh()
    assert one.gather(2)[0] == {MISS: 1, "": 1}


@runner.together(2)
def edited_without_checks(rank: int, ranks: int) -> None:
    """Where no step checks copies, each gather after a copy agrees anew: an edit by one rank is a miss, never an old word."""
    one = Rank(rank, ranks, copies=1)
    one.gather(0)
    assert one.gather(0) == ({"": 1}, 0) and one.agreements == 1
    if rank == 1:
        one.shards[0].data[5] += 1
    assert one.gather(0)[0] == {MISS: 1, "": 1}
    assert one.gather(0) == ({"": 1}, 0)
    assert one.gather(0) == ({"": 1}, 0) and one.agreements == 1


@runner.together(2)
def edited_in_evaluation(rank: int, ranks: int) -> None:
    """Where no step follows copies, an edit after them is a miss. In a step it stops all ranks, as does an edit before a copy anywhere."""
    one = Rank(rank, ranks)
    one.settle()
    one.keeper.steps = False
    for _ in range(2):
        one.gather(0, 2)
        one.gather(2)
        if rank == 1:
            by_data(one), one.shards[2].neg_()
        one.keeper.refresh()
        assert one.gather(0, 2)[0][MISS] == 1
    one.keeper.check()
    for stepped in (True, False):
        one.keeper.refresh()
        one.gather(0, 2)
        one.keeper.steps = stepped
        one.gather(2)
        one.keeper.steps = False
        if rank == 1:
            one.shards[2].neg_()
        if not stepped:
            one.start([2])[2].wait()
        one.keeper.refresh()
        with pytest.raises(comm.CommError, match=r"p2: the shard of group ranks \[1\] was gathered before"):
            one.start([0])
        one.kept[2].forget()
        one.gather(2)


@runner.together(2, full="rarer mistakes")
def swapped_versions(rank: int, ranks: int) -> None:
    """A base says that another gather has filled it, or is another base with the same words."""
    one = Rank(rank, ranks, "device")
    one.settle()
    if rank == 1:
        one.slots[0].version += 1
    assert one.gather(0, 2)[0] == {VERSION: 1, "": 2}
    assert one.gather(0, 2) == ({"": 1}, 0)
    one.step()
    if rank == 1:
        one.slots[0].serial += 1
    assert one.gather(0, 2)[0] == {VERSION: 1, "": 2}


@runner.together(2)
def swapped_contents(rank: int, ranks: int) -> None:
    """Two bases have each other's words on one rank: misses, and right bits. After a part of the words was swapped all ranks stop: a
    comparison sees one of the bases only, but a miss has all bases hashed."""
    one = Rank(rank, ranks, "device", sizes=(40_000, 1_000, 40_000))
    one.settle()
    if rank == 1:
        kept = one.slots[0].memory.clone()
        one.slots[0].memory.copy_(one.slots[2].memory), one.slots[2].memory.copy_(kept)
    assert one.gather(0, 1, 2)[0] == {MISS: 2, OTHER: 1, "": 1}
    assert one.gather(0, 1, 2) == ({"": 1}, 0)
    one.step()
    if rank == 1:
        one.slots[0].memory[0, :2_000] = one.slots[1].memory.view(-1)
        one.slots[1].memory.zero_()
    with pytest.raises(comm.CommError, match="p0: the copies that ranks gather from are not the same any more"):
        one.start([1])


@runner.together(2)
def damaged_copy(rank: int, ranks: int) -> None:
    """One bit of another rank's row, on one rank: no comparison sees it, and the hash stops all ranks. A base that was not copied since it
    was filled is only filled again."""
    one = Rank(rank, ranks, "device")
    one.gather(0, 1, 2)
    sign = one.slots[0].memory[1 - rank].view(torch.int16)[35_000:35_001]
    if rank == 1:
        sign.bitwise_xor_(1)
    assert one.gather(0)[0] == ({OTHER: 1, "": 1} if rank else {OTHER: 2})
    one.gather(0)
    one.step()
    if rank == 1:
        sign.bitwise_xor_(1)
    with pytest.raises(
        comm.CommError, match=r"p0: the copies that ranks gather from are not the same any more \(a rank holds"
    ):
        for _ in range(versions.AUDITS):
            one.start([0])[2].wait()
            one.step()


@runner.together(2, full="rarer mistakes")
def damaged_shared_copy(rank: int, ranks: int) -> None:
    """One bit of memory that all ranks share: its owner sees it."""
    one = Rank(rank, ranks)
    one.settle()
    if rank == 0:
        one.slots[2].memory[1].view(torch.int16)[-1:].bitwise_xor_(1)
    dist.barrier()
    assert MISS in one.gather(2)[0]
    dist.barrier()
    one.gather(2)
    if rank == 0:
        one.slots[2].memory[1].view(torch.int16)[-1:].bitwise_xor_(1)
    dist.barrier()
    with pytest.raises(comm.CommError, match="p2: the shard of group ranks"):
        one.step()


@runner.together(4)
def ranks_of_a_node_share_a_copy(rank: int, ranks: int) -> None:
    """Two nodes of two ranks, each of which has one copy: an edit on one rank is a miss of all, and copies are compared by hash."""
    topology.here = lambda: "left" if rank < 2 else "right"
    one = Rank(rank, ranks)
    assert one.slots[0].node_ranks == ([0, 1] if rank < 2 else [2, 3])
    one.settle()
    if rank == 3:
        by_data(one)
    assert one.gather(0, 2)[0][MISS] == 1
    assert one.gather(0, 1, 2) == ({"": 1}, 0)
    one.step()
    if rank == 2:
        one.slots[0].memory[0, 7] = 77
    dist.barrier()
    with pytest.raises(comm.CommError, match="p0: the copies that ranks gather from"):
        for _ in range(versions.AUDITS):
            one.start([0])[2].wait()
            one.step()


@runner.together(2, full="rarer mistakes")
def refused(rank: int, ranks: int) -> None:
    """A rank that refuses a frame goes on, and the next gather goes in full for all ranks."""
    one = Rank(rank, ranks)

    frames.decompress = refusing(SHARDS[0]) if rank == 0 else decompress
    if rank == 0:
        with pytest.raises(comm.CommError, match="refused"):
            one.gather(0)
    else:
        one.gather(0)
    frames.decompress = decompress
    dist.barrier()
    assert one.gather(0)[0] == {FULL: 2}
    assert one.gather(0) == ({"": 1}, 0)


def unseen(rank: int, ranks: int) -> None:
    versions.same_words = lambda shard, row: True
    edited_between_steps(rank, ranks)


def unseen_by_shadow(rank: int, ranks: int) -> None:
    versions.same_words = lambda shard, row: True
    one = Rank(rank, ranks, config=replace(CONFIG, check="shadow"))
    one.settle()
    if rank == 1:
        by_data(one)
    with pytest.raises(comm.CommError, match="1 of 140002 wrong") as caught:
        one.start([2])[2].wait()
    assert isinstance(caught.value, comm.ShadowMismatch) == (rank == 0)


def test_a_missing_comparison_shows() -> None:
    """Negative proof: without the comparison an edit gives wrong bits, which these tests and the shadow check see."""
    with pytest.raises(runner.RankFailure, match=r"torch\.equal"):
        runner.run(unseen, 2)
    runner.run(unseen_by_shadow, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_words_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    row = torch.arange(70_001).to(dtype)
    if dtype.is_floating_point:
        row[:2] = torch.tensor([float("nan"), 0.0])
    shard = row.clone()
    assert versions.same_words(shard, row) and versions.same_words(shard[:0], row[:0])
    assert not versions.same_words(shard[:-1], row)
    if dtype.is_floating_point:
        shard[1] = -0.0
        assert not versions.same_words(shard, row)
        shard[1] = 0.0
    assert versions.same_words(shard.double(), row) and versions.same_words(torch.stack([row, row], 1)[:, 0], row)
    shard.view(torch.uint8)[-1] ^= 1
    assert not versions.same_words(shard, row) and not versions.same_words(shard.double(), row)


test_programs = runner.programs(__name__)
