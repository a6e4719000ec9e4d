"""Jobs that go on with other processes, and one process with FSDP2 and DeepSpeed: all ranks of a default group begin together."""

from __future__ import annotations

from datetime import timedelta

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
