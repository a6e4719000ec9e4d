"""NCCL's rules: results of the collectives, and for each rule a program that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim import memory, world
from sim.mistakes import Mistakes, faulty, filled, mistake, noticed, shown


def ended(work: Any) -> None:
    """Wait for an asynchronous operation."""
    if work is not None:
        work.wait()


def collectives(rank: int, ranks: int) -> None:
    mine = torch.arange(4.0, device=f"cuda:{rank}") + 10 * rank
    every = [torch.arange(4.0) + 10 * peer for peer in range(ranks)]
    for async_op in (False, True):
        out = torch.empty(4 * ranks, device=mine.device)
        work = dist.all_gather_into_tensor(out, mine, async_op=async_op)
        assert (work is not None) == async_op
        ended(work)
        assert torch.equal(out.cpu(), torch.cat(every))
        part = torch.empty(4, device=mine.device)
        ended(dist.reduce_scatter_tensor(part, out, async_op=async_op))
        assert torch.equal(part.cpu(), every[rank] * ranks)
        for operation, wanted in (
            (dist.ReduceOp.SUM, sum(every)), (dist.ReduceOp.MAX, every[-1]), (dist.ReduceOp.MIN, every[0]),
            (dist.ReduceOp.AVG, sum(every) / ranks),
        ):  # fmt: skip
            total = mine.clone()
            ended(dist.all_reduce(total, operation, async_op=async_op))
            assert torch.equal(total.cpu(), wanted)
        total = mine.clone()
        ended(dist.reduce(total, 1 % ranks, async_op=async_op))
        assert torch.equal(total.cpu(), sum(every) if rank == 1 % ranks else every[rank])
        word = mine.clone()
        ended(dist.broadcast(word, ranks - 1, async_op=async_op))
        assert torch.equal(word.cpu(), every[-1])
        sent = [mine[:peer] for peer in range(ranks)]  # rank r gets r elements of each; rank 0 gets empty messages
        received = [torch.empty(rank, device=mine.device) for _ in range(ranks)]
        ended(dist.all_to_all(received, sent, async_op=async_op))
        assert all(torch.equal(one.cpu(), every[peer][:rank]) for peer, one in enumerate(received))
        whole = torch.cat([mine[:peer] for peer in range(ranks)])
        joined = torch.empty(rank * ranks, device=mine.device)
        work = dist.all_to_all_single(joined, whole, [rank] * ranks, list(range(ranks)), async_op=async_op)
        if async_op:
            work.wait()
            assert work.is_completed() in (True, False)
        assert torch.equal(joined.cpu(), torch.cat([peer[:rank] for peer in every]))
    own = out.zero_()[4 * rank : 4 * rank + 4].copy_(mine)
    dist.all_gather_into_tensor(out, own)
    assert torch.equal(out.cpu(), torch.cat(every))
    parts = [torch.empty(4, device=mine.device) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    assert torch.equal(torch.stack(parts).cpu(), torch.stack(every))
    if ranks > 1:
        with pytest.raises(NotImplementedError, match="use all_to_all"):
            dist.send(mine, (rank + 1) % ranks)
    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives(ranks: int) -> None:
    for seed in range(4):
        got = world.run(collectives, ranks, seed=seed)
        assert got.counters[0].collectives["all_to_all"] == 4


def groups(rank: int, ranks: int) -> tuple[float, str, int]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    assert pairs[1 - rank % 2] is dist.GroupMember.NON_GROUP_MEMBER
    assert dist.get_process_group_ranks(mine) == [rank % 2, rank % 2 + 2]
    value = filled(rank, 3, rank)
    dist.all_reduce(value, group=mine)
    dist.all_reduce(value)
    return value[0].item(), dist.get_backend(mine), dist.get_rank(mine)


def test_groups() -> None:
    got = world.run(groups, 4)
    assert got.values == [(12, "nccl", 0), (12, "nccl", 0), (12, "nccl", 1), (12, "nccl", 1)]


def coalesced(rank: int, ranks: int) -> None:
    out = [torch.empty(2 * ranks, device=f"cuda:{rank}") for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for one in out:
            dist.all_gather_into_tensor(one, filled(rank, 2, rank))
    manager.wait()
    assert all(one.cpu().tolist() == [0, 0, 1, 1] for one in out)


def test_coalescing() -> None:
    world.run(coalesced, 2)


def forgotten(rank: int, ranks: int) -> None:
    """Nobody waits for the handle or keeps the tensor; later tensors get its memory."""
    dist.reduce(filled(rank, 8, 1), 0, async_op=True)
    for number in range(20):
        assert filled(rank, 8, number).add_(1).cpu().tolist() == [number + 1] * 8


def test_memory_of_a_handle_that_nobody_waits_for() -> None:
    for seed in range(20):
        world.run(forgotten, 2, seed=seed)


def sum_of_bfloat16(rank: int, ranks: int) -> float:
    value = filled(rank, 1, [256.0, 1.0, 1.0][rank], torch.bfloat16)
    dist.all_reduce(value)
    return value.item()


def test_sums_have_no_order() -> None:
    """256 + 1 + 1 is 256 or 258 in bfloat16: a program that relies on an order of NCCL's sums fails for some seed."""
    assert {world.run(sum_of_bfloat16, 3, seed=seed).values[0] for seed in range(20)} == {256.0, 258.0}


