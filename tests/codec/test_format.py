"""FORMAT.md against the code: a codec written from the document agrees, and the document's examples and tables are true."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import corpus
import from_format
import numpy as np
import pytest
import row_cases
import torch
import variants
from from_format_delta import encode_tail
from test_gap_list import forms

import ds_zipccl
from ds_zipccl import codecs, kernels
from ds_zipccl import frame as framing
from ds_zipccl.lossy import LOSSY_CODECS, Round

compiled = variants.each(variants.COMPILED)
FLOATS = codecs.SUMMED_DTYPES
LOSSY = {kind.__name__: kind for kind in LOSSY_CODECS.values()}
FORMAT = (Path(ds_zipccl.__file__).parent / "FORMAT.md").read_text()


@cache
def _documented(name: str, block: int) -> list[tuple[np.ndarray, tuple[int, ...] | None, str, bytes]]:
    """Words of every length and texture, a shape, a code, and the document's frame; with a shape is a checksum."""
    kind = corpus.FLOATS[name]
    sizes = [0, 1, 2, 3, 4, 7, 9, 31, 64, block - 1, block, block + 1, 5 * block + 17]
    sizes.append(17 * 128 + 5 if block == 128 else 9 * block)
    cases = [corpus.mixed(numel, kind, block, seed) for seed, numel in enumerate(sizes)]
    if block == 128:
        for texture in corpus.TEXTURES.values():
            cases += [texture(numel, kind, seed) for seed, numel in enumerate((128, 128, 1, 2, 5, 8, 16, 17, 40, 100))]
    found = []
    for words in cases:
        for shape, code in ((None, "cascade"), ((len(words), 1), "wide")):
            dtype = framing.DTYPE_IDS[kind.dtype]
            wanted = from_format.encode(words.tolist(), dtype, block, shape, shape is not None, code)
            assert from_format.decode(wanted) == (dtype, shape, words.tolist())
            found.append((words, shape, code, wanted))
    return found


@pytest.mark.parametrize("block", corpus.BLOCKS)
@pytest.mark.parametrize("name", corpus.FLOATS)
def test_a_codec_written_from_the_document_agrees(route: str, name: str, block: int) -> None:
    for at, (words, shape, code, wanted) in enumerate(_documented(name, block)):
        tensor, whole = corpus.tensor(words, corpus.FLOATS[name]), shape is not None
        tensor = tensor if shape is None else tensor.view(shape)
        frame = ds_zipccl.compress(tensor, code, block=block, shaped=whole, checksum=whole, route=route)
        assert frame.numpy().tobytes() == wanted, f"case {at}: {len(words)} words"
        corpus.assert_same_bits(ds_zipccl.decompress(frame, route=route), tensor)


