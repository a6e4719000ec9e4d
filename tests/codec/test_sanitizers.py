"""The C++ codec under AddressSanitizer and UBSan: fuzz/fuzz.cpp at every level, fuzzers of low-rank frames, ZFP and maps of rows, and proof
that the sanitizers look."""

from __future__ import annotations

import subprocess

import asan
import builds
import pytest
import tiers
import variants

from ds_zipccl.kernels import build

MUTATIONS, FEWER = 100_000, 40_000


@pytest.fixture(scope="module", autouse=True)
def _sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, with the compiler's words, where sanitizers are not installed."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "trial.cpp").write_text("int main() {}")
    compiler = builds.or_skip(build.compiler)
    command = [*compiler, *asan.FLAGS, str(folder / "trial.cpp"), "-o", str(folder / "trial")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode or subprocess.run([folder / "trial"], timeout=120).returncode:
        pytest.skip(f"no sanitizers here: {result.stderr}")


@pytest.fixture
def levels() -> list[str]:
    return [variant.level for variant in variants.usable() if variant.level]


@pytest.mark.full(reason="half a minute of a program with sanitizers; test_format and test_codec damage payloads too")
def test_damaged_payloads(levels: list[str]) -> None:
    """After the tests ``make test-all`` runs as much again for a minute, from a new seed."""
    result = asan.run(asan.fuzzer().path(), 1, FEWER, 300, levels)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    count = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert count["mutations"] >= FEWER
    assert count["accepted"] + count["index"] + count["block"] == count["mutations"]
    assert min(count["accepted"], count["index"], count["block"]) > FEWER / 20, count


@pytest.mark.parametrize(
    ("codec", "cases", "least"),
    [("lowrank", 1500, [1500]), ("zfp", 20_000, [2001, 1001]), ("maps", 5000, [2001, 2001])],
)
def test_any_content_of_a_codec_alone(codec: str, cases: int, least: list[int]) -> None:
    """``least``: cases of each outcome."""
    result = asan.run(asan.fuzzer_of(codec).path(), 1, cases)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = map(int, result.stdout.split()[1::2])
    assert all(count >= wanted for count, wanted in zip(counts, least, strict=True)), result.stdout


#: Fuzzer and a proof or a bound in its code -> the file, text in its place that proves nothing, and drawn cases that show it.
BOUNDS = {
    ("codec", "if (tail + entry.tail_bytes > bytes) return BLOCK;"): ("cpu/decode.h", "", MUTATIONS),
    ("codec", "if (escapes_at + count * sizeof(Word) != bytes) return BLOCK;"): (
        "cpu/delta/change_decode.h",
        "",
        MUTATIONS,
    ),
    ("codec", "if (last >= of) return BLOCK;"): ("cpu/delta/delta_list.h", "", MUTATIONS),
    ("lowrank", "std::min<uint64_t>(n - at, kTileColumns)"): ("cpu/lossy/lowrank.h", "kTileColumns", 500),
    ("lowrank", "row + kTileRows <= rows"): ("cpu/lossy/lowrank.h", "row < rows", 500),
    ("lowrank", "at + kLanes <= n"): ("cpu/lossy/lowrank.h", "at < n", 500),
    ("lowrank", "turn < 2 * j"): ("cpu/lossy/lowrank.h", "turn < j", 1500),  # columns lose the earlier ones once
    ("zfp", "if (shift + count > 64)"): ("cpu/lossy/zfp.cpp", "if (shift)", 2000),
    ("zfp", "if (fill) memcpy(out, &pending, 8);"): ("cpu/lossy/zfp.cpp", "memcpy(out, &pending, 8);", 2000),
    ("zfp", "i < kZfpValues && i < count"): ("cpu/lossy/zfp.cpp", "i < kZfpValues", 2000),
    ("zfp", "return i < count ? i : "): ("common/zfp_block.cuh", "return i < kZfpValues ? i : ", 2000),
    ("maps", "if (repeats == m->repeats) return 1;"): ("cpu/rows/row_map.cpp", "", 5000),
    ("maps", "distance > i + m->reach || "): ("cpu/rows/row_map.cpp", "", 5000),
    ("maps", " || (distance <= i && marked(i - distance))"): ("cpu/rows/row_map.cpp", "", 5000),
    ("maps", "if (literals == m->count - m->repeats) return 1;"): ("cpu/rows/row_map.cpp", "", 5000),
    ("maps", "!r->repeats || padded + 16 > r->room"): ("cpu/rows/row_map.cpp", "!r->repeats", 5000),
}


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("fuzzer", "bound"),
    tiers.mostly_full(
        BOUNDS, [("maps", "if (repeats == m->repeats) return 1;")], "each has a fuzzer of its own to compile"
    ),
)
def test_a_missing_bound_is_seen(fuzzer: str, bound: str) -> None:
    """Without the proof that a tail, its content or a place lies where it must, or without a bound, some case goes outside."""
    file, nothing, cases = BOUNDS[fuzzer, bound]
    changes = {file: ((bound, nothing),)}
    if fuzzer == "codec":
        result = asan.run(asan.fuzzer(changes=changes).path(), 1, cases, 60, [variants.PORTABLE])
    else:
        result = asan.run(asan.fuzzer_of(fuzzer, changes).path(), 1, cases)
    assert result.returncode != 0
    # UBSan, which stops at the first place where it looks, may be before AddressSanitizer; two fuzzers look at the numbers themselves
    own = {"maps": {"FAILED", "terminate"}, "lowrank": {"columns that are not orthonormal"}}
    seen = {"AddressSanitizer", "runtime error: index"} | own.get(fuzzer, set())
    assert any(words in result.stdout + result.stderr for words in seen), result.stdout + result.stderr
