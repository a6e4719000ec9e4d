"""Exchanges without ranks: when memory goes back and frames are waited for, what is counted, what is kept after a failure."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ds_zipccl
from ds_zipccl.comm.host import gather, pipeline
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.comm.host.gather import NodeGather
from ds_zipccl.comm.host.pipeline import Exchange, abandon, open_exchange
from ds_zipccl.policy import wire

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
