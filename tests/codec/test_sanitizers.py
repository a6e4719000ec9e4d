"""The C++ codec under AddressSanitizer and UBSan: fuzz/fuzz.cpp at every level, and proof that the sanitizers look."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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


def test_a_hundred_thousand_damaged_payloads(tmp_path: Path, levels: list[str]) -> None:
    result = asan.run(asan.build_fuzzer(tmp_path), 1, MUTATIONS, 300, levels)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    count = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert count["mutations"] >= MUTATIONS
    assert count["accepted"] + count["index"] + count["block"] == count["mutations"]
    assert min(count["accepted"], count["index"], count["block"]) > MUTATIONS / 20, count


#: A proof of the decoders, and the file it is in.
CHECKS = {
    "if (tail + entry.tail_bytes > bytes) return BLOCK;": "cpu/decode.h",
    "if (escapes_at + count * sizeof(Word) != bytes) return BLOCK;": "cpu/delta.h",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_missing_bound_check_is_seen(check: str, tmp_path: Path, levels: list[str]) -> None:
    """Without the proof that a tail lies in its chunk, or its contents in the tail, a damaged payload makes a decoder read outside."""
    csrc = tmp_path / "csrc"
    shutil.copytree(build.CSRC, csrc)
    source = csrc / CHECKS[check]
    assert check in source.read_text(), "the line to take out has moved"
    source.write_text(source.read_text().replace(check, ""))
    result = asan.run(asan.build_fuzzer(tmp_path, csrc), 1, MUTATIONS, 60, levels[:1])
    assert result.returncode != 0
    assert "AddressSanitizer" in result.stderr, result.stdout + result.stderr
