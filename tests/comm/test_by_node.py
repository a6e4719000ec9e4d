"""Messages by node: sums have the documented order, and all-to-alls every bit; fewer bytes and messages between nodes."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import corpus
import levels
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from levels import CountingTransport, Nodes, in_one_level_only, nodes_of
from moves import CODED, exchanged
from sums import bell, wild
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zipccl import comm
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.host import exchange as host_exchange
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters

WIDTH = 8
KINDS = (corpus.BF16, corpus.FP32)


def rows_of(ranks: int, seed: int) -> list[list[int]]:
    """Rows from each rank to each rank: some pairs, ranks and nodes have nothing; some segments have several fragments."""
    noise = random.Random(seed)
    rows = [[noise.choice((0, 1, 3, 200, 4000, 9000)) for _ in range(ranks)] for _ in range(ranks)]
    if seed % 4 == 1:
        rows[noise.randrange(ranks)] = [0] * ranks
    if seed % 4 == 2:
        idle = noise.randrange(ranks)
        rows = [[0 if to == idle else count for to, count in enumerate(row)] for row in rows]
    if seed % 4 == 3:
        rows = [
            [count if (to < ranks // 2) == (here < ranks // 2) else 0 for to, count in enumerate(row)]
            for here, row in enumerate(rows)
        ]
    return rows if seed % 7 else [[0] * ranks for _ in range(ranks)]


def exchange(rank: int, ranks: int, seed: int, later: bool = False, config: ZipcclConfig = CODED) -> None:
    """One uneven exchange."""
    rows, kind = rows_of(ranks, seed), KINDS[seed % 2]
    sent = [wild(peer, sum(row) * WIDTH, kind, seed).view(-1, WIDTH).split(row) for peer, row in enumerate(rows)]
    exchanged(rank, sent, later, config=config, role="ep")


def small_fragments() -> None:
    wire.FRAGMENT_BYTES = (1 << 15, 1 << 15)


def by_node(rank: int, ranks: int, nodes: Nodes, seeds: range) -> int:
    """Uneven and even exchanges by node, blocking and not; returns how many went by node."""
    levels.pretend(nodes)
    small_fragments()
    went = []
    real = host_exchange.exchange_by_node
    host_exchange.exchange_by_node = lambda *args: (went.append(1), real(*args))
    for seed in seeds:
        exchange(rank, ranks, seed, later=seed % 3 == 0)
        numel = ranks * (0, 1, 700, 150_000)[seed % 4]
        sent = [wild(peer, numel, KINDS[seed // 2 % 2], seed) for peer in range(ranks)]
        out = sent[rank].clone()
        source = out if seed % 3 != 1 else sent[rank]  # in place too
        comm.all_to_all_single(out, source, config=CODED)
        corpus.assert_same_bits(out, torch.cat([tensor.chunk(ranks)[rank] if numel else tensor for tensor in sent]))
    return len(went)


CROSSED = [[0, 2], [1, 3]]
UNORDERED = [[1, 2, 5], [0, 3, 4]]


@runner.together(4, nodes_of(2, 2))
@runner.together(4, CROSSED, full="ranks in order stay")
@runner.together(6, nodes_of(2, 3), full="groups of six ranks; four ranks stay")
@runner.together(6, nodes_of(3, 2), full="groups of six ranks; four ranks stay")
@runner.together(6, UNORDERED, full="groups of six ranks; four ranks stay")
def every_bit_arrives(rank: int, ranks: int, nodes: Nodes) -> None:
    count = 12 if ranks == 4 else 8
    assert by_node(rank, ranks, nodes, range(1, count + 1)) >= count


def wrong_part() -> None:
    """Planted: the parts of a stream are cut one element too late."""
    part = host_exchange._Stream.part

    def late(self: Any, at: int, step: int) -> tuple[slice, slice]:
        here, there = part(self, at, step)
        moved = slice(here.start + 1, here.stop + 1) if not at and here.stop < self.numel(step) else here
        return moved, there

    host_exchange._Stream.part = late  # type: ignore[method-assign]


def wrong_order() -> None:
    """Planted: a forwarder sends its streams in another order than its neighbors expect."""
    init = host_exchange._NodeExchange.__init__

    def turned(self: Any, *args: Any) -> None:
        init(self, *args)
        self._carried.reverse()

    host_exchange._NodeExchange.__init__ = turned  # type: ignore[method-assign]


def input_written() -> None:
    """Planted: an input is read where the output has been written already."""
    host_exchange.detached = lambda sources, written, homes: sources


@pytest.mark.full(reason="mistakes that no other test needs")
@pytest.mark.parametrize(
    ("plant", "nodes"), [(wrong_part, nodes_of(2, 2)), (wrong_order, nodes_of(3, 2)), (input_written, nodes_of(2, 2))]
)
def test_mistakes_are_seen(plant: Callable[[], None], nodes: Nodes) -> None:
    with pytest.raises(runner.RankFailure, match=r"words differ|refused"):
        runner.run(by_node, sum(map(len, nodes)), nodes, range(1, 8), plant=plant, timeout=30)


# ---- sizes that disagree -----------------------------------------------------------------------------------------------


def disagreeing(rank: int, ranks: int, split: list[int]) -> None:
    """Rank 0 sends ``split`` rows to the ranks; all other ranks send ten rows to each rank, and expect ten rows from each."""
    levels.pretend(nodes_of(2, 2))
    leaving = split if rank == 0 else [10] * ranks
    coming = [split[0] if rank == peer == 0 else 10 for peer in range(ranks)]
    out, source = torch.empty(sum(coming), WIDTH), torch.ones(sum(leaving), WIDTH)
    comm.all_to_all_single(out, source, coming, leaving, config=CODED)


#: Words of the refusal -> rows that rank 0 sends.
SPLITS = {
    r"global rank 0 sends segments of \[56, 104\] elements .* expect \[80, 80\]; give split sizes": [10, 10, 7, 13],
    r"global rank 0 sends segments of \[0, 0\]": [10, 10, 0, 0],
    r"global rank 1 expects segments of \[80, 80, 80, 80\] elements, and 96 elements are for it": [10, 12, 10, 10],
}


@pytest.mark.full(reason="six seconds")
@pytest.mark.parametrize("words", SPLITS, ids=lambda words: str(SPLITS[words]))
def test_sizes_that_disagree_are_refused(words: str) -> None:
    """By a rank that would hand the parts on: also where their sum is right, and where nothing comes."""
    with pytest.raises(runner.RankFailure, match=words):
        runner.run(disagreeing, 4, SPLITS[words], timeout=15)


# ---- bytes, messages, memory -------------------------------------------------------------------------------------------

SEGMENT = 1 << 17


class CountingMessages(CountingTransport):
    """As its base, with the messages between nodes."""

    messages = 0

    def post_send(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        before = CountingTransport.between
        handle = super().post_send(buffer, peer, tag)
        CountingMessages.messages += CountingTransport.between > before
        return handle


def between(rank: int, ranks: int, nodes: Nodes, straight: bool) -> list[tuple[int, int]]:
    """Bytes and messages between nodes: of random words, which do not shrink, and of bells; uneven, and even."""
    levels.pretend(nodes)
    if straight:
        levels.in_one_level_only()
    wire.FRAGMENT_BYTES = (64 << 20, 64 << 20)
    noise = torch.Generator().manual_seed(rank)
    words = torch.randint(-(1 << 15), 1 << 15, (ranks * SEGMENT,), generator=noise, dtype=torch.int16)
    found = []
    bell = torch.randn(ranks * SEGMENT, generator=noise).bfloat16()
    # a group's first call that may have rows tells flags once, which are no frames
    comm.all_to_all(list(torch.empty(ranks, 1)), list(torch.ones(ranks, 1)), config=CODED, role="ep")
    for source, role in ((words.view(torch.bfloat16), "sp"), (bell, "ep")):  # frames of one role learn from each other
        for rows in ([SEGMENT // 1024] * ranks, None):
            counters.reset()
            CountingTransport.begin()
            TRANSPORTS["gloo"], CountingMessages.messages = CountingMessages, 0
            source = source.view(-1, 1024)
            config = replace(CODED, staging_mib=1024)
            comm.all_to_all_single(torch.empty_like(source), source, rows, rows, config=config, role=role)
            (row,) = counters.rows()
            assert row["logical_bytes"] == 2 * (ranks - 1) * SEGMENT
            assert row["wire_bytes"] == CountingTransport.between + CountingTransport.inside
            found.append((CountingTransport.between, CountingMessages.messages))
    return found


@pytest.mark.parametrize(
    ("nodes", "each"),
    [
        (2, 2),
        *[pytest.param(*shape, marks=pytest.mark.full(reason="six ranks; four stay")) for shape in ((2, 3), (3, 2))],
    ],
)
def test_no_more_bytes_and_fewer_messages_between_nodes(nodes: int, each: int) -> None:
    """Uneven exchanges have one more message to each node: the sizes of its parts."""
    by_node, straight = (runner.run(between, nodes * each, nodes_of(nodes, each), way) for way in (False, True))
    plain = 2 * SEGMENT * each * (nodes - 1)
    for (random_uneven, random_even, uneven, even), direct in zip(by_node, straight, strict=True):
        assert plain < random_even[0] <= random_uneven[0] <= plain * 1.002
        assert even[0] <= uneven[0] <= plain / 1.4
        assert [messages for _, messages in (random_uneven, random_even)] == [2 * (nodes - 1), nodes - 1]
        assert {messages for _, messages in direct} == {(nodes - 1) * each}
        assert all(
            mine - 512 <= theirs for (mine, _), (theirs, _) in zip((random_uneven, random_even), direct, strict=False)
        )


# ---- rows ----------------------------------------------------------------------------------------------------------------

EXPERTS = replace(CODED, staging_mib=16)


def tokens(rank: int, ranks: int, config: ZipcclConfig, count: int = 1500) -> list[float]:
    """Rank 0 of each node sends its tokens to both ranks of the other node, rank 1 each token to one of them.

    Returns the plain bytes between nodes for each byte sent there: of a dispatch, and of gradients that are multiples of each other.
    """
    levels.pretend(nodes_of(2, 2))
    small_fragments()
    noise, width = torch.Generator(), 64
    found, sent = [], []
    for peer in range(ranks):
        own = torch.randn(count, width, generator=noise.manual_seed(peer))
        sent.append([own, own.flip(0)] * 2 if peer % 2 == 0 else [*own.chunk(2)] * 2)
    for kind in ("dispatch", "combine.bwd"):
        if kind == "combine.bwd":
            sent = [[part * (1 + 0.1 * number) for number, part in enumerate(parts)] for parts in sent]
        counts = [len(part) for part in sent[rank]]
        CountingTransport.begin()
        rounded = [[part.bfloat16() for part in parts] for parts in sent]
        exchanged(rank, rounded, config=config, role="ep", kind=kind)
        found.append(sum(counts[2:] if rank < 2 else counts[:2]) * 2 * width / CountingTransport.between)
    return found


@runner.together(4)
def a_row_enters_a_node_once(rank: int, ranks: int) -> None:
    """Without rows 1.5. A token that goes to both ranks of a node costs as much as one."""
    dispatch, gradients = tokens(rank, ranks, EXPERTS)
    assert (2.7 < dispatch < 3.1 and gradients > 1.5) if rank % 2 == 0 else 1.4 < min(dispatch, gradients) < 1.6


@runner.together(4, 1500, replace(EXPERTS, rows="off"), full="rows that go once stay")
@runner.together(4, 6000, replace(EXPERTS, staging_mib=1), full="rows that go once stay")
def ordinary_frames(rank: int, ranks: int, count: int, config: ZipcclConfig) -> None:
    """Where the counterpart keeps nothing: rows are off, or larger than the memory for earlier ones."""
    assert all(1.4 < ratio < 1.6 for ratio in tokens(rank, ranks, config, count))


def nothing_kept() -> None:
    """Planted: a counterpart takes the memory in front of a fragment for the earlier rows, without having kept them."""
    place = host_exchange._NodeExchange._place

    def lost(self: Any, stream: Any, step: int) -> Any:
        there, earlier = place(self, stream, step)
        if earlier is not None:
            earlier.zero_()
        return there, earlier

    host_exchange._NodeExchange._place = lost  # type: ignore[method-assign]


@pytest.mark.full(reason="a mistake that no other test needs")
def test_rows_that_were_not_kept_are_noticed() -> None:
    with pytest.raises(runner.RankFailure, match=r"words differ"):
        runner.run(tokens, 4, EXPERTS, plant=nothing_kept, timeout=30)


@runner.together(4, full="large messages")
def chosen(rank: int, ranks: int) -> None:
    """In mode auto, too."""
    levels.pretend(nodes_of(2, 2))
    small_fragments()
    exchange(rank, ranks, 4, config=replace(CODED, mode="auto"))


FP32 = replace(CODED, reduction="fp32")
NUMEL = 1 << 20
NBYTES = 2 * NUMEL


def gaussian(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).bfloat16()


#: A reduce has a schedule in messages alone.
CALLS = levels.CALLS | {"reduce": lambda x, ranks, **more: comm.reduce(x, 1, **more)}


def ring(call: str, nodes: int, ranks: int) -> float:
    """Bytes between nodes of all ranks together, by a ring that enters each node once: a reduce-scatter sends (ranks - 1) / ranks of the
    message over each link, an all-reduce twice as much. A reduce is a reduce-scatter, and a gather at one rank."""
    once = nodes * (ranks - 1) / ranks * NBYTES
    at_root = (nodes - 1) / nodes * NBYTES
    all_reduces = ("all_reduce", "balanced", "one owner", "all own all")
    return once + at_root if call == "reduce" else (2 if call in all_reduces else 1) * once


def bytes_between(rank: int, ranks: int, nodes: Nodes) -> dict[str, list[int]]:
    levels.pretend(nodes)
    found: dict[str, list[int]] = {}
    for (name, call), codec in itertools.product(CALLS.items(), ("raw", "cascade")):
        CountingTransport.begin()
        call(gaussian(rank), ranks, config=replace(FP32, codec=codec))
        found.setdefault(name, []).append(CountingTransport.between)
    return found


def totals(nodes: int, each: int, plant: Callable[[], None] | None = None) -> dict[str, list[int]]:
    """Bytes between nodes of all ranks, raw and coded."""
    of_ranks = runner.run(bytes_between, nodes * each, nodes_of(nodes, each), plant=plant)
    return {name: [sum(column) for column in zip(*(one[name] for one in of_ranks))] for name in of_ranks[0]}


@pytest.mark.parametrize(
    ("nodes", "each"),
    [(2, 2), *(pytest.param(*shape, marks=pytest.mark.full(reason="eight ranks")) for shape in ((2, 4), (4, 2)))],
)
def test_no_more_bytes_between_nodes_than_a_ring(nodes: int, each: int) -> None:
    found = totals(nodes, each)
    for call, (raw, with_codec) in found.items():
        least = ring(call, nodes, nodes * each)
        assert 0 < raw <= least, (call, raw / least)
        assert with_codec <= least / 1.4, (call, with_codec / least)


def test_one_level_sends_more_than_a_ring() -> None:
    found = totals(2, 4, in_one_level_only)
    assert found["reduce_scatter_tensor"][0] > 2.2 * ring("reduce_scatter_tensor", 2, 8)


@runner.together(4)
def what_the_counters_say(rank: int, ranks: int) -> None:
    """The counters have all that is sent, inside nodes as well; and before coding that is as much as in one level."""
    levels.pretend(nodes_of(2, 2))
    CountingTransport.begin()
    counters.reset()
    comm.reduce_scatter_tensor(torch.empty(NUMEL // 4, dtype=torch.bfloat16), gaussian(rank), config=FP32)
    (row,) = counters.rows()
    assert row["logical_bytes"] == NBYTES * 3 // 4
    assert row["wire_bytes"] == CountingTransport.between + CountingTransport.inside
    assert CountingTransport.inside == pytest.approx(NBYTES / 2, rel=1e-3)  # raw
    assert CountingTransport.between == pytest.approx(NBYTES / 4 / 1.5, rel=0.05)


@runner.together(4, nodes_of(2, 2))
@runner.together(3, [], full="ten seconds; two nodes stay")
def memory_is_bounded(rank: int, ranks: int, nodes: Nodes) -> None:
    """Frames may be a little larger than pieces, buffers are rounded up by an eighth; sums of nodes are made beside them."""
    levels.pretend(nodes)
    peaks = {}
    tensor = bell(rank, 12 << 20, corpus.BF16, 0)
    calls = {name: CALLS[name] for name in ("reduce_scatter_tensor", "all_reduce", "balanced")} | {
        "exchange": lambda x, ranks, **more: comm.all_to_all_single(torch.empty_like(x), x, **more),
        "gather": lambda x, ranks, **more: comm.all_gather_into_tensor(x, x.chunk(ranks)[rank], **more),
        "broadcast": lambda x, ranks, **more: comm.broadcast(x, 1, **more),
    }
    for name, call in calls.items():
        POOL.peak = 0
        call(tensor, ranks, config=replace(FP32, staging_mib=6))
        peaks[name] = POOL.peak / (6 << 20)
    assert all(0 < peak <= (1.2 if name == "exchange" else 1.4) for name, peak in peaks.items()), peaks


@runner.together(4, nodes_of(2, 2))
@runner.together(4, nodes_of(1, 4))
def memory_is_let_go(rank: int, ranks: int, nodes: Nodes) -> None:
    """No call after which a tensor still has memory, which only garbage collection would free."""
    levels.pretend(nodes)
    gc.disable()
    kept = []
    for name, call in CALLS.items():
        tensor = gaussian(rank)
        memory = StorageWeakRef(tensor.untyped_storage())
        call(tensor, ranks, config=FP32)
        del tensor
        kept += [name] * (not memory.expired())
    assert not kept


test_programs = runner.programs(__name__)
