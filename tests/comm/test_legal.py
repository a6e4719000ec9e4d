"""Programs that torch.distributed runs: ours must not hang in them, nor give other bits. Some went wrong once."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, CODED, turn, wait
from operations import Coded, arguments

from ds_zipccl import comm
from ds_zipccl.comm import buffer_pool
from ds_zipccl.comm import work as operations
from ds_zipccl.comm.buffer_pool import POOL, PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import GroupState
from ds_zipccl.comm.host import gather, pipeline
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TAGS_PER_RANGE, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

NUMEL = 40_000


def own(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


# ---- bases -------------------------------------------------------------------------------------------------------------


def in_another_place(rank: int, ranks: int, kind: str) -> None:
    """The input lies in another rank's place of the output, where the base is put first."""
    base = (
        comm.IN_PLACE
        if kind == "in place"
        else SharedBase(comm.allocate_bases([(NUMEL, torch.bfloat16)], kind, dist.group.WORLD))
    )
    whole = torch.zeros(ranks * NUMEL, dtype=torch.bfloat16)
    for step in range(4):
        place = whole.chunk(ranks)[(rank + 1) % ranks]
        place.copy_(own(rank, step))
        wanted = torch.cat([own(peer, step) for peer in range(ranks)])
        comm.all_gather_into_tensor(whole, place, config=CODED, base=base)
        assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16)), step


@runner.together(3)
def closed_to_one(rank: int, ranks: int) -> None:
    """A rank that fails tells every mate, also where no receive can be posted and the connection to the first is closed."""
    (kept,) = comm.allocate_bases([(NUMEL, torch.bfloat16)], "host", dist.group.WORLD)
    told: list[int] = []

    class Deaf(pipeline.Exchange):
        def post_recv(self, peer: int, out: torch.Tensor) -> None:
            raise comm.CommError("closed")

        def send(self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None) -> None:
            if peers[0] == self._ctx.peers[0]:
                raise comm.CommError("closed")
            told.extend(peers)

    gather.Exchange = Deaf
    kept.filled = True
    link = OpContext("all_gather_into_tensor", dist.group.WORLD, CODED, "dp", "cascade", with_base=True)
    SharedBase([kept]).abandon(link)
    assert not kept.filled and told == [(rank + 1) % ranks]


# ---- what gloo refuses -----------------------------------------------------------------------------------------------------


