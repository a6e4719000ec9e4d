"""Collectives on tensors whose frames go through host memory. Here the host stands for the device, with the emulated CUDA kernels; with a
GPU it is one. :mod:`test_side_stream` has the order of a device's work.

NCCL takes no two ranks of one GPU: there a group of one rank passes, and two ranks on one GPU are on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import emulation
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from levels import in_one_level
from moves import CODED, wait
from operations import arguments

from ds_zipccl import comm, kernels
from ds_zipccl.comm.transport import staging
from ds_zipccl.comm.transport.staging import HostStaging
from ds_zipccl.comm.work import CommError
from ds_zipccl.telemetry import counters

#: Collectives that gloo has too.
NAMES = (
    "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "all_reduce", "reduce",
    "reduce_scatter_tensor", "reduce_scatter",
)  # fmt: skip
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
    everyone = [
        torch.randn(ranks * 5000, generator=torch.Generator().manual_seed(peer)).bfloat16() for peer in range(ranks)
    ]
    own = everyone[rank].to(device)
    for name in NAMES:
        (got, *given), (wanted, *plain) = (arguments(one, ranks)[name] for one in (own, everyone[rank]))
        if name == "all_to_all":  # whose lists gloo lacks before torch 2.12
            swapped = torch.empty_like(torch.cat(wanted))
            dist.all_to_all_single(swapped, torch.cat(*plain))
            wanted = swapped.chunk(ranks)
        else:
            getattr(dist, name)(wanted, *plain)
        wait(getattr(comm, name)(got, *given, async_op=name == "all_gather_into_tensor", config=CODED))
        if name != "reduce" or rank == 1:
            pairs = [(got, wanted)] if isinstance(got, torch.Tensor) else zip(got, wanted, strict=True)
            assert all(torch.equal(one.cpu(), other) for one, other in pairs), name

    total, config = in_one_level(everyone), replace(CODED, reduction="fp32")
    summed, shard = own.clone(), torch.empty_like(own.chunk(ranks)[rank])
    comm.all_reduce(summed, config=config)
    comm.reduce_scatter_tensor(shard, own, config=config)
    assert torch.equal(summed.cpu(), total) and torch.equal(shard.cpu(), total.chunk(ranks)[rank])

    after, received = (rank + 1) % ranks, torch.empty_like(own)
    handle = comm.isend(own, after, config=CODED)
    comm.recv(received, (rank - 1) % ranks, config=CODED)
    handle.wait()
    assert torch.equal(received.cpu(), everyone[rank - 1])
    rows = counters.rows()
    assert len(rows) >= len(NAMES) + 2 and all(row["calls"] and not row["passed"] for row in rows), rows
    assert len(staged) > len(NAMES), "frames took another way"


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


def a_group_of_one(rank: int, ranks: int) -> None:
    group = dist.new_group([0], backend="nccl")
    tensor = torch.randn(100_000, device="cuda").bfloat16()
    whole, before = torch.empty_like(tensor), tensor.clone()
    comm.all_gather_into_tensor(whole, tensor, group, config=CODED)
    comm.all_reduce(tensor, group=group, config=CODED)
    assert torch.equal(whole, before) and torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("program", "ranks"), [(order_on_a_gpu, 2), (a_group_of_one, 1)], ids=["order-cuda", "one_rank-cuda"]
)
def test_on_a_gpu(program: Callable[[int, int], None], ranks: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    runner.run(program, ranks)
