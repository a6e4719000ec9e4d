"""The files that a tensor passes on its way to the wire, as docs/architecture.md lists them: found by tracing real calls of DeepSpeed."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ranks as runner
import tiers
import torch
from on_sim import launcher, world
from places import ROOT

import ds_zipccl
from ds_zipccl import comm, kernels
from ds_zipccl.comm import work
from ds_zipccl.config import DEFAULT

PACKAGE = Path(ds_zipccl.__file__).parent
NUMEL = 1 << 19
MOST_FILES = 14
#: The heading of gathers that send nothing.
FROM_BASE = "`all_gather_into_tensor` of frozen parameters of ZeRO-3"
SECTION = '{"mode": "always"}'


def listed(heading: str) -> list[str]:
    """The files in the list of docs/architecture.md below a heading."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(rf"^### {heading}$(.*?)^#", page, flags=re.M | re.S)
    assert found is not None, f"docs/architecture.md has no heading {heading}"
    return re.findall(r"^\d+\. `(.+?)`", found[1], flags=re.M)


def holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value)
    )


def passed(call: Callable[[], Any]) -> list[str]:
    """The package's files with a function that was given a tensor during a call, alone or in a list."""
    files: set[str] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            arguments = inspect.getargvalues(frame)
            names = [*arguments.args, *filter(None, (arguments.varargs,))]
            given = [arguments.locals.get(name) for name in names]
            given += arguments.locals.get(arguments.keywords or "", {}).values()
            if any(map(holds_tensor, given)):
                files.add(file.relative_to(PACKAGE).as_posix())

    work.threads.run = lambda job: job()  # a profile is one thread's
    sys.setprofile(trace)
    call()
    sys.setprofile(None)
    return sorted(files)


def traced(rank: int, ranks: int, heading: str) -> list[str]:
    os.environ |= {"DS_ZIPCCL": SECTION, "DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    if heading == FROM_BASE:
        return from_base(deepspeed)
    whole = torch.randn(ranks * NUMEL, generator=torch.Generator().manual_seed(rank)).bfloat16()
    shard = torch.empty(NUMEL, dtype=torch.bfloat16)

    def call() -> None:
        if heading == "`all_gather_into_tensor`":
            deepspeed.comm.all_gather_into_tensor(whole, shard)
        else:
            deepspeed.comm.reduce_scatter_tensor(shard, whole)

    call()  # builds and decides
    assert type(deepspeed.comm.comm.cdb).__name__ == "ZipcclBackend"
    return passed(call)


def from_base(deepspeed: Any) -> list[str]:
    """The files of a forward of ZeRO-3 whose frozen weight is in its base since the step before."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 4, bias=False)
    ).bfloat16()
    model[0].weight.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[model[1].weight],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8192},
            "zipccl": {"enabled": True, "mode": "always"},
        },
    )
    losses: list[torch.Tensor] = []
    for _ in range(3):
        files = passed(lambda: losses.append(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).sum()))
        engine.backward(losses[-1])
        engine.step()
    return files


HEADINGS = ["`all_gather_into_tensor`", "`reduce_scatter_tensor`", FROM_BASE]


@pytest.mark.parametrize("heading", tiers.mostly_full(HEADINGS, HEADINGS[:1], "an engine each"))
def test_a_tensor_passes_the_files_that_the_page_lists_and_no_others(heading: str) -> None:
    first, second = runner.run(traced, 2, heading)
    assert first == second
    files = listed(heading)
    assert sorted(files) == first and len(files) <= MOST_FILES, (
        f"not on the page: {set(first) - set(files)}; on the page, but not passed: {set(files) - set(first)}"
    )


def on_gpu(rank: int, ranks: int, files: dict[int, list[str]]) -> None:
    config, device = replace(DEFAULT, mode="always", nccl="on", nccl_min_bytes=0), torch.device("cuda", rank)
    shard = torch.randn(1 << 14, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
    whole = torch.empty(ranks << 14, dtype=torch.bfloat16, device=device)
    comm.all_gather_into_tensor(whole, shard, config=config)  # decides
    files[rank] = passed(lambda: comm.all_gather_into_tensor(whole, shard, config=config))


def test_a_tensor_of_a_gpu_passes_the_files_that_the_page_lists_and_no_others() -> None:
    found: dict[int, list[str]] = {}
    kernels.route()  # the CPU's route is built, if at all, before a rank needs it
    world.run(on_gpu, 2, found, seed=0, route=launcher.route())
    files = listed("`all_gather_into_tensor` on an NCCL group")
    assert files[0] == "integration/backend.py", "the test calls the next file"
    assert sorted(files[1:]) == found[0] == found[1] and len(files) <= MOST_FILES
