"""The codec ``zfp``: the reference library's bytes and values, sizes, errors, and frames that hold what others would."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import corpus
import from_format_zfp
import numpy as np
import pytest
import torch
import variants
import zfp_reference
from corpus import assert_same_bits

from ds_zipccl import codecs, kernels
from ds_zipccl import frame as framing
from ds_zipccl.codecs import compress, decompress, decompress_add, project
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import Zfp

DTYPES = codecs.LOSSY_DTYPES
RATES = Zfp.wanted["rate"]
NAMES = {kind.dtype: name for name, kind in corpus.SUMMED.items()}
route = variants.each(variants.ONCE)


def _fewer(route: str, values: Sequence[Any], kept: Sequence[Any]) -> Sequence[Any]:
    """The values of a loop; those to keep for the emulated kernels, whose threads take turns."""
    return kept if route == "emulated" else values


def _payload(frame: torch.Tensor) -> bytes:
    """The codes of a flat ZFP1 frame."""
    return frame[framing.HEADER_BYTES + 16 :].numpy().tobytes()


def _words(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).numpy().view(f"u{tensor.itemsize}").tolist() if tensor.numel() else []


def _frame(tensor: torch.Tensor, rate: int, route: str, **more: object) -> torch.Tensor:
    return compress(tensor, Zfp(rate), lossy=True, shaped=False, checksum=False, route=route, **more)


def _finite(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of every kind that a lossy codec meets: bells of several scales, zeros, subnormals and the largest ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    scale = torch.tensor([1.0, 2.0**-9, info.tiny, info.tiny * info.eps * 9, info.max / 9, 0.0], dtype=torch.float64)
    values *= scale[torch.randint(len(scale), (-(-numel // 8),), generator=generator).repeat_interleave(8)[:numel]]
    values = values.clamp(info.min, info.max).to(dtype)
    values[torch.rand(numel, generator=generator) < 0.05] = 0
    values[torch.rand(numel, generator=generator) < 0.03] = -0.0
    values[torch.rand(numel, generator=generator) < 0.01] = info.max
    return values


# --- the published stream


def test_streams_of_the_reference_library(route: str) -> None:
    """The library's bytes for every input, and its values for every stream; where these are infinite, the largest finite number."""
    kernel = kernels.lossy_route(route, "cpu", "encode_zfp")
    coded = random_streams = clamped = 0
    for record in zfp_reference.records():
        codes = torch.frombuffer(bytearray(record.stream), dtype=torch.uint8)
        if record.values is not None:
            made = torch.full_like(codes, 0x5A)
            assert kernel.encode_zfp(torch.from_numpy(record.values.copy()), record.rate, made)
            assert torch.equal(made, codes), f"rate {record.rate}, {len(record.values)} values"
        out = torch.empty(len(record.decoded))
        kernel.decode_zfp(codes, record.rate, out)
        wanted = np.clip(record.decoded, -np.finfo(np.float32).max, np.finfo(np.float32).max)
        assert out.numpy().tobytes() == wanted.tobytes(), f"rate {record.rate}, {len(wanted)} values"
        coded += record.values is not None
        random_streams += record.values is None
        clamped += bool(np.isinf(record.decoded).any())
    assert coded > 80 and random_streams > 20 and clamped


def test_a_frame_is_fields_and_the_stream(route: str) -> None:
    """The frame that a caller gets has the library's bytes."""
    frames = 0
    for record in zfp_reference.records():
        if record.values is not None and record.rate in RATES and len(record.values) > 30:
            frame = _frame(torch.from_numpy(record.values.copy()), record.rate, route)
            assert frame[5] == CodecId.ZFP1 and _payload(frame) == record.stream
            assert frame[32:48].numpy().tobytes() == struct.pack("<I12x", record.rate)
            frames += 1
    assert frames > 20


# --- the document


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_a_codec_written_from_the_document_agrees(route: str, dtype: torch.dtype) -> None:
    for seed, numel in enumerate(_fewer(route, (0, 1, 2, 3, 4, 5, 7, 16, 33, 130), (0, 2, 3, 5, 130))):
        for rate in _fewer(route, (4, 7, 13, 24), (7, 24)):
            tensor, key = _finite(numel, dtype, 10 * seed + rate), framing.DTYPE_IDS[dtype]
            frame, projected = _frame(tensor, rate, route), project(tensor, Zfp(rate), route=route)
            wanted = from_format_zfp.encode(_words(tensor), key, rate)
            assert _words(projected) == from_format_zfp.project(_words(tensor), key, rate)
            if wanted is None:
                assert frame[5] != CodecId.ZFP1
            else:
                assert frame.numpy().tobytes() == wanted
                assert _words(decompress(frame, route=route)) == from_format_zfp.decode(wanted)


