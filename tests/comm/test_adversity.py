"""Programs that went wrong once: bases of engines made anew, layouts that gloo refuses, handles, tags, failures that pile up."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import work
from ds_zipccl.comm.bases import shared
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host import buffer_pool, pipeline
from ds_zipccl.comm.host.buffer_pool import POOL, PooledBuffers
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import tuner_rules
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.table import render

AUTO = ZipcclConfig(enabled=True, min_bytes=0)
ALWAYS = replace(AUTO, mode="always")
NUMEL = 40_000


def own(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


# ---- bases -------------------------------------------------------------------------------------------------------------


def engines_in_turn(rank: int, ranks: int) -> list[str]:
    """Bases come and go with their engines while the choice of a schedule goes on."""
    tensor, ways = own(rank, 0), []
    for cycle in range(12):
        if rank == 0:
            extra = [object() for _ in range(cycle * 17)]  # heaps differ, as those of programs do
        kept = comm.allocate_bases([(NUMEL, torch.bfloat16)] * 4, "device", dist.group.WORLD)
        for one in kept:
            whole = torch.empty(ranks * NUMEL, dtype=torch.bfloat16)
            comm.all_gather_into_tensor(whole, tensor, config=AUTO, role="zero_param", base=comm.SharedBase([one]))
            assert torch.equal(whole[rank * NUMEL :][:NUMEL], tensor)
            ways.append(str(one.serial))
        del kept, one
        gc.collect()
        if rank == 0:
            del extra
    return ways


def test_engines_in_turn_choose_alike() -> None:
    first, second = runner.run(engines_in_turn, 2, timeout=60)
    assert first == second and len(set(first)) == len(first)


def one_address(rank: int, ranks: int) -> None:
    """The mistake of old, planted: one rank finds a new base where an old one was, the other does not."""
    seen = iter(range(1000))
    shared.SharedBase.token = lambda self: 7 if rank else next(seen)
    engines_in_turn(rank, ranks)


def test_tokens_that_differ_between_ranks_are_noticed() -> None:
    with pytest.raises(runner.RankFailure):
        runner.run(one_address, 2, timeout=15)


def in_another_place(rank: int, ranks: int, kind: str) -> None:
    """The input lies in another rank's place of the output, where the base is put first."""
    base = (
        comm.IN_PLACE
        if kind == "in place"
        else comm.SharedBase(comm.allocate_bases([(NUMEL, torch.bfloat16)], kind, dist.group.WORLD))
    )
    whole = torch.zeros(ranks * NUMEL, dtype=torch.bfloat16)
    for step in range(4):
        place = whole.chunk(ranks)[(rank + 1) % ranks]
        place.copy_(own(rank, step))
        wanted = torch.cat([own(peer, step) for peer in range(ranks)])
        comm.all_gather_into_tensor(whole, place, config=ALWAYS, base=base)
        assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16)), step


@pytest.mark.parametrize("kind", ["in place", "device", "host"])
def test_inputs_in_other_places_with_a_base(kind: str) -> None:
    runner.run(in_another_place, 3, kind)


def closed_to_one(rank: int, ranks: int) -> list[int]:
    """A rank that fails tells every mate, also where the connection to the first is closed."""
    (kept,) = comm.allocate_bases([(NUMEL, torch.bfloat16)], "host", dist.group.WORLD)
    told: list[int] = []

    class Deaf(pipeline.Exchange):
        def expect(self, peer: int, out: torch.Tensor) -> None:
            if peer == self._ctx.peers[0]:
                raise comm.CommError("closed")

        def send(self, flat: torch.Tensor, *peers: int, base: torch.Tensor | None = None) -> None:
            if peers[0] == self._ctx.peers[0]:
                raise comm.CommError("closed")
            told.extend(peers)

    shared.Exchange = Deaf
    kept.filled = True
    link = OpContext(
        "all_gather_into_tensor", dist.group.WORLD, ALWAYS, "dp", "cascade", torch.device("cpu"), with_base=True
    )
    comm.SharedBase([kept]).abandon(link)
    assert not kept.filled
    return told


def test_a_closed_connection_keeps_nobody_from_being_told() -> None:
    assert runner.run(closed_to_one, 3) == [[1], [2], [0]]


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
    if name == "all_to_all_single":
        handle = comm.all_to_all_single(out, laid(kind, mine), async_op=later, config=AUTO)
    elif name == "all_gather_into_tensor":
        handle = comm.all_gather_into_tensor(out, laid(kind, mine), async_op=later, config=AUTO)
    elif name == "all_gather":
        handle = comm.all_gather(list(out.chunk(2)), laid(kind, mine), async_op=later, config=AUTO)
    else:
        handle = comm.reduce_scatter_tensor(out, laid(kind, torch.cat([mine, mine])), async_op=later, config=AUTO)
    handle.wait() if later else None
    return out.contiguous()


