"""The C++ code of ZFP under sanitizers, and proof that the tests of ZFP can fail: small mistakes planted in it make them fail.

Golden frames of 16-bit words are here too; those of float32 are the reference library's streams.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import asan
import pytest
import test_zfp
import tiers
import torch
from builds import Binary, Change
from corpus import assert_same_bits
from places import TESTS

from ds_zipccl import kernels
from ds_zipccl.codecs import decompress, project
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp.backend import CppBackend
from ds_zipccl.kernels.cpp.interface import SIGNATURES
from ds_zipccl.lossy import Zfp

FOLDERS = {"csrc": build.CSRC, "fuzz": Path(asan.__file__).parent}
#: Name -> tensor and rate.
GOLDEN = {
    f"zfp_{name}_{rate}": (test_zfp._finite(150, dtype, rate), rate)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for rate in (6, 11)
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frame(zfp_route: str, name: str, request: pytest.FixtureRequest) -> None:
    (tensor, rate), path = GOLDEN[name], TESTS / "golden" / f"{name}.bin"
    frame = test_zfp._frame(tensor, rate, zfp_route)
    if request.config.getoption("--update-golden") and zfp_route == "native":
        path.write_bytes(frame.numpy().tobytes())
    golden = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert torch.equal(frame, golden)
    assert_same_bits(decompress(golden, route=zfp_route), project(tensor, Zfp(rate), route=zfp_route))


zfp_route = test_zfp.zfp_route


def _library(changes: Mapping[str, tuple[Change, ...]]) -> CppBackend:
    """ZFP alone, with mistakes in it."""
    sources: dict[str, tuple[str, ...]] = {"csrc/cpu/lossy/zfp.cpp": (), "fuzz/zfp_alone.cpp": ()}
    flags = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-pthread")
    names = [name for name in SIGNATURES if name.startswith("zipccl_zfp")]
    return CppBackend(ctypes.CDLL(str(Binary("zfp", FOLDERS, sources, flags, ("-shared",), changes).path())), names)


def _fuzzed(changes: Mapping[str, tuple[Change, ...]], cases: int) -> subprocess.CompletedProcess[str]:
    sources: dict[str, tuple[str, ...]] = {
        "fuzz/fuzz_zfp.cpp": (),
        "csrc/cpu/lossy/zfp.cpp": (),
        "fuzz/zfp_alone.cpp": (),
    }
    try:
        program = Binary("fuzz_zfp", FOLDERS, sources, ("-O1", *asan.FLAGS), changes=changes).path()
    except build.BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(program), "1", str(cases)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_codes_of_any_content_under_sanitizers() -> None:
    result = _fuzzed({}, 20_000)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    assert int(words[1]) > 2000 and int(words[3]) > 1000, result.stdout


@dataclass(frozen=True)
class Plant:
    """A mistake in a file of csrc, and a test that must fail with it."""

    file: str
    good: str
    bad: str
    check: Callable[[], None]


def _streams() -> None:
    test_zfp.test_streams_of_the_reference_library("auto")


def _document() -> None:
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


BLOCK = "common/zfp_block.cuh"
CODES = "cpu/lossy/zfp.cpp"
PLANTS = {
    # Encoder and decoder agree with each other, only not with the published stream.
    "another negabinary": Plant(BLOCK, "kNegabinary = 0xaaaaaaaau", "kNegabinary = 0x55555555u", _streams),
    "an exponent more": Plant(BLOCK, "numbers.head = top + 1;", "numbers.head = top + 2;", _streams),
    "a plane's bits from the highest": Plant(
        BLOCK,
        "bytes |= (numbers.u[i] >> 8 * byte & 255) << 8 * i;",
        "bytes |= (numbers.u[i] >> 8 * byte & 255) << (24 - 8 * i);",
        _streams,
    ),
    "numbers rounded up": Plant(BLOCK, "significand >> -shift : 0", "(significand >> -shift) + 1 : 0", _streams),
    "a step of the transform left out": Plant(BLOCK, "w += uint32_t(zfp_half(y)), y -=", "y -=", _streams),
    "a partial block filled up otherwise": Plant(BLOCK, "count == 2 && i == 2 ? 1 : 0", "0", _streams),
    "no one where the bits end": Plant(
        BLOCK, "plane |= 1u << n++;", "plane |= (at < left ? 1u : 0u) << n, ++n;", _streams
    ),
    "the tie goes up": Plant(BLOCK, "- 1 + (wide >> shift & 1)) >> shift", ") >> shift", _document),
    "subnormal numbers get a bit more": Plant(BLOCK, "normal > least ? normal : least", "normal", _document),
    "a large number becomes infinite": Plant(
        BLOCK, "magnitude < infinity ? magnitude : infinity - 1", "magnitude", _extremes
    ),
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
}


@pytest.mark.parametrize(
    "name",
    tiers.mostly_full(PLANTS, ("another negabinary", "NaNs are coded"), "each has a codec of its own to compile"),
)
def test_planted_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := kernels.why()["native"]:
        pytest.skip(f"the native route is not usable here: {reason}")
    plant = PLANTS[name]
    for changes in ({}, {f"csrc/{plant.file}": ((plant.good, plant.bad),)}):
        wrong = _library(changes)
        monkeypatch.setattr(kernels, "lossy_route", lambda *more, wrong=wrong: wrong)
        if not changes:
            plant.check()
            continue
        with pytest.raises(AssertionError):
            plant.check()


#: A bound, the file it is in, and text in its place that proves nothing.
BOUNDS = {
    "if (shift + count > 64)": (CODES, "if (shift)"),
    "if (fill) memcpy(out, &pending, 8);": (CODES, "memcpy(out, &pending, 8);"),
    "i < kZfpValues && i < count": (CODES, "i < kZfpValues"),
    "return i < count ? i : ": (BLOCK, "return i < kZfpValues ? i : "),
}


@pytest.mark.parametrize("bound", tiers.mostly_full(BOUNDS, (), "each has a fuzzer of its own to compile"))
def test_a_missing_bound_is_seen(bound: str) -> None:
    file, bad = BOUNDS[bound]
    result = _fuzzed({f"csrc/{file}": ((bound, bad),)}, 2000)
    assert result.returncode != 0 and "AddressSanitizer" in result.stderr, result.stdout + result.stderr
