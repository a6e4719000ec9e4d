"""Transports that reuse memory, and streams that take less than they get."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from test_sync import refused
from test_sync_message import Pair, apply_all

from ds_zipccl import sync
from ds_zipccl.sync import Receiver, Sender, SyncErrorCode

Code = SyncErrorCode


def test_a_part_that_changes_after_its_proof_is_refused(pair: Pair) -> None:
    """A transport that receives every part into the same memory."""
    _, receiver, state, frames = pair
    buffer = torch.empty(max(map(len, frames)), dtype=torch.uint8)

    def reused() -> Iterator[torch.Tensor]:
        for part in frames:
            buffer[: len(part)] = part
            yield buffer[: len(part)]

    refused(receiver, reused(), Code.DAMAGED, Code.TRUNCATED, Code.FORMAT)
    apply_all(receiver, state, frames)


def test_records_of_one_length_in_one_memory_are_refused() -> None:
    """The later record is whole and right, but it is not the one whose words were proven."""
    made, receiver = Sender(fragment_mib=1), Receiver()
    state = {"x": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    receiver.apply(made.pack(state))
    state["x"] = state["x"].clone()
    state["x"][3] = state["x"][(1 << 19) + 5] = 1
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def reused() -> Iterator[torch.Tensor]:
        for part in frames:
            buffer[: len(part)] = part
            yield buffer[: len(part)]

    frames = list(made.pack(state))
    assert len(frames) == 3 and len(frames[1]) == len(frames[2])
    refused(receiver, reused(), Code.DAMAGED)
    assert torch.equal(receiver.apply(frames)["x"], state["x"])


def test_a_stream_that_takes_a_part_of_each_write_gets_all(pair: Pair) -> None:
    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.got = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.got += bytes(data[:100])
            return min(len(data), 100)

    frames = pair[3]
    sync.save(frames, slow := Slow())
    assert slow.got == b"".join(part.numpy().tobytes() for part in frames)
