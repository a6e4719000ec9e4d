"""Sends of more than one fragment: bits, matching, progress without the receiver's wait(), memory, bad announcements, lost peers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.host.buffer_pool import POOL
from ds_zipccl.comm.host.p2p import message
from ds_zipccl.comm.host.p2p.message import ANNOUNCEMENT_BYTES, Announcement, Body, parse_announcement
from ds_zipccl.comm.transport.protocol import BODY_TAGS, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

#: Fragments of 128 KiB.
CODED = ZipcclConfig(enabled=True, mode="always", staging_mib=1)
RAW = replace(CODED, codec="raw")
PIECE = 1 << 16
SIZES = (PIECE, PIECE + 1, 3 * PIECE - 7, 11 * PIECE)


def filled(seed: int, size: int) -> torch.Tensor:
    """bfloat16 of all textures, other ones for each seed."""
    pattern = corpus.tensor(corpus.mixed(20001, corpus.SUMMED["bf16"], 128, seed), corpus.SUMMED["bf16"])
    return pattern.repeat(-(-size // pattern.numel()))[:size].clone()


def bits(rank: int, ranks: int) -> None:
    """All sizes and kinds of bodies, blocking and not, overwritten after isend; a tensor with gaps; counters."""
    logical = 0
    for seed, size in enumerate(SIZES):
        for config in (CODED, RAW):
            want = filled(seed, size)
            if rank == 0:
                comm.send(want, 1, config=config)
                scratch = want.clone()
                work = comm.isend(scratch, 1, config=config)
                scratch.zero_()
                assert work.wait()
                comm.send(want.repeat_interleave(2)[::2], 1, config=config)
                logical += 3 * want.nbytes
            else:
                for kind in range(3):
                    got = torch.zeros(size * 2, dtype=want.dtype)[::2] if kind == 2 else torch.zeros_like(want)
                    comm.irecv(got, 0, config=config).wait() if kind == 1 else comm.recv(got, 0, config=config)
                    corpus.assert_same_bits(got.contiguous(), want)
    if rank == 0:
        (row,) = counters.rows()
        assert row["calls"] == 24 and row["logical_bytes"] == logical and 0 < row["wire_bytes"] < 0.99 * logical, row


def test_bits() -> None:
    runner.run(bits, 2)


def matching(rank: int, ranks: int) -> None:
    """Messages of one fragment and of several on one tag, waited for in any order, from any rank, from two threads at a time."""
    sizes = [3 * PIECE, 100, 5 * PIECE, 200, 2 * PIECE, 2 * PIECE]
    send, irecv = partial(comm.isend, config=CODED), partial(comm.irecv, config=CODED)
    if rank != 0:
        works = [send(filled(10 * rank + number, size), 0) for number, size in enumerate(sizes)]
        for work in works:
            work.wait()
        dist.barrier()
        assert [send(filled(90 + rank, 3 * PIECE), 0).wait() for _ in range(3)] == [True] * 3
        dist.barrier()
        _slowly()
        threads = [threading.Thread(target=_send_many, args=(rank, thread)) for thread in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    places = {(peer, number): torch.zeros(size).bfloat16() for peer in (1, 2) for number, size in enumerate(sizes)}
    handles = {key: irecv(place, key[0]) for key, place in places.items()}
    for key in sorted(handles, key=lambda key: (key[1] * 5 % 6, -key[0])):
        assert handles[key].wait() and handles[key].source_rank() == key[0]
        corpus.assert_same_bits(places[key], filled(10 * key[0] + key[1], sizes[key[1]]))
    dist.barrier()
    seen = []
    anywhere = [torch.zeros(3 * PIECE).bfloat16() for _ in range(6)]
    for place, work in [(place, irecv(place)) for place in anywhere]:
        work.wait()
        seen.append(work.source_rank())
        corpus.assert_same_bits(place, filled(90 + seen[-1], 3 * PIECE))
    assert sorted(seen) == [1, 1, 1, 2, 2, 2]
    dist.barrier()
    for number in range(20):
        got = torch.zeros(3 * PIECE).bfloat16()
        source = comm.recv(got, config=CODED)
        assert any(got.eq(10.0 * source + thread).all() for thread in range(2)), number


def _slowly() -> None:
    """Let other threads run between two fragments of a send."""
    post = message.Outgoing._send

    def slow(self: message.Outgoing, flat: torch.Tensor, tag: int) -> None:
        time.sleep(1e-3)
        post(self, flat, tag)

    message.Outgoing._send = slow  # type: ignore[method-assign]


def _send_many(rank: int, thread: int) -> None:
    for _ in range(5):
        comm.send(torch.full((3 * PIECE,), 10.0 * rank + thread).bfloat16(), 0, config=CODED)


def test_matching() -> None:
    runner.run(matching, 3)


def progress(rank: int, ranks: int) -> None:
    """A blocking send ends although the receiver waits for it only after a send of its own, and isend ends without any receive."""
    large, small = filled(1, 9 * PIECE), filled(2, 40000)
    if rank == 0:
        comm.send(large, 1, config=CODED)
        got = torch.zeros_like(small)
        comm.recv(got, 1, config=CODED)
        corpus.assert_same_bits(got, small)
        work = comm.isend(large, 1, config=CODED)
        dist.barrier()  # the receiver posts only after this
        work.wait()
        return
    got = torch.zeros_like(large)
    work = comm.irecv(got, 0, config=CODED)
    comm.send(small, 0, config=CODED)
    work.wait()
    corpus.assert_same_bits(got, large)
    dist.barrier()
    got.zero_()
    comm.recv(got, 0, config=CODED)
    corpus.assert_same_bits(got, large)


def test_progress_without_the_receivers_wait() -> None:
    runner.run(progress, 2, timeout=60)


def bounded(rank: int, ranks: int) -> None:
    for config in (CODED, RAW):
        tensor = torch.zeros(1 << 22, dtype=torch.bfloat16).random_()
        comm.send(tensor, 1, config=config) if rank == 0 else comm.recv(tensor, 0, config=config)
    assert 0 < POOL.peak <= CODED.staging_mib << 20, POOL.peak


def test_memory_is_bounded() -> None:
    runner.run(bounded, 2)


#: Bytes of an announcement of 200000 bfloat16 -> bytes that are refused, and words of the refusal.
BAD: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "version": (lambda content: content.__setitem__(4, 2), "version 2"),
    "body": (lambda content: content.__setitem__(5, 7), "no announcement has them"),
    "dtype": (lambda content: content.__setitem__(6, 3), "one dtype and size"),
    "report": (lambda content: content.__setitem__(7, 2), "no announcement has them"),
    "number": (lambda content: content.__setitem__(11, 255), "no announcement has them"),
    "reserved": (lambda content: content.__setitem__(12, 1), "no announcement has them"),
    "size": (lambda content: content.__setitem__(16, 1), "one dtype and size"),
    "padding": (lambda content: content.__setitem__(31, 1), "no announcement has them"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_announcements_are_refused(case: str) -> None:
    announcement = Announcement(Body.FRAMES, torch.bfloat16, 200000, BODY_TAGS - 1)
    part = announcement.pack(torch.full((40,), 9, dtype=torch.uint8))
    assert part.numel() == ANNOUNCEMENT_BYTES
    assert parse_announcement(part, torch.bfloat16, 200000) == announcement
    assert announcement.tag < 1 << 31 and announcement.tag >= TagRange.BODY > TagRange.CALIBRATION
    change, words = BAD[case]
    content = bytearray(part.numpy().tobytes())
    change(content)
    with pytest.raises(ValueError, match=words):
        parse_announcement(torch.frombuffer(content, dtype=torch.uint8), torch.bfloat16, 200000)


def _damage(what: str) -> None:
    """Damage what this rank sends: the announcement, or the third frame of the body."""
    calls, pack, compress = [0], Announcement.pack, message.FrameCoder.compress

    def damaged_pack(self: Announcement, buffer: torch.Tensor) -> torch.Tensor:
        return pack(self._replace(numel=self.numel + 1), buffer)

    def damaged_frame(self: message.FrameCoder, flat: torch.Tensor, *more: object) -> torch.Tensor:
        frame = compress(self, flat, *more)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] == 3:
            frame[20] += 1
        return frame

    if what == "announcement":
        Announcement.pack = damaged_pack  # type: ignore[method-assign]
    else:
        message.FrameCoder.compress = damaged_frame  # type: ignore[method-assign]


def one_refusal(rank: int, ranks: int, what: str) -> str:
    """The receiver's error, where the sender may be left with frames that nobody takes: it does not wait for them."""
    tensor = filled(3, 5 * PIECE)
    if rank == 0:
        _damage(what)
        handle = comm.isend(tensor, 1, config=CODED)
        dist.barrier()
        del handle
        return ""
    try:
        comm.recv(tensor, 0, config=CODED)
    except comm.CommError as error:
        dist.barrier()
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("what", ["announcement", "frame"])
def test_damage_is_refused(what: str) -> None:
    _, error = runner.run(one_refusal, 2, what)
    assert f"{what} from global rank 0 refused" in error, error


def lost(rank: int, ranks: int, role: str) -> None:
    """The sender or the receiver leaves in the middle of a body; the other rank gets an error that names it."""
    tensor, leaves = filled(4, 64 * PIECE), ("sender", "receiver").index(role)
    if rank == leaves:
        _leave_after(3)
    with pytest.raises(comm.CommError, match=f"global rank {leaves}"):
        for _ in range(50):  # the transport of the other rank may have taken all frames already
            comm.send(tensor, 1, config=CODED) if rank == 0 else comm.irecv(tensor, 0, config=CODED).wait()
    raise AssertionError("the peer left and was named")


def _leave_after(frames: int) -> None:
    """Let this rank exit at its frame number ``frames``, sent or received."""
    name = ("compress", "decompress")[dist.get_rank()]
    left, original = [frames], getattr(message.FrameCoder, name)

    def exits(*arguments: object, **more: object) -> object:
        left[0] -= 1
        return original(*arguments, **more) if left[0] else os._exit(3)

    setattr(message.FrameCoder, name, exits)


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_lost_peer_is_named(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(runner, "GRACE", 20.0)
    with pytest.raises(runner.RankFailure, match="the peer left and was named"):
        runner.run(lost, 2, role, timeout=30)
