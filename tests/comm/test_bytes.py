"""Tensors that are no floats: masks and token numbers in sends, as hashes and as bits, and bytes in broadcasts."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import colliding

from ds_zipccl import comm
from ds_zipccl.codecs import compress
from ds_zipccl.comm.host import byte_words
from ds_zipccl.comm.host.p2p import known, message
from ds_zipccl.comm.host.p2p.known import Latest
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy.admission import SIDE_DTYPES
from ds_zipccl.telemetry import counters

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
#: Fragments of 128 KiB; a channel remembers 256 KiB.
SMALL = replace(CODED, staging_mib=1)
HEADER, KNOWN = 32, 48


def side(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype == torch.bool else 100, (numel * dtype.itemsize,), generator=generator)
    return content.to(torch.uint8).view(dtype)


def wire() -> int:
    return sum(row["wire_bytes"] for row in counters.rows())


def exchange(rank: int, tensor: torch.Tensor, config: ZipcclConfig = CODED, **more: int) -> int:
    """Send ``tensor`` from rank 0 to rank 1, compare, and return the bytes that rank 0 has sent."""
    before = wire()
    if rank == 0:
        comm.send(tensor, 1, config=config, role="pp", **more)
    else:
        got = torch.zeros_like(tensor)
        comm.recv(got, 0, config=config, role="pp", **more)
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
        got.view(torch.uint8).fill_(1)  # the receiver must have a copy of its own
    return wire() - before


@runner.together(2)
def bytes_on_the_wire(rank: int, ranks: int) -> None:
    """Bytes on the wire of every dtype: in full, again, changed, back again; other groups, tags and sizes have their own."""
    sent = partial(exchange, rank)
    for dtype in SIDE_DTYPES:
        numel = 40000 // dtype.itemsize
        full = HEADER + (numel // 8 if dtype == torch.bool else 40000)
        first, second = side(dtype, numel, 1), side(dtype, numel, 2)
        found = [sent(tensor) for tensor in (first, first, second, second, first)]
        assert found == ([full, KNOWN, full, KNOWN, full] if rank == 0 else [0] * 5), (dtype, found)
    if rank == 0:
        mask = torch.zeros(40000, dtype=torch.uint8)
        mask[7] = 3  # a bool of another byte than 0 and 1
        odd = mask.view(torch.bool)
        assert [sent(odd), sent(odd)] == [HEADER + 40000, KNOWN]
    else:
        odd = torch.zeros(40000, dtype=torch.bool)
        for _ in range(2):
            comm.recv(odd, 0, config=CODED)
            assert odd.view(torch.uint8)[7] == 3 and int(odd.view(torch.uint8).sum()) == 3
    mask, group = side(torch.bool, 40000, 1), dist.new_group([0, 1])
    full = HEADER + 5000
    found = [sent(mask), sent(mask, tag=1), sent(mask, group=group), sent(mask), sent(mask, tag=1), sent(mask, tag=7)]
    found += [sent(mask, tag=7), sent(mask[:32000]), sent(mask[:2000]), sent(mask[:2000])]
    wanted = [full, full, full, KNOWN, KNOWN, full, full, HEADER + 4000, HEADER + 250, HEADER + 250]
    assert found == (wanted if rank == 0 else [0] * len(wanted)), found
    kept = counters.memory().get("copies of side tensors received", 0)
    assert kept == (40000 * (len(SIDE_DTYPES) + 2) + 32000 if rank else 0), kept
    large = side(torch.int64, 30000, 5), side(torch.bool, 200_000, 5), side(torch.int64, 60000, 5)
    found = [sent(tensor, SMALL) for tensor in large for _ in range(2)]
    rest = 32 + 60000 * 8
    fragments = -(-200_000 // (1 << 17))
    assert found == (
        [32 + 240_000, KNOWN, 32 + 25000 + fragments * HEADER, KNOWN, rest, rest] if rank == 0 else [0] * 6
    ), found


@runner.together(2, 0)
@runner.together(2, 1, full="more programs")
@runner.together(2, 2, full="more programs")
def in_step(rank: int, ranks: int, seed: int) -> None:
    """Random messages of three channels, more than they remember, received in any order of wait(), from any rank too."""
    choose = random.Random(seed)
    kinds = [
        (torch.bool, 90_000),
        (torch.int64, 9000),
        (torch.uint8, 70_000),
        (torch.int32, 40_000),
        (torch.float32, 5000),
    ]
    for _ in range(12):
        plan = [(choose.choice(kinds), choose.randrange(2), choose.randrange(3)) for _ in range(choose.randrange(1, 9))]
        anywhere, order = choose.random() < 0.3, choose.sample(range(len(plan)), len(plan))
        tensors = [side(dtype, numel, content) for (dtype, numel), _, content in plan]
        if rank == 0:
            works = [comm.isend(t, 1, None, tag, config=SMALL) for t, (_, tag, _) in zip(tensors, plan, strict=True)]
            for work in works:
                work.wait()
        else:
            got = [torch.zeros_like(tensor) for tensor in tensors]
            source = None if anywhere else 0
            handles = [comm.irecv(g, source, None, tag, config=SMALL) for g, (_, tag, _) in zip(got, plan, strict=True)]
            for at in order:
                handles[at].wait()
                assert torch.equal(got[at], tensors[at]), (plan, order, at)
        dist.barrier()


@runner.together(2)
def two_threads_on_one_channel(rank: int, ranks: int) -> None:
    """Two threads send tensors of one kind on one channel; the receiver takes them in the order of arrival. Posting is slow, so that a
    thread without a lock would look at what it remembers while the other one posts."""
    post = message.Outgoing._post_first

    def slow(self: message.Outgoing) -> object:
        announcement = post(self)
        time.sleep(1e-3)
        return announcement

    message.Outgoing._post_first = slow  # type: ignore[method-assign,assignment]
    first, second = side(torch.int64, 9000, 1), side(torch.int64, 9000, 2)
    if rank == 0:
        runner.at_once(
            *(lambda t=tensor: [comm.send(t, 1, config=CODED) for _ in range(40)] for tensor in (first, second))
        )
        return
    seen = []
    for _ in range(80):
        got = torch.zeros_like(first)
        comm.recv(got, config=CODED)
        seen.append(torch.equal(got, first))
        assert seen[-1] or torch.equal(got, second)
    assert sum(seen) == 40


@runner.together(2)
def copies_that_differ_are_refused(rank: int, ranks: int) -> None:
    """The receiver has lost its copy, or holds another one: the hash tells."""
    mask = side(torch.bool, 40000, 1)
    exchange(rank, mask)
    if rank == 0:
        comm.send(mask, 1, config=CODED)
        comm.send(mask, 1, config=CODED)
        return
    found = []
    copies = known.inbox(comm.group_state.group_state(None), 0).copies(0)
    kind = (torch.bool, 40000)
    for change in (lambda: copies.put(kind, ~mask, 1 << 20), lambda: copies.drop(kind)):
        change()
        try:
            comm.recv(torch.zeros_like(mask), 0, config=CODED)
        except comm.CommError as error:
            found.append(str(error))
    said = "; ".join(found)
    assert said.count("frame from global rank 0 refused") == 2 and "MISMATCH" in said, said


def test_the_oldest_kind_is_dropped() -> None:
    latest: Latest[int] = Latest()
    kinds = [(torch.uint8, 10), (torch.int64, 1), (torch.bool, 7)]
    for number, kind in enumerate(kinds):
        latest.put(kind, number, 18)
    assert [latest.get(kind) for kind in kinds] == [None, 1, 2] and latest.nbytes() == 15
    latest.put(kinds[1], 5, 18)
    latest.put((torch.uint8, 4), 6, 18)
    assert [latest.get(kind) for kind in kinds] == [None, 5, None], "a tensor sent again is the latest"


@runner.together(2)
def known_frames_without_a_copy_are_refused(rank: int, ranks: int) -> None:
    """A known frame that nobody may send: of floats, or for a tag that remembers nothing."""
    from ds_zipccl import codecs
    from ds_zipccl.comm.transport.protocol import TagRange

    found = []
    for tag, tensor in ((0, torch.zeros(3000)), (5, side(torch.int64, 9000, 1))):
        if rank == 0:
            frame = codecs.known_frame(
                tensor.dtype, tensor.numel(), codecs.region_hash(tensor), torch.empty(48, dtype=torch.uint8)
            )
            dist.group.WORLD.send([frame], 1, TagRange.POINT_TO_POINT + tag).wait()
            continue
        try:
            comm.recv(tensor, 0, None, tag, config=CODED)
        except comm.CommError as error:
            found.append(str(error))
    assert "; ".join(found).count("frame from global rank 0 refused") == (2 if rank else 0), found


@runner.together(2)
def tokens_that_were_made_to_collide(rank: int, ranks: int) -> None:
    """Two batches of tokens whose hashes without a key are equal: the second one arrives, and not the first one again."""
    for tokens in colliding(40_000):
        if rank:
            got = torch.zeros_like(tokens)
            comm.recv(got, 0, config=CODED)
            assert torch.equal(got, tokens)
        else:
            comm.send(tokens, 1, config=CODED)


#: Fragments of 128 KiB.
PIECES = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
AUTO_PIECES = replace(PIECES, mode="auto")
#: Content of the bytes -> least ratio.
CONTENTS = {"bfloat16": 1.4, "float16": 1.1, "float32": 1.15, "random": 0.99, "zeros": 50.0, "numbers": 0.99}


def content(kind: str, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    numel = nbytes // 2 + 8
    if kind == "random":
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    if kind == "zeros":
        return torch.zeros(nbytes, dtype=torch.uint8)
    if kind == "numbers":
        return torch.randint(0, 1 << 62, (numel,), generator=generator).view(torch.uint8)[:nbytes]
    values = (torch.randn(numel, generator=generator) * 0.02).to(getattr(torch, kind))
    return values.view(torch.uint8)[:nbytes].clone()


@runner.together(2)
@runner.together(3, full="as with two ranks")
def broadcasts(rank: int, ranks: int) -> None:
    for kind, least in CONTENTS.items():
        for nbytes in (0, 1, 5000, 300_002, 600_004, 300_001):
            for offset in (0, 2, 1) if nbytes == 600_004 else (0,):
                want = content(kind, nbytes)
                here = offset if rank == 0 else 3 * offset % 4  # every rank has its own address
                tensor = torch.zeros(nbytes + 8, dtype=torch.uint8)[here : here + nbytes]
                if rank == 0:
                    tensor.copy_(want)
                counters.reset()
                comm.broadcast(tensor, 0, config=PIECES)
                assert torch.equal(tensor, want), (kind, nbytes, offset)
                if rank == 0 and nbytes in (5000, 600_004):
                    (row,) = counters.rows()
                    assert row["ratio"] >= least, (kind, nbytes, row["ratio"])
    counters.reset()
    tensor = content("bfloat16", 300_000)
    comm.broadcast(tensor, 0, config=replace(PIECES, codec="raw"))
    (row,) = counters.rows()
    assert rank != 0 or row["ratio"] < 1
    for _ in range(15):
        tensor = content("bfloat16", 300_000) if rank == 0 else torch.zeros(300_000, dtype=torch.uint8)
        handle = comm.broadcast(tensor, 0, async_op=True, config=AUTO_PIECES)
        if handle is not None:
            handle.wait()
        assert torch.equal(tensor, content("bfloat16", 300_000))


def wrong_frames_are_refused(rank: int, ranks: int, what: str) -> None:
    """The root sends a frame of words that does not fit: of too few bytes, or damaged."""
    tensor = content("bfloat16", 300_001 if what == "odd" else 300_000)

    def wrong(self: byte_words.ByteCoder, flat: torch.Tensor, *more: object) -> torch.Tensor:
        words = flat[:300_000].view(torch.bfloat16)
        frame = compress(words[:-1] if what == "size" else words, shaped=False, checksum=False)
        if what == "damage":
            frame[40:60] = 255
        return frame

    if rank == 0:
        byte_words.ByteCoder.compress = wrong  # type: ignore[method-assign]
        comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))
        return
    with pytest.raises(comm.CommError, match="frame from global rank 0 refused"):
        comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))


@runner.together(2)
def no_frame_is_larger_than_that_of_the_bytes(rank: int, ranks: int) -> None:
    """A sample that shrinks a little, in the middle of bytes that do not: the frame of words is larger than the receiver's buffer."""
    nbytes = 1 << 20
    tensor = content("random", nbytes)
    middle = (nbytes - byte_words.SAMPLE_BYTES) // 2
    tensor[middle + 4096 : middle + 8192] = content("bfloat16", 4096)
    words = compress(tensor.view(torch.bfloat16), shaped=False, checksum=False)
    assert words.numel() > nbytes + 32, "the data of this test"
    want = tensor.clone()
    if rank != 0:
        tensor.zero_()
    comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))
    assert torch.equal(tensor, want)
    assert rank != 0 or counters.rows()[0]["wire_bytes"] == nbytes + 32


for what in ("size", "damage", "odd"):
    runner.together(2, what)(wrong_frames_are_refused)


test_programs = runner.programs(__name__)
