"""A rank of the tests of NCCL (test_nccl.py): runs checks one after another and tells after each how far it is.

    python tests/gpu/nccl_rank.py PROGRAM RANK RANKS STORE REPORT

On a GPU all ranks use the same one. A dry run has gloo and the emulated kernels.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import figures
import torch
import torch.distributed as dist
import where

from ds_zipccl import comm
from ds_zipccl.codecs import compress_bound
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda import new_status, raise_failure
from ds_zipccl.telemetry import counters

#: Seconds after which a collective is an error; the launcher's limit comes first where a rank has died.
COLLECTIVE_SECONDS = 40
CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
#: Slots of frames are multiples of this, so that NCCL copies whole vectors.
ALIGN = 512


class Rank:
    """A rank and its data, which every other rank can compute."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.device = rank, ranks, where.HERE.device
        self.figures: dict[str, Any] = {}

    def words(self, numel: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The words of a rank."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(where.HERE.size(numel), generator=generator).to(dtype).to(self.device)

    def everybodys(self, numel: int, seed: int = 0) -> list[torch.Tensor]:
        return [self.words(numel, rank, seed) for rank in range(self.ranks)]

    def finish(self) -> None:
        where.HERE.finish(COLLECTIVE_SECONDS)


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits."""
    assert got.dtype == wanted.dtype and got.numel() == wanted.numel(), (got.shape, wanted.shape)
    left, right = got.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(left, right), f"{int((left != right).sum())} bytes of {left.numel()} differ"


def gathers(it: Rank) -> None:
    """1, 4 and 16 MiB of bf16 a rank; then in place, with bytes."""
    for mib in (1, 4, 16):
        shards = it.everybodys(mib << 19, seed=mib)
        own = shards[it.rank]
        whole = own.new_empty(it.ranks * own.numel())
        start = time.monotonic()
        dist.all_gather_into_tensor(whole, own)
        it.finish()
        it.figures[f"all_gather_{mib}_mib_ms"] = round(1e3 * (time.monotonic() - start), 2)
        equal(whole, torch.cat(shards))
    slab = torch.zeros(it.ranks * 4096, dtype=torch.uint8, device=it.device)
    slots = slab.split(4096)
    slots[it.rank].fill_(it.rank + 1)
    dist.all_gather_into_tensor(slab, slots[it.rank])
    equal(slab, torch.arange(1, it.ranks + 1, dtype=torch.uint8, device=it.device).repeat_interleave(4096))


def exchanges(it: Rank) -> None:
    """all_to_all of views at odd places of a slab; sizes differ for each pair, some are zero."""

    def size(sender: int, receiver: int) -> int:
        return 0 if (sender + receiver) % 3 == 2 else 100_001 + 7 * sender + 13 * receiver

    sent = torch.arange(300_000 * it.ranks, device=it.device).to(torch.uint8) + it.rank
    got = torch.zeros_like(sent)
    inputs = [sent[300_000 * peer + 1 :][: size(it.rank, peer)] for peer in range(it.ranks)]
    outputs = [got[300_000 * peer + 3 :][: size(peer, it.rank)] for peer in range(it.ranks)]
    all_to_all(outputs, inputs)
    it.finish()
    for peer, output in enumerate(outputs):
        theirs = torch.arange(300_000 * it.ranks, device=it.device).to(torch.uint8) + peer
        equal(output, theirs[300_000 * it.rank + 1 :][: size(peer, it.rank)])
    assert int((got != 0).sum()) <= sum(output.numel() for output in outputs), "bytes outside the views were written"


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """``dist.all_to_all``; gloo has none for lists, and a dry run sends and receives."""
    if where.HERE.backend != "gloo":
        dist.all_to_all(outputs, inputs)
        return
    rank, waiting = dist.get_rank(), []
    outputs[rank].copy_(inputs[rank])
    for peer in set(range(len(inputs))) - {rank}:
        waiting += [dist.isend(inputs[peer], peer)] if inputs[peer].numel() else []
        waiting += [dist.irecv(outputs[peer], peer)] if outputs[peer].numel() else []
    for work in waiting:
        work.wait()


def reductions(it: Rank) -> None:
    """reduce_scatter of small whole numbers, whose sums are exact in any order; all_reduce with MAX of int64; asynchronous ones."""
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


def passes(it: Rank) -> None:
    """Our calls on this group give what the plain ones give."""
    shards = it.everybodys(300_001, seed=5)
    own = shards[it.rank]
    whole = own.new_empty(it.ranks * own.numel())
    comm.all_gather_into_tensor(whole, own, config=CODED)
    equal(whole, torch.cat(shards))
    handle = comm.all_gather_into_tensor(whole.zero_(), own, None, True, config=CODED)
    handle.wait()
    equal(whole, torch.cat(shards))
    matrix = it.everybodys(it.ranks * 1000, seed=6)
    part = matrix[0].numel() // it.ranks
    matrix = [words[: part * it.ranks] for words in matrix]
    swapped = torch.empty_like(matrix[it.rank])
    comm.all_to_all_single(swapped, matrix[it.rank], config=CODED)
    equal(swapped, torch.cat([words[part * it.rank :][:part] for words in matrix]))
    for ours, plain in ((comm.all_reduce, dist.all_reduce), (comm.broadcast, lambda tensor: dist.broadcast(tensor, 0))):
        got, wanted = matrix[it.rank].clone(), matrix[it.rank].clone()
        ours(got, config=CODED) if ours is comm.all_reduce else comm.broadcast(got, 0, config=CODED)
        plain(wanted)
        equal(got, wanted) if it.ranks < 3 or ours is comm.broadcast else None
    got, wanted = matrix[0].new_empty(part), matrix[0].new_empty(part)
    comm.reduce_scatter_tensor(got, matrix[it.rank], config=CODED)
    dist.reduce_scatter_tensor(wanted, matrix[it.rank])
    equal(got, wanted) if it.ranks < 3 else None
    it.figures["passed"] = {row["op"]: row["passed"] for row in counters.rows()}


def coded_gather(it: Rank) -> None:
    """The schedule of coded gathers: sizes are agreed, frames lie in equal slots, NCCL gathers the slots in place."""
    route = where.HERE.route("native")
    shards = it.everybodys(4 << 19, seed=8)
    own = shards[it.rank]
    for turn in ("first", "again"):
        start = time.monotonic()
        header = torch.zeros(32, dtype=torch.uint8, device=it.device)
        route.encode_frames([own], "cascade", 1024, [header])  # a slot without room: the header has the size
        size = header[24:32].view(torch.int64).clone()
        dist.all_reduce(size, dist.ReduceOp.MAX)
        room = -(-int(size.item()) // ALIGN) * ALIGN
        slab = torch.zeros(it.ranks * room, dtype=torch.uint8, device=it.device)
        slots = list(slab.split(room))
        route.encode_frames([own], "cascade", 1024, [slots[it.rank]])
        dist.all_gather_into_tensor(slab, slots[it.rank])
        outs, status = [torch.empty_like(own) for _ in shards], new_status(it.device)
        route.decode_frames(slots, 1024, outs, status)
        raise_failure(status)
        it.figures[f"coded_gather_{turn}_ms"] = round(1e3 * (time.monotonic() - start), 2)
    for out, shard in zip(outs, shards, strict=True):
        equal(out, shard)
    it.figures["coded_gather_ratio"] = round(own.nbytes / room, 3)


def coded_sum(it: Rank) -> None:
    """The schedule of sums: every rank sends each other rank its frame, and adds the frames that it gets in fp32 in the order of ranks."""
    route, part = where.HERE.route("native"), where.HERE.size(1 << 19)
    everybody = [it.words(it.ranks * part + 7, rank, seed=9)[: it.ranks * part] for rank in range(it.ranks)]
    part = everybody[0].numel() // it.ranks
    shards = [list(words.split(part))[: it.ranks] for words in everybody]
    bound = -(-compress_bound(part, torch.bfloat16) // ALIGN) * ALIGN
    sent, got = (torch.zeros(it.ranks * bound, dtype=torch.uint8, device=it.device) for _ in range(2))
    slots = list(sent.split(bound))
    route.encode_frames(shards[it.rank], "cascade", 1024, slots)
    sizes = torch.stack([slot[24:32].view(torch.int64) for slot in slots]).max().view(1)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    room = -(-int(sizes.item()) // ALIGN) * ALIGN
    frames = [slot[:room] for slot in got.split(bound)]
    all_to_all(frames, [slot[:room] for slot in slots])
    sums, status = torch.empty_like(shards[0][0]), new_status(it.device)
    route.decode_sum_frames(frames, 1024, sums.dtype, sums, status)
    raise_failure(status)
    wanted = shards[0][it.rank].float()
    for theirs in shards[1:]:
        wanted = wanted + theirs[it.rank].float()
    equal(sums, wanted.bfloat16())


def streams(it: Rank) -> None:
    """A call without async_op stays in the order of the current stream, and does not wait for other streams."""
    mine, other = where.HERE.streams(2)
    values = torch.zeros(1 << 16, device=it.device)
    whole = values.new_zeros(it.ranks * values.numel())
    dist.all_gather_into_tensor(whole, values)  # connections are made
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
    """A graph with a collective, and with our call that passes."""
    for name, call in (("plain", dist.all_gather_into_tensor), ("ours", _ours)):
        values = torch.zeros(1 << 14, device=it.device)
        whole = values.new_zeros(it.ranks * values.numel())
        call(whole, values)
        it.finish()
        replay = where.HERE.captured(lambda call=call, whole=whole, values=values: call(whole, values))
        for turn in range(3):
            values.fill_(turn + it.rank)
            whole.zero_()
            replay()
            it.finish()
            equal(whole, (turn + torch.arange(it.ranks, device=it.device)).float().repeat_interleave(values.numel()))
        it.figures[f"captured_{name}"] = True


def _ours(whole: torch.Tensor, values: torch.Tensor) -> None:
    comm.all_gather_into_tensor(whole, values, config=CODED)


Check = Callable[[Rank], None]
SHARED: tuple[Check, ...] = (gathers, exchanges, reductions, passes, coded_gather, coded_sum)
PROGRAMS: dict[str, tuple[Check, ...]] = {
    "probe": (reductions,),
    "one_rank": (*SHARED, streams, captures),  # ranks that share a GPU take turns: their times say nothing
    "shared_gpu": SHARED,
}


def main(program: str, rank: int, ranks: int, store: str, report: Path) -> int:
    """Run the checks of a program; the report has what was done, in seconds, and what went wrong."""
    told: dict[str, Any] = {"begun": "process group", "done": {}, "figures": {}}
    figures.write(report, told)
    try:
        it, options = Rank(rank, ranks), {}
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