# --- one mistake each

MISTAKES: Mistakes = {}
#: Kind of the fault -> programs of one call, each with its marker; those that "would hang" name the place of both ranks.
CALLS: dict[str, dict[str, Callable[[int, int], Any]]] = {
    "would hang": {
        "count": lambda rank, ranks: dist.all_reduce(filled(rank, 4 + (rank == 1), 1)),  # <count>
        "dtype": lambda rank, ranks: dist.all_reduce(filled(rank, 4, 1, [torch.half, torch.bfloat16][rank])),  # <dtype>
        "root": lambda rank, ranks: dist.broadcast(filled(rank, 4, 1), rank),  # <root>
        "op": lambda rank, ranks: dist.all_reduce(  # <op>
            filled(rank, 4, 1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]
        ),
        "pair": lambda rank, ranks: dist.all_to_all(  # <pair>
            [filled(rank, 1, 0) for _ in range(ranks)], [filled(rank, 1 + rank, 1), filled(rank, 1, 1)]
        ),
        "splits": lambda rank, ranks: dist.all_to_all_single(  # <splits>
            filled(rank, 4, 0), filled(rank, 4, 1), [2, 2], [1, 3] if rank else [2, 2]
        ),
    },
    "tensor": {
        "strided": lambda rank, ranks: dist.all_reduce(filled(rank, 8, 1)[::2]),  # <strided>
        "host tensor": lambda rank, ranks: dist.all_reduce(torch.ones(4)),  # <host tensor>
    },
    "device": {"other gpu": lambda rank, ranks: filled(1 - rank, 4, 1)},  # <other gpu>
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, some in CALLS.items() for name in some])
def test_one_call(kind: str, name: str) -> None:
    said = faulty((kind, *[name] * (2 if kind == "would hang" else 1)), CALLS[kind][name], 2)
    assert name != "pair" or "rank 1 sends 2 elements to rank 0, which receives 1" in said, said


@mistake(MISTAKES, "overlap", "slot")
def input_at_wrong_slot(rank: int, ranks: int) -> None:
    staging = filled(rank, 8, 1)
    dist.all_gather_into_tensor(staging, staging[4 * (1 - rank) : 4 * (1 - rank) + 4])  # <slot>


@mistake(MISTAKES, "overlap", "overlap")
def output_overlaps_input(rank: int, ranks: int) -> None:
    staging = filled(rank, 8, 1)
    dist.all_to_all_single(staging[2:6], staging[:4])  # <overlap>


def members_differ(rank: int, ranks: int) -> None:
    dist.new_group([0, 1] if rank == 0 else [0, 1, 2])


def test_members_differ() -> None:
    faulty(("would hang",), members_differ, 3)


@mistake(MISTAKES, "would hang", "kind 0", "kind 1")
def kind_differs(rank: int, ranks: int) -> None:
    value = filled(rank, 4, 1)
    if rank:
        dist.all_reduce(value)  # <kind 1>
        dist.broadcast(value, 0)
    else:
        dist.broadcast(value, 0)  # <kind 0>
        dist.all_reduce(value)


@mistake(MISTAKES, "deadlock", "missing")
def rank_missing(rank: int, ranks: int) -> None:
    value = filled(rank, 4, 1)
    if rank != 1:
        dist.all_reduce(value)  # <missing>


@mistake(MISTAKES, "deadlock", "first of two", "second of two")
def rank_missing_from_second(rank: int, ranks: int) -> None:
    value = filled(rank, 4, 1)
    dist.all_reduce(value)  # <first of two>
    if rank != 1:
        dist.all_reduce(value)  # <second of two>
    value.cpu()


