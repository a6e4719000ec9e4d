"""Messages in pieces, with ranks and without: the same bits, bounded memory, nobody waits in a circle, what is left after a failure."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import corpus
import moves
import pytest
import ranks as runner
import sums
import test_bases
import torch
import torch.distributed as dist
from moves import CODED
from operations import arguments

import ds_zipccl
from ds_zipccl import comm
from ds_zipccl.comm.host import gather, pipeline
from ds_zipccl.comm.host import sums as reduce_scatter
from ds_zipccl.comm.host.buffer_pool import POOL, PooledBuffers
from ds_zipccl.comm.host.gather import NodeGather
from ds_zipccl.comm.host.pipeline import Exchange, abandon, detached, open_exchange
from ds_zipccl.comm.ops import all_reduce, all_to_all, broadcast, reduce_to_owners
from ds_zipccl.policy import wire


def test_pieces_fit_the_memory() -> None:
    for numel in (1, 1000, 1 << 20, (1 << 24) + 5, 1 << 28):
        for ranks in (2, 3, 8, 64):
            for staging in (1 << 20, 64 << 20):
                piece = wire.fragment_numel(numel, 2, ranks, staging)
                assert piece % wire.FRAGMENT_UNIT == 0 and 0 < piece * 2 <= wire.FRAGMENT_BYTES[1]
                if piece > wire.FRAGMENT_UNIT:
                    assert (3 * wire.PIPELINE_DEPTH + 2) * (ranks - 1) * piece * 2 <= staging
    assert (1 << 24) / wire.fragment_numel(1 << 24, 2, 2, 64 << 20) == 8


def test_stages_follow_each_other() -> None:
    seen: list[tuple[str, int]] = []
    pipeline.run_pipeline(4, lambda turn: seen.append(("post", turn)), lambda turn: seen.append(("take", turn)))
    for stage in ("post", "take"):
        assert [turn for name, turn in seen if name == stage] == [0, 1, 2, 3]
    for turn in range(4):
        assert seen.index(("take", turn)) > seen.index(("post", min(3, turn + wire.PIPELINE_DEPTH)))


def in_small_pieces(
    rank: int, ranks: int, case: Callable[..., None], arguments: tuple[Any, ...] = (), least: int = 256, wanted: int = 8
) -> int:
    """``case`` with pieces of ``least`` bytes and more; returns the most turns that a message took, at least ``wanted``."""
    turns = 0

    def counted(most: int, *stages: Callable[[int], None]) -> None:
        nonlocal turns
        turns = max(turns, most)
        pipeline.run_pipeline(most, *stages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "FRAGMENT_UNIT", 64)
        patch.setattr(wire, "FRAGMENT_BYTES", (least, 16 * least))
        for module in (all_reduce, all_to_all, broadcast, gather, reduce_scatter, reduce_to_owners):
            patch.setattr(module, "run_pipeline", counted)
        case(rank, ranks, *arguments)
    assert turns >= wanted, turns
    return turns


for ranks in (2, 3, 4):
    runner.together(ranks, moves.moves)(in_small_pieces)
    runner.together(ranks, sums.as_gloo, ([1, 7, 1000, 20001],))(in_small_pieces)
runner.together(3, test_bases.steps, ("bf16",), 1 << 15, 2)(in_small_pieces)


def skewed(rank: int, ranks: int) -> None:
    """Very uneven segments: one rank has far more turns than the others."""
    sizes = [[30_000 if (a, b) == (0, 1) else 100 * (a + b) for b in range(ranks)] for a in range(ranks)]
    send = [
        corpus.tensor(corpus.bell(size, corpus.BF16, 10 * rank + peer), corpus.BF16)
        for peer, size in enumerate(sizes[rank])
    ]
    got = [torch.empty(sizes[peer][rank], dtype=torch.bfloat16) for peer in range(ranks)]
    comm.all_to_all(got, send, config=CODED)
    for peer, tensor in enumerate(got):
        corpus.assert_same_bits(
            tensor, corpus.tensor(corpus.bell(sizes[peer][rank], corpus.BF16, 10 * peer + rank), corpus.BF16)
        )


@runner.together(3)
def uneven_turns(rank: int, ranks: int) -> None:
    turns = in_small_pieces(rank, ranks, skewed, wanted=0)
    assert rank or turns > 10


def sharing(rank: int, ranks: int) -> None:
    """Inputs that lie where other outputs are written."""
    memory = torch.arange(ranks * 5000, dtype=torch.float32) + 1e6 * rank
    others = [torch.arange(ranks * 5000, dtype=torch.float32) + 1e6 * peer for peer in range(ranks)]
    shift = 700
    own = memory[shift : shift + 5000].clone()
    whole = memory.clone()
    comm.all_gather_into_tensor(whole, whole[shift : shift + 5000].copy_(own), config=CODED)
    corpus.assert_same_bits(whole, torch.cat([other[shift : shift + 5000] for other in others]))

    crossed = memory.clone()  # the output of a reduce-scatter in a peer's shard
    place = crossed[(rank + 1) % ranks * 5000 :][:5000]
    comm.reduce_scatter_tensor(place, crossed, config=CODED)
    plain = torch.empty(5000)
    dist.reduce_scatter_tensor(plain, memory.clone())
    corpus.assert_same_bits(place, plain)

    swapped = memory.clone()  # a shift by less than a segment
    head, tail = swapped[: ranks * 4000], swapped[shift : shift + ranks * 4000]
    kept = head.clone()
    comm.all_to_all_single(tail, head, config=CODED)
    plain = torch.empty_like(kept)
    dist.all_to_all_single(plain, kept)
    corpus.assert_same_bits(tail, plain)


runner.together(3, sharing)(in_small_pieces)


def test_only_what_is_overwritten_too_early_is_copied() -> None:
    memory = torch.zeros(100)
    first, second, across = memory[:50], memory[50:], memory[25:75]
    sources = [first, second, across, torch.zeros(3), memory[:0]]
    kept = detached(sources, [first, second], [first, first, across, first, first])
    assert [got is source for got, source in zip(kept, sources, strict=True)] == [True, False, False, True, True]


MEMORY = torch.zeros(100)
#: source, its home, all that is written -> whether it is copied; all in elements of MEMORY.
OVERLAPS: dict[str, tuple[tuple[int, int], tuple[int, int], list[tuple[int, int]], bool]] = {
    "beside, before": ((0, 50), (90, 100), [(50, 100)], False),
    "beside, behind": ((50, 100), (0, 10), [(0, 50)], False),
    "between": ((20, 30), (90, 100), [(0, 20), (30, 100)], False),
    "its last element": ((0, 50), (90, 100), [(49, 100)], True),
    "its first element": ((49, 100), (0, 10), [(0, 50)], True),
    "within what is written": ((20, 30), (90, 100), [(0, 100)], True),
    "around what is written": ((0, 100), (90, 100), [(20, 30)], True),
    "in its home": ((20, 30), (20, 30), [(0, 20), (20, 30)], False),
    "in the home of another": ((20, 30), (0, 20), [(0, 20), (20, 30)], True),
    "in a part of its home": ((20, 29), (20, 30), [(20, 30)], True),
    "beyond its home": ((20, 31), (20, 30), [(20, 30)], True),
    "one element into its home": ((19, 30), (20, 30), [(20, 30)], True),
    "in its home, which another overlaps": ((20, 30), (20, 30), [(20, 30), (25, 40)], True),
    "in its home, which another holds": ((20, 30), (20, 30), [(20, 30), (0, 100)], True),
    "empty": ((20, 20), (20, 20), [(0, 100)], False),
    "in what is empty": ((20, 30), (0, 10), [(25, 25)], False),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_what_is_copied(case: str) -> None:
    source, home, written, copied = OVERLAPS[case]
    flat = MEMORY[slice(*source)]
    (kept,) = detached([flat], [MEMORY[slice(*span)] for span in written], [MEMORY[slice(*home)]])
    assert (kept is not flat) == copied and kept.equal(flat)


@runner.together(3, full="ten seconds; the messages in pieces stay")
def memory_is_bounded(rank: int, ranks: int) -> None:
    """Frames may be a little larger than pieces, buffers are rounded up by an eighth; a sum is made beside them."""
    peaks = []
    tensor = corpus.tensor(corpus.bell(12 << 20, corpus.BF16, rank), corpus.BF16)
    for name in ("all_reduce", "broadcast", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        given = arguments(tensor, ranks)[name]
        POOL.peak = 0
        getattr(comm, name)(*given, config=replace(CODED, staging_mib=6))
        peaks.append(POOL.peak)
    assert all(0 < peak <= 1.3 * (6 << 20) for peak in peaks), peaks


NUMEL = 100


def frame_of(value: float) -> torch.Tensor:
    return ds_zipccl.compress(torch.full((NUMEL,), value), "raw", shaped=False, checksum=False)


class Handle:
    """Done when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait(self) -> None:
        self._log.append(self._name)