@pytest.mark.parametrize("name", corpus.SUMMED)
def test_decoders_take_any_scale_of_changes(compiled: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document leaves the top to the encoder: frames of other and earlier encoders are as good."""
    kind = corpus.FLOATS[name]
    words = corpus.mixed(1100, kind, 128, 3, ("bell", "spread", "specials", "sparse"))
    before = corpus.before(words, kind, 128, 3, ("few_units", "units", "steps"))
    middle = kind.largest_exponent // 2
    for top in (0, 1, middle - 4, middle, middle + 1, middle + 3, 255):
        monkeypatch.setattr(
            from_format, "encode_change", lambda *given, t=top: (t, encode_tail(given[0], given[1], t, *given[2:]))
        )
        frame = from_format.encode(
            words.tolist(), framing.DTYPE_IDS[kind.dtype], 128, None, False, base=before.tolist()
        )
        received = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        decoded = ds_zipccl.decompress(received, base=corpus.tensor(before, kind), route=compiled)
        corpus.assert_same_bits(decoded, corpus.tensor(words, kind))


def test_document_tables_are_those_of_the_code() -> None:
    dtypes = {int(key): name for key, name in re.findall(r"\| (\d+) \| ([a-z]+\d\w*|bool) ", FORMAT)}
    assert dtypes == {key: str(dtype).removeprefix("torch.") for key, dtype in framing.DTYPES.items()}
    codes = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", FORMAT, re.MULTILINE)}
    codes = {
        name: code for name, code in codes.items() if name not in ("FILL", "RAW", "CASCADE", "SPARSE", "WIDE", "CHANGE")
    }
    assert codes == {code.name: int(code) for code in framing.FrameErrorCode}
    checksums = {
        int(key): name
        for key, name in re.findall(r"^\| (\d) \| (\w+) \| .+ \| (?:no longer )?write it \|$", FORMAT, re.M)
    }
    assert checksums == {int(kind): kind.name for kind in framing.ChecksumId}
    rows = re.findall(r"^\| (CASCADE|WIDE) \| (\d) \| (.+?) \| (\d) \|$", FORMAT, re.MULTILINE)
    assert len(rows) == 8
    for mode, tier, names, escape in rows:
        named = from_format.NAMED[from_format.MODES[mode.lower()]][int(tier) - 1]
        assert [str(name) for name in named] == names.split(", ")
        assert int(escape) == len(named)


def _examples() -> list[tuple[dict[str, object], bytes]]:
    """The examples of section 6: an ``Input:`` line of Python keywords, then an indented hex dump, whose ``#`` begin remarks."""
    section = FORMAT.split("## 6. Examples")[1]
    found = []
    for text, dump in re.findall(r"^Input: `(.+?)`$(.+?)(?=^Input:|\Z)", section, re.MULTILINE | re.DOTALL):
        lines = [line.split("#")[0] for line in dump.splitlines() if line.startswith("    ")]
        arguments = eval(f"dict({text})", {"torch": torch, "inf": float("inf"), **LOSSY})
        found.append((arguments, bytes.fromhex("".join(lines))))
    return found


def _of_other_calls(
    tensor: torch.Tensor, arguments: dict[str, object], route: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The frame of an example of rows or bits, after it has been decoded, and the words that it decodes to."""
    buffer = torch.zeros(2000, dtype=torch.uint8)
    if "bits" in arguments:
        frame = codecs.bits_frame(tensor, buffer)
        return frame, codecs.decompress(frame, route=route)
    candidates = arguments.pop("candidates", None)
    case = row_cases.RowCase(tensor, candidates=candidates and torch.tensor(candidates, dtype=torch.int32), **arguments)
    frame = case.frame(route)
    decoded = case.arriving.clone()
    decoded[case.begin : case.end] = case.decode(frame, route)
    return frame, decoded


def _of_factors(p: list[float], dtype: torch.dtype, wanted: bytes, route: str, q: list[float], rank: int) -> None:
    factors = torch.tensor(p).view(-1, rank), torch.tensor(q).view(-1, rank)
    frame = codecs.lowrank.compress_factors(*factors, dtype, checksum=False, block=128, route=route)
    assert frame.numpy().tobytes() == wanted
    corpus.assert_same_bits(codecs.decompress(frame, route=route), (factors[0] @ factors[1].t()).view(-1).to(dtype))


def test_document_examples_are_what_the_routes_give(route: str) -> None:
    examples = _examples()
    assert len(examples) >= 3
    for arguments, frame in examples:
        exponents = not {"width", "lossy", "q", "base"} & set(arguments)
        try:
            _give(arguments, frame, route)
        except kernels.RouteUnavailable:
            assert route != "native" and not exponents, arguments  # the other routes lack some codecs


def _give(arguments: dict[str, Any], frame: bytes, route: str) -> None:
    """Demand the frame of an example, and its words."""
    data, dtype = arguments.pop("data"), arguments.pop("dtype")
    if "q" in arguments:
        return _of_factors(data, dtype, frame, route, **arguments)
    tensor = torch.tensor(data, dtype=dtype)
    if {"width", "bits"} & set(arguments):
        found, decoded = _of_other_calls(tensor, arguments, route)
        assert found.numpy().tobytes() == frame
        mantissa = arguments.get("rounded")
        corpus.assert_same_bits(decoded, codecs.project(tensor, Round(mantissa)) if mantissa else tensor)
        return None
    wanted = codecs.project(tensor, arguments["codec"], route=route) if "lossy" in arguments else tensor
    if "base" in arguments:
        arguments["base"] = torch.tensor(arguments["base"], dtype=dtype)
    assert ds_zipccl.compress(tensor, route=route, **arguments).numpy().tobytes() == frame
    received = torch.tensor(list(frame), dtype=torch.uint8)
    decoded = ds_zipccl.decompress(received, base=arguments.get("base"), route=route)
    corpus.assert_same_bits(decoded, wanted if arguments.get("shaped", True) else wanted.view(-1))
    return None


def test_examples_show_every_mode_and_form() -> None:
    modes, kinds, shown = set(), set(), set()
    for arguments, frame in _examples():
        received = torch.tensor(list(frame), dtype=torch.uint8)
        header = framing.parse(received)
        delta = header.codec == framing.CodecId.DELTA
        kinds |= set(forms(received)) if delta else set()
        if header.block and not (delta and forms(received) != ["TABLE"]):
            words = header.numel * (header.dtype.itemsize if delta and arguments["dtype"] not in FLOATS else 1)
            blocks = -(-words // header.block)
            table = header.payload_at + 16
            modes |= {frame[table + blocks + 2 * b + 1] >> 5 for b in range(blocks)}
        coded = header.codec == framing.CodecId.EXPONENT
        assert delta or arguments["dtype"] in (codecs.CODED_DTYPES if coded else framing.DTYPE_IDS)
        shown.add(header.codec)
    assert shown == set(framing.CodecId)
    assert modes == {0, 1, 2, 3, 4, 5} and kinds == {"SAME", "TABLE", "LIST"}
