"""Operations in flight: any order of waiting, many at once, handles; ranks that die or send garbage; groups that are destroyed."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from cached import Rank
from moves import AUTO, CODED, wait
from operations import arguments

from ds_zipccl import comm
from ds_zipccl.comm import work
from ds_zipccl.comm.device.streams import StreamWork, streams_of
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import Round
from ds_zipccl.policy import admission

gather = partial(comm.all_gather_into_tensor, config=CODED)
add = partial(comm.all_reduce, config=CODED)


def filled(rank: int, size: int, seed: int) -> torch.Tensor:
    return corpus.tensor(corpus.bell(size, corpus.BF16, 101 * seed + rank), corpus.BF16)


@runner.together(2)
@runner.together(3)
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


@runner.together(2)
def several_threads(rank: int, ranks: int) -> None:
    """Each thread of the program has a group of its own."""
    groups = [dist.new_group(list(range(ranks))) for _ in range(3)]

    def use(which: int) -> None:
        for turn in range(10):
            output = torch.empty(3000 * ranks, dtype=torch.bfloat16)
            gather(output, filled(rank, 3000, 10 * which + turn), groups[which])
            corpus.assert_same_bits(output, torch.cat([filled(peer, 3000, 10 * which + turn) for peer in range(ranks)]))

    runner.at_once(*(partial(use, which) for which in range(3)))


@runner.together(2)
def tensors_live_until_done(rank: int, ranks: int) -> None:
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


@runner.together(2)
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


def test_failures() -> None:
    """A job's exception comes out of every wait and of the future, and the thread goes on serving."""

    def job() -> None:
        raise ValueError("no such luck")

    handle = work.start("trial", [], job)
    for waits in (handle.get_future().wait, handle.wait, handle.wait):
        with pytest.raises(ValueError, match="no such luck"):
            waits()
    assert handle.is_completed() and not handle.is_success() and isinstance(handle.exception(), ValueError)
    assert work.start("trial", [], lambda: None).wait()


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


def test_handles_are_those_of_torch() -> None:
    """Programs ask for the type, and torch's own functions too."""
    posted = work.PointToPointWork("send", [], None, lambda timeout: None)
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


LARGE = 200_000
ALWAYS = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
MESSAGE = admission.Message("all_reduce", torch.bfloat16, LARGE, 3, "cpu", "gloo", "dp")
TIMEOUT = 3.0  # seconds, of the group

OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


def survivor(rank: int, ranks: int, folder: str, case: Callable[..., Any], *arguments: Any) -> None:
    """Run ``case`` on a group with a short timeout; leave what it raised and after how many seconds, and go without a goodbye."""
    torch.set_num_threads(1)
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=TIMEOUT))
    dist.barrier(group)
    begun, said = time.monotonic(), ""
    try:
        case(rank, ranks, group, *arguments)
    except comm.CommError as error:
        said = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([said, time.monotonic() - begun]))
    if case is garbage:
        time.sleep(2 * TIMEOUT)  # a rank that leaves ends the waiting of the others: they must not need that
    os._exit(0)


