"""The rendezvous store, and the lives of groups: nothing waits for a peer in the store, no life meets the texts of another one, and an
operation outlives destroy_process_group(). Every program is legal over plain gloo."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from cached import Rank
from torch.distributed import distributed_c10d as c10d

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig

ALWAYS = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
AUTO = ZipcclConfig(enabled=True, min_bytes=0)


def enter(store: dist.Store, rank: int, ranks: int) -> None:
    """Enter another default group."""
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)


def enter_by_tcp(rank: int, ranks: int) -> None:
    """Enter a default group with the store of torchrun, whose client has one lock."""
    files = c10d._get_default_store()
    if not rank:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        files.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")), None, False)
    dist.destroy_process_group()
    enter(store, rank, ranks)


class Exchange:
    """An expert exchange: its rows may be coded once all ranks have said that they have the kernels."""

    def __init__(self, group: Any) -> None:
        self._out = torch.empty(64, 512)
        own = torch.arange(64.0 * 512).view(64, 512) + dist.get_rank(group)
        self._handle = comm.all_to_all_single(self._out, own, group=group, async_op=True, config=ALWAYS, role="ep")

    def wait(self) -> None:
        self._handle.wait()
        half = 32 * dist.get_rank() * 512.0
        assert self._out[0, 0] == half and self._out[32, 0] == half + 1


@runner.together(2)
def groups_in_other_orders(rank: int, ranks: int) -> None:
    enter_by_tcp(rank, ranks)
    groups, handles = [dist.new_group(), dist.new_group()], []
    for group in groups[::-1] if rank else groups:
        handles.append(Exchange(group))
        time.sleep(0.3)
    for handle in handles:
        handle.wait()


@runner.together(2)
def a_sum_before_or_behind_an_exchange(rank: int, ranks: int) -> None:
    """A sum of several fragments, behind which one rank makes the first exchange of another group."""
    enter_by_tcp(rank, ranks)
    first, second = dist.new_group(), dist.new_group()
    numbers = torch.full((4 << 20,), rank + 1.0)
    handle = None if rank else Exchange(first)
    time.sleep(0.3)
    comm.all_reduce(numbers, group=second, config=ALWAYS)
    (handle or Exchange(first)).wait()
    assert numbers[0] == 3


@runner.together(2)
def threads_in_other_orders(rank: int, ranks: int) -> None:
    enter_by_tcp(rank, ranks)

    def program(group: dist.ProcessGroup, seconds: float) -> None:
        time.sleep(seconds)
        Exchange(group).wait()

    delays = [0.5, 0.0] if rank else [0.0, 0.5]
    groups = [dist.new_group(), dist.new_group()]
    runner.at_once(*(functools.partial(program, *one) for one in zip(groups, delays, strict=True)))


@runner.together(2)
def a_name_that_another_group_had(rank: int, ranks: int) -> None:
    """As with use_local_synchronization, in whose names are the ranks alone: also after a life in which the other rank has not come."""
    for life in range(4):
        group = dist.new_group()
        group._set_group_name("again")
        if rank == life % 2:
            time.sleep(0.3)
        for turn in range(2):
            told = topology.tell(group, f"{rank} {life} {turn}")
            assert told == {one: f"{one} {life} {turn}" for one in range(ranks)}
        alone = dist.new_group()
        alone._set_group_name("again")
        if rank == life % 2:
            words: list[list[int]] = []
            topology.PATIENCE = 0.05
            said, late = topology.collect(alone, "alone", "texts", timedelta(seconds=0.2), words.append)
            assert said == ({} if rank else {0: "alone"}) and late == [1 - rank] and late in words
        dist.barrier()


@runner.together(2)
def a_lock_of_the_store(rank: int, ranks: int) -> None:
    """While ranks wait for each other's texts, another thread of theirs uses the store."""
    enter_by_tcp(rank, ranks)
    store, behind = c10d._get_default_store(), threading.Event()
    if rank:
        assert store.get("let in") == b"yes"
        topology.tell(dist.group.WORLD, "")
        return

    def let_in() -> None:
        time.sleep(0.2)
        store.set("let in", "yes")
        behind.set()

    runner.at_once(lambda: topology.tell(dist.group.WORLD, ""), let_in)
    assert behind.is_set()


@runner.together(2, ALWAYS, True)
@runner.together(2, ALWAYS, False)
@runner.together(2, AUTO, True)
def operations_outlive_their_group(rank: int, ranks: int, config: ZipcclConfig, whole: bool) -> None:
    """All kinds, of which gathers in place compare hashes; one is refused after the group is gone. Gathers with bases decide before."""
    (based := Rank(rank, ranks, config=config).settle()).step(2)
    group, store = None if whole else dist.new_group(), c10d._get_default_store()
    numbers, place = torch.ones(4, 1 << 20), torch.full((2 << 16,), float(rank))
    handles = [comm.all_reduce(each, group=group, async_op=True, config=config) for each in numbers]
    own, more = place[rank << 16 : rank + 1 << 16], {"base": comm.IN_PLACE, "config": config, "role": "zero_param"}
    handles += [comm.all_gather_into_tensor(place, own, group, True, **more) for _ in range(2)]
    handles.append(Exchange(group))
    gathered, wanted, handle = based.start([0, 2])
    dist.destroy_process_group(group)
    for one in (handle, *handles[:-1]):
        one.wait()
    assert (numbers == 2).all() and place[0] == 0 and place[-1] == 1 and torch.equal(gathered, wanted)
    if not whole:
        handles[-1].wait()
        return
    enter(store, rank, ranks)
    handles[-1].wait()
    comm.all_reduce(numbers, config=config)
    assert (numbers == 4).all()


@runner.together(2)
def keys_of_hashes(rank: int, ranks: int) -> None:
    """The first operation of a group has the key, and all groups have the same."""
    group = dist.new_group()
    comm.all_reduce(torch.ones(1 << 16), group=group, config=ALWAYS)
    key = group_state(group).hash_key  # type: ignore[union-attr]
    assert key is not None and topology.tell(group, key.hex()) == dict.fromkeys(range(ranks), topology.secret().hex())


test_lives = runner.programs(__name__)


def test_a_store_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that hosted it has ended."""
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    del host
    monkeypatch.setattr(topology, "_get_default_store", lambda: client)
    monkeypatch.setattr(topology.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(topology.dist, "get_rank", lambda: 1)

    class Group:  # of any kind
        group_name = "0"

    with pytest.raises(
        RuntimeError, match="store does not answer; see the output of the rank that hosts it, often 0: "
    ):
        topology.tell(Group(), "")  # type: ignore[arg-type]
