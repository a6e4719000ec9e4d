"""Operations in flight: any order of waiting, many at once, handles, errors, the end of the process."""

from __future__ import annotations

import gc
import os
import random
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import work
from ds_zipccl.comm.device.stream_work import StreamWork
from ds_zipccl.comm.device.streams import streams_of
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TagRange
from ds_zipccl.config import ZipcclConfig

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
gather = partial(comm.all_gather_into_tensor, config=CODED)
add = partial(comm.all_reduce, config=CODED)


def filled(rank: int, size: int, seed: int) -> torch.Tensor:
    return corpus.tensor(corpus.bell(size, corpus.BF16, 101 * seed + rank), corpus.BF16)


def in_flight(rank: int, ranks: int) -> None:
    """Thirty operations at once, waited for in another order on every rank, with sync and plain ones between."""
    groups = [None, dist.new_group(list(range(ranks))), dist.new_group([1, 0])]
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for number in range(30):
        if number % 7 == 0:
            dist.all_reduce(torch.ones(1))
        size = 500 + 997 * (number % 5)
        group = groups[number % 3]
        if dist.get_rank(group) < 0:
            continue
        members = [0, 1] if group is groups[2] else range(ranks)
        inputs = [filled(peer, size, number) for peer in range(ranks)]
        if number % 4 == 1:
            wanted = inputs[rank].clone()
            dist.all_reduce(wanted, group=group)
            pending.append((add(inputs[rank], group=group, async_op=True), inputs[rank], wanted))
        else:
            output = torch.empty(size * len(members), dtype=torch.bfloat16)
            handle = gather(output, inputs[rank], group, number % 4 != 2)
            pending.append((handle, output, torch.cat([inputs[peer] for peer in members])))
    random.Random(rank).shuffle(pending)
    for handle, output, wanted in pending:
        if handle is not None:
            assert handle.wait()
            assert handle.is_completed() and handle.is_success() and handle.exception() is None
            assert handle.result()[0] is output
        corpus.assert_same_bits(output, wanted)


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_in_flight(ranks: int) -> None:
    runner.run(in_flight, ranks)


def crossed(rank: int, ranks: int) -> None:
    """Two groups, whose operations the ranks issue and wait for in opposite orders."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for turn in range(5):
        outputs = [torch.empty(2 * 4000, dtype=torch.bfloat16) for _ in groups]
        handles: dict[int, Any] = {}
        for which in (0, 1) if rank else (1, 0):
            handles[which] = gather(outputs[which], filled(rank, 4000, 2 * turn + which), groups[which], True)
        for which in (1, 0) if rank else (0, 1):
            handles[which].wait()
            wanted = torch.cat([filled(peer, 4000, 2 * turn + which) for peer in range(ranks)])
            corpus.assert_same_bits(outputs[which], wanted)


def test_two_groups_in_opposite_orders() -> None:
    runner.run(crossed, 2)


def several_threads(rank: int, ranks: int) -> None:
    """Each thread of the program has a group of its own."""
    groups = [dist.new_group(list(range(ranks))) for _ in range(3)]
    wrong: list[BaseException] = []

    def use(which: int) -> None:
        try:
            for turn in range(10):
                output = torch.empty(3000 * ranks, dtype=torch.bfloat16)
                gather(output, filled(rank, 3000, 10 * which + turn), groups[which])
                corpus.assert_same_bits(
                    output, torch.cat([filled(peer, 3000, 10 * which + turn) for peer in range(ranks)])
                )
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_several_threads() -> None:
    runner.run(several_threads, 2)


def tensors_live(rank: int, ranks: int) -> None:
    """Inputs and outputs that the caller drops live until the operation is done, and no longer."""
    wanted = filled(1 - rank, 50000, 1)
    source, output = filled(rank, 50000, 1), torch.empty(100000, dtype=torch.bfloat16)
    kept, gone = output.chunk(2)[1 - rank], weakref.ref(source)
    handle = gather(output, source, None, True)
    del output, source
    gc.collect()
    handle.wait()
    corpus.assert_same_bits(kept, wanted)
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


def test_tensors_live_until_done() -> None:
    runner.run(tensors_live, 2)


def timeouts(rank: int, ranks: int) -> None:
    output = torch.empty(8000, dtype=torch.bfloat16)
    if rank == 0:
        handle = gather(output, filled(0, 4000, 1), None, True)
        assert not handle.is_completed() and not handle.is_success()
        with pytest.raises(comm.CommError, match=r"all_gather_into_tensor is not done after 0:00:00\.050000"):
            handle.wait(timedelta(milliseconds=50))
    dist.barrier()
    if rank == 1:
        handle = gather(output, filled(1, 4000, 1), None, True)
    assert handle.wait() and handle.is_completed()
    assert handle.wait.__qualname__  # DeepSpeed reads it
    corpus.assert_same_bits(output, torch.cat([filled(peer, 4000, 1) for peer in range(ranks)]))


def test_timeouts() -> None:
    runner.run(timeouts, 2)


def failures(rank: int, ranks: int) -> None:
    """A job's exception comes out of every wait, and the thread goes on serving."""

    def job() -> None:
        raise ValueError("no such luck")

    handle = work.start("trial", [], job)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such luck"):
            handle.wait()
    assert handle.is_completed() and not handle.is_success() and isinstance(handle.exception(), ValueError)
    assert work.start("trial", [], lambda: None).wait()


