"""SAME and LIST chunks: the choice of a chunk's form, its bytes, their sizes, and the LISTs that a decoder refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache

import corpus
import from_format
import numpy as np
import pytest
import torch
import variants
from corpus import assert_same_bits
from from_format import Raw

import ds_zipccl
from ds_zipccl import codecs, tensors
from ds_zipccl import frame as framing
from ds_zipccl.frame import FrameErrorCode

route = variants.each(variants.COMPILED)
PLAIN = {"shaped": False, "checksum": False}
#: Words of a delta payload; those of 8 bits are bytes.
KINDS = {**corpus.SUMMED, "bytes": corpus.E4M3}
CHUNK = corpus.CHUNK_BLOCKS * 128


def forms(frame: torch.Tensor) -> list[str]:
    """The form of each chunk of a delta frame."""
    header = framing.parse(frame)
    chunk = corpus.CHUNK_BLOCKS * header.block
    words = header.numel if header.dtype in codecs.SUMMED_DTYPES else header.numel * header.dtype.itemsize
    index = frame[header.payload_at :].view(-1)[: 4 * -(-words // chunk)].clone().view(torch.int32).tolist()
    starts = [16 * (entry & 0x7FFFFFFF) for entry in index] + [header.frame_bytes - header.payload_at]
    return [
        "LIST" if entry < 0 else "SAME" if start == end else "TABLE"
        for entry, start, end in zip(index, starts, starts[1:], strict=False)
    ]


def roundtrip(tensor: torch.Tensor, base: torch.Tensor, route: str, **arguments: object) -> torch.Tensor:
    """The frame, after proof that it gives ``tensor`` apart from the base and in its place, in a buffer of exactly its bound."""
    ndim = tensor.dim() if arguments.get("shaped", True) else None
    bound = codecs.compress_bound(tensor.numel(), tensor.dtype, "delta", ndim=ndim, block=arguments["block"])
    buffer = torch.full((bound + 64,), 0xA5, dtype=torch.uint8)
    frame = ds_zipccl.compress(tensor, "delta", base=base, out=buffer[:bound], route=route, **arguments)
    assert (buffer[bound:] == 0xA5).all(), f"wrote past the bound at {tensor.numel()} words"
    kept = base.clone()
    assert_same_bits(ds_zipccl.decompress(frame, base=base, route=route).view(tensor.shape), tensor)
    assert_same_bits(base, kept)
    assert ds_zipccl.decompress(frame, kept, base=kept, route=route) is kept
    assert_same_bits(kept.view(tensor.shape), tensor)
    return frame


def _coded(words: np.ndarray, base: np.ndarray, kind: corpus.Float, block: int, route: str) -> torch.Tensor:
    return roundtrip(corpus.tensor(words, kind), corpus.tensor(base, kind), route, block=block, **PLAIN)


def _changed(
    numel: int, kind: corpus.Float, seed: int, count: int, run: int, reach: int
) -> tuple[np.ndarray, np.ndarray]:
    words = corpus.bell(numel, kind, seed)
    places = corpus.some_places(numel, count, seed, run)
    return words, corpus.moved(words, kind, places, corpus.changes(len(places), seed, reach))


#: Number of changed words of n -> the form of the chunk, where the format's rules 1 to 4 decide alone.
COUNTS = {
    "none": (lambda n: 0, "SAME"),
    "one": (lambda n: 1, "LIST"),
    "some": (lambda n: n // 30, "LIST"),
    "an eighth": (lambda n: n // 8, "LIST"),
    "more than an eighth": (lambda n: n // 8 + 1, None),
    "a quarter": (lambda n: n // 4, None),
    "more than a quarter": (lambda n: n // 4 + 1, "TABLE"),
}


@cache
def _written(name: str, count: str, run: int, reach: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Words, base, and their frame as the document has it: a whole chunk and a short one, with blocks of 128."""
    kind = KINDS[name]
    parts = [_changed(n, kind, 7 * run + n, COUNTS[count][0](n), run, reach) for n in (CHUNK, 397)]
    words, base = (np.concatenate(each) for each in zip(*parts, strict=True))
    dtype = framing.DTYPE_IDS[kind.dtype]
    return words, base, from_format.encode(words.tolist(), dtype, 128, None, False, base=base.tolist())


