"""Bytes between nodes that ``plan`` predicts, against those that the schedules of NCCL groups send on CPUs: two nodes of four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import levels
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from commands import outcome

from ds_zipccl import comm
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.codecs import compress
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import settled
from ds_zipccl.policy.cost_model import RDMA_REACH, DeviceProfile
from ds_zipccl.telemetry import counters

NODES, EACH = 2, 4
CONFIG = ZipcclConfig(enabled=True, mode="always", nccl="on", reduction="fp32", zero3_base="node")
#: Elements of a shard: a gather has 33 MB, as the smallest that DeepSpeed makes of a 7B model.
SHARD = 1 << 21
GATHER, SUM = "all_gather_into_tensor", "reduce_scatter_tensor"


def counted(rank: int, ranks: int) -> dict[str, tuple[float, float]]:
    """Kind of call -> (bytes that a node has sent to the other, bytes without coding by bytes of frames)."""
    levels.pretend(levels.nodes_of(NODES, EACH))
    state = group_state(None)
    assert state is not None
    state.device_profiles["cpu", slots.NAME] = DeviceProfile(RDMA_REACH * 100e9 / 8)
    words = (0.02 * torch.randn(SHARD, generator=torch.Generator().manual_seed(rank))).to(torch.bfloat16)
    one = comm.parameter(dist.group.WORLD, "cpu", "weight", SHARD, torch.bfloat16)
    (base,) = comm.allocate_bases([(SHARD, torch.bfloat16)], "node", dist.group.WORLD)
    one.hold(base)
    whole, found = torch.empty(ranks * SHARD, dtype=torch.bfloat16), {}

    def called(kind: str, call: Any) -> None:
        counters.reset()
        comm.agree_sizes([(one, words)], config=CONFIG)
        slots.Transport.between = 0
        call()
        (row,) = [row for row in counters.rows() if row["op"] in (GATHER, SUM)]
        found[kind] = slots.Transport.between, row["logical_bytes"] / max(1, row["wire_bytes"])

    def gather() -> None:
        comm.all_gather_into_tensor(whole, words, config=CONFIG, role="zero_param", parameters=[one])

    called("full", gather)
    called("copy", gather)
    called("another copy", gather)
    words.add_(1e-4 * words.roll(1))
    one.forget()
    called("difference", gather)
    called("copy of a difference", gather)
    called("sum", lambda: comm.reduce_scatter_tensor(words.clone(), whole, config=CONFIG, role="zero_grad"))
    inside = (EACH * whole.float()).to(
        torch.bfloat16
    )  # the sums of a node, whose ranks give equal words: these frames are sent
    found["sum"] = found["sum"][0], inside.nbytes / compress(inside).numel()
    return found


def test_bytes_between_nodes_are_those_that_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "gaining_sums", lambda *more: (("bfloat16",), 0))
    (sent, *others) = runner.run(counted, NODES * EACH, backend=slots.NAME, timeout=300)
    assert all(other.keys() == sent.keys() for other in others)
    assert sent["copy"][0] < 100_000, "hashes of the first copy of a size"
    assert sent["another copy"][0] == sent["copy of a difference"][0] == 0
    assert sent["full"][1] > 1.3 and sent["difference"][1] > 2 and sent["sum"][1] > 1.3
    words = f"plan --params {NODES * EACH * SHARD} --gpus {NODES * EACH} --gpus-per-node {EACH} --network 100gbit/node --live 0"

    def planned(*more: object) -> dict[str, float]:
        rows = outcome(tmp_path, words, "--gpu-profile", "assumed-1.0", *map(str, more))["rows"]
        return {row["what"]: 1e9 * row["between_gb"] for row in rows if row["variant"] == "coded"}

    full = planned("--ratio", sent["full"][1])
    node = planned("--zero3-base", "node", "--delta-ratio", sent["difference"][1])
    sums = planned("--ratio", sent["sum"][1])
    assert full["parameters, forward"] == pytest.approx(sent["full"][0], rel=0.02)
    assert node["parameters, first"] == pytest.approx(sent["difference"][0], rel=0.02)
    assert node["parameters, again"] == 0
    assert sums["gradients"] == pytest.approx(sent["sum"][0], rel=0.02)
