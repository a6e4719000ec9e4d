"""The package's code for CUDA tensors, unchanged, on the simulated GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sim import launcher, world

from ds_zipccl import codecs, devices, tensors
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.cuda import CudaRoute


@pytest.fixture(scope="module")
def route() -> CudaRoute:
    return launcher.route()


def words(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def compressed(rank: int, ranks: int) -> None:
    device = torch.device("cuda", rank)
    side = torch.cuda.Stream(device)
    for dtype in (torch.bfloat16, torch.float32):
        host = words(rank, 2000, dtype)
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


def test_codecs(route: CudaRoute) -> None:
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