def test_failures() -> None:
    failures(0, 1)


def test_threads_are_used_again() -> None:
    for _ in range(50):
        work.start("trial", [], lambda: None).wait()
        time.sleep(0.001)
    served = sum(thread.name.startswith("ds_zipccl") for thread in threading.enumerate())
    assert 1 <= served <= 4


def test_threads_end_with_their_last_operation() -> None:
    threads, go = work._Threads(), threading.Event()
    threads.run(lambda: None)
    for _ in range(3):
        threads.run(lambda: go.wait())
    closing = threading.Thread(target=threads.close)
    closing.start()
    time.sleep(0.1)
    serving = list(threads._all)  # they leave the list when they end
    go.set()
    closing.join()
    for thread in serving:
        thread.join(5)
    assert len(serving) >= 3 and not any(thread.is_alive() for thread in serving)


def test_a_future_that_is_asked_for_late_is_done() -> None:
    tensor = torch.ones(1)
    handle = work.start("trial", [tensor], lambda: None)
    handle.wait()
    assert handle.get_future().done() and handle.get_future().value()[0] is tensor


def test_handles_are_those_of_torch() -> None:
    """Programs ask for the type, and torch's own functions too."""
    posted = work.PostedWork("send", [], lambda timeout: None, lambda: 0)
    on_streams = StreamWork("trial", streams_of(torch.device("cpu")), None, [], [])
    for handle in (work.done("trial", []), posted, work.JoinedWork("trial", [], []), on_streams):
        assert isinstance(handle, dist.Work)
        assert handle.wait() and handle.is_completed() and handle.is_success() and handle.exception() is None


def test_several_handles_are_done_when_all_are() -> None:
    """Works and futures of torch alike."""
    futures: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(2)]
    done = threading.Event()

    class Handle:
        def wait(self) -> None:
            done.set()

        def is_completed(self) -> bool:
            return done.is_set()

        def get_future(self) -> torch.futures.Future[int]:
            return futures[1]

    joined = work.JoinedWork("trial", [futures[0], Handle()], [])
    future = joined.get_future()
    assert not joined.is_completed() and not future.done()
    futures[0].set_result(1)
    assert not joined.is_completed() and not future.done(), "one is not"
    assert joined.wait() and done.is_set() and joined.is_completed() and joined.is_success()
    futures[1].set_result(2)
    assert future.done()


def lost_peer(rank: int, ranks: int) -> str:
    """The error of a peer that dies names the operation and the peer."""
    dist.barrier()  # a peer that dies while others still connect to it fails init_process_group instead
    if rank == 1:
        os._exit(3)
    with pytest.raises(comm.CommError) as caught:
        gather(torch.empty(8000, dtype=torch.bfloat16), filled(0, 4000, 1))
    raise caught.value


def test_lost_peer() -> None:
    with pytest.raises(runner.RankFailure) as caught:
        runner.run(lost_peer, 2)
    assert "all_gather_into_tensor (group '0' of 2 ranks, role dp, global rank 0): " in str(caught.value)
    assert "global rank 1: " in str(caught.value) and "rank 1: died without a word" in str(caught.value)


def afresh(rank: int, ranks: int, store: str) -> None:
    """A group made anew counts from the start, even if the ranks have left the old one at different counts."""
    first = dist.new_group(list(range(ranks)))
    assert group_state(first).next_tag() == TagRange.COLLECTIVE
    for number in range(1, 4 + rank):
        assert group_state(first).next_tag() == TagRange.COLLECTIVE + number * TAGS_PER_COLLECTIVE
    dist.barrier()
    dist.destroy_process_group(first)
    del first
    output = torch.empty(4000 * ranks, dtype=torch.bfloat16)
    gather(output, filled(rank, 4000, 1), dist.new_group(list(range(ranks))))
    corpus.assert_same_bits(output, torch.cat([filled(peer, 4000, 1) for peer in range(ranks)]))
    group_state(dist.group.WORLD).next_tag() if rank else None
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    gather(output, filled(rank, 4000, 2))
    corpus.assert_same_bits(output, torch.cat([filled(peer, 4000, 2) for peer in range(ranks)]))


def test_groups_made_anew(tmp_path: Path) -> None:
    runner.run(afresh, 2, str(tmp_path / "again"))


EXIT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    from ds_zipccl import comm
    from ds_zipccl.config import ZipcclConfig
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    config = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
    tensors = [torch.ones(100_000) for _ in range(8)]
    works = [comm.all_reduce(tensor, async_op=True, config=config) for tensor in tensors]
    for work in works:
        work.wait()
    assert all(tensor[-1] == 2 for tensor in tensors)
    print("done", flush=True)
    works = [comm.all_reduce(tensor, async_op=True, config=config) for tensor in tensors]
    """
)


def test_exit_without_destroy(tmp_path: Path) -> None:
    """With threads idle, and with operations in flight that nobody waits for."""
    store = str(tmp_path / "store")
    for left in runner.whole_programs(*(["-c", EXIT, str(rank), store] for rank in range(2))):
        assert left == (0, "done\n", "")
