"""The kernels of row frames: every route finds the same rows, gives the same factors, and makes the predictions of the document."""

from __future__ import annotations

import corpus
import from_format_rows
import numpy as np
import pytest
import torch
import variants
from corpus import assert_same_bits
from cuda_frames import CPU
from row_cases import first_of_equals
from test_cuda_rows import found

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import rows as row_map
from ds_zipccl.frame import FrameError

route = variants.each(variants.COMPILED)
FLOATS = corpus.SUMMED
#: Bits of factors: ones, near the borders of the exponent, with all and no bits of the significand, and of both signs.
FACTORS = np.array(
    [
        *(0x3F800000 | low for low in (0, 1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x2AAAAA)),
        *(e << 23 | low for e in (1, 2, 64, 113, 126, 128, 141, 190, 253, 254) for low in (0, 0x555555, 0x7FFFFF)),
        *(0x80000000 | e << 23 | 0x123457 for e in (1, 100, 127, 150, 254)),
    ],
    dtype=np.uint32,
)


def ints(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("row_bytes", [96, 1000, 4096])
def test_rows_that_differ_in_one_byte_alone(route: str, row_bytes: int) -> None:
    """No hash of a few samples tells them apart: such rows are told apart all the same, and in time."""
    count = 3000
    data = np.zeros((count, row_bytes), dtype=np.uint8)
    places = corpus.hashes(count, 5) % np.uint64(row_bytes)
    data[np.arange(count), places.astype(np.int64)] = corpus.hashes(count, 6) % np.uint64(4)
    data = data.reshape(-1)
    sources, repeats = found((kernels.row_route(route, "cpu"), CPU), torch.from_numpy(data), row_bytes, [])
    assert sources == first_of_equals(data, row_bytes) and repeats > 100


def test_many_rows_beyond_one_thread(route: str) -> None:
    data = corpus.hashes(24000 * 40, 3).view(np.uint8)[: 24000 * 320].reshape(24000, 320)
    data = data[corpus.hashes(24000, 4) % np.uint64(15000)].reshape(-1)
    sources, _ = found((kernels.row_route(route, "cpu"), CPU), torch.from_numpy(data), 320, [5000, 5000, 19001])
    assert sources == first_of_equals(data, 320)


# --- factors


def lanes(a: np.ndarray, b: np.ndarray) -> float:
    """The factor of the protocol, one addition after another."""
    sums = np.zeros((2, 32))
    for start in range(0, len(a), 32):
        x, y = a[start : start + 32].astype(np.float64), b[start : start + 32].astype(np.float64)
        sums[0, : len(x)] += x * y
        sums[1, : len(x)] += x * x
    product, square = np.float64(0), np.float64(0)
    for lane in range(32):
        product, square = (sums[0, 0], sums[1, 0]) if lane == 0 else (product + sums[0, lane], square + sums[1, lane])
    factor = np.float32(product / square) if square > 0 else np.float32(0)
    return float(factor) if 2.0**-126 <= abs(factor) < np.inf else 0.0


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 257, 1024])
def test_factors_are_those_of_32_lanes(route: str, name: str, width: int) -> None:
    """Of scaled copies, others, rows without a factor, subnormal and large ones, and two whose sums depend on the order of lanes."""
    kind = FLOATS[name]
    draw = torch.Generator().manual_seed(width)
    rows = torch.randn(12, width, generator=draw)
    scales = torch.tensor([1, 0.3, -2.5, 1e-3, 7e4, 1e-30, 1e30, 0, 1, 1, 1, 1])
    rows[1::2] = rows[::2] * scales[:6, None]
    words = torch.cat([rows, torch.zeros(4, width)]).to(kind.dtype)
    words[8, 0], words[10, width // 2] = float("inf"), float("nan")
    words[7] = 0
    words[12:14, :3] = torch.tensor([[2.0**30, 2.0**30, 1], [2.0**30, -(2.0**30), 1]])[:, :width]
    words[14], words[15] = torch.finfo(kind.dtype).tiny / 4, torch.finfo(kind.dtype).max / 3
    flat = words.reshape(-1)
    pairs = [(row, source) for row in range(16) for source in range(row)]
    got = kernels.row_route(route, "cpu").row_factors(
        flat, width, ints([row for row, _ in pairs]), ints([s for _, s in pairs])
    )
    assert got.dtype == torch.float32
    with np.errstate(all="ignore"):
        values = words.float().numpy()
        assert got.tolist() == [lanes(values[source], values[row]) for row, source in pairs]
    assert {row for (row, _), factor in zip(pairs, got.tolist(), strict=True) if not factor} >= {7}


# --- predictions


def rounded(words: np.ndarray, factor: int, kind: corpus.Float) -> np.ndarray:
    """The predictions by a product of float64, which is exact, and one rounding of its bits."""
    top, sign_bit = (1 << kind.exponent) - 1, np.int64(1) << (kind.exponent + kind.mantissa)
    numbers = words.astype(np.int64)
    e, sign = numbers >> kind.mantissa & top, (numbers & sign_bit != 0) ^ (factor >> 31 == 1)
    size = np.ldexp(((1 << kind.mantissa) + (numbers & (1 << kind.mantissa) - 1)).astype(np.float64), e - kind.mantissa)
    significand = float((1 << 23) + (factor & (1 << 23) - 1))
    product = (size * np.ldexp(significand, (factor >> 23 & 255) - 127 - 23)).view(np.int64)
    cut = 52 - kind.mantissa
    low = product & (1 << cut) - 1
    short = (product >> cut) + ((low > 1 << (cut - 1)) | ((low == 1 << (cut - 1)) & (product >> cut & 1 == 1)))
    found = np.clip(short >> kind.mantissa, 1023, 1023 + top) - 1023
    result = found << kind.mantissa | np.where((found > 0) & (found < top), short & (1 << kind.mantissa) - 1, 0)
    result = np.where(e == 0, 0, result) | np.where(sign, sign_bit, 0)
    return np.where(e == top, numbers, result).astype(kind.word)


def predictions(words: np.ndarray, factors: np.ndarray, kind: corpus.Float, width: int, route: str) -> np.ndarray:
    flat = corpus.tensor(words, kind)
    out = torch.zeros(len(factors) * width, dtype=kind.dtype)
    sources = ints([i % (len(words) // width) for i in range(len(factors))])
    kernels.row_route(route, "cpu").predict_rows(
        flat, width, sources, torch.from_numpy(factors.view(np.float32).copy()), out
    )
    return out.view(torch.uint8).numpy().view(kind.word).reshape(-1, width)


@pytest.mark.parametrize("name", FLOATS)
def test_predictions_from_every_word(route: str, name: str) -> None:
    """Every word of 16 bits, and words of 32 bits of every texture, by factors at the borders and random ones."""
    kind, factors = FLOATS[name], FACTORS
    words = np.arange(1 << 16).astype(np.uint16).reshape(1, -1)
    if name == "fp32":
        words = corpus.mixed(9 * 4000, kind, 128, 2).reshape(9, 4000)
        random = corpus.hashes(60, 9).astype(np.uint32)
        factors = np.concatenate([FACTORS, random[((random >> 23 & 255) > 0) & ((random >> 23 & 255) < 255)]])
    for at, row in enumerate(predictions(words.reshape(-1), factors, kind, words.shape[1], route)):
        assert np.array_equal(row, rounded(words[at % len(words)], int(factors[at]), kind)), hex(factors[at])


@pytest.mark.parametrize("name", FLOATS)
def test_the_fast_reference_of_predictions_is_the_exact_one(name: str) -> None:
    kind = FLOATS[name]
    words = corpus.mixed(600, kind, 128, 11)
    for at, factor in enumerate(FACTORS.tolist()):
        some = words[at::7]
        exact = [from_format_rows.predict(word, factor, kind.exponent, kind.mantissa) for word in some.tolist()]
        assert rounded(some, factor, kind).tolist() == exact, hex(factor)


@pytest.mark.parametrize("width", [1, 5, 16, 33, 250])
@pytest.mark.parametrize("name", FLOATS)
def test_predictions_of_every_width(route: str, name: str, width: int) -> None:
    """The same words by rows of any width, from any address, and nothing behind the output is written."""
    kind = FLOATS[name]
    words = corpus.mixed(7 * width, kind, 128, width)
    flat = torch.cat([corpus.tensor(words, kind)[:1], corpus.tensor(words, kind)])[1:]
    out = torch.zeros(3 * width + 40, dtype=kind.dtype)
    factors = torch.tensor([0.5, -3.7, 1.0])
    kernels.row_route(route, "cpu").predict_rows(flat, width, ints([6, 0, 3]), factors, out[: 3 * width])
    bits = factors.numpy().view(np.uint32).tolist()
    rows = [rounded(words.reshape(7, width)[s], bits[i], kind) for i, s in enumerate((6, 0, 3))]
    assert_same_bits(out, torch.cat([corpus.tensor(np.concatenate(rows), kind), torch.zeros(40, dtype=kind.dtype)]))


# --- literals


@pytest.mark.parametrize("name", corpus.FLOATS)
@pytest.mark.parametrize("width", [1, 3, 64, 100, 333])
def test_literals_without_a_copy(route: str, name: str, width: int) -> None:
    """The payload of literals is that of the same words side by side, and comes back to its places and to no other."""
    kind = corpus.FLOATS[name]
    kernel = kernels.row_route(route, "cpu")
    rng = np.random.default_rng(width)
    for head, count, tail, share in (
        (0, 40, 0, 0.5),
        (width - 1, 55, width // 2, 0.9),
        (width // 2, 9, 0, 0.0),
        (0, 30, 0, 1),
    ):
        words = corpus.tensor(corpus.mixed(head + count * width + tail, kind, 128, count), kind)
        rows = np.flatnonzero(rng.random(count) < share)
        body = words[head : head + count * width].view(count, width)
        literals = torch.cat([words[:head], body[rows].reshape(-1), words[head + count * width :]])
        bound = 64 + 2 * literals.nbytes + 8 * len(words)
        for code in corpus.CODES:
            out, alone = torch.zeros(bound, dtype=torch.uint8), torch.zeros(bound, dtype=torch.uint8)
            size = kernel.encode_rows(words, width, head, ints(rows), code, 128, out)
            assert size == kernel.encode([literals], code, 128, [alone])[0] and torch.equal(out[:size], alone[:size])
            marked = (torch.zeros(len(words) * kind.dtype.itemsize, dtype=torch.uint8) + 0x5A).view(kind.dtype)
            expected = marked.clone()
            kernel.decode_rows(out[:size].clone(), 128, marked, width, head, ints(rows))
            expected[:head], expected[head + count * width :] = words[:head], words[head + count * width :]
            expected[head : head + count * width].view(count, width)[rows] = body[rows]
            assert_same_bits(marked, expected)


# --- maps in C++ (csrc/cpu/rows/row_map.cpp), damaged ones beside numpy; under sanitizers they are in test_sanitizers.py

native = pytest.mark.skipif(bool(kernels.why(only="native")["native"]), reason="no C++ route here")


@native
def test_damaged_maps_are_refused_as_by_numpy() -> None:
    draw = np.random.default_rng(6)
    compiled = kernels.compiled("native", "cpu")
    assert compiled is not None
    outcomes = {True: 0, False: 0}
    for _ in range(2000):
        count, bits, reach = int(draw.integers(1, 40)), int(draw.choice([0, 1, 3, 6, 32])), int(draw.integers(0, 9))
        repeats = int(draw.integers(0, count + 1))
        marks = np.zeros(count, np.uint8)
        marks[draw.permutation(count)[:repeats]] = 1
        fields = row_map.Fields(count, 1, 0, repeats, 0, bits, 0)
        plane = np.packbits(
            np.concatenate([marks, draw.integers(0, 2, repeats * bits).astype(np.uint8)]), bitorder="little"
        )
        data = np.zeros(fields.factors_at - row_map.FIELDS_BYTES + 32, np.uint8)
        data[: len(plane)] = plane
        if draw.random() < 0.3:
            data[draw.integers(0, len(plane))] ^= 1 << draw.integers(0, 8)
        found = compiled.unpack_repeats(torch.from_numpy(data), count, repeats, bits, reach)
        try:
            wanted = row_map.read_map(fields, data[:-32], reach)
        except FrameError:
            assert found is None
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert found is not None
        literals, repeated, sources = (part.numpy() for part in found)
        assert np.array_equal(literals, wanted.literals)
        assert np.array_equal(repeated - reach, wanted.repeated)
        assert np.array_equal(sources - reach, wanted.repeat_sources)
    assert min(outcomes.values()) > 200, outcomes


def test_a_frame_of_scaled_rows_alone(route: str) -> None:
    """The bound of its deltas does not fit behind map and factors; the deltas do."""
    rows, width = 64, 256
    first = torch.from_numpy(np.random.default_rng(7).standard_normal((rows, width))).to(torch.bfloat16)
    words = torch.cat([first, (first.float() * 1.3).to(torch.bfloat16)]).view(-1)
    half = words.numel() // 2
    segment = codecs.RowSegment(words, width, route=route)
    segment.scale_by(torch.arange(2 * rows, dtype=torch.int32) % rows)
    out = torch.empty(codecs.compress_bound(half, words.dtype), dtype=torch.uint8)
    assert segment.frame(0, half, out) is None
    frame = segment.frame(half, 2 * half, out)
    assert frame is not None and frame.numel() < half // 3
    assert segment.scaled == rows
    back = words.clone()
    back[half:] = 0
    codecs.decompress(frame, back[half:], earlier=back[:half], route=route)
    assert torch.equal(back.view(torch.int16), words.view(torch.int16))
