"""Machines with properties that others lack, graphs, and for each property a program that fails on such machines alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import streams, world
from sim.device import kernel
from sim.mistakes import faulty, filled


def spinning(rank: int, ranks: int, preload: bool) -> None:
    """The host of rank 0 loads a kernel while its NCCL kernel spins for rank 1, which waits for rank 0 (meta-pytorch/torchcomms#2334)."""
    value = filled(rank, 8, 1)
    if preload:
        kernel("codec", lambda reads, writes: None, [], [])
        torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(value)  # <collective>
        with torch.cuda.stream(torch.cuda.Stream()):
            kernel("codec", lambda reads, writes: None, [], [])  # <load>
        dist.distributed_c10d._get_default_store().set("go", "1")
    else:
        dist.distributed_c10d._get_default_store().get("go")  # <go>
        dist.all_reduce(value)


def test_lazy_loading() -> None:
    lazy = world.Modes(lazy_loading=True)
    for seed in range(6):
        world.run(spinning, 2, False, seed=seed)
        world.run(spinning, 2, True, seed=seed, modes=lazy)
    said = faulty(("deadlock", "collective", "load", "go"), spinning, 2, False, modes=lazy)
    assert "to load codec at its first launch" in said, said


def flag_set_later(rank: int, ranks: int) -> None:
    flag = streams.Flag()
    flag.wait()  # <waits first>
    with torch.cuda.stream(torch.cuda.Stream()):
        flag.write()  # <sets second>
    torch.cuda.synchronize()


def test_one_hardware_queue() -> None:
    """A wait for work that is submitted later is a deadlock behind one queue, and only there."""
    for seed in range(6):
        world.run(flag_set_later, 1, seed=seed)
    faulty(("deadlock", "waits first", "sets second"), flag_set_later, 1, modes=world.Modes(one_queue=True))


def kernel_beside_a_spin(rank: int, ranks: int) -> None:
    flag = streams.Flag()
    flag.spin()  # <holds>
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel("needed", lambda reads, writes: None, [], [])  # <held up>
        torch.cuda.current_stream().synchronize()
    flag.set()


def test_busy_multiprocessors() -> None:
    """A kernel that is needed while another one spins: right with room on the device, a deadlock without."""
    for seed in range(6):
        world.run(kernel_beside_a_spin, 1, seed=seed)
    faulty(("deadlock", "holds", "held up"), kernel_beside_a_spin, 1, modes=world.Modes(busy=True))


def two_groups_connect(rank: int, ranks: int) -> None:
    other = dist.new_group([0, 1])
    value = filled(rank, 8, 1)
    dist.all_reduce(value, group=other)  # <connects>
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("go", "1")


def host_of_other_rank(rank: int, ranks: int) -> None:
    value = filled(rank, 8, 1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.all_reduce(value)  # <first exchange>
        store.set("go", "1")
    else:
        store.get("go")  # <waits for go>
        dist.all_reduce(value)


def test_first_exchange_blocks_hosts() -> None:
    for seed in range(6):
        world.run(host_of_other_rank, 2, seed=seed)
        world.run(two_groups_connect, 2, seed=seed, modes=world.Modes(connect=True))
    faulty(("deadlock", "first exchange", "waits for go"), host_of_other_rank, 2, modes=world.Modes(connect=True))


def graph(rank: int, ranks: int) -> list[float]:
    words = filled(rank, 2, 1)
    recorded = streams.Graph()
    with recorded.capture():
        words.mul_(3)
    before = words.tolist()
    recorded.replay()
    recorded.replay()
    return before + words.tolist()


def test_graphs() -> None:
    assert world.run(graph, 1).values == [[1, 1, 9, 9]]


def graph_of_a_collective(rank: int, ranks: int) -> list[float]:
    words = filled(rank, 2, 1)
    recorded = streams.Graph()
    with recorded.capture():
        dist.all_reduce(words)
        dist.all_reduce(words, async_op=True).wait()
        words.add_(rank)
    assert words.tolist() == [1, 1]
    recorded.replay()
    return words.tolist()


def test_graphs_of_collectives() -> None:
    for seed in range(5):
        assert world.run(graph_of_a_collective, 2, seed=seed).values == [[4, 4], [5, 5]]