def laid(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """The numbers of ``rows`` in another layout."""
    if kind == "contiguous":
        return rows.clone()
    height, width = rows.shape
    there = rows.new_zeros(height, 2 * width)[:, ::2] if kind == "gaps" else rows.new_zeros(width, height).t()
    return there.copy_(rows)


LAYOUTS = ("contiguous", "transposed", "gaps")
ROWS, COLUMNS = 40, 500


def by_name(name: str, mine: torch.Tensor, kind: str, later: bool) -> torch.Tensor:
    """What an operation leaves of tensors in a layout, contiguous."""
    out = laid(kind, torch.zeros(2 * ROWS if "gather" in name else ROWS, COLUMNS))
    given = laid(kind, torch.cat([mine, mine]) if name == "reduce_scatter_tensor" else mine)
    outputs = list(out.chunk(2)) if name == "all_gather" else out
    wait(getattr(comm, name)(outputs, given, async_op=later, config=AUTO))
    return out.contiguous()


def every_layout(rank: int, ranks: int, name: str, later: bool) -> None:
    """Ranks come with layouts of their own to operations whose schedules change: gloo refuses some on one rank only."""
    for step in range(30):
        turn(plain=step % 2 == 1)
        both = [
            torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2 * step + peer)) for peer in range(2)
        ]
        kind = LAYOUTS[(step + step // 3 * rank) % 3]
        half = ROWS // 2
        wanted = {
            "all_to_all_single": torch.cat([one[half * rank :][:half] for one in both]),
            "reduce_scatter_tensor": both[0] + both[1],
        }.get(name, torch.cat(both))
        assert torch.equal(by_name(name, both[rank], kind, later), wanted), (step, kind)


def shapes_that_gloo_refuses(rank: int, ranks: int, later: bool) -> None:
    """gloo wants the shapes of a gather's input and output to fit, as those of MoE's gather_tokens do not. Ours want their sizes to."""
    for step in range(4):
        turn(plain=step % 2 == 0)
        mine = own(rank, step)
        whole = torch.empty(8, ranks * NUMEL // 8, dtype=torch.bfloat16)
        if not step:
            with pytest.raises(RuntimeError, match="invalid tensor size"):
                dist.all_gather_into_tensor(whole, mine)
        wait(comm.all_gather_into_tensor(whole, mine, async_op=later, config=AUTO))
        assert torch.equal(whole.view(-1)[rank * NUMEL :][:NUMEL], mine)


# ---- failures that pile up -------------------------------------------------------------------------------------------------


@runner.together(2)
def failures_do_not_pile_up(rank: int, ranks: int) -> None:
    """Frames are refused again and again: few exchanges are kept, and few bytes of frames are counted as in use."""
    group = dist.new_group(list(range(ranks)))
    before = POOL._used_bytes
    for _ in range(3 * pipeline.ABANDONED):
        ctx = OpContext("broadcast", group, CODED, "dp", "raw")
        pipeline.abandon(exchange_ := pipeline.Exchange(ctx, 0, control=True))
        exchange_.post_recv((rank + 1) % ranks, torch.empty(1 << 16))
        del exchange_
    gc.collect()
    held = (POOL._used_bytes - before) // (4 << 16)
    assert len(pipeline._abandoned) == pipeline.ABANDONED and held in (pipeline.ABANDONED, pipeline.ABANDONED + 1)


def test_a_lost_lease_is_not_counted_and_its_memory_not_used_again() -> None:
    pool = buffer_pool.POOL
    before, lease = pool._used_bytes, PooledBuffers()
    address = lease.take(1 << 20).data_ptr()
    assert pool._used_bytes > before
    del lease
    gc.collect()
    assert pool._used_bytes == before
    assert address not in [block.data_ptr() for block in pool._free]


# ---- handles ---------------------------------------------------------------------------------------------------------------


@runner.together(2)
def handles_have_all_that_torchs_have(rank: int, ranks: int) -> None:
    tensor = own(rank, 0)
    handle = comm.all_reduce(tensor, async_op=True, config=CODED)
    future = handle.get_future()
    assert future is handle.get_future()
    (result,) = future.wait()
    assert result is tensor and handle.is_success()
    assert handle.get_future().wait() == [tensor], "after the end too"
    handle.block_current_stream()
    with pytest.raises(RuntimeError, match="for receives"):
        handle.source_rank()
    receiving = comm.irecv(torch.empty_like(tensor), 1 - rank, config=CODED)
    sending = comm.isend(tensor, 1 - rank, config=CODED)
    with pytest.raises(RuntimeError, match="for collectives"):
        receiving.get_future()
    assert receiving.wait() and sending.wait() and receiving.source_rank() == 1 - rank


@runner.together(1)
def idle_threads_are_few(rank: int, ranks: int) -> None:
    gate = threading.Event()
    many = [operations.start("all_reduce", [], gate.wait) for _ in range(5 * operations.IDLE_THREADS)]
    threads = weakref.WeakSet(operations.threads._all)
    assert len(threads) >= len(many)
    gate.set()
    for one in many:
        one.wait()
    for thread in list(threads):
        if thread not in operations.threads._all:
            thread.join(5)
    assert len(operations.threads._idle) <= operations.IDLE_THREADS
    operations.start("all_reduce", [], lambda: None).wait()


HALF = 20_000
#: Operations in flight at a time.
MANY = 40


def filled(value: float, numel: int = HALF) -> torch.Tensor:
    return torch.full((numel,), value, dtype=torch.bfloat16)


def far_ahead_in_opposite_orders(rank: int, ranks: int, config: ZipcclConfig) -> None:
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    works = []
    for group in groups if rank else groups[::-1]:
        works += [comm.all_reduce(filled(1), group=group, async_op=True, config=config) for _ in range(MANY)]
    for work in works:
        work.wait()


def far_ahead_of_a_sender(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """Rank 1 starts with what rank 0 ends with."""
    tensor = torch.ones(1 << 20)
    if rank == 1:
        dist.send(tensor, 0)
    works = [comm.all_reduce(filled(1), async_op=True, config=config) for _ in range(MANY)]
    if rank == 0:
        dist.recv(tensor, 1)
    for work in works:
        work.wait()


def one_after_another(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """Rank 2 comes to the broadcast from rank 0 only when rank 1 is through it."""
    for _ in range(3):
        tensor = torch.ones(1 << 18)
        if rank == 2:
            dist.recv(tensor, 1)
        comm.broadcast(filled(1), 0, config=config)
        if rank == 1:
            dist.send(tensor, 2)


def uneven_list(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """What gloo's own all_to_all refuses works from the first call on."""
    for _ in range(3):
        sizes = [HALF + 100 * (rank + peer) for peer in range(ranks)]
        got = [filled(0, size) for size in sizes]
        comm.all_to_all(got, [filled(10 * rank + peer, size) for peer, size in enumerate(sizes)], config=config)
        assert [float(tensor[-1]) for tensor in got] == [10 * peer + rank for peer in range(ranks)]


def coalesced(rank: int, ranks: int, config: ZipcclConfig) -> None:
    """torch's coalescing manager sends calls at its end: there they pass, those of a group without an earlier call too, and later calls are
    coded again."""
    for _ in range(2):
        for later in (False, True):
            sums, whole, part = [filled(1), filled(2)], filled(0, ranks * HALF), filled(0, HALF // ranks)
            with dist._coalescing_manager(async_ops=later) as manager:
                for tensor in sums:
                    comm.all_reduce(tensor, async_op=later, config=config)
            with dist._coalescing_manager(async_ops=True) as gathers:
                comm.all_gather_into_tensor(whole, filled(rank + 1), config=config)
            with dist._coalescing_manager(async_ops=True) as scatters:
                comm.reduce_scatter_tensor(part, filled(3), config=config)
            for handle in (manager, gathers, scatters) if later else (gathers, scatters):
                handle.wait()
            assert [float(tensor[-1]) for tensor in (*sums, part)] == [ranks, 2 * ranks, 3 * ranks]
            assert [float(whole[one * HALF]) for one in range(ranks)] == [one + 1 for one in range(ranks)]
        rows = counters.rows()
        assert [set(row["reasons"]) for row in rows] == [{PassReason.COALESCED.value}] * 3
        comm.all_reduce(tensor := filled(1), config=CODED)
        assert float(tensor[0]) == ranks and sum(row["calls"] for row in counters.rows()) == 1
        counters.reset()


@runner.together(3)
def inputs_in_other_places(rank: int, ranks: int) -> None:
    """The input lies in the place of another rank's output."""
    places = [filled(-1) for _ in range(ranks)]
    comm.all_gather(places, places[(rank + 1) % ranks].fill_(rank + 1), config=CODED)
    assert [float(place[-1]) for place in places] == [peer + 1 for peer in range(ranks)]

    tensors = [filled(10 * rank + peer) for peer in range(ranks)]
    turned = [tensors[(peer + 1) % ranks] for peer in range(ranks)]
    comm.all_to_all(turned, tensors, config=CODED)
    assert [float(tensor[0]) for tensor in turned] == [10 * peer + rank for peer in range(ranks)]

    sizes = [[1, 1, 1], [1, 1, 0], [0, 2, 0]]  # from row to column, in place
    sent, got = [HALF * size for size in sizes[rank]], [HALF * row[rank] for row in sizes]
    memory = filled(-1, max(sum(sent), sum(got)))
    for peer, part in enumerate(memory[: sum(sent)].split(sent)):
        part.fill_(10 * rank + peer)
    comm.all_to_all_single(memory[: sum(got)], memory[: sum(sent)], got, sent, config=CODED)
    for peer, part in enumerate(memory[: sum(got)].split(got)):
        assert part.eq(10 * peer + rank).all()


def test_tags_repeat_in_whole_operations_and_have_ranges_of_their_own() -> None:
    last = TAGS_PER_RANGE // TAGS_PER_COLLECTIVE
    state = GroupState.__new__(GroupState)
    state._issued, state._issued_lock = itertools.count(last - 1), threading.Lock()
    tags = [state.next_tag() for _ in range(2)]
    assert tags == [TagRange.COLLECTIVE + (last - 1) * TAGS_PER_COLLECTIVE, TagRange.COLLECTIVE]
    assert tags[0] + TAGS_PER_COLLECTIVE <= TagRange.POINT_TO_POINT
    assert TagRange.SHADOW + TAGS_PER_RANGE <= TagRange.CALIBRATION < 1 << 31


@runner.together(2)
def versions_of_outputs(rank: int, ranks: int) -> None:
    """Autograd is told of as many writes as by torch's collectives: a program that runs with those runs with ours."""
    names = (
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "recv",
    )
    counted: list[dict[str, list[int]]] = []
    for api in (dist, Coded(CODED)):
        found = {}
        for name in names:
            given = arguments(filled(1), ranks).get(name, (filled(1), 0))
            outputs = given[0] if isinstance(given[0], list) else [given[0]]
            before = [tensor._version for tensor in outputs]
            api.send(filled(1), 1) if name == "recv" and rank == 0 else getattr(api, name)(*given)
            found[name] = [tensor._version - start for tensor, start in zip(outputs, before, strict=True)]
        counted.append(found)
    plain, ours = counted
    told = {name: (plain[name], ours[name]) for name in plain if ours[name] > plain[name]}
    assert not told, told


for config in (AUTO, CODED):
    for case in (far_ahead_in_opposite_orders, far_ahead_of_a_sender, uneven_list, coalesced):
        runner.together(2, config)(case)
    runner.together(3, config)(one_after_another)
for later in (False, True):
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor"):
        runner.together(2, name, later, full=later * "as at once")(every_layout)
    runner.together(2, later)(shapes_that_gloo_refuses)
for kind in ("in place", "device", "host"):
    runner.together(3, kind)(in_another_place)


test_programs = runner.programs(__name__)
