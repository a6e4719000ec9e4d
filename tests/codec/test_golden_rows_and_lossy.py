"""Row frames and lossy frames of earlier versions: every route still writes exactly these bytes and reads them; see test_golden.py.

Frames of float32 by ZFP are the reference library's streams (zfp_reference.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import corpus
import from_format
import from_format_lowrank
import from_format_rounded
import from_format_rows
import from_format_scaled
import from_format_zfp
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
from test_scaled import words_of

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
    document: Callable[[bytes], tuple[Sequence[int], Sequence[int]]]
    kinds: Sequence[variants.Variant] = variants.COMPILED


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
    document: Callable[[bytes], tuple[Sequence[int], Sequence[int]]],
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
    p, q = test_lowrank.factors(rows, columns, rank, 5)
    return Case(
        lambda route: test_lowrank.frame_of(p, q, dtype, route, shape=(rows, columns)),
        _read,
        lambda route: codecs.lowrank.product(p, q, torch.empty(rows, columns, dtype=dtype), route=route),
        lambda golden: (
            from_format_lowrank.decode(golden)[2],
            from_format_lowrank.product(p.numpy(), q.numpy(), framing.DTYPE_IDS[dtype]),
        ),
        variants.CPP,
    )


def _zfp(dtype: torch.dtype, rate: int) -> Case:
    words = test_zfp._finite(150, dtype, rate)
    return _of_words(
        words,
        Zfp(rate),
        lambda golden: (
            from_format_zfp.decode(golden), from_format_zfp.project(words_of(words), framing.DTYPE_IDS[dtype], rate)
        ),
        kinds=variants.ONCE,
    )  # fmt: skip


def _row(case: row_cases.RowCase) -> Case:
    arriving = words_of(case.arriving) if case.words.itemsize < 16 else []
    if case.words.itemsize == 16:
        data = case.arriving.view(torch.uint8).numpy().tobytes()
        arriving = [int.from_bytes(data[at : at + 16], "little") for at in range(0, len(data), 16)]
    return Case(
        case.frame,
        case.decode,
        lambda route: case.part,
        lambda golden: (from_format_rows.decode(golden, arriving[: case.begin]), arriving[case.begin : case.end]),
    )


CASES: dict[str, Case] = {
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


def _golden(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def check(name: str, route: str) -> None:
    """Demand the golden frame of a case, and its words."""
    case, frame = CASES[name], CASES[name].frame(route)
    golden = torch.frombuffer(bytearray(_golden(name)), dtype=torch.uint8)
    assert_same_bits(case.decode(golden, route), case.wanted(route))
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"


@pytest.mark.parametrize(("name", "variant"), ALL, ids=str)
def test_golden_frame(name: str, variant: variants.Variant, request: pytest.FixtureRequest) -> None:
    if reason := variant.why_not():
        pytest.skip(f"{variant} is not usable here: {reason}")
    with variant.in_use() as route:
        if request.config.getoption("--update-golden") and route == "native":
            (FOLDER / f"{name}.bin").write_bytes(CASES[name].frame(route).numpy().tobytes())
        check(name, route)


@pytest.mark.parametrize("name", CASES)
def test_golden_frames_follow_the_document(name: str) -> None:
    decoded, wanted = CASES[name].document(_golden(name))
    assert list(decoded) == list(wanted)


def test_golden_frames_show_everything() -> None:
    """Both codecs of rounded words; all scaled codes, with stage 2 and the transform. Of rows: repeats of the history and of the frame,
    heads, tails, every kind of literals, and scaled rows of every dtype that has some."""
    assert {_golden(name)[5] for name in ROUNDED} == {1, 3} and {_golden(name)[5] for name in LOWRANK} == {5}
    frames = [_golden(name) for name in SCALED]
    assert {frame[5] for frame in frames} == {4} and {frame[6] for frame in frames} == {1, 2, 3}
    assert {frame[32] for frame in frames} == {1, 2} and {frame[33] for frame in frames} == {8, 6, 4}
    assert {frame[35] for frame in frames} >= {0, 1, 2, 3}, "stage 2 and the transform"
    shown = set()
    for name in row_cases.CASES:
        data = _golden(name)
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
