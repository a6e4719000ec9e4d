"""Real DeepSpeed engines on two nodes of two ranks, with `"reduction": "fp32"`: sums go in two levels, in the documented order."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import levels
import pytest
import torch
import torch.distributed as dist
from engines import SOURCES, Lab, bits, rank_program
from programs import launch, reference

from ds_zipccl.comm import topology
from ds_zipccl.telemetry import counters

MIN_BYTES = 4096
RANKS, NODES = 4, levels.nodes_of(2, 2)
CODED = {
    mode: f'{{"enabled": true, "mode": "{mode}", "reduction": "fp32", "min_bytes": {MIN_BYTES}}}'
    for mode in ("always", "auto")
}

# ---- cases ---------------------------------------------------------------------------------------------------------

#: Stage -> settings, and the operation that sums gradients.
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "zero2": ({"reduce_bucket_size": 20_000, "overlap_comm": True}, "reduce_to_owners"),
    "zero3": ({"stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 60_000}, "reduce_scatter_tensor"),
}
#: Orders of the sums of a plain run, by the host.
ORDERS: dict[str, Callable[..., torch.Tensor]] = {
    "two levels": lambda everyone, average: levels.in_two_levels(everyone, NODES, average),
    "one level": levels.in_one_level,
}


def by_host(patch: pytest.MonkeyPatch, order: Callable[..., torch.Tensor]) -> None:
    """Until ``patch`` ends, DeepSpeed's sums of large messages are made by the host, from the contributions of all ranks."""
    from deepspeed.comm.torch import TorchBackend

    plain, summed = {}, dist.ReduceOp.SUM

    def total(self: Any, tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
        everyone = [torch.empty_like(tensor).view(-1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor.detach().reshape(-1), group)
        return order(everyone, self._reduce_op(op) == dist.ReduceOp.AVG)

    def all_reduce(self: Any, tensor: Any, op: Any = summed, group: Any = None, async_op: bool = False) -> Any:
        if tensor.nbytes < MIN_BYTES:
            return plain["all_reduce"](self, tensor, op, group, async_op)
        tensor.copy_(total(self, tensor, op, group).view(tensor.shape))
        return _Done()

    def reduce_scatter_tensor(
        self: Any, output_tensor: Any, input_tensor: Any, op: Any = summed, group: Any = None, async_op: bool = False
    ) -> Any:
        if input_tensor.nbytes < MIN_BYTES:
            return plain["reduce_scatter_tensor"](self, output_tensor, input_tensor, op, group, async_op)
        shards = total(self, input_tensor, op, group).chunk(dist.get_world_size(group))
        output_tensor.copy_(shards[dist.get_rank(group)].view(output_tensor.shape))
        return _Done()

    for replacement in (all_reduce, reduce_scatter_tensor):
        plain[replacement.__name__] = getattr(TorchBackend, replacement.__name__)
        patch.setattr(TorchBackend, replacement.__name__, replacement)


class _Done:
    def wait(self) -> None:
        pass


def train(lab: Lab, stage: str, order: str) -> None:
    """Train as the environment says, or with sums by the host in an order."""
    settings, op = STAGES[stage]
    with pytest.MonkeyPatch.context() as patch:
        if order:
            by_host(patch, ORDERS[order])
        lab.train(lab.engine(zero={"stage": int(stage[-1]), **settings}), 3)
    if not order:
        (row,) = [row for row in counters.rows() if (row["role"], row["op"]) == ("zero_grad", op)]
        assert row["calls"] >= 3 and set(row["reasons"]) <= {"smaller than min_bytes"}
    lab.ends("trained", {})


CASES = {
    f"{stage} {order}".strip(): functools.partial(train, stage=stage, order=order)
    for stage in STAGES
    for order in ("", *ORDERS)
}

# ---- tests ---------------------------------------------------------------------------------------------------------


Runs = dict[str, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Results of each rank by case: of the modes of coded runs, and of the plain run."""
    folder = tmp_path_factory.mktemp
    found = {mode: launch(__file__, RANKS, folder(mode), *STAGES, DS_ZIPCCL=CODED[mode]) for mode in CODED}
    by_host = [case for case in CASES if case not in STAGES]
    sources = (*SOURCES, Path(levels.__file__))
    return found | {"plain": reference(__file__, RANKS, folder("plain"), *by_host, sources=sources)}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.full(reason="four ranks, three launches; comm/test_owners.py has the sums")
def test_training_has_the_bits_of_the_documented_order(runs: Runs, stage: str) -> None:
    by_host = {order: bits(runs["plain"][f"{stage} {order}"]) for order in ORDERS}
    for mode in CODED:
        assert bits(runs[mode][stage]) == by_host["two levels"], mode
    assert by_host["one level"] != by_host["two levels"], "or the levels would not have been told apart"


if __name__ == "__main__":
    topology.here = lambda: str(int(os.environ["RANK"]) // 2)  # read when DeepSpeed makes its backend
    rank_program(CASES)
