"""Low-rank frames that are refused, each with its code, and factors that have no frame."""

from __future__ import annotations

import struct

import pytest
import torch
import variants
from corpus import assert_same_bits
from test_lowrank import factors, frame_of

from ds_zipccl import codecs, kernels, tensors
from ds_zipccl.codecs import decompress, decompress_add, lowrank
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 2.0**126])
def test_factors_beyond_float32_have_no_frame(value: float) -> None:
    p, q = factors(30, 40, 3)
    p[4, 1] = value
    assert not lowrank.bounded(p, q) and lowrank.bounded(*factors(30, 40, 3))
    with pytest.raises(ValueError, match="must be finite; send the matrix itself"):
        frame_of(p, q, torch.bfloat16)
    with pytest.raises(ValueError, match="must be finite"):
        lowrank.product(p, q, torch.empty(30, 40))


def test_tensors_of_another_kind_are_refused() -> None:
    p, q = factors(30, 40, 3)
    for wrong in (p.double(), p.t(), p.reshape(-1), p[:, :2].contiguous(), torch.empty(30, 0)):
        with pytest.raises(ValueError, match=r"two dimensions|equally many columns"):
            frame_of(wrong, q, torch.bfloat16)
    for dtype, shape in ((torch.float64, None), (torch.bfloat16, (30, 41)), (torch.bfloat16, (1200, *[1] * 64))):
        with pytest.raises(ValueError, match=r"low-rank frames hold|elements is wanted"):
            frame_of(p, q, dtype, shape=shape)
    with pytest.raises(ValueError, match="out must be a contiguous tensor of 1200 elements"):
        lowrank.product(p, q, torch.empty(30, 41))
    with pytest.raises(ValueError, match="of an output are also in an input"):
        lowrank.product(*_overlapping())
    with pytest.raises(ValueError, match="needs a q of 9 rows, got 40"):
        lowrank.power_step(torch.ones(4, 9), q)


def _overlapping() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    memory = torch.zeros(1200 + 10)
    return memory[:90].view(30, 3), torch.ones(40, 3), memory[10:].view(30, 40)


_AT = 32  # the payload of a flat frame


def _damaged(at: int, form: str, value: int) -> torch.Tensor:
    """A good frame of 40 by 50 elements and rank 3 with another value in its payload."""
    frame = bytearray(frame_of(*factors(40, 50, 3), torch.bfloat16).numpy().tobytes())
    struct.pack_into(form, frame, _AT + at, value)
    return torch.frombuffer(frame, dtype=torch.uint8)


