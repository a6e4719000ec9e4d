"""Proof that the tests can fail: a codec with one small planted mistake makes them fail."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import corpus
import mutations
import pytest
import test_codec
import test_delta
import test_format
import test_fuzz
import test_gap_list
import test_golden
import test_golden_rows_and_lossy
import test_row_kernels
import tiers
import torch

from ds_zipccl import kernels
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp import backend

#: Bit-identity tests by name, run as pytest would run them.
IDENTITY: dict[str, Callable[[], None]] = {
    "all patterns, bf16": lambda: test_codec.test_all_patterns_of_16_bits("auto", corpus.BF16, 512, "cascade"),
    "all patterns, fp16": lambda: test_codec.test_all_patterns_of_16_bits("auto", corpus.FP16, 128, "wide"),
    "patterns among others": lambda: test_codec.test_every_pattern_among_ordinary_words("auto", corpus.BF16, "cascade"),
    "random fp32": lambda: test_codec.test_ten_million_random_fp32_words("auto"),
    "shapes": lambda: test_codec.test_shapes_come_back("auto"),
    "golden": lambda: test_golden.test_golden_frame("bf16_mixed_128", "auto", None),
}


class OneBit:
    """A route whose decoder gets one bit of one word wrong: the last word, its lowest bit."""

    def __init__(self, good: kernels.KernelBackend) -> None:
        self._good = good
        self.encode = good.encode

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor) -> None:
        self._good.decode(payload, block, words)
        if words.numel():
            words.view(torch.uint8)[-words.dtype.itemsize] ^= 1


@pytest.mark.parametrize("name", IDENTITY)
def test_one_wrong_bit_fails_the_bit_identity_tests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IDENTITY[name]()
    wrong = OneBit(kernels.route())
    monkeypatch.setattr(kernels, "route", lambda name="auto", device="cpu": wrong)
    with pytest.raises(AssertionError, match="words differ"):
        IDENTITY[name]()


@dataclass(frozen=True)
class Plant:
    """A mistake in a C++ source: texts to replace, with their replacements, and the check that must notice."""

    file: str
    changes: dict[str, str]
    check: Callable[[], None]

    def route(self, folder: Path) -> backend.CppBackend:
        """The C++ route with the mistake in it."""
        csrc = folder / "csrc"
        shutil.copytree(build.CSRC, csrc)
        text = (csrc / self.file).read_text()
        for good, bad in self.changes.items():
            assert good in text, f"{good!r} is no longer in {self.file}: plant the mistake elsewhere"
            text = text.replace(good, bad)
        (csrc / self.file).write_text(text)
        flags = tuple("-O0" if flag == "-O3" else flag for flag in build.CPU.flags)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "CSRC", csrc)
            return backend.CppBackend(ctypes.CDLL(str(build.build(dataclasses.replace(build.CPU, flags=flags)))))


def _tail_sizes() -> None:
    """The part of test_fuzz that contradicts the sizes of coded tails."""
    rng = random.Random(3)
    kind = next(kind for kind in mutations.KINDS if kind.name == "tail_bytes_of_a_coded_block")
    for base in mutations.bases(checksum=False) * 10:
        frame = kind.mutate(rng, base)
        if frame is not None:
            code, _ = test_fuzz.outcome(test_fuzz.as_tensor(frame), None, "auto", base.against)
            assert code is not None, "a wrong tail size was accepted"


def _list_as_short() -> None:
    """Example 6.9 of FORMAT.md, and others in which both forms of the chunk have equally many bytes."""
    test_format.test_document_examples_are_what_the_routes_give("auto")


PLANTS = {
    # Encoder and decoder agree with each other, only not with the format.
    "two codes swapped": Plant(
        "common/exponent_block.cuh",
        {"{3, 3, 3, 3, 0, 1, 2,": "{3, 3, 3, 3, 1, 0, 2,", "{4, 5, 6}}": "{5, 4, 6}}"},
        IDENTITY["golden"],
    ),
    "a top of changes a little higher": Plant(
        "common/change_block.cuh",
        {"F::M == 10 ? 4 : 0": "F::M == 10 ? 4 : 2"},
        test_delta.test_every_block_takes_the_fewest_bytes,
    ),
    "a scale of 0 where the mean is as good": Plant(
        "cpu/delta/change_encode.h",
        {"mean.tail <= change.plain.tail": "mean.tail < change.plain.tail"},
        test_delta.test_every_block_takes_the_fewest_bytes,
    ),
    "a scale that is not the shorter tail's": Plant(
        "cpu/delta/change_encode.h",
        {"mean.tail <= change.plain.tail": "mean.tail <= change.plain.tail + 1"},
        test_delta.test_every_block_takes_the_fewest_bytes,
    ),
    "few zeros are taken for none": Plant(
        "common/change_block.cuh",
        {"16 * zeros < n": "2 * zeros < n"},
        test_delta.test_every_block_takes_the_fewest_bytes,
    ),
    "a level counts for less": Plant(
        "cpu/delta/change_decode.h",
        {"level == 4 ? ~0ull : 0": "level == 5 ? ~0ull : 0"},
        lambda: test_delta.test_every_texture_and_every_change("auto", corpus.FP16, "long_steps"),
    ),
    "a table where a list is as short": Plant(
        "cpu/delta/delta_chunk.h",
        {"if (table < bytes) return table": "if (table <= bytes) return table"},
        _list_as_short,
    ),
    "the larger parameter of a list": Plant(
        "common/change_list.cuh",
        {
            "below = sum_of(r - 1)) <= rice_bits": "below = sum_of(r - 1)) < rice_bits",
            "above = sum_of(r + 1)) < rice_bits": "above = sum_of(r + 1)) <= rice_bits",
        },
        lambda: test_gap_list.test_shares_of_changed_words("auto", "bf16", "one", 1, 1),
    ),
    "ones in the padding of a list": Plant(
        "cpu/delta/delta_list.h",
        {"if (peek_bits(copy, at)) return BLOCK": "if (false) return BLOCK"},
        lambda: test_gap_list.test_lists_that_contradict_themselves("a one too many in the padding", "auto"),
    ),
    "rows with equal samples are not looked for": Plant(
        "cpu/rows/rows.cpp",
        {"sources[i] = int32_t(finder.enter_whole(first + i));": "sources[i] = int32_t(first + i);"},
        lambda: test_row_kernels.test_rows_that_differ_in_one_byte_alone("auto", 96),
    ),
    "rows that do not lie side by side are taken for such": Plant(
        "cpu/rows/rows.cpp",
        {"uint64_t(l_.rows[last] - l_.rows[i]) == last - i": "uint64_t(l_.rows[last] - l_.rows[i]) >= last - i"},
        lambda: test_row_kernels.test_literals_without_a_copy("auto", "bf16", 64),
    ),
    "a row frame without its head": Plant(
        "cpu/rows/row_frame.cpp",
        {"head = first * width - begin;": "head = 0;"},
        lambda: test_golden_rows_and_lossy.check("rows_bf16", "auto"),
    ),
    "longer tails accepted": Plant("cpu/decode.h", {"at + left != bytes": "at + left > bytes"}, _tail_sizes),
}


#: One of the format, one of differences, one of a decoder's checks.
SHORT_PLANTS = ("two codes swapped",)


@pytest.mark.parametrize("name", tiers.mostly_full(PLANTS, SHORT_PLANTS, "each has a codec of its own to compile"))
def test_planted_mistakes_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := kernels.why()["native"]:
        pytest.skip(f"the native route is not usable here: {reason}")
    plant = PLANTS[name]
    plant.check()
    wrong = plant.route(tmp_path)
    for lookup in ("route", "row_route"):
        monkeypatch.setattr(kernels, lookup, lambda name="auto", device="cpu": wrong)
    with pytest.raises(Exception) as caught:
        plant.check()
    errors = getattr(caught.value, "exceptions", [caught.value])  # hypothesis groups several failures
    assert all(isinstance(error, AssertionError) for error in errors), errors
