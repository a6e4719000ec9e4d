"""Broadcasts of bytes: words of a coded dtype are coded, at any address and of any size, and all other bytes arrive as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ranks as runner
import torch

from ds_zipccl import comm
from ds_zipccl.codecs import compress
from ds_zipccl.comm.host import byte_words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

#: Fragments of 128 KiB.
CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
AUTO = replace(CODED, mode="auto")
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
                comm.broadcast(tensor, 0, config=CODED)
                assert torch.equal(tensor, want), (kind, nbytes, offset)
                if rank == 0 and nbytes in (5000, 600_004):
                    (row,) = counters.rows()
                    assert row["ratio"] >= least, (kind, nbytes, row["ratio"])
    counters.reset()
    tensor = content("bfloat16", 300_000)
    comm.broadcast(tensor, 0, config=replace(CODED, codec="raw"))
    (row,) = counters.rows()
    assert rank != 0 or row["ratio"] < 1
    for _ in range(15):
        tensor = content("bfloat16", 300_000) if rank == 0 else torch.zeros(300_000, dtype=torch.uint8)
        handle = comm.broadcast(tensor, 0, async_op=True, config=AUTO)
        if handle is not None:
            handle.wait()
        assert torch.equal(tensor, content("bfloat16", 300_000))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full(reason="as with two ranks"))])
def test_bytes_arrive(ranks: int) -> None:
    runner.run(broadcasts, ranks)


def refused(rank: int, ranks: int, what: str) -> str:
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
    try:
        comm.broadcast(tensor, 0, config=replace(CODED, staging_mib=64))
    except comm.CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["size", "damage", "odd"])
def test_wrong_frames_are_refused(what: str) -> None:
    _, said = runner.run(refused, 2, what)
    assert "frame from global rank 0 refused" in said, said


def bounded(rank: int, ranks: int) -> None:
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
    comm.broadcast(tensor, 0, config=replace(CODED, staging_mib=64))
    assert torch.equal(tensor, want)
    assert rank != 0 or counters.rows()[0]["wire_bytes"] == nbytes + 32


def test_no_frame_is_larger_than_that_of_the_bytes() -> None:
    runner.run(bounded, 2)