@pytest.mark.parametrize("run, reach", [(1, 1), (1, 6), (1, 30), (24, 5)], ids=["units", "levels", "far", "runs"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", KINDS)
def test_shares_of_changed_words(route: str, name: str, count: str, run: int, reach: int) -> None:
    """Of every share the frame is the document's, and its chunks have the form that the share gives."""
    words, base, wanted = _written(name, count, run, reach)
    frame = _coded(words, base, KINDS[name], 128, route)
    assert frame.numpy().tobytes() == wanted
    form = COUNTS[count][1]
    if run == 1 and form is not None:
        assert forms(frame) == [form, form]


@pytest.mark.parametrize("block", corpus.BLOCKS)
@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_every_size(route: str, name: str, block: int) -> None:
    """Chunks of one form next to chunks of another, and ragged ends of every length that matters to a kernel."""
    kind = KINDS[name]
    chunk = corpus.CHUNK_BLOCKS * block
    for at, ragged in enumerate((0, 1, 3, 4, 7, 8, 31, 63, 64, 65, block + 1)):
        numel = (chunk if at == 0 else 0) + ragged + (block if at == 5 else 0)
        for count in sorted({1, numel // 60 + 1, numel // 9, numel // 6}):
            words, base = _changed(numel, kind, at, min(count, numel), 1, 9)
            frame = _coded(words, base, kind, block, route)
            if numel < 2500:
                dtype = framing.DTYPE_IDS[kind.dtype]
                wanted = from_format.encode(words.tolist(), dtype, block, None, False, base=base.tolist())
                assert frame.numpy().tobytes() == wanted, f"{count} of {numel} words"


def test_forms_in_one_frame(route: str) -> None:
    """Unchanged chunks before, between and behind others."""
    kind = corpus.BF16
    words = corpus.bell(6 * CHUNK + 40, kind, 3)
    base = words.copy()
    for chunk, count in ((1, 20), (3, 900), (4, 1)):
        here = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        places = corpus.some_places(CHUNK, count, chunk)
        base[here] = corpus.moved(words[here], kind, places, corpus.changes(count, chunk, 4))
    frame = _coded(words, base, kind, 128, route)
    assert forms(frame) == ["SAME", "LIST", "SAME", "TABLE", "LIST", "SAME", "SAME"]
    wanted = from_format.encode(words.tolist(), 1, 128, None, False, base=base.tolist())
    assert frame.numpy().tobytes() == wanted


@pytest.mark.parametrize("name", KINDS)
def test_sign_flips_and_the_farthest_words(route: str, name: str) -> None:
    """|D| as large as it can be, and words that wrap around the order of the floats."""
    kind = KINDS[name]
    words = corpus.bell(500, kind, 1)
    places = corpus.some_places(500, 40, 1)
    half = 1 << (8 * kind.word(0).nbytes - 1)
    for units in (half, half - 1, 1 - half, 5, -5, 6, -6):
        base = corpus.moved(words, kind, places, np.full(40, units))
        assert forms(_coded(words, base, kind, 128, route)) == ["LIST"]
    flipped = words.copy()
    flipped[places] ^= kind.word(kind.sign)
    for before in (flipped, np.zeros_like(words), ~words):
        one, other = words.copy(), before.copy()
        other[np.setdiff1d(np.arange(500), places)] = one[np.setdiff1d(np.arange(500), places)]
        _coded(one, other, kind, 128, route)
        _coded(other, one, kind, 128, route)


# --- sizes


@pytest.mark.parametrize(
    "share, floor",
    [(0, 7200), (0.001, 740), (0.01, 157), (0.02, 92), (0.03, 66), (0.05, 44.8), (0.1, 26.7), (0.2, 16.4), (0.6, 7)],
)
def test_independent_changes_take_little_more_than_their_entropy(share: float, floor: float) -> None:
    """FORMAT.md 2.5 has these ratios, of four times as many words."""
    n = 1 << 20
    words = corpus.bell(n, corpus.BF16, 1)
    places = np.flatnonzero(corpus.hashes(n, 2) < np.uint64(share * 2**63) * np.uint64(2)) if share else np.arange(0)
    draws = corpus.hashes(len(places), 3)
    units = np.where(draws % np.uint64(66) == 0, 2, 1) * np.where(draws >> np.uint64(63), 1, -1)
    base = corpus.moved(words, corpus.BF16, places, units)
    tensor, before = corpus.tensor(words, corpus.BF16), corpus.tensor(base, corpus.BF16)
    frame = ds_zipccl.compress(tensor, "delta", base=before, **PLAIN)
    assert tensor.nbytes / frame.numel() >= floor
    assert_same_bits(ds_zipccl.decompress(frame, base=before), tensor)


# --- hand-made LISTs


def chunk(sets: list[tuple[int, int]], bits: str, words: bytes = b"", levels: int | None = None) -> bytes:
    """A LIST chunk by its fields, none of them checked: (m, r) of each level, and the bit string."""
    head = bytes([len(sets) if levels is None else levels]) + b"".join(struct.pack("<HB", m, r) for m, r in sets)
    ones = [int(bit) for bit in bits.replace(" ", "")]
    packed = np.packbits(np.array(ones, np.uint8), bitorder="little").tobytes()
    return (head + words + packed).ljust(framing.pad16(len(head + words + packed)), b"\0")


def listed(data: bytes, dtype: int = 1, numel: int = 16) -> Raw:
    """A frame of one chunk that its index calls a LIST."""
    index = struct.pack("<I", 1 << 31 | 1).ljust(16, b"\0")
    return Raw(codec=2, dtype=dtype, log2=7, numel=numel, payload=index + data)


#: Two of 16 words, at 5 and 9: by -1, and by 2. Low bits, signs, rest of level 1, rest of level 2.
TWO = ([(2, 2), (1, 0)], "10 11 10 01 1 01")
GOOD = listed(chunk(*TWO))
ONE = ([(1, 0)], "0 1")
ESCAPED = ([(1, 0)] * 6, "1 1 1 1 1 1 1")


def _base(frame: Raw) -> torch.Tensor:
    dtype = framing.DTYPES[frame.dtype]
    return torch.arange(frame.numel * dtype.itemsize).to(torch.uint8).view(dtype)


def _decode(frame: Raw, route: str) -> torch.Tensor | FrameErrorCode:
    try:
        return ds_zipccl.decompress(frame.tensor(), base=_base(frame), route=route)
    except ds_zipccl.FrameError as error:
        return error.code


def test_hand_made_lists_are_good(route: str) -> None:
    def bits(tensor: torch.Tensor) -> list[int]:
        return tensor.view(torch.int16).tolist()

    before = bits(_base(GOOD))
    for frame in (GOOD, replace(GOOD, payload=GOOD.payload + bytes(32))):
        changed = {
            i: (was, now)
            for i, (was, now) in enumerate(zip(before, bits(_decode(frame, route)), strict=True))
            if was != now
        }
        assert changed == {5: (0x0B0A, 0x0B09), 9: (0x1312, 0x1314)}
    assert bits(_decode(listed(chunk(*ONE)), route))[0] == before[0] + 1
    escaped = bits(_decode(listed(chunk(*ESCAPED, words=b"\x34\x12")), route))
    assert escaped == [0x1234, *before[1:]]
    bytes_of = _decode(listed(chunk(*ONE), dtype=8, numel=1), route).view(torch.uint8).tolist()
    assert bytes_of == [1, 1, 2, 3]
    unchanged = Raw(codec=2, dtype=1, log2=7, numel=16, payload=b"\1".ljust(16, b"\0"))
    assert bits(_decode(unchanged, route)) == before


REFUSED = {
    "no byte": listed(b""),
    "no level": listed(chunk([], "")),
    "seven levels": listed(chunk([(1, 0)] * 7, "0 1111111")),
    "no word in level 1": listed(chunk([(0, 0)], "")),
    "no word in level 2": listed(chunk([(1, 0), (0, 0)], "0 1")),
    "more words in level 2 than in level 1": listed(chunk([(1, 0), (2, 0)], "0 1 1 1")),
    "more than a quarter of the words": listed(chunk([(5, 0)], "00000 11111")),
    "more than a quarter of a few words": replace(listed(chunk(*ONE)), numel=3),
    "r of 14": listed(chunk([(1, 14)], "0" * 15 + "1")),
    "r of 255": listed(chunk([(1, 255)], "0 1" + "0" * 300 + "1")),
    "sets that end behind the chunk": listed(chunk([(1, 0)] * 4, "0 1111", levels=6)[:16]),
    "words that end behind the chunk": replace(listed(chunk([(512, 0)] * 6, "")[:32]), numel=2048),
    "low bits that end behind the chunk": replace(listed(chunk([(4096, 13)] * 5, "")[:16]), numel=16384, log2=10),
    "signs that end behind the chunk": replace(listed(chunk([(512, 0)], "")), numel=2048),
    "the most words and the longest gaps": replace(listed(chunk([(65535, 255)] * 6, "1" * 999)), numel=16384, log2=10),
    "a one too few": listed(chunk([(2, 0), (1, 0)], "00 1 1")),
    "a one too many": listed(chunk([(2, 0), (1, 0)], "00 1 1 1 1")),
    "a one too many in the padding": listed(chunk(*TWO)[:-1] + b"\x80"),
    "a one too many behind the padding": replace(GOOD, payload=GOOD.payload + bytes(31) + b"\1"),
    "a place behind the chunk": listed(chunk([(1, 0)], "0" + 16 * "0" + "1")),
    "a place behind the chunk by low bits": listed(chunk([(1, 4)], "0000 0 01")),
    "a place behind the chunk by the gaps before": listed(chunk([(2, 2)], "11 11 00 001 001")),
    "a place behind level 1": listed(chunk([(2, 0), (1, 0)], "00 1 1 001")),
    "a place behind level 5": listed(chunk([(1, 0)] * 6, "0 1 1 1 1 1 01", words=b"\1\2")),
    "a place past 2^16": listed(chunk([(1, 13)], "0" * 13 + "0" + "0" * 8 + "1")),
    "a place past 2^32": replace(
        listed(chunk([(1, 13)], "0" * 13 + "0" + "0" * (1 << 19) + "1")), dtype=3, log2=10, numel=16384
    ),
    "half a word": replace(listed(chunk([(1, 0)] * 6, "0 111111", words=b"")), dtype=3),
    "zeros alone": listed(bytes(16)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_contradict_themselves(name: str, route: str) -> None:
    assert _decode(REFUSED[name], route) is FrameErrorCode.BLOCK


def test_forms_of_delta_frames_in_exponent_frames(route: str) -> None:
    assert isinstance(_decode(GOOD, route), torch.Tensor)
    assert _decode(replace(GOOD, codec=1), route) is FrameErrorCode.INDEX
    index, table = struct.pack("<II", 1, 1).ljust(16, b"\0"), bytes(17) + b"\x20" + bytes(30)
    same = Raw(codec=1, dtype=1, log2=7, numel=4096, payload=index + table + bytes(256))  # the first block is RAW
    assert isinstance(_decode(replace(same, codec=2), route), torch.Tensor)
    assert _decode(same, route) is FrameErrorCode.BLOCK


def test_modes_of_floats_in_frames_of_bytes(route: str) -> None:
    index = b"\1".ljust(16, b"\0")
    for mode, wanted in ((0, None), (1, None), (2, 12), (3, 12), (4, 12), (5, None), (6, 12), (7, 12)):
        table = struct.pack("<BH", 0, mode << 13).ljust(16, b"\0")
        frame = Raw(codec=2, dtype=5, log2=7, numel=16, payload=index + table + (bytes(16) if mode % 5 else b""))
        found = _decode(frame, route)
        assert (found if isinstance(found, FrameErrorCode) else None) == wanted, mode


def test_offsets_of_31_bits() -> None:
    """The words of a payload may need more than the 32 GiB that an index can name; nothing is written then."""
    spec = codecs.CODEC_SPECS["delta"]
    tensor = torch.empty(1 << 32, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="the 34359738368 bytes of one frame; cut the tensor"):
        spec.encode([tensor], [tensor], 1024, [torch.empty(0, dtype=torch.uint8)], "auto")


def test_no_output_before_the_base_proves_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of SAME chunks name many words: the receiver's base says whether there are so many."""
    frame = Raw(codec=2, dtype=3, log2=10, numel=1 << 22, payload=struct.pack("<I", 64) * 256).tensor()
    monkeypatch.setattr(tensors, "empty", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ds_zipccl.FrameError, match=r"^MISMATCH: "):
        ds_zipccl.decompress(frame, base=torch.zeros(9))