def survive(folder: Path, case: Callable[..., Any], ranks: int, *arguments: Any) -> dict[int, str]:
    """What the ranks that lived on have raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE", 4 * TIMEOUT)
        with pytest.raises(runner.RankFailure):
            runner.run(survivor, ranks, str(folder), case, *arguments, timeout=90)
    found = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert all(seconds < TIMEOUT + 4 for _, seconds in found.values()), found
    return {rank: said for rank, (said, _) in found.items()}


def dying(rank: int, ranks: int, group: dist.ProcessGroup, op: str, config: ZipcclConfig) -> None:
    """The last rank is killed while operations go on."""
    tensor = corpus.tensor(corpus.bell(LARGE, corpus.BF16, rank), corpus.BF16)
    for step in range(1000):
        if rank == ranks - 1 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        getattr(comm, op)(*arguments(tensor, ranks)[op], group=group, config=config)


@pytest.mark.parametrize(("op", "ranks"), [*((op, 3) for op in OPERATIONS), ("all_gather_into_tensor", 2)])
def test_a_rank_that_dies(tmp_path: Path, op: str, ranks: int) -> None:
    """The others name the operation and a rank that is gone; of three, the first to notice may be gone as well."""
    said = survive(tmp_path, dying, ranks, op, ALWAYS)
    assert sorted(said) == list(range(ranks - 1))
    for rank, text in said.items():
        assert text.startswith(f"{op} (group ") and f"of {ranks} ranks, role dp, global rank {rank}): " in text
        named = "global rank 1: " if ranks == 2 else "global rank "
        assert "ing " in text and named in text.split("): ")[1]


def garbage(rank: int, ranks: int, group: dist.ProcessGroup, op: str) -> None:
    """The frames of rank 1 are damaged on their way."""
    send = frames.compress

    def damaged(*arguments: Any, **settings: Any) -> torch.Tensor:
        frame = send(*arguments, **settings)
        frame[4:12] ^= 255
        return frame

    if rank == 1:
        frames.compress = damaged
        frames.compress_segments = lambda flats, buffers, *more, **settings: [
            damaged(flat, ALWAYS.codec, out=buffer, shaped=False, checksum=False)
            for flat, buffer in zip(flats, buffers, strict=True)
        ]
    tensor = corpus.tensor(corpus.bell(LARGE, corpus.BF16, rank), corpus.BF16)
    getattr(comm, op)(*arguments(tensor, ranks)[op], group=group, config=ALWAYS)


LEAVING = """
import sys, torch, torch.distributed as dist
from ds_zipccl import comm
from ds_zipccl.config import ZipcclConfig
rank, store, mode, later = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "later"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
config = ZipcclConfig(enabled=True, mode=mode, min_bytes=1 << 14)
for size in [2000, 50_000] * 20:
    tensor = torch.ones(size)
    work = comm.all_reduce(tensor, config=config, async_op=later)
    work.wait() if later else None
    assert tensor[-1] == 2
print("done", flush=True)
works = [comm.all_reduce(torch.ones(100_000), config=config, async_op=True) for _ in range(8 * later)]
"""


@pytest.mark.full(reason="eight seconds")
@pytest.mark.parametrize(("mode", "later", "runs"), [("always", "later", 1), ("auto", "now", 3), ("auto", "later", 3)])
def test_leaving_without_goodbye(tmp_path: Path, mode: str, later: str, runs: int) -> None:
    """The interpreter ends well without destroy_process_group(), also with operations in flight; torch alone aborts now and then."""
    programs = [
        ["-W", "ignore", "-c", LEAVING, str(rank), str(tmp_path / f"store{run}"), mode, later]
        for run in range(runs)
        for rank in range(2)
    ]
    for left in runner.whole_programs(*programs):
        assert left == (0, "done\n", "")


SHADOWED = replace(CODED, check="shadow")
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
        assert arrived() is None


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
        base = SharedBase(slots)
        comm.all_gather_into_tensor(whole, floats(seed), None, True, config=CODED, base=base).wait()


def kept(rank: int) -> None:
    one = Rank(rank, 2, sizes=(NUMEL,))
    for later in (False, True):
        one.gather(0, later=later)


def collective(name: str, rank: int, config: ZipcclConfig = CODED, later: bool = False, **more: Any) -> None:
    given = arguments(floats(rank), 2)[name]
    if later:
        more["async_op"] = True
    for _ in range(2):
        wait(getattr(comm, name)(*given, config=config, **more))


COLLECTIVES = [name for name in comm.__all__ if name.startswith(("all_", "reduce", "broadcast"))]
PROGRAMS: dict[str, Callable[[int], None]] = {
    "p2p of side tensors": partial(to_peer, side),
    "p2p of floats": partial(to_peer, floats),
    "p2p in mode auto": partial(to_peer, floats, config=AUTO),
    "p2p with a shadow": partial(to_peer, side, config=SHADOWED),
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
    life = [secrets.token_hex(4)]  # ranks that are started once more must not meet in the files of the first start
    dist.broadcast_object_list(life)
    dist.destroy_process_group()
    gc.freeze()  # the collections below need not look at all of torch
    alive, counts = {}, []
    for number in range(CYCLES):
        name = list(PROGRAMS)[number % len(PROGRAMS)]
        store = dist.FileStore(f"{folder}/{life[0]} {number}", ranks)
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
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{life[0]} last", ranks), rank=rank, world_size=ranks
    )
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


test_programs = runner.programs(__name__)
