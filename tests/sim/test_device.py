"""Streams, events, memory and host waits of the simulated GPU, and for each rule a program that breaks it; graphs, and
machines with properties that others lack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim import device, memory, streams, world
from sim.device import kernel
from sim.mistakes import Mistakes, faulty, filled, mistake, shown
from sim.scheduler import Fault

# --- tensors


def tensors_of_torch(rank: int, ranks: int) -> None:
    there = f"cuda:{rank}"
    host = torch.arange(12.0)
    one = host.to(there)
    assert one.is_cuda and one.device == torch.device(there) and one.device.type == "cuda" and not one.is_cpu
    assert one.view(3, 4)[1:, 2].tolist() == [6, 10]
    assert one.data_ptr() % 512 == 0 and one[2:].data_ptr() == one.data_ptr() + 8
    assert one.untyped_storage().nbytes() == 48 and one[2:].storage_offset() == 2
    assert torch.equal((one * 2 + 1).to(torch.bfloat16).cpu(), (host * 2 + 1).to(torch.bfloat16))
    assert torch.cat([one, one]).sum().item() == 132 and bool((one == host.to(there)).all())
    assert torch.zeros(2, 3, device=there).shape == (2, 3) and torch.ones_like(one).max().item() == 1
    assert torch.tensor([1, 2], device=there).tolist() == [1, 2] and one.amax().cpu() == 11
    assert torch.stack([one[:2], one[2:4]]).t().contiguous().tolist() == [[0, 2], [1, 3]]
    assert torch.equal(one, one.clone()) and not torch.equal(one, one + 1)
    one[3:5] = 7
    one[0] = one[11]
    one.view(torch.int32)[1] = 0
    assert one.tolist() == [11, 0, 2, 7, 7, 5, 6, 7, 8, 9, 10, 11]
    with torch.inference_mode():
        one.add_(1)
        inside = one[:2] * 1
    assert inside.tolist() == [12, 1]
    wide = torch.empty(3, dtype=torch.float64, device=there).copy_(one[:3])
    assert wide.tolist() == [12, 1, 3]
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and pinned.device.type == "cpu"
    pinned.copy_(one[:4])
    assert pinned.tolist() == [12, 1, 3, 8] and (pinned[1:2] + 1).item() == 2
    to_host = one.to("cpu", non_blocking=True)
    assert to_host.is_pinned()
    torch.cuda.synchronize()
    assert to_host.sum().item() == 95
    with pytest.raises(TypeError, match="to numpy"):
        one.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        one.add_(host)
    assert torch.cuda.get_device_properties(one.device).multi_processor_count == 132
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    assert torch.cuda.is_available() and torch.cuda.current_device() == rank
    torch.cuda.default_stream().synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() and torch.cuda.current_stream().query()


def unwritten(rank: int, ranks: int) -> list[int]:
    return torch.empty(4, dtype=torch.uint8, device=f"cuda:{rank}").tolist()


def reuse(rank: int, ranks: int) -> tuple[bool, bool, bool, bool]:
    first = filled(rank, 100, 1)
    place = first.data_ptr()
    used = first + 1
    del first  # <free>
    second = torch.empty(100, device=f"cuda:{rank}")
    with torch.cuda.stream(torch.cuda.Stream()):
        apart = torch.empty(100, device=f"cuda:{rank}")
    poison = set(second.view(torch.uint8).tolist()) == {memory.POISON}
    return second.data_ptr() == place, apart.data_ptr() == place, used.sum().item() == 200, poison


def held(rank: int, ranks: int, record: bool) -> bool:
    words = filled(rank, 100, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sums = words * 2  # <side use>
    if record:
        words.record_stream(side)
    del words
    filled(rank, 100, 5)  # <after free>
    side.synchronize()
    return bool((sums == 2).all())


def test_record_stream() -> None:
    for seed in range(20):
        assert world.run(held, 1, True, seed=seed).values == [True]
    faulty(("race", "side use", "after free"), held, 1, False)


# --- mistakes

MISTAKES: Mistakes = {}


@mistake(MISTAKES, "race", "made", "multiplied")
def side_stream_of_allocation(rank: int, ranks: int) -> None:
    side = torch.cuda.Stream()
    words = filled(rank, 8, 1)  # <made>
    with torch.cuda.stream(side):
        words.mul_(2)  # <multiplied>


@mistake(MISTAKES, "race", "slab", "slot")
def slot_of_slab(rank: int, ranks: int) -> None:
    """The two tensors begin at different addresses and share one byte range."""
    slab = filled(rank, 64, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    slab.add_(1)  # <slab>
    with torch.cuda.stream(side):
        slab[32:40].mul_(3)  # <slot>


@mistake(MISTAKES, "race", "added", "read")
def read_of_another_stream(rank: int, ranks: int) -> None:
    side = torch.cuda.Stream()
    words = filled(rank, 8, 1)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        words.add_(1)  # <added>
    words.cpu()  # <read>


@mistake(MISTAKES, "race", "copied", "listed")
def pinned_without_wait(rank: int, ranks: int) -> None:
    words = filled(rank, 8, 1)
    pinned = torch.empty(8, pin_memory=True)
    pinned.copy_(words, non_blocking=True)  # <copied>
    pinned.tolist()  # <listed>


@mistake(MISTAKES, "race", "staged", "staged again")
def pinned_used_again(rank: int, ranks: int) -> None:
    words = torch.empty(8, device=f"cuda:{rank}")
    pinned = torch.empty(8, pin_memory=True)
    pinned.fill_(1)
    words.copy_(pinned, non_blocking=True)  # <staged>
    pinned.fill_(2)  # <staged again>


@mistake(MISTAKES, "deadlock", "flag", "flag sync")
def flag_never_set(rank: int, ranks: int) -> None:
    streams.Flag().wait()  # <flag>
    torch.cuda.synchronize()  # <flag sync>


@mistake(MISTAKES, "deadlock", "spin", "full")
def launches_behind_a_spin(rank: int, ranks: int) -> None:
    """More launches than the queue takes, before the host sets the flag that the first one waits for."""
    flag = streams.Flag()
    flag.spin()  # <spin>
    for _ in range(device.LAUNCH_QUEUE + 1):
        kernel("nothing", lambda reads, writes: None, [], [])  # <full>
    flag.set()


@mistake(MISTAKES, "capture", "captured wait")
def wait_in_capture(rank: int, ranks: int) -> None:
    words = filled(rank, 8, 1)
    with streams.Graph().capture():
        words.add_(1)
        words.cpu()  # <captured wait>


@mistake(MISTAKES, "capture", "captured query")
def query_in_capture(rank: int, ranks: int) -> None:
    event = torch.cuda.current_stream().record_event()
    with streams.Graph().capture():
        assert torch.cuda.is_current_stream_capturing()
        event.query()  # <captured query>


@mistake(MISTAKES, "deadlock", "alone", "poll")
def never_reached(rank: int, ranks: int) -> None:
    """A poll of an event behind a collective that the other rank does not join."""
    value = filled(rank, 8, 1)
    if rank == 0:
        dist.all_reduce(value)  # <alone>
        event = torch.cuda.current_stream().record_event()
        while not event.query():  # <poll>
            pass


@mistake(MISTAKES, "undeclared", "undeclared", "other memory", modes=world.Modes(declared=True))
def undeclared(rank: int, ranks: int) -> None:
    """A kernel that writes a tensor which it names as one that it reads."""
    words, other = filled(rank, 8, 1), filled(rank, 8, 2)  # <other memory>

    def both(reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        reads[0][3] = writes[0][3] = 5

    kernel("both", both, [other], [words])  # <undeclared>


def stuck(rank: int, ranks: int) -> None:
    threading.Event().wait(1.0)  # <stuck>


def test_a_rank_that_blocks_elsewhere() -> None:
    """A wait that is none of the simulator's holds up everybody; the run ends all the same, and says where."""
    with pytest.raises(Fault, match=r"stuck: no end after 0\.2 seconds") as raised:
        world.run(stuck, 2, timeout=0.2)
    assert "threading.Event().wait(1.0)" in str(raised.value)


