"""The C++ code of low-rank frames under sanitizers, and proof that its tests can fail: small mistakes planted in it make them fail."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import asan
import pytest
import test_lowrank
import tiers
import torch
from builds import Binary, Change

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import factors, lowrank
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp.backend import CppBackend
from ds_zipccl.kernels.cpp.interface import SIGNATURES

FOLDERS = {"csrc": build.CSRC, "fuzz": Path(asan.__file__).parent}
SOURCES: dict[str, tuple[str, ...]] = {"csrc/cpu/lossy/lowrank.cpp": (), "fuzz/lowrank_alone.cpp": ()}


def _library(changes: Mapping[str, tuple[Change, ...]]) -> CppBackend:
    """The low-rank functions alone, with mistakes in them."""
    flags = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-pthread")
    names = [name for name in SIGNATURES if name.startswith(("zipccl_multiply", "zipccl_orthonormalize"))]
    return CppBackend(ctypes.CDLL(str(Binary("lowrank", FOLDERS, SOURCES, flags, ("-shared",), changes).path())), names)


def _fuzzed(changes: Mapping[str, tuple[Change, ...]], cases: int) -> subprocess.CompletedProcess[str]:
    sources = {"fuzz/fuzz_lowrank.cpp": (), **SOURCES}
    try:
        program = Binary("fuzz_lowrank", FOLDERS, sources, ("-O1", "-ffp-contract=off", *asan.FLAGS), changes=changes)
        path = program.path()
    except build.BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(path), "1", str(cases)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_factors_of_any_content_under_sanitizers() -> None:
    result = _fuzzed({}, 1500)
    assert result.returncode == 0 and result.stdout == "cases 1500\n", result.stdout + result.stderr


def test_columns_that_lose_the_earlier_ones_once_are_not_orthonormal() -> None:
    result = _fuzzed({f"csrc/{CODE}": (("turn < 2 * j", "turn < j"),)}, 1500)
    assert result.returncode == 1 and "columns that are not orthonormal" in result.stdout, result.stdout + result.stderr


@dataclass(frozen=True)
class Plant:
    """A mistake in a file of csrc, and a test that must fail with it."""

    file: str
    good: str
    bad: str
    check: Callable[[], None]


def _document() -> None:
    for dtype in codecs.LOSSY_DTYPES:
        test_lowrank.test_a_decoder_written_from_the_document_agrees("auto", dtype)


def _sums() -> None:
    for fp32 in (False, True):
        test_lowrank.test_sums_are_those_of_the_words("auto", torch.bfloat16, fp32)


def _columns() -> None:
    """The bits of the reference."""
    for rows, rank in ((16, 4), (35, 5), (1000, 7)):
        columns = torch.randn(rows, rank, generator=torch.Generator().manual_seed(rows))
        columns[:, 3] = columns[:, 1]
        columns[:, 2] = columns[:, 0] + columns[:, 1]  # its rounding is left: the last bits of float64 decide
        one, other = columns.clone(), columns.clone()
        lowrank.orthonormalize(one, route="auto")
        lowrank.orthonormalize(other, route="numba")
        test_lowrank.assert_same_bits(one, other)


def _threads() -> None:
    test_lowrank.test_threads_and_flushed_denormals_change_no_product()


CODE, CALLS = "cpu/lossy/lowrank.h", "cpu/lossy/lowrank.cpp"
LATER = "sums[i][v] = sums[i][v] + p[uint64_t(i) * rank + k] * q[v];"
BACKWARDS = LATER.replace("rank + k", "rank + rank - k").replace("q[v]", "at_end[v]")
BACKWARDS = (
    "{ Floats at_end[kTileVectors]; memcpy(at_end, columns + (rank - k) * stride, sizeof at_end); " + BACKWARDS + " }"
)
LANES = "lanes[l] += lanes[l + half];"
PLANTS = {
    "the last column is left out": Plant(CODE, "k < rank; ++k) {\n    memcpy", "k + 1 < rank; ++k) {\n    memcpy", _document),
    "columns in the other order": Plant(CODE, LATER, BACKWARDS, _document),
    "sums begin at the wrong row": Plant(CODE, "multiply_tile<1>(p + row * rank", "multiply_tile<1>(p", _document),
    "large numbers become infinite": Plant(CODE, "-65504.0f), 65504.0f)", "-1e30f), 1e30f)", _document),
    "rows of another part": Plant(CALLS, "words + first * row_bytes", "words", _threads),
    "denormals are flushed": Plant(CALLS, "const Denormals on;\n    multiply(", "multiply(", _threads),
    "sums of the first columns": Plant(CALLS, "multiply(p + row * rank, columns + at,", "multiply(p + row * rank, columns,", _sums),
    "a column keeps the earlier ones": Plant(CODE, "own[i] -= part * earlier[i]", "own[i] -= 0 * earlier[i]", _columns),
    "a column that others span becomes noise": Plant(CODE, "length <= lengths[j] * kZipcclSpanned", "length == 0", _columns),
    "lanes are added in another order": Plant(CODE, LANES, LANES.replace("l + half", "2 * half - 1 - l"), _columns),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    tiers.mostly_full(
        PLANTS,
        ("the last column is left out", "a column that others span becomes noise"),
        "each compiles code of its own",
    ),
)
def test_planted_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := kernels.why()["native"]:
        pytest.skip(f"the native route is not usable here: {reason}")
    plant = PLANTS[name]
    real = kernels.lossy_route

    def wrong(route: str, device: str, function: str) -> object:
        ours = route != "numba" and hasattr(library, function)
        return library if ours else real(route, device, function)

    monkeypatch.setattr(kernels, "lossy_route", wrong)
    library = _library({})
    plant.check()
    library = _library({f"csrc/{plant.file}": ((plant.good, plant.bad),)})
    with pytest.raises(AssertionError):
        plant.check()


#: Mistake in Python -> what it replaces, and the test that must fail.
FACTORS: dict[str, tuple[object, str, object, Callable[[], None]]] = {
    "three mantissa bits": (lowrank, "FACTOR_BITS", 3, test_lowrank.test_factors_have_five_bits),
    "factors that pay nothing": (lowrank, "factor_rank", lambda n, m, rank: min(rank, n, m), test_lowrank.test_ranks_that_pay),
    "a start that stays": (
        lowrank,
        "basis",
        lambda q, route: q,
        lambda: test_lowrank.test_directions_come_back_after_a_matrix_of_zeros(),
    ),
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
    "any factor is bounded": (factors, "bounded", lambda p, q: True, lambda: _refused()),
}  # fmt: skip


def _refused() -> None:
    p, q = torch.full((40, 4), 2.0**126), torch.ones(48, 4)
    try:
        lowrank.product(p, q, torch.empty(40, 48))
    except ValueError:
        return
    raise AssertionError("a product that is not finite")


@pytest.mark.parametrize("name", FACTORS)
def test_mistakes_in_the_factors_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, bad, check = FACTORS[name]
    check()
    monkeypatch.setattr(module, attribute, bad)
    with pytest.raises(AssertionError):
        check()


#: A bound, and text in its place that proves nothing.
BOUNDS = {
    "std::min<uint64_t>(n - at, kTileColumns)": "kTileColumns",
    "row + kTileRows <= rows": "row < rows",
    "at + kLanes <= n": "at < n",
}


@pytest.mark.parametrize("bound", tiers.mostly_full(BOUNDS, (), "each has a fuzzer of its own to compile"))
def test_a_missing_bound_is_seen(bound: str) -> None:
    result = _fuzzed({f"csrc/{CODE}": ((bound, BOUNDS[bound]),)}, 500)
    assert result.returncode != 0 and "AddressSanitizer" in result.stderr, result.stdout + result.stderr
