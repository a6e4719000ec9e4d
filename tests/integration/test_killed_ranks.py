"""A rank that is killed at any phase of a job with NCCL auto, over the stand-in of benchmarks/links/slots.py: the others end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_zipccl import comm, kernels
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.device import first_steps, gather, sizes, sums
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import start_up

CONFIG = ZipcclConfig(enabled=True, nccl="auto", nccl_min_bytes=0, min_bytes=0, mode="always", reduction="fp32")


def dies(owner: Any, name: str) -> Callable[[], None]:
    """From now on a call of the function kills this process."""
    assert hasattr(owner, name), name  # or nothing would call the plant
    return lambda: setattr(owner, name, lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL))


LATE = r"ranks \[2\] did not come within the timeout of the rendezvous store; see their output"
GONE = "Connection (closed|reset) by peer"
#: Phase -> the step of the job behind which the last rank gets the plant, the plant, and what the others say.
PHASES: dict[str, tuple[int, Callable[[], None], str]] = {
    "self-test": (-1, dies(kernels, "route"), LATE),
    "canary": (-1, dies(comm, "reduce_scatter_tensor"), LATE),
    "first steps": (1, dies(first_steps, "_move"), GONE),
    "decision": (2, dies(first_steps, "tell"), LATE),
    "agreement": (4, dies(sizes, "_to_host"), GONE),
    "coded gather": (4, dies(gather, "send_planned"), GONE),
    "sum": (4, dies(sums, "all_reduce"), GONE),
    "destroy": (5, dies(dist, "destroy_process_group"), ""),
}


def job(rank: int, ranks: int, phase: str) -> None:
    step, plant, _ = PHASES[phase]
    dist.barrier()  # a rank that dies first of all may find others on their way into the group
    topology.here = lambda: str(rank)
    _get_default_store().set_timeout(timedelta(seconds=3))  # gloo sees at once that a peer is gone
    own = torch.randn(20_000, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for number in range(-1, 6):
        if rank == ranks - 1 and step == number:
            plant()
        if number < 0:
            config = start_up.with_all_kernels(CONFIG, own.device)
            engine.settle(config, own.device)
        comm.all_gather_into_tensor(own.new_empty(ranks * own.numel()), own, config=config, role="zero_param")
        comm.all_reduce(own.clone(), config=config, role="zero_grad")
        engine.end_step(job)


@pytest.mark.full(reason="seconds each")
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_killed(phase: str, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    monkeypatch.setattr(runner, "GRACE", 12.0)
    begin = time.monotonic()
    with pytest.raises(runner.RankFailure) as caught:
        runner.run(job, 3, phase, backend=slots.NAME, timeout=90)
    assert time.monotonic() - begin < 30
    ends = dict(re.findall(r"^rank (\d): (.*?)(?=^rank \d: |\Z)", str(caught.value), re.M | re.S))
    record_property("outcome", "; ".join(f"rank {rank}: {end.strip().splitlines()[-1]}" for rank, end in ends.items()))
    assert ends.pop("2").startswith("died without a word")
    said = PHASES[phase][2]
    assert [rank for rank in ends if re.search(said, ends[rank])] == (["0", "1"] if said else []), ends