@pytest.mark.parametrize("rate", [3, 8, 13, 32])
def test_any_codes_have_the_words_of_the_document(route: str, rate: int) -> None:
    """Random codes, exponents of 0 and 255 among them, in payloads that no encoder writes."""
    rng = random.Random(rate)
    for dtype in DTYPES:
        for numel in (1, 2, 6, 24):
            codes = bytearray(rng.randbytes(8 * -(-4 * rate * -(-numel // 4) // 64)))
            codes[0], codes[1] = codes[0] | 1, rng.choice((0, 1, codes[1]))
            frame = _with_codes(dtype, numel, rate, bytes(codes))
            decoded = decompress(torch.frombuffer(bytearray(frame), dtype=torch.uint8), route=route)
            assert decoded.isfinite().all()
            assert _words(decoded) == from_format_zfp.decode(frame)


def _with_codes(dtype: torch.dtype, numel: int, rate: int, codes: bytes) -> bytes:
    header = struct.pack("<4s8BIQQ", b"ZCCL", 2, 6, framing.DTYPE_IDS[dtype], 0, 0, 0, 0, 0, 0, numel, 48 + len(codes))
    return header + struct.pack("<I12x", rate) + codes


# --- frames


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_every_frame_decodes_to_the_projection(route: str, dtype: torch.dtype) -> None:
    """Whatever frame it is, flat or not, with and without a NaN: its words are those of ``project``."""
    for numel in _fewer(route, (0, 1, 6, 1000, 5003), (0, 6, 5003)):
        for rate in _fewer(route, (4, 8, 15, 16, 24), (15,)):
            tensor = _finite(numel, dtype, numel + rate)
            for special in (None, math.nan, math.inf, -math.inf):
                if special is not None and numel:
                    tensor[numel // 2] = special
                projected = project(tensor, Zfp(rate), route=route)
                frame = compress(tensor.view(-1, 1), Zfp(rate), lossy=True, route=route)
                assert_same_bits(decompress(frame, route=route), projected.view(-1, 1))
                assert_same_bits(project(tensor.clone(), Zfp(rate), out=tensor.clone(), route=route), projected)
                smaller = _size(numel, rate) < tensor.nbytes and bool(tensor.isfinite().all())
                assert (frame[5] == CodecId.ZFP1) == smaller


def _size(numel: int, rate: int) -> int:
    return 16 + 8 * math.ceil(4 * rate * math.ceil(numel / 4) / 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_sizes_are_those_of_the_formula(route: str, dtype: torch.dtype) -> None:
    for rate in _fewer(route, RATES, (4, 24)):
        for numel in (61, 64, 65, 300):
            tensor = _finite(numel, dtype, rate)
            frame = _frame(tensor, rate, route)
            bound = codecs.compress_bound(numel, dtype, Zfp(rate), lossy=True)
            assert frame.numel() <= bound
            if _size(numel, rate) < tensor.nbytes:
                assert frame.numel() == 32 + _size(numel, rate)
            else:  # exactly the exponent frame of the projection, or the raw one
                lossless = project(tensor, Zfp(rate), route=route)
                names = [compress(lossless, name, shaped=False, checksum=False) for name in ("cascade", "raw")]
                wanted = names[names[0].numel() >= names[1].numel()]
                assert torch.equal(frame, wanted)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_nothing_that_is_not_finite_disappears(route: str, dtype: torch.dtype, special: float) -> None:
    """In every place of a block, whole and partial: the block arrives as it is, and its neighbors as without it."""
    for numel in _fewer(route, (40, 41, 42, 43), (43,)):  # enough for a payload that is smaller than the words
        for at in _fewer(route, (*range(4), *range(36, numel)), (2, 42)):
            tensor = _finite(numel, dtype, numel)
            plain = project(tensor, Zfp(8), route=route)
            assert plain.isfinite().all()
            tensor[at] = special
            arrived = decompress(_frame(tensor, 8, route), route=route)
            block = slice(at // 4 * 4, at // 4 * 4 + 4)
            assert_same_bits(arrived[block].clone(), tensor[block].clone())
            plain[block] = tensor[block]
            assert_same_bits(arrived, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_extreme_blocks(route: str, dtype: torch.dtype) -> None:
    """Maxima near 2^-126, 2^127 and the dtype's own limits: the error stays a small part of the maximum, and finite stays finite."""
    info = torch.finfo(dtype)
    for scale in (2.0**-126, 2.0**-127, 2.0**-149, 2.0**-97, 2.0**127, info.max, info.tiny, info.tiny * info.eps, 1.0):
        for seed in _fewer(route, range(6), (1,)):
            values = torch.rand(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
            tensor = (values * min(scale, info.max)).to(dtype)
            if not tensor.count_nonzero():
                continue
            arrived = decompress(_frame(tensor, 24, route), route=route)
            assert arrived.isfinite().all()
            maxima = tensor.double().view(-1, 4).abs().amax(1, keepdim=True)
            unit = max(info.tiny * info.eps, 2.0**-149)
            error = (arrived.double() - tensor.double()).view(-1, 4).abs()
            assert (error <= maxima * (2.0**-14 + info.eps) + unit).all(), (scale, seed)
    signs = torch.randn(256, generator=torch.Generator().manual_seed(3)).sign()
    for rate in _fewer(route, RATES, (4,)):
        largest = (signs * info.max).to(dtype)
        assert decompress(_frame(largest, rate, route), route=route).isfinite().all(), rate


@pytest.mark.parametrize(("rate", "wanted"), [(8, 5.5e-2), (12, 3.4e-3), (16, 2.1e-4)])
def test_errors_of_a_gaussian(rate: int, wanted: float) -> None:
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    error = (project(tensor, Zfp(rate)) - tensor).norm() / tensor.norm()
    assert error == pytest.approx(wanted, rel=0.04)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("fp32_sums", [False, True], ids=["rounded", "fp32"])
def test_sums_are_those_of_the_words(route: str, dtype: torch.dtype, fp32_sums: bool) -> None:
    """A sum does not depend on the frame: a ZFP1 frame adds what a raw frame of its words adds."""
    for numel in _fewer(route, (1, 255, 256, 257, 3001), (257,)):
        tensor, kind = _finite(numel, dtype, numel) / 16, torch.float32 if fp32_sums else dtype
        before = torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(kind)
        frame = _frame(tensor, 6, route)
        raw = compress(decompress(frame, route=route), "raw", shaped=False, checksum=False)
        sums, wanted = before.clone(), before.clone()
        decompress_add(frame, sums, route=route)
        decompress_add(raw, wanted, route=route)
        assert_same_bits(sums, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_threads_and_flushed_denormals_change_nothing(dtype: torch.dtype) -> None:
    tensor = _finite((3 << 20) // dtype.itemsize + 5, dtype, 1)
    frame, projected = _frame(tensor, 8, "native"), project(tensor, Zfp(8), route="native")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.set_flush_denormal(True)
        again, once_more = _frame(tensor, 8, "native"), project(tensor, Zfp(8), route="native")
        decoded = decompress(frame, route="native")
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert torch.equal(frame, again)
    for found in (once_more, decoded):
        assert torch.equal(found.view(torch.uint8), projected.view(torch.uint8))


def test_segments_and_refusals(route: str) -> None:
    tensors = [_finite(numel, torch.float32, numel) for numel in (0, 7, 4096)]
    outs = [
        torch.empty(codecs.compress_bound(tensor.numel(), torch.float32, Zfp(9), lossy=True), dtype=torch.uint8)
        for tensor in tensors
    ]
    frames = codecs.compress_segments(tensors, outs, Zfp(9), lossy=True, route=route)
    for tensor, frame in zip(tensors, frames, strict=True):
        assert_same_bits(decompress(frame, route=route), project(tensor, Zfp(9), route=route))
    with pytest.raises(ValueError, match=r"zfp rate 9.*lossy=True"):
        compress(tensors[0], Zfp(9), route=route)
    with pytest.raises(ValueError, match="int32"):
        compress(torch.arange(5, dtype=torch.int32), Zfp(9), lossy=True, route=route)
