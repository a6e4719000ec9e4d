"""Maps of row frames in C++ (csrc/cpu/rows/row_map.cpp), beside those of numpy, and under AddressSanitizer and UBSan."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import asan
import numpy as np
import pytest
import tiers
import torch
from builds import Binary, Change

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import rows as row_map
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp import backend

pytestmark = pytest.mark.skipif(bool(kernels.why()["native"]), reason="no C++ route here")
NUMPY = "emulated"  # a route that leaves maps to numpy


def _segments(draw: np.random.Generator) -> tuple[torch.Tensor, int, list[int]]:
    """Words with equal rows, some of one word, their width, and ends of fragments."""
    width = int(draw.integers(1, 90))
    rows, share = int(draw.integers(1, 200)), draw.random()
    matrix = draw.standard_normal((rows, width)).astype(np.float32)
    matrix[draw.random(rows) < 0.1] = 2.0
    for row in np.flatnonzero(draw.random(rows) < share):
        matrix[row] = matrix[draw.integers(0, row + 1)]
    words = np.concatenate([matrix.reshape(-1), np.ones(draw.integers(0, width), np.float32)])
    cuts = np.unique(draw.integers(0, len(words) + 1, 3))
    return torch.from_numpy(words).to(torch.bfloat16), width, [*(int(cut) for cut in cuts if cut), len(words)]


def _frames(
    words: torch.Tensor, width: int, ends: list[int], route: str, codec: str = "cascade"
) -> list[torch.Tensor | None]:
    segment = codecs.RowSegment(words, width, route=route, raw_below=300)
    found, begin = [], 0
    for end in dict.fromkeys(ends):
        out = torch.full((codecs.compress_bound(end - begin, words.dtype),), 0x5A, dtype=torch.uint8)
        found.append(segment.frame(begin, end, out, codec))
        begin = end
    return found


def test_frames_are_those_of_numpy() -> None:
    draw, made = np.random.default_rng(5), 0
    for _ in range(150):
        words, width, ends = _segments(draw)
        ends = list(dict.fromkeys(ends))
        codec = ("cascade", "wide", "raw")[draw.integers(3)]
        ours, theirs = (_frames(words, width, ends, route, codec) for route in ("native", NUMPY))
        back, begin = torch.empty_like(words), 0
        for end, frame, wanted in zip(ends, ours, theirs, strict=True):
            assert (frame is None) == (wanted is None)
            if frame is not None and wanted is not None:
                made += 1
                assert torch.equal(frame, wanted)
                codecs.decompress(frame, back[begin:end], earlier=back[:begin], route="native")
                assert torch.equal(back[begin:end].view(torch.int16), words[begin:end].view(torch.int16))
            back[begin:end] = words[begin:end]
            begin = end
    assert made > 100


def test_damaged_maps_are_refused_as_by_numpy() -> None:
    draw = np.random.default_rng(6)
    route = kernels.compiled("native", "cpu")
    assert route is not None
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
        found = route.unpack_repeats(torch.from_numpy(data), count, repeats, bits, reach)
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


@pytest.mark.parametrize("route", ["native", NUMPY])
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


def test_a_frame_without_repeats_asks_for_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a map was asked for")

    monkeypatch.setattr(backend.CppBackend, "pack_repeats", never)
    words = torch.arange(1 << 12, dtype=torch.float32)
    assert _frames(words, 64, [1 << 12], "native", "raw") == [None]
    words[64:128] = words[:64]  # the control
    with pytest.raises(AssertionError, match="asked for"):
        _frames(words, 64, [1 << 12], "native", "raw")


# --- under sanitizers


def _fuzzer(changes: Mapping[str, tuple[Change, ...]] | None = None) -> Path:
    folders = {"csrc": build.CSRC, "fuzz": Path(asan.__file__).parent}
    sources: dict[str, tuple[str, ...]] = {"fuzz/fuzz_maps.cpp": (), "csrc/cpu/rows/row_map.cpp": ()}
    try:
        return Binary("fuzz_maps", folders, sources, ("-O1", *asan.FLAGS), changes=changes or {}).path()
    except build.BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")


def _run(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run([str(program), "1", "5000"], env=environment, capture_output=True, text=True, timeout=300)


def test_damaged_maps_under_sanitizers() -> None:
    result = _run(_fuzzer())
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()
    assert min(int(words[1]), int(words[3])) > 2000, result.stdout


#: A proof in csrc/cpu/rows/row_map.cpp, and text in its place that proves nothing.
PROOFS = {
    "if (repeats == m->repeats) return 1;": "",
    "distance > i + m->reach || ": "",
    " || (distance <= i && marked(i - distance))": "",
    "if (literals == m->count - m->repeats) return 1;": "",
    "!r->repeats || padded + 16 > r->room": "!r->repeats",
}


@pytest.mark.parametrize("proof", tiers.mostly_full(PROOFS, [*PROOFS][:1], "each has a program of its own to compile"))
def test_a_missing_proof_is_seen(proof: str) -> None:
    result = _run(_fuzzer({"csrc/cpu/rows/row_map.cpp": ((proof, PROOFS[proof]),)}))
    assert result.returncode != 0
    assert "FAILED" in result.stdout or "AddressSanitizer" in result.stderr or "terminate" in result.stderr, result
