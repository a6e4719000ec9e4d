"""The package's code for CUDA tensors, unchanged, on the simulated GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sim import programs
from sim.device import mine

from ds_zipccl import codecs, devices, tensors
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.cuda.jobs import GatherTable, Parameter
from ds_zipccl.kernels.cuda.status import new_status, raise_failure
from on_sim import world
from on_sim.world import noticed


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


def parameters(rank: int, ranks: int, route: CudaBackend, numels: tuple[int, ...], waits: bool) -> int:
    """A ZeRO-3 gather of several parameters: sizes agreed once, then gathers without a host wait, in place. Returns
    the host waits of the gathers."""
    device = torch.device("cuda", rank)
    runtime = devices.runtime(device)
    assert runtime is not None
    shards = [words(10 * rank + at, numel, torch.bfloat16).to(device) for at, numel in enumerate(numels)]
    headers = tensors.filled(32 * len(numels), 0, torch.uint8, device)
    route.encode_frames(shards, "cascade", 1024, list(headers.view(-1, 32).unbind()))  # no room: headers alone
    needed = headers.view(torch.int64).view(-1, 4)[:, 3].contiguous()
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    agreed = [-(-size // 512) * 512 for size in needed.tolist()]
    listed = [Parameter(numel, size) for numel, size in zip(numels, agreed, strict=True)]
    table = GatherTable(listed, torch.bfloat16, 1024, ranks)

    streams = [runtime.Stream(device) for _ in range(3)]
    encoding, wire, decoding = streams
    staging = tensors.empty(table.part_bytes * ranks, torch.uint8, device)
    part = staging[rank * table.part_bytes : (rank + 1) * table.part_bytes]
    outs = [tensors.empty(ranks * numel, torch.bfloat16, device) for numel in numels]
    for out, shard in zip(outs, shards, strict=True):
        out.view(ranks, -1)[rank].copy_(shard)
    caller = runtime.current_stream(device)
    status = new_status(device)
    before = len(device_waits())
    done = caller.record_event()
    for _ in range(3):
        encoding.wait_event(caller.record_event())
        encoding.wait_event(done)
        with runtime.stream(encoding):
            route.encode_gather([out.view(ranks, -1)[rank] for out in outs], "cascade", table, part)
        if waits:
            wire.wait_event(encoding.record_event())
        with runtime.stream(wire):
            dist.all_gather_into_tensor(staging, part)
        decoding.wait_event(wire.record_event())
        with runtime.stream(decoding):
            route.decode_gather(staging, table, outs, rank, status)
        done = decoding.record_event()
    caller.wait_event(done)
    found = len(device_waits()) - before
    raise_failure(status)
    for at, (out, numel) in enumerate(zip(outs, numels, strict=True)):
        wanted = torch.cat([words(10 * peer + at, numel, torch.bfloat16) for peer in range(ranks)])
        assert torch.equal(out.cpu(), wanted)
    return found


def device_waits() -> list[object]:
    return mine().counters.waits  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_of_agreed_sizes(route: CudaBackend, ranks: int) -> None:
    for seed in range(3):
        assert world.run(parameters, ranks, route, (300, 17, 1500), True, seed=seed).values == [0] * ranks
    fault = noticed(parameters, ranks, route, (300, 17), False)
    assert fault.kind == "race" and "all_gather" in str(fault) and "zipccl_encode_bf16_cascade" in str(fault)


@pytest.mark.parametrize("seeds", [2, pytest.param(30, marks=pytest.mark.full(reason="more seeds"))])
def test_emulated_kernels(route: CudaBackend, seeds: int) -> None:
    """The package's own kernels, through the route of CUDA tensors."""
    for seed in range(seeds):
        modes = world.Modes(declared=seed % 2 == 0)
        got = world.run(programs.gathers, 2, route, route=route, seed=seed, modes=modes)
        assert got.counters[0].launches["zipccl_encode_bf16_cascade"] == 3
        world.run(programs.sums, 2, route, route=route, seed=seed, modes=modes)
