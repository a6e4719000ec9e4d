"""Proof that the tests of row frames and lossy codecs can fail: kernels, proofs and C++ code with one small mistake make them fail; and the
C++ code of low-rank frames and ZFP under sanitizers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asan
import from_format_lowrank
import from_format_scaled
import numpy as np
import pytest
import test_lowrank
import test_refused_rows_and_lossy
import test_rounded
import test_row_kernels
import test_rows
import test_scaled
import test_zfp
import tiers
import torch
from builds import Binary, Change
from corpus import assert_same_bits

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import factors, lowrank
from ds_zipccl.codecs import rows as row_codec
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp.backend import CppBackend
from ds_zipccl.kernels.cpp.interface import SIGNATURES
from ds_zipccl.kernels.protocol import ScaledCodec
from ds_zipccl.lossy import Int

#: The C++ route, whatever functions a test takes.
Good = Any

# --- kernels with another call in place of one


class Wrong:
    """The C++ route with other calls in place of some; codecs do not take it for the C++ route."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.good = kernels.route("native")
        for name, call in calls.items():
            setattr(self, name, lambda *given, call=call: call(self.good, *given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let all codecs have these kernels."""
        for function in ("route", "row_route", "lossy_route"):
            monkeypatch.setattr(kernels, function, lambda *given: self)


def by_hash(
    good: Good, data: torch.Tensor, row_bytes: int, first: int, sources: torch.Tensor, table: torch.Tensor
) -> int:
    """Takes rows with equal first bytes for equal rows."""
    rows = data[: len(data) // row_bytes * row_bytes].view(-1, row_bytes).clone()
    rows[:, 4:] = 0
    return int(good.find_rows(rows.view(-1), row_bytes, first, sources, table))


def nearest(
    good: Good, words: torch.Tensor, width: int, sources: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
) -> None:
    """Predicts by torch's multiplication, which rounds twice and keeps denormals."""
    rows = words[: len(words) // width * width].view(-1, width)[sources.long()]
    out.copy_((rows.float() * factors[:, None]).to(words.dtype).view(-1))


def last_row(good: Good, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
    """Forgets the last copy."""
    good.copy_rows(words, width, rows[:-1], sources[:-1])


def no_head(
    good: Good, payload: torch.Tensor, block: int, words: torch.Tensor, width: int, head: int, rows: torch.Tensor
) -> None:
    """Loses a bit of the head."""
    good.decode_rows(payload, block, words, width, head, rows)
    words.view(torch.uint8)[:head] ^= 1


def next_block(good: Good, payload: torch.Tensor, *more: Any) -> None:
    """Takes the trim of the block behind for that of each block: the trims are the last bytes of a table of four bytes a block."""
    payload = payload.clone()
    trims = payload[16 + 3 * 2 : 16 + 4 * 2]
    trims.copy_(trims.flip(0))
    try:
        good.decode_rounded_rows(payload, *more)
    except FrameError as error:
        raise AssertionError("refused") from error


def lanes_of_16(good: Good, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Adds in float32."""
    values = words[: len(words) // width * width].view(-1, width).float()
    a, b = values[sources.long()], values[rows.long()]
    return (a * b).sum(1) / (a * a).sum(1)


def without_factor(
    good: Good, scales: torch.Tensor, codes: torch.Tensor, codec: ScaledCodec, words: torch.Tensor
) -> None:
    """Forgets 2^-group_log2 after the inverse transform."""
    good.decode_scaled(scales, codes, codec, words)
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


def _nearest(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1)) - 1 + (w >> c & 1)) >> c << c
    return torch.where(w & field == field, w, torch.where(t & field == field, t - (1 << c), t))


def _up(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1))) >> c << c
    return torch.where(w & field == field, w, torch.where(t & field == field, t - (1 << c), t))


def _to_infinity(w: torch.Tensor, c: int, field: int) -> torch.Tensor:
    t = (w + (1 << (c - 1)) - 1 + (w >> c & 1)) >> c << c
    return torch.where(w & field == field, w, t)


ROUNDINGS: dict[str, Rounding] = {
    "truncation": lambda w, c, field: torch.where(w & field == field, w, w >> c << c),
    "ties away from zero": _up,
    "the largest becomes infinite": _to_infinity,
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

    def encode_rounded(
        good: Good, segments: Sequence[torch.Tensor], mantissa: int, block: int, outs: Sequence[torch.Tensor]
    ) -> Any:
        rounded = [torch.empty_like(words) for words in segments]
        for words, out in zip(segments, rounded, strict=True):
            round_words(good, words, mantissa, out)
        return good.encode_rounded(rounded, 6, block, outs)

    return {"round_words": round_words, "encode_rounded": encode_rounded}


def cut_low_bits(good: Good, segments: Sequence[torch.Tensor], mantissa: int, *more: Any) -> Any:
    """Takes the trim of the rounding for every block: a NaN loses its low bits."""
    cut = [(words.view(torch.int16) >> 4 << 4).view(words.dtype) for words in segments]
    return good.encode_rounded(cut, mantissa, *more)


def _every_pattern(name: str) -> None:
    test_rounded.test_every_pattern_is_rounded_exactly("native", name, 3)


EVERY_PATTERN = (lambda: _every_pattern("bf16"), lambda: _every_pattern("fp16"))
#: Mistake -> the calls, and the tests of which each must fail.
WRONG: dict[str, tuple[dict[str, Callable[..., Any]], Sequence[Callable[[], None]]]] = {
    "a hash is believed": ({"find_rows": by_hash}, [lambda: test_rows.test_rows_travel_once("native", "bf16")]),
    "a row is not copied": ({"copy_rows": last_row}, [lambda: test_rows.test_rows_travel_once("native", "int8")]),
    "a head is damaged": ({"decode_rows": no_head}, [lambda: test_rows.test_rows_travel_once("native", "fp16")]),
    "a trim of another block": (
        {"decode_rounded_rows": next_block},
        [lambda: test_rows.test_rounded_literals_of_two_trims("native")],
    ),
    "predictions by floating point": (
        {"predict_rows": nearest},
        [lambda: test_row_kernels.test_predictions_from_every_word_of_16_bits("native", "bf16")],
    ),
    "factors in float32": (
        {"row_factors": lanes_of_16},
        [lambda: test_row_kernels.test_factors_are_those_of_32_lanes("native", "fp32", 257)],
    ),
    "no 2^-group_log2": (
        {"decode_scaled": without_factor},
        [lambda: test_scaled.test_transform_and_inverse_give_small_integers_back("native", 128)],
    ),
    "an absolute epsilon": (
        {"encode_scaled": with_epsilon},
        [lambda: test_scaled.test_scaled_input_has_the_same_codes("native", test_scaled.CODECS["e4m3 hadamard"])],
    ),
    "NaN becomes zero": (
        {"encode_scaled": no_nan},
        [lambda: test_scaled.test_frames_follow_the_document("native", "int6 32", "bf16")],
    ),
    "a scale that is too small": (
        {"encode_scaled": nearest_scale},
        [lambda: test_scaled.test_frames_follow_the_document("native", "int6 32", "bf16")],
    ),
    "a trim of the rounding for every block": (
        {**rounds(_nearest), "encode_rounded": cut_low_bits},
        [EVERY_PATTERN[0], lambda: test_rounded.test_each_block_has_its_own_trim("native")],
    ),
    **{f"rounding: {name}": (rounds(rounding), EVERY_PATTERN) for name, rounding in ROUNDINGS.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, checks = WRONG[name]
    for check in checks:
        check()
    Wrong(calls).take_over(monkeypatch)
    for check in checks:
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("calls", [{}, rounds(_nearest)], ids=["no other call", "the right rounding"])
def test_right_kernels_in_the_same_place_pass(calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Wrong(calls).take_over(monkeypatch)
    for _, checks in WRONG.values() if not calls else [({}, EVERY_PATTERN)]:
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


#: A decoder without a proof -> the case by hand that rests on the proof alone.
PROOFS = {"a source in front of the history": _no_sources, "a repeat of a repeat": _unmarked}


@pytest.mark.parametrize("case", PROOFS)
def test_a_missing_proof_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        test_refused_rows_and_lossy.test_rows_are_refused_with_their_code(case, "native")

    check()
    monkeypatch.setattr(row_codec, "read_map", PROOFS[case])
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        check()


def _downwards(v: np.ndarray) -> np.ndarray:
    """H v by the strides g/2, ..., 2, 1: the same numbers but for their rounding."""
    stride = len(v) // 2
    while stride:
        pairs = v.reshape(-1, 2, stride)
        v = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).reshape(-1)
        stride //= 2
    return v


def test_another_order_of_strides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identities hold in any order; the bytes of the document do not."""

    def check() -> None:
        test_scaled.test_the_order_of_strides_shows_in_the_codes("native")

    check()
    x = np.arange(128, dtype=np.float32)
    assert np.array_equal(_downwards(x), from_format_scaled.hadamard(x))
    monkeypatch.setattr(from_format_scaled, "hadamard", _downwards)
    with pytest.raises(AssertionError):
        check()


def _refused() -> None:
    p, q = torch.full((40, 4), 2.0**126), torch.ones(48, 4)
    try:
        lowrank.product(p, q, torch.empty(40, 48))
    except ValueError:
        return
    raise AssertionError("a product that is not finite")


#: Mistake in the Python of low-rank frames -> what it replaces, and the test that must fail.
FACTORS: dict[str, tuple[object, str, object, Callable[[], None]]] = {
    "three mantissa bits": (lowrank, "FACTOR_BITS", 3, test_lowrank.test_factors_have_five_bits),
    "factors that pay nothing": (lowrank, "factor_rank", lambda n, m, rank: min(rank, n, m), test_lowrank.test_ranks_that_pay),
    "a start that stays": (lowrank, "basis", lambda q, route: q, test_lowrank.test_directions_come_back_after_a_matrix_of_zeros),
    "columns as they are": (
        lowrank,
        "orthonormalize",
        lambda columns, route: None,
        test_lowrank.test_the_error_is_orthogonal_to_the_factor,
    ),
    "no warm start": (
        lowrank,
        "basis",
        lambda q, route: torch.linalg.qr(lowrank.first_factor(len(q), q.shape[1], 7)).Q.contiguous(),
        lambda: test_lowrank.test_errors_lie_near_the_tail_of_the_singular_values(0),
    ),
    "any factor is bounded": (factors, "bounded", lambda p, q: True, _refused),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_mistakes_in_the_factors_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, bad, check = FACTORS[name]
    check()
    monkeypatch.setattr(module, attribute, bad)
    with pytest.raises(AssertionError):
        check()


# --- the C++ code of low-rank frames and ZFP

FOLDERS = {"csrc": build.CSRC, "fuzz": Path(asan.__file__).parent}
#: Codec -> the functions of its file.
CALLS = {
    "lowrank": ("zipccl_multiply", "zipccl_multiply_add", "zipccl_orthonormalize"),
    "zfp": tuple(name for name in SIGNATURES if name.startswith("zipccl_zfp")),
}


def _sources(codec: str) -> dict[str, tuple[str, ...]]:
    return {f"csrc/cpu/lossy/{codec}.cpp": (), "fuzz/lossy_alone.cpp": ()}


def _library(codec: str, changes: Mapping[str, tuple[Change, ...]]) -> CppBackend:
    """The functions of a codec alone, with mistakes in them."""
    flags = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-pthread")
    path = Binary(codec, FOLDERS, _sources(codec), flags, ("-shared",), changes).path()
    return CppBackend(ctypes.CDLL(str(path)), CALLS[codec])


def _fuzzed(codec: str, changes: Mapping[str, tuple[Change, ...]], cases: int) -> subprocess.CompletedProcess[str]:
    sources = {f"fuzz/fuzz_{codec}.cpp": (), **_sources(codec)}
    flags = ("-O1", "-ffp-contract=off", *asan.FLAGS)
    try:
        program = Binary(f"fuzz_{codec}", FOLDERS, sources, flags, changes=changes).path()
    except build.BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(program), "1", str(cases)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("codec", "cases"), [("lowrank", 1500), ("zfp", 20_000)])
def test_any_content_under_sanitizers(codec: str, cases: int) -> None:
    result = _fuzzed(codec, {}, cases)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    if codec == "lowrank":
        assert words == ["cases", str(cases)], result.stdout
    else:
        assert int(words[1]) > 2000 and int(words[3]) > 1000, result.stdout


def test_columns_that_lose_the_earlier_ones_once_are_not_orthonormal() -> None:
    result = _fuzzed("lowrank", {f"csrc/{LOWRANK}": (("turn < 2 * j", "turn < j"),)}, 1500)
    assert result.returncode == 1 and "columns that are not orthonormal" in result.stdout, result.stdout + result.stderr


@dataclass(frozen=True)
class Plant:
    """A mistake in a file of csrc, and a test that must fail with it."""

    file: str
    good: str
    bad: str
    check: Callable[[], None]


def _products() -> None:
    for dtype in codecs.LOSSY_DTYPES:
        test_lowrank.test_a_decoder_written_from_the_document_agrees("auto", dtype)


def _sums_of_products() -> None:
    for fp32 in (False, True):
        test_lowrank.test_sums_are_those_of_the_words("auto", torch.bfloat16, fp32)


def _columns() -> None:
    """The bits of the slow reference."""
    for rows, rank in ((16, 4), (35, 5), (1000, 7)):
        columns = torch.randn(rows, rank, generator=torch.Generator().manual_seed(rows))
        columns[:, 3] = columns[:, 1]
        columns[:, 2] = columns[:, 0] + columns[:, 1]  # its rounding is left: the last bits of float64 decide
        wanted = torch.from_numpy(from_format_lowrank.orthonormal(columns.numpy()))
        lowrank.orthonormalize(columns, route="auto")
        assert_same_bits(columns, wanted)


_parts = test_lowrank.test_threads_and_flushed_denormals_change_no_product


def _streams() -> None:
    test_zfp.test_streams_of_the_reference_library("auto")


def _codes() -> None:
    for dtype in test_zfp.DTYPES:
        test_zfp.test_a_codec_written_from_the_document_agrees("auto", dtype)


def _not_finite() -> None:
    test_zfp.test_nothing_that_is_not_finite_disappears("auto", torch.bfloat16, torch.inf)


def _extremes() -> None:
    test_zfp.test_extreme_blocks("auto", torch.float16)
    test_zfp.test_extreme_blocks("auto", torch.float32)


def _projections() -> None:
    test_zfp.test_every_frame_decodes_to_the_projection("auto", torch.float16)


def _sums() -> None:
    test_zfp.test_sums_are_those_of_the_words("auto", torch.bfloat16, True)


def _threads() -> None:
    test_zfp.test_threads_and_flushed_denormals_change_nothing(torch.bfloat16)


LOWRANK, PRODUCTS = "cpu/lossy/lowrank.h", "cpu/lossy/lowrank.cpp"
LATER = "sums[i][v] = sums[i][v] + p[uint64_t(i) * rank + k] * q[v];"
BACKWARDS = LATER.replace("rank + k", "rank + rank - k").replace("q[v]", "at_end[v]")
BACKWARDS = (
    "{ Floats at_end[kTileVectors]; memcpy(at_end, columns + (rank - k) * stride, sizeof at_end); " + BACKWARDS + " }"
)
LANES = "lanes[l] += lanes[l + half];"
BLOCK, CODES = "common/zfp_block.cuh", "cpu/lossy/zfp.cpp"
PLANTS: dict[str, dict[str, Plant]] = {
    "lowrank": {
        "the last column is left out": Plant(LOWRANK, "k < rank; ++k) {\n    memcpy", "k + 1 < rank; ++k) {\n    memcpy", _products),
        "columns in the other order": Plant(LOWRANK, LATER, BACKWARDS, _products),
        "sums begin at the wrong row": Plant(LOWRANK, "multiply_tile<1>(p + row * rank", "multiply_tile<1>(p", _products),
        "large numbers become infinite": Plant(LOWRANK, "-65504.0f), 65504.0f)", "-1e30f), 1e30f)", _products),
        "rows of another part": Plant(PRODUCTS, "words + first * row_bytes", "words", _parts),
        "denormals are flushed": Plant(PRODUCTS, "const Denormals on;\n    multiply(", "multiply(", _parts),
        "sums of the first columns": Plant(PRODUCTS, "p + row * rank, columns + at,", "p + row * rank, columns,", _sums_of_products),
        "a column keeps the earlier ones": Plant(LOWRANK, "own[i] -= part * earlier[i]", "own[i] -= 0 * earlier[i]", _columns),
        "a column that others span becomes noise": Plant(LOWRANK, "length <= lengths[j] * kZipcclSpanned", "length == 0", _columns),
        "lanes are added in another order": Plant(LOWRANK, LANES, LANES.replace("l + half", "2 * half - 1 - l"), _columns),
    },
    "zfp": {
        # Encoder and decoder agree with each other, only not with the published stream.
        "another negabinary": Plant(BLOCK, "kNegabinary = 0xaaaaaaaau", "kNegabinary = 0x55555555u", _streams),
        "an exponent more": Plant(BLOCK, "numbers.head = top + 1;", "numbers.head = top + 2;", _streams),
        "a plane's bits from the highest": Plant(
            BLOCK, "(numbers.u[i] >> 8 * byte & 255) << 8 * i;", "(numbers.u[i] >> 8 * byte & 255) << (24 - 8 * i);", _streams
        ),
        "numbers rounded up": Plant(BLOCK, "significand >> -shift : 0", "(significand >> -shift) + 1 : 0", _streams),
        "a step of the transform left out": Plant(BLOCK, "w += uint32_t(zfp_half(y)), y -=", "y -=", _streams),
        "a partial block filled up otherwise": Plant(BLOCK, "count == 2 && i == 2 ? 1 : 0", "0", _streams),
        "no one where the bits end": Plant(BLOCK, "plane |= 1u << n++;", "plane |= (at < left ? 1u : 0u) << n, ++n;", _streams),
        "the tie goes up": Plant(BLOCK, "- 1 + (wide >> shift & 1)) >> shift", ") >> shift", _codes),
        "subnormal numbers get a bit more": Plant(BLOCK, "normal > least ? normal : least", "normal", _codes),
        "a large number becomes infinite": Plant(BLOCK, "magnitude < infinity ? magnitude : infinity - 1", "magnitude", _extremes),
        "a large float becomes infinite": Plant(BLOCK, "word > kLargestFp32 ? kLargestFp32", "word > ~0u ? 0", _streams),
        "NaNs are coded": Plant(CODES, "if (!block.finite()) return false;", "", _not_finite),
        "NaNs are projected": Plant(CODES, "if (block.finite()) {", "if (true) {", _not_finite),
        "a projection without its neighbors": Plant(
            CODES,
            "store_block<F>(zfp_decode(zfp_encode<Code>(block, rate, kTables), rate, kTables), out",
            "store_block<F>(block, out",
            _projections,
        ),
        "codes of the first values for all sums": Plant(CODES, "bytes + at / kUnit * rate * 8", "bytes", _sums),
        "parts that overlap": Plant(CODES, "first / kUnit * rate * 8", "first / kUnit * rate * 4", _threads),
    },
}  # fmt: skip
SHORT_PLANTS = (
    ("lowrank", "the last column is left out"), ("lowrank", "a column that others span becomes noise"),
    ("zfp", "another negabinary"), ("zfp", "NaNs are coded"),
)  # fmt: skip


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
    plant, real = PLANTS[codec][name], kernels.lossy_route

    def wrong(route: str, device: str, function: str) -> object:
        own = "zfp" in function if codec == "zfp" else function in ("multiply", "multiply_add", "orthonormalize")
        return library if own else real(route, device, function)

    monkeypatch.setattr(kernels, "lossy_route", wrong)
    library = _library(codec, {})
    plant.check()
    library = _library(codec, {f"csrc/{plant.file}": ((plant.good, plant.bad),)})
    with pytest.raises(AssertionError):
        plant.check()


#: Codec and a bound in its code -> the file, text in its place that proves nothing, and drawn cases that show it.
BOUNDS = {
    ("lowrank", "std::min<uint64_t>(n - at, kTileColumns)"): (LOWRANK, "kTileColumns", 500),
    ("lowrank", "row + kTileRows <= rows"): (LOWRANK, "row < rows", 500),
    ("lowrank", "at + kLanes <= n"): (LOWRANK, "at < n", 500),
    ("zfp", "if (shift + count > 64)"): (CODES, "if (shift)", 2000),
    ("zfp", "if (fill) memcpy(out, &pending, 8);"): (CODES, "memcpy(out, &pending, 8);", 2000),
    ("zfp", "i < kZfpValues && i < count"): (CODES, "i < kZfpValues", 2000),
    ("zfp", "return i < count ? i : "): (BLOCK, "return i < kZfpValues ? i : ", 2000),
}


@pytest.mark.parametrize(("codec", "bound"), tiers.mostly_full(BOUNDS, (), "each has a fuzzer of its own to compile"))
def test_a_missing_bound_is_seen(codec: str, bound: str) -> None:
    file, bad, cases = BOUNDS[codec, bound]
    result = _fuzzed(codec, {f"csrc/{file}": ((bound, bad),)}, cases)
    assert result.returncode != 0 and "AddressSanitizer" in result.stderr, result.stdout + result.stderr
