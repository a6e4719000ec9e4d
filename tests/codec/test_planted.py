"""Proof that the tests of codecs can fail: kernels, proofs and C++ code with one small mistake make them fail."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import asan
import corpus
import from_format_scaled
import mutations
import numpy as np
import pytest
import test_codec
import test_delta
import test_format
import test_fuzz
import test_gap_list
import test_golden
import test_lossy_codecs
import test_lowrank
import test_refused
import test_rounded
import test_row_kernels
import test_rows
import test_scaled
import test_zfp
import tiers
import torch
from builds import Binary, Change
from hypothesis import Phase, given, settings

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import lowrank
from ds_zipccl.codecs import rows as row_codec
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp.backend import CppBackend
from ds_zipccl.kernels.cpp.interface import SIGNATURES
from ds_zipccl.kernels.protocol import ScaledCodec
from ds_zipccl.lossy import Int, Zfp

#: The C++ route, whatever functions a test takes.
Good = Any
Check = Callable[[], None]


def calls(test: Callable[..., None], *cases: tuple[Any, ...]) -> Check:
    """A test with the arguments of each case."""

    def check() -> None:
        for case in cases:
            test(*case)

    return check


# --- kernels with another call in place of one


class Wrong:
    """A route with other calls in place of some; codecs do not take it for the C++ route."""

    def __init__(self, good: Good, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.good = good
        for name, call in calls.items():
            setattr(self, name, lambda *given, call=call: call(self.good, *given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let all codecs have these kernels."""
        for function in ("route", "delta_route", "row_route", "lossy_route"):
            monkeypatch.setattr(kernels, function, lambda *given: self)


def one_bit(good: Good, payload: torch.Tensor, block: int, words: torch.Tensor, *adds: Any) -> None:
    """Gets one bit of one word wrong: the last word, its lowest bit."""
    good.decode(payload, block, words, *adds)
    if words.numel():
        words.view(torch.uint8)[-words.dtype.itemsize] ^= 1


