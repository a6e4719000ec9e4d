"""Counts of a step on NCCL groups: the docs have those of the schedules, and the simulated GPU counts the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import levels
import pytest
import torch
import torch.distributed as dist
from commands import python
from on_sim import launcher, world
from on_sim.cases import weights
from places import PYTHONPATH, ROOT
from sim.device import machine

from ds_zipccl import comm, kernels
from ds_zipccl.benchmarks.comm import counted
from ds_zipccl.comm.group_state import resolve_group

MODULE = "ds_zipccl.benchmarks.comm.counted"
#: Few words for the emulated kernels, but frames of a layer that do not fit 1 MiB of staging, which make several fragments, and several
#: size agreements of a bucket.
LAYER, BUCKET = (640_000, 240_000), 600_000
SMALL = f"""
import json
from dataclasses import replace
from ds_zipccl.benchmarks.comm import counted
counted.LAYER, counted.GATHERS, counted.EMBEDDINGS, counted.LAYERS, counted.BUCKET = ({LAYER},), {{}}, (), 1, {BUCKET}
counted.TOPOLOGIES = ((2, 2),)
counted.CONFIG = replace(counted.CONFIG, staging_mib=1, nccl_min_bytes=0)
print(json.dumps(counted.rows()))
"""


@pytest.mark.full(reason="two steps of 7B")
def test_the_docs_have_the_counts_of_today(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    result = python("-m", MODULE, "--json", str(path), PYTHONPATH=PYTHONPATH)
    assert result.returncode == 0, result.stderr
    wanted = json.loads((ROOT / "docs" / "results" / "nccl_counts.json").read_text())["rows"]
    assert json.loads(path.read_text())["rows"] == wanted


def collectives(kind: str) -> int:
    """Return how many collectives of a kind this rank of the simulated GPU has started."""
    (communicator,) = machine().communicators.values()
    return sum(call.kind == kind for call in communicator.calls[dist.get_rank()])


def small(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of gathers of a layer and of exchanges of a bucket."""
    levels.pretend(levels.nodes_of(2, 2))
    config = replace(counted.CONFIG, staging_mib=1, nccl_min_bytes=0)
    shards = [weights(rank, numel // ranks).to(f"cuda:{rank}") for numel in LAYER]
    agreed = [comm.parameter(resolve_group(None), "cuda", str(len(shard)), len(shard)) for shard in shards]
    comm.agree_sizes(list(zip(agreed, shards, strict=True)), config=config)
    own = torch.cat(shards)
    whole = own.new_empty(sum(LAYER))
    comm.all_gather_into_tensor(whole, own, parameters=agreed, config=config, role="zero_param")
    gathers = collectives("all_gather")
    bucket = weights(rank, BUCKET).to(own.device)
    comm.reduce_scatter_tensor(bucket.new_empty(BUCKET // ranks), bucket, config=config, role="zero_grad")
    return gathers, collectives("all_to_all")


@pytest.mark.full(reason="880,000 elements take the emulated kernels long")
def test_the_simulated_gpu_counts_the_same() -> None:
    kernels.route()
    result = python("-c", SMALL, PYTHONPATH=PYTHONPATH)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["fragments_layer"] > 1 and row["collectives_bucket"] > 1 and row["waits_bucket"] > 1
    outcome = world.run(small, 4, modes=world.Modes(races=False), route=launcher.route())
    assert outcome.values == [(row["fragments_layer"], row["collectives_bucket"])] * 4