#: Case -> place in the payload, form, value, code.
REFUSED = {
    "rows": (0, "<I", 41, FrameErrorCode.BLOCK),
    "rows and columns that overflow": (0, "<I", 0xFFFFFFFF, FrameErrorCode.BLOCK),
    "columns": (4, "<I", 0, FrameErrorCode.BLOCK),
    "rows and columns the other way": (0, "<Q", 50 | 40 << 32, FrameErrorCode.SIZE),
    "other rows of as many elements": (0, "<Q", 2000 | 1 << 32, FrameErrorCode.BLOCK),
    "no rank": (8, "<I", 0, FrameErrorCode.BLOCK),
    "a rank above the rows": (8, "<I", 41, FrameErrorCode.BLOCK),
    "a rank with more values than the matrix": (8, "<I", 23, FrameErrorCode.BLOCK),
    "a rank that the factors do not have": (8, "<I", 4, FrameErrorCode.SIZE),
    "a reserved field": (12, "<I", 1, FrameErrorCode.RESERVED),
    "magic of P": (16, "<B", 0, FrameErrorCode.MAGIC),
    "codec of P": (21, "<B", CodecId.LOWRANK, FrameErrorCode.RESERVED),
    "another codec of P": (21, "<B", CodecId.DELTA, FrameErrorCode.CODEC),
    "dtype of P": (22, "<B", 1, FrameErrorCode.CODEC),
    "a shape of P": (23, "<B", 2, FrameErrorCode.RESERVED),
    "a checksum of P": (23, "<B", 1, FrameErrorCode.RESERVED),
    "an overflowed P": (23, "<B", 4, FrameErrorCode.OVERFLOWED),
    "elements of P": (32, "<Q", 121, FrameErrorCode.SIZE),
    "very many elements of P": (32, "<Q", 1 << 62, FrameErrorCode.SIZE),
    "bytes of P": (40, "<Q", 1 << 40, FrameErrorCode.TRUNCATED),
    "bytes of P below its header": (40, "<Q", 31, FrameErrorCode.TRUNCATED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_payloads(case: str) -> None:
    at, form, value, code = REFUSED[case]
    frame = _damaged(at, form, value)
    for variant in variants.usable(variants.CPP):
        with variant.in_use() as route:
            for call in (decompress, lambda frame, route: decompress_add(frame, torch.zeros(2000), route=route)):
                with pytest.raises(FrameError) as caught:
                    call(frame, route=route)
                assert caught.value.code == code, str(caught.value)


def _raw(p: torch.Tensor, q: torch.Tensor) -> bytearray:
    """A frame of raw factors, as an encoder that codes nothing would write it."""
    frames = (codecs.compress(one, "raw", shaped=False, checksum=False).numpy().tobytes() for one in (p, q))
    nested = b"".join(one.ljust(-(-len(one) // 16) * 16, b"\0") for one in frames)
    payload = struct.pack("<4I", len(p), len(q), p.shape[1], 0) + nested
    header = struct.pack("<4s8BIQQ", b"ZCCL", 2, 5, 1, 0, 0, 0, 0, 0, 0, len(p) * len(q), 32 + len(payload))
    return bytearray(header + payload)


def test_raw_factors_are_read_and_values_that_are_not_finite_refused() -> None:
    p, q = torch.randn(40, 4), torch.randn(48, 4)
    good = torch.frombuffer(_raw(p, q), dtype=torch.uint8)
    wanted = lowrank.product(p, q, torch.empty(1920, dtype=torch.bfloat16))
    assert_same_bits(decompress(good), wanted)
    for place, value in ((p, torch.inf), (q, torch.nan), (q, 2.0**126)):
        before = float(place[3, 2])
        place[3, 2] = value
        for variant in variants.usable(variants.CPP):
            with variant.in_use() as route, pytest.raises(FrameError, match=r"BLOCK: .* not finite"):
                decompress(torch.frombuffer(_raw(p, q), dtype=torch.uint8), route=route)
        place[3, 2] = before
    frame = _raw(p, q)
    frame[32 + 16 + 32 + 640 + 32 :] += bytes(16)
    struct.pack_into("<Q", frame, 24, len(frame))
    with pytest.raises(FrameError, match=r"SIZE: .* whose parts have"):
        decompress(torch.frombuffer(frame, dtype=torch.uint8))


def test_padding_of_nested_frames_is_zero() -> None:
    p, q = torch.randn(41, 3), torch.randn(53, 3)
    frame = _raw(p, q)
    wanted = lowrank.product(p, q, torch.empty(41 * 53, dtype=torch.bfloat16))
    assert_same_bits(decompress(torch.frombuffer(bytearray(frame), dtype=torch.uint8)), wanted)
    for at in (32 + 16 + 32 + p.nbytes, len(frame) - 1):
        one = bytearray(frame)
        one[at] = 1
        with pytest.raises(FrameError, match=r"RESERVED: .* padding"):
            decompress(torch.frombuffer(one, dtype=torch.uint8))


def test_nothing_is_allocated_for_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that says 2^60 elements, and factors of very many: refused before there is memory for either."""
    asked: list[int] = []
    real = tensors.empty
    monkeypatch.setattr(tensors, "empty", lambda numel, *more: asked.append(numel) or real(min(numel, 4096), *more))
    frame = bytearray(frame_of(*factors(40, 50, 3), torch.bfloat16).numpy().tobytes())
    asked.clear()
    for place, form, values in ((16, "<Q", (1 << 60,)), (32, "<2I", (1 << 30, 1 << 30)), (32, "<I", (41,))):
        one = bytearray(frame)
        struct.pack_into(form, one, place, *values)
        with pytest.raises(FrameError, match="BLOCK"):
            decompress(torch.frombuffer(one, dtype=torch.uint8))
    assert asked == []


@pytest.mark.skipif(bool(kernels.why()["native"]), reason="the native route is not usable here")
def test_a_named_route_is_taken() -> None:
    with pytest.raises(ValueError, match="no route 'rocm'"):
        lowrank.orthonormalize(torch.ones(3, 1), route="rocm")
