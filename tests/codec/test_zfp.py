"""The codec ``zfp``: the reference library's bytes and values, sizes, errors, and frames that hold what others would."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import corpus
import numpy as np
import pytest
import torch
import variants
import zfp_reference
from corpus import assert_same_bits

from ds_zipccl import codecs, kernels
from ds_zipccl.codecs import compress, decompress, project
from ds_zipccl.lossy import Zfp

DTYPES = codecs.LOSSY_DTYPES
RATES = Zfp.wanted["rate"]
NAMES = {kind.dtype: name for name, kind in corpus.SUMMED.items()}
route = variants.each(variants.ONCE)


def _fewer(route: str, values: Sequence[Any], kept: Sequence[Any]) -> Sequence[Any]:
    """The values of a loop; those to keep for the emulated kernels, whose threads take turns."""
    return kept if route == "emulated" else values


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


# --- other dtypes, and exponents that the library's streams have not


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest finite words of a dtype."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_words_of_every_dtype_are_coded_as_those_of_float32(route: str, dtype: torch.dtype) -> None:
    """Behind a header that names the rate; the values are those of float32, rounded to the dtype."""
    kernel = kernels.lossy_route(route, "cpu", "encode_zfp")
    for seed, numel in enumerate(_fewer(route, (1, 2, 3, 4, 5, 7, 16, 33, 130), (2, 3, 5, 130))):
        for rate in _fewer(route, (4, 7, 13, 24), (7, 24)):
            tensor, values = _finite(numel, dtype, 10 * seed + rate), torch.empty(numel)
            codes = torch.empty(_size(numel, rate) - 16, dtype=torch.uint8)
            assert kernel.encode_zfp(tensor.float(), rate, codes)
            kernel.decode_zfp(codes, rate, values)
            wanted, frame = _nearest(values, dtype), _frame(tensor, rate, route)
            assert_same_bits(project(tensor, Zfp(rate), route=route), wanted)
            assert_same_bits(decompress(frame, route=route), wanted)
            if _size(numel, rate) < tensor.nbytes:
                assert frame[32:48].tolist() == [rate, *[0] * 15] and torch.equal(frame[48:], codes)


def _constant(number: int, exponent: int) -> bytes:
    """The codes, 32 bits for each value, of a block that has one number four times: its other coefficients are zeros."""
    flip, bits = 0xAAAAAAAA, f"{exponent:08b}1"[::-1]
    for plane in f"{(number + flip) % (1 << 32) ^ flip:032b}":
        bits += f"{plane}0" if len(bits) > 9 and "1" in bits[9:] else "110" if plane == "1" else "0"
    return int(bits[::-1], 2).to_bytes(16, "little")


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_numbers_are_rounded_to_the_nearest_finite_values(route: str, dtype: torch.dtype) -> None:
    """Ties to even, to subnormal values and to the largest one; by any exponent, also 0 and 255, which no encoder writes."""
    draw = random.Random(1)
    ties = [((1 << 23) + draw.randrange(1 << 7) << shift) + (1 << shift - 1) for shift in range(1, 8) for _ in range(3)]
    numbers = [0, 1, (1 << 31) - 1, *ties, *(draw.randrange(1 << draw.randrange(1, 31)) for _ in range(20))]
    cases = [
        (sign * number, draw.choice((0, 1, 9, 20, 30, 120, 157, 254, 255))) for number in numbers for sign in (1, -1)
    ]
    codes = torch.frombuffer(bytearray(b"".join(_constant(*case) for case in cases)), dtype=torch.uint8)
    kernel, decoded = kernels.lossy_route(route, "cpu", "decode_zfp"), torch.empty(4 * len(cases), dtype=dtype)
    kernel.decode_zfp(codes, 32, decoded)
    exact = torch.tensor([number * 2.0 ** (exponent - 157) for number, exponent in cases], dtype=torch.float64)
    wanted = _nearest(_nearest(exact, torch.float32), dtype).repeat_interleave(4)
    assert torch.equal(decoded, wanted)


# --- frames


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
