"""Schedules of coded collectives. Right ones: no seed reports anything, in any mode. Ones with a planted mistake: some of a few seeds
notices, and the fault names the places.

A program is a function of rank and ranks, and the name of its mistake ("" for none); the kernels of its codec are Python functions. A
comment ``<name>`` marks a line that a fault must name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim import world
from sim.device import kernel
from sim.mistakes import faulty

#: Frames are the words as they are behind a header, whose last eight bytes are the frame's length.
HEADER = 32


def _encode(segments: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
    for words, slot in zip(segments, slots, strict=True):
        size = HEADER + words.nbytes
        slot[:HEADER] = 0
        slot[24:HEADER].view(torch.int64)[0] = size
        slot[HEADER:size] = words.view(torch.uint8)


def _words(slot: torch.Tensor, like: torch.Tensor, status: torch.Tensor) -> torch.Tensor:
    size = int(slot[24:HEADER].view(torch.int64)[0])
    if size != HEADER + like.nbytes or size > slot.numel():
        status.fill_(0)
        return torch.zeros_like(like)
    return slot[HEADER:size].view(like.dtype)


def _decode(slots: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    for slot, words in zip(slots, outs[:-1], strict=True):
        words.copy_(_words(slot, words, outs[-1]))


def words_of(rank: int, numel: int, call: int = 0) -> torch.Tensor:
    """The words of a rank, on the host."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(numel, generator=generator).to(torch.bfloat16)


