"""Row frames: segments come back frame by frame; all routes write the bytes of the document; bad maps are refused with their codes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import corpus
import from_format_rows
import numpy as np
import pytest
import torch
import variants
from corpus import assert_same_bits, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from row_cases import drawn, repeated
from test_frame import code

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.codecs import RowSegment
from ds_zipccl.frame import CodecId, FrameErrorCode
from ds_zipccl.lossy import Round

route = variants.each(variants.COMPILED)
PLAIN = {"shaped": False, "checksum": False}
#: dtypes by name; float8 has no scaled rows, int8 and int64 have raw literals.
DTYPES = {name: kind.dtype for name, kind in corpus.FLOATS.items()} | {"int8": torch.int8, "int64": torch.int64}


@dataclass
class Sent:
    """A segment as it was sent: frames, and where they begin and end."""

    segment: RowSegment
    frames: list[tuple[int, int, torch.Tensor]]

    @property
    def codecs(self) -> list[CodecId]:
        return [framing.parse(frame).codec for _, _, frame in self.frames]


def send(
    words: torch.Tensor,
    width: int,
    cuts: list[int],
    route: str,
    candidates: torch.Tensor | None = None,
    codec: str = "cascade",
    block: int = 128,
    **more: int,
) -> Sent:
    """Every frame in a buffer of exactly its bound, ordinary frames where rows do not pay."""
    segment = RowSegment(words, width, block=block, route=route, **more)
    segment.scale_by(candidates)
    rounded = more.get("rounded")
    alone = {"codec": Round(rounded) if rounded else codec, "lossy": bool(rounded), "block": block}
    frames = []
    for begin, end in zip([0, *cuts], [*cuts, len(words)], strict=True):
        bound = codecs.compress_bound(end - begin, words.dtype, **alone)
        buffer = torch.full((bound + 16,), 0xA5, dtype=torch.uint8)
        frame = segment.frame(begin, end, buffer[:bound], codec)
        if frame is None:
            frame = codecs.compress(words[begin:end], out=buffer[:bound], route=route, **alone, **PLAIN)
        assert (buffer[bound:] == 0xA5).all(), "wrote past the bound"
        frames.append((begin, end, frame))
    return Sent(segment, frames)


def receive(sent: Sent, words: torch.Tensor, route: str) -> None:
    """Decode all frames of a segment into one output, and compare."""
    out = torch.full((words.nbytes,), 0x5A, dtype=torch.uint8).view(words.dtype)
    for begin, end, frame in sent.frames:
        part = out[begin:end]
        assert codecs.decompress(frame.clone(), part, earlier=out[:begin], route=route) is part
        assert_same_bits(out[:end], words[:end])
    assert (out[len(words) :].view(torch.uint8) == 0x5A).all()


def scaled_rows(count: int, width: int, kind: corpus.Float, seed: int, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are copies of ``pool`` rows, each by a factor of its own, rounded; and the first row of the same origin."""
    draw = torch.Generator().manual_seed(seed)
    chosen, sources = drawn(count, pool, seed)
    words = torch.randn(pool, width, generator=draw)[chosen] * (torch.rand(count, 1, generator=draw) + 0.05)
    return words.to(kind.dtype).reshape(-1), sources


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, list[int], torch.Tensor | None, str, int]:
    """Words, width, cuts, candidates, codec and block."""
    name = draw(st.sampled_from(sorted(DTYPES)))
    width = draw(st.sampled_from([1, 2, 5, 16, 40, 64, 100, 130]))
    count, pool = draw(st.integers(1, 60)), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 9999))
    rng = np.random.default_rng(seed)
    candidates = None
    if name in corpus.SUMMED and draw(st.booleans()):
        words, candidates = scaled_rows(count, width, corpus.SUMMED[name], seed, pool)
        if draw(st.booleans()):  # rows that repeat, and candidates that are wrong or are scaled rows themselves
            for row in rng.integers(0, count, count // 3).tolist():
                source = int(rng.integers(0, row + 1))
                words.view(count, width)[row] = words.view(count, width)[source]
            wrong = torch.from_numpy(rng.integers(-2, count + 2, count).astype(np.int32))
            candidates = torch.where(torch.from_numpy(rng.random(count) < 0.3), wrong, candidates)
    else:
        words = repeated(DTYPES[name], width, count, pool, seed)
    words = torch.cat([words, words[: draw(st.integers(0, width - 1))]])
    cuts = sorted(rng.integers(0, len(words) + 1, rng.integers(4)).tolist())
    codec = draw(st.sampled_from(["cascade", "wide", "raw"]))
    return words, width, cuts, candidates, codec, draw(st.sampled_from([128, 1024]))


def as_the_document_says(sent: Sent, words: torch.Tensor, width: int, codec: str, block: int) -> None:
    """Every row frame is the one of the slow codec for the same scaled rows, and the slow codec decodes it."""
    segment, dtype = words_of(words), framing.DTYPE_IDS[words.dtype]
    codec = codec if words.dtype in codecs.CODED_DTYPES else "raw"
    for begin, end, frame in sent.frames:
        data = frame.numpy().tobytes()
        if data[5] != CodecId.ROWS:
            continue
        scaled = scaled_in(data, begin, width)
        assert data == from_format_rows.encode(segment, begin, end, width, dtype, block, codec, scaled)
        assert from_format_rows.decode(data, segment[:begin]) == segment[begin:end]


def scaled_in(frame: bytes, begin: int, width: int) -> dict[int, tuple[int, int]]:
    """Row of the segment -> source and factor of the scaled rows of a frame."""
    _, head, repeats, scaled, repeat_bits, scaled_bits = struct.unpack_from("<4I2B", frame, 32)
    if not scaled:
        return {}
    numel = struct.unpack_from("<Q", frame, 16)[0]
    rows, first = (numel - head) // width, (begin + head) // width
    bits = np.unpackbits(np.frombuffer(frame, np.uint8)[64:], bitorder="little").tolist()
    others = [row for row in range(rows) if not bits[row]]
    chosen = [row for row, bit in zip(others, bits[rows : rows + len(others)], strict=True) if bit]
    at = rows + len(others) + repeats * repeat_bits
    factors = 64 + framing.pad16(-(-(at + scaled * scaled_bits) // 8))
    found = {}
    for place, row in enumerate(chosen):
        here = bits[at + place * scaled_bits : at + (place + 1) * scaled_bits]
        distance = 1 + sum(bit << p for p, bit in enumerate(here))
        found[first + row] = first + row - distance, struct.unpack_from("<I", frame, factors + 4 * place)[0]
    return found


@given(cases())
@settings(max_examples=80)
def test_routes_write_and_read_what_the_document_says(
    case: tuple[torch.Tensor, int, list[int], torch.Tensor | None, str, int],
) -> None:
    words, width, cuts, candidates, codec, block = case
    kept = words.clone()
    frames = {}
    for variant in variants.usable(variants.COMPILED):
        with variant.in_use() as route:
            sent = send(words, width, cuts, route, candidates, codec, block)
            receive(sent, words, route)
            assert_same_bits(words, kept)
            frames[variant] = [frame for _, _, frame in sent.frames]
    first, *others = frames
    for other in others:
        assert all(map(torch.equal, frames[first], frames[other])), f"{first} and {other} give different bytes"
    as_the_document_says(sent, words, width, codec, block)
    found = from_format_rows.repeats_of(words_of(words), width)
    assert sent.segment.sources.tolist() == [found.get(row, row) for row in range(len(words) // width)]
    assert sent.segment.repeats == len(found)


@pytest.mark.parametrize("name", DTYPES)
def test_rows_travel_once(route: str, name: str) -> None:
    """Half of the rows are repeats: a row frame for each part, about half of the ordinary bytes, and the map of sources."""
    words = repeated(DTYPES[name], 96, 400, 150, 5)
    sent = send(words, 96, [5000, 9600, 30011], route)
    receive(sent, words, route)
    assert sent.codecs[1:] == [CodecId.ROWS] * 3
    assert sent.segment.sources.tolist() != list(range(400)) and sent.segment.repeats > 200
    alone = sum(len(codecs.compress(words[b:e], block=128, route=route, **PLAIN)) for b, e, _ in sent.frames)
    assert sum(len(frame) for _, _, frame in sent.frames) < 0.7 * alone


@pytest.mark.parametrize("name", corpus.SUMMED)
def test_scaled_rows_cost_little(route: str, name: str) -> None:
    words, candidates = scaled_rows(300, 200, corpus.SUMMED[name], 3, 100)
    cuts = [20_000, 41_234]
    sent, ordinary = send(words, 200, cuts, route, candidates), send(words, 200, cuts, route)
    receive(sent, words, route)
    assert sent.segment.repeats == 0 and sent.segment.scaled > 120
    assert ordinary.codecs == [CodecId.EXPONENT] * 3
    size, before = (sum(len(frame) for _, _, frame in each.frames) for each in (sent, ordinary))
    assert size < 0.7 * before
    assert RowSegment(words, 200, route=route).trial(candidates) < 0.3
    unrelated = torch.arange(-1, 299, dtype=torch.int32)
    assert RowSegment(words, 200, route=route).trial(unrelated) > 0.9
    assert RowSegment(words, 200, route=route).trial(torch.arange(300, dtype=torch.int32)) == 1.0


def test_without_repeats_the_frame_is_the_ordinary_one(route: str) -> None:
    words = torch.from_numpy(corpus.hashes(1600, 2).view(np.uint8).copy()).view(torch.bfloat16)
    segment = RowSegment(words, 64, route=route)
    buffer = torch.empty(codecs.compress_bound(len(words), words.dtype), dtype=torch.uint8)
    assert segment.frame(0, len(words), buffer) is None and segment.find() == 0
    assert torch.equal(codecs.compress(words, row_width=64, route=route), codecs.compress(words, route=route))


def test_segments_without_a_whole_row(route: str) -> None:
    buffer = torch.empty(4096, dtype=torch.uint8)
    for numel, width in ((0, 1), (0, 7), (6, 7), (1, 1)):
        segment = RowSegment(torch.ones(numel, dtype=torch.float16), width, route=route)
        assert segment.frame(0, numel, buffer) is None and segment.sources.tolist() == [0] * (numel // width)


def test_rows_of_one_word_alone_are_left_to_the_codec(route: str) -> None:
    """Zeros cost next to nothing in an ordinary frame; of bytes that no codec makes smaller, they are repeats like others."""
    words = torch.zeros(200, 64, dtype=torch.bfloat16)
    words[::3] = torch.randn(67, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert send(words.reshape(-1), 64, [], route).codecs == [CodecId.EXPONENT]
    assert send(words.reshape(-1), 64, [], route, codec="raw").codecs == [CodecId.ROWS]
    assert send(words.reshape(-1).view(torch.int16), 64, [], route).codecs == [CodecId.ROWS]


def test_nan_payloads_and_signs_of_zeros(route: str) -> None:
    """Rows are compared by their bits: NaNs of other payloads differ, equal NaNs do not, -0 is not 0."""
    bits = torch.tensor([0x7FC0, 0x7FC1, 0xFFC0, 0x8000, 0, 0x7F80, 1], dtype=torch.int32).to(torch.int16)
    words = torch.cat([bits.roll(shift).repeat(30) for shift in (0, 1, 0, 2, 1, 6, 0)]).view(torch.bfloat16)
    sent = send(words, 210, [], route)
    assert sent.segment.sources.tolist() == [0, 1, 0, 3, 1, 5, 0] and sent.codecs == [CodecId.ROWS]
    receive(sent, words, route)


def test_literals_below_a_size_are_raw(route: str) -> None:
    words = torch.randn(8, generator=torch.Generator().manual_seed(2)).bfloat16().repeat(300)
    buffer = torch.empty(codecs.compress_bound(len(words), words.dtype), dtype=torch.uint8)
    nested = 32 + 32 + framing.pad16(-(-(300 + 299 * 9) // 8)) + 5
    for below, codec in ((0, CodecId.EXPONENT), (17, CodecId.RAW)):
        frame = RowSegment(words, 8, raw_below=below, route=route).frame(0, len(words), buffer)
        assert frame is not None and frame[nested] == codec
        assert_same_bits(codecs.decompress(frame, route=route), words)


def test_the_public_call(route: str) -> None:
    words = repeated(torch.float16, 50, 60, 20, 7)[:3000]
    tensor = words.view(6, 10, 50)
    frame = ds_zipccl.compress(tensor, row_width=50, route=route)
    header = framing.parse(frame)
    assert (header.codec, header.shape, header.block) == (CodecId.ROWS, (6, 10, 50), 0) and header.checksum is not None
    assert len(frame) < len(ds_zipccl.compress(tensor, route=route))
    assert_same_bits(ds_zipccl.decompress(frame, route=route), tensor)
    out = torch.empty(3000, dtype=torch.float16)
    assert_same_bits(ds_zipccl.decompress(frame, out, earlier=torch.empty(0), route=route), words)
    with pytest.raises(ds_zipccl.FrameError, match="cannot be added"):
        ds_zipccl.decompress_add(frame, out)
    with pytest.raises(ValueError, match="codec 'delta' takes no row_width"):
        ds_zipccl.compress(tensor, "delta", base=tensor, row_width=50)


def test_wrong_arguments() -> None:
    words = repeated(torch.bfloat16, 30, 40, 9, 3)[:1200]
    segment = RowSegment(words, 30)
    with pytest.raises(ValueError, match="got candidates for 39 rows of 40"):
        segment.scale_by(torch.zeros(39, dtype=torch.int32))
    with pytest.raises(ValueError, match="out must be a contiguous 1-D uint8 tensor"):
        segment.frame(0, 1200, torch.empty(100, dtype=torch.uint8))
    sent = send(words, 30, [600], "auto")
    begin, end, frame = sent.frames[1]
    out = torch.empty(1200, dtype=torch.bfloat16)
    for wrong in (out[: begin - 1], out[:begin].clone(), out[:begin].view(torch.int16), out[:begin][::2]):
        with pytest.raises(TypeError, match="earlier must be a contiguous tensor"):
            codecs.decompress(frame, out[begin:end], earlier=wrong)
    assert code(frame, out[begin:end]) is FrameErrorCode.ROWS, "a history that is not there"


def test_rounded_literals_of_two_trims(route: str) -> None:
    """Two blocks of literals, one of words with fewer bits than the other."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 128, generator=draw, dtype=torch.float32).to(torch.bfloat16)
    rows[1] = torch.ldexp(torch.sign(rows[1].float()), torch.arange(128) % 5).to(torch.bfloat16)
    words = rows.repeat(8, 1).view(-1)
    sent = send(words, 128, [], route, rounded=3)
    receive(sent, codecs.project(words, Round(3), route=route), route)
    assert sent.codecs == [CodecId.ROWS]


@given(
    st.sampled_from(sorted(corpus.SUMMED)),
    st.sampled_from([5, 40, 64, 130]),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 6),
    st.sampled_from([0, 1 << 20]),
    st.integers(0, 9999),
)
@settings(max_examples=25)
def test_rounded_segments_come_back(
    name: str, width: int, count: int, pool: int, mantissa: int, raw_below: int, seed: int
) -> None:
    """Every frame decodes to rounded words, and the routes write the bytes of the document."""
    words = repeated(corpus.SUMMED[name].dtype, width, count, pool, seed)
    cuts = sorted({int(cut) for cut in np.random.default_rng(seed).integers(0, len(words), 2)} - {0})
    projected = codecs.project(words, Round(mantissa))
    found = {
        route: send(words, width, cuts, route, rounded=mantissa, raw_below=raw_below)
        for route in ("native", "emulated")
    }
    for route, sent in found.items():
        receive(sent, projected, route)
    kept, segment = words_of(projected), words_of(words)
    for (begin, end, frame), (*_, other) in zip(*(sent.frames for sent in found.values()), strict=True):
        assert torch.equal(frame, other)
        data = frame.numpy().tobytes()
        if data[5] == CodecId.ROWS:
            code, dtype = "raw" if raw_below else "cascade", framing.DTYPE_IDS[words.dtype]
            assert data == from_format_rows.encode(segment, begin, end, width, dtype, 128, code, {}, mantissa)
            assert from_format_rows.decode(data, kept[:begin]) == kept[begin:end]


def test_float32_and_bytes_have_no_rounded_literals(route: str) -> None:
    with pytest.raises(ValueError, match=r"rows of torch\.int8 to round"):
        RowSegment(torch.zeros(64, dtype=torch.int8), 8, rounded=3, route=route)
    ((_, _, frame),) = send(torch.randn(64).repeat(9), 64, [], route, rounded=3).frames
    at = frame.numpy().tobytes().index(b"ZCCL", 32)
    assert frame[at + 5] == CodecId.EXPONENT
    frame[at + 5] = CodecId.ROUNDED
    assert code(frame, route=route) is FrameErrorCode.CODEC
