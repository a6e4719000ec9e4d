"""The header: pack writes and parse reads it, and one hand-made frame shows each reason of FORMAT.md section 4 to reject a frame."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace

import corpus
import from_format
import pytest
import torch
from from_format import Raw
from hypothesis import given
from hypothesis import strategies as st

import ds_zipccl
from ds_zipccl import frame as framing
from ds_zipccl.frame import ChecksumId, CodecId, FrameErrorCode, Header

GOOD = Raw()
SHAPED = Raw(flags=2, ndim=3, dims=(2, 1, 2))
#: four zeros of bf16: index, table, nothing else
CODED = Raw(codec=1, dtype=1, log2=9, payload=bytes([1]) + bytes(31))
#: two chunks of zeros
CHUNKS = Raw(codec=1, dtype=1, log2=7, numel=4096, payload=bytes([1, 0, 0, 0, 4]) + bytes(11 + 96))
HUGE = 1 << 62


def code(frame: Raw | torch.Tensor, out: torch.Tensor | None = None, **more: object) -> FrameErrorCode | None:
    """Return why decompress refuses the frame; None if it does not. Any error but a FrameError is a failure."""
    try:
        ds_zipccl.decompress(frame.tensor() if isinstance(frame, Raw) else frame, out, **more)
    except ds_zipccl.FrameError as error:
        assert str(error).startswith(error.code.name + ": ")
        return error.code
    return None


def test_hand_made_frames_are_good(route: str) -> None:
    assert ds_zipccl.decompress(GOOD.tensor()).tolist() == list(b"abcd")
    assert ds_zipccl.decompress(SHAPED.tensor()).tolist() == [[[97, 98]], [[99, 100]]]
    assert ds_zipccl.decompress(CODED.tensor(), route=route).tolist() == [0, 0, 0, 0]
    assert ds_zipccl.decompress(CHUNKS.tensor(), route=route).tolist() == [0] * 4096
    assert ds_zipccl.decompress(_entry(3, 2, b"\0\x0f").tensor(), route=route).tolist() == [0] * 4
    signed = ds_zipccl.decompress(_entry(3, 3, b"\1\x0f\5").tensor(), route=route)
    assert signed.signbit().tolist() == [True, False, True, False]


def _entry(mode: int, tail: int, data: bytes = b"\1" * 16) -> Raw:
    """CODED with another table entry for its only block, and ``data``, padded, after the table."""
    table = bytes([0]) + struct.pack("<H", mode << 13 | tail)
    return replace(CODED, payload=CODED.payload[:16] + table.ljust(16, b"\0") + data.ljust(16, b"\0"))


def _other(frame: Raw, at: int, data: bytes) -> Raw:
    return replace(frame, payload=frame.payload[:at] + data + frame.payload[at + len(data) :])


REFUSED = {
    "magic": (replace(GOOD, magic=b"ZCCM"), FrameErrorCode.MAGIC),
    "version 0": (replace(GOOD, version=0), FrameErrorCode.VERSION),
    "version 1": (replace(GOOD, version=1), FrameErrorCode.VERSION),
    "version 3": (replace(GOOD, version=3), FrameErrorCode.VERSION),
    "unknown codec": (replace(GOOD, codec=5), FrameErrorCode.CODEC),
    "codec of another dtype": (replace(CODED, dtype=4), FrameErrorCode.CODEC),
    "dtype 0": (replace(GOOD, dtype=0), FrameErrorCode.DTYPE),
    "dtype 18": (replace(GOOD, dtype=18), FrameErrorCode.DTYPE),
    "overflowed": (replace(GOOD, flags=4), FrameErrorCode.OVERFLOWED),
    "overflowed with a shape": (replace(SHAPED, flags=6), FrameErrorCode.RESERVED),
    "unknown flag": (replace(GOOD, flags=8), FrameErrorCode.RESERVED),
    "dimensions without shape": (replace(GOOD, ndim=1), FrameErrorCode.RESERVED),
    "checksum without flag": (replace(GOOD, checksum=1), FrameErrorCode.RESERVED),
    "checksum id without flag": (replace(GOOD, checksum_id=1), FrameErrorCode.RESERVED),
    "reserved byte": (replace(GOOD, reserved=1), FrameErrorCode.RESERVED),
    "blocks in a raw frame": (replace(GOOD, log2=9), FrameErrorCode.RESERVED),
    "no blocks in a coded frame": (replace(CODED, log2=0), FrameErrorCode.RESERVED),
    "blocks of 64": (replace(CODED, log2=6), FrameErrorCode.RESERVED),
    "blocks of 2048": (replace(CODED, log2=11), FrameErrorCode.RESERVED),
    "padding of the shape": (replace(SHAPED, padding=b"\0\0\0\0\0\0\0\1"), FrameErrorCode.RESERVED),
    "65 dimensions": (Raw(flags=2, ndim=65, dims=(1,) * 65, numel=1, payload=b"a"), FrameErrorCode.SHAPE),
    "255 dimensions in a short buffer": (replace(GOOD, flags=2, ndim=255), FrameErrorCode.SHAPE),
    "product of sizes": (replace(SHAPED, dims=(2, 1, 3)), FrameErrorCode.SHAPE),
    "product overflows to numel": (replace(SHAPED, dims=(1 << 32, 1 << 32, 4), numel=4), FrameErrorCode.SHAPE),
    "scalar of four": (replace(GOOD, flags=2), FrameErrorCode.SHAPE),
    "size past 2^63": (Raw(flags=2, ndim=2, dims=((1 << 64) - 1, 0), numel=0, payload=b""), FrameErrorCode.SHAPE),
    "sizes past 2^63": (Raw(flags=2, ndim=3, dims=(HUGE, HUGE, 0), numel=0, payload=b""), FrameErrorCode.SHAPE),
    "header cut": (GOOD.tensor()[:31], FrameErrorCode.TRUNCATED),
    "nothing": (GOOD.tensor()[:0], FrameErrorCode.TRUNCATED),
    "shape cut": (SHAPED.tensor()[:40], FrameErrorCode.TRUNCATED),
    "payload cut": (GOOD.tensor()[:-1], FrameErrorCode.TRUNCATED),
    "frame_bytes past the buffer": (replace(GOOD, size=37), FrameErrorCode.TRUNCATED),
    "frame_bytes of 2^64": (replace(GOOD, size=(1 << 64) - 1), FrameErrorCode.TRUNCATED),
    "frame_bytes before the shape's end": (replace(SHAPED, size=40), FrameErrorCode.TRUNCATED),
    "frame_bytes 0": (replace(GOOD, size=0), FrameErrorCode.TRUNCATED),
    "raw payload short": (replace(GOOD, size=35), FrameErrorCode.SIZE),
    "raw payload long": (replace(GOOD, payload=b"abcde"), FrameErrorCode.SIZE),
    "numel of 2^64 in a raw frame": (replace(GOOD, numel=(1 << 64) - 1), FrameErrorCode.SIZE),
    "numel of 2^64 in a coded frame": (replace(CODED, numel=(1 << 64) - 1), FrameErrorCode.SIZE),
    "coded payload short": (replace(CODED, payload=CODED.payload[:16]), FrameErrorCode.SIZE),
    "coded payload long": (replace(CODED, payload=CODED.payload + bytes(48)), FrameErrorCode.SIZE),
    "CRC32": (replace(GOOD, flags=1, checksum=1), FrameErrorCode.CHECKSUM),
    "XXH3": (replace(GOOD, flags=1, checksum_id=1, checksum=1), FrameErrorCode.CHECKSUM),
    "unknown checksum": (replace(GOOD, flags=1, checksum_id=2), FrameErrorCode.CHECKSUM),
    "first chunk before the index ends": (replace(CODED, payload=bytes(32)), FrameErrorCode.INDEX),
    "first chunk late": (replace(CODED, payload=bytes([2]) + bytes(31)), FrameErrorCode.INDEX),
    "second chunk outside": (_other(CHUNKS, 4, b"\xff" * 4), FrameErrorCode.INDEX),
    "second chunk before the first": (replace(CHUNKS, payload=CHUNKS.payload[:4] + bytes(204)), FrameErrorCode.INDEX),
    "second chunk inside the first": (_other(CHUNKS, 4, b"\3"), FrameErrorCode.BLOCK),
    "payload longer than its chunk": (replace(CODED, payload=CODED.payload + bytes(16)), FrameErrorCode.BLOCK),
    "mode 4": (_entry(4, 0), FrameErrorCode.BLOCK),
    "mode 7": (_entry(7, 0), FrameErrorCode.BLOCK),
    "fill of half a word": (_entry(0, 1), FrameErrorCode.BLOCK),
    "fill of two words": (_entry(0, 4), FrameErrorCode.BLOCK),
    "raw with a tail": (_entry(1, 2), FrameErrorCode.BLOCK),
    "tail outside the chunk": (_entry(3, 17), FrameErrorCode.BLOCK),
    "sparse with unknown flags": (_entry(3, 3, b"\3\x0f\5"), FrameErrorCode.BLOCK),
    "sparse without room for its signs": (_entry(3, 2, b"\1\x0f"), FrameErrorCode.BLOCK),
    "sparse without room for its map": (_entry(3, 1), FrameErrorCode.BLOCK),
    "sparse without room for its words": (_entry(3, 2), FrameErrorCode.BLOCK),
    "cascade without its tail": (_entry(2, 0, b"\xff" * 16), FrameErrorCode.BLOCK),
    "a row payload without a width": (Raw(codec=7, payload=bytes(64)), FrameErrorCode.ROWS),
    "a row payload without room for its literals": (Raw(codec=7, payload=b"\1" + bytes(62)), FrameErrorCode.SIZE),
    "the codec that is gone": (Raw(codec=8, payload=bytes(16)), FrameErrorCode.CODEC),
    "bits of bytes": (Raw(codec=9, payload=b"a"), FrameErrorCode.CODEC),
    "two bytes of bits": (Raw(codec=9, dtype=10, payload=b"ab"), FrameErrorCode.SIZE),
    "blocks of bits": (Raw(codec=9, dtype=10, log2=7, payload=b"a"), FrameErrorCode.RESERVED),
    "trim of 24 bits": (_other(replace(CODED, dtype=3), 19, bytes([24])), FrameErrorCode.BLOCK),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_code(name: str, route: str) -> None:
    frame, wanted = REFUSED[name]
    assert code(frame, route=route) == wanted


def test_every_code_is_shown() -> None:
    shown = {wanted for _, wanted in REFUSED.values()} | {FrameErrorCode.MISMATCH}
    assert shown == set(FrameErrorCode)
    assert code(GOOD, torch.empty(4, dtype=torch.int8)) == FrameErrorCode.MISMATCH


def test_the_release_of_an_old_frame_is_named() -> None:
    with pytest.raises(
        ds_zipccl.FrameError, match=r"format version 1, which ds_zipccl 0\.1 wrote; this package reads version 2"
    ):
        framing.parse(replace(GOOD, version=1).tensor())
    with pytest.raises(ds_zipccl.FrameError, match="format version 3; this package reads version 2"):
        framing.parse(replace(GOOD, version=3).tensor())


def test_errors_survive_pickling() -> None:
    """Processes send their errors to each other."""
    error = pickle.loads(pickle.dumps(ds_zipccl.FrameError(9, "the frame was damaged")))
    assert error.code is FrameErrorCode.CHECKSUM
    assert str(error) == "CHECKSUM: the frame was damaged"


def test_what_is_not_a_frame_at_all() -> None:
    for wrong in (
        GOOD.tensor().view(torch.int8),
        GOOD.tensor().view(2, -1),
        torch.zeros(72, dtype=torch.uint8)[::2],
        GOOD.tensor().to("meta"),
    ):
        with pytest.raises(TypeError, match="a frame is a contiguous 1-D uint8 CPU tensor, got"):
            framing.parse(wrong)


headers = st.builds(
    Header,
    codec=st.just(CodecId.RAW),
    dtype=st.sampled_from(list(framing.DTYPES.values())),
    numel=st.just(0),
    frame_bytes=st.just(0),
    shape=st.none() | st.lists(st.integers(0, 5), max_size=64).map(tuple),
    checksum=st.none() | st.sampled_from(ChecksumId),
)


@given(headers)
def test_pack_and_parse(header: Header) -> None:
    numel = torch.Size(header.shape).numel() if header.shape is not None else 7
    frame_bytes = header.payload_at + min(numel, 3)
    header = replace(header, numel=numel, frame_bytes=frame_bytes)
    buffer = torch.arange(frame_bytes + 9).to(torch.uint8)
    framing.pack(header, buffer)
    parsed = framing.parse(buffer)
    assert parsed == header
    raw = buffer.numpy().tobytes()[:frame_bytes]
    if header.checksum is not None:
        assert raw == from_format.with_checksum(raw, int(header.checksum))
    assert buffer[header.payload_at :].tolist() == [i % 256 for i in range(header.payload_at, frame_bytes + 9)]


def test_every_single_bit_flip_is_refused() -> None:
    """With a checksum of either kind, in one frame of each codec, every bit counts."""
    tensor = corpus.tensor(corpus.mixed(200, corpus.BF16, 128, 3), corpus.BF16).view(100, 2)
    for codec in ("raw", "cascade"):
        for kind in ChecksumId:
            written = ds_zipccl.compress(tensor, codec, block=128).numpy().tobytes()
            frame = torch.frombuffer(bytearray(from_format.with_checksum(written, int(kind))), dtype=torch.uint8)
            assert framing.parse(frame).checksum is kind
            for bit in range(8 * frame.numel()):
                frame[bit // 8] ^= 1 << bit % 8
                assert code(frame) is not None, f"bit {bit} of a {codec} frame with {kind.name}"
                frame[bit // 8] ^= 1 << bit % 8
            assert code(frame) is None


def test_new_frames_have_the_checksum_that_the_document_names() -> None:
    frame = ds_zipccl.compress(torch.arange(9))
    assert framing.parse(frame).checksum is framing.CHECKSUM is ChecksumId(max(from_format.CHECKSUMS))
    assert framing.parse(ds_zipccl.compress(torch.arange(9), checksum=False)).checksum is None