def slot_bytes(numel: int) -> int:
    """Room for a frame of bfloat16 words, and more."""
    return -(-(HEADER + 4 * numel + 64) // 512) * 512


class Handle:
    """The handle of an asynchronous gather: the memory stays until the waiter's stream comes after the decoder."""

    def __init__(self, event: Any, keep: Sequence[Any]) -> None:
        self._event, self._keep = event, keep

    def wait(self) -> None:
        self._event.wait()
        self._keep = ()


class Gatherer:
    """Coded gathers with three streams and one staging buffer: encode, wire and decode overlap between calls."""

    def __init__(self, rank: int, ranks: int, mistake: str, numel: int) -> None:
        self.rank, self.ranks, self.mistake = rank, ranks, mistake
        self.device = torch.device("cuda", rank)
        self.encoding, self.decoding = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self.wire = torch.cuda.Stream(self.device, priority=-1)
        self.staging = torch.empty(ranks * slot_bytes(numel), dtype=torch.uint8, device=self.device)
        self.last_used: Any = torch.cuda.current_stream(self.device).record_event()

    def order(self, stream: Any, event: Any, mistake: str) -> None:
        """Have ``stream`` wait, except as ``mistake``."""
        if self.mistake != mistake:
            stream.wait_event(event)

    def gather(self, words: torch.Tensor, output: torch.Tensor) -> Handle:
        """Start a gather into ``output``, flat, of all ranks' words; no host wait."""
        caller, mistake = torch.cuda.current_stream(self.device), self.mistake
        slots = list(self.staging.view(self.ranks, -1).unbind())
        self.order(self.encoding, caller.record_event(), "encoder does not wait for the caller")
        self.order(self.encoding, self.last_used, "staging buffer reused before its last reader")
        with torch.cuda.stream(self.encoding):
            kernel("stub encode", _encode, [words], [slots[self.rank]])  # <encode>
            encoded = self.encoding.record_event()
        if mistake == "event waited before it is recorded":
            encoded = torch.cuda.Event()
        elif mistake == "event recorded on the wrong stream":
            encoded = self.decoding.record_event()
        self.order(self.wire, encoded, "wire does not wait for the encoder")  # <unrecorded>
        with torch.cuda.stream(self.wire if mistake != "swapped streams" else self.decoding):
            dist.all_gather_into_tensor(self.staging, slots[self.rank])  # <gather>
        self.order(self.decoding, self.wire.record_event(), "decoder does not wait for the wire")
        status = torch.full((1,), -1, dtype=torch.int64, device=self.device)  # <status>
        self.order(self.decoding, caller.record_event(), "decoder does not wait for the memory of the caller")
        with torch.cuda.stream(self.decoding):
            kernel("stub decode", _decode, slots, [*output.view(self.ranks, -1).unbind(), status])  # <decode>
            self.last_used = self.decoding.record_event()
        return Handle(self.last_used, () if mistake == "buffer freed early" else (words, output, status))


def gathers(rank: int, ranks: int, mistake: str = "", calls: int = 3, numel: int = 300) -> None:
    """Several gathers in flight; each output is compared with the ranks' words."""
    gatherer = Gatherer(rank, ranks, mistake, numel)
    started = []
    for call in range(calls):
        words = words_of(rank, numel, call).to(gatherer.device)
        words = words * 1  # <words> a kernel of the caller's stream writes what is gathered
        output = torch.empty(ranks * numel, dtype=torch.bfloat16, device=gatherer.device)
        handle = gatherer.gather(words, output)
        if mistake == "input changed in flight":
            words.zero_()  # <change>
        started.append((handle, output if mistake != "buffer freed early" else None))
        if mistake == "buffer freed early":
            del words, output
            torch.empty(ranks * numel, dtype=torch.bfloat16, device=gatherer.device).fill_(3)  # <reuse>
    for call, (handle, output) in enumerate(started):
        if mistake != "caller does not wait for the decoder":
            handle.wait()
        assert output is not None
        doubled = output * 2  # <use>
        wanted = torch.cat([words_of(peer, numel, call) for peer in range(ranks)]) * 2
        assert torch.equal(doubled.cpu(), wanted)


def agreement(rank: int, ranks: int, mistake: str = "") -> int:
    """The largest of a word of each rank, on the host: one host wait."""
    device = torch.device("cuda", rank)
    word = torch.full((1,), 10 + rank, dtype=torch.int64, device=device)  # <word>
    if mistake == "side stream without wait":
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            dist.all_reduce(word, dist.ReduceOp.MAX)  # <reduce>
    else:
        dist.all_reduce(word, dist.ReduceOp.MAX)
    pinned = torch.empty(1, dtype=torch.int64, pin_memory=True)
    pinned.copy_(word, non_blocking=True)  # <to host>
    event = torch.cuda.Event()
    event.record()
    if mistake == "host writes a buffer in flight":
        pinned.zero_()  # <host write>
    if mistake == "polled":
        while not event.query():
            pass
    elif mistake not in ("host read without a wait", "host writes a buffer in flight"):
        event.synchronize()
    return int(pinned.item())  # <host read>


# --- tests

#: Ranks and seeds: a seed for each machine; together a thousand.
SHORT = [(ranks, len(world.ALL_MODES)) for ranks in (2, 3, 4)]
ALL = [pytest.param(*pair, marks=pytest.mark.full(reason="more seeds")) for pair in ((2, 600), (3, 250), (4, 150))]


@pytest.mark.parametrize(("ranks", "seeds"), [*SHORT, *ALL])
def test_right_programs(ranks: int, seeds: int) -> None:
    """Two programs, by turns in each mode."""
    for seed in range(seeds):
        options: dict[str, Any] = {"seed": seed, "modes": world.ALL_MODES[seed % len(world.ALL_MODES)]}
        world.run(gathers, ranks, **options)
        got = world.run(agreement, ranks, "polled" if seed % 2 else "", **options)
        assert got.values == [9 + ranks] * ranks


RACES = {
    "encoder does not wait for the caller": ("words", "encode"),
    "staging buffer reused before its last reader": ("encode", "gather"),
    "event waited before it is recorded": ("encode", "gather", "unrecorded"),
    "event recorded on the wrong stream": ("encode", "gather"),
    "wire does not wait for the encoder": ("encode", "gather"),
    "swapped streams": ("encode", "gather"),
    "decoder does not wait for the wire": ("gather", "decode"),
    "decoder does not wait for the memory of the caller": ("status", "decode"),
    "buffer freed early": ("decode", "reuse"),
    "input changed in flight": ("encode", "change"),
    "caller does not wait for the decoder": ("decode", "use"),
}


#: The status word that is not waited for says "no failure" before and after.
SILENT = {"decoder does not wait for the memory of the caller"}


@pytest.mark.parametrize("mistake", sorted(set(RACES) - SILENT))
def test_wrong_values_of_gathers(mistake: str) -> None:
    """The scheduler delays and the memory is poisoned so that the results show a mistake without any help of the clocks."""

    def wrong(seed: int) -> bool:
        try:
            world.run(gathers, 2, mistake, seed=seed, modes=world.Modes(races=False))
        except AssertionError:
            return True
        return False

    assert any(wrong(seed) for seed in range(60))


AGREEMENTS = {
    "side stream without wait": ("word", "reduce"),
    "host read without a wait": ("to host", "host read"),
    "host writes a buffer in flight": ("to host", "host write"),
}


@pytest.mark.parametrize("mistake", [*RACES, *AGREEMENTS])
def test_races(mistake: str) -> None:
    """Of gathers and agreements."""
    program, markers = (gathers, RACES) if mistake in RACES else (agreement, AGREEMENTS)
    faulty(("race", *markers[mistake]), program, 2, mistake)


def test_host_waits_and_bytes() -> None:
    """A gather has no host wait of its own; an agreement has one."""
    counters = world.run(gathers, 2).counters[0]
    waits = [reason for reason, _ in counters.waits]
    assert len(waits) == 6 and all("pageable" in reason for reason in waits)  # each call's words, and its result
    assert counters.collective_bytes == {"all_gather": 3 * slot_bytes(300)}
    assert counters.launches["stub encode"] == counters.launches["stub decode"] == 3
    assert 0 < counters.peak_bytes < 1 << 20
    ((reason, place),) = world.run(agreement, 2).counters[1].waits
    assert "Event.synchronize" in reason and "test_programs.py" in str(place)


def test_a_seed_repeats() -> None:
    """The same seed gives the same order of operations; seeds give many orders."""

    def order(seed: int) -> tuple[str, ...]:
        found: list[str] = []
        world.run(gathers, 3, seed=seed, trace=found.append)
        return tuple(found)

    orders = [order(seed) for seed in range(5)]
    assert orders == [order(seed) for seed in range(5)]
    assert len(set(orders)) == 5
