"""A group that is destroyed leaves nothing behind, whatever it has carried: its state, threads, descriptors and tensors."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from kept import Rank

from ds_zipccl import comm
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import pipeline
from ds_zipccl.comm.host.p2p import known
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import Round

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
AUTO, SHADOWED = replace(CODED, mode="auto"), replace(CODED, check="shadow")
NUMEL = 12_000
#: Groups that are made and destroyed, one after the other, and the descriptors and threads that a run may add to the first groups'.
CYCLES, NOISE = 50, 4


def floats(seed: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).bfloat16()


def side(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 9, (NUMEL,), generator=torch.Generator().manual_seed(seed))


def to_peer(make: Callable[[], torch.Tensor], rank: int, config: ZipcclConfig = CODED) -> None:
    """Both ranks send to each other, blocking and not, twice the same. What has arrived is the program's alone."""
    for _ in range(2):
        got = torch.zeros_like(make())
        handle = comm.isend(make(), 1 - rank, config=config)
        comm.recv(got, 1 - rank, config=config)
        handle.wait()
        assert torch.equal(got, make())
        waiting = comm.irecv(got, 1 - rank, config=config)
        comm.send(make(), 1 - rank, config=config)
        waiting.wait()
        arrived = weakref.ref(got)
        del handle, waiting, got
        assert arrived() is None or config is AUTO  # there a thread has received it, which may not have let it go yet


def dropped(rank: int) -> None:
    """The program forgets a handle; the next receive of the channel ends it first."""
    forgotten = torch.zeros_like(side())
    sends = [comm.isend(side(seed), 1 - rank, config=CODED) for seed in (1, 2, 2)]
    comm.irecv(forgotten, 1 - rank, config=CODED)
    for _ in range(2):
        got = torch.zeros_like(side())
        comm.recv(got, None, config=CODED) if rank else comm.recv(got, 1 - rank, config=CODED)
        assert torch.equal(got, side(2))
    assert torch.equal(forgotten, side(1)) or rank  # from any rank: a channel of its own
    for handle in sends:
        handle.wait()


def refused(rank: int) -> None:
    """A receive that fails: the receiver has lost its copy. The last failed exchanges of a process are kept, see pipeline.abandon."""
    to_peer(side, rank)
    state = group_state(None)
    assert state is not None
    known.inbox(state, 0).copies(1 - rank).drop((torch.int64, NUMEL))
    handle = comm.isend(side(), 1 - rank, config=CODED)
    with contextlib.suppress(comm.CommError):
        comm.recv(torch.zeros_like(side()), 1 - rank, config=CODED)
        raise AssertionError("taken")
    handle.wait()
    pipeline._abandoned.clear()


def batch(rank: int) -> None:
    """As DeepSpeed's backend starts a batch."""
    got = [torch.zeros_like(floats()), torch.zeros_like(side())]
    handles = [comm.isend(tensor, 1 - rank, config=CODED) for tensor in (floats(), side())]
    handles += [comm.irecv(tensor, 1 - rank, config=CODED) for tensor in got]
    for handle in handles:
        handle.wait()


def in_place(rank: int) -> None:
    whole = floats()
    for _ in range(2):
        comm.all_gather_into_tensor(whole, whole.chunk(2)[rank], config=CODED, base=comm.IN_PLACE)


def differences(rank: int, kind: str) -> None:
    slots = comm.allocate_bases([(NUMEL, torch.bfloat16)], kind, dist.group.WORLD)
    for seed in (1, 1):
        whole = torch.zeros(2 * NUMEL, dtype=torch.bfloat16)
        base = comm.SharedBase(slots)
        comm.all_gather_into_tensor(whole, floats(seed), None, True, config=CODED, base=base).wait()


def kept(rank: int) -> None:
    one = Rank(rank, 2, sizes=(NUMEL,))
    for later in (False, True):
        one.gather(0, later=later)


def collective(name: str, rank: int, config: ZipcclConfig = CODED, later: bool = False, **more: Any) -> None:
    mine = floats(rank)
    whole, half = mine.repeat(2), mine[: NUMEL // 2].clone()
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (mine,),
        "all_reduce_coalesced": ([mine, half],),
        "reduce": (mine, 1),
        "broadcast": (mine, 1),
        "all_gather": (list(whole.chunk(2)), mine),
        "all_gather_into_tensor": (whole, mine),
        "all_gather_coalesced": ([whole], [mine]),
        "all_to_all": (list(torch.empty_like(mine).chunk(2)), list(mine.chunk(2))),
        "all_to_all_single": (torch.empty_like(mine), mine),
        "reduce_scatter": (half, list(mine.chunk(2))),
        "reduce_scatter_tensor": (half, mine),
        "reduce_to_owners": (mine, [(NUMEL, (0,))]),
    }
    if later:
        more["async_op"] = True
    for _ in range(2):
        handle = getattr(comm, name)(*arguments[name], config=config, **more)
        if later:
            handle.wait()


COLLECTIVES = [name for name in comm.__all__ if name.startswith(("all_", "reduce", "broadcast"))]
PROGRAMS: dict[str, Callable[[int], None]] = {
    "p2p of side tensors": partial(to_peer, side),
    "p2p of floats": partial(to_peer, floats),
    "p2p in mode auto": partial(to_peer, floats, config=AUTO),
    "p2p with a shadow": partial(to_peer, side, config=SHADOWED),
    "a dropped handle": dropped,
    "a refused receive": refused,
    "batch": batch,
    "in place": in_place,
    "bases of the host": partial(differences, kind="host"),
    "bases of a device": partial(differences, kind="device"),
    "kept gathers": kept,
    **{name: partial(collective, name) for name in COLLECTIVES},
    **{f"{name}, async": partial(collective, name, later=True) for name in COLLECTIVES if name != "reduce_to_owners"},
    "a sum in mode auto": partial(collective, "all_reduce", config=AUTO),
    "a sum with a shadow": partial(collective, "all_reduce", config=SHADOWED, later=True),
    "a lossy sum": partial(collective, "all_reduce", lossy=Round(3)),
}


def used() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def cycles(rank: int, ranks: int, folder: str) -> tuple[dict[str, bool], list[tuple[int, int]]]:
    """Make a group, run a program, and destroy the group, :data:`CYCLES` times. Return for each program whether the state of its group
    was alive afterwards, and the descriptors and threads after each cycle."""
    dist.destroy_process_group()
    gc.freeze()  # the collections below need not look at all of torch
    alive, counts = {}, []
    for number in range(CYCLES):
        name = list(PROGRAMS)[number % len(PROGRAMS)]
        store = dist.FileStore(f"{folder}/{number}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        try:
            PROGRAMS[name](rank)
        except BaseException as error:
            raise AssertionError(name) from error
        dist.barrier()
        state = weakref.ref(group_state(None))
        dist.destroy_process_group()
        deadline = time.monotonic() + 2.0  # the thread of an asynchronous call may still be about to let it go
        while gc.collect() is not None and state() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        alive[name] = alive.get(name, False) or state() is not None
        counts.append(used())
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/last", ranks), rank=rank, world_size=ranks)
    return alive, counts


@pytest.fixture(scope="module")
def ended() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return runner.run(cycles, 2, folder)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_state_ends_with_the_group(ended: Any, program: str) -> None:
    assert [alive[program] for alive, _ in ended] == [False, False]


def test_descriptors_and_threads_are_flat(ended: Any) -> None:
    for _, counts in ended:
        assert all(last <= first + NOISE for first, last in zip(counts[10], counts[-1], strict=True)), counts
