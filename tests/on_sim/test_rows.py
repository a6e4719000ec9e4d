"""Row frames of CUDA tensors, whole: the package's code, unchanged, on the simulated GPU. Frames are those of the CPU."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch

from ds_zipccl import codecs, frame
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import world
from on_sim.world import noticed

PLAIN = {"shaped": False, "checksum": False}
WIDTH, ROWS = 96, 40
#: Fragments that begin and end inside of rows, two without a whole row among them.
CUTS = [0, 500, 520, 560, 2000, 2001, 3200, ROWS * WIDTH + 5]


def segment(dtype: torch.dtype) -> torch.Tensor:
    """Rows of which a third repeats an earlier one, and a third is a scaled copy; and five elements more."""
    values = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    if not dtype.is_floating_point:
        values *= 1000
    rows = values.to(dtype)
    for number in range(2, ROWS):
        if number % 3 == 0:
            rows[number] = rows[number // 3]
        elif number % 3 == 1:
            rows[number] = (rows[number - 2].float() * (0.2 + number / 50)).to(dtype)
    return torch.cat([rows.view(-1), rows[0, :5]])


def candidates() -> torch.Tensor:
    return torch.tensor(
        [number - 2 if number % 3 == 1 and number > 1 else number for number in range(ROWS)], dtype=torch.int32
    )


def sent(words: torch.Tensor) -> list[torch.Tensor]:
    """The frames of a segment; ordinary ones where rows do not pay."""
    rows, frames = codecs.RowSegment(words, WIDTH, block=128), []
    rows.scale_by(candidates())
    for begin, end in itertools.pairwise(CUTS):
        bound = codecs.compress_bound(end - begin, words.dtype, block=128)
        found = rows.frame(begin, end, torch.empty(bound, dtype=torch.uint8, device=words.device))
        frames.append(codecs.compress(words[begin:end], block=128, **PLAIN) if found is None else found)
    return frames


def segments(rank: int, ranks: int, waits: bool = True) -> None:
    device = torch.device("cuda", rank)
    side = torch.cuda.Stream(device)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int64):
        host = segment(dtype)
        there = host.to(device).clone()  # work of the current stream, for which the side stream waits
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            frames, wanted = sent(there), sent(host)
            kinds = [frame.parse(one).codec for one in wanted]
            assert kinds.count(CodecId.ROWS) >= 2 and kinds.count(CodecId.ROWS) < len(kinds), kinds
            out = torch.zeros_like(there)
            for found, one, (begin, end) in zip(frames, wanted, itertools.pairwise(CUTS), strict=True):
                assert found.device == device and torch.equal(found.cpu(), one), (dtype, begin)
                codecs.decompress(found, out[begin:end], earlier=out[:begin])
            assert torch.equal(out.cpu().view(torch.uint8), host.view(torch.uint8))
        torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("seed", tiers.mostly_full(range(3), (0,), "four seconds each"))
def test_segments(route: CudaBackend, seed: int) -> None:
    world.run(segments, 1, seed=seed, route=route)


def test_kernels_for_rows_are_work_of_a_stream(route: CudaBackend) -> None:
    fault = noticed(segments, 1, False, route=route)
    assert fault.kind == "race" and "zipccl_find_rows" in str(fault), fault


def refused(rank: int, ranks: int) -> None:
    device = torch.device("cuda", rank)
    host = segment(torch.bfloat16)
    good = codecs.compress(host, row_width=WIDTH, **PLAIN)
    assert frame.parse(good).codec is CodecId.ROWS
    assert torch.equal(codecs.compress(host.to(device), row_width=WIDTH, **PLAIN).cpu(), good)
    for place, value in (
        (32, 0),
        (36, 200),
        (40, 255),
        (64, 255),
        (70, 1),
    ):  # width, head, repeats, and two bytes of the map
        bad = good.clone()
        bad[place] = value
        with pytest.raises(FrameError) as raised:
            codecs.decompress(bad.to(device), torch.empty(len(host), dtype=host.dtype, device=device))
        assert raised.value.code == FrameErrorCode.ROWS, place
    second = codecs.RowSegment(host, WIDTH).frame  # a frame that refers to rows in front of it
    room = torch.empty(codecs.compress_bound(len(host), host.dtype), dtype=torch.uint8)
    second(0, 1000, room)
    later = second(1000, len(host), room)
    assert later is not None
    with pytest.raises(FrameError, match="in front of the frame") as raised:
        codecs.decompress(later.to(device), torch.empty(len(host) - 1000, dtype=host.dtype, device=device))
    assert raised.value.code == FrameErrorCode.ROWS


def test_bad_maps_are_refused(route: CudaBackend) -> None:
    world.run(refused, 1, route=route)