# --- ends of runs


def out_of_memory(rank: int, ranks: int) -> None:
    torch.empty(1 << 20, device=f"cuda:{rank}")


def test_memory_ends() -> None:
    with pytest.raises(Fault, match="has no 4194304 bytes left"):
        world.run(out_of_memory, 1, arena_bytes=1 << 20)


def test_errors_of_ranks_are_raised() -> None:
    def program(rank: int, ranks: int) -> None:
        if rank:
            raise KeyError("mine")
        dist.all_reduce(filled(rank, 1, 1))
        torch.cuda.synchronize()

    with pytest.raises(KeyError, match="mine"):
        world.run(program, 2)


def test_nothing_is_left_behind() -> None:
    """After a run torch is as before: no GPU, no group, no simulated functions."""
    stream = torch.cuda.Stream
    with pytest.raises(Fault):
        world.run(flag_never_set, 1)
    world.run(reuse, 1)
    assert torch.cuda.Stream is stream and not torch.cuda.is_initialized() and not dist.is_initialized()
    if not torch.backends.cuda.is_built():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.empty(1, device="cuda")


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


@mistake(MISTAKES, "deadlock", "waits first", "sets second", modes=world.Modes(one_queue=True))
def flag_set_later(rank: int, ranks: int) -> None:
    """A wait for work that is submitted later."""
    flag = streams.Flag()
    flag.wait()  # <waits first>
    with torch.cuda.stream(torch.cuda.Stream()):
        flag.write()  # <sets second>
    torch.cuda.synchronize()