def every_layout(rank: int, ranks: int, name: str, later: bool) -> None:
    """Ranks come with layouts of their own to operations whose schedules change: gloo refuses some on one rank only."""
    tuner_rules.CHECK_CALLS, tuner_rules.REVIEW_CHECKS, tuner_rules.DELAY_CALLS = (6, 6), (1, 2), (4, 8)
    for step in range(90):
        both = [
            torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2 * step + peer)) for peer in range(2)
        ]
        kind = "contiguous" if step < 30 else LAYOUTS[(step + step // 3 * rank) % 3]
        half = ROWS // 2
        wanted = {
            "all_to_all_single": torch.cat([one[half * rank :][:half] for one in both]),
            "reduce_scatter_tensor": both[0] + both[1],
        }.get(name, torch.cat(both))
        assert torch.equal(by_name(name, both[rank], kind, later), wanted), (step, kind)


@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("name", ["all_to_all_single", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor"])
def test_every_layout_on_every_rank(name: str, later: bool) -> None:
    runner.run(every_layout, 2, name, later, timeout=40)


def other_shapes(rank: int, ranks: int, later: bool) -> str:
    """gloo wants the shapes of a gather's input and output to fit, as those of MoE's gather_tokens do not. Ours want their sizes to."""
    counters.reset()
    for step in range(3 * tuner_rules.TRIAL_CALLS + tuner_rules.DELAY_CALLS[1] + 4):
        mine = own(rank, step)
        whole = torch.empty(8, ranks * NUMEL // 8, dtype=torch.bfloat16)
        if not step:
            with pytest.raises(RuntimeError, match="invalid tensor size"):
                dist.all_gather_into_tensor(whole, mine)
        handle = comm.all_gather_into_tensor(whole, mine, async_op=later, config=AUTO)
        handle.wait() if later else None
        assert torch.equal(whole.view(-1)[rank * NUMEL :][:NUMEL], mine)
    return render()


@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
def test_shapes_that_gloo_refuses(later: bool) -> None:
    for table in runner.run(other_shapes, 2, later):
        assert "(plain " in table, "it competes all the same"


# ---- failures that pile up -------------------------------------------------------------------------------------------------


def failing(rank: int, ranks: int) -> tuple[int, int]:
    """Frames are refused again and again: how many exchanges are kept, and bytes of frames counted as in use."""
    group = dist.new_group(list(range(ranks)))
    before = POOL._used_bytes
    for _ in range(3 * pipeline.ABANDONED):
        ctx = OpContext("broadcast", group, ALWAYS, "dp", "raw", torch.device("cpu"))
        pipeline.abandon(exchange_ := pipeline.Exchange(ctx, 0, True))
        exchange_.post_recv((rank + 1) % ranks, torch.empty(1 << 16))
        del exchange_
    gc.collect()
    return len(pipeline._abandoned), (POOL._used_bytes - before) // (4 << 16)


def test_failures_do_not_pile_up() -> None:
    for kept, held in runner.run(failing, 2):
        assert kept == pipeline.ABANDONED and held in (pipeline.ABANDONED, pipeline.ABANDONED + 1)


def test_a_lost_lease_is_not_counted_and_its_memory_not_used_again() -> None:
    pool = buffer_pool.POOL
    before, lease = pool._used_bytes, PooledBuffers()
    address = lease.take(1 << 20).data_ptr()
    assert pool._used_bytes > before
    del lease
    gc.collect()
    assert pool._used_bytes == before
    assert address not in [block.data_ptr() for block in pool._free]


def test_choices_of_groups_that_come_and_go_are_bounded() -> None:
    counters.reset()
    for number in range(counters.CHOICES + 5):
        counters.record_choice("dp", "all_reduce", f"group {number}", "plain from call 26 on")
    counters.record_choice("dp", "all_reduce", "group 7", "cascade from call 90 on")
    (row,) = counters.rows()
    assert len(row["choices"]) == counters.CHOICES and row["more_choices"] == 5 and "group 4" not in row["choices"]
    assert row["choices"]["group 7"] == ("cascade from call 90 on", 2)
    assert "dp all_reduce: and 5 kinds of messages before these" in render()


# ---- handles ---------------------------------------------------------------------------------------------------------------


def handles(rank: int, ranks: int) -> None:
    tensor = own(rank, 0)
    handle = comm.all_reduce(tensor, async_op=True, config=ALWAYS)
    future = handle.get_future()
    assert future is handle.get_future()
    (result,) = future.wait()
    assert result is tensor and handle.is_success()
    assert handle.get_future().wait() == [tensor], "after the end too"
    handle.block_current_stream()
    with pytest.raises(RuntimeError, match="for receives"):
        handle.source_rank()
    receiving = comm.irecv(torch.empty_like(tensor), 1 - rank, config=ALWAYS)
    sending = comm.isend(tensor, 1 - rank, config=ALWAYS)
    with pytest.raises(RuntimeError, match="for collectives"):
        receiving.get_future()
    assert receiving.wait() and sending.wait() and receiving.source_rank() == 1 - rank
    with pytest.raises(ValueError, match="tag must be below 1073741824, got 1073741825"):
        comm.isend(tensor, 1 - rank, tag=(1 << 30) + 1, config=ALWAYS)


def test_handles_have_all_that_torchs_have() -> None:
    runner.run(handles, 2)


def test_a_future_has_the_error() -> None:
    def fail() -> None:
        raise comm.CommError("broken")

    handle = work.start("all_reduce", [], fail)
    with pytest.raises(RuntimeError, match="broken"):
        handle.get_future().wait()


def test_idle_threads_are_few() -> None:
    runner.run(many_threads, 1)


def many_threads(rank: int, ranks: int) -> None:
    gate = threading.Event()
    many = [work.start("all_reduce", [], gate.wait) for _ in range(5 * work.IDLE_THREADS)]
    threads = weakref.WeakSet(work._threads._all)
    assert len(threads) >= len(many)
    gate.set()
    for one in many:
        one.wait()
    for thread in list(threads):
        if thread not in work._threads._all:
            thread.join(5)
    assert len(work._threads._idle) <= work.IDLE_THREADS
    work.start("all_reduce", [], lambda: None).wait()
