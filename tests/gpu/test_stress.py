"""The CUDA kernels beside other work: streams, a GPU whose multiprocessors are held, tensors over 4 GiB, graphs. ``make gpu`` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import where

from ds_zipccl.codecs import compress_bound
from ds_zipccl.kernels.cuda.backend import CudaBackend, new_status, raise_failure

FIRST_LAUNCH = Path(__file__).with_name("first_launch.py")
ROUTES = ("native", "cupy")
#: Rounds of two streams, and seconds for the first launches: torch's import, and a spinning kernel that ends by itself.
ROUNDS, FIRST_SECONDS = 20, 50


@pytest.fixture(params=[f"cuda-{name}" for name in ROUTES])
def route(request: pytest.FixtureRequest) -> CudaBackend:
    if where.missing():
        pytest.skip(where.missing())
    return where.HERE.route(request.param.removeprefix("cuda-"))


def words(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal values, some of them zeros, and one bit pattern of every kind in each."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values[seed % 7 :: 11] = 0.0
    values[:3] = torch.tensor([float("inf"), -0.0, 1e-40])
    return values.to(dtype).to(where.HERE.device)


def slot_for(tensor: torch.Tensor, block: int = 1024) -> torch.Tensor:
    """Memory for any frame of the tensor; its content is known."""
    return torch.full(
        (compress_bound(tensor.numel(), tensor.dtype, block=block),), 0x5C, dtype=torch.uint8, device=tensor.device
    )


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compared piece by piece, as a comparison needs memory."""
    pieces = zip(got.view(torch.uint8).split(1 << 28), wanted.view(torch.uint8).split(1 << 28), strict=True)
    return all(torch.equal(a, b) for a, b in pieces)


def test_two_streams_at_once(route: CudaBackend) -> None:
    """Different data and dtypes; the host waits once, at the end."""
    sets = [
        [words(where.HERE.size(numel), dtype, seed) for seed in range(3)]
        for dtype, numel in ((torch.bfloat16, 3_000_001), (torch.float32, 1_500_003))
    ]
    frames = []
    for tensors in sets:
        frames.append([slot_for(tensor) for tensor in tensors])
        for tensor, slot in zip(tensors, frames[-1]):
            route.encode_frames([tensor], "cascade", 1024, [slot])
    streams, results = where.HERE.streams(2), []
    for turn in range(ROUNDS):
        for stream, tensors, wanted in zip(streams, sets, frames):
            tensor = tensors[turn % len(tensors)]
            with where.HERE.on(stream):
                slot, out, sums = slot_for(tensor), torch.empty_like(tensor), torch.empty_like(tensor)
                status = new_status(tensor.device)
                route.encode_frames([tensor], "cascade", 1024, [slot])
                route.decode_frames([slot], 1024, [out], status)
                route.decode_sum_frames([slot, slot], 1024, tensor.dtype, sums, status)
                results.append((stream, tensor, wanted[turn % len(tensors)], slot, out, sums, status))
    for stream, tensor, frame, slot, out, sums, status in results:
        with where.HERE.on(stream):
            where.HERE.finish()
            raise_failure(status)
            assert same_bits(slot, frame) and same_bits(out, tensor)
            assert same_bits(sums, (tensor.float() + tensor.float()).to(tensor.dtype))


def test_one_multiprocessor_is_free(route: CudaBackend) -> None:
    """A chunk waits for earlier chunks only, so all kernels end on one multiprocessor, while the others are held."""
    tensor = words(where.HERE.size(40_000_001), torch.bfloat16, 5)
    slot, out, sums = slot_for(tensor), torch.empty_like(tensor), torch.empty_like(tensor)

    def calls() -> torch.Tensor:
        status = new_status(tensor.device)
        for code in ("wide", "cascade"):
            route.encode_frames([tensor], code, 1024, [slot])
            route.decode_frames([slot], 1024, [out], status)
        route.decode_sum_frames([slot] * 3, 1024, tensor.dtype, sums, status)
        return status

    def spoil() -> None:
        for memory in (slot, out.view(torch.uint8), sums.view(torch.uint8)):
            memory.fill_(0x5C)

    raise_failure(calls())  # first launches have a test of their own
    spoil()
    (stream,) = where.HERE.streams(1)
    with where.HERE.spinning(), where.HERE.on(stream):
        status = calls()
        where.HERE.finish(8)
    raise_failure(status)
    assert same_bits(out, tensor)
    assert same_bits(sums, (tensor.float() + tensor.float() + tensor.float()).bfloat16())


@pytest.mark.parametrize("name", [f"cuda-{name}" for name in ROUTES])
def test_first_launches_behind_a_spinning_kernel(name: str) -> None:
    """In a process of its own: loading a kernel at its first launch would wait for the device, and so for the spinning kernel."""
    if where.missing():
        pytest.skip(where.missing())
    command = [sys.executable, str(FIRST_LAUNCH), name.removeprefix("cuda-")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=FIRST_SECONDS * where.PATIENCE)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.bfloat16, 2_200_000_123), (torch.float8_e4m3fn, (1 << 32) + 4099)], ids=["bf16", "e4m3"]
)
def test_more_than_4_gib(route: CudaBackend, dtype: torch.dtype, numel: int) -> None:
    """More bytes than 32 bits count, and more elements."""
    numel = where.HERE.size(numel)
    tile = words(min(numel, 1 << 26), dtype, 9).view(torch.uint8)
    tensor = torch.empty(numel, dtype=dtype, device=where.HERE.device)
    for turn, piece in enumerate(tensor.view(torch.uint8).split(tile.numel())):
        piece.copy_(tile[: piece.numel()])
        piece[turn % piece.numel()] ^= 255  # no two pieces are equal
    slot = torch.empty(compress_bound(numel, dtype), dtype=torch.uint8, device=tensor.device)
    overflows = torch.zeros(1, dtype=torch.int32, device=tensor.device)
    out, status = torch.zeros_like(tensor), new_status(tensor.device)
    route.encode_frames([tensor], "cascade", 1024, [slot], overflows)
    route.decode_frames([slot], 1024, [out], status)
    raise_failure(status)
    assert not overflows.item()
    assert same_bits(out, tensor)


def test_capture_and_replay(route: CudaBackend) -> None:
    """A graph codes what its input holds when it is replayed."""
    inputs = [words(where.HERE.size(1_000_003), torch.bfloat16, seed) for seed in range(4)]
    static, slot, out = inputs[0].clone(), slot_for(inputs[0]), torch.empty_like(inputs[0])
    sums, status = torch.empty_like(static), new_status(static.device)
    overflows = torch.zeros(1, dtype=torch.int32, device=static.device)

    def calls() -> None:
        route.encode_frames([static], "cascade", 1024, [slot], overflows)
        route.decode_frames([slot], 1024, [out], status)
        route.decode_sum_frames([slot, slot], 1024, static.dtype, sums, status)

    calls()
    replay = where.HERE.captured(calls)
    for tensor in [*inputs, inputs[1]]:
        static.copy_(tensor)
        out.zero_()
        sums.zero_()
        replay()
        where.HERE.finish()
        raise_failure(status)
        assert not overflows.item()
        assert same_bits(out, tensor)
        assert same_bits(sums, (tensor.float() + tensor.float()).bfloat16())