@mistake(MISTAKES, "deadlock", "holds", "held up", modes=world.Modes(busy=True))
def kernel_beside_a_spin(rank: int, ranks: int) -> None:
    """A kernel that is needed while another one spins, without room on the device."""
    flag = streams.Flag()
    flag.spin()  # <holds>
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel("needed", lambda reads, writes: None, [], [])  # <held up>
        torch.cuda.current_stream().synchronize()
    flag.set()


def two_groups_connect(rank: int, ranks: int) -> None:
    other = dist.new_group([0, 1])
    value = filled(rank, 8, 1)
    dist.all_reduce(value, group=other)  # <connects>
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("go", "1")


@mistake(MISTAKES, "deadlock", "first exchange", "waits for go", modes=world.Modes(connect=True))
def host_of_other_rank(rank: int, ranks: int) -> None:
    value = filled(rank, 8, 1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.all_reduce(value)  # <first exchange>
        store.set("go", "1")
    else:
        store.get("go")  # <waits for go>
        dist.all_reduce(value)


def test_first_exchanges_of_two_groups() -> None:
    for seed in range(6):
        world.run(two_groups_connect, 2, seed=seed, modes=world.Modes(connect=True))


def graph(rank: int, ranks: int) -> list[float]:
    words = filled(rank, 2, 1)
    recorded = streams.Graph()
    with recorded.capture():
        words.mul_(3)
    before = words.tolist()
    recorded.replay()
    recorded.replay()
    return before + words.tolist()


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


#: Rule -> a program that shows it, seeds, and the value of each rank.
RIGHT: dict[str, tuple[Callable[..., Any], int, list[Any]]] = {
    "tensors are those of torch": (tensors_of_torch, 3, [None, None]),
    "new memory is poison": (unwritten, 1, [[memory.POISON] * 4]),
    "memory is used again by its stream alone": (reuse, 8, [(True, False, True, True)]),
    "a graph runs when it is replayed": (graph, 1, [[1, 1, 9, 9]]),
    "collectives are captured too": (graph_of_a_collective, 5, [[4, 4], [5, 5]]),
}


@pytest.mark.parametrize("rule", RIGHT)
def test_right_programs(rule: str) -> None:
    program, seeds, wanted = RIGHT[rule]
    for seed in range(seeds):
        assert world.run(program, len(wanted), seed=seed).values == wanted


@pytest.mark.parametrize("program", MISTAKES, ids=lambda program: program.__name__)
def test_mistakes(program: Callable[..., Any]) -> None:
    shown(MISTAKES, program)