@mistake(MISTAKES, "may deadlock", "orders 0", "orders 1")
def group_order_differs(rank: int, ranks: int) -> None:
    other = dist.new_group([0, 1])
    first, second = filled(rank, 4, 1), filled(rank, 4, 2)
    if rank:
        dist.all_reduce(first, async_op=True)  # <orders 1>
        dist.all_reduce(second, group=other, async_op=True)
    else:
        dist.all_reduce(second, group=other, async_op=True)  # <orders 0>
        dist.all_reduce(first, async_op=True)


@mistake(MISTAKES, "race", "not waited", "used")
def handle_not_waited_for(rank: int, ranks: int) -> None:
    value = filled(rank, 4, 1)
    dist.all_reduce(value, async_op=True)  # <not waited>
    value.add_(1)  # <used>


def read_too_early(rank: int, ranks: int) -> float:
    value = filled(rank, 4, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    dist.all_reduce(value)
    with torch.cuda.stream(side):
        return value.cpu()[0].item()


def test_results_arrive_at_the_end() -> None:
    """Until a rank's operation ends its output has the old values, or poison."""
    options = {"modes": world.Modes(races=False)}
    seen = {value for seed in range(80) for value in world.run(read_too_early, 2, seed=seed, **options).values}
    poison = torch.full((4,), memory.POISON, dtype=torch.uint8).view(torch.float32).item()
    assert seen == {1.0, 2.0, poison}


def two_streams(rank: int, ranks: int) -> None:
    first, second = filled(rank, 4, 1), filled(rank, 4, 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    dist.all_reduce(first)
    with torch.cuda.stream(side):
        dist.all_reduce(second)
    torch.cuda.synchronize()


def test_operations_of_a_group_run_in_order() -> None:
    for seed in range(20):
        ends: list[str] = []
        world.run(two_streams, 2, seed=seed, trace=ends.append)
        for rank in range(2):
            mine = [end.rpartition(": ")[2] for end in ends if f"of rank {rank}: all_reduce" in end]
            assert mine == ["all_reduce 0 of group world", "all_reduce 1 of group world"]


#: One order is enough for NCCL 2.26 with NCCL_LAUNCH_ORDER_IMPLICIT; without, the operations must not run side by side.
@mistake(MISTAKES, "may deadlock", "at once 0", "at once 1", modes=world.Modes(strict_communicators=True))
def two_groups_at_once(rank: int, ranks: int) -> None:
    other = dist.new_group([0, 1])
    first, second = filled(rank, 4, 1), filled(rank, 4, 2)
    dist.all_reduce(first, async_op=True)  # <at once 0>
    dist.all_reduce(second, group=other, async_op=True)  # <at once 1>


def two_groups_in_turn(rank: int, ranks: int) -> None:
    other = dist.new_group([0, 1])
    value = filled(rank, 4, 1)
    dist.all_reduce(value, async_op=True).wait()
    dist.all_reduce(value, group=other)
    assert value.cpu().tolist() == [4.0] * 4


def test_two_groups_that_take_all_multiprocessors() -> None:
    """Kernels of two streams start in any order: without an order of launches one rank may start with one group, one with the other."""
    faulty(("deadlock", "at once 0", "at once 1"), two_groups_at_once, 2, modes=world.Modes(busy=True), seeds=40)
    for seed in range(10):
        for modes in (world.Modes(busy=True), world.Modes(strict_communicators=True)):
            world.run(two_groups_in_turn, 2, seed=seed, modes=modes)


def circle(rank: int, ranks: int) -> None:
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    value = filled(rank, 4, 1)
    for group in order:
        dist.all_reduce(value, group=groups[group])  # <circle>


def test_three_groups_in_a_circle() -> None:
    """No two groups share two ranks, so that only the wait-for graph shows it."""
    faulty(("deadlock", "circle", "circle", "circle"), circle, 3)


def test_a_missing_rank_is_named() -> None:
    text = str(noticed(rank_missing, 3))
    assert "rank 1, which has issued 0 operations of the group" in text and "its program has ended" in text


def sizes(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be equal to world_size times"):
        dist.all_gather_into_tensor(filled(rank, 7, 0), filled(rank, 4, 0))
    with pytest.raises(ValueError, match="same size as output size times"):
        dist.reduce_scatter_tensor(filled(rank, 4, 0), filled(rank, 7, 0))
    with pytest.raises(ValueError, match="Split sizes"):
        dist.all_to_all_single(filled(rank, 4, 0), filled(rank, 4, 0), [1, 1], [2, 2])


def test_sizes_that_torch_refuses() -> None:
    world.run(sizes, 2)


@pytest.mark.parametrize("program", MISTAKES, ids=lambda program: program.__name__)
def test_mistakes(program: Callable[..., Any]) -> None:
    shown(MISTAKES, program)
