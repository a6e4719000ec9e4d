"""The C++ codec under AddressSanitizer and UBSan: fuzz/fuzz.cpp at every level, and proof that the sanitizers look."""

from __future__ import annotations

import subprocess

import asan
import pytest
import variants

from ds_zipccl.kernels import build

MUTATIONS = 100_000


@pytest.fixture(scope="module", autouse=True)
def _sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, with the compiler's words, where sanitizers are not installed."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "trial.cpp").write_text("int main() {}")
    try:
        command = [*build.compiler(), *asan.FLAGS, str(folder / "trial.cpp"), "-o", str(folder / "trial")]
    except build.BuildError as error:
        pytest.skip(str(error))
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode or subprocess.run([folder / "trial"], timeout=120).returncode:
        pytest.skip(f"no sanitizers here: {result.stderr}")


@pytest.fixture
def levels() -> list[str]:
    return [variant.level for variant in variants.usable() if variant.level]


@pytest.mark.full(reason="half a minute of a program with sanitizers; test_format and test_codec damage payloads too")
def test_a_hundred_thousand_damaged_payloads(levels: list[str]) -> None:
    result = asan.run(asan.fuzzer().path(), 1, MUTATIONS, 300, levels)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    count = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert count["mutations"] >= MUTATIONS
    assert count["accepted"] + count["index"] + count["block"] == count["mutations"]
    assert min(count["accepted"], count["index"], count["block"]) > MUTATIONS / 20, count


#: A proof of the decoders, the file it is in, and text in its place that proves nothing.
CHECKS = {
    "if (tail + entry.tail_bytes > bytes) return BLOCK;": ("cpu/decode.h", ""),
    "if (escapes_at + count * sizeof(Word) != bytes) return BLOCK;": ("cpu/delta/change_decode.h", ""),
    "if (last >= of) return BLOCK;": ("cpu/delta/delta_list.h", ""),
}


@pytest.mark.full(reason="each has a fuzzer of its own to compile; codec/test_planted.py stays")
@pytest.mark.parametrize("check", CHECKS)
def test_a_missing_bound_check_is_seen(check: str, levels: list[str]) -> None:
    """Without the proof that a tail, its content or a place lies where it must, some damaged payload makes a decoder go outside."""
    file, nothing = CHECKS[check]
    planted = asan.fuzzer(changes={file: ((check, nothing),)})
    result = asan.run(planted.path(), 1, MUTATIONS, 60, levels[:1])
    assert result.returncode != 0
    # UBSan, which stops at the first place where it looks, may be before AddressSanitizer
    assert "AddressSanitizer" in result.stderr or "runtime error: index" in result.stderr, result.stdout + result.stderr
