"""Jobs that go on with other processes, and one process with FSDP2 and DeepSpeed: all ranks of a default group begin together."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from fsdp_lab import spoken
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

from ds_zipccl import fsdp

#: The processes of each default group, in the order of their ranks: 1 fails, 2 takes its place; 1 comes back.
LIVES = [(0, 1), (0, 2), (2, 0), (1, 2, 0)]


def enter(store: dist.Store, name: str, rank: int, ranks: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


@runner.together(3)
def processes_join_survivors(process: int, processes: int) -> None:
    """A process that has lived in a group before begins as one that has not, with another section too."""
    store = c10d._get_default_store()
    dist.destroy_process_group()
    for life, members in enumerate(LIVES):
        if process in members:
            enter(store, f"life {life}", members.index(process), len(members))
            torch.manual_seed(0)
            model = fully_shard(torch.nn.Linear(256, 256, bias=False))
            with spoken() as said:
                fsdp.apply(model, {"block": 256 << life % 2, "mode": "always", "min_bytes": 0})
            assert said.getvalue().count("] on, codes") == (process == members[0])
            for _ in range(2):
                model(torch.ones(2, 256)).sum().backward()
            assert float(model.weight.grad.full_tensor()[0, 0]) == 4
            dist.destroy_process_group()
    enter(store, "end", process, processes)


@runner.together(2)
def one_job_of_both(rank: int, ranks: int) -> None:
    """DeepSpeed's engine and a model of FSDP2 share the section and what was measured with it, whichever comes first."""
    import deepspeed
    from deepspeed.comm import comm as deepspeed_comm

    import ds_zipccl.integration.backend as backend
    from ds_zipccl.integration import job

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an unused operator that takes a minute to build
    deepspeed.init_distributed("gloo")
    found, section = deepspeed_comm.cdb, {"enabled": True, "min_bytes": 0}
    assert type(found) is backend.ZipcclBackend
    steps = [
        lambda given: found.configure(given, 2),
        lambda given: fsdp.apply(fully_shard(torch.nn.Linear(8, 8)), given),
    ]
    for first, second in (steps, steps[::-1]):
        job._of_process, found.job = None, job.Job()
        with spoken() as said:
            first(section)
            for given in ({**section, "block": 256}, {"enabled": False}):
                with pytest.raises(ValueError, match=r"already runs with .*give them the same section"):
                    second(given)
            assert found.job.config is None or first is steps[0], "DeepSpeed stays plain until its engine comes"
            second(dict(section))
            second(None)
        assert said.getvalue().count("] on, codes") == (rank == 0)
        assert found.job is job.of_process() and found.job.zero_stages == {2} and found.job.untraced


test_survivors = runner.programs(__name__)

WORKER = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from ds_zipccl import fsdp
attempt, path = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
store, rank, ranks = next(dist.rendezvous("env://"))  # gloo may take the addresses of the attempt before
dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=ranks)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
begin = 0
if os.path.exists(path):
    saved = torch.load(path)
    begin = saved.pop("step")
    model.load_state_dict(saved)
fully_shard(model)
if sys.argv[2] == "coded":
    fsdp.apply(model, {"mode": "always", "min_bytes": 0})
for step in range(begin, 4):
    torch.manual_seed(step * 2 + rank)
    loss = model(torch.randn(8, 256)).square().mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if not rank:
        torch.save({**whole, "step": step + 1}, path)
    dist.barrier()
    if (rank, attempt, step) == (1, 0, 1):
        os._exit(1)
if not rank:
    print("ATTEMPT", attempt, "LOSS", loss.item().hex(), "WEIGHT", whole["1.weight"].double().sum().item().hex())
dist.destroy_process_group()
"""


@pytest.mark.full(reason="eight interpreters")
def test_torchrun_restarts_a_job(tmp_path: Path) -> None:
    """A worker dies once: torchrun starts all of them again, on the store of the first attempt."""
    program, ends = tmp_path / "worker.py", []
    program.write_text(WORKER)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    runs = [[*torchrun, str(program), str(tmp_path / mode), mode] for mode in ("plain", "coded")]
    for status, said, wrong in runner.whole_programs(*runs, timeout=240):
        assert status == 0, wrong
        ends += re.findall("ATTEMPT 1 .*", said)
        assert said.count("] on, codes") in (0, 2)
    assert len(ends) == 2 and ends[0] == ends[1]
