"""The choice between coded frames and the tensor's own bytes for sends in mode auto, by the times of their receivers.

The sender alone chooses, because a message names its kind. Some messages ask for a report: the receiver sends the seconds from the moment
when it saw the announcement to the moment when it had the tensor. That is the time for which it waits, on its own clock. The sender posts
the receive of the report before the announcement, so that the report leaves at once. Reports are asynchronous: the sender looks into the
memory of those it expects at its next send. Without reports the choice stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.transport.protocol import TagRange, Transport
from ds_zipccl.policy import trial
from ds_zipccl.telemetry import counters

_MAGIC = b"ZCRP"
#: magic, number of the send, seconds; a CRC-32 of these follows: the sender may look while the bytes arrive.
_LAYOUT = struct.Struct("<4sId")
_REPORT_BYTES = _LAYOUT.size + 4
#: Reports that a receiver keeps until they are surely sent (admission: the sender of the message expects each, so that it leaves at once).
_SENT_REPORTS = 64


class _Expected(NamedTuple):
    raw: bool
    number: int
    buffer: torch.Tensor
    handle: dist.Work


class Sends:
    """The sends of one kind to one rank: role, dtype, size, factors or not. ``on_choice`` is called with the text of every choice."""

    def __init__(self, on_choice: Callable[[str], None]) -> None:
        self._on_choice = on_choice
        self._lock = threading.Lock()
        self._expected: list[_Expected] = []
        self._trial = trial.SendTrial()

    def next_way(self) -> Way:
        """Return the way of the next send; does not block."""
        with self._lock:
            self._read_reports()
            turn = self._trial.next_turn()
            return Way(turn.schedule == 1, self if turn.timed else None)

    def expect(self, transport: Transport, peer: int, number: int, raw: bool) -> None:
        """Post the receive of the report on the send of this number."""
        buffer = tensors.filled(_REPORT_BYTES, 0, torch.uint8)
        handle = transport.post_recv(buffer, peer, TagRange.REPORT + number)
        with self._lock:
            self._expected.append(_Expected(raw, number, buffer, handle))

    def _read_reports(self) -> None:
        """Take the reports that have arrived, and judge them."""
        waiting, reported = [], []
        for expected in self._expected:
            seconds = _parse(expected.buffer, expected.number)
            if seconds is None:
                waiting.append(expected)
                continue
            with contextlib.suppress(RuntimeError):
                expected.handle.wait()  # the bytes are here: this only ends the operation
            reported.append((int(expected.raw), seconds))
        self._expected = waiting
        if reported and self._trial.judge(reported):
            name, (coded, raw) = ("coded", "raw")[self._trial.chosen], self._trial.medians
            self._on_choice(
                f"{name} from send {self._trial.sends} on (raw {raw * 1e3:.3g} ms, coded {coded * 1e3:.3g} ms)"
            )


class Way(NamedTuple):
    """The way of one send: ``raw``, and ``trial``, the choice that wants a report on it, if any."""

    raw: bool = False
    trial: Sends | None = None


class _Memory:
    """The choices between coded and raw sends, and the reports on their way."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, str, torch.dtype, int, bool], Sends] = {}
        self.reports: deque[tuple[dist.Work, torch.Tensor]] = deque(maxlen=_SENT_REPORTS)


def is_chosen(ctx: OpContext) -> bool:
    """Return whether the sender may choose the way of a message of this operation. Equal on both sides."""
    return ctx.config.mode_of(ctx.role) == "auto" and ctx.codec != "raw"


def next_way(ctx: OpContext, peer: int, flat: torch.Tensor, factors: bool) -> Way:
    """Return the way of the send of ``flat`` to rank ``peer``: coded, except where the times of such sends choose. Does not block.

    ``factors``: ``flat`` is the product of factors, which are coded in its place.
    """
    if not is_chosen(ctx) or ctx.staging is not None:
        return Way()
    size = max(0, flat.nbytes - 1).bit_length()
    memory, key = ctx.state.of(_Memory), (peer, ctx.role, flat.dtype, size, factors)
    found = memory.sends.get(key)
    if found is None:
        dtype = str(flat.dtype).removeprefix("torch.")
        kind = f"{'factors of ' * factors}{dtype}, {trial.size_text(size)}, to global rank {ctx.global_rank(peer)}"
        made = Sends(functools.partial(counters.record_choice, ctx.role, ctx.op, kind))
        found = memory.sends.setdefault(key, made)  # all threads get the same object
    return found.next_way()


def report(ctx: OpContext, peer: int, number: int, seconds: float) -> None:
    """Send a report on the send of this number of rank ``peer``. Does not block, and does not raise: the message itself has arrived."""
    content = _LAYOUT.pack(_MAGIC, number, seconds)
    buffer = tensors.of_buffer(bytearray(content + struct.pack("<I", zlib.crc32(content))))
    with contextlib.suppress(RuntimeError):
        ctx.state.of(_Memory).reports.append((ctx.transport.post_send(buffer, peer, TagRange.REPORT + number), buffer))


def _parse(buffer: torch.Tensor, number: int) -> float | None:
    """Return the seconds of a report on the send of this number; None while it has not arrived as a whole."""
    content = buffer.numpy().tobytes()
    magic, found, seconds = _LAYOUT.unpack_from(content)
    (crc,) = struct.unpack_from("<I", content, _LAYOUT.size)
    whole = magic == _MAGIC and found == number and crc == zlib.crc32(content[: _LAYOUT.size])
    return float(seconds) if whole else None