class Context:
    """A context, its transport and its coder, that delivers the frames in ``coming``; ``log``: sends, waits and releases, in order."""

    def __init__(self, ranks: int = 3, nodes: Sequence[Sequence[int]] = ()) -> None:
        self.rank, self.peers, self.nodes = 0, list(range(1, ranks)), nodes
        self.transport, self.log = self, []
        self.counted: list[tuple[int, int]] = []
        self.coming: list[torch.Tensor] = []
        self.leases: list[PooledBuffers] = []
        self.exchanges: set[int] = set()
        self.repeats = self.lossy = None

    def tag(self, index: int) -> int:
        return index

    def fragment_numel(self, numel: int, itemsize: int, exchanges: int) -> int:
        self.exchanges.add(exchanges)
        return numel

    @contextmanager
    def naming(self, doing: str, peer: int) -> Iterator[None]:
        yield

    def count(self, logical_bytes: int, wire_bytes: int) -> None:
        self.counted.append((logical_bytes, wire_bytes))

    def recv_buffer(self, numel: int, dtype: torch.dtype, buffers: PooledBuffers) -> torch.Tensor:
        self.leases.append(buffers)
        return buffers.take(4096)

    def post_recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Handle:
        frame = self.coming.pop(0)
        buffer[: len(frame)] = frame
        return Handle(f"received from {peer}", self.log)

    def post_send(self, frame: torch.Tensor, peer: int, tag: int) -> Handle:
        self.log.append(f"to {peer}")
        return Handle(f"sent to {peer}", self.log)

    def compress(self, flat: torch.Tensor, buffers: PooledBuffers, *places: torch.Tensor | None) -> torch.Tensor:
        self.leases.append(buffers)
        frame = frame_of(float(flat[0]))
        return buffers.take(len(frame)).copy_(frame)

    def compress_each(self, flats: Sequence[torch.Tensor], buffers: PooledBuffers) -> list[torch.Tensor]:
        self.log.append("compressed together")
        return [self.compress(flat, buffers) for flat in flats]

    def decompress(self, frame: torch.Tensor, peer: int, out: torch.Tensor, *bases: torch.Tensor | None) -> None:
        ds_zipccl.decompress(frame, out)

    def held(self) -> list[bool]:
        """Which leases still have their memory, in the order they were taken."""
        return [bool(lease._blocks) for lease in self.leases]


