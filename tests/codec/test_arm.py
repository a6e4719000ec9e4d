"""The codec for 64-bit Arm CPUs, emulated where this machine has another one: same frames, words and refusals."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import arm
import corpus
import pytest
import test_golden
import torch
import variants

from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.lossy import Round

pytestmark = pytest.mark.full(reason="compiles the codec for another CPU, and emulates it")

MUTATIONS = 2_520  # 40 a payload
#: Numbers of codes in the file of cases (tests/fuzz/cases.h).
WIDE, DELTA, ROUNDED = 1, 2, 3


@pytest.fixture(scope="module")
def program() -> Path:
    if reason := arm.why_not():
        pytest.skip(reason)
    return arm.fuzzer().path()


def _case(name: str, words: torch.Tensor, base: torch.Tensor | None, kept: int, wanted: torch.Tensor) -> bytes | None:
    """A golden frame as a case of the file; None where the frame has no payload of blocks."""
    frame = torch.frombuffer(bytearray((test_golden.FOLDER / f"{name}.bin").read_bytes()), dtype=torch.uint8)
    if framing.parse(frame).codec is framing.CodecId.RAW:
        return None
    if words.dtype not in codecs.CODED_DTYPES:  # their bytes
        words, wanted = words.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
    code = ROUNDED if kept else DELTA if base is not None else WIDE if "_wide_" in name else 0
    return arm.case(words, base, frame, code, kept, wanted)


def _golden() -> Iterator[bytes | None]:
    for name, (tensor, arguments) in test_golden.TENSORS.items():
        yield _case(name, tensor, arguments.get("base"), 0, tensor)
    for name, (_, _, _, kept, _) in test_golden.ROUNDED.items():
        words = test_golden.rounded_words(name)
        yield _case(name, words, None, kept, codecs.project(words, Round(kept)))


def test_golden_frames(program: Path, tmp_path: Path) -> None:
    """Every level writes the golden payloads and reads them."""
    cases = [case for case in _golden() if case]
    assert len(cases) > len(corpus.FLOATS) * 10
    (tmp_path / "cases").write_bytes(b"".join(cases))
    result = arm.run(program, "check", str(tmp_path / "cases"), *arm.LEVELS, seconds=120)
    assert result.stdout == f"cases {len(cases)}\n", result.stdout + result.stderr


def test_random_words_and_damaged_payloads(program: Path) -> None:
    """Payloads, words, scales, codes, predictions and refusals are those of this machine's portable level, and of each other."""
    draws = ("1", str(MUTATIONS), "500")
    portable = [variants.PORTABLE] * len(arm.LEVELS)
    here = subprocess.run([arm.fuzzer_here().path(), *draws, *portable], capture_output=True, text=True, timeout=600)
    there = arm.run(program, *draws, *arm.LEVELS, seconds=600)
    assert here.returncode == 0, here.stdout + here.stderr
    assert there.returncode == 0, there.stdout + there.stderr
    assert there.stdout == here.stdout
    assert f" mutations {MUTATIONS} " in there.stdout
