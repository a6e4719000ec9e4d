"""A rank of the tests of NCCL (test_nccl.py): runs checks one after another and tells after each how far it is.

    python tests/gpu/nccl_rank.py PROGRAM RANK RANKS STORE REPORT

On a GPU all ranks use the same one. A dry run has groups in stream order on CPUs (benchmarks/links/slots.py) and the emulated kernels.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import figures
import levels
import moves
import sums
import torch
import torch.distributed as dist
import where

from ds_zipccl import comm
from ds_zipccl.comm.device import choice
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

#: Seconds after which a collective is an error; the launcher's limit comes first where a rank has died.
COLLECTIVE_SECONDS = 40
SETTINGS: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0, "reduction": "fp32"}
#: Elements of the tensors of the suite, up to several blocks of a frame.
SUITE_SIZES = (0, 7, 1025) if where.DRY else moves.SIZES
#: Seconds that both suites may take in NCCL's kernels of two ranks, and these kernels for each size; all-reduces that the probe times.
SUITE_SECONDS, SUITE_KERNELS, TINY_CALLS = 15.0, 100, 20
CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, **SETTINGS)
#: Waits of the host in a call at most; one where the table has nothing. A sum for all ranks, or for several owners, is a sum and a gather;
#: ranks compare their owners first.
HOST_WAITS = {"all_reduce": 2, "all_reduce_coalesced": 2, "reduce_to_owners": 3}


class Rank:
    """A rank and its data, which every other rank can compute. ``report``: the file that the launcher watches."""

    def __init__(self, rank: int, ranks: int, report: Path) -> None:
        self.rank, self.ranks, self.device, self._report = rank, ranks, where.HERE.device, report
        self.figures: dict[str, Any] = {}

    def alive(self) -> None:
        """A sign of life, in a check that takes long."""
        self._report.touch()

    def words(self, numel: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The words of a rank; fewer in a dry run."""
        return self.exactly(where.HERE.size(numel), rank, seed, dtype)

    def exactly(self, numel: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """As many words of a rank."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(numel, generator=generator).to(dtype).to(self.device)

    def everybodys(self, numel: int, seed: int = 0) -> list[torch.Tensor]:
        return [self.words(numel, rank, seed) for rank in range(self.ranks)]

    def finish(self) -> None:
        where.HERE.finish(COLLECTIVE_SECONDS)


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits."""
    assert got.dtype == wanted.dtype and got.numel() == wanted.numel(), (got.shape, wanted.shape)
    left, right = got.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(left, right), f"{int((left != right).sum())} bytes of {left.numel()} differ"


@contextlib.contextmanager
def counted(it: Rank, *ops: str) -> Iterator[None]:
    """Calls of the context are coded, with as many waits of the host as they may have. In a group of one, and without a schedule, they
    pass."""
    counters.reset()
    yield
    rows = {row["op"]: row for row in counters.rows()}
    assert set(rows) == set(ops), f"called: {sorted(rows)}"
    for op, row in rows.items():
        if it.ranks == 1 or not OPS[op].on_device:
            assert row["passed"] and not row["calls"] and not row["host_waits"], row
            continue
        assert row["calls"] and not row["passed"], f"{op} passed: {row['reasons']}"
        assert row["host_waits"] <= HOST_WAITS.get(op, 1) * row["calls"], row
        told = it.figures.setdefault("coded", {}).setdefault(op, {"calls": 0, "host_waits": 0})
        for key in ("calls", "host_waits"):
            told[key] += row[key]
        told["ratio"] = round(row["ratio"], 3)


def summed(it: Rank, contributions: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The sum wanted of our call: in fp32 in the order of ranks, rounded once; of a call that passes: NCCL's own."""
    if it.ranks > 1 and OPS[op].on_device:
        return levels.in_one_level(contributions)
    own = contributions[it.rank].clone()
    dist.all_reduce(own)
    return own


def gathers(it: Rank) -> None:
    """1, 4 and 16 MiB of bf16 a rank, blocking and not; in place; lists; several tensors; every dtype."""
    for mib in (1, 4, 16):
        shards = it.everybodys(mib << 19, seed=mib)
        own, wanted = shards[it.rank], torch.cat(shards)
        whole = own.new_empty(wanted.shape)
        dist.all_gather_into_tensor(whole, own)  # connections are made
        it.finish()
        with counted(it, "all_gather_into_tensor"):
            for name in ("first", "again"):
                whole.zero_()
                start = time.monotonic()
                comm.all_gather_into_tensor(whole, own, config=CODED)
                it.finish()
                it.figures[f"gather_{mib}_mib_{name}_ms"] = round(1e3 * (time.monotonic() - start), 2)
                equal(whole, wanted)
            handle = comm.all_gather_into_tensor(whole.zero_(), own, None, True, config=CODED)
            handle.wait()
            equal(whole, wanted)
            place = whole.zero_().chunk(it.ranks)[it.rank].copy_(own)
            comm.all_gather_into_tensor(whole, place, config=CODED)
            equal(whole, wanted)
    for dtype in (torch.float16, torch.float32):
        shards = [it.words(70_001, rank, 3, dtype) for rank in range(it.ranks)]
        outputs = [torch.empty_like(shard) for shard in shards]
        with counted(it, "all_gather", "all_gather_coalesced"):
            comm.all_gather(outputs, shards[it.rank], config=CODED)
            equal(torch.cat(outputs), torch.cat(shards))
            wholes = [torch.empty_like(torch.cat(shards)) for _ in range(3)]
            comm.all_gather_coalesced(wholes, [shards[it.rank]] * 3, config=CODED)
        for one in wholes:
            equal(one, torch.cat(shards))


def exchanges(it: Rank) -> None:
    """Equal segments; segments that differ for each pair of ranks, some of them empty."""
    part = where.HERE.size(200_001)
    matrix = [it.exactly(it.ranks * part, rank, 6) for rank in range(it.ranks)]
    swapped = torch.empty_like(matrix[it.rank])
    with counted(it, "all_to_all_single"):
        comm.all_to_all_single(swapped, matrix[it.rank], config=CODED)
        equal(swapped, torch.cat([words[part * it.rank :][:part] for words in matrix]))

        def size(sender: int, receiver: int) -> int:
            return 0 if (sender + receiver) % 3 == 2 else part - 7 * sender - 13 * receiver

        sent = [size(it.rank, peer) for peer in range(it.ranks)]
        got = [size(peer, it.rank) for peer in range(it.ranks)]
        before = [sum(size(peer, to) for to in range(it.rank)) for peer in range(it.ranks)]
        output = matrix[0].new_zeros(sum(got))
        handle = comm.all_to_all_single(output, matrix[it.rank][: sum(sent)], got, sent, None, True, config=CODED)
        handle.wait()
    equal(output, torch.cat([words[at:][:numel] for words, at, numel in zip(matrix, before, got)]))


def reductions(it: Rank) -> None:
    """NCCL alone: small whole numbers, whose sums are exact in any order; all_reduce with MAX of int64; asynchronous ones."""
    shard = where.HERE.size(1 << 18)
    values = torch.arange(shard * it.ranks, device=it.device) % 64
    mine = (values + it.rank).float().bfloat16()
    out = mine.new_empty(shard)
    dist.reduce_scatter_tensor(out, mine)
    wanted = it.ranks * values + sum(range(it.ranks))
    equal(out, wanted[shard * it.rank :][:shard].float().bfloat16())
    most = torch.tensor([(it.rank * 37 + 11) % 29, -(1 << 40) - it.rank, 1 << 40], dtype=torch.int64, device=it.device)
    everybody = [[(rank * 37 + 11) % 29, -(1 << 40) - rank, 1 << 40] for rank in range(it.ranks)]
    work = dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert most.tolist() == [max(column) for column in zip(*everybody)]
    it.finish()
    assert work.is_completed()
    times = []
    for _ in range(TINY_CALLS):
        start = time.monotonic()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        it.finish()
        times.append(time.monotonic() - start)
    it.figures["tiny_ms"] = round(1e3 * statistics.median(times), 3)


def additions(it: Rank) -> None:
    """Sums of numbers whose rounding depends on the order; with two ranks they have NCCL's bits."""
    part = where.HERE.size(1 << 19)
    for dtype in (torch.bfloat16, torch.float32):
        everybody = [it.exactly(it.ranks * part, rank, 9, dtype) for rank in range(it.ranks)]
        own, mine = everybody[it.rank], slice(part * it.rank, part * (it.rank + 1))
        plain = own.clone()
        dist.all_reduce(plain)
        with counted(it, "reduce_scatter_tensor", "all_reduce", "reduce_to_owners"):
            out = own.new_zeros(part)
            comm.reduce_scatter_tensor(out, own, config=CODED)
            equal(out, summed(it, everybody, "reduce_scatter_tensor")[mine])
            whole = own.clone()
            handle = comm.all_reduce(whole, dist.ReduceOp.SUM, None, True, config=CODED)
            handle.wait()
            equal(whole, summed(it, everybody, "all_reduce"))
            sliced, cut = own.clone(), part // 3
            owners = [(cut, {0}), (own.numel() - 2 * cut, {it.ranks - 1}), (cut, set(range(it.ranks)))]
            comm.reduce_to_owners(sliced, owners, config=CODED)
        wanted, end = summed(it, everybody, "reduce_to_owners"), own.numel()
        spans = (
            [slice(0, cut)] * (it.rank == 0)
            + [slice(cut, end - cut)] * (it.rank == it.ranks - 1)
            + [slice(end - cut, end)]
        )
        for span in spans:
            equal(sliced[span], wanted[span])
        if it.ranks <= 2:
            equal(whole, plain)
            equal(out, plain[mine])


def two_levels(it: Rank) -> None:
    """Two nodes of two ranks, pretended: NCCL adds inside a node, without rounding here, and frames go between the nodes. Gathers enter
    each node once."""
    nodes, numel = levels.nodes_of(2, 2), where.HERE.size(300_001)
    levels.pretend(nodes)
    integers = [it.words(300_001, rank, 11).float().mul_(2).round_() for rank in range(it.ranks)]
    everybody = [(words * 2.0 ** (9 * (rank // 2))).bfloat16() for rank, words in enumerate(integers)]
    whole = everybody[it.rank].clone()
    with counted(it, "all_reduce"):
        comm.all_reduce(whole, config=CODED)
    if OPS["all_reduce"].on_device:
        equal(whole, levels.in_two_levels(everybody, nodes))
    assert whole.numel() == numel
    cost_model.levels_from = lambda topology, profile: 0.0
    everyone = dist.new_group(range(it.ranks))  # a group decides once
    for codec in ("cascade", "raw"):
        gathered = whole.new_zeros(it.ranks * whole.numel())
        with counted(it, "all_gather_into_tensor"):
            config = replace(CODED, codec=codec)
            comm.all_gather_into_tensor(gathered, everybody[it.rank], everyone, config=config)
        equal(gathered, torch.cat(everybody))


def subgroups(it: Rank) -> None:
    """Groups of two ranks, made, used and destroyed."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, it.ranks, 2)]
    pair, first = pairs[it.rank // 2], it.rank // 2 * 2
    shards = it.everybodys(150_001, seed=12)
    whole = shards[0].new_zeros(2 * shards[0].numel())
    with counted(it, "all_gather_into_tensor"):
        comm.all_gather_into_tensor(whole, shards[it.rank], pair, config=CODED)
    equal(whole, torch.cat(shards[first : first + 2]))
    it.finish()
    dist.destroy_process_group(pair)
    again = dist.new_group(list(range(it.ranks)))
    whole = shards[0].new_zeros(it.ranks * shards[0].numel())
    comm.all_gather_into_tensor(whole, shards[it.rank], again, config=CODED)
    equal(whole, torch.cat(shards))
    it.finish()
    dist.destroy_process_group(again)


def first_steps(it: Rank) -> None:
    """With nccl auto: plain results in the first steps, coded copies compared with them, and a switch as all words are right."""
    levels.pretend(levels.nodes_of(it.ranks, 1))
    config = replace(CODED, nccl="auto")
    settled = choice.settle(config, it.device)
    assert settled is not None and settled.compared
    shards, coded = it.everybodys(300_001, seed=21), []
    sent = torch.cat(shards)
    for _ in range(6):
        counters.reset()
        whole, got = torch.zeros_like(sent), torch.zeros_like(sent)
        comm.all_gather_into_tensor(whole, shards[it.rank], config=config, role="zero_param")
        comm.all_to_all_single(got, sent, config=config, role="ep", async_op=True).wait()
        equal(whole, sent)
        equal(got, shards[it.rank].repeat(it.ranks))
        choice.end_step(it)
        coded.append(sum(row["calls"] for row in counters.rows()))
    it.figures["first_steps"] = coded
    assert coded == [0, 0, 0, 0, 2, 2], coded


def by_node(it: Rank) -> None:
    """Gathers that copy from the GPUs of pretended nodes of two ranks: alone, and beside a parameter that is sent."""
    numel = where.HERE.size(300_001)
    parameters = [Agreed(name, numel) for name in ("frozen", "trained")]
    slots = comm.allocate_bases([(numel, torch.bfloat16)] * 2, "node", dist.group.WORLD, it.device)
    for one, base in zip(parameters, slots, strict=True):
        one.hold(base)
    for number, some in enumerate((parameters, parameters[:1], parameters, parameters[:1], parameters)):
        seeds = [30, 31 + number // 2][: len(some)]
        own = torch.cat([it.words(numel, it.rank, seed) for seed in seeds])
        whole = own.new_zeros(it.ranks * own.numel())
        comm.all_gather_into_tensor(whole, own, parameters=some, config=CODED)
        equal(whole, torch.cat([it.words(numel, rank, seed) for rank in range(it.ranks) for seed in seeds]))
        if number % 2:
            parameters[1].forget()
    it.finish()
    for base in slots:
        base.free()


def timeline(it: Rank) -> None:
    """What the device does in a plain gather, in a coded one, and in one that copies a base in host memory, of 8 MiB a rank: name, stream,
    begin and duration in microseconds; and the median of the host's microseconds."""
    own = it.words(where.HERE.size(4 << 20), it.rank, 22)
    whole = own.new_empty(it.ranks * own.numel())
    frozen = Agreed("frozen", own.numel())
    (base,) = comm.allocate_bases([(own.numel(), own.dtype)], "host", dist.group.WORLD, it.device)
    frozen.hold(base)
    copied = partial(comm.all_gather_into_tensor, parameters=[frozen], config=CODED)
    for name, call in (("plain", dist.all_gather_into_tensor), ("coded", _ours), ("copied", copied)):
        times = []
        for _ in range(12):  # a base is filled, then copied
            start = time.perf_counter()
            call(whole, own)
            times.append(time.perf_counter() - start)
            it.finish()
        it.figures[f"host_us_{name}"] = round(1e6 * statistics.median(times))
        with torch.profiler.profile() as seen:
            call(whole, own)
            it.finish()
        equal(whole, torch.cat([it.words(own.numel(), rank, 22) for rank in range(it.ranks)]))
        work = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        work.sort(key=lambda e: e.time_range.start)
        spans = [(e, e.time_range) for e in work]
        it.figures[f"timeline_{name}"] = [
            (e.name[:60], e.device_resource_id, round(span.start - spans[0][1].start), round(span.elapsed_us()))
            for e, span in spans
        ]


def pairs(it: Rank) -> None:
    """Host microseconds of an exchange of each rank with one other rank: an all-to-all in which others have nothing for each other, for
    which NCCL still has a message each, and messages of the pair alone, as a batch of the same communicator. gloo has no such
    all-to-all."""
    if where.DRY:
        return
    peer, numel = it.rank ^ 1, 1 << 16
    sent, got = it.words(numel, it.rank, 23), it.words(numel, it.rank, 24)
    nothing = got[:0]
    there = [got if rank == peer else nothing for rank in range(it.ranks)]
    given = [sent if rank == peer else nothing for rank in range(it.ranks)]
    batch = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all(there, given),
        "batch": lambda: [work.wait() for work in dist.batch_isend_irecv(batch)],
    }
    for name, call in calls.items():
        got.zero_()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
            it.finish()
        equal(got, it.words(numel, peer, 23))
        it.figures[f"pair_{name}_host_us"] = round(statistics.median(times), 1)


def streams(it: Rank) -> None:
    """A call without async_op stays in the order of the current stream, and does not wait for other streams."""
    mine, other = where.HERE.streams(2)
    values = torch.zeros(1 << 16, device=it.device)
    whole = values.new_zeros(it.ranks * values.numel())
    dist.all_gather_into_tensor(whole, values)  # connections are made
    # A kernel that the driver loads at its first launch waits for every stream: on an H200 the first addition did.
    equal(whole + 1, torch.full_like(whole, 1))
    it.finish()
    on_gpu = not where.DRY
    with where.HERE.on(other):
        if on_gpu:
            torch.cuda._sleep(3_000_000_000)
            busy = torch.cuda.Event()
            busy.record()
    with where.HERE.on(mine):
        if on_gpu:
            torch.cuda._sleep(200_000_000)
        values.fill_(3)
        dist.all_gather_into_tensor(whole, values)
        after = whole + 1
        it.finish()
        it.figures["waits_for_other_streams"] = bool(on_gpu and busy.query())
        equal(after, torch.full_like(after, 4))
    with where.HERE.on(mine):
        values.fill_(5)
        dist.all_gather_into_tensor(whole, values, async_op=True).wait()
        after = whole + 1
        it.finish()
        equal(after, torch.full_like(after, 6))
    assert not it.figures["waits_for_other_streams"], "a collective waited for another stream"


def captures(it: Rank) -> None:
    """A graph with a collective, and with our call, which passes."""
    for name, call in (("plain", dist.all_gather_into_tensor), ("ours", _ours)):
        values = torch.zeros(1 << 14, device=it.device)
        whole = values.new_zeros(it.ranks * values.numel())
        call(whole, values)
        it.finish()
        counters.reset()
        replay = where.HERE.captured(lambda call=call, whole=whole, values=values: call(whole, values))
        reasons = [reason for row in counters.rows() for reason in row["reasons"]]
        assert where.DRY or it.ranks == 1 or name == "plain" or reasons == [PassReason.CAPTURED.value], reasons
        for turn in range(3):
            values.fill_(turn + it.rank)
            whole.zero_()
            replay()
            it.finish()
            equal(whole, (turn + torch.arange(it.ranks, device=it.device)).float().repeat_interleave(values.numel()))
        it.figures[f"captured_{name}"] = True


def _ours(whole: torch.Tensor, values: torch.Tensor) -> None:
    comm.all_gather_into_tensor(whole, values, config=CODED)


def suite_sizes(ranks: int) -> tuple[int, ...]:
    """The sizes for which there is time: without MPS ranks take turns on the GPU, and a kernel that waits for a rank wastes its turn.

    Every rank reads the same time of the smallest collective, which the probe told. The largest sizes are kept, two at least.
    """
    size_ms = (figures.told("tiny_ms") or 0.0) * SUITE_KERNELS * ranks / 2
    fit = int(1e3 * SUITE_SECONDS / size_ms) if size_ms else len(SUITE_SIZES)
    return SUITE_SIZES[-max(2, min(len(SUITE_SIZES), fit)) :]


def move_suite(it: Rank) -> None:
    """All ways to call the operations that move bits, in every dtype, with every kind of words."""
    api = moves.coded(**SETTINGS)
    calls = [move for ways in ("all_gather", "all_to_all") if OPS[ways].on_device for move in moves.MOVES[ways]]
    counters.reset()
    for seed, (move, size) in enumerate((move, size) for size in suite_sizes(it.ranks) for move in calls):
        it.alive()
        kind = list(corpus.SUMMED.values())[seed % 3]
        inputs = [moves.filled(peer, size, kind, seed).to(it.device) for peer in range(it.ranks)]
        for later in (False, True):
            outputs, wanted = move(api, inputs, it.rank, later)
            for got, want in zip(outputs, wanted, strict=True):
                corpus.assert_same_bits(got.cpu(), want.cpu())
    it.figures["moves"] = sum(row["calls"] for row in counters.rows())
    assert it.figures["moves"] and not any(row["passed"] for row in counters.rows()), counters.rows()


def sum_suite(it: Rank) -> None:
    """All ways to call the operations that add, in every dtype, with NaNs, infinities and denormals."""
    if not OPS["all_reduce"].on_device:
        return
    api = sums.coded(**SETTINGS)
    calls = (*sums.SUMS["all_reduce"], *sums.SUMS["reduce_scatter"])
    counters.reset()
    sizes = [size for size in suite_sizes(it.ranks) if size >= it.ranks]
    for seed, (add, size) in enumerate((add, size) for size in sizes for add in calls):
        it.alive()
        kind = list(corpus.SUMMED.values())[seed % 3]
        average = seed % 5 == 0
        for fill in (sums.bell, sums.wild):
            contributions = [fill(peer, size, kind, seed) for peer in range(it.ranks)]
            total = levels.in_one_level(contributions, average)
            want = add(levels.Summed(), total, None, False)
            with torch.device(it.device):
                op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
                got = add(api, contributions[it.rank].to(it.device), op, bool(seed % 2))
            end = size // 3 * 3 if add is sums.all_reduce_by_memory else size  # which leaves words alone
            sums.assert_same_sums(got.cpu()[:end], want[:end], kind)
    it.figures["sums"] = sum(row["calls"] for row in counters.rows())
    assert it.figures["sums"] and not any(row["passed"] for row in counters.rows()), counters.rows()


Check = Callable[[Rank], None]
SHARED: tuple[Check, ...] = (gathers, exchanges, additions, subgroups, move_suite, sum_suite, captures, first_steps)
PROGRAMS: dict[str, tuple[Check, ...]] = {
    "probe": (reductions,),
    "one_rank": (gathers, exchanges, reductions, additions, streams, captures),
    "shared_gpu_2": (*SHARED, timeline),
    "shared_gpu_4": (*SHARED, two_levels, by_node, pairs),  # the nodes of two_levels stay
}


def main(program: str, rank: int, ranks: int, store: str, report: Path) -> int:
    """Run the checks of a program; the report has what was done, in seconds, and what went wrong."""
    told: dict[str, Any] = {"begun": "process group", "done": {}, "figures": {}}
    figures.write(report, told)
    try:
        if where.DRY:
            from ds_zipccl.benchmarks.links import slots

            slots.install()
        it, options = Rank(rank, ranks, report), {}
        if it.device.type == "cuda":
            torch.cuda.set_device(0)
            options["device_id"] = torch.device("cuda", 0)  # as DeepSpeed does: the communicator is made at once
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        meeting = dist.FileStore(store, ranks)
        dist.init_process_group(
            where.HERE.backend, store=meeting, rank=rank, world_size=ranks, timeout=limit, **options
        )
        for check in PROGRAMS[program]:
            told["begun"] = check.__name__
            figures.write(report, told)
            start = time.monotonic()
            check(it)
            it.finish()
            told["done"][check.__name__] = round(time.monotonic() - start, 2)
            told["figures"] = it.figures
            figures.write(report, told)
        told["begun"] = "end"
        meeting.set(f"end of {rank}", "")
        meeting.wait([f"end of {peer}" for peer in range(ranks)], limit)
    except BaseException:
        told["error"] = traceback.format_exc()
        print(told["error"], file=sys.stderr, flush=True)
    figures.write(report, told)
    # Not the usual end: a communicator whose peer has failed could keep it waiting.
    sys.stdout.flush()
    os._exit(1 if "error" in told else 0)


if __name__ == "__main__":
    name, number, count, place, told_at = sys.argv[1:]
    main(name, int(number), int(count), place, Path(told_at))