@pytest.fixture(autouse=True)
def coder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context codes its frames itself."""
    monkeypatch.setattr(pipeline, "FrameCoder", lambda ctx, uncoded, rows, exact: ctx)


def exchange_on(ctx: Any, *, control: bool = False) -> Exchange:
    return Exchange(ctx, 0, control)


def flat(value: float = 1.0) -> torch.Tensor:
    return torch.full((NUMEL,), value)


def test_memory_of_what_came_goes_back_when_it_is_decoded() -> None:
    ctx = Context()
    exchange = exchange_on(ctx)
    ctx.coming = [frame_of(1.0), frame_of(2.0)]
    for _ in range(2):
        exchange.post_recv(1, flat())
    first, second = (exchange.recv(1, flat(0.0)) for _ in range(2))
    assert [float(first[0]), float(second[-1])] == [1.0, 2.0] and ctx.held() == [False, False]
    assert ctx.log == ["received from 1"] * 2


def test_memory_of_what_is_handed_on_goes_back_when_it_is_out() -> None:
    """The frame that goes on is the memory it came in."""
    ctx = Context()
    across, within = exchange_on(ctx), exchange_on(ctx)
    ctx.coming = [frame_of(3.0)]
    out = flat(0.0)
    across.post_recv(1, out)
    across.forward(1, out, within, [2])
    assert float(out[0]) == 3.0 and ctx.held() == [True], "it is on its way"
    across.flush()
    assert ctx.held() == [True]
    within.flush()
    assert ctx.held() == [False] and ctx.log == ["received from 1", "to 2", "sent to 2"]
    assert ctx.counted == [(4 * NUMEL, len(frame_of(3.0)))]


def test_sends_are_waited_for_before_their_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = Context()
    exchange = exchange_on(ctx)
    exchange.send(flat(), 1, 2)
    assert ctx.held() == [True] and ctx.log == ["to 1", "to 2"]
    release = PooledBuffers.release
    monkeypatch.setattr(PooledBuffers, "release", lambda self: ctx.log.append("back") or release(self))
    exchange.flush()
    assert ctx.log[2:4] == ["sent to 1", "sent to 2"] and set(ctx.log[4:]) == {"back"} and ctx.held() == [False]


def test_turns_bound_what_is_held() -> None:
    ctx = Context()
    exchange = exchange_on(ctx)
    for turn in range(12):
        exchange.next_step()
        exchange.send(flat(), 1)
        assert sum(ctx.held()) <= 2 * wire.PIPELINE_DEPTH + 1
        assert all(ctx.held()[-min(turn + 1, 2 * wire.PIPELINE_DEPTH) :]), "those of the last turns may be on their way"


def test_on_leaving_every_send_is_out() -> None:
    ctx = Context()
    with open_exchange(ctx) as exchange:  # type: ignore[arg-type]
        exchange.send(flat(), 1)
        assert ctx.log == ["to 1"]
    assert ctx.log == ["to 1", "sent to 1"] and ctx.held() == [False]


def test_after_an_error_nothing_is_waited_for_and_the_exchange_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_abandoned", type(pipeline._abandoned)(maxlen=pipeline.ABANDONED))
    ctx = Context()
    with pytest.raises(KeyError, match="planted"), open_exchange(ctx) as exchange:  # type: ignore[arg-type]
        exchange.send(flat(), 1)
        raise KeyError("planted")
    assert ctx.log == ["to 1"] and ctx.held() == [True] and list(pipeline._abandoned) == [exchange]


def test_the_last_failures_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_abandoned", type(pipeline._abandoned)(maxlen=pipeline._abandoned.maxlen))
    alive = []
    for _ in range(3 * pipeline.ABANDONED):
        abandon(exchange := exchange_on(Context()))
        alive.append(weakref.ref(exchange))
        del exchange
    assert [one() is not None for one in alive] == [False] * 2 * pipeline.ABANDONED + [True] * pipeline.ABANDONED


def test_messages_of_our_own_count_as_nothing_uncoded() -> None:
    """What a plain collective would not send is no saving."""
    for control, uncoded in ((False, 4 * NUMEL), (True, 0)):
        ctx = Context()
        exchange_on(ctx, control=control).send(flat(), 1, 2)
        assert ctx.counted == [(uncoded, len(frame_of(1.0)))] * 2


def test_nothing_is_sent_of_nothing() -> None:
    ctx = Context()
    exchange = exchange_on(ctx)
    empty = flat()[:0]
    exchange.post_recv(1, empty)
    exchange.send(empty, 1)
    exchange.send_each([flat(), empty, flat()], [1, 2])
    assert exchange.recv(1, empty) is empty
    exchange.recv_add(1, torch.float32, empty)
    exchange.forward(1, empty, exchange, [2])
    assert ctx.log == ["to 2"]


def test_what_is_scattered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of peers, each its own; encoded in one call where the policy says so, of those that are not empty."""
    asked: list[list[int]] = []
    monkeypatch.setattr(wire, "encode_together", lambda nbytes: asked.append(list(nbytes)) or len(nbytes) > 1)
    ctx = Context(4)
    exchange_on(ctx).send_each([flat(), flat()[:0], flat(2.0), flat(3.0)], [3, 2, 1])
    assert asked == [[4 * NUMEL] * 2] and ctx.log == ["compressed together", "to 3", "to 2"]


@pytest.mark.parametrize(("nodes", "exchanges"), [((), 1), (((0, 1), (2, 3)), 2)])
def test_exchanges_that_go_on_together_share_the_memory(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, exchanges: int
) -> None:
    """A gather by node has two at a time: its pieces are half as large."""
    went: list[type] = []
    monkeypatch.setattr(gather, "run_pipeline", lambda steps, post, last, *more: went.append(type(last.__self__)))
    ctx, whole = Context(4, nodes), torch.zeros(4, NUMEL)
    gather.gather(ctx, 0, [flat()], [[place] for place in whole], base=flat())  # type: ignore[arg-type]
    assert ctx.exchanges == {exchanges} and went == [NodeGather if nodes else gather.FlatGather]
    assert whole[0].eq(1).all(), "the own shard is put into its place"


test_programs = runner.programs(__name__)
