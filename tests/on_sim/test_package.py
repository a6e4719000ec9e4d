"""The package's code for CUDA tensors, unchanged, on the simulated GPU; row frames, which are those of the CPU."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
import torch.distributed as dist

from ds_zipccl import codecs, devices, frame, tensors
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.frame import CodecId, FrameError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import world
from on_sim.cases import weights
from on_sim.world import noticed


def compressed(rank: int, ranks: int) -> None:
    device = torch.device("cuda", rank)
    side = torch.cuda.Stream(device)
    for dtype in (torch.bfloat16, torch.float32):
        host = weights(rank, 2000, dtype=dtype)
        there = host.to(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for codec in ("cascade", "wide", "raw"):
                frame = codecs.compress(there, codec)
                assert frame.device == device
                assert torch.equal(frame.cpu(), codecs.compress(host, codec))
                assert torch.equal(codecs.decompress(frame).cpu(), host)
            base = there + 1
            frame = codecs.compress(there, "delta", base=base)
            assert torch.equal(codecs.decompress(frame, base=base).cpu(), host)
            sums = base.clone()
            codecs.decompress_add(codecs.compress(there), sums)
            assert torch.equal(sums.cpu(), (host + 1).float().add(host.float()).to(dtype))
            frame = codecs.compress(there)
            frame[40:60] = 255
            with pytest.raises(FrameError):
                codecs.decompress(frame)


def test_codecs(route: CudaBackend) -> None:
    for seed in range(3):
        world.run(compressed, 1, seed=seed, route=route)


def known(rank: int, ranks: int) -> None:
    device = torch.device("cuda", rank)
    state = group_state(None)
    assert state is not None and (state.rank, state.size, state.backend("cuda")) == (rank, ranks, "nccl")
    pair = dist.new_group([0, 1])
    assert (group_state(pair) is None) == (rank > 1)
    made = tensors.filled(3, 1, torch.int32, device)
    assert made.is_cuda and not tensors.is_traced(type(made))
    with tensors.undisturbed(), torch.inference_mode():
        assert (tensors.empty(3, torch.int32, device).copy_(made) + 1).tolist() == [2, 2, 2]
    runtime = devices.runtime(device)
    assert runtime is not None and not runtime.is_current_stream_capturing()
    with runtime.device(device), runtime.stream(runtime.Stream(device, priority=-1)):
        assert runtime.current_stream(device).priority is not None


def test_state_and_tensors() -> None:
    world.run(known, 3)


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
        frames.append(
            codecs.compress(words[begin:end], block=128, shaped=False, checksum=False) if found is None else found
        )
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
