"""Exchanges without ranks: when memory goes back and frames are waited for, what is counted, what is kept after a failure."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ds_zipccl
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.comm.schedules import gather, pipeline
from ds_zipccl.comm.schedules.pipeline import Pieces, Round, abandoned, posting
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


class Link:
    """A link, and its group, that delivers what it is given to deliver; ``log``: sends, waits and releases, in order."""

    def __init__(self, ranks: int = 3, nodes: Sequence[Sequence[int]] = ()) -> None:
        self.rank, self.peers, self.nodes = 0, list(range(1, ranks)), nodes
        self.group, self.log = self, []
        self.counted: list[tuple[int, int]] = []
        self.coming: list[torch.Tensor] = []
        self.leases: list[Lease] = []
        self.rounds: set[int] = set()

    def tag(self, index: int) -> int:
        return index

    def piece_numel(self, numel: int, itemsize: int, rounds: int) -> int:
        self.rounds.add(rounds)
        return numel

    @contextmanager
    def naming(self, doing: str, peer: int) -> Iterator[None]:
        yield

    def count(self, logical_bytes: int, wire_bytes: int) -> None:
        self.counted.append((logical_bytes, wire_bytes))

    def landing(self, out: torch.Tensor, lease: Lease) -> torch.Tensor:
        self.leases.append(lease)
        return lease.bytes(4096)

    def recv(self, buffers: list[torch.Tensor], peer: int, tag: int) -> Handle:
        frame = self.coming.pop(0)
        buffers[0][: len(frame)] = frame
        return Handle(f"received from {peer}", self.log)

    def send(self, frames: list[torch.Tensor], peer: int, tag: int) -> Handle:
        self.log.append(f"to {peer}")
        return Handle(f"sent to {peer}", self.log)

    def encode(self, flat: torch.Tensor, lease: Lease, base: torch.Tensor | None = None) -> torch.Tensor:
        self.leases.append(lease)
        frame = frame_of(float(flat[0]))
        return lease.bytes(len(frame)).copy_(frame)

    def encode_all(self, flats: Sequence[torch.Tensor], lease: Lease) -> list[torch.Tensor]:
        self.log.append("encoded together")
        return [self.encode(flat, lease) for flat in flats]

    def decode(self, frame: torch.Tensor, peer: int, out: torch.Tensor, base: torch.Tensor | None = None) -> None:
        ds_zipccl.decompress(frame, out)

    def held(self) -> list[bool]:
        """Which leases still have their memory, in the order they were taken."""
        return [bool(lease._blocks) for lease in self.leases]


def exchange_on(link: Any, *, ours: bool = False) -> Round:
    return Round(link, 0, ours)


def flat(value: float = 1.0) -> torch.Tensor:
    return torch.full((NUMEL,), value)


def test_memory_of_what_came_goes_back_when_it_is_decoded() -> None:
    link = Link()
    exchange = exchange_on(link)
    link.coming = [frame_of(1.0), frame_of(2.0)]
    for _ in range(2):
        exchange.expect(1, flat())
    first, second = (exchange.receive(1, flat(0.0)) for _ in range(2))
    assert [float(first[0]), float(second[-1])] == [1.0, 2.0] and link.held() == [False, False]
    assert link.log == ["received from 1"] * 2


def test_memory_of_what_is_handed_on_goes_back_when_it_is_out() -> None:
    """The frame that goes on is the memory it came in."""
    link = Link()
    across, within = exchange_on(link), exchange_on(link)
    link.coming = [frame_of(3.0)]
    out = flat(0.0)
    across.expect(1, out)
    across.hand_on(1, out, within, [2])
    assert float(out[0]) == 3.0 and link.held() == [True], "it is on its way"
    across.flush()
    assert link.held() == [True]
    within.flush()
    assert link.held() == [False] and link.log == ["received from 1", "to 2", "sent to 2"]
    assert link.counted == [(4 * NUMEL, len(frame_of(3.0)))]


def test_sends_are_waited_for_before_their_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    exchange = exchange_on(link)
    exchange.send(flat(), 1, 2)
    assert link.held() == [True] and link.log == ["to 1", "to 2"]
    release = Lease.release
    monkeypatch.setattr(Lease, "release", lambda self: link.log.append("back") or release(self))
    exchange.flush()
    assert link.log[2:4] == ["sent to 1", "sent to 2"] and set(link.log[4:]) == {"back"} and link.held() == [False]


def test_turns_bound_what_is_held() -> None:
    link = Link()
    exchange = exchange_on(link)
    for turn in range(12):
        exchange.turn()
        exchange.send(flat(), 1)
        assert sum(link.held()) <= 2 * wire.PIPELINE_DEPTH + 1
        assert all(link.held()[-min(turn + 1, 2 * wire.PIPELINE_DEPTH) :]), (
            "those of the last turns may be on their way"
        )


def test_on_leaving_every_send_is_out() -> None:
    link = Link()
    with posting(link) as exchange:  # type: ignore[arg-type]
        exchange.send(flat(), 1)
        assert link.log == ["to 1"]
    assert link.log == ["to 1", "sent to 1"] and link.held() == [False]


def test_after_an_error_nothing_is_waited_for_and_the_exchange_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_abandoned", type(pipeline._abandoned)(maxlen=pipeline.ABANDONED))
    link = Link()
    with pytest.raises(KeyError, match="planted"), posting(link) as exchange:  # type: ignore[arg-type]
        exchange.send(flat(), 1)
        raise KeyError("planted")
    assert link.log == ["to 1"] and link.held() == [True] and list(pipeline._abandoned) == [exchange]


def test_the_last_failures_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_abandoned", type(pipeline._abandoned)(maxlen=pipeline._abandoned.maxlen))
    alive = []
    for _ in range(3 * pipeline.ABANDONED):
        abandoned(exchange := exchange_on(Link()))
        alive.append(weakref.ref(exchange))
        del exchange
    assert [one() is not None for one in alive] == [False] * 2 * pipeline.ABANDONED + [True] * pipeline.ABANDONED


def test_messages_of_our_own_count_as_nothing_uncoded() -> None:
    """What a plain collective would not send is no saving."""
    for ours, uncoded in ((False, 4 * NUMEL), (True, 0)):
        link = Link()
        exchange_on(link, ours=ours).send(flat(), 1, 2)
        assert link.counted == [(uncoded, len(frame_of(1.0)))] * 2


def test_nothing_is_sent_of_nothing() -> None:
    link = Link()
    exchange = exchange_on(link)
    empty = flat()[:0]
    exchange.expect(1, empty)
    exchange.send(empty, 1)
    exchange.scatter([flat(), empty, flat()], [1, 2])
    assert exchange.receive(1, empty) is empty
    exchange.receive_add(1, torch.float32, empty)
    exchange.hand_on(1, empty, exchange, [2])
    assert link.log == ["to 2"]


def test_what_is_scattered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of peers, each its own; encoded in one call where the policy says so, of those that are not empty."""
    asked: list[list[int]] = []
    monkeypatch.setattr(wire, "encode_together", lambda nbytes: asked.append(list(nbytes)) or len(nbytes) > 1)
    link = Link(4)
    exchange_on(link).scatter([flat(), flat()[:0], flat(2.0), flat(3.0)], [3, 2, 1])
    assert asked == [[4 * NUMEL] * 2] and link.log == ["encoded together", "to 3", "to 2"]


@pytest.mark.parametrize(("nodes", "exchanges"), [((), 1), (((0, 1), (2, 3)), 2)])
def test_exchanges_that_go_on_together_share_the_memory(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, exchanges: int
) -> None:
    """A gather by node has two at a time: its pieces are half as large."""
    went: list[tuple[str, Pieces]] = []
    for name in ("_directly", "_by_node"):
        monkeypatch.setattr(gather, name, lambda link, index, leaving, *more, name=name: went.append((name, leaving)))
    link, whole = Link(4, nodes), torch.zeros(4, NUMEL)
    gather.gather(link, 0, [flat()], [[place] for place in whole], base=flat())  # type: ignore[arg-type]
    assert link.rounds == {exchanges} and [name for name, _ in went] == ["_by_node" if nodes else "_directly"]
    assert whole[0].eq(1).all(), "the own shard is put into its place"
