"""Frames of earlier versions: every route still writes exactly these bytes and reads them.

tests/golden/<name>.bin is the frame of CASES[name]; <name>_crc32.bin is the same frame with the checksum that encoders no longer write,
for decoders alone; former_version_1.bin is a frame that ds_zipccl 0.1 wrote, which is refused; zfp_reference.bin is that of
zfp_reference.py: frames of float32 by ZFP are the reference library's streams. After a deliberate change of the format, written down in
FORMAT.md: ``pytest tests/codec/test_golden.py --update-golden``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import from_format
import from_format_lowrank
import from_format_rounded
import from_format_rows
import from_format_scaled
import numpy as np
import pytest
import row_cases
import test_lowrank
import test_scaled
import test_zfp
import torch
import variants
from corpus import assert_same_bits
from places import TESTS
from test_gap_list import forms
from test_scaled import words_of

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

FOLDER = TESTS / "golden"


@dataclass(frozen=True)
class Case:
    """A golden frame: how a route writes it, how it reads it, the words that it must read, and those by the document; and the routes."""

    frame: Callable[[str], torch.Tensor]
    decode: Callable[[torch.Tensor, str], torch.Tensor]
    wanted: Callable[[str], torch.Tensor]
    document: Callable[[bytes], tuple[Sequence[int], Sequence[int]]] | None
    kinds: Sequence[variants.Variant] = variants.COMPILED


# --- tensors and differences

#: A tensor, and the arguments that compress it.
Given = tuple[torch.Tensor, dict[str, Any]]
FLAT: dict[str, Any] = {"shaped": False, "checksum": False}
#: Block mode -> seed, and textures whose blocks take that mode.
MODES = {
    "fill": (4, ("zeros", "negative_zeros", "constant")),
    "raw": (3, ("random",)),
    "cascade": (7, ("bell", "outliers", "trimmed")),
    "wide": (6, ("bell", "spread", "trimmed")),
    "sparse": (6, ("sparse", "sparse_signed", "mixed_zeros", "trimmed_sparse")),
    "mixed": (5, tuple(corpus.TEXTURES)),
}


def _coded(name: str, mode: str, numel: int, block: int) -> Given:
    kind = corpus.FLOATS[name]
    words = corpus.mixed(numel, kind, block, *MODES[mode])
    return corpus.tensor(words, kind), {"block": block, **FLAT, **({"codec": "wide"} if mode == "wide" else {})}


def _delta(name: str, numel: int, block: int) -> Given:
    kind = corpus.FLOATS[name]
    words = corpus.mixed(numel, kind, block, seed=7, names=("bell", "sparse", "specials", "spread"))
    base = corpus.tensor(corpus.before(words, kind, block, 7), kind)
    return corpus.tensor(words, kind), {"codec": "delta", "base": base, "block": block, **FLAT}


def _few_changes(name: str, numel: int, share: int, block: int, run: int = 3) -> Given:
    """One word of ``share`` changes: by little, by its sign, or to anything. The bytes of a dtype that is no float are those of E5M2."""
    kind = corpus.SUMMED.get(name, corpus.E5M2)
    words = corpus.mixed(numel, kind, block, seed=8, names=("bell", "sparse", "specials"))
    places = corpus.some_places(numel, numel // share, 8, run)
    base = corpus.moved(words, kind, places, corpus.changes(len(places), 8, 12))
    base[places[::9]] ^= kind.word(1 << (8 * kind.word(0).nbytes - 1))
    tensor, before = corpus.tensor(words, kind), corpus.tensor(base, kind)
    if name in OTHER_DTYPES:
        tensor, before = tensor.view(OTHER_DTYPES[name]), before.view(OTHER_DTYPES[name])
    return tensor, {"codec": "delta", "base": before, "block": block, **FLAT}


def _unchanged(name: str) -> Given:
    """Three chunks, of which the one in the middle changes in one word."""
    tensor, arguments = _few_changes(name, 4096 + 200, 5000, 128)
    base = tensor.clone()
    base.view(torch.uint8)[tensor.nbytes // 2] ^= 1
    return tensor, {**arguments, "base": base, "shaped": True, "checksum": True}


#: dtypes whose differences are those of their bytes.
OTHER_DTYPES = {"int8": torch.int8, "int64": torch.int64}
DELTAS = (*corpus.SUMMED, *OTHER_DTYPES)
TENSORS: dict[str, Given] = (
    {
        f"{name}_{mode}_{block}": _coded(name, mode, numel, block)
        for name in corpus.FLOATS
        for mode, numel, block in (
            ("fill", 700, 128),
            ("raw", 300, 128),
            ("cascade", 600, 256),
            ("wide", 600, 256),
            ("sparse", 1100, 512),
            ("mixed", 2500, 1024),
            ("mixed", 2048 + 130, 128),
        )
    }
    | {
        f"{name}_delta_{block}": _delta(name, numel, block)
        for name in corpus.SUMMED
        for numel, block in ((1500, 128), (2500, 512))
    }
    | {f"{name}_list_128": _few_changes(name, 2048 + 600, 20, 128) for name in DELTAS}
    | {f"{name}_list_1024": _few_changes(name, 2400, 9, 1024, run=1) for name in DELTAS}
    | {f"{name}_bytes_256": _few_changes(name, 1600, 3, 256) for name in OTHER_DTYPES}
    | {f"{name}_same_128": _unchanged(name) for name in DELTAS}
    | {
        "bf16_shaped": (_coded("bf16", "mixed", 1200, 512)[0].view(30, 1, 40), {}),
        "fp32_scalar": (torch.tensor(1.5), {}),
        "fp16_empty": (torch.empty(3, 0, dtype=torch.float16), {}),
        "int64_raw": (torch.arange(-9, 9).view(3, 6), {}),
        "bool_raw": (torch.arange(40) % 3 == 0, {"checksum": False}),
        "bf16_raw_codec": (_coded("bf16", "mixed", 50, 128)[0], {"codec": "raw"}),
    }
)
#: Cases without a base whose frame has a checksum.
CRC32_CASES = [name for name, (_, given) in TENSORS.items() if given.get("checksum", True) and "base" not in given]


def _tensor(tensor: torch.Tensor, arguments: dict[str, Any]) -> Case:
    base = arguments.get("base")

    def document(golden: bytes) -> tuple[Sequence[int], Sequence[int]]:
        if golden[5] == CodecId.RAW:
            raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
            return golden[-len(raw) :] if raw else b"", raw
        word = f"u{tensor.dtype.itemsize if tensor.dtype in codecs.CODED_DTYPES else 1}"
        before = base if base is None else base.view(torch.uint8).numpy().view(word).tolist()
        dtype, shape, decoded = from_format.decode(golden, before)
        assert framing.DTYPES[dtype] == tensor.dtype and shape in (None, tuple(tensor.shape))
        return decoded, tensor.reshape(-1).view(torch.uint8).numpy().view(word).tolist()

    return Case(
        lambda route: ds_zipccl.compress(tensor, route=route, **arguments),
        lambda golden, route: ds_zipccl.decompress(golden, base=base, route=route),
        lambda route: tensor,
        document,
        variants.ALL if base is None else variants.COMPILED,
    )


FORMER = "former_version_1"
BOOLS = torch.arange(77) % 5 < 2
BITS = {
    "bits_bool": Case(
        lambda route: codecs.bits_frame(BOOLS, torch.zeros(99, dtype=torch.uint8)),
        lambda golden, route: codecs.decompress(golden, route=route),
        lambda route: BOOLS,
        None,
        variants.ALL,
    ),
}


# --- rows and lossy frames


def _read(frame: torch.Tensor, route: str) -> torch.Tensor:
    return codecs.decompress(frame, route=route)


#: name -> kind, elements, block, bits, textures.
ROUNDED = {
    "rounded_bf16_mixed_128": ("bf16", 2048 + 130, 128, 3, tuple(corpus.TEXTURES)),
    "rounded_bf16_sparse_512": ("bf16", 1100, 512, 1, ("sparse", "sparse_signed", "trimmed_sparse")),
    "rounded_fp16_mixed_128": ("fp16", 2048 + 130, 128, 6, tuple(corpus.TEXTURES)),
    "rounded_fp16_wide_256": ("fp16", 700, 256, 2, ("spread", "bell", "specials")),
    "rounded_fp32_mixed_128": ("fp32", 1500, 128, 3, tuple(corpus.TEXTURES)),
    "rounded_bf16_zeros_128": ("bf16", 700, 128, 3, ("zeros", "constant")),
}
SCALED: dict[str, tuple[str, TacoFp8 | Int]] = {
    "scaled_bf16_e4m3": ("bf16", TacoFp8(128, False)),
    "scaled_bf16_e4m3_hadamard": ("bf16", TacoFp8(128, True)),
    "scaled_fp16_e4m3_hadamard_32": ("fp16", TacoFp8(32, True)),
    "scaled_fp32_e4m3_hadamard_512": ("fp32", TacoFp8(512, True)),
    "scaled_fp32_e4m3_64": ("fp32", TacoFp8(64, False)),
    "scaled_bf16_int8": ("bf16", Int(8, 128)),
    "scaled_fp16_int6_hadamard": ("fp16", Int(6, 128, True)),
    "scaled_fp32_int4_32": ("fp32", Int(4, 32)),
}
#: name -> dtype, rows, columns, rank.
LOWRANK = {
    "lowrank_bf16": (torch.bfloat16, 60, 33, 4),
    "lowrank_fp16": (torch.float16, 20, 90, 3),
    "lowrank_fp32": (torch.float32, 130, 41, 6),
}


def rounded_words(name: str) -> torch.Tensor:
    kind, numel, block, k, textures = ROUNDED[name]
    return corpus.tensor(corpus.mixed(numel, corpus.FLOATS[kind], block, 10 + k, textures), corpus.FLOATS[kind])


def _scaled_words(name: str) -> torch.Tensor:
    """Finite words: bell-shaped, with outliers, zero groups, denormals and negative zeros."""
    kind = corpus.SUMMED[SCALED[name][0]]
    words = corpus.mixed(1100, kind, 128, 11, ("bell", "outliers", "zeros", "sparse_signed"))
    infinite = kind.word(kind.largest_exponent << kind.mantissa)
    words = np.where(words & infinite == infinite, 0, words).astype(kind.word)
    words[520:530] = np.arange(10)
    return corpus.tensor(words, kind)


def _of_words(
    words: torch.Tensor,
    codec: LossyCodec,
    document: Callable[[bytes], tuple[Sequence[int], Sequence[int]]] | None,
    block: int = 128,
    checksum: bool = False,
    kinds: Sequence[variants.Variant] = variants.COMPILED,
) -> Case:
    more = {"lossy": True, "block": block, "shaped": False, "checksum": checksum}
    return Case(
        lambda route: codecs.compress(words, codec, route=route, **more),
        _read,
        lambda route: codecs.project(words, codec, route=route),
        document,
        kinds,
    )


def _rounded(name: str) -> Case:
    kind, _, block, k, _ = ROUNDED[name]
    words, bits = rounded_words(name), (corpus.FLOATS[kind].exponent, corpus.FLOATS[kind].mantissa)

    def document(golden: bytes) -> tuple[Sequence[int], Sequence[int]]:
        dtype, _, decoded = from_format.decode(golden)
        assert framing.DTYPES[dtype] == words.dtype and golden[5] in (CodecId.EXPONENT, CodecId.ROUNDED)
        return decoded, [from_format_rounded.round_word(w, k, *bits) for w in words_of(words)]

    return _of_words(words, Round(k), document, block, name.endswith("512"))


def _scaled(name: str) -> Case:
    words, codec = _scaled_words(name), SCALED[name][1]
    settings = test_scaled.settings(codec)
    return _of_words(
        words,
        codec,
        lambda golden: (
            from_format_scaled.decode(golden), from_format_scaled.project(words_of(words), golden[6], settings)
        ),
    )  # fmt: skip


def _lowrank(name: str) -> Case:
    dtype, rows, columns, rank = LOWRANK[name]
    factors = functools.cache(
        lambda: test_lowrank.factors(rows, columns, rank, 5)
    )  # `make gpu` imports this before it builds kernels
    return Case(
        lambda route: test_lowrank.frame_of(*factors(), dtype, route, shape=(rows, columns)),
        _read,
        lambda route: codecs.lowrank.product(*factors(), torch.empty(rows, columns, dtype=dtype), route=route),
        lambda golden: (
            from_format_lowrank.decode(golden)[2],
            from_format_lowrank.product(*(factor.numpy() for factor in factors()), framing.DTYPE_IDS[dtype]),
        ),
        variants.CPP,
    )


def _zfp(dtype: torch.dtype, rate: int) -> Case:
    """Of words of 16 bits; test_zfp.py has the streams of the reference library, which are of float32, and what both have in common."""
    return _of_words(test_zfp._finite(150, dtype, rate), Zfp(rate), None, kinds=variants.ONCE)


def _row(case: row_cases.RowCase) -> Case:
    def document(golden: bytes) -> tuple[Sequence[int], Sequence[int]]:
        data, itemsize = case.arriving.view(torch.uint8).numpy().tobytes(), case.words.itemsize
        arriving = [int.from_bytes(data[at : at + itemsize], "little") for at in range(0, len(data), itemsize)]
        return from_format_rows.decode(golden, arriving[: case.begin]), arriving[case.begin : case.end]

    return Case(case.frame, case.decode, lambda route: case.part, document)


CASES: dict[str, Case] = {
    **{name: _tensor(*given) for name, given in TENSORS.items()},
    **BITS,
    **{name: _rounded(name) for name in ROUNDED},
    **{name: _row(case) for name, case in row_cases.CASES.items()},
    **{name: _scaled(name) for name in SCALED},
    **{name: _lowrank(name) for name in LOWRANK},
    **{
        f"zfp_{name}_{rate}": _zfp(dtype, rate)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        for rate in (6, 11)
    },
}
#: Every case by every variant of kernels that has its codec.
ALL = [(name, variant) for name, case in CASES.items() for variant in case.kinds]


def _path(name: str) -> Path:
    return FOLDER / f"{name}.bin"


def _golden(name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_path(name).read_bytes()), dtype=torch.uint8)


def check(name: str, route: str) -> None:
    """Demand the golden frame of a case, and its words."""
    case, frame, golden = CASES[name], CASES[name].frame(route), _golden(name)
    assert_same_bits(case.decode(golden, route), case.wanted(route))
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"


@pytest.fixture(scope="module")
def update(request: pytest.FixtureRequest) -> set[str] | None:
    """Names already rewritten, so that the next routes are compared with the first; None unless rewriting is asked for."""
    return set() if request.config.getoption("--update-golden") else None


@pytest.mark.parametrize(("name", "variant"), ALL, ids=str)
def test_golden_frame(name: str, variant: variants.Variant, update: set[str] | None) -> None:
    if reason := variant.why_not():
        pytest.skip(f"{variant} is not usable here: {reason}")
    with variant.in_use() as route:
        if update is not None and name not in update:
            frame = CASES[name].frame(route).numpy().tobytes()
            _path(name).write_bytes(frame)
            if name in CRC32_CASES:
                oldest = from_format.with_checksum(frame, int(framing.ChecksumId.CRC32))
                _path(f"{name}_crc32").write_bytes(oldest)
            update.add(name)
        check(name, route)


@pytest.mark.parametrize("name", CRC32_CASES)
def test_golden_frame_with_the_old_checksum(name: str, route: str) -> None:
    """Decoders read it, and it differs from the new frame in the checksum alone."""
    golden = _golden(f"{name}_crc32")
    assert framing.parse(golden).checksum is framing.ChecksumId.CRC32
    assert_same_bits(ds_zipccl.decompress(golden, route=route), TENSORS[name][0])
    assert from_format.with_checksum(golden.numpy().tobytes(), int(framing.CHECKSUM)) == _path(name).read_bytes()


def test_a_frame_of_version_1_is_refused(route: str) -> None:
    """A delta frame of ds_zipccl 0.1, as its encoder wrote it; its header would mean the same today."""
    old, (tensor, arguments) = _golden(FORMER), TENSORS["bf16_delta_128"]
    with pytest.raises(ds_zipccl.FrameError, match=r"VERSION: format version 1, which ds_zipccl 0\.1 wrote"):
        ds_zipccl.decompress(old, base=arguments["base"], route=route)
    old[4] = framing.VERSION
    assert (framing.parse(old).dtype, framing.parse(old).numel) == (tensor.dtype, tensor.numel())


def test_the_folder_holds_these_and_no_more() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    names = {*CASES, *(f"{name}_crc32" for name in CRC32_CASES), FORMER, "zfp_reference"}
    assert set(files) == {_path(name).name for name in names}
    assert sum(files.values()) < 180_000


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.document])
def test_golden_frames_follow_the_document(name: str) -> None:
    document = CASES[name].document
    assert document
    decoded, wanted = document(_path(name).read_bytes())
    assert list(decoded) == list(wanted)


def test_golden_frames_show_every_mode() -> None:
    for name in corpus.FLOATS:
        modes = set()
        for case in TENSORS:
            frame = _golden(case)
            header = framing.parse(frame)
            blocks = min(corpus.CHUNK_BLOCKS, -(-header.numel // header.block)) if header.block else 0
            if not case.startswith(name) or not blocks or "_list_" in case or "_same_" in case:
                continue
            chunks = -(-header.numel // (corpus.CHUNK_BLOCKS * header.block))
            table = header.payload_at + framing.pad16(4 * chunks)
            modes |= {int(high) >> 5 for high in frame[table + blocks + 1 : table + 3 * blocks : 2]}
        assert modes == {0, 1, 2, 3, 4} | ({5} if name in corpus.SUMMED else set()), name


def test_golden_frames_show_every_form() -> None:
    shown = {}
    for case, (_, arguments) in TENSORS.items():
        if "base" in arguments:
            frame = _golden(case)
            kind, what = case.split("_")[:2]
            shown.setdefault(kind, set()).update(forms(frame))
            assert set(forms(frame)) == {"list": {"LIST"}, "same": {"SAME", "LIST"}}.get(what, {"TABLE"}), case
    assert shown == {name: {"SAME", "TABLE", "LIST"} for name in DELTAS}


def test_golden_frames_show_every_kind_of_rows_and_codes() -> None:
    """Both codecs of rounded words; all scaled codes, with stage 2 and the transform. Of rows: repeats of the history and of the frame,
    heads, tails, every kind of literals, and scaled rows of every dtype that has some."""
    assert {int(_golden(name)[5]) for name in ROUNDED} == {1, 3} and {int(_golden(name)[5]) for name in LOWRANK} == {5}
    frames = [_golden(name).tolist() for name in SCALED]
    assert {frame[5] for frame in frames} == {4} and {frame[6] for frame in frames} == {1, 2, 3}
    assert {frame[32] for frame in frames} == {1, 2} and {frame[33] for frame in frames} == {8, 6, 4}
    assert {frame[35] for frame in frames} >= {0, 1, 2, 3}, "stage 2 and the transform"
    shown = set()
    for name in row_cases.CASES:
        data, header = _golden(name).numpy().tobytes(), framing.parse(_golden(name))
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
