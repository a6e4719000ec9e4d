"""Row, known and bits frames of earlier versions: every route still writes exactly these bytes and reads them; see test_golden.py."""

from __future__ import annotations

import struct
from pathlib import Path

import corpus
import from_format_rows
import pytest
import row_cases
import torch
from corpus import assert_same_bits
from places import TESTS

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing

FOLDER = TESTS / "golden"
KNOWN, BOOLS = torch.arange(-40, 60, dtype=torch.int64), torch.arange(77) % 5 < 2
NAMES = {*row_cases.CASES, "known_int64", "bits_bool"}


def _golden(name: str, frame: torch.Tensor, update: bool) -> torch.Tensor:
    path: Path = FOLDER / f"{name}.bin"
    if update:
        path.write_bytes(frame.numpy().tobytes())
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


@pytest.fixture
def update(request: pytest.FixtureRequest, route: str) -> bool:
    """Whether to rewrite the files: the numba route does, because it is the reference."""
    return bool(request.config.getoption("--update-golden")) and route == "numba"


@pytest.mark.parametrize("name", row_cases.CASES)
def test_golden_row_frame(name: str, route: str, update: bool) -> None:
    case = row_cases.CASES[name]
    frame = case.frame(route)
    golden = _golden(name, frame, update)
    assert_same_bits(case.decode(golden, route), case.part)
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"


@pytest.mark.parametrize("name", row_cases.CASES)
def test_golden_row_frames_follow_the_document(name: str) -> None:
    case = row_cases.CASES[name]
    item = case.words.itemsize
    data = case.arriving.view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + item], "little") for at in range(0, len(data), item)]
    golden = (FOLDER / f"{name}.bin").read_bytes()
    assert from_format_rows.decode(golden, words[: case.begin]) == words[case.begin : case.end]


def test_golden_row_frames_show_everything() -> None:
    """Repeats of the history and of the frame, heads, tails, every kind of literals, and scaled rows of every dtype that has some."""
    shown = set()
    for name in row_cases.CASES:
        data = (FOLDER / f"{name}.bin").read_bytes()
        header = framing.parse(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        width, head, repeats, scaled, repeat_bits, scaled_bits = struct.unpack_from("<4I2B", data, 32)
        rows = (header.numel - head) // width
        bits = rows + (rows - repeats if scaled else 0) + repeats * repeat_bits + scaled * scaled_bits
        nested = 64 + framing.pad16(-(-bits // 8)) + framing.pad16(4 * scaled)
        shown |= {("scaled", header.dtype)} if scaled else {("repeats", header.dtype)}
        shown |= {"history" if row_cases.CASES[name].begin else "alone", f"literals {data[nested + 5]}"}
        shown |= {"head"} if head else set()
        shown |= {"tail"} if (header.numel - head) % width else set()
    dtypes = {
        ("repeats", dtype) for dtype in (*(kind.dtype for kind in corpus.FLOATS.values()), torch.int8, torch.complex128)
    }
    dtypes |= {("scaled", kind.dtype) for kind in corpus.SUMMED.values()}
    assert shown == dtypes | {"history", "alone", "literals 0", "literals 1", "literals 3", "head", "tail"}


def test_golden_known_and_bits_frames(route: str, update: bool) -> None:
    known = codecs.known_frame(
        KNOWN.dtype, 100, ds_zipccl.region_hash(KNOWN, route=route), torch.zeros(48, dtype=torch.uint8)
    )
    golden = _golden("known_int64", known, update)
    assert torch.equal(known, golden) and torch.equal(codecs.decompress(golden, base=KNOWN, route=route), KNOWN)
    bits = codecs.bits_frame(BOOLS, torch.zeros(99, dtype=torch.uint8))
    assert bits is not None
    golden = _golden("bits_bool", bits, update)
    assert torch.equal(bits, golden) and torch.equal(codecs.decompress(golden, route=route), BOOLS)
