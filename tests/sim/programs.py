"""Programs for the simulator: schedules of coded collectives, right ones, and with one mistake planted.

A program is a function of rank and ranks, and the name of its mistake ("" for none); the kernels of its codec are Python functions. A
comment ``<name>`` marks a line that a fault must name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sim.device import kernel

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


def _sum(slots: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    outs[0].copy_(sum(_words(slot, outs[0], outs[1]).float() for slot in slots))


def words_of(rank: int, numel: int, call: int = 0) -> torch.Tensor:
    """The words of a rank, on the host."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(numel, generator=generator).to(torch.bfloat16)


def no_failure(device: torch.device) -> torch.Tensor:
    """A new status word, as codecs take it."""
    return torch.full((1,), -1, dtype=torch.int64, device=device)


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
        self.ready = torch.cuda.current_stream(self.device).record_event()
        self.last_used: Any = self.ready

    def gather(self, words: torch.Tensor, output: torch.Tensor) -> Handle:
        """Start a gather into ``output``, flat, of all ranks' words; no host wait."""
        mistake = self.mistake
        caller = torch.cuda.current_stream(self.device)
        slots = list(self.staging.view(self.ranks, -1).unbind())
        if mistake != "encoder does not wait for the caller":
            self.encoding.wait_event(caller.record_event())
        if mistake != "staging buffer reused before its last reader":
            self.encoding.wait_event(self.last_used)
        with torch.cuda.stream(self.encoding):
            kernel("stub encode", _encode, [words], [slots[self.rank]])  # <encode>
            encoded = self.encoding.record_event()
        unrecorded = torch.cuda.Event()
        if mistake == "event waited before it is recorded":
            self.wire.wait_event(unrecorded)  # <unrecorded>
            unrecorded.record(self.encoding)
        elif mistake == "event recorded on the wrong stream":
            self.wire.wait_event(self.decoding.record_event())
        elif mistake != "wire does not wait for the encoder":
            self.wire.wait_event(encoded)
        with torch.cuda.stream(self.wire if mistake != "swapped streams" else self.decoding):
            dist.all_gather_into_tensor(self.staging, slots[self.rank])  # <gather>
        gathered = self.wire.record_event()
        if mistake != "decoder does not wait for the wire":
            self.decoding.wait_event(gathered)
        status = no_failure(self.device)  # <status>
        if mistake != "decoder does not wait for the memory of the caller":
            self.decoding.wait_stream(caller)
        with torch.cuda.stream(self.decoding):
            outs = list(output.view(self.ranks, -1).unbind())
            kernel("stub decode", _decode, slots, [*outs, status])  # <decode>
            decoded = self.decoding.record_event()
        self.last_used = decoded
        keep = () if mistake == "buffer freed early" else (words, output, status)
        return Handle(decoded, keep)


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


def sums(rank: int, ranks: int, mistake: str = "", numel: int = 256) -> None:
    """A coded reduce-scatter: frames of exact size by all-to-all, one host wait for the size; own fp32 order of sums."""
    device = torch.device("cuda", rank)
    part = words_of(rank, ranks * numel).to(device)
    size = slot_bytes(numel)
    out_slots = torch.empty(ranks * size, dtype=torch.uint8, device=device).view(ranks, size)
    in_slots = torch.empty(ranks * size, dtype=torch.uint8, device=device).view(ranks, size)
    kernel("stub encode", _encode, list(part.view(ranks, numel).unbind()), list(out_slots.unbind()))
    most = out_slots[:, 24:32].contiguous().view(torch.int64).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    pinned = torch.empty(1, dtype=torch.int64, pin_memory=True)
    pinned.copy_(most.view(1), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    agreed = -(-int(pinned.item()) // 16) * 16
    if mistake == "size of one pair" and rank == 1:
        sent = [slot[: agreed - 16 * (peer == 0)] for peer, slot in enumerate(out_slots.unbind())]
    else:
        sent = [slot[:agreed] for slot in out_slots.unbind()]
    received = [slot[:agreed] for slot in in_slots.unbind()]
    dist.all_to_all(received, sent)  # <all to all>
    total = torch.empty(numel, dtype=torch.bfloat16, device=device)
    status = no_failure(device)
    kernel("stub decode_sum", _sum, received, [total, status])
    got = total.cpu()
    wanted = words_of(0, ranks * numel).view(ranks, numel)[rank].float()
    for peer in range(1, ranks):
        wanted = wanted + words_of(peer, ranks * numel).view(ranks, numel)[rank].float()
    assert torch.equal(got, wanted.to(torch.bfloat16))