def by_hash(good: Good, data: torch.Tensor, row_bytes: int, *more: Any) -> int:
    """Takes rows with equal first bytes for equal rows."""
    rows = data[: len(data) // row_bytes * row_bytes].view(-1, row_bytes).clone()
    rows[:, 4:] = 0
    return int(good.find_rows(rows.view(-1), row_bytes, *more))


def nearest(good: Good, words: torch.Tensor, width: int, sources: torch.Tensor, *more: torch.Tensor) -> None:
    """Predicts by torch's multiplication, which rounds twice and keeps denormals."""
    factors, out = more
    rows = words[: len(words) // width * width].view(-1, width)[sources.long()]
    out.copy_((rows.float() * factors[:, None]).to(words.dtype).view(-1))


def last_row(good: Good, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
    """Forgets the last copy."""
    good.copy_rows(words, width, rows[:-1], sources[:-1])


def no_head(
    good: Good, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, *more: Any
) -> None:
    """Loses a bit of the head."""
    good.decode_rows(payload, block, words, width, head, *more)
    words.view(torch.uint8)[:head] ^= 1


def next_block(good: Good, payload: torch.Tensor, *more: Any) -> None:
    """Takes the trim of the block behind for that of each block: the trims are the last bytes of a table of four bytes a block."""
    payload = payload.clone()
    trims = payload[16 + 3 * 2 : 16 + 4 * 2]
    trims.copy_(trims.flip(0))
    try:
        good.decode_rows(payload, *more)
    except FrameError as error:
        raise AssertionError("refused") from error


def lanes_of_16(good: Good, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Adds in float32."""
    values = words[: len(words) // width * width].view(-1, width).float()
    a, b = values[sources.long()], values[rows.long()]
    return (a * b).sum(1) / (a * a).sum(1)


def without_factor(good: Good, scales: Any, codes: Any, codec: ScaledCodec, words: torch.Tensor, *adds: Any) -> None:
    """Forgets 2^-group_log2 after the inverse transform."""
    good.decode_scaled(scales, codes, codec, words, *adds)
    if codec.hadamard:
        words *= codec.group


def with_epsilon(good: Good, words: torch.Tensor, codec: ScaledCodec, *outs: torch.Tensor) -> Any:
    """Takes groups whose mean square is below 1e-6 for zero."""
    groups = words.view(-1, codec.group)
    kept = torch.where(groups.square().mean(1, keepdim=True) > 1e-6, groups, 0.0)
    return good.encode_scaled(kept.view(-1), codec, *outs)


def no_nan(good: Good, words: torch.Tensor, codec: ScaledCodec, *outs: torch.Tensor) -> Any:
    """Makes zeros of NaN and infinity."""
    return good.encode_scaled(words.nan_to_num(0.0, 0.0, 0.0), codec, *outs)


def nearest_scale(good: Good, words: torch.Tensor, codec: ScaledCodec, *outs: torch.Tensor) -> Any:
    """Rounds the scale of integers to the nearest: a maximum may be above m."""
    coded = good.encode_scaled(words, codec, *outs)
    if isinstance(codec, Int):
        outs[0].sub_((outs[0] > 0).to(torch.int16))
    return coded


#: What takes a word (int64), the cut bits c and the mask of its exponent field, and gives the word rounded.
Rounding = Callable[[torch.Tensor, int, int], torch.Tensor]


def _nearest(w: torch.Tensor, c: int, field: int, even: bool = True, finite: bool = True) -> torch.Tensor:
    """``even``: where ties go, else away from zero. ``finite``: whether the largest numbers stay so."""
    t = (w + (1 << (c - 1)) - even * (1 - (w >> c & 1))) >> c << c
    return torch.where(w & field == field, w, torch.where((t & field == field) & finite, t - (1 << c), t))


ROUNDINGS: dict[str, Rounding] = {
    "truncation": lambda w, c, field: torch.where(w & field == field, w, w >> c << c),
    "ties away from zero": partial(_nearest, even=False),
    "the largest becomes infinite": partial(_nearest, finite=False),
    "NaN and infinity become zero": lambda w, c, field: torch.where(w & field == field, 0, _nearest(w, c, field)),
    "NaN is rounded too": lambda w, c, field: torch.where(w & field == field, w >> c << c, _nearest(w, c, field)),
    "subnormal numbers become zero": lambda w, c, field: torch.where(
        w & field == 0, w & ~0x7FFF, _nearest(w, c, field)
    ),
    "a zero loses its sign": lambda w, c, field: torch.where(w & 0x7FFF == 0, 0, _nearest(w, c, field)),
    "one bit too few": lambda w, c, field: _nearest(w, c + 1, field),
}


def rounds(rounding: Rounding) -> dict[str, Callable[..., Any]]:
    """Calls that round words of 16 bits by ``rounding``, before the encoder sees them."""

    def round_words(good: Good, words: torch.Tensor, mantissa: int, out: torch.Tensor) -> None:
        bits, field = (7, 0x7F80) if words.dtype == torch.bfloat16 else (10, 0x7C00)
        w = words.view(torch.int16).long() & 0xFFFF
        out.view(torch.int16).copy_(rounding(w, bits - mantissa, field).to(torch.int16))

    def encode_rounded(good: Good, segments: Sequence[torch.Tensor], mantissa: int, *more: Any) -> Any:
        rounded = [torch.empty_like(words) for words in segments]
        for words, out in zip(segments, rounded, strict=True):
            round_words(good, words, mantissa, out)
        return good.encode_rounded(rounded, 6, *more)

    return {"round_words": round_words, "encode_rounded": encode_rounded}


def cut_low_bits(good: Good, segments: Sequence[torch.Tensor], mantissa: int, *more: Any) -> Any:
    """Takes the trim of the rounding for every block: a NaN loses its low bits."""
    cut = [(words.view(torch.int16) >> 4 << 4).view(words.dtype) for words in segments]
    return good.encode_rounded(cut, mantissa, *more)


EVERY_PATTERN = [
    calls(test_rounded.test_every_pattern_is_rounded_exactly, ("native", name, 3)) for name in ("bf16", "fp16")
]
FOLLOWS = calls(test_scaled.test_frames_follow_the_document, ("native", "int6 32", "bf16"))
#: Mistake -> the calls, and the tests of which each must fail.
WRONG: dict[str, tuple[dict[str, Callable[..., Any]], Sequence[Check]]] = {
    "a hash is believed": ({"find_rows": by_hash}, [calls(test_rows.test_rows_travel_once, ("native", "bf16"))]),
    "a row is not copied": ({"copy_rows": last_row}, [calls(test_rows.test_rows_travel_once, ("native", "int8"))]),
    "a head is damaged": ({"decode_rows": no_head}, [calls(test_rows.test_rows_travel_once, ("native", "fp16"))]),
    "a trim of another block": (
        {"decode_rows": next_block}, [calls(test_rows.test_rounded_literals_of_two_trims, ("native",))],
    ),
    "predictions by floating point": (
        {"predict_rows": nearest}, [calls(test_row_kernels.test_predictions_from_every_word, ("native", "bf16"))],
    ),
    "factors in float32": (
        {"row_factors": lanes_of_16}, [calls(test_row_kernels.test_factors_are_those_of_32_lanes, ("native", "fp32", 257))],
    ),
    "no 2^-group_log2": (
        {"decode_scaled": without_factor}, [calls(test_scaled.test_hadamard_identities, ("native", 128))],
    ),
    "an absolute epsilon": (
        {"encode_scaled": with_epsilon},
        [calls(test_scaled.test_scaled_input_has_the_same_codes, ("native", test_scaled.CODECS["e4m3 hadamard"]))],
    ),
    "NaN becomes zero": ({"encode_scaled": no_nan}, [FOLLOWS]),
    "a scale that is too small": ({"encode_scaled": nearest_scale}, [FOLLOWS]),
    "a trim of the rounding for every block": (
        {**rounds(_nearest), "encode_rounded": cut_low_bits},
        [EVERY_PATTERN[0], calls(test_rounded.test_each_block_has_its_own_trim, ("native",))],
    ),
    **{f"rounding: {name}": (rounds(rounding), EVERY_PATTERN) for name, rounding in ROUNDINGS.items()},
}  # fmt: skip
GOLDEN = calls(test_golden.check, ("bf16_mixed_128", "auto"))
#: Tests of bit identity.
IDENTITY: dict[str, Check] = {
    "all patterns, bf16": calls(test_codec.test_all_patterns_of_16_bits, ("auto", corpus.BF16, 512, "cascade")),
    "all patterns, fp16": calls(test_codec.test_all_patterns_of_16_bits, ("auto", corpus.FP16, 128, "wide")),
    "patterns among others": calls(
        test_codec.test_every_pattern_among_ordinary_words, ("auto", corpus.BF16, "cascade")
    ),
    "random fp32": calls(test_codec.test_ten_million_random_fp32_words, ("auto",)),
    "shapes": calls(test_codec.test_shapes_come_back, ("auto",)),
    "golden": GOLDEN,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, checks = WRONG[name]
    for check in checks:
        check()
    Wrong(kernels.route("native"), wrong).take_over(monkeypatch)
    for check in checks:
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("name", IDENTITY)
def test_one_wrong_bit_fails_the_bit_identity_tests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IDENTITY[name]()
    Wrong(kernels.route(), {"decode": one_bit}).take_over(monkeypatch)
    with pytest.raises(AssertionError, match="words differ"):
        IDENTITY[name]()


@pytest.mark.parametrize("other", [{}, rounds(_nearest)], ids=["no other call", "the right rounding"])
def test_right_kernels_in_the_same_place_pass(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Wrong(kernels.route("native"), other).take_over(monkeypatch)
    for _, checks in WRONG.values() if not other else [({}, EVERY_PATTERN)]:
        for check in checks:
            check()


# --- proofs, and the codec written from the document

_read_map = row_codec.read_map


def _no_sources(fields: row_codec.Fields, data: np.ndarray, reach: int) -> row_codec.RowMap:
    """As if the receiver held any number of rows."""
    return _read_map(fields, data, row_codec.MOST_ROWS)


def _unmarked(fields: row_codec.Fields, data: np.ndarray, reach: int) -> row_codec.RowMap:
    """The map of a frame without the proof that sources are not repeated: as read if every row were in front."""
    bits = np.unpackbits(data, bitorder="little")
    repeated = np.flatnonzero(bits[: fields.rows])
    if len(repeated) != fields.repeats or fields.scaled != 1:
        return _read_map(fields, data, reach)
    others = np.flatnonzero(bits[: fields.rows] == 0)
    scaled = others[bits[fields.rows : fields.rows + len(others)] == 1]
    at = fields.rows + len(others)
    distances = [int(bits[at + 3 * i : at + 3 * i + 3] @ (1, 2, 4)) + 1 for i in range(len(repeated))]
    literals = np.setdiff1d(others, scaled)
    return row_codec.RowMap(
        literals, repeated, repeated - distances, scaled, scaled - 1 - int(bits[at + 3 * len(repeated)])
    )


def _downwards(v: np.ndarray) -> np.ndarray:
    """H v by the strides g/2, ..., 2, 1: the same numbers but for their rounding."""
    stride = len(v) // 2
    while stride:
        pairs = v.reshape(-1, 2, stride)
        v = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).reshape(-1)
        stride //= 2
    return v


def _strides() -> None:
    """The identities hold in any order; the bytes of the document do not."""
    x = np.arange(128, dtype=np.float32)
    assert np.array_equal(_downwards(x), from_format_scaled.hadamard(x))
    test_scaled.test_frames_follow_the_document("native", "e4m3 hadamard", "fp32")


SOURCE, REPEAT = "a source in front of the history", "a repeat of a repeat"
#: Mistake in the Python of a codec -> what it replaces, and the test that must fail. A decoder without a proof fails in the case by hand
#: that rests on the proof alone.
REPLACED: dict[str, tuple[object, str, object, Check]] = {
    SOURCE: (row_codec, "read_map", _no_sources, calls(test_refused.test_refused, ("rows", SOURCE, "native"))),
    REPEAT: (row_codec, "read_map", _unmarked, calls(test_refused.test_refused, ("rows", REPEAT, "native"))),
    "another order of strides": (from_format_scaled, "hadamard", _downwards, _strides),
    "three mantissa bits": (lowrank, "FACTOR_BITS", 3, test_lowrank.test_factors_have_five_bits),
    "factors that pay nothing": (lowrank, "factor_rank", lambda n, m, rank: min(rank, n, m), test_lowrank.test_ranks_that_pay),
    "a start that stays": (lowrank, "basis", lambda q, route: q, test_lowrank.test_directions_come_back_after_a_matrix_of_zeros),
    "columns as they are": (
        lowrank, "orthonormalize", lambda columns, route: None, test_lowrank.test_the_error_is_orthogonal_to_the_factor,
    ),
    "no warm start": (
        lowrank, "basis", lambda q, route: torch.linalg.qr(lowrank.first_factor(len(q), q.shape[1], 7)).Q.contiguous(),
        calls(test_lowrank.test_errors_lie_near_the_tail_of_the_singular_values, (0,)),
    ),
    "any factor is bounded": (
        lowrank, "bounded", lambda p, q: True, calls(test_refused.test_factors_beyond_float32_have_no_frame, (2.0**126,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_a_mistake_in_python_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, bad, check = REPLACED[name]
    check()
    monkeypatch.setattr(module, attribute, bad)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        check()


# --- the C++ code


def _tail_sizes() -> None:
    """The part of test_fuzz that contradicts the sizes of coded tails."""
    rng = random.Random(3)
    kind = next(kind for kind in mutations.KINDS if kind.name == "tail_bytes_of_a_coded_block")
    for base in mutations.bases(checksum=False) * 10:
        frame = kind.mutate(rng, base, bytearray(base.frame))
        assert frame is None or test_fuzz.answer(frame, None, "auto", base.against)[0], "a wrong tail size was accepted"


_fewest = test_delta.test_every_block_takes_the_fewest_bytes.hypothesis.inner_test
#: More cases than the test has, and no search for a smaller one that fails, which takes minutes.
FEWEST = settings(max_examples=1000, phases=[Phase.generate])(
    given(test_delta.changed() | test_delta.few_changes())(lambda case: _fewest(case))
)
TEXTURES = calls(test_delta.test_every_texture_and_every_change, ("auto", corpus.FP16, "long_steps"))
#: Example 6.9 of FORMAT.md, and others in which both forms of the chunk have equally many bytes.
EXAMPLES = calls(test_format.test_document_examples_are_what_the_routes_give, ("auto",))
SHARES = calls(test_gap_list.test_shares_of_changed_words, ("auto", "bf16", "one", 1, 1))
PADDING = calls(test_gap_list.test_lists_that_contradict_themselves, ("a one too many in the padding", "auto"))
ONE_BYTE = calls(test_row_kernels.test_rows_that_differ_in_one_byte_alone, ("auto", 96))
NO_COPY = calls(test_row_kernels.test_literals_without_a_copy, ("auto", "bf16", 64))
PRODUCTS = calls(
    test_lowrank.test_a_decoder_written_from_the_document_agrees, *(("auto", dtype) for dtype in codecs.LOSSY_DTYPES)
)
PRODUCT_SUMS = calls(
    test_lowrank.test_sums_are_those_of_the_words, *(("auto", torch.bfloat16, fp32) for fp32 in (False, True))
)
COLUMNS = test_lowrank.test_columns_become_orthonormal_bit_for_bit
PARTS = test_lowrank.test_threads_and_flushed_denormals_change_no_product
STREAMS = calls(test_zfp.test_streams_of_the_reference_library, ("auto",))
NUMBERS = calls(
    test_zfp.test_numbers_are_rounded_to_the_nearest_finite_values, ("auto", torch.float32), ("auto", torch.bfloat16)
)
NOT_FINITE = calls(test_zfp.test_nothing_that_is_not_finite_disappears, ("auto", torch.bfloat16, torch.inf))
EXTREMES = calls(test_zfp.test_extreme_blocks, ("auto", torch.float16), ("auto", torch.float32))
PROJECTIONS = calls(test_lossy_codecs.test_every_frame_decodes_to_the_projection, ("auto", Zfp(6), "fp16"))
SUMS = calls(test_lossy_codecs.test_added_values_are_the_decoded_ones, ("auto", Zfp(6), "bf16"))
THREADS = calls(test_lossy_codecs.test_cuts_threads_and_flushed_denormals_change_nothing, ("native", Zfp(6), "bf16"))

CHANGES, MATRIX, LOWRANK = "cpu/delta/change_encode.h", "cpu/lossy/lowrank.h", "cpu/lossy/lowrank.cpp"
LATER = "sums[i][v] = sums[i][v] + p[uint64_t(i) * rank + k] * q[v];"
BACKWARDS = LATER.replace("rank + k", "rank + rank - k").replace("q[v]", "at_end[v]")
BACKWARDS = (
    f"{{ Floats at_end[kTileVectors]; memcpy(at_end, columns + (rank - k) * stride, sizeof at_end); {BACKWARDS} }}"
)
LANES = "lanes[l] += lanes[l + half];"
BLOCK, CODES = "common/zfp_block.cuh", "cpu/lossy/zfp.cpp"
#: Library -> mistake -> a file of csrc, texts and what replaces them, and the test that must fail.
PLANTS: dict[str, dict[str, tuple[str, dict[str, str], Check]]] = {
    "codec": {
        # Encoder and decoder agree with each other, only not with the format.
        "two codes swapped": (
            "common/exponent_block.cuh", {"{3, 3, 3, 3, 0, 1, 2,": "{3, 3, 3, 3, 1, 0, 2,", "{4, 5, 6}}": "{5, 4, 6}}"}, GOLDEN,
        ),
        "a top of changes a little higher": ("common/change_block.cuh", {"F::M == 10 ? 4 : 0": "F::M == 10 ? 4 : 2"}, FEWEST),
        "a scale of 0 where the mean is as good": (CHANGES, {"mean.tail <= change.plain.tail": "mean.tail < change.plain.tail"}, FEWEST),
        "a scale that is not the shorter tail's": (
            CHANGES, {"mean.tail <= change.plain.tail": "mean.tail <= change.plain.tail + 1"}, FEWEST,
        ),
        "few zeros are taken for none": ("common/change_block.cuh", {"16 * zeros < n": "2 * zeros < n"}, FEWEST),
        "a level counts for less": ("cpu/delta/change_decode.h", {"level == 4 ? ~0ull : 0": "level == 5 ? ~0ull : 0"}, TEXTURES),
        "a table where a list is as short": (
            "cpu/delta/delta_chunk.h", {"if (table < bytes) return table": "if (table <= bytes) return table"}, EXAMPLES,
        ),
        "the larger parameter of a list": (
            "common/change_list.cuh",
            {
                "below = sum_of(r - 1)) <= rice_bits": "below = sum_of(r - 1)) < rice_bits",
                "above = sum_of(r + 1)) < rice_bits": "above = sum_of(r + 1)) <= rice_bits",
            },
            SHARES,
        ),
        "ones in the padding of a list": (
            "cpu/delta/delta_list.h", {"if (peek_bits(copy, at)) return BLOCK": "if (false) return BLOCK"}, PADDING,
        ),
        "rows with equal samples are not looked for": (
            "cpu/rows/rows.cpp", {"sources[i] = int32_t(finder.enter_whole(first + i));": "sources[i] = int32_t(first + i);"}, ONE_BYTE,
        ),
        "rows that do not lie side by side are taken for such": (
            "cpu/rows/rows.cpp",
            {"uint64_t(l_.rows[last] - l_.rows[i]) == last - i": "uint64_t(l_.rows[last] - l_.rows[i]) >= last - i"},
            NO_COPY,
        ),
        "a row frame without its head": (
            "cpu/rows/row_frame.cpp", {"head = first * width - begin;": "head = 0;"}, calls(test_golden.check, ("rows_bf16", "auto")),
        ),
        "longer tails accepted": ("cpu/decode.h", {"at + left != bytes": "at + left > bytes"}, _tail_sizes),
    },
    "lowrank": {
        "the last column is left out": (MATRIX, {"k < rank; ++k) {\n    memcpy": "k + 1 < rank; ++k) {\n    memcpy"}, PRODUCTS),
        "columns in the other order": (MATRIX, {LATER: BACKWARDS}, PRODUCTS),
        "sums begin at the wrong row": (MATRIX, {"multiply_tile<1>(p + row * rank": "multiply_tile<1>(p"}, PRODUCTS),
        "large numbers become infinite": (MATRIX, {"-65504.0f), 65504.0f)": "-1e30f), 1e30f)"}, PRODUCTS),
        "rows of another part": (LOWRANK, {"out + first * row_bytes": "out"}, PARTS),
        "denormals are flushed": (LOWRANK, {"const Denormals on;\n    of_type(": "of_type("}, PARTS),
        "sums of the first columns": (LOWRANK, {"p + row * rank, columns + at,": "p + row * rank, columns,"}, PRODUCT_SUMS),
        "a column keeps the earlier ones": (MATRIX, {"own[i] -= part * earlier[i]": "own[i] -= 0 * earlier[i]"}, COLUMNS),
        "a column that others span becomes noise": (MATRIX, {"length <= lengths[j] * kZipcclSpanned": "length == 0"}, COLUMNS),
        "lanes are added in another order": (MATRIX, {LANES: LANES.replace("l + half", "2 * half - 1 - l")}, COLUMNS),
    },
    "zfp": {
        # Encoder and decoder agree with each other, only not with the published stream.
        "another negabinary": (BLOCK, {"kNegabinary = 0xaaaaaaaau": "kNegabinary = 0x55555555u"}, STREAMS),
        "an exponent more": (BLOCK, {"numbers.head = top + 1;": "numbers.head = top + 2;"}, STREAMS),
        "a plane's bits from the highest": (
            BLOCK, {"(numbers.u[i] >> 8 * byte & 255) << 8 * i;": "(numbers.u[i] >> 8 * byte & 255) << (24 - 8 * i);"}, STREAMS,
        ),
        "numbers rounded up": (BLOCK, {"significand >> -shift : 0": "(significand >> -shift) + 1 : 0"}, STREAMS),
        "a step of the transform left out": (BLOCK, {"w += uint32_t(zfp_half(y)), y -=": "y -="}, STREAMS),
        "a partial block filled up otherwise": (BLOCK, {"count == 2 && i == 2 ? 1 : 0": "0"}, STREAMS),
        "no one where the bits end": (BLOCK, {"plane |= 1u << n++;": "plane |= (at < left ? 1u : 0u) << n, ++n;"}, STREAMS),
        "the tie goes up": (BLOCK, {"- 1 + (wide >> shift & 1)) >> shift": ") >> shift"}, NUMBERS),
        "subnormal numbers get a bit more": (BLOCK, {"normal > least ? normal : least": "normal"}, NUMBERS),
        "a large number becomes infinite": (BLOCK, {"magnitude < infinity ? magnitude : infinity - 1": "magnitude"}, EXTREMES),
        "a large float becomes infinite": (BLOCK, {"word > kLargestFp32 ? kLargestFp32": "word > ~0u ? 0"}, STREAMS),
        "NaNs are coded": (CODES, {"if (!block.finite()) return false;": ""}, NOT_FINITE),
        "NaNs are projected": (CODES, {"if (block.finite()) {": "if (true) {"}, NOT_FINITE),
        "a projection without its neighbors": (
            CODES,
            {"store_block<F>(zfp_decode(zfp_encode<Code>(block, rate, kTables), rate, kTables), out": "store_block<F>(block, out"},
            PROJECTIONS,
        ),
        "codes of the first values for all sums": (CODES, {"bytes + at / kUnit * rate * 8": "bytes"}, SUMS),
        "parts that overlap": (CODES, {"first / kUnit * rate * 8": "first / kUnit * rate * 4"}, THREADS),
    },
}  # fmt: skip
#: One of the format, and of the codecs alone one of each half.
SHORT_PLANTS = (
    ("lowrank", "the last column is left out"), ("lowrank", "a column that others span becomes noise"),
    ("zfp", "another negabinary"), ("zfp", "NaNs are coded"),
)  # fmt: skip
#: Codec with a library that compiles in seconds -> its functions, and the methods of a route that call them.
ALONE = {
    "lowrank": (("zipccl_multiply", "zipccl_orthonormalize"), ("multiply", "orthonormalize")),
    "zfp": (tuple(name for name in SIGNATURES if name.startswith("zipccl_zfp")), ("encode_zfp", "decode_zfp", "project_zfp")),
}  # fmt: skip


def _library(codec: str, changes: Mapping[str, tuple[Change, ...]]) -> CppBackend:
    """The C++ route at its portable level, or the functions of a codec alone, with mistakes in them."""
    sources, more, level = (
        (asan.PORTABLE, asan.ONE_LEVEL, "-O0") if codec == "codec" else (asan.alone(codec), {}, "-O1")
    )
    path = Binary(codec, asan.FOLDERS, sources, (*build.CPU.flags, level), ("-shared",), {**changes, **more}).path()
    return CppBackend(ctypes.CDLL(str(path)), ALONE[codec][0] if codec in ALONE else SIGNATURES)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("codec", "name"),
    tiers.mostly_full(
        [(codec, name) for codec, plants in PLANTS.items() for name in plants],
        SHORT_PLANTS,
        "each has a codec of its own to compile",
    ),
)
def test_planted_mistakes_are_noticed(codec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := kernels.why()["native"]:
        pytest.skip(f"the native route is not usable here: {reason}")
    file, changes, check = PLANTS[codec][name]
    lossy_route = kernels.lossy_route

    def use(library: CppBackend) -> None:
        if codec in ALONE:
            methods = ALONE[codec][1]
            monkeypatch.setattr(
                kernels,
                "lossy_route",
                lambda *given: library if given[2].startswith(methods) else lossy_route(*given),
            )
        else:
            for lookup in ("route", "delta_route", "row_route"):
                monkeypatch.setattr(kernels, lookup, lambda name="auto", device="cpu": library)

    use(_library(codec, {}) if codec in ALONE else kernels.route("native"))
    check()
    use(_library(codec, {f"csrc/{file}": tuple(changes.items())}))
    with pytest.raises(Exception) as caught:
        check()
    errors = getattr(caught.value, "exceptions", [caught.value])  # hypothesis groups several failures
    assert all(isinstance(error, AssertionError) for error in errors), errors
