"""Collectives on tensors whose frames go through host memory. Here the host stands for the device, with the emulated CUDA kernels; with a
GPU it is one. :mod:`test_side_stream` has the order of a device's work.

NCCL takes no two ranks of one GPU: there a group of one rank passes, and two ranks on one GPU are on gloo.
"""

from __future__ import annotations

from dataclasses import replace

import emulation
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import CODED

from ds_zipccl import comm, kernels
from ds_zipccl.comm.host import staging
from ds_zipccl.comm.host.staging import HostStaging
from ds_zipccl.comm.work import CommError
from ds_zipccl.telemetry import counters

DEVICES = ["cpu", "cpu without kernels", "cuda", "cuda without kernels"]


def _stage(where: str) -> str:
    """Let frames of this device go through the host; its type."""
    device, _, without = where.partition(" ")
    staging.STAGED = {device}
    if without:
        staging._frame_kernels = lambda device, route: None
    elif device == "cpu":
        kernels.ROUTES = {"cpu": {"emulated": emulation.load}}
    return device


def every_collective(rank: int, ranks: int, where: str) -> None:
    device, staged = _stage(where), []
    encode = HostStaging.compress
    HostStaging.compress = lambda *arguments: staged.append(1) or encode(*arguments)
    generator = torch.Generator().manual_seed(7)
    contributions = [torch.randn(ranks * 5000, generator=generator).bfloat16() for _ in range(ranks)]
    own = contributions[rank].to(device)
    shards = [list(tensor.chunk(ranks)) for tensor in contributions]

    gathered = torch.empty(ranks * own.numel(), dtype=own.dtype, device=device)
    handle = comm.all_gather_into_tensor(gathered, own, None, True, config=CODED)
    handle.wait()
    assert torch.equal(gathered.cpu(), torch.cat(contributions))

    swapped = torch.empty_like(own)
    comm.all_to_all_single(swapped, own, config=CODED)
    assert torch.equal(swapped.cpu(), torch.cat([shards[peer][rank] for peer in range(ranks)]))

    sent = own.clone()
    comm.broadcast(sent, ranks - 1, config=CODED)
    assert torch.equal(sent.cpu(), contributions[-1])

    wanted = contributions[0].float()
    for tensor in contributions[1:]:
        wanted = wanted + tensor.float()
    for reduction in ("fp32", "match"):
        config = replace(CODED, reduction=reduction)
        summed = own.clone()
        comm.all_reduce(summed, config=config)
        shard = torch.empty_like(own.chunk(ranks)[rank])
        comm.reduce_scatter_tensor(shard, own, config=config)
        if reduction == "fp32" or ranks == 2:
            assert torch.equal(summed.cpu(), wanted.bfloat16())
            assert torch.equal(shard.cpu(), wanted.bfloat16().chunk(ranks)[rank])
        else:
            plain = contributions[rank].clone()
            dist.all_reduce(plain)
            assert torch.equal(summed.cpu(), plain)

    after, received = (rank + 1) % ranks, torch.empty_like(own)
    handle = comm.isend(own, after, config=CODED)
    comm.recv(received, (rank - 1) % ranks, config=CODED)
    handle.wait()
    assert torch.equal(received.cpu(), contributions[(rank - 1) % ranks])
    rows = counters.rows()
    assert len(rows) >= 6 and all(row["calls"] and not row["passed"] for row in rows), rows
    assert len(staged) > 8, "frames took another way"


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(where: str, ranks: int) -> None:
    if where.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    runner.run(every_collective, ranks, where)


def order_on_a_gpu(rank: int, ranks: int) -> None:
    """A gather between two long kernels of the caller: it follows the first, which writes its input, and does not wait for the second."""
    _stage("cuda")
    torch.cuda.init()
    wanted = torch.randn(ranks * 500_000, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()
    own, output = torch.zeros_like(wanted.chunk(ranks)[rank]), torch.zeros_like(wanted)
    for _ in range(2):  # the first call builds the kernels
        own.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(100_000_000)
        own.copy_(wanted.chunk(ranks)[rank])
        handle = comm.all_gather_into_tensor(output, own, None, True, config=CODED)
        torch.cuda._sleep(6_000_000_000)
        later = torch.cuda.Event()
        later.record()
        handle.wait()
    assert not later.query(), "the gather waited for work that was queued after the call"
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(output, wanted), "the outputs are not written"
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CommError, match="while a graph of cuda"):
        comm.all_gather_into_tensor(output, own, config=CODED)
    comm.all_gather_into_tensor(output, own, config=CODED)


@pytest.mark.parametrize("where", ["cuda"])
def test_order(where: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    runner.run(order_on_a_gpu, 2)


def a_group_of_one(rank: int, ranks: int) -> None:
    group = dist.new_group([0], backend="nccl")
    tensor = torch.randn(100_000, device="cuda").bfloat16()
    whole, before = torch.empty_like(tensor), tensor.clone()
    comm.all_gather_into_tensor(whole, tensor, group, config=CODED)
    comm.all_reduce(tensor, group=group, config=CODED)
    assert torch.equal(whole, before) and torch.equal(tensor, before)


def test_a_group_of_one_on_nccl() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    runner.run(a_group_of_one, 1)
